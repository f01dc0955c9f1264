# SPDX-License-Identifier: Apache-2.0
"""The convolutional network of the matcher: features at 1/8 and 1/2 of the image.

Convolutions read zeros at hidden cells, at every resolution. In evaluation a padded image
with a mask therefore has the same features as without padding. (In training the statistics of the
batch norms include hidden cells.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.models.parts.masks import extent


class ResNetFPN(nn.Module):
    """Three residual stages at 1/2, 1/4 and 1/8, and a feature pyramid back to 1/2.

    Args:
        dims: Channels at 1/2 (fine map), 1/4 and 1/8 (coarse map).
    """

    def __init__(self, dims: Sequence[int] = (128, 196, 256), **dd: Any) -> None:
        super().__init__()
        if len(dims) != 3 or min(dims) < 1:
            raise OptionError(
                f"dims must be three numbers of channels, at 1/2, 1/4 and 1/8, got {tuple(dims)}; "
                "the original has (128, 196, 256)"
            )
        self.stem = _conv(1, dims[0], 7, stride=2, **dd)
        self.stem_norm = nn.BatchNorm2d(dims[0], **dd)
        # The lists run fine -> coarse: 1/2, 1/4, 1/8.
        self.stages = nn.ModuleList(
            nn.ModuleList(
                [ResidualBlock(dim_in, dim, stride, **dd), ResidualBlock(dim, dim, 1, **dd)]
            )
            for dim_in, dim, stride in zip((dims[0], *dims[:2]), dims, (1, 2, 2), strict=True)
        )
        wide = (dims[1], dims[2], dims[2])  # channels of the next coarser map of the pyramid
        self.lateral = nn.ModuleList(
            _conv(dim, out, 1, **dd) for dim, out in zip(dims, wide, strict=True)
        )
        self.smooth = nn.ModuleList(
            Smooth(dim_in, dim, **dd) for dim_in, dim in zip(wide[:2], dims[:2], strict=True)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Maps are then channels last, too: faster on GPUs (no transpose around every
        # convolution) and CPUs, and the channels of a cell are contiguous
        self.to(memory_format=torch.channels_last)

    def forward(
        self, image: Tensor, masks: Sequence[Tensor | None] = (None,) * 4
    ) -> tuple[Tensor, Tensor]:
        """Return the coarse and the fine map of images of any size.

        Args:
            image: (B, 1, H, W)
            masks: Masks of the image and of the maps at 1/2, 1/4 and 1/8: boolean (B, h, w), sizes
                rounded up, True = visible, or None. A cell is visible if any of its pixels is.

        Returns:
            (B, dims[2], H/8, W/8) and (B, dims[0], H/2, W/2), sizes rounded up.
        """
        x = self.stem_norm(self.stem(hide_map(image, masks[0])))
        x = hide_map(F.relu_(x), masks[1])
        maps = []
        for stage, mask in zip(self.stages, masks[1:], strict=True):
            assert isinstance(stage, nn.ModuleList)
            for block in stage:
                x = block(x, mask)
            maps.append(x)
        coarse = x = self.lateral[2](maps[2])
        for i in (1, 0):
            size = maps[i].shape[-2:]
            x = upsample(x, size, masks[i + 2], masks[i + 1])
            x = self.smooth[i](x.add_(self.lateral[i](maps[i])), masks[i + 1])
        return coarse, x


class ResidualBlock(nn.Module):
    """Residual block of two convolutions; the shortcut is a projection if the stride is not 1."""

    def __init__(self, dim_in: int, dim: int, stride: int, **dd: Any) -> None:
        super().__init__()
        self.conv1 = _conv(dim_in, dim, 3, stride=stride, **dd)
        self.norm1 = nn.BatchNorm2d(dim, **dd)
        self.conv2 = _conv(dim, dim, 3, **dd)
        self.norm2 = nn.BatchNorm2d(dim, **dd)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(
                _conv(dim_in, dim, 1, stride=stride, **dd), nn.BatchNorm2d(dim, **dd)
            )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, dim_in, H, W) -> (B, dim, h, w); the mask has the size of the result."""
        y = hide_map(F.relu_(self.norm1(self.conv1(x))), mask)
        y = self.norm2(self.conv2(y)).add_(self.shortcut(x))
        return hide_map(F.relu_(y), mask)


class Smooth(nn.Module):
    """Two convolutions after the sum of the pyramid's maps."""

    def __init__(self, dim_in: int, dim: int, **dd: Any) -> None:
        super().__init__()
        self.conv1 = _conv(dim_in, dim_in, 3, **dd)
        self.norm = nn.BatchNorm2d(dim_in, **dd)
        self.conv2 = _conv(dim_in, dim, 3, **dd)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, dim_in, H, W) -> (B, dim, H, W)"""
        x = F.leaky_relu_(self.norm(self.conv1(hide_map(x, mask))), 0.01)
        return hide_map(self.conv2(hide_map(x, mask)), mask)


def hide_map(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set hidden cells to 0: x (B, C, H, W), mask (B, H, W) or None."""
    return x if mask is None else torch.where(mask[:, None], x, 0)


def upsample(
    x: Tensor, size: Sequence[int], mask: Tensor | None = None, target_mask: Tensor | None = None
) -> Tensor:
    """Bilinear upsampling with aligned corners: (B, C, h, w) -> (B, C, *size).

    Corners are of the visible region of each sample, as without padding.
    """
    if mask is None or target_mask is None:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=True)
    sources, targets = extent(mask), extent(target_mask)  # (B, 2)
    down, across = (
        _interpolation(sources[:, i], targets[:, i], x.shape[2 + i], size[i]).to(x.dtype)
        for i in range(2)
    )
    return down[:, None] @ x @ across[:, None].mT


def _interpolation(source: Tensor, target: Tensor, cells: int, size: int) -> Tensor:
    """Weights (B, size, cells) of the source cells for every cell of one axis.

    The first `target` cells (B,) are spread over the first `source` cells (B,).
    """
    last = (source - 1).clamp(min=0).double()[:, None]
    step = last / (target - 1).clamp(min=1)[:, None]
    place = torch.arange(size, device=source.device) * step  # (B, size)
    place = torch.minimum(place, last)
    distance = place[..., None] - torch.arange(cells, device=source.device)
    return (1 - distance.abs()).clamp(min=0)


def _conv(dim_in: int, dim: int, kernel_size: int, *, stride: int = 1, **dd: Any) -> nn.Conv2d:
    return nn.Conv2d(
        dim_in, dim, kernel_size, stride=stride, padding=kernel_size // 2, bias=False, **dd
    )
