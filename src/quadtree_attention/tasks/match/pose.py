# SPDX-License-Identifier: Apache-2.0
"""Pose and homography from matches, by OpenCV and by poselib.

Results of the two estimators differ by more than results of different matchers; report both.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from quadtree_attention.checks import needs, one_of
from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.images import Array

Estimator = Literal["poselib", "opencv"]
ESTIMATORS: tuple[Estimator, ...] = ("poselib", "opencv")
Camera: TypeAlias = Array | Sequence[float] | Sequence[Sequence[float]]
PIXELS = 0.5  # RANSAC's threshold for poses
HOMOGRAPHY_PIXELS = 3.0
CONFIDENCE = 0.99999
ITERATIONS = 10_000
RANSAC = {"success_prob": CONFIDENCE, "max_iterations": ITERATIONS}  # names of poselib
POSE_POINTS, HOMOGRAPHY_POINTS = 5, 4  # minimum number of matches
FEW, FEW_SHARE = 30, 0.2  # inliers, and share of the matches: below, poses are often wrong


@dataclass(frozen=True)
class Pose:
    """Motion from camera 0 to camera 1, up to the scale of its translation.

    Attributes:
        rotation: (3, 3)
        translation: (3,), of length 1.
        inliers: Boolean (N,), True for inliers.
    """

    rotation: Array
    translation: Array
    inliers: Array

    @property
    def degrees(self) -> float:
        """Angle of the rotation in degrees."""
        return rotation_degrees(self.rotation)

    @property
    def caution(self) -> str | None:
        """Warning about a pose with few inliers; None if there are enough."""
        count, total = int(self.inliers.sum()), len(self.inliers)
        if count >= FEW and count >= FEW_SHARE * total:
            return None
        return (
            f"only {count:,} of {total:,} matches agree with the pose; it is often wrong with "
            f"fewer than {FEW} inliers, or than {FEW_SHARE:.0%} of the matches"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "rotation_degrees": self.degrees,
            "rotation": self.rotation.tolist(),
            "translation": self.translation.tolist(),
            "inliers": int(self.inliers.sum()),
        }

    def to_text(self) -> str:
        direction = ", ".join(f"{value:.3f}" for value in self.translation)
        return (
            f"rotation {self.degrees:.2f} degrees, translation along ({direction}), "
            f"{self.inliers.sum():,} of {len(self.inliers):,} inliers"
            + (f"; caution: {self.caution}" if self.caution else "")
        )


class Homography(NamedTuple):
    """Map of pixels of image 0 to pixels of image 1."""

    matrix: Array  # (3, 3), the last entry 1
    inliers: Array  # boolean (N,), True for inliers


def relative_pose(
    points0: Array,
    points1: Array,
    K0: Camera,
    K1: Camera,
    *,
    estimator: Estimator = "poselib",
    threshold: float = PIXELS,
) -> Pose | None:
    """Estimate the motion between two cameras; None if the matches do not determine it.

    Args:
        points0: (N, 2) pixels (x, y) of image 0.
        points1: (N, 2) pixels of image 1.
        K0: Camera of image 0: a matrix (3, 3), or fx, fy, cx, cy, in pixels.
        K1: Camera of image 1.
        estimator: "poselib" (LO-RANSAC) or "opencv" (RANSAC, five points).
        threshold: Maximum distance of an inlier from its epipolar line, in pixels.
    """
    one_of(ESTIMATORS, estimator=estimator)
    cameras = camera_matrix(K0, "K0"), camera_matrix(K1, "K1")
    points0, points1 = check_points(points0, points1)
    if len(points0) < POSE_POINTS:
        return None
    if estimator == "opencv":
        return _opencv_pose(points0, points1, *cameras, threshold)
    _, poselib = libraries()
    given = _camera(cameras[0], points0), _camera(cameras[1], points1)
    options = {"max_epipolar_error": threshold, **RANSAC}
    found, info = poselib.estimate_relative_pose(points0, points1, *given, options, {})
    length = np.linalg.norm(found.t)
    if length == 0 or not np.isfinite(found.R).all():
        return None
    return Pose(np.array(found.R), np.array(found.t) / length, np.array(info["inliers"], bool))


def homography(
    points0: Array,
    points1: Array,
    *,
    estimator: Estimator = "poselib",
    threshold: float = HOMOGRAPHY_PIXELS,
) -> Homography | None:
    """Estimate the homography between two images; None if the matches do not determine it.

    Args:
        points0: (N, 2) pixels (x, y) of image 0.
        points1: (N, 2) pixels of image 1.
        estimator: "poselib" (LO-RANSAC) or "opencv" (RANSAC).
        threshold: Maximum error of an inlier under the homography, in pixels.
    """
    one_of(ESTIMATORS, estimator=estimator)
    points0, points1 = check_points(points0, points1)
    if len(points0) < HOMOGRAPHY_POINTS:
        return None
    cv2, poselib = libraries()
    if estimator == "poselib":
        options = {"max_reproj_error": threshold, **RANSAC}
        matrix, info = poselib.estimate_homography(points0, points1, options, {})
        matrix = np.array(matrix) if info["num_inliers"] else None
        inliers = np.array(info["inliers"], bool)
    else:
        matrix, mask = cv2.findHomography(
            points0, points1, cv2.RANSAC, threshold, maxIters=ITERATIONS, confidence=CONFIDENCE
        )
        inliers = np.ravel(0 if mask is None else mask) > 0
    if matrix is None or not np.isfinite(matrix).all() or matrix[2, 2] == 0:
        return None
    return Homography(matrix / matrix[2, 2], inliers)


def libraries() -> tuple[Any, Any]:
    """Import OpenCV and poselib.

    Raises:
        MissingDependencyError: One of them is not installed.
    """
    with needs("models", "estimating poses"):
        import cv2
        import poselib
    return cv2, poselib


def _opencv_pose(
    points0: Array, points1: Array, K0: Array, K1: Array, threshold: float
) -> Pose | None:
    cv2, _ = libraries()
    x0, x1 = (normalised(p, K)[:, :2] for p, K in ((points0, K0), (points1, K1)))
    focal = np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]])
    essentials, mask = cv2.findEssentialMat(
        x0, x1, np.eye(3), threshold=threshold / focal, prob=CONFIDENCE, method=cv2.RANSAC
    )
    if essentials is None or mask is None:
        return None
    best: Pose | None = None
    count = 0
    for essential in essentials.reshape(-1, 3, 3):  # one to four stacked solutions
        n, rotation, translation, front = cv2.recoverPose(
            essential, x0, x1, np.eye(3), 1e9, mask=mask.copy()
        )[:4]
        if n > count:
            best, count = Pose(rotation, translation[:, 0], front.ravel() > 0), n
    return best


def _camera(K: Array, points: Array) -> dict[str, object]:
    """Return the camera for poselib, which requires an image size; a pinhole does not use it."""
    size = np.maximum(points.max(axis=0), 2 * K[:2, 2]).clip(1, 2**31 - 1)
    width, height = np.ceil(size).astype(int).tolist()
    parameters = [K[0, 0], K[1, 1], K[0, 2], K[1, 2]]
    return {"model": "PINHOLE", "width": width, "height": height, "params": parameters}


def camera_matrix(K: Camera, name: str = "K") -> Array:
    """Return a camera matrix (3, 3) from a matrix, nine numbers row by row, or fx, fy, cx, cy.

    Raises:
        ShapeError: The input is none of these; the message refers to it by `name`.
    """
    try:
        given = np.asarray(K, float)
    except (TypeError, ValueError):  # no numbers, or rows of different lengths
        given = np.asarray(str(K))
    matrix = given.reshape(3, 3) if given.shape == (9,) else given
    if given.shape == (4,):
        fx, fy, cx, cy = given
        matrix = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])
    fits = matrix.shape == (3, 3) and np.isfinite(matrix).all()
    if not fits or matrix[0, 0] <= 0 or matrix[1, 1] <= 0:
        raise ShapeError(
            f"{name} must be a camera matrix (3, 3), [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], or "
            f"fx, fy, cx, cy, in pixels, got {np.array2string(given, separator=', ')}"
        )
    if (last := matrix[2].tolist()) != [0, 0, 1]:
        raise ShapeError(f"{name} must end in 0, 0, 1, got {last}; pass it row by row")
    return matrix


def read_camera(name: str, given: str) -> Array:
    """Parse a camera (3, 3) from the text "fx,fy,cx,cy" or nine numbers, or from a file of either.

    Raises:
        OptionError: The text is none of these; `name` is the name of the option.
        ShapeError: The numbers are not a camera.
    """
    accepted = "fx,fy,cx,cy in pixels, nine numbers row by row, or a text file with either"
    try:
        text = Path(given).read_text(encoding="utf-8") if os.path.isfile(given) else given
        numbers = [float(word) for word in re.split(r"[\s,;]+", text.strip("[]() \t\r\n,;"))]
    except (OSError, ValueError) as error:
        raise OptionError(f"{name} must be {accepted}, got {given!r}, which is neither") from error
    if len(numbers) not in (4, 9):
        raise OptionError(f"{name} must be {accepted}, got {len(numbers)} numbers")
    return camera_matrix(numbers, name)


def rotation_degrees(rotation: Array) -> float:
    """Return the angle of a rotation (3, 3) in degrees."""
    cosine = (np.trace(rotation) - 1) / 2
    return float(np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0))))


def normalised(points: Array, K: Array) -> Array:
    """Map pixels to rays with depth 1: (N, 2) -> (N, 3)."""
    return homogeneous(points) @ np.linalg.inv(np.asarray(K, float)).T


def homogeneous(points: Array) -> Array:
    points = np.asarray(points, float).reshape(-1, 2)
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def check_points(points0: Array, points1: Array) -> tuple[Array, Array]:
    points0, points1 = (np.asarray(points, float) for points in (points0, points1))
    if points0.shape != points1.shape or points0.ndim != 2 or points0.shape[1] != 2:
        raise ShapeError(
            f"points must be (N, 2) and as many in both images, got {points0.shape} and "
            f"{points1.shape}; row i of one belongs to row i of the other"
        )
    if not (np.isfinite(points0).all() and np.isfinite(points1).all()):
        raise OptionError("points must be finite numbers, got others; leave out such matches")
    return points0, points1
