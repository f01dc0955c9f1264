# SPDX-License-Identifier: Apache-2.0
"""Augmentation by timm, or of whole batches on their device for data that fit into memory."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn

DRAWS = 5  # random numbers per image: area, ratio, place (x, y), flip


def with_safe_posterize(transform: Any) -> Any:
    """Return a timm transform that may posterize to 0 bits, which Pillow 13 refuses."""
    for part in transform.transforms:
        groups = getattr(part, "policy", None) or [getattr(part, "ops", ())]
        for op in (op for group in groups for op in group if op.name.startswith("Posterize")):
            op.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    if bits < 1:
        return Image.new(image.mode, image.size)  # black, as earlier versions of Pillow have it
    return image if bits >= 8 else ImageOps.posterize(image, bits)


class BatchAugment(nn.Module):
    """Random resized crops and horizontal flips, drawn independently for each image of a batch.

    Crops are sampled bilinearly in one call, without antialiasing: strongly reduced images would
    alias.

    Args:
        size: Side of the result in pixels.
        scale: Minimum and maximum area of a crop, as a share of the image.
        ratio: Minimum and maximum aspect ratio of a crop.
        flip: Probability of a flip.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
    ) -> None:
        super().__init__()
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip

    def forward(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, C, size, size); in evaluation the whole image is resized.

        Args:
            images: Batch of images.
            draws: Random numbers (B, `DRAWS`) in [0, 1); None: draw them.
        """
        if not self.training:
            return F.interpolate(
                images, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True
            )
        batch, device = images.shape[0], images.device
        if draws is None:
            draws = torch.rand(batch, DRAWS, device=device)
        of_area, of_ratio, of_x, of_y, of_flip = draws.unbind(1)
        area = _between(*self.scale, of_area)
        ratio = _between(math.log(self.ratio[0]), math.log(self.ratio[1]), of_ratio).exp()
        height, width = (area / ratio).sqrt().clamp(max=1.0), (area * ratio).sqrt().clamp(max=1.0)
        mirrored = torch.where(of_flip < self.flip, -1.0, 1.0)
        theta = torch.zeros(batch, 2, 3, device=device)
        theta[:, 0, 0], theta[:, 0, 2] = width * mirrored, (2 * of_x - 1) * (1 - width)
        theta[:, 1, 1], theta[:, 1, 2] = height, (2 * of_y - 1) * (1 - height)
        shape = [batch, images.shape[1], self.size, self.size]
        grid = F.affine_grid(theta, shape, align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _between(least: float, greatest: float, share: Tensor) -> Tensor:
    return least + (greatest - least) * share
