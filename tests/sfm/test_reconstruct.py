# SPDX-License-Identifier: Apache-2.0
"""Which pairs tracks are made from."""

import numpy as np
import pytest

from quadtree_attention.sfm.reconstruct import verified
from quadtree_attention.tasks.match.result import Matches
from tests.support.scene import ground, pose

pytest.importorskip("poselib", reason="pairs are verified by poselib, of the extra 'models'")
COUNT, FOCAL = 400, 260.0


@pytest.fixture(scope="module")
def points():
    """A hilly ground as four cameras see it, (4, COUNT, 2)."""
    x, y = np.random.default_rng(0).uniform(-1, 1, (2, COUNT))
    world = np.stack([x, y, ground(x, y)], axis=1)
    motions = [pose(angle) for angle in (0.0, 0.3, 0.6, 0.9)]
    seen = np.stack([world @ m[:, :3].T + m[:, 3] for m in motions])
    return seen[..., :2] / seen[..., 2:] * FOCAL + 128


def matches(points, i, j, right):
    """Of which that number is right, and the others are anywhere."""
    points0, points1 = points[i].copy(), points[j].copy()
    points1[right:] = np.random.default_rng(10 * i + j).uniform(0, 256, (COUNT - right, 2))
    return Matches(points0, points1, np.full(COUNT, 0.9))


def test_a_doubtful_pair_is_used_where_a_photograph_has_no_better_ones(points):
    rights = {(0, 1): 360, (0, 2): 320, (1, 2): 340, (0, 3): 110, (1, 3): 120, (2, 3): 90}
    pairs = [(pair, matches(points, *pair, right)) for pair, right in rights.items()]
    found = {(p.image0, p.image1): len(p.points0) for p in verified(pairs, [1.0] * 4)}
    assert set(found) == set(rights) - {(2, 3)}
    assert all(rights[pair] <= count < rights[pair] + 60 for pair, count in found.items())
