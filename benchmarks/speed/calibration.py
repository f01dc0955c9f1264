# SPDX-License-Identifier: Apache-2.0
"""The packaged networks with K by attention mass beside their fixed K, in turns on a CPU.

K per layer comes from the results of `quality calibration`. A call is a forward pass of the whole
network on one pair of noise images; reading and resizing of images are not timed.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from benchmarks.measure import Call, inference
from benchmarks.result import read, read_all
from benchmarks.suite import Work
from quadtree_attention import models

IMAGES = {"match": (640, 480), "stereo": (480, 360)}  # width, height
CHANNELS = {"match": 1, "stereo": 3}
NETWORKS = {"match": "loftr_quadtree_small", "stereo": "sttr_quadtree_small"}


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    kind = "quality/calibration"
    found = [read(options.results, kind)] if options.results else list(read_all(kind).values())
    if not found:
        parser.error("argument --results: there is no result; run `quality calibration` first")
    options.found = [row for result in found for row in result["rows"]]


def plan(options: Namespace) -> list[list[Work]]:
    """All rows of a task are timed in turns."""
    found: dict[str, list[Work]] = {}
    for row in options.found:
        more = {"topk": row["details"]["topk"]}
        found.setdefault(row["case"]["task"], []).append(Work(row["case"], "cpu", more))
    return list(found.values())


def values(work: Work) -> dict[str, Any]:
    return {"image": list(IMAGES[work["task"]])}


def prepare(work: Work) -> Call:
    task = work["task"]
    network = models.create(NETWORKS[task], pretrained=True).eval()
    models.set_topk(network, work.more["topk"])
    width, height = IMAGES[task]
    seeded = torch.Generator().manual_seed(0)
    shape = (1, CHANNELS[task], height, width)
    pair = {f"image{i}": torch.rand(shape, generator=seeded) for i in range(2)}
    return inference(network, pair)
