# SPDX-License-Identifier: Apache-2.0
"""Pairs of several scenes in one source, and what is read in place of a pair."""

import numpy as np

from quadtree_attention.tasks.contract import Items
from quadtree_attention.tasks.match.posed import PosedSource, resized_camera, resized_depth


def test_pairs_that_cannot_be_read_are_replaced_by_those_of_their_scene_and_then_of_the_next():
    scenes = [Items([str(i) for i in range(count)], [(count, i) for i in range(count)])
              for count in (5, 2)]  # fmt: skip
    source = PosedSource(scenes)
    assert len(source) == 7
    assert [source.images(i) for i in (0, 4, 5, 6)] == [(5, 0), (5, 4), (2, 0), (2, 1)]
    tried = [source.replacement(1, step) for step in range(9)]
    assert tried == [1, 2, 3, 4, 6, 5, 6, 5, 4]


def test_depth_and_camera_of_a_resized_image():
    """Depth is looked up at the middle of a new pixel, and edges stay in place."""
    depth = np.array([[1.0, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14, np.nan, 16, -1, 18]])
    assert resized_depth(depth, 2, 1).tolist() == [[8, 11]]
    assert resized_depth(depth, 6, 3)[2].tolist() == [13, 14, 0, 16, 0, 18]
    K = np.array([[60.0, 0, 2.5], [0, 30, 1], [0, 0, 1]])  # of 6x3 pixels, centre in the middle
    resized = resized_camera(K, (6, 3), (2, 1))
    np.testing.assert_allclose(resized, [[20, 0, 0.5], [0, 10, 0], [0, 0, 1]], atol=1e-12)
