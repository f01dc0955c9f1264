# SPDX-License-Identifier: Apache-2.0
"""The convolutional parts of the stereo network: features before attention, adjustment after it."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError

GROUP = 8  # channels that are normalised together: per image, as the views may differ in exposure
POOLS = (2, 4, 8, 16)  # cells of the coarsest map that spatial pyramid pooling averages over


class StereoFeatures(nn.Module):
    """Residual stages down to 1/16, pyramid pooling there, and a dense decoder back to 1/2.

    Args:
        dims: Channels at 1/2, 1/4, 1/8 and 1/16; multiples of 8.
        dim_out: Channels of the result.
    """

    def __init__(self, dims: Sequence[int], dim_out: int, **dd: Any) -> None:
        super().__init__()
        if len(dims) != 4 or any(dim < GROUP or dim % GROUP for dim in (*dims, dim_out)):
            raise OptionError(
                "dims must be four numbers of channels, at 1/2, 1/4, 1/8 and 1/16, and like dim "
                f"multiples of {GROUP}, got {tuple(dims)} and {dim_out}; pass such"
            )
        self.stem = ConvNorm(3, dims[0], 5, stride=2, **dd)
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(dim_in, dim, stride, **dd), Residual(dim, dim, 1, **dd))
            for dim_in, dim, stride in zip((dims[0], *dims[:3]), dims, (1, 2, 2, 2), strict=True)
        )
        self.pooling = PyramidPooling(dims[3], **dd)
        self.decoder = nn.ModuleList(
            Decode(below, dim, **dd) for below, dim in zip(dims[:0:-1], dims[-2::-1], strict=True)
        )
        self.out = nn.Conv2d(dims[0], dim_out, 1, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C, H/2, W/2), sizes rounded up; cell (i, j) is at pixel (2i, 2j)"""
        x = self.stem(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        x = self.pooling(maps.pop())
        for decode in self.decoder:
            x = decode(x, maps.pop())
        return self.out(x)


class ContextAdjustment(nn.Module):
    """Refines disparity and occlusion at full resolution, knowing the left image.

    Disparities are seen relative to those of the whole image, so that their scale does not matter.

    Args:
        dim: Channels.
        dilations: One residual block each; wide ones fill in what is occluded.
        expansion: Hidden channels of a block per channel.
    """

    def __init__(
        self,
        dim: int = 16,
        dilations: Sequence[int] = (1, 2, 4, 8, 16, 1),
        expansion: int = 3,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(5, dim, 3, padding=1, **dd)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(dim, dim * expansion, 3, padding=d, dilation=d, **dd),
                nn.ReLU(),
                nn.Conv2d(dim * expansion, dim, 3, padding=1, **dd),
            )
            for d in dilations
        )
        self.head = nn.Conv2d(dim, 2, 3, padding=1, **dd)
        nn.init.zeros_(self.head.weight)  # it begins by changing nothing
        nn.init.zeros_(cast(Tensor, self.head.bias))

    def forward(self, image: Tensor, disparity: Tensor, occlusion: Tensor) -> tuple[Tensor, Tensor]:
        """Of an image (B, 3, H, W): disparity and logits of occlusion, (B, H, W) each."""
        mean = disparity.mean(dim=(1, 2), keepdim=True)
        spread = disparity.std(dim=(1, 2), keepdim=True).clamp(min=1e-3)
        relative = (disparity - mean) / spread
        seen = [relative[:, None].to(image.dtype), occlusion[:, None].to(image.dtype)]
        x = self.embed(torch.cat([image, *seen], dim=1))
        for block in self.blocks:
            x = x + block(x)
        change, logits = self.head(x).to(disparity.dtype).unbind(dim=1)
        before = occlusion.clamp(1e-3, 1 - 1e-3).logit()
        return (disparity + change * spread).relu(), before + logits


class ConvNorm(nn.Sequential):
    """Convolution, norm over groups of channels, and ReLU."""

    def __init__(
        self,
        dim: int,
        dim_out: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        act: bool = True,
        **dd: Any,
    ) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(dim, dim_out, kernel, stride, kernel // 2, bias=False, **dd),
            nn.GroupNorm(dim_out // GROUP, dim_out, **dd),
        ]
        super().__init__(*layers, *([nn.ReLU(inplace=True)] if act else []))


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, dim: int, dim_out: int, stride: int, **dd: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvNorm(dim, dim_out, stride=stride, **dd), ConvNorm(dim_out, dim_out, act=False, **dd)
        )
        same = stride == 1 and dim == dim_out
        self.shortcut = (
            nn.Identity() if same else ConvNorm(dim, dim_out, 1, stride=stride, act=False, **dd)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


class PyramidPooling(nn.Module):
    """Adds to every cell what averages over larger and larger parts of the map tell."""

    def __init__(self, dim: int, **dd: Any) -> None:
        super().__init__()
        width = max(GROUP, dim // 4 // GROUP * GROUP)
        self.reduce = nn.ModuleList(ConvNorm(dim, width, 1, **dd) for _ in POOLS)
        self.merge = ConvNorm(dim + width * len(POOLS), dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        pooled = [
            F.interpolate(
                reduce(F.avg_pool2d(x, side, ceil_mode=True, count_include_pad=False)),
                size,
                mode="bilinear",
            )
            for reduce, side in zip(self.reduce, POOLS, strict=True)
        ]
        return self.merge(torch.cat([x, *pooled], dim=1))


class Decode(nn.Module):
    """To the next finer map: dense layers on what comes from below and from the encoder."""

    def __init__(self, below: int, dim: int, **dd: Any) -> None:
        super().__init__()
        self.up = ConvNorm(below, dim, 1, **dd)
        self.first = ConvNorm(2 * dim, dim, **dd)
        self.second = ConvNorm(3 * dim, dim, **dd)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        up = F.interpolate(self.up(x), skip.shape[2:], mode="bilinear")
        both = torch.cat([up, skip], dim=1)
        return self.second(torch.cat([both, self.first(both)], dim=1))
