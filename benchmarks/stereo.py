# SPDX-License-Identifier: Apache-2.0
"""The stereo network and OpenCV's StereoSGBM on the same real pairs, in one run on a CPU.

`--data` is a folder of pairs with true disparity in any layout that `quadtree evaluate stereo`
reads. Disparities go to `<method>/<pair>.npz` of the work folder, and are scored from there as that
command does; `benchmarks.stereo_tables` makes the tables of docs/stereo.md.

SGBM is told the range of the true disparities of every pair, which the network is not; its images
are extended on the left, so that it answers there too, and its holes are filled along their rows
from whichever side is farther away. Its settings are the best of nineteen on the pairs of the
default `--data` themselves, by EPE and D1 alike.
"""

import argparse
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks.attention_runs import hide_paths, working_folder
from benchmarks.measure import use_threads
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    cpu_name,
    describe_run,
    list_of,
    named_weights,
    positive,
    slug,
    write,
)
from benchmarks.stereo_tables import STEREO, check_result, text_table
from benchmarks.tables import RESULTS, ROOT
from quadtree_attention.errors import DataError, QuadtreeAttentionError
from quadtree_attention.files import file_sha256
from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.evaluate import Scores, evaluate
from quadtree_attention.tasks.stereo.filling import from_farther_side
from quadtree_attention.tasks.stereo.predictor import SIZE, Disparity, StereoMatcher
from quadtree_attention.tasks.stereo.results import file_name, write_prediction
from quadtree_attention.tasks.stereo.sources import StereoSample, StereoSource, open_stereo

PROGRAM = "python -m benchmarks.stereo"
DATA = ROOT.parent / "shared" / "data" / "stereo"
METHODS = ("network", "sgbm")
DEFAULT = "quadtree"  # the weights of the package
SGBM = "SGBM"
BLOCK = 3  # pixels of a side
SMALL_STEP, LARGE_STEP = 8, 64  # penalties, per pixel and channel of a block
CHANNELS = 3
UNIQUENESS = 10  # percent by which the best cost must win
SPECKLE_PIXELS, SPECKLE_RANGE = 200, 2
MEDIAN = 5  # pixels of a side of the filter at the end
SIXTEENTHS = 16  # SGBM counts in them, and its range is a multiple of so many pixels

Find = Callable[[StereoSample], Disparity]


@dataclass(frozen=True)
class Method:
    """Something that finds the disparities of a pair, and what is to be known about it."""

    name: str
    find: Find
    settings: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every method on every pair; a mistake ends the program with one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    use_threads(options.threads)
    cv2.setNumThreads(options.threads)
    try:
        result = run(argv, options)
    except (QuadtreeAttentionError, OSError) as error:
        print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(text_table(result["rows"]))
    print(f"written: {options.out}")
    return 0


def parse(argv: Sequence[str]) -> Namespace:
    """The checked options; a bad one ends the program with one line and exit code 2."""
    parser = OneLineParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=DATA, help="folder of the pairs; default: %(default)s")
    add("--only", type=list_of(METHODS), default=list(METHODS), help="methods, with commas")
    more = "weights of a stereo network, as often as wanted; default: those of the package"
    add("--weights", action="append", type=named_weights, metavar="[NAME=]FILE", help=more)
    add(
        "--size", type=at_least_one, default=SIZE, help="longer side that the network sees, at most"
    )
    add("--max-disparity", type=positive, help="largest that the network looks for, in pixels")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--work", help="folder that keeps the disparities; default: a temporary one")
    add("--out", type=Path, help=f"default: benchmarks/results/{STEREO}--<CPU>.json")
    options = parser.parse_args(argv)
    if not options.data.is_dir():
        parser.error(f"argument --data: there is no folder {options.data}")
    names = [name for name, _ in options.weights or []]
    if len(set(names)) < len(names) or SGBM in names:
        parser.error(f"argument --weights: names must differ, got {', '.join(names)}, and {SGBM}")
    options.out = options.out or RESULTS / f"{STEREO}--{slug(cpu_name())}.json"
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")
    return options


def run(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result, which is also written, row by row."""
    source = open_stereo(options.data)
    methods = [method for name in options.only for method in MAKERS[name](options)]
    result = describe(argv, options) | {
        "complete": False,
        "methods": {method.name: method.settings for method in methods},
        "rows": [],
    }
    with working_folder(options.work) as work:
        for method in methods:
            result["rows"].append(measure(method, source, work / slug(method.name)))
            write(options.out, result)
            print(f"{method.name} done", file=sys.stderr, flush=True)
    result["complete"] = True
    check_result(result)
    write(options.out, result)
    return result


def measure(method: Method, source: StereoSource, folder: Path) -> dict[str, Any]:
    """One row: the disparities of a method, scored from the files it has written."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = {}
    for index in range(len(source)):
        sample = source.read(index)
        found = method.find(sample)
        write_prediction(folder / f"{file_name(sample.name)}.npz", found)
        seconds[sample.name] = found.seconds
    scores = evaluate(source, folder)
    if scores.missing or scores.skipped:
        raise DataError(f"not all pairs could be scored: {[*scores.missing, *scores.skipped]}")
    return _row(method.name, scores, seconds)


def _row(name: str, scores: Scores, seconds: dict[str, float]) -> dict[str, Any]:
    found = scores.as_dict()
    details = [pair | {"seconds": seconds[pair["name"]]} for pair in found["pairs"]]
    return {
        "method": name,
        "pairs": len(details),
        "median_seconds": statistics.median(seconds.values()),
        "mean": found["mean"],
        "details": details,
    }


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """How, when and where it was made."""
    about = describe_run(argv, Namespace(**vars(options), device="cpu", variant=None))
    arguments = [_portable(argument, options) for argument in argv]
    kept = ("schema", "date", "commit", "device", "machine")
    return {
        "kind": STEREO,
        "command": shlex.join([*shlex.split(PROGRAM), *arguments]),
        **{key: about[key] for key in kept},
        "versions": about["versions"] | {"opencv": cv2.__version__},
    }


def _portable(argument: str, options: Namespace) -> str:
    """An argument as it would be on any machine: folders by their last name."""
    flag, equals, value = argument.rpartition("=")
    if value in (str(options.data), options.work):
        value = Path(value).resolve().name
    return flag + equals + hide_paths(value)


# ---- methods


def sgbm(sample: StereoSample) -> Disparity:
    """Semi-global matching along eight directions, with a left-right check; holes are filled.

    What the checks reject counts as occluded.
    """
    began = time.perf_counter()
    span = SIXTEENTHS * int(np.ceil((sample.disparity.max() + 1) / SIXTEENTHS))
    views = [
        cv2.copyMakeBorder(np.asarray(image), 0, 0, span, 0, cv2.BORDER_REPLICATE)
        for image in (sample.left, sample.right)
    ]
    area = CHANNELS * BLOCK**2
    matcher = cv2.StereoSGBM.create(
        minDisparity=0,
        numDisparities=span,
        blockSize=BLOCK,
        P1=SMALL_STEP * area,
        P2=LARGE_STEP * area,
        disp12MaxDiff=1,
        preFilterCap=63,
        uniquenessRatio=UNIQUENESS,
        speckleWindowSize=SPECKLE_PIXELS,
        speckleRange=SPECKLE_RANGE,
        mode=cv2.StereoSGBM_MODE_HH,
    )
    found = matcher.compute(*views)[:, span:].astype(np.float32) / SIXTEENTHS
    sure = found >= 0
    filled = cv2.medianBlur(fill_holes(found, sure), MEDIAN)
    seconds = time.perf_counter() - began
    return Disparity(filled, (~sure).astype(np.float32), seconds)


def fill_holes(values: Array, sure: Array) -> Array:
    """Disparities (H, W) float32 without holes.

    A hole gets the nearest value of its row from the side that is farther away, as what is hidden
    lies behind what hides it; a row without any gets the median of all.
    """
    farther = from_farther_side(values, sure)
    middle = np.median(values[sure]) if sure.any() else 0.0
    filled = np.where(np.isfinite(farther), farther, middle)
    return np.where(sure, values, filled).astype(np.float32)


def _sgbm_method(_: Namespace) -> list[Method]:
    settings = {
        "mode": "HH",
        "block": BLOCK,
        "P1": f"{SMALL_STEP} x {CHANNELS} x block²",
        "P2": f"{LARGE_STEP} x {CHANNELS} x block²",
        "uniqueness": UNIQUENESS,
        "speckles": f"{SPECKLE_PIXELS} pixels, range {SPECKLE_RANGE}",
        "range": "that of the truth, rounded up to 16 pixels",
        "holes": "filled from the farther side",
        "median": MEDIAN,
    }
    return [Method(SGBM, sgbm, settings)]


def _network_methods(options: Namespace) -> list[Method]:
    made = []
    for name, path in options.weights or [(DEFAULT, None)]:
        matcher = StereoMatcher(
            path, device="cpu", size=options.size, max_disparity=options.max_disparity
        )
        settings = {
            "model": matcher.card["model"],
            "longer_side": matcher.size,
            "max_disparity": matcher.max_disparity,
            "weights_sha256": file_sha256(matcher.path),
        }
        made.append(Method(name, _finder(matcher), settings))
    return made


def _finder(matcher: StereoMatcher) -> Find:
    return lambda sample: matcher(sample.left, sample.right)


MAKERS = {"network": _network_methods, "sgbm": _sgbm_method}


if __name__ == "__main__":
    sys.exit(main())
