# SPDX-License-Identifier: Apache-2.0
"""Augmentation of images together with their boxes and masks."""

from typing import Any

import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from quadtree_attention.checks import between
from quadtree_attention.tasks.detect.readers import Target

CROP_SHORTER = (400, 500, 600)  # lengths of the shorter side, of which a crop draws one
CROP_SIDES = (384, 600)  # minimum and maximum side of a crop, as in DETR
LEAST_SIDE = 1.0  # minimum side in pixels of a box after a crop


class Augment:
    """Flips, crops and colour jitter; all random numbers are drawn from torch's generator.

    The model resizes images, in a batch on its device.

    Args:
        flip: Probability of a horizontal flip.
        crop: Probability of a crop, as in DETR; objects outside of it are removed.
        jitter: Strength of random changes of brightness, contrast and saturation; 0: none.

    Raises:
        OptionError: An argument is not in [0, 1].
    """

    def __init__(self, *, flip: float = 0.0, crop: float = 0.0, jitter: float = 0.0) -> None:
        between(0, 1, flip=flip, crop=crop, jitter=jitter)
        self.flip = v2.RandomHorizontalFlip(flip)
        self.crop = crop
        self.jitter = v2.ColorJitter(jitter, jitter, jitter) if jitter else None

    def __call__(self, image: Image.Image, target: Target) -> tuple[torch.Tensor, Target]:
        """Return the image (3, H, W) uint8, and the objects that remain in it."""
        size = (image.height, image.width)
        wrapped: dict[str, Any] = {**target, "image": tv_tensors.Image(image)}
        wrapped["boxes"] = tv_tensors.BoundingBoxes(
            target["boxes"], format="XYXY", canvas_size=size
        )
        if "masks" in target:
            wrapped["masks"] = tv_tensors.Mask(target["masks"])
        if self.crop and torch.rand(()) < self.crop:
            wrapped = _cropped(wrapped, *size)
        wrapped = self.flip(wrapped)
        if self.jitter is not None:
            wrapped["image"] = self.jitter(wrapped["image"])
        plain = {name: value.as_subclass(torch.Tensor) for name, value in wrapped.items()}
        return plain.pop("image"), plain


def _cropped(sample: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Crop a sample of this size at random; return the crop and the objects in it."""
    choice = CROP_SHORTER[int(torch.randint(len(CROP_SHORTER), ()))]
    scale = min(height, width) / choice
    rows, columns = (
        max(1, round(least + (most - least) * float(torch.rand(()))))
        for least, most in ([min(s * scale, side) for s in CROP_SIDES] for side in (height, width))
    )
    top = int(torch.randint(height - rows + 1, ()))
    left = int(torch.randint(width - columns + 1, ()))
    names = [name for name in ("image", "boxes", "masks") if name in sample]
    moved = sample | {name: tv.crop(sample[name], top, left, rows, columns) for name in names}
    image, boxes = moved.pop("image"), tv.clamp_bounding_boxes(moved["boxes"])
    moved["boxes"] = boxes
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= LEAST_SIDE).all(1)
    if "masks" in moved:
        kept &= moved["masks"].flatten(1).any(1)  # a concave shape may leave no pixel in the crop
    kept = kept.as_subclass(torch.Tensor)
    others = {name: tv_tensors.wrap(value[kept], like=value) for name, value in moved.items()}
    return {**others, "image": image}
