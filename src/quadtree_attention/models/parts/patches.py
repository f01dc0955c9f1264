# SPDX-License-Identifier: Apache-2.0
"""Downsampling layers."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.models.parts.inputs import check_image
from quadtree_attention.nn.norm import TokenNorm


class PatchEmbed(nn.Module):
    """Patch embedding: strided convolution and layer norm.

    Args:
        in_chans: Input channels.
        dim: Output channels.
        stride: Stride along both axes.
        kernel_size: Kernel size; patches overlap if it exceeds the stride.
    """

    def __init__(
        self, in_chans: int, dim: int, *, stride: int, kernel_size: int, **dd: Any
    ) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.stride = stride
        self.overlap = kernel_size > stride
        self.proj = nn.Conv2d(
            in_chans,
            dim,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2 if self.overlap else 0,
            **dd,
        )
        self.norm = TokenNorm(dim, 1e-5, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, C, ceil(H / stride), ceil(W / stride))"""
        check_image("x", x, self.in_chans)
        if not self.overlap:
            x = _pad(x, self.stride)
        return self.norm(self.proj(x).movedim(1, -1)).movedim(-1, 1)


class PatchMerging(nn.Module):
    """Patch merging: concatenates 2x2 cells, normalises and projects them to `dim_out` channels."""

    def __init__(self, dim: int, dim_out: int, **dd: Any) -> None:
        super().__init__()
        self.norm = TokenNorm(4 * dim, before_linear=True, **dd)
        self.reduction = nn.Linear(4 * dim, dim_out, bias=False, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, dim_out, ceil(H / 2), ceil(W / 2))"""
        x = _pad(x, 2).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (B, C, H/2, 2, W/2, 2)
        x = x.permute(0, 2, 4, 5, 3, 1).flatten(3)  # Swin's order: x before y before channel
        return self.reduction(self.norm(x)).movedim(-1, 1)


def _pad(x: Tensor, multiple: int) -> Tensor:
    """Pads (B, C, H, W) with zeros at the bottom and right to multiples."""
    return F.pad(x, (0, -x.shape[3] % multiple, 0, -x.shape[2] % multiple))
