# SPDX-License-Identifier: Apache-2.0
"""Disparities of what the right view does not show, from what is around it.

What is hidden lies behind what hides it. Along a row, it continues what is farther away of the
nearest pixels that both views show.
"""

import numpy as np

from quadtree_attention.images import Array

HIDDEN = 0.5  # probability of being occluded above which a pixel is taken to be
ROWS = 9  # whose median a filled pixel gets, as rows that are filled one by one leave streaks


def fill_hidden(disparity: Array, occlusion: Array) -> Array:
    """Disparities (H, W), those of pixels that are more likely occluded than not filled in.

    Args:
        disparity: (H, W).
        occlusion: (H, W), probabilities.
    """
    hidden = occlusion > HIDDEN
    if not hidden.any():
        return disparity
    farther = from_farther_side(disparity, ~hidden)
    filled = np.where(hidden & np.isfinite(farther), farther, disparity)
    padded = np.pad(filled, ((ROWS // 2, ROWS // 2), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, ROWS, axis=0)
    filled[hidden] = np.median(windows[hidden], axis=1)
    return filled


def from_farther_side(values: Array, sure: Array) -> Array:
    """The smaller of the nearest sure values on the left and on the right; infinite without any.

    Args:
        values: (H, W).
        sure: (H, W) bool.
    """
    width = values.shape[1]
    columns = np.arange(width)
    before = np.maximum.accumulate(np.where(sure, columns, -1), axis=1)
    after = np.minimum.accumulate(np.where(sure, columns, width)[:, ::-1], axis=1)[:, ::-1]
    sides = []
    for nearest, there in ((before, before >= 0), (after, after < width)):
        value = np.take_along_axis(values, nearest.clip(0, width - 1), axis=1)
        sides.append(np.where(there, value, np.inf))
    return np.minimum(*sides)
