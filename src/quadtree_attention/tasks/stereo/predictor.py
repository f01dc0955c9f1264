# SPDX-License-Identifier: Apache-2.0
"""Disparity of rectified pairs.

Example:
    >>> import numpy as np
    >>> matcher = StereoMatcher.from_pretrained(size=128)
    >>> matcher(np.zeros((32, 60)), np.zeros((32, 60, 3))).disparity.shape
    (32, 60)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from quadtree_attention import checks
from quadtree_attention.errors import DataError
from quadtree_attention.images import ImageLike, to_image
from quadtree_attention.models.stereo import STTR
from quadtree_attention.tasks.contract import Prepared
from quadtree_attention.tasks.predictor import Predictor
from quadtree_attention.tasks.stereo import TASK
from quadtree_attention.tasks.stereo.checks import pair_warnings, result_warnings
from quadtree_attention.tasks.stereo.filling import fill_hidden
from quadtree_attention.tasks.stereo.result import Disparity

SIZE = 800  # default maximum of the longer side in pixels: the width of training images
SMALL = 640  # smaller pairs are enlarged to it, since a cell has two pixels
LARGEST_SCALE = 2.0  # maximum factor of this enlargement
LEAST_SIDE = 16  # minimum shorter side in pixels


@dataclass(frozen=True)
class Preprocess:
    """Resizing of a pair to the network's input."""

    size: int  # maximum longer side in pixels
    max_disparity: float | None  # in pixels of the original images; None: default of the network

    def __call__(self, left: ImageLike, right: ImageLike) -> Prepared:
        images = to_image(left), to_image(right)
        check_pair(*images)
        width = images[0].width
        size = working_size(images[0].size, self.size)
        warnings = pair_warnings(*images)
        limit = None
        if self.max_disparity is not None:
            limit = min(self.max_disparity, width) / (width / size[0])
            if self.max_disparity > width:
                warnings += (
                    f"max_disparity is {self.max_disparity:g}, more than the width of the images; "
                    f"{width} was used",
                )
        inputs = tuple(pixels(image, size) for image in images)
        return Prepared(images, inputs, key=(size, limit), warnings=warnings)


class StereoMatcher(Predictor[Disparity]):
    """Predictor of the disparity of rectified pairs of any size.

    `from_pretrained` without a name loads the packaged weights.

    Args:
        network: The network.
        card: Its card.
        size: Maximum longer side of the network's input in pixels; None: 800. Pairs below 640
            are enlarged to it, at most twofold. Disparities are in pixels of the original images.
        max_disparity: Maximum disparity in pixels of the original images; None: that
            of the weights, usually the whole width. A small one reduces errors and memory.
        **common: Arguments of `Predictor`.
    """

    task = TASK
    network: STTR

    def __init__(
        self,
        network: STTR,
        card: dict[str, Any],
        *,
        size: int | None = None,
        max_disparity: float | None = None,
        **common: Any,
    ) -> None:
        checks.count(LEAST_SIDE, size=size)
        checks.above(0, max_disparity=max_disparity)
        super().__init__(network, card, size=size, max_disparity=max_disparity, **common)
        self.preprocess = Preprocess(SIZE if size is None else size, max_disparity)

    def forward(self, batch: Sequence[Prepared]) -> list[tuple[Tensor, Tensor]]:
        left, right = self.stack(batch)
        limit = cast(tuple[Any, float | None], batch[0].key)[1]
        output = self.network({"image0": left, "image1": right}, max_disparity=limit)
        found = (x.float().cpu() for x in (output.disparity, output.occlusion))
        return list(zip(*found, strict=True))

    def finish(self, raw: tuple[Tensor, Tensor], item: Prepared) -> Disparity:
        width, height = item.images[0].size
        scale = width / item.inputs[0].shape[-1]
        filled = torch.from_numpy(fill_hidden(raw[0].numpy(), raw[1].numpy()))
        disparity, occlusion = (resized(x, (height, width)).numpy() for x in (filled, raw[1]))
        disparity = (disparity * scale).clip(0, width)
        warnings = result_warnings(disparity, occlusion, scale=scale)
        return Disparity(disparity=disparity, occlusion=occlusion, warnings=warnings)


def check_pair(left: Image.Image, right: Image.Image) -> None:
    """Raise `DataError` for two images that cannot be a rectified pair."""
    if left.size != right.size:
        sizes = f"{left.width}x{left.height} on the left, {right.width}x{right.height} on the right"
        raise DataError(
            f"the images of a pair must have the same size, got {sizes}; pass two that were "
            "rectified together"
        )
    if min(left.size) < LEAST_SIDE:
        raise DataError(
            f"the images of a pair must have at least {LEAST_SIDE} pixels a side, got "
            f"{left.width}x{left.height}; pass larger ones"
        )


def working_size(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Width and height with a longer side of at most `longer` pixels; small images are enlarged."""
    scale = min(max(1.0, min(LARGEST_SCALE, SMALL / max(size))), longer / max(size))
    width, height = (max(LEAST_SIDE, round(side * scale)) for side in size)
    return width, height


def resized(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize a map (h, w) to (height, width): bilinear on surfaces, nearest neighbour at edges.

    Interpolated values between two surfaces lie on neither of them; they are replaced by the
    nearest value.
    """
    if values.shape == size:
        return values
    maps = values[None, None]
    smooth = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    nearest = F.interpolate(maps, size=size, mode="nearest-exact")
    return torch.where((smooth - nearest).abs() < 1.0, smooth, nearest)[0, 0]


def pixels(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Resize an image; return (3, H, W) in [0, 1]."""
    image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1).contiguous()
