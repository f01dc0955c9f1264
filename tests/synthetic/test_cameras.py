# SPDX-License-Identifier: Apache-2.0
"""Pinhole cameras and what moves between two of them."""

import math

import pytest
import torch

from quadtree_attention.errors import ShapeError
from quadtree_attention.synthetic import cameras, depth_to_flow, warp
from quadtree_attention.synthetic.cameras import (
    Camera,
    from_axis_angle,
    from_quaternion,
    inside,
    intrinsics,
    pixel_grid,
    project,
    unproject,
)
from tests.support import raises

H, W = 7, 11


def random_camera(batch=2):
    focal = torch.rand(batch, dtype=torch.float64) * 5 + 8
    K = intrinsics(focal, torch.tensor([[4.0, 3.0], [6.0, 2.5]], dtype=torch.float64))
    rotation = from_axis_angle(torch.randn(batch, 3, dtype=torch.float64) * 0.1)
    return Camera(K, rotation, torch.randn(batch, 3, dtype=torch.float64) * 0.2, (H, W))


@pytest.mark.parametrize(("make", "width"), [(from_axis_angle, 3), (from_quaternion, 4)])
def test_rotations_are_rotations(make, width):
    R = make(torch.randn(5, width, dtype=torch.float64))
    assert torch.allclose(R @ R.mT, torch.eye(3, dtype=torch.float64).expand(5, 3, 3))
    assert torch.allclose(torch.linalg.det(R), torch.ones(5, dtype=torch.float64))


def test_convention_axis_angle_is_right_handed():
    R = from_axis_angle(torch.tensor([0.0, 0.0, math.pi / 2]))
    assert torch.allclose(R @ torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 1, 0]), atol=1e-6)
    half = math.sqrt(0.5)
    assert torch.allclose(from_quaternion(torch.tensor([half, 0, 0, half])), R, atol=1e-6)


def test_convention_pixel_centres_are_whole_numbers():
    K = intrinsics(torch.tensor([10.0]), torch.tensor([[4.0, 3.0]]))
    points = unproject(torch.full((1, H, W), 2.0), K)
    assert points[0, 3, 4].tolist() == [0, 0, 2]
    assert points[0, 3, 9].tolist() == [1, 0, 2]
    assert torch.allclose(project(points, K)[0], pixel_grid(H, W, K), atol=1e-5)


def test_points_behind_the_camera_are_outside():
    K = random_camera().K.float()
    pixels = project(torch.tensor([0.0, 0, -1]).expand(2, 3, 4, 3), K)
    assert (pixels == cameras.BEHIND).all() and not inside(pixels, (H, W)).any()


def test_flow_agrees_with_matrices():
    one, two = random_camera(), random_camera()
    depth = torch.rand(2, H, W, dtype=torch.float64) + 2
    T = cameras.transform(one, two)
    flow = depth_to_flow(depth, one.K, two.K, T)
    ones = torch.ones(H, W, 1, dtype=torch.float64)
    for b in range(2):
        pixel = torch.cat([pixel_grid(H, W, depth), ones], dim=-1)
        point = pixel @ torch.linalg.inv(one.K[b]).T * depth[b, ..., None]
        point = torch.cat([point, ones], dim=-1) @ T[b].T
        seen = point[..., :3] @ two.K[b].T
        assert torch.allclose(seen[..., :2] / seen[..., 2:], flow[b] + pixel[..., :2])
    points = unproject(depth, one.K)
    moved = points @ T[:, None, :3, :3].mT + T[:, None, None, :3, 3]
    assert torch.allclose(two.from_world(one.to_world(points)), moved)


def test_resized_camera_keeps_the_edges_of_the_view():
    camera = random_camera()
    small = camera.resized(14, 33)
    for corner in ((-0.5, -0.5), (W - 0.5, H - 0.5)):
        at = torch.tensor(corner, dtype=torch.float64)
        there = (at + 0.5) * torch.tensor([3.0, 2.0]) - 0.5
        ray = (at - camera.K[:, :2, 2]) / camera.K.diagonal(dim1=1, dim2=2)[:, :2]
        again = (there - small.K[:, :2, 2]) / small.K.diagonal(dim1=1, dim2=2)[:, :2]
        assert torch.allclose(ray, again)


def test_warp_moves_by_the_flow():
    image = torch.rand(2, 3, 9, 13)
    flow = torch.tensor([2.0, 1.0]).expand(2, H, W, 2)
    assert torch.allclose(warp(image, flow), image[:, :, 1 : H + 1, 2 : W + 2], atol=1e-5)
    between = warp(image, flow + torch.tensor([0.5, 0.0]))
    mean = (image[:, :, 1 : H + 1, 2:12] + image[:, :, 1 : H + 1, 3:13]) / 2
    assert torch.allclose(between[..., :10], mean, atol=1e-5)
    assert (warp(image, flow + 100) == 0).all()


def test_bad_shapes():
    eye = torch.eye(3)[None]
    maps = torch.ones(H, W), eye, eye, torch.eye(4)[None]
    raises(ShapeError, r"depth_to_flow needs .* got \(7, 11\)", depth_to_flow, *maps)
    raises(ShapeError, "warp needs", warp, torch.ones(1, 3, H, W), torch.ones(2, H, W, 2))


def test_inside_ends_at_the_centres_of_the_outer_pixels():
    near = [(0, 0), (W - 1, H - 1), (W - 1, 0), (0, H - 1)]
    off = [(W - 0.99, 2), (2, H - 0.99), (-0.01, 2), (2, -0.01), (W, 2), (2, H)]
    assert inside(torch.tensor(near, dtype=torch.float64), (H, W)).all()
    assert not inside(torch.tensor(off, dtype=torch.float64), (H, W)).any()
