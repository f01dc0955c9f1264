# SPDX-License-Identifier: Apache-2.0
"""Disparities of pairs as users have them."""

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.errors import OptionError
from quadtree_attention.synthetic import ProceduralTextures, stereo_pairs
from quadtree_attention.tasks.stereo.filling import fill_hidden
from quadtree_attention.tasks.stereo.predictor import StereoMatcher, resized, working_size
from quadtree_attention.tasks.stereo.result import Disparity
from tests.support import raises

pytestmark = pytest.mark.usefixtures("only_reference")


def rendered(size=(50, 90)) -> tuple[Image.Image, Image.Image]:
    """A rectified pair of a synthetic scene, of (height, width)."""
    pair = stereo_pairs(ProceduralTextures(4, size=128), [3], size=size)
    views = (
        (x[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8) for x in (pair.image0, pair.image1)
    )
    left, right = (Image.fromarray(view) for view in views)
    return left, right


@pytest.fixture(scope="module")
def weights(all_weights):
    return all_weights / "stereo.safetensors"


@pytest.fixture(scope="module")
def pair():
    return rendered()


@pytest.fixture(scope="module")
def matcher(weights):
    return StereoMatcher.from_pretrained(weights, size=90)  # as large as the pair is


@pytest.fixture(scope="module")
def found(matcher, pair):
    return matcher(*pair)


def test_it_is_what_the_network_says_of_left_and_right(found, pair, matcher):
    for values in (found.disparity, found.occlusion):
        assert values.shape == (50, 90) and values.dtype == np.float32
    assert found.disparity.min() >= 0 and found.disparity.max() <= 90
    assert found.occlusion.min() >= 0 and found.occlusion.max() <= 1
    assert found.disparity.std() > 0 and found.seconds > 0
    assert found.seen[0] == (90, 50) and found.images[0].tobytes() == pair[0].tobytes()
    left, right = (
        torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255.0 for image in pair
    )
    with torch.inference_mode():
        expected = matcher.network({"image0": left, "image1": right})
        other = matcher.network({"image0": right, "image1": left})
    disparity, occlusion = expected.disparity[0].numpy(), expected.occlusion[0].numpy()
    filled = fill_hidden(disparity, occlusion).clip(0, 90)
    np.testing.assert_allclose(found.disparity, filled, atol=1e-4)
    np.testing.assert_allclose(found.occlusion, occlusion, atol=1e-5)
    assert not np.allclose(found.disparity, other.disparity[0].numpy(), atol=1e-2)


def test_larger_pairs_are_matched_smaller_and_come_back_in_their_own_pixels(weights, pair, found):
    large = [image.resize((270, 150), Image.Resampling.NEAREST) for image in pair]
    small = StereoMatcher.from_pretrained(weights, size=90)
    result = small(*large)
    assert result.seen[0] == (90, 50) and result.disparity.shape == (150, 270)
    shrunk = [image.resize((90, 50), Image.Resampling.BICUBIC, reducing_gap=3.0) for image in large]
    expected = small(*shrunk)
    # The middle one of three by three pixels is where the small pixel is
    middles = result.disparity[1::3, 1::3]
    np.testing.assert_allclose(middles, expected.disparity * 3, atol=1e-3)
    np.testing.assert_allclose(result.occlusion[1::3, 1::3], expected.occlusion, atol=1e-5)


def test_small_pairs_are_matched_larger(weights, pair):
    result = StereoMatcher.from_pretrained(weights)(*pair)
    assert result.seen[0] == (180, 100) and result.disparity.shape == (50, 90)
    enlarged = [image.resize((180, 100), Image.Resampling.BICUBIC) for image in pair]
    large = StereoMatcher.from_pretrained(weights, size=180)(*enlarged)
    assert large.seen[0] == (180, 100)
    # A pixel lies in the middle of four; where there is no edge, it has their mean
    four = np.stack([large.disparity[i::2, j::2] for i in range(2) for j in range(2)])
    smooth = np.ptp(four, axis=0) < 1
    assert smooth.mean() > 0.2
    np.testing.assert_allclose(result.disparity[smooth], four.mean(axis=0)[smooth] / 2, atol=1e-3)


def test_max_disparity_is_in_pixels_of_the_images_given(weights, pair, found):
    near = StereoMatcher.from_pretrained(weights, size=90, max_disparity=6)
    assert not np.array_equal(near(*pair).disparity, found.disparity)
    assert near.network.max_disparity is None  # unchanged
    large = [image.resize((270, 150)) for image in pair]
    small = StereoMatcher.from_pretrained(weights, size=90, max_disparity=30)
    assert not any("max_disparity" in said for said in small(*large).warnings)
    assert small.preprocess(*large).key == ((90, 50), pytest.approx(10))
    wide = StereoMatcher.from_pretrained(weights, size=90, max_disparity=1000)
    result = wide(*pair)
    assert "max_disparity is 1000, more than the width of the images; 90 was used" in (
        result.warnings
    )
    assert np.array_equal(result.disparity, found.disparity)


@pytest.mark.parametrize("size", [(16, 16), (17, 300), (300, 16), (33, 47)])
def test_odd_sizes(weights, size):
    images = (np.random.default_rng(i).uniform(size=size) for i in range(2))
    result = StereoMatcher.from_pretrained(weights, size=128)(*images)
    assert result.disparity.shape == size and np.isfinite(result.disparity).all()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((960, 540), (960, 540)),
        ((641, 480), (641, 480)),
        ((450, 375), (640, 533)),
        ((200, 300), (400, 600)),  # no more than twofold
        ((1920, 1080), (960, 540)),
        ((1080, 1920), (540, 960)),
        ((20_000, 100), (960, 16)),  # nothing is left of fewer rows
        ((16, 16), (32, 32)),
    ],
)
def test_working_size(size, expected):
    assert working_size(size, 960) == expected


def test_maps_keep_edges_and_smooth_slopes():
    step = torch.tensor([[2.0, 2.0, 30.0, 30.0]]).expand(4, 4)
    large = resized(step, (9, 14))
    assert torch.minimum((large - 2).abs(), (large - 30).abs()).max() < 1e-5
    slope = (torch.arange(8.0) * 0.5).expand(4, 8)
    row = resized(slope, (4, 16))[0]
    assert (row.diff()[1:-1] - 0.25).abs().max() < 1e-6
    assert resized(slope, (4, 8)) is slope


def test_depth():
    values = np.array([[10.0, 20.0, 0.0]], np.float32)
    found = Disparity(disparity=values, occlusion=np.zeros_like(values))
    assert found.depth(500, 0.2).tolist() == [[10.0, 5.0, np.inf]]
    assert found.depth(500, 0.2, offset=10).tolist() == [pytest.approx([5.0, 100 / 30, 10.0])]
    assert found.depth(500, 0.2, offset=-10).tolist()[0][0] == np.inf
    assert found.depth(1, 1).dtype == np.float32
    for focal, baseline, offset, name in (
        (0, 1, 0, "focal"),
        (1, -1, 0, "baseline"),
        (1, np.nan, 0, "baseline"),
        (1, 1, np.inf, "offset"),
    ):
        raises(OptionError, f"{name} must be ", found.depth, focal, baseline, offset=offset)
