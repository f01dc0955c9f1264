# SPDX-License-Identifier: Apache-2.0
"""Scores of matches in files: how good the poses and homographies are that follow from them.

`quadtree match --pairs` writes the files, or any other program: `<name>.npz` per pair, with
`keypoints0` and `keypoints1` (N, 2) in pixels (x, y) of the images, turned first where the pair
asks for it, and `confidence` (N,). Each pair is scored with OpenCV's RANSAC and with poselib's
LO-RANSAC: which of them is used can move scores by more than a better matcher does. Both draw from
a fixed seed, so a score can be had again.

Pairs with a pose are scored as LoFTR and SuperGlue do it: the larger of the angles by which
rotation and direction of translation are off. Pairs with a homography are scored as LoFTR does it:
the mean distance of the corners of image 0 from where they belong in image 1, in pixels of an image
1 with a shorter side of 480. A pair without predictions, or from whose matches nothing can be
estimated, counts as one with an infinite error.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from quadtree_attention.errors import DataError, OptionError
from quadtree_attention.images import to_image
from quadtree_attention.tasks.match.estimate import (
    HOMOGRAPHY_PIXELS,
    PIXELS,
    Estimator,
    homography,
    relative_pose,
)
from quadtree_attention.tasks.match.metrics import (
    CORNER_THRESHOLDS,
    EPIPOLAR_THRESHOLD,
    POSE_THRESHOLDS,
    Array,
    auc,
    corner_error,
    epipolar_errors,
    pose_error,
    precision,
    transform,
)
from quadtree_attention.tasks.match.pairs import PairLine
from quadtree_attention.tasks.match.predictor import Matches

Kind = Literal["pose", "homography"]
Sizes = tuple[tuple[int, int], tuple[int, int]]  # width and height of both images
ESTIMATORS: tuple[Estimator, ...] = ("opencv", "poselib")
THRESHOLDS: dict[Kind, tuple[float, ...]] = {
    "pose": POSE_THRESHOLDS,
    "homography": CORNER_THRESHOLDS,
}
SIDE = 480  # pixels of the shorter side that LoFTR measures homographies at
CORRECT_PIXELS = 3.0  # from where the homography puts it: a correct match


@dataclass(frozen=True)
class Settings:
    """What scores depend on beside the matches.

    Attributes:
        pose_pixels: Threshold of both estimators for poses, in pixels of the images as given.
        epipolar: Matches of a pose pair are correct below this symmetric squared distance from
            their epipolar lines, in normalised coordinates: 5e-4 is usual indoors, 1e-4 outdoors.
        side: Homographies are measured as if image 1 had a shorter side of this many pixels: their
            corners, correct matches (3 pixels) and the threshold of both estimators (3 pixels).
            0 measures in pixels of the images as given.
    """

    pose_pixels: float = PIXELS
    epipolar: float = EPIPOLAR_THRESHOLD
    side: int = SIDE

    def __post_init__(self) -> None:
        for name in ("pose_pixels", "epipolar"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise OptionError(f"{name} must be above 0, got {value}; pass a larger one")
        if self.side < 0:
            raise OptionError(
                f"side must be pixels of the shorter side, got {self.side}; 0 leaves images as "
                "they are"
            )


@dataclass(frozen=True)
class PairScore:
    """How good the matches of one pair are.

    Attributes:
        name: Of the pair.
        line: Where it is in the file of pairs.
        kind: What its truth is.
        missing: There were no predictions for it.
        matches: How many.
        precision: Correct ones among them, in percent; 0 without matches.
        errors: Of what each estimator makes of them, in degrees or pixels; infinite if nothing.
    """

    name: str
    line: int
    kind: Kind
    missing: bool
    matches: int
    precision: float
    errors: dict[Estimator, float]


@dataclass(frozen=True)
class EstimatorScore:
    """What one estimator makes of all pairs of a kind.

    Attributes:
        auc: Area under the curve of recall over error by threshold ("5"), in percent.
        median: The median error; infinite if half of the pairs failed.
        failed: Pairs without an estimate.
    """

    auc: dict[str, float]
    median: float
    failed: int


@dataclass(frozen=True)
class Summary:
    """Scores of all pairs of a kind.

    Attributes:
        pairs: How many.
        missing: How many of them without predictions; they count as failed.
        matches: Mean number of matches.
        precision: Mean over pairs of the share of correct matches, in percent.
        estimators: Scores by estimator.
    """

    pairs: int
    missing: int
    matches: float
    precision: float
    estimators: dict[Estimator, EstimatorScore]


@dataclass(frozen=True)
class Scores:
    """Scores of a set of pairs; None where it has no pairs of a kind."""

    pose: Summary | None
    homography: Summary | None
    pairs: tuple[PairScore, ...]
    settings: Settings

    @property
    def missing(self) -> list[str]:
        """Names of the pairs without predictions."""
        return [pair.name for pair in self.pairs if pair.missing]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, which has no infinite numbers: None in their place."""
        return _finite(asdict(self))


def evaluate(
    pairs: Sequence[PairLine],
    predictions: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
) -> Scores:
    """Scores the matches that a folder holds.

    Args:
        pairs: What `read_pairs` has read, each with a true pose or a true homography.
        predictions: Folder with `<name>.npz` for every pair. One that is missing counts as failed.
        images: Folder of the images, for their sizes: homographies need it, for the corners of
            image 0, and pairs whose images are turned.
        settings: Thresholds; None takes the usual ones.

    Raises:
        DataError: A pair has no truth, a file is broken, or the folder has none of the pairs.
        OptionError: There are pairs that need `images`, but there is no such folder.
    """
    from tqdm import tqdm

    settings = settings or Settings()
    folder = Path(predictions)
    _check_truths(pairs)
    _check_folder(folder, pairs)
    _check_images(images, pairs)
    size_of = cache(_size_of)
    scores = []
    for pair in tqdm(pairs, unit="pair", leave=False, disable=None):
        path = folder / f"{pair.name}.npz"
        matches = _load(path) if path.exists() else None
        sizes = None
        if matches is not None and images is not None and _needs_images(pair):
            sizes = size_of(Path(images, pair.image0)), size_of(Path(images, pair.image1))
        scores.append(_score(pair, matches, sizes, settings))
    return Scores(
        pose=summary("pose", scores),
        homography=summary("homography", scores),
        pairs=tuple(scores),
        settings=settings,
    )


def summary(kind: Kind, scores: Iterable[PairScore]) -> Summary | None:
    """The scores of all pairs of a kind in one; None if there are none."""
    mine = [score for score in scores if score.kind == kind]
    if not mine:
        return None
    return Summary(
        pairs=len(mine),
        missing=sum(score.missing for score in mine),
        matches=fmean(score.matches for score in mine),
        precision=fmean(score.precision for score in mine),
        estimators={
            name: _estimator_score([score.errors[name] for score in mine], THRESHOLDS[kind])
            for name in ESTIMATORS
        },
    )


def _estimator_score(errors: Sequence[float], thresholds: Sequence[float]) -> EstimatorScore:
    areas = zip(thresholds, auc(errors, thresholds), strict=True)
    return EstimatorScore(
        auc={f"{threshold:g}": area for threshold, area in areas},
        median=median(errors),
        failed=sum(math.isinf(error) for error in errors),
    )


def _score(
    pair: PairLine, matches: Matches | None, sizes: Sizes | None, settings: Settings
) -> PairScore:
    if matches is None or not len(matches):
        kind: Kind = "homography" if pair.T_0to1 is None else "pose"
        errors = dict.fromkeys(ESTIMATORS, math.inf)
        return PairScore(pair.name, pair.line, kind, matches is None, 0, 0.0, errors)
    points0, points1 = matches.keypoints0, matches.keypoints1
    if sizes is not None:
        points0 = unturned(points0, pair.rotation0, sizes[0])
        points1 = unturned(points1, pair.rotation1, sizes[1])
    if pair.T_0to1 is not None:
        return _score_pose(pair, points0, points1, settings)
    assert sizes is not None  # homographies need images
    return _score_homography(pair, points0, points1, sizes, settings)


def unturned(points: Array, turns: int, size: tuple[int, int]) -> Array:
    """Pixels of an image from those of the same image turned by quarters counter-clockwise.

    Args:
        points: (N, 2) pixels (x, y) of the turned image.
        turns: How many quarters.
        size: Width and height of the image before.
    """
    x, y = np.asarray(points, float).T
    for turn in range(turns, 0, -1):
        height = size[0] if turn % 2 else size[1]  # after so many turns
        x, y = height - 1 - y, x
    return np.stack([x, y], axis=1)


def _score_pose(pair: PairLine, points0: Array, points1: Array, settings: Settings) -> PairScore:
    assert pair.K0 is not None and pair.K1 is not None and pair.T_0to1 is not None
    cameras = pair.K0, pair.K1
    errors: dict[Estimator, float] = {}
    for name in ESTIMATORS:
        found = relative_pose(
            points0, points1, *cameras, estimator=name, threshold=settings.pose_pixels
        )
        errors[name] = (
            math.inf
            if found is None
            else pose_error(found.rotation, found.translation, pair.T_0to1)
        )
    away = epipolar_errors(points0, points1, *cameras, pair.T_0to1)
    correct = precision(away, settings.epipolar)
    return PairScore(pair.name, pair.line, "pose", False, len(points0), correct, errors)


def _score_homography(
    pair: PairLine,
    points0: Array,
    points1: Array,
    sizes: Sizes,
    settings: Settings,
) -> PairScore:
    assert pair.H_0to1 is not None
    scale = settings.side / min(sizes[1]) if settings.side else 1.0  # given to measured pixels
    errors: dict[Estimator, float] = {}
    for name in ESTIMATORS:
        found = homography(points0, points1, estimator=name, threshold=HOMOGRAPHY_PIXELS / scale)
        matrix = None if found is None else found.matrix
        errors[name] = corner_error(matrix, pair.H_0to1, *sizes[0]) * scale
    away = np.linalg.norm(transform(points0, pair.H_0to1) - points1, axis=1) * scale
    correct = precision(away, CORRECT_PIXELS)
    return PairScore(pair.name, pair.line, "homography", False, len(points0), correct, errors)


def _check_truths(pairs: Sequence[PairLine]) -> None:
    for pair in pairs:
        if pair.T_0to1 is None and pair.H_0to1 is None:
            raise DataError(
                f"line {pair.line} of the pairs, {pair.name}, has no truth to compare with; write "
                "K0, K1 and T_0to1 or a homography behind the images"
            )


def _needs_images(pair: PairLine) -> bool:
    return pair.H_0to1 is not None or pair.rotation0 != 0 or pair.rotation1 != 0


def _check_images(images: str | os.PathLike[str] | None, pairs: Sequence[PairLine]) -> None:
    first = next((pair for pair in pairs if _needs_images(pair)), None)
    if first is not None and (images is None or not Path(images).is_dir()):
        what = "a homography" if first.H_0to1 is not None else "an image that is turned"
        got = "none" if images is None else f"{str(images)!r}"
        raise OptionError(
            f"line {first.line} of the pairs has {what}, for which a folder of the images must "
            f"tell their sizes, got {got}; pass it (--images DIR)"
        )


def _check_folder(folder: Path, pairs: Sequence[PairLine]) -> None:
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder} of predictions; quadtree match --pairs FILE --images DIR "
            f"--save-dir {folder} makes it"
        )
    if not any((folder / f"{pair.name}.npz").exists() for pair in pairs):
        first = f", such as {pairs[0].name}.npz" if pairs else ""
        raise DataError(
            f"{folder} has predictions for none of {len(pairs)} pairs{first}; pass the folder that "
            "quadtree match --pairs FILE --save-dir DIR has filled"
        )


def _load(path: Path) -> Matches:
    matches = Matches.load(path)
    if not all(np.isfinite(points).all() for points in (matches.keypoints0, matches.keypoints1)):
        raise DataError(f"{path} must hold finite points, got others; match again")
    return matches


def _size_of(path: Path) -> tuple[int, int]:
    """Width and height of an image, upright."""
    return to_image(path).size


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
