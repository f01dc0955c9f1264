# SPDX-License-Identifier: Apache-2.0
"""Convolutional parts of the stereo network: feature extractor and refinement."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.ops.attention.tree import accumulation_dtype

GROUP = 8  # channels per group; group norm per image, since exposure may differ between views
CONTEXT_STRIDE = 4
POOLS = (2, 4, 8, 16)  # kernel sizes of spatial pyramid pooling on the coarsest map


class Hourglass(nn.Module):
    """Residual stages, each at half the resolution, pyramid pooling, and a dense decoder.

    Args:
        dim_in: Input channels.
        dims: Channels at 1, 1/2, 1/4 and 1/8 of the resolution of the result; multiples of 8.
        dim_out: Output channels.
        stride: Pixels per cell of the result.
        option: Public name of `dims`, for error messages.
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
    """Refines disparity and occlusion at full resolution, with the left image as input.

    Disparities are normalised by the statistics of the image, so that their scale has no effect.

    Args:
        dim: Channels.
        context: Channels of `WideContext` at 1/4, 1/8, 1/16 and 1/32; empty omits it, and the
            receptive field is then about 40 pixels, as in STTR.
        dilations: One residual block per dilation; large ones fill occluded regions.
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
        _begin_with(self.head, 0.0, 0.0)  # initially an identity

    def forward(self, image: Tensor, disparity: Tensor, occlusion: Tensor) -> tuple[Tensor, Tensor]:
        """Return disparity and logits of occlusion of an image (B, 3, H, W), (B, H, W) each."""
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
    """Replaces implausible disparities, with the whole image as context.

    Inside a large textureless surface all candidates of a row have the same score. The disparity is
    determined by the border of the surface, hundreds of pixels away and in other rows.

    Args:
        dims: Channels at 1/4, 1/8, 1/16 and 1/32.
    """

    def __init__(self, dims: Sequence[int], **dd: Any) -> None:
        super().__init__()
        self.hourglass = Hourglass(5, dims, 3, stride=CONTEXT_STRIDE, option="context", **dd)
        # Initially the proposal equals the input, with a small weight
        _begin_with(self.hourglass.out, 0.0, -3.0, 0.0)

    def forward(self, image: Tensor, disparity: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return disparity and logits of occlusion of an image (B, 3, H, W), (B, H, W) each."""
        coarse = self.hourglass(_seen(image, disparity, logits)).to(disparity.dtype)
        change, share_logits, more = coarse.unbind(dim=1)
        given = disparity[:, ::CONTEXT_STRIDE, ::CONTEXT_STRIDE]
        maps = torch.stack([given + change, share_logits.sigmoid(), more], dim=1)
        size = (disparity.shape[1], disparity.shape[2])
        suggested, share, more_there = resampled(maps, size, 1 / CONTEXT_STRIDE).unbind(dim=1)
        return torch.lerp(disparity, suggested, share), logits + more_there


def _seen(image: Tensor, disparity: Tensor, logits: Tensor) -> Tensor:
    """Concatenates image, disparities and the probability of occlusion: (B, 5, H, W)."""
    maps = torch.stack([disparity, logits.sigmoid()], dim=1)
    return torch.cat([image, maps.to(image.dtype)], dim=1)


def _begin_with(conv: nn.Conv2d, *bias: float) -> None:
    """Initialise a convolution with zero weights and a constant bias per channel."""
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
    """Residual block of two convolutions."""

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
    """Spatial pyramid pooling: adds features of averages over increasing windows."""

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
    """Decoder stage: dense layers on the upsampled map and the map of the encoder."""

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
    """Raise `OptionError` unless `dims` are channels of four maps, the first at the stride."""
    if len(dims) != 4 or any(dim < GROUP or dim % GROUP for dim in dims):
        places = ", ".join(f"1/{stride << level}" for level in range(4))
        raise OptionError(
            f"{option} must be four numbers of channels, at {places}, all multiples of "
            f"{GROUP}, got {tuple(dims)}; round them"
        )


def resampled(x: Tensor, size: tuple[int, int], ratio: float) -> Tensor:
    """Sample a map (B, C, H, W) bilinearly at multiples of `ratio`: (B, C, *size)."""
    steps: list[Any] = [2 * ratio / torch.sym_max(1, side - 1) for side in x.shape[2:]]
    grid = [
        torch.arange(count, device=x.device, dtype=torch.float32) * step - 1
        for count, step in zip(size, steps, strict=True)
    ]
    places = torch.stack(torch.meshgrid(grid[1], grid[0], indexing="xy"), dim=-1)
    wide = accumulation_dtype(x.dtype)  # half precision cannot resolve columns of a wide map
    places = places.to(wide).expand(x.shape[0], -1, -1, -1)
    return F.grid_sample(x.to(wide), places, padding_mode="border", align_corners=True).to(x.dtype)
