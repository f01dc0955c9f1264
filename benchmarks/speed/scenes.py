# SPDX-License-Identifier: Apache-2.0
"""How long synthetic scenes take to make: laying them out on the host, rendering, photometry.

The host lays out the next batch while a GPU is busy, so a training step waits for the longer of the
two at most. The first call on a GPU compiles, and has a row of its own.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.measure import Call, cuda_peak_mib, measure, one_time, summarise
from benchmarks.suite import Work
from quadtree_attention.synthetic import (
    HomographyOptions,
    ProceduralTextures,
    SceneOptions,
    distort,
    homography_pairs,
    scene_pairs,
)
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.fused import plainly
from quadtree_attention.synthetic.layout import first_camera, place, second_camera
from quadtree_attention.synthetic.views import both_views

TEXTURES = 32
SAMPLES = (1, 2, 4)
WHOLE = ("scenes", "planes")
FIRST = "first call"  # of a process, or of another batch size: they may compile


def plan(options: Namespace) -> list[list[Work]]:
    """The first calls, then every part."""
    return [
        [Work({"part": part}, options.device, {"call": call})]
        for part, call in _calls(options).items()
    ]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Time until the device is done, of it that of the host, and memory."""
    part, call, cuda = work["part"], work.more["call"], work.device == "cuda"
    with plainly() if options.plain else nullcontext():
        if FIRST in part:
            return summarise([one_time(call, work.device)]) | {"peak_mib": None}
        (timing,) = measure(call, device=work.device, seconds=options.seconds_per_row)
        peak = cuda_peak_mib(call) if cuda and part in WHOLE else None
        values = timing | {"peak_mib": peak}
        if part in WHOLE:
            values["pairs_per_second"] = options.batch / timing["median_ms"] * 1e3
        if cuda:
            repeats = range(min(10, int(timing["repeats"])))
            times = [one_time(call, work.device, until_returned=True) for _ in repeats]
            values["host_ms"] = summarise(times)["median_ms"]
    return values


def _calls(options: Namespace) -> dict[str, Call]:
    """The parts; the layout is made on the host, views and photometry on the device."""
    textures = ProceduralTextures(TEXTURES).to(options.device)
    scenes = SceneOptions(samples=options.samples)
    planes = HomographyOptions(samples=options.samples)
    size, numbers = tuple(options.size), range(options.batch)

    def pairs(make: Any, kind: Any, batch: int = options.batch) -> Any:
        return make(textures, range(batch), size=size, options=kind)

    def layout() -> Any:
        draws = Draws(0, numbers)
        camera = first_camera(draws, size, scenes.focal)
        scene = place(draws, camera, scenes, len(textures))
        return scene, (camera, second_camera(draws, scene, camera, size, scenes))

    def views() -> Any:
        scene, cameras = made
        return both_views(scene, cameras, textures, scenes.samples)

    def photometric() -> Sequence[Any]:
        return [distort(image, numbers, view=view) for view in (0, 1)]

    made = layout()
    image = torch.rand(options.batch, 3, *size, device=options.device)
    another = options.batch + 3
    return {
        f"scenes, {FIRST}": partial(pairs, scene_pairs, scenes),
        f"planes, {FIRST}": partial(pairs, homography_pairs, planes),
        f"scenes, {FIRST} of another batch": partial(pairs, scene_pairs, scenes, another),
        "scenes": partial(pairs, scene_pairs, scenes),
        "layout": layout,
        "both views": views,
        "photometric, both views": photometric,
        "planes": partial(pairs, homography_pairs, planes),
    }
