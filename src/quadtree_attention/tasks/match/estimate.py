# SPDX-License-Identifier: Apache-2.0
"""Pose and homography from matches, by OpenCV and by poselib.

The two differ by more than matchers do, so results of both belong side by side.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from quadtree_attention.errors import MissingDependencyError, OptionError, ShapeError
from quadtree_attention.tasks.match.metrics import Array, normalised

try:
    import cv2
    import poselib
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"estimating poses needs opencv and poselib, got {error}; "
        "pip install 'quadtree-attention[models]'"
    ) from error

Estimator = Literal["poselib", "opencv"]
PIXELS = 0.5  # RANSAC's threshold for poses
HOMOGRAPHY_PIXELS = 3.0
CONFIDENCE = 0.99999
ITERATIONS = 10_000
POSE_POINTS, HOMOGRAPHY_POINTS = 5, 4  # fewer determine nothing


@dataclass(frozen=True)
class Pose:
    """Motion from camera 0 to camera 1, up to the length of its translation.

    Attributes:
        rotation: (3, 3)
        translation: (3,), of length 1.
        inliers: Boolean (N,), the matches that agree with it.
    """

    rotation: Array
    translation: Array
    inliers: Array


@dataclass(frozen=True)
class Homography:
    """Map of pixels of image 0 to pixels of image 1.

    Attributes:
        matrix: (3, 3), the last entry 1.
        inliers: Boolean (N,), the matches that agree with it.
    """

    matrix: Array
    inliers: Array


def relative_pose(
    points0: Array,
    points1: Array,
    K0: Array,
    K1: Array,
    *,
    estimator: Estimator = "poselib",
    threshold: float = PIXELS,
) -> Pose | None:
    """The motion between two cameras, or None where the matches do not give one.

    Args:
        points0: (N, 2) pixels (x, y) of image 0.
        points1: (N, 2) pixels of image 1.
        K0: Camera matrix (3, 3) of image 0.
        K1: Camera matrix of image 1.
        estimator: "poselib" (LO-RANSAC) or "opencv" (RANSAC, five points).
        threshold: Largest distance of an inlier from its epipolar line, in pixels.
    """
    check_estimator(estimator)
    K0, K1 = check_camera("K0", K0), check_camera("K1", K1)
    points0, points1 = check_points(points0, points1)
    if len(points0) < POSE_POINTS:
        return None
    solve = _poselib_pose if estimator == "poselib" else _opencv_pose
    return solve(points0, points1, K0, K1, threshold)


def homography(
    points0: Array,
    points1: Array,
    *,
    estimator: Estimator = "poselib",
    threshold: float = HOMOGRAPHY_PIXELS,
) -> Homography | None:
    """The homography between two images, or None where the matches do not give one.

    Args:
        points0: (N, 2) pixels (x, y) of image 0.
        points1: (N, 2) pixels of image 1.
        estimator: "poselib" (LO-RANSAC) or "opencv" (RANSAC).
        threshold: Largest distance of an inlier from where the homography puts it, in pixels.
    """
    check_estimator(estimator)
    points0, points1 = check_points(points0, points1)
    if len(points0) < HOMOGRAPHY_POINTS:
        return None
    solve = _poselib_homography if estimator == "poselib" else _opencv_homography
    found = solve(points0, points1, threshold)
    if found is None or not np.isfinite(found.matrix).all() or found.matrix[2, 2] == 0:
        return None
    return Homography(found.matrix / found.matrix[2, 2], found.inliers)


def _opencv_pose(
    points0: Array, points1: Array, K0: Array, K1: Array, threshold: float
) -> Pose | None:
    x0, x1 = (normalised(p, K)[:, :2] for p, K in ((points0, K0), (points1, K1)))
    focal = np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]])
    essentials, mask = cv2.findEssentialMat(
        x0, x1, np.eye(3), threshold=threshold / focal, prob=CONFIDENCE, method=cv2.RANSAC
    )
    if essentials is None or mask is None:
        return None
    best: Pose | None = None
    count = 0
    for essential in essentials.reshape(-1, 3, 3):  # one to four solutions, below each other
        n, rotation, translation, front = cv2.recoverPose(
            essential, x0, x1, np.eye(3), 1e9, mask=mask.copy()
        )[:4]
        if n > count:
            best, count = Pose(rotation, translation[:, 0], front.ravel() > 0), n
    return best


def _poselib_pose(
    points0: Array, points1: Array, K0: Array, K1: Array, threshold: float
) -> Pose | None:
    found, info = poselib.estimate_relative_pose(
        points0, points1, _camera(K0, points0), _camera(K1, points1),
        {"max_epipolar_error": threshold, "success_prob": CONFIDENCE, "max_iterations": ITERATIONS},
        {},
    )  # fmt: skip
    length = np.linalg.norm(found.t)
    if length == 0 or not np.isfinite(found.R).all():
        return None
    return Pose(np.array(found.R), np.array(found.t) / length, np.array(info["inliers"], bool))


def _opencv_homography(points0: Array, points1: Array, threshold: float) -> Homography | None:
    matrix, mask = cv2.findHomography(
        points0, points1, cv2.RANSAC, threshold, maxIters=ITERATIONS, confidence=CONFIDENCE
    )
    return None if matrix is None else Homography(matrix, mask.ravel() > 0)


def _poselib_homography(points0: Array, points1: Array, threshold: float) -> Homography | None:
    matrix, info = poselib.estimate_homography(
        points0, points1,
        {"max_reproj_error": threshold, "success_prob": CONFIDENCE, "max_iterations": ITERATIONS},
        {},
    )  # fmt: skip
    if not info["num_inliers"]:
        return None
    return Homography(np.array(matrix), np.array(info["inliers"], bool))


def _camera(K: Array, points: Array) -> dict[str, object]:
    """The camera for poselib, which wants the size of an image that a pinhole has no use for."""
    size = np.maximum(points.max(axis=0), 2 * K[:2, 2]).clip(1, 2**31 - 1)
    width, height = np.ceil(size).astype(int).tolist()
    parameters = [K[0, 0], K[1, 1], K[0, 2], K[1, 2]]
    return {"model": "PINHOLE", "width": width, "height": height, "params": parameters}


def check_estimator(estimator: str) -> None:
    if estimator not in get_args(Estimator):
        raise OptionError(f"estimator must be poselib or opencv, got {estimator!r}; take one")


def check_camera(name: str, K: Array) -> Array:
    K = np.asarray(K, float)
    if K.shape != (3, 3) or not np.isfinite(K).all() or K[0, 0] <= 0 or K[1, 1] <= 0:
        raise ShapeError(
            f"{name} must be a camera matrix (3, 3), [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] in "
            f"pixels, got {name}={np.array2string(K, separator=', ')}; pass such"
        )
    return K


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
