# SPDX-License-Identifier: Apache-2.0
"""Crops and flips of whole batches."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform

from quadtree_attention.tasks.classify.augment import DRAWS, BatchAugment, with_safe_posterize

H, W = 48, 60


def coordinates(batch):
    """Images whose channels are x and y of every pixel, as shares of width and height."""
    y, x = (torch.arange(H) + 0.5) / H, (torch.arange(W) + 0.5) / W
    return torch.stack([x.expand(H, W), y[:, None].expand(H, W)]).expand(batch, 2, H, W)


def boxes(augment, batch):
    """Width, height and centre (x, y) of the crops, and whether they were flipped."""
    cropped = augment.train()(coordinates(batch))
    x, y = cropped[:, 0].mean(1), cropped[:, 1].mean(2)  # (B, size)
    middle = slice(augment.size // 4, -augment.size // 4)  # away from the edge, where values stop
    share = (augment.size - 1) / augment.size * len(x[0, middle]) / augment.size
    width, height = ((v[:, middle].amax(1) - v[:, middle].amin(1)) / share for v in (x, y))
    return width, height, x.mean(1), y.mean(1), x[:, 0] > x[:, -1]


def test_crops_stay_inside_the_image():
    images = coordinates(400)
    cropped = BatchAugment(24, scale=(0.05, 1.0)).train()(images)
    assert cropped.min() >= images.min() - 1e-5 and cropped.max() <= images.max() + 1e-5
    width, height, x, y, _ = boxes(BatchAugment(24, scale=(0.05, 0.9)), 400)
    for side, centre in ((width, x), (height, y)):
        assert (centre - side / 2).min() > -0.04 and (centre + side / 2).max() < 1.04


def test_crops_have_the_area_and_ratio_asked_for():
    augment = BatchAugment(64, scale=(0.2, 0.4), ratio=(0.8, 1.25))
    width, height, x, y, _ = boxes(augment, 500)
    area, ratio = width * height, width / height
    assert 0.17 < area.min() < 0.25 and 0.35 < area.max() < 0.45
    assert 0.74 < ratio.min() < 0.85 and 1.18 < ratio.max() < 1.35
    assert x.min() < 0.4 and x.max() > 0.6 and y.min() < 0.4 and y.max() > 0.6


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_flips_are_sideways_and_as_probable_as_asked_for(probability):
    augment = BatchAugment(16, flip=probability)
    flipped = boxes(augment, 2000)[-1].float().mean().item()
    assert flipped == pytest.approx(probability, abs=0.04)  # 3.6 deviations
    cropped = augment(coordinates(50))
    assert (cropped[:, 1, 0] < cropped[:, 1, -1]).all()


def test_whole_images_are_only_resized():
    images = torch.rand(2, 3, H, W)
    augment = BatchAugment(120, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0).train()
    expected = F.interpolate(images, (120, 120), mode="bilinear", align_corners=False)
    torch.testing.assert_close(augment(images), expected, rtol=0, atol=1e-4)
    augment = BatchAugment(20, scale=(0.1, 0.2), flip=1.0).eval()
    expected = F.interpolate(images, (20, 20), mode="bilinear", align_corners=False, antialias=True)
    assert torch.equal(augment(images), expected)


def test_draws_decide_everything():
    augment = BatchAugment(16).train()
    images = torch.rand(1, 3, H, W).expand(6, 3, H, W)
    draws = torch.rand(6, DRAWS)
    torch.manual_seed(1)
    first = augment(images, draws)
    torch.manual_seed(2)
    assert torch.equal(augment(images, draws), first)
    assert not torch.equal(augment(images), first)
    alone = torch.cat([augment(images[i : i + 1], draws[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(alone, first)
    assert all(not torch.equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "original"])
def test_posterize_takes_any_number_of_bits(policy):
    """Pillow 13 refuses 0 bits, which the default policy of training draws now and then."""
    made = with_safe_posterize(create_transform(8, is_training=True, auto_augment=policy))
    for seed in range(100):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        made(Image.new("RGB", (16, 12), "red"))
    (part,) = (part for part in made.transforms if hasattr(part, "ops") or hasattr(part, "policy"))
    ops = [op for group in getattr(part, "policy", None) or [part.ops] for op in group]
    posterize = next(op for op in ops if op.name.startswith("Posterize"))
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    posterize.prob, posterize.magnitude_std = 1.0, 0.0
    for bits in range(9):
        posterize.level_fn = lambda *_, bits=bits: (bits,)
        mask = 256 - 2 ** (8 - bits)
        assert (np.asarray(posterize(image)) == np.asarray(image) & mask).all()
