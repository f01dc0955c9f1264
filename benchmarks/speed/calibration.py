# SPDX-License-Identifier: Apache-2.0
"""The packaged networks with K by attention mass beside their fixed K, in turns on a CPU.

K of every layer is that of a result of `quality calibration`. The call is the whole network on one
pair of noise, without reading and scaling of images.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import use_threads
from benchmarks.result import RESULTS
from benchmarks.suite import Work
from quadtree_attention import models

IMAGES = {"match": (640, 480), "stereo": (480, 360)}  # width, height
CHANNELS = {"match": 1, "stereo": 3}
NETWORKS = {"match": "loftr_quadtree_small", "stereo": "sttr_quadtree_small"}


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    if options.results is None:
        found = sorted((RESULTS / "quality").glob("calibration--*.json"))
        if len(found) != 1:
            parser.error(f"argument --results: name one of {len(found)} results of calibration")
        options.results = found[0]


def plan(options: Namespace) -> list[list[Work]]:
    """All rows of a task are timed in turns."""
    use_threads(options.threads)
    rows = json.loads(Path(options.results).read_text())["rows"]
    found: dict[str, list[Work]] = {}
    for row in rows:
        more = {"topk": row["details"]["topk"]}
        found.setdefault(row["case"]["task"], []).append(Work(row["case"], "cpu", more))
    return list(found.values())


def values(work: Work) -> dict[str, Any]:
    return {"image": list(IMAGES[work["task"]])}


def prepare(work: Work) -> Callable[[], object]:
    task = work["task"]
    network = models.create(NETWORKS[task], pretrained=True).eval()
    models.set_topk(network, work.more["topk"])
    width, height = IMAGES[task]
    seeded = torch.Generator().manual_seed(0)
    shape = (1, CHANNELS[task], height, width)
    pair = {f"image{i}": torch.rand(shape, generator=seeded) for i in range(2)}

    def call() -> object:
        with torch.inference_mode():
            return network(pair)

    return call
