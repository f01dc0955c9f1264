# SPDX-License-Identifier: Apache-2.0
"""Tracks: anchors that several pairs share, and which proposals are kept."""

import numpy as np
import pytest

from quadtree_attention.sfm.tracks import PairPoints, build


def pair(image0, image1, points0, points1, anchored=True, confidence=0.9):
    points0, points1 = np.array(points0, float), np.array(points1, float)
    count = len(points0)
    return PairPoints(image0, image1, points0, points1, np.full(count, anchored),
                      np.full(count, confidence))  # fmt: skip


def listed(tracks):
    """Images and points of every track."""
    return [
        {int(i): tuple(p) for i, p in zip(tracks.images[a:b], tracks.points[a:b], strict=True)}
        for a, b in zip(tracks.starts[:-1], tracks.starts[1:], strict=True)
    ]


def test_a_cell_that_is_matched_in_two_pairs_is_one_track():
    found = build(
        [pair(0, 1, [[8.25, 16.5]], [[20.125, 30.75]]), pair(0, 2, [[8.25, 16.5]], [[40.5, 7.25]])],
        [6.0] * 3,
    )
    assert listed(found) == [{0: (8.25, 16.5), 1: (20.125, 30.75), 2: (40.5, 7.25)}]
    pairs = {(i, j): rows.tolist() for i, j, rows in found.pairs()}
    assert pairs == {(0, 1): [[0, 0]], (0, 2): [[0, 0]], (1, 2): [[0, 0]]}
    assert found.keypoints(2).tolist() == [[40.5, 7.25]]


def test_points_measured_from_the_other_image_belong_to_its_cells():
    found = build(
        [
            pair(0, 1, [[3.5, 4.5]], [[24.0, 8.0]], anchored=False),
            pair(1, 2, [[24.0, 8.0]], [[9.5, 9.75]]),
        ],
        [6.0] * 3,
    )
    assert listed(found) == [{0: (3.5, 4.5), 1: (24.0, 8.0), 2: (9.5, 9.75)}]


def test_the_longest_proposal_is_kept_where_several_show_the_same():
    near = pair(0, 1, [[9.0, 17.0]], [[20.0, 33.0]], anchored=False, confidence=0.99)
    long = [
        pair(0, 1, [[8.0, 16.0]], [[20.0, 32.0]]),
        pair(0, 2, [[8.0, 16.0]], [[40.0, 7.0]]),
    ]
    assert [len(track) for track in listed(build([near, *long], [12.0] * 3))] == [3]
    assert sorted(len(t) for t in listed(build([near, *long], [0.5] * 3))) == [2, 3]


def test_a_proposal_with_images_that_others_lack_is_kept():
    found = build(
        [
            pair(0, 1, [[8.0, 16.0]], [[20.0, 30.0]], confidence=0.99),
            pair(1, 2, [[20.0, 30.0]], [[50.0, 50.0]]),
        ],
        [12.0] * 3,
    )
    assert len(found) == 2


def test_pairs_are_in_order_and_indices_fit_the_keypoints():
    random = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(6)), -1).reshape(-1, 2) * 8.0
    shifts = random.normal(scale=9, size=(5, 2))
    made = [
        pair(i, j, grid, grid + shifts[j] - shifts[i])
        for i in range(5)
        for j in range(i + 1, 5)
        if (i, j) != (1, 3)
    ]
    found = build(made, [6.0] * 5)
    order = [(i, j) for i, j, _ in found.pairs()]
    assert order == sorted(order) and (1, 3) in order
    for i, j, rows in found.pairs():
        apart = found.keypoints(j)[rows[:, 1]] - found.keypoints(i)[rows[:, 0]]
        np.testing.assert_allclose(apart, np.tile(shifts[j] - shifts[i], (len(rows), 1)), atol=1e-4)
        assert len(np.unique(rows[:, 0])) == len(np.unique(rows[:, 1])) == len(rows)


@pytest.mark.parametrize("pairs", [[], [pair(0, 1, np.zeros((0, 2)), np.zeros((0, 2)))]])
def test_without_matches_there_are_no_tracks(pairs):
    found = build(pairs, [6.0, 6.0])
    assert len(found) == 0 and list(found.pairs()) == []
    assert found.keypoints(1).shape == (0, 2)
