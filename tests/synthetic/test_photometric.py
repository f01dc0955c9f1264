# SPDX-License-Identifier: Apache-2.0
"""What cameras do to images."""

import pytest
import torch

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.synthetic import distort, photometric
from quadtree_attention.synthetic.draws import Draws
from tests.support import raises


@pytest.fixture
def image():
    return torch.rand(4, 3, 37, 50)


def test_range_and_shape(image):
    before = image.clone()
    for strength in (0.5, 1.0, 2.0):
        taken = distort(image, range(4), strength=strength)
        assert taken.shape == image.shape and taken.dtype == image.dtype
        assert taken.min() >= 0 and taken.max() <= 1
        assert (taken - image).abs().flatten(1).mean(dim=1).min() > 1e-3
    assert torch.equal(image, before)


def test_strength(image):
    assert distort(image, range(4), strength=0) is image
    flat = torch.full((50, 3, 16, 16), 0.5)
    taken = [distort(flat, range(50), strength=strength) for strength in (0.2, 1.0)]
    assert (taken[0] - flat).abs().mean() < (taken[1] - flat).abs().mean() / 2


def test_views_and_items_are_independent(image):
    same = image[:1].expand(2, -1, -1, -1)
    first, second = distort(same, [3, 4])
    assert not torch.allclose(first, second, atol=1e-2)
    other_view = distort(same, [3, 4], view=1)[0]
    assert not torch.allclose(first, other_view, atol=1e-2)


def test_the_same_in_any_batch(image):
    batch = distort(image, [5, 6, 7, 8], seed=1, jpeg=1.0)
    for i in range(4):
        single = distort(image[i : i + 1], [5 + i], seed=1, jpeg=1.0)[0]
        # Compression rounds: a last bit may move a whole step, in next to no block
        assert ((batch[i] - single).abs() < 1e-5).float().mean() > 0.95


def test_blur_uses_the_kernel_of_each_image(image):
    kernels = torch.zeros(4, 3, 3)
    kernels[:, 1, 1] = 1
    kernels[2] = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    blurred = photometric.blur(image, kernels)
    assert torch.allclose(blurred[0], image[0], atol=1e-6)
    assert torch.allclose(blurred[2][..., 1:], image[2][..., :-1], atol=1e-6)
    assert torch.allclose(blurred[2][..., 0], image[2][..., 0], atol=1e-6)


def test_compression_rounds_waves_of_blocks():
    basis = photometric._cosines()
    assert torch.allclose(basis @ basis.t(), torch.eye(8), atol=1e-6)
    flat = torch.full((1, 3, 19, 21), 0.5)
    ramp = flat + torch.linspace(-0.2, 0.2, 21)
    noisy = (ramp + 0.05 * torch.randn(ramp.shape)).clamp(0, 1)
    coarse = photometric._compress(noisy, Draws(0, [0]), 2.0, 1.0)
    assert coarse.shape == noisy.shape
    assert 0.005 < (coarse - ramp).abs().mean() < 0.06
    assert torch.equal(photometric._compress(noisy, Draws(0, [0]), 2.0, 0.0), noisy)


def test_bad_input(image):
    raises(ShapeError, r"must be \(3, 3, H, W\)", distort, image, range(3))
    message = "strength must lie between 0 and 2, got 3"
    raises(OptionError, message, distort, image, range(4), strength=3)


NEUTRAL = (1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5)  # exposure, gamma, grey, contrast, lift


def developed(image, *, vignette=(0.0, 0.0, 0.0), noise=(0.0, 0.0)):
    numbers = torch.tensor([*vignette, *NEUTRAL, *noise]).expand(len(image), -1).contiguous()
    return photometric._develop(image, numbers, Draws(0, range(len(image))).keys())


def test_light_falls_off_around_the_centre_of_the_vignette():
    taken = developed(torch.full((1, 3, 20, 60), 0.9), vignette=(36.0, 9.0, 0.4))[0, 0]
    assert (taken == taken.max()).nonzero().tolist() == [[9, 36]]
    assert taken[9, 36] == pytest.approx(0.9) and taken[19, 0] < 0.7
    assert taken[9, 26] == pytest.approx(taken[9, 46].item())


def test_vignettes_are_around_the_middle_of_wide_images():
    black = torch.zeros(50, 3, 20, 60)
    numbers = photometric._vignette_numbers(Draws(0, range(50)), black, 1.0)
    assert ((numbers[:, 0] / 30 - 1).abs() <= 0.15).all()
    assert ((numbers[:, 1] / 10 - 1).abs() <= 0.15).all()
    assert 10 < (numbers[:, 2] > 0).sum() < 40 and numbers[:, 2].max() <= 0.4


def test_noise_of_reading_is_the_same_everywhere_and_that_of_light_grows_with_it():
    image = torch.full((1, 3, 64, 128), 0.2)
    image[..., 64:] = 0.8
    for noise, deviations in (((0.0009, 0.0), (0.03, 0.03)), ((0.0, 0.002), (0.02, 0.04))):
        added = developed(image, noise=noise) - image
        for half, deviation in zip((added[..., :64], added[..., 64:]), deviations, strict=True):
            assert half.std() == pytest.approx(deviation, rel=0.05)


def test_variances_of_noise():
    reading, light = photometric._noise_numbers(Draws(0, range(200)), 1.0).unbind(1)
    assert 0.0001 < reading.max() <= 0.015**2 and 0.001 < light.max() <= 0.0012
