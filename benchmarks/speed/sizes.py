# SPDX-License-Identifier: Apache-2.0
"""First calls: at image sizes a network has not seen, and in a new process.

A new size is timed once, then again at the same size. A new process is timed with an empty cache of
compiled kernels and with the cache that the process before it left on disk; imports, weights and
the start of CUDA are not counted.
"""

import json
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import one_time, printed_by, summarise
from benchmarks.speed.backbones import build
from benchmarks.suite import Work, cases
from quadtree_attention import models

# network: smallest side, largest side, and what sides are multiples of
SIDES = {
    "quadtree_b_b0": (256, 1400, 1),
    "pvt_v2_b0": (256, 1400, 1),
    "loftr_quadtree_small": (320, 960, 8),
    "sttr_quadtree_small": (320, 960, 8),
}
FIRST = "new size", "new process"
SEED = 0
LIBRARIES = ("timm",)


def plan(options: Namespace) -> list[list[Work]]:
    """Every network at new sizes, then every network in new processes."""
    planned = cases(first=options.first, network=options.networks)
    return [[Work(case, options.device)] for case in planned]


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """First and second calls of one network."""
    if work["first"] == FIRST[0]:
        return _new_sizes(work["network"], work.device, options.sizes)
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        empty, stored = (_new_process(work["network"], work.device, folder) for _ in range(2))
    return {"first_ms": empty[0], "cached_ms": stored[0], "again_ms": stored[1]}


def _new_sizes(network: str, device: str, count: int) -> dict[str, Any]:
    call = prepared(network, device)
    draw = random.Random(SEED)
    low, high, step = SIDES[network]
    sides = range(low, high + 1, step)
    call(sides[0], sides[-1])  # libraries are loaded, and most kernels compiled
    sizes = [(draw.choice(sides), draw.choice(sides)) for _ in range(count)]
    first, again = zip(*((call(*size), call(*size)) for size in sizes), strict=True)
    names = {"median_ms": "first_ms", "q25_ms": "first_q25_ms", "q75_ms": "first_q75_ms"}
    found = summarise(list(first))
    values = {name: found[key] for key, name in names.items()}
    return values | {"again_ms": summarise(list(again))["median_ms"], "repeats": count}


def prepared(network: str, device: str) -> Callable[[int, int], float]:
    """A function of height and width that returns the milliseconds of one forward pass."""
    pair = network.startswith(("loftr", "sttr"))
    channels = 1 if network.startswith("loftr") else 3
    built: Any = models.create(network) if pair else build(network, "backbone", (224, 224))
    model = built.to(device).eval()

    @torch.inference_mode()
    def call(height: int, width: int) -> float:
        images = [torch.rand(1, channels, height, width, device=device) for _ in range(2)]
        batch = {"image0": images[0], "image1": images[1]} if pair else images[0]
        return one_time(lambda: model(batch), device)

    return call


def _new_process(network: str, device: str, cache: str) -> list[float]:
    """First and second call in a process whose kernels are cached in a folder."""
    caches = {"TRITON_CACHE_DIR": f"{cache}/triton", "NUMBA_CACHE_DIR": f"{cache}/numba"}
    code = f"from benchmarks.speed.sizes import two_calls; two_calls({network!r}, {device!r})"
    return printed_by(code, **caches)


def two_calls(network: str, device: str) -> None:
    """Print the milliseconds of the first two calls in this process."""
    call = prepared(network, device)
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # CUDA and cuBLAS start
    print(json.dumps([call(480, 640), call(480, 640)]))
