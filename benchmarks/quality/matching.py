# SPDX-License-Identifier: Apache-2.0
"""The matcher and SIFT on the same real pairs, with the same two estimators, in one run on a CPU.

Sets, folders of `--data`: scannet (15 pairs of indoor views far apart, poses), graf (a painted wall
from three other viewpoints) and bikes (three degrees of blur), homographies, rgbd (three views of a
room, poses), and turned (24 pairs of views of one photograph, turned over the whole circle and
zoomed by up to 3.5, made from the photographs beside that folder; homographies). Matches go to
`<set>/<method>/<pair>.npz` of the work folder, and are scored from there as `quadtree evaluate
match` does.
"""

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks import quality
from benchmarks.quality import Method, check_folders, check_methods, networks
from benchmarks.quality.turned import draw_pairs
from benchmarks.result import ROOT, THRESHOLDS
from benchmarks.suite import Work
from benchmarks.tables.views import ESTIMATORS
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks.match.predictor import Matcher
from quadtree_attention.tasks.match.readers import PairsSource, open_source
from quadtree_attention.tasks.match.result import Matches

DATA = ROOT.parent / "shared" / "data" / "matching"
BASELINE = "SIFT"
LIBRARIES = ("opencv", "poselib")
RATIO = 0.8  # Lowe's: the nearest descriptor must be that much nearer than the next
FEATURES = 8192


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    check_methods(parser, options, BASELINE)
    check_folders(parser, [options.data / SETS[name][0] for name in options.sets])


def plan(options: Namespace) -> list[list[Work]]:
    """Every method on the pairs of every set."""
    pairs = [(name, prepare(name, options.data, options.folder / name)) for name in options.sets]
    return quality.works(options, METHODS, [({"set": name}, source) for name, source in pairs])


def measure_row(work: Work, options: Namespace) -> dict[str, Any]:
    return measure(work.more["method"], work.more["samples"], options.folder / work["set"])


# ---- methods


def sift(image0: ImageLike, image1: ImageLike, *, features: int = FEATURES) -> Matches:
    """SIFT features of the images as they are, mutual nearest neighbours that pass Lowe's test.

    Confidence is how far the nearest descriptor is from failing it.
    """
    images = to_image(image0), to_image(image1)
    began = time.perf_counter()
    detector = cv2.SIFT_create(nfeatures=features)
    (points0, d0), (points1, d1) = (
        _features(detector, np.asarray(image.convert("L"))) for image in images
    )
    rows, columns, ratio = nearest(d0, d1)
    seconds = time.perf_counter() - began
    return Matches(points0[rows], points1[columns], 1 - ratio, seconds=seconds)


def _features(detector: Any, image: Array) -> tuple[Array, Array]:
    keypoints, descriptors = detector.detectAndCompute(image, None)
    points = np.array([keypoint.pt for keypoint in keypoints], float).reshape(-1, 2)
    return points, np.zeros((0, 128), np.float32) if descriptors is None else descriptors


def nearest(d0: Array, d1: Array, ratio: float = RATIO) -> tuple[Array, Array, Array]:
    """Rows of `d0` and `d1` that are nearest to each other, and nearest to next distance."""
    if len(d0) < 2 or len(d1) < 2:
        return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
    matcher = cv2.BFMatcher(cv2.NORM_L2)
    there, back = matcher.knnMatch(d0, d1, k=2), matcher.match(d1, d0)
    columns = np.array([first.trainIdx for first, _ in there])
    first, second = np.array([[match.distance for match in pair] for pair in there]).T
    share = np.divide(first, second, out=np.ones_like(first), where=second > 0)
    mutual = np.array([match.trainIdx for match in back])[columns] == np.arange(len(d0))
    good = mutual & (share < ratio)
    return np.flatnonzero(good), columns[good], share[good]


def _sift_method(options: Namespace) -> list[Method]:
    settings = {
        "features": options.features,
        "ratio": RATIO,
        "neighbours": "mutual",
        "images": "full size, grey",
    }
    return [Method(BASELINE, lambda a, b, _: sift(a, b, features=options.features), settings)]


METHODS = {
    "matcher": lambda options: networks(options, Matcher, guided="never"),
    "guided": lambda options: networks(options, Matcher, " guided", guided="auto"),
    "sift": _sift_method,
}


def measure(method: Method, samples: PairsSource, folder: Path) -> dict[str, Any]:
    """Values and details of a method on a set, scored from the files it writes to a folder."""
    scores, seconds = quality.find_and_score("match", method, samples, folder)
    found = scores.to_dict()
    mean, facts, rows = found["mean"], found["facts"], found["rows"]
    truth = rows[0]["kind"]  # all pairs of a set have the same
    estimators = {
        name: {
            "auc": {at: mean[f"{truth}_{name}_auc{at}"] for at in THRESHOLDS[truth]},
            "median": mean[f"{truth}_{name}_median"],
            "failed": facts[f"{truth}_{name}_failed"],
        }
        for name in ESTIMATORS
    }
    values = {"truth": truth, "estimators": estimators}
    values |= {key: facts[f"{truth}_{key}"] for key in ("pairs", "missing")}
    values |= {key: float(mean[f"{truth}_{key}"]) for key in ("matches", "precision")}
    values["median_seconds"] = statistics.median(seconds)
    kept = ("name", "matches", "precision")
    pairs = [
        {key: row[key] for key in kept} | {"errors": {e: row[f"error_{e}"] for e in ESTIMATORS}}
        for row in rows
    ]
    settings = {key: facts[key] for key in ("pose_pixels", "epipolar", "side")}
    return values | {"details": {"settings": settings, "pairs": pairs}}


# ---- sets


def prepare(name: str, data: Path, work: Path) -> PairsSource:
    """The pairs of a set; their file is written to a folder."""
    folder, read = SETS[name]
    images, lines = read(data / folder, work)
    return write_pairs(work, images, lines)


def write_pairs(folder: Path, images: Path, lines: Sequence[str]) -> PairsSource:
    """Pairs of images in a folder, as lines of a file of pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.txt"
    path.write_text("\n".join(lines) + "\n")
    return open_source(path, images=images)


def _listed(folder: Path, work: Path) -> tuple[Path, list[str]]:
    return folder / "images", (folder / "pairs_with_gt.txt").read_text().splitlines()


def _planes(folder: Path, work: Path) -> tuple[Path, list[str]]:
    """Image 1 with each of the others, by the homographies beside them."""
    lines = []
    for path in sorted(folder.glob("H1to*p.txt")):
        other = path.name.removeprefix("H1to").removesuffix("p.txt")
        lines.append(f"img1.jpg img{other}.jpg {words_of(np.loadtxt(path))}")
    return folder, lines


def _frames(folder: Path, work: Path) -> tuple[Path, list[str]]:
    """Every two frames of known cameras."""
    cameras = json.loads((folder / "cameras.json").read_text())
    lines = []
    for name0, name1 in combinations(cameras, 2):
        first, second = cameras[name0], cameras[name1]
        motion = np.array(second["T_world_to_cam"]) @ np.linalg.inv(first["T_world_to_cam"])
        motion[3] = 0, 0, 0, 1
        lines.append(f"{name0} {name1} 0 0 {words_of(first['K'], second['K'], motion)}")
    return folder, lines


def _turned(folder: Path, work: Path) -> tuple[Path, list[str]]:
    """Views of the photographs of a folder, and of the smaller ones of `free_photos` beside it."""
    large = sorted(folder.glob("*/images/*.jpg"))
    small = sorted((folder.parent / "free_photos" / "images").rglob("*.jpg"))
    return draw_pairs(large, small, work / "views")


def words_of(*matrices: Any) -> str:
    """All numbers of matrices, as a file of pairs has them."""
    return " ".join(repr(float(x)) for matrix in matrices for x in np.ravel(matrix))


SETS = {  # folder, and how its pairs are read
    "scannet": ("scannet_sample", _listed),
    "graf": ("oxford_affine/graf", _planes),
    "bikes": ("oxford_affine/bikes", _planes),
    "rgbd": ("rgbd_sample", _frames),
    "turned": ("../free_multiview", _turned),
}
