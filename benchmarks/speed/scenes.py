# SPDX-License-Identifier: Apache-2.0
"""How long synthetic scenes take to make: laying them out on the host, rendering, photometry.

The host lays out the next batch while a GPU is busy, so a training step waits for the longer of the
two at most. The first call on a GPU compiles, and has a row of its own.
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.measure import cuda_peak_mib, measure, summarise
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
    calls = _calls(options)
    parts = [f"scenes, {FIRST}", f"planes, {FIRST}", f"scenes, {FIRST} of another batch", *calls]
    return [[Work({"part": part}, options.device, {"calls": calls})] for part in parts]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Time until the device is done, of it that of the host, and memory."""
    part, cuda = work["part"], options.device == "cuda"
    name, _, once = part.partition(", ")
    with plainly() if options.plain else nullcontext():
        if FIRST in once:
            more = 3 if "another" in once else 0
            begin = time.perf_counter()
            work.more["calls"][name](more=more)
            if cuda:
                torch.cuda.synchronize()
            return summarise([(time.perf_counter() - begin) * 1e3]) | {"peak_mib": None}
        call = work.more["calls"][part]
        (values,) = measure(call, device=options.device, seconds=options.seconds_per_row)
        values = dict(values) | {"peak_mib": None}
        if cuda:
            times = []
            for _ in range(min(10, int(values["repeats"]))):
                torch.cuda.synchronize()  # an idle device: nothing in its queue to wait for
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e3)
            values["host_ms"] = summarise(times)["median_ms"]
        if part in WHOLE:
            values["pairs_per_second"] = options.batch / values["median_ms"] * 1e3
            values["peak_mib"] = cuda_peak_mib(call) if cuda else None
    return values


def _calls(options: Namespace) -> dict[str, Any]:
    """The parts; the layout is made on the host, views and photometry on the device."""
    textures = ProceduralTextures(TEXTURES).to(options.device)
    scenes = SceneOptions(samples=options.samples)
    planes = HomographyOptions(samples=options.samples)
    size, numbers = tuple(options.size), range(options.batch)

    def pairs(make: Any, kind: Any, more: int = 0) -> Any:
        return make(textures, range(options.batch + more), size=size, options=kind)

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
    return {
        "scenes": partial(pairs, scene_pairs, scenes),
        "layout": layout,
        "both views": views,
        "photometric, both views": photometric,
        "planes": partial(pairs, homography_pairs, planes),
    }
