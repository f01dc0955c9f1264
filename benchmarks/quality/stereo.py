# SPDX-License-Identifier: Apache-2.0
"""The stereo network and OpenCV's StereoSGBM on the same real pairs, in one run on a CPU.

`--data` is a folder of pairs with true disparity in any layout that `quadtree evaluate stereo`
reads. Disparities go to `<method>/<pair>.npz` of the work folder, and are scored from there as that
command does.

SGBM is told the range of the true disparities of every pair, which the network is not; its images
are extended on the left, so that it answers there too, and its holes are filled along their rows
from the farther side. Its settings are the best of nineteen on the pairs of the default `--data`
themselves, by EPE and D1 alike.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from typing import Any

import cv2
import numpy as np
from PIL import Image

from benchmarks import quality
from benchmarks.quality import Method, check_folders, check_methods, networks
from benchmarks.result import ROOT
from benchmarks.suite import Work
from quadtree_attention.errors import DataError
from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.filling import from_farther_side
from quadtree_attention.tasks.stereo.predictor import StereoMatcher
from quadtree_attention.tasks.stereo.readers import StereoTruth, open_source
from quadtree_attention.tasks.stereo.result import Disparity

DATA = ROOT.parent / "shared" / "data" / "stereo"
BASELINE = "SGBM"
LIBRARIES = ("opencv",)
BLOCK = 3  # pixels of a side
SMALL_STEP, LARGE_STEP = 8, 64  # penalties, per pixel and channel of a block
CHANNELS = 3
UNIQUENESS = 10  # percent by which the best cost must win
SPECKLE_PIXELS, SPECKLE_RANGE = 200, 2
MEDIAN = 5  # pixels of a side of the filter at the end
SIXTEENTHS = 16  # SGBM counts in them, and its range is a multiple of so many pixels


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    check_methods(parser, options, BASELINE)
    check_folders(parser, [options.data])


def plan(options: Namespace) -> list[list[Work]]:
    """Every method on all pairs."""
    return quality.works(options, METHODS, [({}, open_source(options.data))])


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    """Values and details of a method, scored from the files it has written."""
    method, samples = work.more["method"], work.more["samples"]
    scores, seconds = quality.find_and_score("stereo", method, samples, options.folder)
    if scores.missing or scores.skipped:
        raise DataError(f"not all pairs could be scored: {[*scores.missing, *scores.skipped]}")
    found = scores.to_dict()
    pairs = [
        {"name": row.pop("name"), "scores": row, "seconds": taken}
        for row, taken in zip(found["rows"], seconds, strict=True)
    ]
    middle = statistics.median(seconds)
    values = {"pairs": len(pairs), "median_seconds": middle, "mean": found["mean"]}
    return values | {"details": {"pairs": pairs}}


def sgbm(left: Image.Image, right: Image.Image, truth: StereoTruth) -> Disparity:
    """Semi-global matching along eight directions, with a left-right check; holes are filled.

    What the checks reject counts as occluded.
    """
    began = time.perf_counter()
    span = SIXTEENTHS * int(np.ceil((truth.disparity.max() + 1) / SIXTEENTHS))
    views = [
        cv2.copyMakeBorder(np.asarray(image), 0, 0, span, 0, cv2.BORDER_REPLICATE)
        for image in (left, right)
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
    return Disparity(disparity=filled, occlusion=(~sure).astype(np.float32), seconds=seconds)


def fill_holes(values: Array, sure: Array) -> Array:
    """Disparities (H, W) float32 without holes.

    A hole gets the nearest value of its row from the farther side, as occluded pixels lie behind
    what occludes them; a row without any gets the median of all.
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
    return [Method(BASELINE, sgbm, settings)]


METHODS = {
    "network": lambda o: networks(o, StereoMatcher, max_disparity=o.max_disparity),
    "sgbm": _sgbm_method,
}
