# SPDX-License-Identifier: Apache-2.0
"""Rectified pairs: rows stay, columns move by the disparity."""

import dataclasses

import pytest
import torch

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic import SceneOptions, StereoOptions, stereo_pairs, warp
from quadtree_attention.synthetic.draws import Draws
from quadtree_attention.synthetic.layout import first_camera, place
from tests.support import raises

SIZE = (97, 163)
CLEAN = StereoOptions(photometric=0, samples=4)
BEFORE = (51.79683199188219, 449.0782183879322, -0.0911909715010566)  # sums of drawn numbers


@pytest.fixture(scope="module")
def pair(textures):
    return stereo_pairs(textures, range(6), size=SIZE, options=CLEAN)


def along_rows(shift):
    return torch.stack([shift, torch.zeros_like(shift)], dim=-1)


def test_disparity_is_focal_length_times_baseline_over_depth(pair):
    shift = (pair.K[:, 0, 0] * pair.baseline)[:, None, None]
    assert torch.equal(pair.disparity0, shift / pair.depth0)
    assert torch.equal(pair.disparity1, shift / pair.depth1)
    assert (pair.disparity0 > 0).all()


def test_the_right_view_moved_by_the_disparity_is_the_left_one(pair):
    """And the other way round; not exactly, for outlines mix two surfaces."""
    for image, other, shift, occluded in (
        (pair.image0, pair.image1, -pair.disparity0, pair.occluded0),
        (pair.image1, pair.image0, pair.disparity1, pair.occluded1),
    ):
        error = (warp(other, along_rows(shift)) - image).abs().mean(dim=1)
        assert error[~occluded].mean() < 0.02
        assert error[occluded].mean() > 0.05
        row_off = warp(other, along_rows(shift) + torch.tensor([0.0, 1.0]))
        assert (row_off - image).abs().mean(dim=1)[~occluded].mean() > error[~occluded].mean() * 1.5


def test_disparities_agree_where_not_occluded(pair):
    """By the nearest pixel: what lies between has a surface of its own only at outlines."""
    columns = torch.arange(SIZE[1]) - pair.disparity0
    nearest = columns.round().long().clamp(0, SIZE[1] - 1)
    other = pair.disparity1.gather(2, nearest)
    differ = (other - pair.disparity0).abs() > 0.5
    assert differ[~pair.occluded0].float().mean() < 0.02
    outside = columns < -0.5
    assert pair.occluded0[outside].all()
    hidden = pair.occluded0 & (columns > 0)
    assert hidden.sum() > 200
    assert (other - pair.disparity0 > 0)[hidden].float().mean() > 0.9  # by something nearer


def test_largest_disparity(textures):
    options = dataclasses.replace(CLEAN, disparity=(0.1, 0.1))
    pair = stereo_pairs(textures, range(3), size=SIZE, options=options)
    largest = pair.disparity0.flatten(1).amax(dim=1)
    assert torch.allclose(largest, torch.full((3,), 0.1 * SIZE[1]), rtol=1e-4)


def test_views_differ_in_brightness(textures):
    strong = dataclasses.replace(CLEAN, photometric=1.0)
    pair = stereo_pairs(textures, range(8), size=(33, 40), options=strong)
    difference = pair.image0.flatten(1).mean(dim=1) - pair.image1.flatten(1).mean(dim=1)
    assert difference.abs().max() > 0.05


def placed(options, count=200, seed=0):
    draws = Draws(seed, range(count))
    camera = first_camera(draws, (480, 640), options.focal)
    return place(draws, camera, options, 8), camera


def seen_thickness(scene, camera):
    """(B, S) thinnest width of objects where they stand, in pixels of the view."""
    solids = scene.solids
    distance = solids.centre.norm(dim=-1)
    width = 2 * solids.half.amin(dim=-1) * camera.K[:, 0, :1] / distance
    return width[:, 1:], solids.half[:, 1:]


def test_a_share_of_the_objects_is_thin():
    """Poles and wires are a few pixels wide both ways; planes and bars are thin without them."""
    shares = {}
    for thin in (0.0, 0.15, 1.0):
        scene, camera = placed(StereoOptions(thin=thin))
        width, half = seen_thickness(scene, camera)
        both = half[..., 0] == half[..., 2]  # no other solid has two equal sides
        shares[thin] = both.double().mean().item()
        assert (width[both] < 8).all() and (width[both] > 1.4).all()
        assert (half[..., 1] > 8 * half[..., 0])[both].all()
    assert shares[0.0] == 0 and shares[1.0] == 1
    assert shares[0.15] == pytest.approx(0.15, abs=0.03)
    assert StereoOptions().thin == 0.15 and SceneOptions().thin == 0
    raises(OptionError, "thin must lie between 0 and 1, got -1", StereoOptions, thin=-1)


def test_scenes_for_matching_stay_as_they_are():
    """Numbers that were drawn before there were thin objects, the last ones drawn included."""
    scene, _ = placed(SceneOptions(), count=3, seed=5)
    found = [t.sum().item() for t in (scene.solids.half, scene.surfaces.offset, scene.light)]
    assert found == pytest.approx(BEFORE, rel=1e-12)


def test_a_share_of_the_textureless_surfaces_is_blank(textures):
    options = dataclasses.replace(CLEAN, textureless=0.5, blank=0.4)
    surfaces = placed(options)[0].surfaces
    blank = (surfaces.gain == 0).all(dim=-1) & (surfaces.stain_gain == 0)
    assert blank.double().mean() == pytest.approx(0.5 * 0.4, abs=0.02)
    one_colour = dataclasses.replace(CLEAN, textureless=1.0, blank=1.0, samples=1)
    image = stereo_pairs(textures, [0], size=SIZE, options=one_colour).image0[0]
    assert len(image.flatten(1).unique(dim=1).T) < 200  # a few shades per object, of 15,811 pixels


def test_surfaces_are_slanted_and_some_have_no_texture(pair):
    """Not only steps: within a surface, disparity changes along rows and columns."""
    d = pair.disparity0
    for axis in (1, 2):
        steps = d.diff(dim=axis).abs()
        slanted = (steps > 0.005) & (steps < 0.3)
        assert slanted.double().mean() > 0.3
    scene, _ = placed(StereoOptions())
    plain = scene.surfaces.gain.amax(dim=-1) <= 0.12
    assert plain.double().mean() == pytest.approx(0.15, abs=0.02)
