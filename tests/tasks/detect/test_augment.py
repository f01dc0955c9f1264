# SPDX-License-Identifier: Apache-2.0
"""Augmentation: boxes and masks follow the image; objects that vanish are gone."""

import numpy as np
import pytest
import torch
from PIL import Image

from quadtree_attention.tasks.detect.augment import Augment
from quadtree_attention.tasks.detect.generated import CLASSES, GeneratedShapes

SQUARE = CLASSES.index("square") + 1


@pytest.fixture(scope="module")
def shapes():
    source = GeneratedShapes(12, 96)
    return [(source.images(i)[0], source.truth(i).target(masks=True)) for i in range(len(source))]


def assert_in_step(pixels, target):
    """Every mask has the colour of its class, red, green or blue, and is inside its box."""
    assert pixels.dtype == torch.uint8 and type(pixels) is torch.Tensor
    assert len({len(values) for values in target.values()}) == 1
    for label, box, mask in zip(target["labels"], target["boxes"], target["masks"], strict=True):
        assert mask.shape == pixels.shape[1:]
        means = pixels[:, mask].float().mean(1)
        assert means.argmax() == label - 1 and means.max() > 2 * means.median()
        rows, columns = torch.nonzero(mask, as_tuple=True)
        inside = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        assert (inside[:2] >= box[:2]).all() and (inside[2:] <= box[2:]).all()
        if label == SQUARE:  # a crop leaves boxes of round shapes wider than what is seen of them
            assert torch.equal(inside.float(), box)


def test_flips_and_nothing_to_flip(shapes):
    image, target = shapes[0]
    pixels, same = Augment()(image, target)
    assert (pixels.permute(1, 2, 0).numpy() == np.array(image)).all()
    assert all(torch.equal(same[name], target[name]) for name in target)
    assert all(type(values) is torch.Tensor for values in same.values())
    for image, target in shapes:
        pixels, flipped = Augment(flip=1.0)(image, target)
        assert (pixels.permute(1, 2, 0).numpy() == np.array(image)[:, ::-1]).all()
        x0, y0, x1, y1 = target["boxes"].unbind(1)
        mirrored = torch.stack([image.width - x1, y0, image.width - x0, y1], 1)
        assert torch.equal(flipped["boxes"], mirrored)
        assert_in_step(pixels, flipped)
    image, target = shapes[0]
    nothing = {name: values[:0] for name, values in target.items()}
    pixels, found = Augment(flip=1.0, crop=1.0, jitter=0.5)(image, nothing)
    assert found["boxes"].shape == (0, 4) and found["masks"].shape == (0, *pixels.shape[1:])


def test_crop_and_jitter(shapes):
    sizes = set()
    for seed, (image, target) in enumerate(shapes * 3):
        torch.manual_seed(seed)
        pixels, cropped = Augment(crop=1.0, jitter=0.1, flip=0.5)(image, target)
        height, width = pixels.shape[1:]
        sizes.add((height, width))
        boxes = cropped["boxes"]
        assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert ((boxes[:, 2:] - boxes[:, :2]) >= 1).all()
        assert_in_step(pixels, cropped)
    assert len(sizes) > 20


def test_objects_drop_out_of_a_crop():
    """One in each corner, of which a crop cannot hold all; a mask may be gone before its box."""
    corners = torch.tensor([[0, 0, 4, 4], [92, 0, 96, 4], [0, 68, 4, 72], [92, 68, 96, 72]])
    masks = torch.zeros(5, 72, 96, dtype=torch.bool)
    masks[4, 0, 0] = True  # of an object whose box is the whole image
    for mask, (x0, y0, x1, y1) in zip(masks, corners.tolist(), strict=False):
        mask[y0:y1, x0:x1] = True
    boxes = torch.cat([corners, torch.tensor([[0, 0, 96, 72]])]).float()
    target = {"boxes": boxes, "labels": torch.arange(1, 6), "masks": masks}
    counts = set()
    for seed in range(20):
        torch.manual_seed(seed)
        alone = {"boxes": boxes, "labels": target["labels"]}
        _, cropped = Augment(crop=1.0)(Image.new("RGB", (96, 72)), alone)
        assert ((cropped["boxes"][:, 2:] - cropped["boxes"][:, :2]) >= 1).all()
        assert len(cropped["boxes"]) == len(cropped["labels"]) < 5
        torch.manual_seed(seed)
        _, cropped = Augment(crop=1.0)(Image.new("RGB", (96, 72)), target)
        assert cropped["masks"].flatten(1).any(1).all()
        assert len(cropped["boxes"]) == len(cropped["labels"]) == len(cropped["masks"])
        assert (5 in cropped["labels"]) <= (1 in cropped["labels"])
        counts.add(len(cropped["labels"]))
    assert 0 in counts and max(counts) < 5
