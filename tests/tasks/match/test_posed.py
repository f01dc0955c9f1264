# SPDX-License-Identifier: Apache-2.0
"""Pairs of several scenes in one source, and what is read in place of a pair."""

from quadtree_attention.tasks.contract import Items
from quadtree_attention.tasks.match.posed import PosedSource


def test_pairs_that_cannot_be_read_are_replaced_by_those_of_their_scene_and_then_of_the_next():
    scenes = [Items([str(i) for i in range(count)], [(count, i) for i in range(count)])
              for count in (5, 2)]  # fmt: skip
    source = PosedSource(scenes)
    assert len(source) == 7
    assert [source.images(i) for i in (0, 4, 5, 6)] == [(5, 0), (5, 4), (2, 0), (2, 1)]
    tried = [source.replacement(1, step) for step in range(9)]
    assert tried == [1, 2, 3, 4, 6, 5, 6, 5, 4]
