# SPDX-License-Identifier: Apache-2.0
"""How good matches are: errors of the pose or homography they give, and of the points themselves.

Pure functions on NumPy arrays. Points are (N, 2) pixels (x, y), `K` a camera (3, 3), `T_0to1` the
motion (4, 4) from camera 0 to camera 1.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

POSE_THRESHOLDS = (5.0, 10.0, 20.0)  # degrees
CORNER_THRESHOLDS = (3.0, 5.0, 10.0)  # pixels
EPIPOLAR_THRESHOLD = 5e-4  # of normalised coordinates, squared: what LoFTR calls a correct match


def auc(errors: Sequence[float], thresholds: Sequence[float]) -> list[float]:
    """Area under the curve of recall over error, up to each threshold, in percent.

    Failures are infinite errors. The curve joins the sorted errors by straight lines from (0, 0),
    as SuperGlue's evaluation does and all since.
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


def rotation_error(found: Array, true: Array) -> float:
    """Angle between two rotations (3, 3), in degrees."""
    cosine = (np.trace(found.T @ true) - 1) / 2
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def direction_error(found: Array, true: Array) -> float:
    """Angle between two directions (3,), in degrees; a direction and its opposite are the same.

    Two images alone do not tell the sign of a translation apart from that of the depths.
    """
    length, expected = float(np.linalg.norm(found)), float(np.linalg.norm(true))
    if length == 0 or expected == 0:
        return 0.0 if length == expected else 90.0
    cosine = abs(float(found @ true)) / (length * expected)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))


def pose_error(rotation: Array, translation: Array, T_0to1: Array) -> float:
    """The larger of the errors of rotation and of the direction of translation, in degrees."""
    turn = rotation_error(rotation, T_0to1[:3, :3])
    return max(turn, direction_error(translation, T_0to1[:3, 3]))


def epipolar_errors(points0: Array, points1: Array, K0: Array, K1: Array, T_0to1: Array) -> Array:
    """Symmetric squared distance of matches from their epipolar lines, normalised: (N,)."""
    x0, x1 = normalised(points0, K0), normalised(points1, K1)  # (N, 3)
    essential = cross_matrix(T_0to1[:3, 3]) @ T_0to1[:3, :3]
    line1, line0 = x0 @ essential.T, x1 @ essential
    residual = (x1 * line1).sum(axis=1) ** 2
    # a match at the epipole has no line: it is as wrong as can be unless the residual is 0, too
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


def normalised(points: Array, K: Array) -> Array:
    """Pixels to rays with depth 1: (N, 2) -> (N, 3)."""
    return homogeneous(points) @ np.linalg.inv(np.asarray(K, float)).T


def homogeneous(points: Array) -> Array:
    points = np.asarray(points, float).reshape(-1, 2)
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def cross_matrix(v: Array) -> Array:
    """The matrix whose product with a vector is its cross product with `v`."""
    x, y, z = v
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]], float)
