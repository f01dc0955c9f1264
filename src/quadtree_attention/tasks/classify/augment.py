# SPDX-License-Identifier: Apache-2.0
"""Augmentation of whole batches on their device, for sets that fit into memory."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchAugment(nn.Module):
    """Random crops, resized, and horizontal flips, another one for every image of the batch.

    Crops are sampled bilinearly in one call, which suits images that get larger; it does not
    filter, so images that get much smaller would alias.

    Args:
        size: Pixels of a side of the result.
        scale: Least and greatest share of the area a crop covers.
        ratio: Least and greatest ratio of a crop's sides.
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
        self.size = size
        self.scale = scale
        self.ratio = ratio
        self.flip = flip

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, size, size); unchanged crops, only resized, in evaluation."""
        if not self.training:
            return F.interpolate(
                images, (self.size, self.size), mode="bilinear", align_corners=False, antialias=True
            )
        batch, device = images.shape[0], images.device
        area = torch.empty(batch, device=device).uniform_(*self.scale)
        log_ratio = torch.empty(batch, device=device).uniform_(*map(math.log, self.ratio))
        sides = torch.stack([(area / log_ratio.exp()).sqrt(), (area * log_ratio.exp()).sqrt()])
        height, width = sides.clamp(max=1.0)
        centre = torch.rand(2, batch, device=device) * 2 - 1  # of the places a crop can have
        mirrored = torch.where(torch.rand(batch, device=device) < self.flip, -1.0, 1.0)
        theta = torch.zeros(batch, 2, 3, device=device)
        theta[:, 0, 0], theta[:, 0, 2] = width * mirrored, centre[0] * (1 - width)
        theta[:, 1, 1], theta[:, 1, 2] = height, centre[1] * (1 - height)
        shape = [batch, images.shape[1], self.size, self.size]
        grid = F.affine_grid(theta, shape, align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
