# SPDX-License-Identifier: Apache-2.0
"""Hidden pixels continue what is behind."""

import numpy as np

from quadtree_attention.tasks.stereo.filling import fill_hidden, from_farther_side


def test_hidden_pixels_continue_what_is_behind():
    """A far wall, a hidden strip, a near post; and a strip at the edge that has one side only."""
    row = np.array([99, 99, 5, 5, 77, 77, 30, 30, 5], np.float32)
    hidden = np.array([1, 1, 0, 0, 1, 1, 0, 0, 0], np.float32)
    disparity, occlusion = (np.tile(x, (12, 1)) for x in (row, hidden))
    filled = fill_hidden(disparity, occlusion)
    assert filled.dtype == np.float32
    assert filled.tolist() == [[5, 5, 5, 5, 5, 5, 30, 30, 5]] * 12
    assert disparity[0, 0] == 99  # what was given is left alone
    # One row whose neighbour is wrong does not show among the others.
    disparity = np.full((11, 6), 4.0, np.float32)
    disparity[5, :3] = 1.0
    occlusion = np.zeros_like(disparity)
    occlusion[:, 3] = 1.0
    filled = fill_hidden(disparity, occlusion)
    assert (filled[:, 3] == 4.0).all()
    assert (filled[5, :3] == 1.0).all()  # what is seen stays as it is
    # Three hidden rows between rows of a near object that is seen above and below them.
    disparity = np.full((15, 6), 30.0, np.float32)
    occlusion = np.zeros_like(disparity)
    disparity[6:9, :3], occlusion[6:9, 3] = 5.0, 1.0
    filled = fill_hidden(disparity, occlusion)
    assert (filled[6:9, 3] == 5.0).all()


def test_what_nothing_is_sure_of_and_edges():
    disparity = np.arange(240, dtype=np.float32).reshape(12, 20) ** 2
    assert np.array_equal(fill_hidden(disparity, np.ones_like(disparity)), disparity)
    assert np.array_equal(fill_hidden(disparity, np.zeros_like(disparity)), disparity)
    assert np.isinf(from_farther_side(disparity, np.zeros_like(disparity, bool))).all()
    values = np.arange(5, dtype=np.float32)[None] + 3
    for column in (0, 4):
        found = from_farther_side(values, np.arange(5)[None] == column)
        assert (found == values[0, column]).all()
