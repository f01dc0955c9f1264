# SPDX-License-Identifier: Apache-2.0
"""Convolutional parts of STTR as published: feature extractor and refinement.

Batch norms have no running statistics: they use the statistics of their input, in evaluation one
pair.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.models.parts.stereo_features import WideContext, check_dims

POOLS = (16, 8, 4, 2)  # cells of the map at 1/8 that are averaged
LAYERS, GROWTH, BOTTLENECK = 4, 4, 4  # dense layers of a block, growth rate, bottleneck factor
BLOCKS, EXPANSION = 8, 4  # residual blocks of the refinement, hidden channels per channel
FEW = 0.1  # below this matched share, disparities are not normalised by it


class STTRFeatures(nn.Module):
    """Residual stages down to 1/8, pooling at 1/16, and a decoder of dense blocks.

    Args:
        dims: Channels at 1/2, 1/4, 1/8 and 1/16; multiples of 8.
        dim_out: Output channels.
        stride: Pixels per cell of the result: 1, with the image concatenated to the last map, as
            published, or 2, with the stem's map at 1/2 concatenated.
    """

    def __init__(self, dims: Sequence[int], dim_out: int, *, stride: int, **dd: Any) -> None:
        super().__init__()
        check_dims(dims, stride=2, option="dims")
        half, quarter, eighth, pooled = dims
        new = LAYERS * GROWTH
        self.stride = stride
        self.stem = nn.Sequential(
            ConvBatch(3, half // 2, stride=2, **dd),
            ConvBatch(half // 2, half // 2, **dd),
            ConvBatch(half // 2, half, **dd),
        )
        self.stages = nn.ModuleList(
            nn.Sequential(Basic(below, dim, 2, **dd), *(Basic(dim, dim, 1, **dd) for _ in range(2)))
            for below, dim in ((half, quarter), (quarter, eighth))
        )
        self.pools = nn.ModuleList(
            ConvBatch(eighth, pooled // len(POOLS), kernel=1, **dd) for _ in POOLS
        )
        self.dense = nn.ModuleList(
            DenseBlock(dim, **dd) for dim in (pooled, new + eighth, new + quarter)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(new, new, 3, 2, **dd) for _ in range(2))
        self.last_up: nn.Module = nn.ConvTranspose2d(new, dim_out, 3, 2, **dd)
        if stride == 1:
            self.last_up = nn.Sequential(
                nn.ConvTranspose2d(new, dim_out, 3, 2, bias=False, **dd),
                _norm(dim_out, **dd),
                nn.ConvTranspose2d(dim_out, dim_out, 3, 2, **dd),
            )
        beside = 3 if stride == 1 else half
        self.out = nn.Sequential(
            ConvBatch(dim_out + beside, dim_out, **dd), ConvBatch(dim_out, dim_out, **dd)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C, h, w), of H and W over the stride, rounded up."""
        half = self.stem(image)
        quarter = self.stages[0](half)
        eighth = self.stages[1](quarter)
        x = self.dense[0](self._pooled(eighth))
        for up, dense, skip in zip(self.up, self.dense[1:], (eighth, quarter), strict=True):
            x = dense(_beside(up(x), skip))
        return self.out(_beside(self.last_up(x), image if self.stride == 1 else half))

    def _pooled(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        size = (-(-height // 2), -(-width // 2))
        means = (F.avg_pool2d(x, (min(side, height), min(side, width))) for side in POOLS)
        maps = [
            F.interpolate(reduce(mean), size, mode="bilinear")
            for reduce, mean in zip(self.pools, means, strict=True)
        ]
        return torch.cat(maps, dim=1)


class STTRAdjustment(nn.Module):
    """Refines disparity and occlusion at full resolution, with the left image as input.

    Args:
        dim: Channels.
        context: Channels of `WideContext` at 1/4, 1/8, 1/16 and 1/32; empty omits it, as in STTR.
    """

    def __init__(self, dim: int = 16, context: Sequence[int] = (), **dd: Any) -> None:
        super().__init__()
        self.context = WideContext(context, **dd) if context else None
        self.embed = nn.Conv2d(4, dim, 3, padding=1, **dd)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ScaledConv(dim + 1, dim * EXPANSION, **dd),
                nn.ReLU(inplace=True),
                ScaledConv(dim * EXPANSION, dim, **dd),
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Conv2d(dim, 1, 3, padding=1, **dd)
        self.occlusion = nn.Sequential(
            ScaledConv(4, dim, **dd),
            ScaledConv(dim, dim, **dd),
            nn.ReLU(inplace=True),
            ScaledConv(dim, dim, **dd),
            ScaledConv(dim, dim, **dd),
            nn.ReLU(inplace=True),
            nn.Conv2d(dim, 1, 3, padding=1, **dd),
        )

    def forward(self, image: Tensor, disparity: Tensor, occlusion: Tensor) -> tuple[Tensor, Tensor]:
        """Return disparity and logits of occlusion of an image (B, 3, H, W), (B, H, W) each."""
        mean = disparity.mean(dim=(1, 2), keepdim=True)
        spread = disparity.std(dim=(1, 2), keepdim=True) + 1e-6
        relative = (disparity - mean) / spread
        if self.context is not None:
            relative, logits = self.context(
                image, relative, occlusion.clamp(1e-3, 1 - 1e-3).logit()
            )
            occlusion = logits.sigmoid()
        given = relative[:, None].to(image.dtype)
        x = self.embed(torch.cat([given, image], dim=1))
        for block in self.blocks:
            x = x + block(torch.cat([given, x], dim=1))
        change = self.head(x)[:, 0].to(disparity.dtype)
        doubt = (2 * occlusion[:, None] - 1).to(image.dtype)
        logits = self.occlusion(torch.cat([doubt, image], dim=1))[:, 0].to(disparity.dtype)
        return ((relative + change) * spread + mean).relu(), logits


def as_adjusted(disparity: Tensor, matched: Tensor) -> tuple[Tensor, Tensor]:
    """Return disparity and occlusion of cells as STTR passes them to the refinement.

    If less than a tenth of a cell is matched, STTR replaces this share by 1 instead of dividing by
    it: disparity and occlusion are then close to 0.
    """
    few = matched < FEW
    return torch.where(few, disparity * matched, disparity), torch.where(few, 0, 1 - matched)


class ScaledConv(nn.Conv2d):
    """3x3 convolution with weight normalisation per output channel."""

    def __init__(self, dim: int, dim_out: int, **dd: Any) -> None:
        super().__init__(dim, dim_out, 3, padding=1, **dd)
        self.length = nn.Parameter(self._lengths().detach().clone())

    def _lengths(self) -> Tensor:
        return torch.linalg.vector_norm(self.weight, dim=(1, 2, 3), keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * (self.length / self._lengths()), self.bias)


class ConvBatch(nn.Sequential):
    """Convolution, batch norm and, if it has an activation, ReLU."""

    def __init__(
        self,
        dim: int,
        dim_out: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        act: bool = True,
        **dd: Any,
    ) -> None:
        conv = nn.Conv2d(dim, dim_out, kernel, stride, kernel // 2, bias=False, **dd)
        layers = [conv, _norm(dim_out, **dd)]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if act else []))


class Basic(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, dim: int, dim_out: int, stride: int, **dd: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvBatch(dim, dim_out, stride=stride, **dd),
            ConvBatch(dim_out, dim_out, act=False, **dd),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = ConvBatch(dim, dim_out, kernel=1, stride=stride, act=False, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


class DenseBlock(nn.ModuleList):
    """Dense block: every layer gets the outputs of all previous layers; returns new channels."""

    def __init__(self, dim: int, **dd: Any) -> None:
        narrow = GROWTH * BOTTLENECK
        super().__init__(
            nn.Sequential(
                _norm(dim + i * GROWTH, **dd),
                nn.ReLU(inplace=True),
                nn.Conv2d(dim + i * GROWTH, narrow, 1, bias=False, **dd),
                _norm(narrow, **dd),
                nn.ReLU(inplace=True),
                nn.Conv2d(narrow, GROWTH, 3, padding=1, bias=False, **dd),
            )
            for i in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self:
            maps.append(layer(torch.cat(maps, dim=1)))
        return torch.cat(maps[1:], dim=1)


def _norm(dim: int, **dd: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(dim, track_running_stats=False, **dd)


def _beside(x: Tensor, skip: Tensor) -> Tensor:
    """Crop the centre of a map to the size of another and concatenate both."""
    (height, width), size = x.shape[2:], skip.shape[2:]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return torch.cat([x[:, :, top : top + size[0], left : left + size[1]], skip], dim=1)
