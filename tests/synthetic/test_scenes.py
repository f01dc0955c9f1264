# SPDX-License-Identifier: Apache-2.0
"""Pairs of views of scenes, and whether the truth about them is true."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic import (
    SceneOptions,
    depth_to_flow,
    homography_pairs,
    scene_pairs,
    stereo_pairs,
    warp,
)
from quadtree_attention.synthetic.cameras import inside, pixel_grid
from tests.support import raises

SIZE, SIZE1 = (121, 163), (110, 140)
CLEAN = SceneOptions(photometric=0, samples=4)
FIELDS = [field.name for field in dataclasses.fields(scene_pairs.__annotations__["return"])]


@pytest.fixture(scope="module")
def pair(textures):
    return scene_pairs(textures, range(6), size=SIZE, size1=SIZE1, seed=7, options=CLEAN)


def directions(pair):
    """Image, depth and intrinsics of both views, transform, flow, flow back, visible: both ways."""
    p = pair
    views = (p.image0, p.image1, p.depth0, p.depth1, p.K0, p.K1, p.T_0to1)
    yield (*views, p.flow0to1, p.flow1to0, p.visible0)
    back = torch.linalg.inv(p.T_0to1)
    views = (p.image1, p.image0, p.depth1, p.depth0, p.K1, p.K0, back)
    yield (*views, p.flow1to0, p.flow0to1, p.visible1)


def neighbours(x, pixels, reduce):
    """`reduce` over the four values of x (B, H, W) around each of pixels (B, H', W', 2)."""
    height, width = x.shape[1:]
    corner = pixels.floor().long()
    values = []
    for dx in (0, 1):
        for dy in (0, 1):
            column = (corner[..., 0] + dx).clamp(0, width - 1)
            row = (corner[..., 1] + dy).clamp(0, height - 1)
            values.append(x.flatten(1).gather(1, (row * width + column).flatten(1)))
    return reduce(torch.stack(values), dim=0).values.reshape(pixels.shape[:3])


def smooth(depth):
    """Away from edges: 1 / depth is linear in the pixels of a plane, and nearly on a ball."""
    bend = (F.avg_pool2d(1 / depth[:, None], 3, 1, 1, count_include_pad=False) * depth[:, None]) - 1
    rough = F.max_pool2d((bend.abs() > 1e-3).float(), 3, 1, 1)[:, 0] > 0
    rough[:, 0] = rough[:, -1] = rough[:, :, 0] = rough[:, :, -1] = True  # means are one-sided
    return ~rough


def test_shapes_and_ranges(pair):
    assert pair.image0.shape == (6, 3, *SIZE) and pair.image1.shape == (6, 3, *SIZE1)
    assert pair.depth1.shape == pair.visible1.shape == (6, *SIZE1)
    assert pair.flow0to1.shape == (6, *SIZE, 2)
    assert pair.visible0.dtype == torch.bool
    for name in FIELDS:
        assert torch.isfinite(getattr(pair, name)).all()
    for image in (pair.image0, pair.image1):
        assert image.min() >= 0 and image.max() <= 1
        assert (image.flatten(1).std(dim=1) > 0.03).all()


def test_the_other_view_warped_by_the_flow_is_this_view(pair):
    """Not exactly: it is looked up between pixels, views blur textures by their distance, and
    a pixel at an outline mixes two surfaces."""
    for image, other, *_, flow, _, visible in directions(pair):
        error = (warp(other, flow) - image).abs().mean(dim=1)
        assert error[visible].mean() < 0.02
        wrong = (warp(other, flow.flip(0)) - image).abs().mean(dim=1)
        assert wrong[visible].mean() > 0.1


def test_flow_is_what_depth_and_pose_say(pair):
    for _, _, depth, _, K, other_K, T, flow, _, visible in directions(pair):
        expected = depth_to_flow(depth, K, other_K, T)
        assert (expected - flow)[visible].abs().max() < 2e-3


def test_there_and_back(pair):
    for _, _, depth, other_depth, *_, flow, back, visible in directions(pair):
        target = flow + pixel_grid(*flow.shape[1:3], like=flow)
        flat = neighbours(smooth(other_depth).float(), target, torch.min) > 0
        sure = visible & flat & smooth(depth)
        assert sure.float().mean() > 0.2
        returned = warp(back.permute(0, 3, 1, 2), flow).permute(0, 2, 3, 1)
        error = (flow + returned)[sure].norm(dim=-1)
        # Between pixels the flow is interpolated, which perspective is not
        assert error.quantile(0.99) < 0.05 and error.max() < 0.3


def test_hidden_points_are_behind_something_and_seen_ones_are_not(pair):
    for _, other, depth, other_depth, K, _, T, flow, _, visible in directions(pair):
        target = flow + pixel_grid(*flow.shape[1:3], like=flow)
        rays = (pixel_grid(*depth.shape[1:], like=K) - K[:, None, None, :2, 2]) / K[:, :1, :1, None]
        point = torch.cat([rays, torch.ones_like(rays[..., :1])], dim=-1) * depth[..., None]
        there = (point * T[:, None, None, 2, :3]).sum(dim=-1) + T[:, None, None, 2, 3]
        within = inside(target, other.shape[2:])
        assert not (visible & ~within).any()
        hidden = within & ~visible
        assert hidden.sum() > 500
        nearest = neighbours(other_depth, target, torch.min)
        farthest = neighbours(other_depth, target, torch.max)
        # A few are hidden by what is thinner than a pixel, or lie on a rounding edge
        assert (nearest < there * 0.999)[hidden].float().mean() > 0.97
        assert (farthest > there * 0.99)[visible].float().mean() > 0.99


@pytest.mark.parametrize("make", [scene_pairs, homography_pairs, stereo_pairs])
def test_the_same_pair_in_any_batch(textures, make):
    indexes = [3, 0, 11, 8]
    batch = make(textures, indexes, size=(41, 53), seed=2)
    for i, index in enumerate(indexes):
        single = make(textures, [index], size=(41, 53), seed=2)
        for field in dataclasses.fields(batch):
            many, one = getattr(batch, field.name)[i], getattr(single, field.name)[0]
            # logarithms and powers of images round by place in memory
            assert torch.allclose(many.double(), one.double(), atol=1e-5), field.name
            if make is scene_pairs and not field.name.startswith("image"):
                assert torch.equal(many, one)
    assert not torch.equal(batch.image0[0], batch.image0[1])


def test_seed_and_index_matter(textures):
    options = SceneOptions(photometric=0)
    images = [
        scene_pairs(textures, [index], size=(24, 32), seed=seed, options=options).image0
        for seed, index in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert torch.equal(images[0], images[3])
    for i in range(3):
        assert (images[i] - images[(i + 1) % 3]).abs().mean() > 0.02


def test_photometric_changes_images_alone(textures):
    plain = scene_pairs(textures, [2], size=(24, 32), options=SceneOptions(photometric=0))
    taken = scene_pairs(textures, [2], size=(24, 32), options=SceneOptions())
    for name in FIELDS:
        same = torch.equal(getattr(plain, name), getattr(taken, name))
        assert same != name.startswith("image")


def test_enough_overlap(textures):
    wide = {"rotation": (30, 80), "baseline": (0.5, 1.5), "overlap": (0.4, 1.0)}
    wide = SceneOptions(photometric=0, samples=1, **wide)
    pair = scene_pairs(textures, range(24), size=(48, 64), options=wide)
    for visible in (pair.visible0, pair.visible1):
        assert (visible.flatten(1).float().mean(dim=1) > 0.35).all()  # it is measured coarsely


def test_options_widen_the_motion(textures):
    nothing = dict.fromkeys(("baseline", "rotation", "roll"), (0, 0))
    still = SceneOptions(photometric=0, focal_ratio=(1, 1), **nothing)
    rolled = dataclasses.replace(still, roll=(90, 90), overlap=(0, 1))
    R = scene_pairs(textures, range(8), size=(24, 32), options=still).T_0to1[:, :3, :3]
    angle = ((R.diagonal(dim1=1, dim2=2).sum(dim=1) - 1) / 2).clamp(-1, 1).acos().rad2deg()
    assert angle.max() < 20  # it still looks at a point a little aside
    R = scene_pairs(textures, range(8), size=(24, 32), options=rolled).T_0to1[:, :3, :3]
    assert (R[:, 0, 0].abs() < 0.3).all()


def test_an_empty_room(textures):
    pair = scene_pairs(textures, [0], size=(24, 32), options=SceneOptions(objects=(0, 0)))
    assert torch.isfinite(pair.depth0).all()


@pytest.mark.parametrize("size", [(7, 20), (20,), (0, 0)])
def test_bad_size(textures, size):
    message = r"size must be .height, width., each at least 8"
    raises(OptionError, message, scene_pairs, textures, [0], size=size)


@pytest.mark.gpu
def test_gpu_agrees(textures):
    here = scene_pairs(textures, range(2), size=SIZE, options=CLEAN)
    there = scene_pairs(type(textures)(16, size=128).to("cuda"), range(2), size=SIZE, options=CLEAN)
    assert (here.visible0 == there.visible0.cpu()).float().mean() > 0.999
    assert (here.flow0to1 - there.flow0to1.cpu())[here.visible0].abs().quantile(0.999) < 1e-2
    assert (here.image0 - there.image0.cpu()).abs().mean() < 1e-3
