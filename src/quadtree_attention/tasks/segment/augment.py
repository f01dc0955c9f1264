# SPDX-License-Identifier: Apache-2.0
"""Augmentation of an image and its labels.

Transforms of torchvision for pairs of an image and a mask: geometric transforms apply to both,
colour transforms to the image only.
"""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from quadtree_attention.images import Array
from quadtree_attention.tasks.segment.metrics import IGNORE

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY = tuple(round(255 * channel) for channel in MEAN)  # about 0 after normalisation
LONGEST = 4  # maximum aspect ratio after scaling
_TRIES = 10  # attempts at a crop with more than one class


class RandomScale(v2.Transform):  # type: ignore[misc] # torchvision is not typed
    """Random scale of image and labels, uniformly distributed.

    Args:
        scale: Minimum and maximum factor.
        base: Shorter side in pixels at factor 1; None: original size.
    """

    def __init__(self, scale: tuple[float, float], base: int | None = None) -> None:
        super().__init__()
        self.scale, self.base = scale, base

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        least, greatest = self.scale
        factor = least + (greatest - least) * torch.rand(()).item()
        factor *= base_factor((width, height), self.base)
        return {"size": [max(1, round(height * factor)), max(1, round(width * factor))]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return TF.resize(inpt, params["size"], antialias=True)


class RandomColours(v2.RandomPhotometricDistort):  # type: ignore[misc]
    """Random brightness, contrast, saturation and hue, without a permutation of channels.

    torchvision's transform also permutes channels, which confuses classes such as sky and lawn.
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class RandomCrop(v2.Transform):  # type: ignore[misc]
    """Random crop of fixed size; smaller images are padded, and the padding is ignored.

    Args:
        height: Height of the crop in pixels.
        width: Width of the crop in pixels.
        most: Maximum share of one class among the labelled pixels. A crop with a larger share is
            drawn again, at most ten times.
    """

    def __init__(self, height: int, width: int, *, most: float = 1.0) -> None:
        super().__init__()
        self.height, self.width, self.most = height, width, most

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = v2.query_size(flat_inputs)
        masks = [x for x in flat_inputs if isinstance(x, tv_tensors.Mask)]
        corner = self._corner(height, width)
        if self.most < 1 and masks:
            for _ in range(_TRIES):
                top, left = corner
                part = masks[0][..., top : top + self.height, left : left + self.width]
                counts = torch.bincount(part[part != IGNORE].flatten().long())
                total = int(counts.sum())  # number of labelled pixels
                if total and int(counts.max()) / total <= self.most:
                    break
                corner = self._corner(height, width)
        missing = max(0, self.height - height), max(0, self.width - width)
        return {"corner": corner, "padding": [0, 0, missing[1], missing[0]]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if any(params["padding"]):
            fill = IGNORE if isinstance(inpt, tv_tensors.Mask) else list(GREY)
            inpt = TF.pad(inpt, params["padding"], fill=fill)
        return TF.crop(inpt, *params["corner"], self.height, self.width)

    def _corner(self, height: int, width: int) -> tuple[int, int]:
        """Draw the row and column of the upper left pixel of a crop."""
        rows, columns = max(0, height - self.height), max(0, width - self.width)
        top = int(torch.randint(rows + 1, ()))
        return top, int(torch.randint(columns + 1, ()))


def training_transform(
    height: int,
    width: int,
    *,
    scale: tuple[float, float] = (0.5, 2.0),
    base: int | None = None,
    flip: float = 0.5,
    jitter: bool = True,
    most: float = 0.75,
) -> v2.Transform:
    """Return the transform of an image with its labels: scale, crop, flip and colours."""
    steps = [RandomScale(scale, base), RandomCrop(height, width, most=most)]
    steps += [v2.RandomHorizontalFlip(flip), *([RandomColours(p=0.5)] * jitter)]
    return v2.Compose(steps)


def as_tensors(image: Image.Image, labels: Array) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
    """Return image (3, H, W) uint8 and labels (H, W) int16 as tensors of torchvision."""
    return tv_tensors.Image(image), tv_tensors.Mask(torch.from_numpy(labels.copy()))


def normalised(images: Tensor) -> Tensor:
    """Normalise bytes (..., 3, H, W) to mean 0 and standard deviation 1 over ImageNet."""
    mean, std = (images.new_tensor(x, dtype=torch.float32).view(3, 1, 1) for x in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def at_base(image: Image.Image, shorter: int | None, longer: int | None = None) -> Image.Image:
    """Resize an image by `base_factor`."""
    factor = base_factor(image.size, shorter, longer)
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=3.0)


def base_factor(size: tuple[int, int], shorter: int | None, longer: int | None = None) -> float:
    """Return the factor of an image to a shorter or a longer side, or the smaller of both.

    Without either it is 1. The resulting longer side is at most four times `shorter`.
    """
    factors = [] if longer is None else [longer / max(size)]
    if shorter is not None:
        factors += [shorter / min(size), LONGEST * shorter / max(size)]
    return min(factors, default=1.0)
