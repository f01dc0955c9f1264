# SPDX-License-Identifier: Apache-2.0
"""Checks of two images for a rectified pair in the right order, from a few corresponding points.

A stereo network returns disparities for any input. The points are found by SIFT, independently of
the network, and are the basis of warnings about unrectified or swapped pairs.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

from quadtree_attention.checks import needs
from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.result import OCCLUDED

with needs("models", "checking pairs"):
    import cv2

SIZE = 640  # longer side in pixels at which points are detected
FEATURES = 800
RATIO = 0.75  # maximum ratio of the distances of the two nearest descriptors
FEWEST = 20  # minimum number of points for a decision
# In 16 known pairs, at most 10 % of the points are off their rows and 2 % behind; after a rotation
# by 1.5 degrees, a shift by 4 pixels or a swap, at least 45 % and 95 %.
ROW_PIXELS, MOST_OFF_ROWS = 2.0, 0.3
BEHIND_PIXELS, MOST_BEHIND = 1.0, 0.5
ZERO_PIXELS = 0.5  # disparities below count as zero
MOST_AT_ZERO = 0.6  # maximum share of non-occluded pixels; skies and far walls have less
MOST_OCCLUDED = 0.7


class Points(NamedTuple):
    """Displacements of points from the left to the right image, both at a side of `SIZE`."""

    dx: Array  # (N,) disparities in pixels
    dy: Array  # (N,) pixels down; about 0 in a rectified pair

    @property
    def off_rows(self) -> float:
        """Share of points in a different row; 0 if there are too few points."""
        return float((np.abs(self.dy) > ROW_PIXELS).mean()) if len(self.dy) >= FEWEST else 0.0

    @property
    def behind(self) -> float:
        """Share of points with a negative disparity; 0 if there are too few points."""
        return float((self.dx < -BEHIND_PIXELS).mean()) if len(self.dx) >= FEWEST else 0.0


def pair_warnings(left: Image.Image, right: Image.Image) -> tuple[str, ...]:
    """Return warnings about a pair of images of the same size."""
    points = common_points(left, right)
    found = []
    if points.off_rows > MOST_OFF_ROWS:
        away = float(np.median(np.abs(points.dy))) * max(left.size) / min(SIZE, max(left.size))
        found.append(
            f"the pair does not look rectified: {100 * points.off_rows:.0f} % of "
            f"{len(points.dy)} points are in another row on the right, by {away:.1f} pixels in the "
            "middle; rectify it first, with the calibration of the cameras"
        )
    if points.behind > MOST_BEHIND:
        found.append(
            f"left and right look swapped: {100 * points.behind:.0f} % of {len(points.dx)} points "
            "are further right in the right image; pass the images the other way round"
        )
    return tuple(found)


def result_warnings(disparity: Array, occlusion: Array, *, scale: float = 1.0) -> tuple[str, ...]:
    """Return warnings about a result: disparities and probabilities of occlusion, (H, W).

    `scale` is the size of a pixel of the network's input in pixels of the images.
    """
    seen = occlusion <= OCCLUDED
    hidden = 1 - float(seen.mean())
    if hidden > MOST_OCCLUDED:
        return (
            f"{100 * hidden:.0f} % of the left image seems to be hidden in the right one; check "
            "that both show the same at the same time, rectified, left one first",
        )
    at_zero = float((disparity[seen] < ZERO_PIXELS * scale).mean())
    if at_zero > MOST_AT_ZERO:
        return (
            f"{100 * at_zero:.0f} % of the disparities are about zero; check that the images "
            "differ, that the left one is first, and that the scene is not too distant",
        )
    return ()


def common_points(left: Image.Image, right: Image.Image) -> Points:
    """Return SIFT points of both images: mutual nearest neighbours that pass Lowe's ratio test."""
    detector = cv2.SIFT.create(nfeatures=FEATURES)
    found: list[tuple[Array, Array]] = []
    for image in (left, right):
        grey = image.convert("L")
        grey.thumbnail((SIZE, SIZE), Image.Resampling.BICUBIC)
        keypoints, descriptors = detector.detectAndCompute(np.asarray(grey), None)
        if len(keypoints) < 2:
            return Points(np.zeros(0), np.zeros(0))
        found.append((np.array([keypoint.pt for keypoint in keypoints], float), descriptors))
    (points0, d0), (points1, d1) = found
    squared = (d0**2).sum(1)[:, None] + (d1**2).sum(1) - 2 * d0 @ d1.T
    nearest, back = squared.argmin(axis=1), squared.argmin(axis=0)
    first, second = np.partition(squared, 1, axis=1)[:, :2].T
    good = (back[nearest] == np.arange(len(d0))) & (first < RATIO**2 * second)
    moved = points1[nearest[good]] - points0[good]
    return Points(-moved[:, 0], moved[:, 1])
