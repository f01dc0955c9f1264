# SPDX-License-Identifier: Apache-2.0
"""Matching all pairs of some photographs on a CPU: `quadtree match --pairs` beside `quadtree sfm`.

Both read photographs and match the same pairs at the same size; starting up and writing files are
not counted. `sfm` begins with an empty cache. The CNN's part is that of `match --pairs`, which runs
it on both photographs of every pair. `--guided never` shows what guided matching costs on pairs
that it leaves as they are.
"""

from argparse import Namespace
from itertools import combinations

import torch

from benchmarks.measure import Call, use_threads
from benchmarks.result import ROOT
from benchmarks.suite import Work
from quadtree_attention.images import images_inside
from quadtree_attention.sfm.matching import PairMatcher, seen_size
from quadtree_attention.tasks.match.predictor import Matcher

DATA = ROOT.parent / "shared" / "data" / "free_multiview" / "lund_street" / "images"
PARTS = ("match --pairs", "match --pairs --guided never", "sfm", "CNN")


def plan(options: Namespace) -> list[list[Work]]:
    """All parts, timed in turns."""
    use_threads(options.threads, opencv=True)
    options.device = "cpu"
    paths = images_inside(options.data)[: options.photographs]
    pairs = list(combinations(paths, 2))
    more = {"pairs": pairs, "size": options.size}
    case = {"pairs": len(pairs), "photographs": len(paths)}
    return [[Work({"part": part, **case}, "cpu", more) for part in options.parts]]


def prepare(work: Work) -> Call:
    """The call to time."""
    pairs: list[tuple[str, str]] = work.more["pairs"]
    size: int = work.more["size"]
    if work["part"].startswith("match --pairs"):
        guided = "never" if work["part"].endswith("never") else "auto"
        matcher = Matcher.from_pretrained(device="cpu", size=size, guided=guided)
        return lambda: [len(found) for found in matcher.many(pairs)]
    cached = PairMatcher.from_pretrained(device="cpu", size=size)
    if work["part"] == "sfm":

        def match() -> None:
            cached.cache.clear()
            for pair in pairs:
                cached.run([cached.preprocess(*pair)])

        return match
    width, height = seen_size(cached.preprocess(*pairs[0]).sizes[0], size)  # type: ignore[attr-defined]

    @torch.inference_mode()
    def run() -> None:
        images = torch.rand(2, 1, height, width)
        for _ in pairs:
            cached.network.maps(images)

    return run
