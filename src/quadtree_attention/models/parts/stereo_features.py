# SPDX-License-Identifier: Apache-2.0
"""The convolutional parts of the stereo network: features before attention, adjustment after it."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.ops.attention.tree import accumulation_dtype

GROUP = 8  # channels that are normalised together: per image, as the views may differ in exposure
CONTEXT_STRIDE = 4
POOLS = (2, 4, 8, 16)  # cells of the coarsest map that spatial pyramid pooling averages over


class Hourglass(nn.Module):
    """Residual stages, each at half the resolution, pyramid pooling, and a dense decoder back.

    Args:
        dim_in: Channels of what is seen.
        dims: Channels at 1, 1/2, 1/4 and 1/8 of the resolution of the result; multiples of 8.
        dim_out: Channels of the result.
        stride: Pixels per cell of the result.
        option: What users call `dims`.
    """

    def __init__(
        self,
        dim_in: int,
        dims: Sequence[int],
        dim_out: int,
        *,
        stride: int,
        option: str = "dims",
        **dd: Any,
    ) -> None:
        super().__init__()
        check_dims(dims, stride=stride, option=option)
        self.stem = ConvNorm(dim_in, dims[0], 5, stride=stride, **dd)
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(below, dim, step, **dd), Residual(dim, dim, 1, **dd))
            for below, dim, step in zip((dims[0], *dims[:3]), dims, (1, 2, 2, 2), strict=True)
        )
        self.pooling = PyramidPooling(dims[3], **dd)
        self.decoder = nn.ModuleList(
            Decode(below, dim, **dd) for below, dim in zip(dims[:0:-1], dims[-2::-1], strict=True)
        )
        self.out = nn.Conv2d(dims[0], dim_out, 1, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', h, w), of H and W over the stride, rounded up.

        Cell (i, j) is at the pixel (stride * i, stride * j).
        """
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
        context: Channels of `WideContext` at 1/4, 1/8, 1/16 and 1/32; empty leaves it out, and what
            is farther away than about 40 pixels does not matter then, as in STTR.
        dilations: One residual block each; wide ones fill in what is occluded.
        expansion: Hidden channels of a block per channel.
    """

    def __init__(
        self,
        dim: int = 16,
        context: Sequence[int] = (),
        dilations: Sequence[int] = (1, 2, 4, 8, 16, 1),
        expansion: int = 3,
        **dd: Any,
    ) -> None:
        super().__init__()
        self.context = WideContext(context, **dd) if context else None
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
        _begin_with(self.head, 0.0, 0.0)  # it changes nothing at first

    def forward(self, image: Tensor, disparity: Tensor, occlusion: Tensor) -> tuple[Tensor, Tensor]:
        """Of an image (B, 3, H, W): disparity and logits of occlusion, (B, H, W) each."""
        mean = disparity.mean(dim=(1, 2), keepdim=True)
        spread = disparity.std(dim=(1, 2), keepdim=True).clamp(min=1e-3)
        relative = (disparity - mean) / spread
        logits = occlusion.clamp(1e-3, 1 - 1e-3).logit()
        if self.context is not None:
            relative, logits = self.context(image, relative, logits)
        x = self.embed(_seen(image, relative, logits))
        for block in self.blocks:
            x = x + block(x)
        change, more = self.head(x).to(disparity.dtype).unbind(dim=1)
        return ((relative + change) * spread + mean).relu(), logits + more


class WideContext(nn.Module):
    """Replaces disparities that cannot be right by what all of the image suggests.

    Inside a large surface without texture every partner in its row is as good as the next. Its
    border tells its disparity, hundreds of pixels away and in other rows.

    Args:
        dims: Channels at 1/4, 1/8, 1/16 and 1/32.
    """

    def __init__(self, dims: Sequence[int], **dd: Any) -> None:
        super().__init__()
        self.hourglass = Hourglass(5, dims, 3, stride=CONTEXT_STRIDE, option="context", **dd)
        # At first, what it suggests is what it was given, and is hardly taken
        _begin_with(self.hourglass.out, 0.0, -3.0, 0.0)

    def forward(self, image: Tensor, disparity: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of an image (B, 3, H, W): disparity and logits of occlusion, (B, H, W) each."""
        coarse = self.hourglass(_seen(image, disparity, logits)).to(disparity.dtype)
        change, share_logits, more = coarse.unbind(dim=1)
        given = disparity[:, ::CONTEXT_STRIDE, ::CONTEXT_STRIDE]
        maps = torch.stack([given + change, share_logits.sigmoid(), more], dim=1)
        size = (disparity.shape[1], disparity.shape[2])
        suggested, share, more_there = resampled(maps, size, 1 / CONTEXT_STRIDE).unbind(dim=1)
        return torch.lerp(disparity, suggested, share), logits + more_there


def _seen(image: Tensor, disparity: Tensor, logits: Tensor) -> Tensor:
    """(B, 5, H, W) of an image, disparities and the probability of occlusion."""
    maps = torch.stack([disparity, logits.sigmoid()], dim=1)
    return torch.cat([image, maps.to(image.dtype)], dim=1)


def _begin_with(conv: nn.Conv2d, *bias: float) -> None:
    """Makes a convolution give constants, one per channel, until it has learned."""
    nn.init.zeros_(conv.weight)
    with torch.no_grad():
        for place, value in zip(cast(Tensor, conv.bias), bias, strict=True):
            place.fill_(value)


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


def check_dims(dims: Sequence[int], *, stride: int, option: str) -> None:
    """Raises `OptionError` unless they are channels of four maps, the first at the stride."""
    if len(dims) != 4 or any(dim < GROUP or dim % GROUP for dim in dims):
        places = ", ".join(f"1/{stride << level}" for level in range(4))
        raise OptionError(
            f"{option} must be four numbers of channels, at {places}, all multiples of "
            f"{GROUP}, got {tuple(dims)}; pass such"
        )


def resampled(x: Tensor, size: tuple[int, int], ratio: float) -> Tensor:
    """A map (B, C, H, W) read at multiples of `ratio`, between cells linearly: (B, C, *size)."""
    grid = [
        torch.arange(count, device=x.device, dtype=torch.float32) * (2 * ratio / max(1, side - 1))
        - 1
        for count, side in zip(size, x.shape[2:], strict=True)
    ]
    places = torch.stack(torch.meshgrid(grid[1], grid[0], indexing="xy"), dim=-1)
    wide = accumulation_dtype(x.dtype)  # half precision cannot tell columns of a wide map apart
    places = places.to(wide).expand(len(x), -1, -1, -1)
    return F.grid_sample(x.to(wide), places, padding_mode="border", align_corners=True).to(x.dtype)
