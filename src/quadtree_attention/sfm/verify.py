# SPDX-License-Identifier: Apache-2.0
"""Geometric verification of the matches of a pair."""

import numpy as np

from quadtree_attention.images import Array
from quadtree_attention.sfm.database import LEAST_MATCHES
from quadtree_attention.tasks.match.pose import libraries
from quadtree_attention.tasks.match.result import Matches

ERROR = 2.0  # maximum distance of an inlier from its epipolar line, in input pixels
LEAST_SHARE = 0.2  # minimum inlier share; photographs without overlap have 0.1 to 0.17
TRIALS = 2000  # of RANSAC


def agreeing(matches: Matches, scale: float) -> Array | None:
    """Return the inlier mask (N,) of a fundamental matrix; None if there are too few inliers.

    Args:
        matches: Result of `PairMatcher`; both halves are the same matches.
        scale: Pixels of the photographs per pixel of the network's input.
    """
    if len(matches) < 2 * LEAST_MATCHES:
        return None
    _, poselib = libraries()
    options = {"max_epipolar_error": ERROR * scale, "seed": 0, "max_iterations": TRIALS}
    points = matches.keypoints0, matches.keypoints1
    _, info = poselib.estimate_fundamental(*points, options, {})
    inliers = np.asarray(info["inliers"], bool)
    enough = inliers.sum() >= 2 * LEAST_MATCHES and inliers.mean() >= LEAST_SHARE
    return inliers if enough else None
