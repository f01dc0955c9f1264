# SPDX-License-Identifier: Apache-2.0
"""Pairs of views of one plane."""

import dataclasses

import pytest
import torch

from quadtree_attention.synthetic import HomographyOptions, homography_pairs, warp
from quadtree_attention.synthetic.cameras import BEHIND, inside, pixel_grid
from quadtree_attention.synthetic.homography import apply_homography

SIZE, SIZE1 = (91, 123), (80, 140)
CLEAN = HomographyOptions(photometric=0, samples=4, texture_scale=(1.5, 3.0))


@pytest.fixture(scope="module")
def pair(textures):
    return homography_pairs(textures, range(8), size=SIZE, size1=SIZE1, options=CLEAN)


def test_points_by_the_homography_are_points_by_the_flow(pair):
    grid = pixel_grid(*SIZE, like=pair.H_0to1)
    ones = torch.ones_like(grid[..., :1])
    for b in range(8):
        point = torch.cat([grid, ones], dim=-1).double() @ pair.H_0to1[b].double().T
        expected = (point[..., :2] / point[..., 2:])[pair.visible0[b]]
        got = (grid + pair.flow0to1[b])[pair.visible0[b]]
        assert (expected - got).abs().max() < 1e-2


def test_there_and_back(pair):
    grid = pixel_grid(*SIZE, like=pair.H_0to1)
    target = grid + pair.flow0to1
    H = torch.linalg.inv(pair.H_0to1.double()).float()
    for b in range(8):
        back = apply_homography(H[b : b + 1], target[b])[0]
        assert (back - grid)[pair.visible0[b]].abs().max() < 0.02
        assert torch.equal(pair.visible0[b], inside(target[b], SIZE1))


def test_the_other_view_warped_by_the_flow_is_this_view(pair):
    for image, other, flow, visible in (
        (pair.image0, pair.image1, pair.flow0to1, pair.visible0),
        (pair.image1, pair.image0, pair.flow1to0, pair.visible1),
    ):
        error = (warp(other, flow) - image).abs().mean(dim=1)
        assert error[visible].mean() < 0.02
        assert visible.flatten(1).float().mean(dim=1).min() > 0.25


def test_beyond_the_horizon():
    H = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [-0.1, 0, 1]]])
    pixels = apply_homography(H, torch.tensor([[5.0, 2], [20, 2]]))
    assert torch.allclose(pixels[0, 0], torch.tensor([10.0, 4])) and (pixels[0, 1] == BEHIND).all()


def test_strong_perspective_gives_numbers(textures):
    options = HomographyOptions(perspective=(0.9, 0.9), rotation=(180, 180), overlap=(0, 1))
    pair = homography_pairs(textures, range(8), size=SIZE, options=options)
    for field in dataclasses.fields(pair):
        assert torch.isfinite(getattr(pair, field.name)).all()


@pytest.mark.parametrize("overlap", [(0.2, 0.4), (0.75, 1.0)])
def test_views_overlap_as_asked_for(textures, overlap):
    options = HomographyOptions(overlap=overlap, translation=(0.1, 1.0), photometric=0, samples=1)
    pair = homography_pairs(textures, range(24), size=SIZE, options=options)
    shared = [x.flatten(1).float().mean(dim=1) for x in (pair.visible0, pair.visible1)]
    least = torch.minimum(*shared)
    assert overlap[0] - 0.05 < least.min() and least.median() < overlap[1] + 0.05
