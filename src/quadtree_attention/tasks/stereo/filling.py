# SPDX-License-Identifier: Apache-2.0
"""Filling of occluded disparities from their surroundings.

Occluded surfaces are behind the occluding ones. An occluded pixel gets the disparity of the farther
of the two nearest non-occluded pixels in its row; a median over a few rows removes streaks.
"""

import numpy as np

from quadtree_attention.images import Array
from quadtree_attention.tasks.stereo.result import OCCLUDED

ROWS = 9  # of a column: a filled pixel gets the median of the filled pixels in these rows


def fill_hidden(disparity: Array, occlusion: Array) -> Array:
    """Fill disparities (H, W) of pixels with a high probability of occlusion (H, W)."""
    hidden = occlusion > OCCLUDED
    farther = from_farther_side(disparity, ~hidden)
    fills = hidden & np.isfinite(farther)  # not in rows without a non-occluded pixel
    margin = ((ROWS // 2, ROWS // 2), (0, 0))
    values = np.pad(np.where(fills, farther, np.nan), margin, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(values, ROWS, axis=0)
    filled = disparity.copy()
    filled[fills] = np.nanmedian(windows[fills], axis=1)
    return filled


def from_farther_side(values: Array, sure: Array) -> Array:
    """The smaller of the nearest valid values (H, W) on the left and right; else infinity."""
    width = values.shape[1]
    columns = np.arange(width)
    before = np.maximum.accumulate(np.where(sure, columns, -1), axis=1)
    after = np.minimum.accumulate(np.where(sure, columns, width)[:, ::-1], axis=1)[:, ::-1]
    sides = []
    for nearest, there in ((before, before >= 0), (after, after < width)):
        value = np.take_along_axis(values, nearest.clip(0, width - 1), axis=1)
        sides.append(np.where(there, value, np.inf))
    return np.minimum(*sides)
