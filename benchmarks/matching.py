# SPDX-License-Identifier: Apache-2.0
"""The matcher and SIFT on the same real pairs, with the same two estimators, in one run on a CPU.

Sets, folders of `--data`: scannet (15 pairs of indoor views far apart, poses), graf (a painted wall
from three other viewpoints) and bikes (three degrees of blur), homographies, and rgbd (three views
of a room, poses). Matches go to `<set>/<method>/<pair>.npz` of the work folder, and are scored from
there as `quadtree evaluate match` does; `benchmarks.tables` makes the table of docs/matching.md.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks.attention_runs import hide_paths, working_folder
from benchmarks.matching_tables import MATCHING, check_result, text_table
from benchmarks.measure import use_threads
from benchmarks.program import (
    OneLineParser,
    at_least_one,
    cpu_name,
    describe_run,
    list_of,
    named_weights,
    slug,
    version_of,
    write,
)
from benchmarks.tables import RESULTS, ROOT
from quadtree_attention.errors import QuadtreeAttentionError
from quadtree_attention.files import file_sha256
from quadtree_attention.images import Array, ImageLike, to_image
from quadtree_attention.tasks import Matcher, Matches, Scores
from quadtree_attention.tasks.evaluation import score
from quadtree_attention.tasks.match import TASK
from quadtree_attention.tasks.match.metrics import ESTIMATORS, THRESHOLDS
from quadtree_attention.tasks.match.predictor import SIZE
from quadtree_attention.tasks.match.readers import PairLine, PairsSource, read_pairs
from quadtree_attention.tasks.store import Store

PROGRAM = "python -m benchmarks.matching"
DATA = ROOT.parent / "shared" / "data" / "matching"
METHODS = ("matcher", "sift")
RATIO = 0.8  # Lowe's: the nearest descriptor must be that much nearer than the next
FEATURES = 8192
DEFAULT = "quadtree"  # the weights of the package

Match = Callable[[ImageLike, ImageLike], Matches]


@dataclass(frozen=True)
class Method:
    """Something that matches two images, and what is to be known about it."""

    name: str
    match: Match
    settings: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every method on every set; a mistake ends the program with one line and exit code 2."""
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
    add("--data", type=Path, default=DATA, help="folder of the sets; default: %(default)s")
    add("--sets", type=list_of(tuple(SETS)), default=list(SETS), help="separated by commas")
    add("--methods", type=list_of(METHODS), default=list(METHODS), help="separated by commas")
    more = "weights of a matcher, as often as wanted; default: those of the package"
    add("--weights", action="append", type=named_weights, metavar="[NAME=]FILE", help=more)
    add("--size", type=at_least_one, default=SIZE, help="longer side that the matcher sees")
    add("--features", type=at_least_one, default=FEATURES, help="most features of SIFT")
    add("--threads", type=at_least_one, default=torch.get_num_threads(), help="CPU threads")
    add("--work", help="folder that keeps the matches; default: a temporary one")
    add("--out", type=Path, help=f"default: benchmarks/results/{MATCHING}--<CPU>.json")
    options = parser.parse_args(argv)
    for name in options.sets:
        if not (folder := options.data / FOLDERS[name]).is_dir():
            parser.error(f"argument --data: there is no folder {folder} of the set {name}")
    names = [name for name, _ in options.weights or []]
    if len(set(names)) < len(names) or "SIFT" in names:
        parser.error(f"argument --weights: names must differ, got {', '.join(names)}, and SIFT")
    options.out = options.out or RESULTS / f"{MATCHING}--{slug(cpu_name())}.json"
    if options.out.is_dir():
        parser.error(f"argument --out: {options.out} is a directory")
    return options


def run(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """The result, which is also written, row by row."""
    methods = [method for name in options.methods for method in MAKERS[name](options)]
    result = describe(argv, options) | {
        "complete": False,
        "methods": {method.name: method.settings for method in methods},
        "rows": [],
    }
    with working_folder(options.work) as work:
        for name in options.sets:
            images, pairs = prepare(name, options.data, work / name)
            for method in methods:
                result["rows"].append(measure(name, method, images, pairs, work))
                write(options.out, result)
                print(f"{name}: {method.name} done", file=sys.stderr, flush=True)
    result["complete"] = True
    check_result(result)
    write(options.out, result)
    return result


def measure(
    name: str, method: Method, images: Path, pairs: Sequence[PairLine], work: Path
) -> dict[str, Any]:
    """One row: the matches of a method on a set, scored from the files it has written."""
    folder = work / name / slug(method.name)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = []
    for pair in pairs:
        matches = method.match(*pair.read_images())
        matches.save(folder / f"{pair.name}.npz")
        seconds.append(matches.seconds)
    scores = score(TASK, PairsSource(pairs), Store.open(folder, TASK))
    return {
        "set": name,
        "method": method.name,
        "median_seconds": statistics.median(seconds),
        **_row(scores),
    }


def _row(scores: Scores) -> dict[str, Any]:
    """All pairs of a set are of one kind."""
    found = scores.to_dict()
    mean, facts, rows = found["mean"], found["facts"], found["rows"]
    kind = rows[0]["kind"]
    estimators = {
        name: {
            "auc": {f"{t:g}": mean[f"{kind}_{name}_auc{t:g}"] for t in THRESHOLDS[kind]},
            "median": mean[f"{kind}_{name}_median"],
            "failed": facts[f"{kind}_{name}_failed"],
        }
        for name in sorted(ESTIMATORS)
    }
    details = [
        {key: row[key] for key in ("name", "matches", "precision")}
        | {"errors": {name: row[f"error_{name}"] for name in estimators}}
        for row in rows
    ]
    return {
        "kind": kind,
        **{key: facts[f"{kind}_{key}"] for key in ("pairs", "missing")},
        **{key: mean[f"{kind}_{key}"] for key in ("matches", "precision")},
        "estimators": estimators,
        "settings": {key: facts[key] for key in ("pose_pixels", "epipolar", "side")},
        "details": details,
    }


def describe(argv: Sequence[str], options: Namespace) -> dict[str, Any]:
    """How, when and where it was made."""
    about = describe_run(argv, Namespace(**vars(options), device="cpu", variant=None))
    arguments = [_portable(argument, options) for argument in argv]
    kept = ("schema", "date", "commit", "device", "machine")
    return {
        "kind": MATCHING,
        "command": shlex.join([*shlex.split(PROGRAM), *arguments]),
        **{key: about[key] for key in kept},
        "versions": about["versions"]
        | {"opencv": cv2.__version__, "poselib": version_of("poselib")},
    }


def _portable(argument: str, options: Namespace) -> str:
    """An argument as it would be on any machine: folders by their last name."""
    flag, equals, value = argument.rpartition("=")
    if value in (str(options.data), options.work):
        value = Path(value).resolve().name
    return flag + equals + hide_paths(value)


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
    """Rows of `d0` and `d1` that are nearest to each other, and nearest to next distance.

    SIFT's descriptors are whole numbers up to 255, so squared distances in float32 are exact.
    """
    if len(d0) < 2 or len(d1) < 2:
        return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
    squared = (d0**2).sum(1)[:, None] + (d1**2).sum(1) - 2 * d0 @ d1.T
    columns, back = squared.argmin(axis=1), squared.argmin(axis=0)
    first, second = np.sqrt(np.partition(squared, 1, axis=1)[:, :2].T.clip(min=0))
    share = np.divide(first, second, out=np.ones_like(first), where=second > 0)
    good = (back[columns] == np.arange(len(d0))) & (share < ratio)
    return np.flatnonzero(good), columns[good], share[good]


def _sift_method(options: Namespace) -> list[Method]:
    settings = {
        "features": options.features,
        "ratio": RATIO,
        "neighbours": "mutual",
        "images": "full size, grey",
    }
    return [Method("SIFT", lambda a, b: sift(a, b, features=options.features), settings)]


def _matcher_methods(options: Namespace) -> list[Method]:
    made = []
    for name, path in options.weights or [(DEFAULT, None)]:
        matcher = Matcher.from_pretrained(path, device="cpu", size=options.size)
        settings = {
            "model": matcher.card["model"],
            "longer_side": options.size,
            "weights_sha256": file_sha256(matcher.path),
        }
        made.append(Method(name, matcher, settings))
    return made


MAKERS = {"sift": _sift_method, "matcher": _matcher_methods}


# ---- sets


def prepare(name: str, data: Path, work: Path) -> tuple[Path, list[PairLine]]:
    """The folder of the images of a set, and its pairs; their file is made where there is none."""
    work.mkdir(parents=True, exist_ok=True)
    images, lines = SETS[name](data / FOLDERS[name])
    path = work / "pairs.txt"
    path.write_text("\n".join(lines) + "\n")
    return images, read_pairs(path, images)


def _listed(folder: Path) -> tuple[Path, list[str]]:
    return folder / "images", (folder / "pairs_with_gt.txt").read_text().splitlines()


def _planes(folder: Path) -> tuple[Path, list[str]]:
    """Image 1 with each of the others, by the homographies beside them."""
    lines = []
    for path in sorted(folder.glob("H1to*p.txt")):
        other = path.name.removeprefix("H1to").removesuffix("p.txt")
        lines.append(f"img1.jpg img{other}.jpg {_words(np.loadtxt(path))}")
    return folder, lines


def _frames(folder: Path) -> tuple[Path, list[str]]:
    """Every two frames of known cameras."""
    cameras = json.loads((folder / "cameras.json").read_text())
    lines = []
    for name0, name1 in combinations(cameras, 2):
        first, second = cameras[name0], cameras[name1]
        motion = np.array(second["T_world_to_cam"]) @ np.linalg.inv(first["T_world_to_cam"])
        motion[3] = 0, 0, 0, 1
        matrices = (_words(matrix) for matrix in (first["K"], second["K"], motion))
        lines.append(f"{name0} {name1} 0 0 {' '.join(matrices)}")
    return folder, lines


def _words(matrix: Any) -> str:
    return " ".join(repr(float(value)) for value in np.ravel(matrix))


SETS = {"scannet": _listed, "graf": _planes, "bikes": _planes, "rgbd": _frames}
FOLDERS = {
    "scannet": "scannet_sample",
    "graf": "oxford_affine/graf",
    "bikes": "oxford_affine/bikes",
    "rgbd": "rgbd_sample",
}


if __name__ == "__main__":
    sys.exit(main())
