# SPDX-License-Identifier: Apache-2.0
"""Refinement of matched cells to sub-pixel points."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.ops.attention.tree import accumulation_dtype


class FineWindows(nn.Module):
    """Windows of the fine map around coarse cells, merged with the coarse features there.

    Args:
        coarse_dim: Channels of the coarse map.
        fine_dim: Channels of the fine map.
        size: Cells per side of a window; odd.
    """

    def __init__(self, coarse_dim: int, fine_dim: int, size: int = 5, **dd: Any) -> None:
        super().__init__()
        if size < 3 or size % 2 == 0:
            raise OptionError(
                f"window_size must be an odd number from 3 on, got {size}; the original has 5"
            )
        self.size = size
        self.project = nn.Linear(coarse_dim, fine_dim, **dd)
        self.merge = nn.Linear(2 * fine_dim, fine_dim, **dd)
        for layer in (self.project, self.merge):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, fine: Tensor, coarse: Tensor, batch: Tensor, cells: Tensor) -> Tensor:
        """Return windows around cells.

        Args:
            fine: Fine map (B, C, h, w); its cell (4y, 4x) is at the coarse cell (y, x).
            coarse: Coarse map (B, H, W, coarse_dim).
            batch: Samples (M,).
            cells: Cells of the coarse map (M,), row-major indices.

        Returns:
            (M, size*size, C)
        """
        width = coarse.shape[2]
        rows = cells // width
        columns = cells - rows * width
        windows = gather_windows(fine, batch, 4 * rows, 4 * columns, self.size)
        context = self.project(coarse[batch, rows, columns])[:, None]  # (M, 1, C)
        context = context.to(windows.dtype).expand(-1, windows.shape[1], -1)
        return self.merge(torch.cat([windows, context], dim=-1))

    def extra_repr(self) -> str:
        return f"size={self.size}"


def gather_windows(x: Tensor, batch: Tensor, rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """Windows around cells (M,) of a map (B, C, H, W), zeros past its edge: (M, size*size, C)."""
    height, width = x.shape[2:]
    offsets = torch.arange(size, device=x.device) - size // 2
    y = (rows[:, None, None] + offsets[:, None]).expand(-1, size, size).flatten(1)
    x_ = (columns[:, None, None] + offsets).expand(-1, size, size).flatten(1)  # (M, size*size)
    inside = (y >= 0) & (y < height) & (x_ >= 0) & (x_ < width)
    windows = x.movedim(1, -1)[batch[:, None], y.clamp(0, height - 1), x_.clamp(0, width - 1)]
    return torch.where(inside[..., None], windows, 0)


def expected_offset(windows0: Tensor, windows1: Tensor) -> tuple[Tensor, Tensor]:
    """Expected position of the centre of window 0 in window 1.

    Args:
        windows0: (M, size*size, C)
        windows1: (M, size*size, C)

    Returns:
        The expectation (M, 2) as (x, y), with the centres of the outer cells at -1 and 1; and
        the sum of the standard deviations (M,) along x and y.
    """
    cells, channels = windows1.shape[1:]
    size = math.isqrt(cells)
    dtype = accumulation_dtype(windows0.dtype)
    with torch.autocast(windows0.device.type, enabled=False):
        windows0, windows1 = windows0.to(dtype), windows1.to(dtype)
        scores = (windows1 @ windows0[:, cells // 2, :, None])[..., 0]  # (M, size*size)
        heat = (scores / math.sqrt(channels)).softmax(dim=1)
        ticks = torch.linspace(-1, 1, size, device=heat.device, dtype=dtype)
        places = torch.cartesian_prod(ticks, ticks).flip(-1)  # (size*size, 2), x before y
        mean = heat @ places
        variance = heat @ places.square() - mean.square()
        # A negligible lower bound, at which the gradient of the root is finite.
        return mean, variance.clamp(min=1e-10).sqrt().sum(dim=1)
