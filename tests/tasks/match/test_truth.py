# SPDX-License-Identifier: Apache-2.0
"""True matches from flow and from depth."""

import numpy as np
import torch

from quadtree_attention.tasks.match.truth import (
    View,
    depth_at,
    true_matches,
    view_from_depth,
    view_from_flow,
)
from tests.tasks.match.geometry import K0, K1, POSE

STRIDE = 8


def shifted(height, width, dx, dy):
    """Views of two images of which the second is the first, moved."""
    flow = torch.tensor([dx, dy], dtype=torch.float64).expand(1, height, width, 2)
    seen = torch.ones(1, height, width, dtype=torch.bool)
    return view_from_flow(flow, seen), view_from_flow(-flow, seen)


def test_shifts():
    view0, view1 = shifted(40, 60, dx=16.0, dy=-8.0)  # 5 x 8 cells
    matches, points = true_matches(view0, view1, STRIDE)
    pairs = {
        (int(i) // 8, int(i) % 8, int(j) // 8, int(j) % 8)
        for i, j in zip(matches.cells0, matches.cells1, strict=True)
    }
    assert pairs == {(y, x, y - 1, x + 2) for y in range(1, 5) for x in range(6)}
    x, y = matches.cells0 % 8 * 8.0, matches.cells0 // 8 * 8.0
    assert torch.equal(points, torch.stack([x + 16.0, y - 8.0], dim=1).double())
    matches, points = true_matches(*shifted(40, 60, dx=3.0, dy=0.0), STRIDE)
    assert torch.equal(matches.cells0, matches.cells1)
    assert torch.equal(points[:, 0], (matches.cells0 % 8 * 8.0 + 3.0).double())
    view0, view1 = shifted(40, 60, dx=0.0, dy=0.0)
    seen = view0.seen.clone()
    seen[:, 8, 16] = False  # cell (1, 2)
    matches, _ = true_matches(View(view0.target, seen), view1, STRIDE)
    assert len(matches) == 39 and 1 * 8 + 2 not in matches.cells0.tolist()
    assert len(true_matches(view0, View(view1.target, seen), STRIDE)[0]) == 39
    view0, view1 = shifted(40, 60, dx=0.0, dy=0.0)
    cut = View(view1.target[:, :25, :33], view1.seen[:, :25, :33])  # 4 x 5 cells
    both = [View(v.target.repeat(2, 1, 1, 1), v.seen.repeat(2, 1, 1)) for v in (view0, cut)]
    matches, _ = true_matches(*both, STRIDE)
    assert torch.bincount(matches.batch_indexes).tolist() == [20, 20]
    assert matches.cells1.max() == 19


def test_cells_must_be_each_others_nearest():
    """Image 1 shows image 0 at half its size: four cells go to one, which goes back to one."""
    height, width = 64, 64
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    seen = torch.ones(1, height, width, dtype=torch.bool)
    smaller = View((torch.stack([x, y], dim=-1) / 2)[None], seen)
    larger = View((torch.stack([x, y], dim=-1) * 2)[None], seen)
    matches, _ = true_matches(smaller, larger, STRIDE)
    assert len(matches) == 16
    assert torch.equal(matches.cells0.unique(), matches.cells0)
    assert torch.equal(matches.cells1.unique().sort().values, matches.cells1.sort().values)


def test_a_plane_seen_by_two_cameras():
    """Depth gives what geometry says, in both directions."""
    height, width = 96, 128
    normal, distance = np.array([0.1, -0.2, 1.0]), 4.0
    rays = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)
    rays = np.concatenate([rays, np.ones((height, width, 1))], axis=-1)
    depth0 = distance / (rays @ np.linalg.inv(K0).T @ normal)
    normal1 = POSE[:3, :3] @ normal
    distance1 = distance + normal1 @ POSE[:3, 3]
    depth1 = distance1 / (rays @ np.linalg.inv(K1).T @ normal1)
    depth0, depth1, cam0, cam1, pose = (
        torch.from_numpy(np.ascontiguousarray(a))[None] for a in (depth0, depth1, K0, K1, POSE)
    )
    view = view_from_depth(depth0, depth1, cam0, cam1, pose)
    expected = K1 @ (POSE[:3, :3] + np.outer(POSE[:3, 3], normal) / distance) @ np.linalg.inv(K0)
    moved = rays @ expected.T
    truth = torch.from_numpy(moved[..., :2] / moved[..., 2:])[None]
    torch.testing.assert_close(view.target, truth)
    inside = (truth >= 0).all(-1) & (truth[..., 0] <= width - 1) & (truth[..., 1] <= height - 1)
    assert inside.any() and torch.equal(view.seen & inside, inside)


def test_depths_that_are_unknown_or_contradict():
    depth = torch.full((1, 10, 12), 2.0)
    camera = torch.tensor([[[50.0, 0, 6], [0, 50, 5], [0, 0, 1]]])
    still = torch.eye(4)[None]
    other = depth.clone()
    other[:, :, :3] = 0.0  # not measured
    other[:, :, 3:6] = 1.0  # something nearer
    seen = view_from_depth(depth, other, camera, camera, still).seen
    assert not seen[:, :, :6].any() and seen[:, :, 6:].all()
    for ratio, agrees in ((0.8, False), (0.85, True), (1.24, True), (1.26, False)):  # by a fifth
        seen = view_from_depth(depth, ratio * depth, camera, camera, still).seen
        assert seen.all() if agrees else not seen.any()
    depth[:, 0] = 0.0
    assert not view_from_depth(depth, other, camera, camera, still).seen[:, 0].any()
    depth = torch.arange(6.0).view(1, 2, 3)
    points = torch.tensor([[[0.4, 0.0], [1.6, 0.9], [2.6, 0.0], [-0.6, 1.0]]])
    assert depth_at(depth, points).tolist() == [[0.0, 5.0, 0.0, 0.0]]
