# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F

from quadtree_attention import OptionError
from quadtree_attention.models.parts.resnet_fpn import ResNetFPN, upsample
from quadtree_attention.nn.value_pyramid import visible_levels
from quadtree_attention.ops.attention.tree import Tree
from tests.support import raises

SIZES = [(97, 131), (8, 8), (1, 1), (33, 57), (64, 40)]


def build() -> ResNetFPN:
    model = ResNetFPN((8, 12, 16), dtype=torch.float64).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # zero must not be a fixed point
            torch.nn.init.normal_(module.bias)
    return model


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_sizes_are_rounded_up(height, width):
    coarse, fine = build()(torch.rand(2, 1, height, width, dtype=torch.float64))
    assert coarse.shape == (2, 16, -(-height // 8), -(-width // 8))
    assert fine.shape == (2, 8, -(-height // 2), -(-width // 2))


@torch.no_grad()
def test_a_padded_image_has_the_features_it_has_alone():
    model = build()
    canvas = torch.full((len(SIZES), 1, 104, 140), 9.0, dtype=torch.float64)
    mask = torch.zeros(len(SIZES), 104, 140, dtype=torch.bool)
    images = [torch.rand(1, 1, *size, dtype=torch.float64) for size in SIZES]
    for i, (height, width) in enumerate(SIZES):
        canvas[i, :, :height, :width] = images[i][0]
        mask[i, :height, :width] = True
    masks = visible_levels(Tree((104, 140), 4), mask)[::-1]
    maps = model(canvas, masks)
    for i, image in enumerate(images):
        for padded, alone in zip(maps, model(image), strict=True):
            height, width = alone.shape[2:]
            part = padded[i : i + 1, :, :height, :width]
            torch.testing.assert_close(part, alone, rtol=0, atol=1e-10)


def test_corners_stay_corners():
    x = torch.rand(2, 3, 5, 7, dtype=torch.float64)
    for size in ((10, 14), (9, 13), (9, 14)):
        up, corners = upsample(x, size), (..., [0, 0, -1, -1], [0, -1, 0, -1])
        assert torch.equal(up[corners], x[corners])
    everything = torch.ones(2, 5, 7, dtype=torch.bool), torch.ones(2, 9, 14, dtype=torch.bool)
    torch.testing.assert_close(upsample(x, (9, 14), *everything), up, rtol=0, atol=1e-12)
    assert torch.equal(up, F.interpolate(x, (9, 14), mode="bilinear", align_corners=True))


def test_dims_are_checked():
    message = r"dims must be three .*, got \(8, 16\); the original"
    raises(OptionError, message, ResNetFPN, (8, 16))
