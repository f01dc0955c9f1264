# SPDX-License-Identifier: Apache-2.0
"""Metrics of matches: errors of the estimated pose or homography, and of the points.

The score of a pair with a pose is the maximum of the angular errors of rotation and translation
direction, as in LoFTR and SuperGlue. The score of a pair with a homography is the mean error of the
corners of image 0 in image 1, in pixels of an image 1 with a shorter side of 480, as in LoFTR. The
error is infinite for a pair without predictions, or without enough matches for an estimate.

Each pair is scored with OpenCV's RANSAC and with poselib's LO-RANSAC, since this choice can change
scores by more than the choice of matcher. Both have a fixed seed: the same files give the same
scores.

Points are (N, 2) pixels (x, y), `K` a camera (3, 3), `T_0to1` the motion (4, 4) from camera 0 to
camera 1.
"""

import math
import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from quadtree_attention.checks import above, at_least
from quadtree_attention.errors import OptionError
from quadtree_attention.images import Array
from quadtree_attention.tasks.contract import Column, Metric, Scores, Source
from quadtree_attention.tasks.match import pose
from quadtree_attention.tasks.match.pose import Estimator, homogeneous, normalised
from quadtree_attention.tasks.match.readers import PairLine
from quadtree_attention.tasks.match.result import Matches

Kind = Literal["pose", "homography"]
SIDE = 480  # shorter side in pixels at which LoFTR measures homographies
CORRECT_PIXELS = 3.0  # maximum error of a correct match under the homography
EPIPOLAR_THRESHOLD = 5e-4  # squared, in normalised coordinates: a correct match in LoFTR
THRESHOLDS: dict[Kind, tuple[float, ...]] = {  # of AUC, in degrees and in pixels
    "pose": (5.0, 10.0, 20.0),
    "homography": (3.0, 5.0, 10.0),
}
COLUMNS = (
    Column("name", "pair", None),
    Column("kind", "truth", None),
    Column("matches", "matches", None),
    Column("precision", "correct %"),
    Column("error_opencv", "error opencv"),
    Column("error_poselib", "error poselib"),
)


class MatchMetric(Metric[PairLine, Matches]):
    """Scores of pairs with a true pose or homography, such as `pose_opencv_auc5`.

    Args:
        source: Not used.
        classes: Not used.
        pose_pixels: Threshold of both estimators for poses, in pixels of images of `pose_size`.
        pose_size: "WIDTHxHEIGHT" of these images; None: original size. Published scores of
            ScanNet, whose images have 1296x968 pixels, are for "640x480".
        epipolar: Matches of a pose pair are correct below this symmetric squared distance from
            their epipolar lines, in normalised coordinates: 5e-4 is usual indoors, 1e-4 outdoors.
        side: Shorter side in pixels of image 1 to which homographies refer: corner errors, correct
            matches (3 pixels) and the threshold of both estimators (3 pixels). 0: original size.
        estimators: "opencv" and "poselib", or one of them.

    Raises:
        OptionError: A threshold is out of range.
    """

    def __init__(
        self,
        source: Source[PairLine] | None = None,
        classes: Sequence[str] | None = None,
        *,
        pose_pixels: float = pose.PIXELS,
        pose_size: str | None = None,
        epipolar: float = EPIPOLAR_THRESHOLD,
        side: int = SIDE,
        estimators: Sequence[Estimator] = pose.ESTIMATORS[::-1],
    ) -> None:
        super().__init__()
        above(0, pose_pixels=pose_pixels, epipolar=epipolar)
        at_least(0, side=side)
        self.pose_pixels, self.epipolar, self.side = pose_pixels, epipolar, side
        self.pose_size: tuple[int, ...] | None = None
        if pose_size is not None:
            if not re.fullmatch(r"0*[1-9]\d*x0*[1-9]\d*", pose_size):
                raise OptionError(
                    f"pose_size must be WIDTHxHEIGHT in pixels, got {pose_size!r}; pass 640x480"
                )
            self.pose_size = tuple(map(int, pose_size.split("x")))
        self.estimators = tuple(estimators)

    def update(self, name: str, truth: PairLine, found: Matches | None) -> None:
        """Add a pair; None, or no matches, count as a failure of both estimators.

        Raises:
            DataError: An image whose size is needed cannot be read.
        """
        kind: Kind = "homography" if truth.T_0to1 is None else "pose"
        correct, errors = 0.0, dict.fromkeys(self.estimators, math.inf)
        if found is not None and len(found):
            score = self._score_pose if kind == "pose" else self._score_homography
            correct, errors = score(truth, found.keypoints0, found.keypoints1)
        self.rows.append(
            {
                "name": name,
                "line": truth.line,
                "kind": kind,
                "missing": found is None,
                "matches": 0 if found is None else len(found),
                "precision": correct,
            }
            | {f"error_{estimator}": error for estimator, error in errors.items()}
        )

    def compute(self) -> Scores:
        """AUC and precision in percent, medians in degrees or pixels, per kind of ground truth."""
        mean: dict[str, float | None] = {}
        facts: dict[str, Any] = {}
        groups: list[str] = []
        for kind, thresholds in THRESHOLDS.items():
            if not (rows := [row for row in self.rows if row["kind"] == kind]):
                continue
            facts[f"{kind}_pairs"] = len(rows)
            facts[f"{kind}_missing"] = sum(row["missing"] for row in rows)
            for name in self.estimators:
                errors, prefix = [row[f"error_{name}"] for row in rows], f"{kind}_{name}"
                groups.append(prefix)
                for threshold, area in zip(thresholds, auc(errors, thresholds), strict=True):
                    mean[f"{prefix}_auc{threshold:g}"] = area
                mean[f"{prefix}_median"] = median(errors)
                facts[f"{prefix}_failed"] = sum(map(math.isinf, errors))
            mean[f"{kind}_matches"] = fmean(row["matches"] for row in rows)
            mean[f"{kind}_precision"] = fmean(row["precision"] for row in rows)
        facts |= {"pose_pixels": self.pose_pixels, "epipolar": self.epipolar, "side": self.side}
        if self.pose_size is not None:
            facts["pose_size"] = list(self.pose_size)
        return Scores("match", mean, self.rows, COLUMNS, facts, groups=groups)

    def _score_pose(
        self, pair: PairLine, points0: Array, points1: Array
    ) -> tuple[float, dict[Estimator, float]]:
        """Return correct matches in percent, and the error of each estimator in degrees."""
        assert pair.K0 is not None and pair.K1 is not None and pair.T_0to1 is not None
        if pair.rotation0 or pair.rotation1:
            sizes = pair.sizes()
            points0 = unturned(points0, pair.rotation0, sizes[0])
            points1 = unturned(points1, pair.rotation1, sizes[1])
        cameras = pair.K0, pair.K1
        if self.pose_size is not None:
            size0, size1 = (np.divide(self.pose_size, size) for size in pair.sizes())
            points0, points1 = points0 * size0, points1 * size1
            cameras = _scaled(pair.K0, size0), _scaled(pair.K1, size1)
        errors: dict[Estimator, float] = {}
        for name in self.estimators:
            found = pose.relative_pose(
                points0, points1, *cameras, estimator=name, threshold=self.pose_pixels
            )
            moved = found and (found.rotation, found.translation)
            errors[name] = pose_error(*moved, pair.T_0to1) if moved else math.inf
        away = epipolar_errors(points0, points1, *cameras, pair.T_0to1)
        return precision(away, self.epipolar), errors

    def _score_homography(
        self, pair: PairLine, points0: Array, points1: Array
    ) -> tuple[float, dict[Estimator, float]]:
        """Return correct matches in percent, and the error of each estimator in measured pixels."""
        assert pair.H_0to1 is not None
        size0, size1 = pair.sizes()
        scale = self.side / min(size1) if self.side else 1.0  # original to measured pixels
        errors: dict[Estimator, float] = {}
        for name in self.estimators:
            pixels = pose.HOMOGRAPHY_PIXELS / scale
            found = pose.homography(points0, points1, estimator=name, threshold=pixels)
            errors[name] = corner_error(found and found.matrix, pair.H_0to1, *size0) * scale
        away = np.linalg.norm(transform(points0, pair.H_0to1) - points1, axis=1) * scale
        return precision(away, CORRECT_PIXELS), errors


def _scaled(K: Array, scale: Array) -> Array:
    """Return the camera of an image scaled by `scale`, along x and y."""
    return K * np.array([*scale, 1.0])[:, None]


def auc(errors: Sequence[float], thresholds: Sequence[float]) -> list[float]:
    """Area under the curve of recall over error, up to each threshold, in percent.

    Failures are infinite errors. The curve is piecewise linear through (0, 0) and the sorted
    errors, as in SuperGlue.
    """
    if not len(errors):
        return [float("nan")] * len(thresholds)
    ordered = np.sort(np.asarray(errors, float))
    recall = np.arange(1, len(ordered) + 1) / len(ordered)
    error, recall = np.concatenate([[0.0], ordered]), np.concatenate([[0.0], recall])
    areas = []
    for threshold in thresholds:
        end = int(np.searchsorted(error, threshold))
        x = np.concatenate([error[:end], [threshold]])
        y = np.concatenate([recall[:end], [recall[end - 1]]])
        areas.append(float(np.trapezoid(y, x) / threshold) * 100)
    return areas


def direction_error(found: Array, true: Array) -> float:
    """Angle between two directions (3,), in degrees; a direction and its opposite are the same.

    The sign of a translation cannot be determined from two images.
    """
    length, expected = float(np.linalg.norm(found)), float(np.linalg.norm(true))
    if length == 0 or expected == 0:
        return 0.0 if length == expected else 90.0
    cosine = abs(float(found @ true)) / (length * expected)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))


def pose_error(rotation: Array, translation: Array, T_0to1: Array) -> float:
    """The larger of the errors of rotation and of the direction of translation, in degrees."""
    turn = pose.rotation_degrees(rotation.T @ T_0to1[:3, :3])
    return max(turn, direction_error(translation, T_0to1[:3, 3]))


def epipolar_errors(points0: Array, points1: Array, K0: Array, K1: Array, T_0to1: Array) -> Array:
    """Symmetric squared distance of matches from their epipolar lines, normalised: (N,)."""
    x0, x1 = normalised(points0, K0), normalised(points1, K1)  # (N, 3)
    essential = cross_matrix(T_0to1[:3, 3]) @ T_0to1[:3, :3]
    line1, line0 = x0 @ essential.T, x1 @ essential
    residual = (x1 * line1).sum(axis=1) ** 2
    # a match at the epipole has no line: its error is infinite unless the residual is 0, too
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = 1 / (line1[:, :2] ** 2).sum(axis=1) + 1 / (line0[:, :2] ** 2).sum(axis=1)
        errors = residual * weights
    return np.where(np.isnan(errors), 0.0, errors)


def precision(errors: Array, threshold: float = EPIPOLAR_THRESHOLD) -> float:
    """Share of matches with an error below the threshold, in percent; nan without matches."""
    return float((errors < threshold).mean() * 100) if len(errors) else float("nan")


def corner_error(found: Array | None, true: Array, width: int, height: int) -> float:
    """Mean distance between the corners of an image under two homographies, in pixels."""
    if found is None or not np.isfinite(found).all():
        return float("inf")
    corners = np.array([[0, 0], [width - 1, 0], [0, height - 1], [width - 1, height - 1]], float)
    away = np.linalg.norm(transform(corners, found) - transform(corners, true), axis=1)
    mean = float(away.mean())
    return mean if np.isfinite(mean) else float("inf")


def transform(points: Array, homography: Array) -> Array:
    """(N, 2) points under a homography (3, 3)."""
    mapped = homogeneous(points) @ np.asarray(homography, float).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return mapped[:, :2] / mapped[:, 2:]


def cross_matrix(v: Array) -> Array:
    """Return the matrix of the cross product with `v`."""
    x, y, z = v
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]], float)


def unturned(points: Array, turns: int, size: tuple[int, int]) -> Array:
    """Map pixels of an image rotated by quarter turns counter-clockwise to the original image.

    Args:
        points: (N, 2) pixels (x, y) of the rotated image.
        turns: Number of quarter turns.
        size: Width and height of the original image.
    """
    x, y = np.asarray(points, float).T
    for turn in range(turns, 0, -1):
        height = size[0] if turn % 2 else size[1]  # after this many turns
        x, y = height - 1 - y, x
    return np.stack([x, y], axis=1)
