# SPDX-License-Identifier: Apache-2.0
"""Whether the matches of a pair agree on a geometry."""

import numpy as np

from quadtree_attention.images import Array
from quadtree_attention.sfm.database import LEAST_MATCHES
from quadtree_attention.tasks.match.pose import libraries
from quadtree_attention.tasks.match.result import Matches

ERROR = 2.0  # pixels, as the network sees them, that an inlier may be from its epipolar line
LEAST_SHARE = 0.2  # of matches that agree: between photographs without overlap it is 0.1 to 0.17
TRIALS = 2000  # of RANSAC


def agreeing(matches: Matches, scale: float) -> Array | None:
    """Which matches (N,) agree on a fundamental matrix; None if too few do.

    Args:
        matches: As `PairMatcher` gives them; both halves are the same matches.
        scale: Pixels of the photographs to one pixel that the network sees.
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
