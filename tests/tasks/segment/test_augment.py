# SPDX-License-Identifier: Apache-2.0
"""Random crops: image and labels stay together, padding is ignored, draws can be had again."""

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.tasks.segment import augment
from quadtree_attention.tasks.segment.augment import as_tensors, at_base, training_transform
from quadtree_attention.tasks.segment.metrics import IGNORE


def marked(height, width):
    """An image whose red channel tells the class: 8 blocks side by side."""
    labels = np.repeat((np.arange(width) * 8 // width)[None], height, axis=0).astype(np.int16)
    pixels = np.stack([labels * 30, labels * 0 + 90, labels * 0], axis=2).astype(np.uint8)
    return Image.fromarray(pixels), labels


def test_image_and_labels_stay_together():
    transform = training_transform(48, 64, jitter=False)
    pair = as_tensors(*marked(50, 80))
    flipped = padded = 0
    for seed in range(30):
        torch.manual_seed(seed)
        image, labels = transform(*pair)
        assert image.shape == (3, 48, 64) and labels.shape == (48, 64)
        assert (image.dtype, labels.dtype) == (torch.uint8, torch.int16)
        inside = labels != IGNORE
        away = (image[0].int() - 30 * labels.int()).abs()[inside]
        assert away.float().mean() < 4  # resizing blurs what lies between blocks
        assert (image[:, ~inside] == torch.tensor(augment.GREY)[:, None]).all()
        row = labels[0][inside[0]]
        flipped += bool((row.diff() < 0).any())
        padded += not bool(inside.all())
    assert 5 < flipped < 25 and padded > 3


def test_scales():
    transform = training_transform(8, 8, scale=(0.5, 2.0), most=1.0).transforms[0]
    image, labels = as_tensors(*marked(40, 60))
    torch.manual_seed(0)
    heights = [transform(image, labels)[1].shape[0] for _ in range(200)]
    assert min(heights) < 23 and max(heights) > 77 and 46 < np.mean(heights) < 54
    transform = training_transform(8, 8, scale=(1.0, 1.0), base=20, most=1.0).transforms[0]
    image, labels = transform(*as_tensors(*marked(40, 60)))
    assert image.shape[1:] == labels.shape == (20, 30)
    for size, sides, expected in (
        ((60, 40), (20,), (30, 20)),
        ((60, 40), (None,), (60, 40)),
        ((1000, 10), (20,), (80, 1)),  # no longer than 4 x 20
        ((60, 40), (None, 90), (90, 60)),
        ((60, 40), (50, 66), (66, 44)),  # the less of both
    ):
        assert at_base(Image.new("RGB", size), *sides).size == expected


def test_crops_of_one_class_are_drawn_again():
    labels = np.zeros((40, 200), np.int16)
    labels[:, 100:] = np.arange(100) // 4  # many classes on the right
    pair = as_tensors(Image.new("RGB", (200, 40)), labels)

    def of_one_class(most):
        torch.manual_seed(1)
        crop = augment.RandomCrop(20, 20, most=most)
        return sum(len(crop(*pair)[1].unique()) == 1 for _ in range(60))

    assert of_one_class(0.75) == 0 < of_one_class(1.0)


def test_colours_of_the_image_alone_change_a_little():
    pair = as_tensors(*marked(32, 32))
    transform = training_transform(32, 32, scale=(1, 1), flip=0, most=1.0)
    torch.manual_seed(0)
    image, labels = transform(*pair)
    assert not torch.equal(image, pair[0]) and torch.equal(labels, pair[1])
    red = torch.tensor([200, 40, 40], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    pair = as_tensors(Image.fromarray(red.permute(1, 2, 0).numpy()), np.zeros((8, 8), np.int16))
    transform = training_transform(8, 8, scale=(1, 1), flip=0, most=1.0)
    torch.manual_seed(0)
    drawn = torch.stack([transform(*pair)[0][:, 0, 0].int() for _ in range(200)])
    assert (drawn[:, 0] > drawn[:, 1:].amax(dim=1) + 40).all()  # no channel takes another's place
    assert len(drawn.unique(dim=0)) > 100
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    found = augment.normalised(pixels)
    assert found.dtype == torch.float32
    assert found[0, :, 0, 0].tolist() == pytest.approx(
        [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    )
    assert found[0, 0, 0, 1].item() == pytest.approx(0.515 / 0.229)
