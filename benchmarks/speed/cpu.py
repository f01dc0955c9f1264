# SPDX-License-Identifier: Apache-2.0
"""Speed and memory on a CPU: backbones beside PVTv2, and the commands `match` and `stereo`.

A backbone and its baseline are timed in turns. A command runs in new processes on a pair of
images: the first time with an empty cache of compiled kernels, then with what that has left. Time
is that of the prediction, without imports and weights; memory is that of the whole process.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measure import Call, printed_by, summarise
from benchmarks.speed import backbones
from benchmarks.suite import Work

# part: model, images, pass
BACKBONES = {
    "b0 training step of 8": ("quadtree_b_b0", [8, 3, 224, 224], "training"),
    "b0 training step": ("quadtree_b_b0", [1, 3, 224, 224], "training"),
    "b2 training step": ("quadtree_b_b2", [1, 3, 224, 224], "training"),
    "b2 forward": ("quadtree_b_b2", [1, 3, 224, 224], "forward"),
    "b0 forward 800x1344": ("quadtree_b_b0", [1, 3, 800, 1344], "forward"),
}
COMMANDS = {"match": "Matcher", "stereo": "StereoMatcher"}
PARTS = (*BACKBONES, *COMMANDS)
SIZE = (640, 480)
SHIFT = 8  # of the second image, in pixels
LATER = 3  # processes with compiled kernels on disk
LIBRARIES = ("timm",)


def plan(options: Namespace) -> list[list[Work]]:
    """Every part; a backbone and its baseline are one list."""
    planned = []
    for part in options.parts:
        command = f"quadtree {part}", [1, 3, SIZE[1], SIZE[0]], None
        model, images, _ = BACKBONES.get(part, command)
        planned.append(backbones.beside_baseline(part, model, images=images))
    return planned


def prepare(work: Work) -> Call:
    """The call to time, of a backbone."""
    _, images, pass_ = BACKBONES[work["part"]]
    task = "classification" if images[2:] == [224, 224] else "backbone"
    case = {"pass": pass_, "task": task, "precision": "float32", "mode": "eager"}
    return backbones.prepare(Work(work.case | case, "cpu"))


def measure_row(work: Work, options: Namespace) -> dict[str, Any] | None:
    """Times and memory of a command; None for a backbone, which `prepare` is for."""
    if work["part"] not in COMMANDS:
        return None
    with tempfile.TemporaryDirectory(prefix="cpu-") as name:
        folder = Path(name)
        images = [str(path) for path in write_pair(folder)]
        first, *later = (
            _new_process(work["part"], images, folder, options.threads) for _ in range(1 + LATER)
        )
    times = summarise([ms for ms, _ in later])
    return times | {"first_ms": first[0], "peak_mib": max(mib for _, mib in later)}


def write_pair(folder: Path) -> list[Path]:
    """Two views of a smooth random texture; the second one is shifted."""
    random = np.random.default_rng(0)
    width, height = SIZE
    noise = random.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    texture = np.asarray(Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC))
    paths = [folder / "left.png", folder / "right.png"]
    for path, shift in zip(paths, (0, SHIFT), strict=True):
        Image.fromarray(np.roll(texture, -shift, axis=1)).save(path)
    return paths


def _new_process(part: str, images: list[str], folder: Path, threads: int) -> list[float]:
    """Milliseconds and MiB of one prediction in a process of its own."""
    names = {"OMP_NUM_THREADS": str(threads), "NUMBA_CACHE_DIR": str(folder / "kernels")}
    code = f"from benchmarks.speed.command import predict; predict({COMMANDS[part]!r}, {images!r})"
    return printed_by(code, **names)
