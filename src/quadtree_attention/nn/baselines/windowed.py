# SPDX-License-Identifier: Apache-2.0
"""Attentions inside windows of the map."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.baselines.base import QKVAttention, check_at_least
from quadtree_attention.ops.attention.tree import accumulation_dtype


class WindowAttention(QKVAttention):
    """Attention inside windows, with a bias per relative position (Swin, Liu et al. 2021).

    With `shift_size` the windows start that many cells further down and right; alternate blocks
    with 0 and `window_size // 2` to connect them. An axis that fits into one window is not
    shifted. If the windows do not divide the map, those at its edge are smaller. Names of weights
    are as in Swin.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        window_size: Cells per side of a window.
        shift_size: Offset of the windows, less than `window_size`.
        **options: As `FullAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        window_size: int = 7,
        shift_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        check_at_least("window_size", window_size, 1, "Swin has 7")
        check_at_least("shift_size", shift_size, 0, "0 does not shift")
        if shift_size >= window_size:
            raise OptionError(
                f"shift_size must be less than window_size, got {shift_size=}, "
                f"{window_size=}; Swin alternates 0 and window_size // 2"
            )
        super().__init__(dim, num_heads, device=device, dtype=dtype, **options)
        self.window_size = window_size
        self.shift_size = shift_size
        table = torch.zeros((2 * window_size - 1) ** 2, num_heads, device=device, dtype=dtype)
        self.relative_position_bias_table = nn.Parameter(table)
        self.init_own_weights()

    def init_own_weights(self) -> None:
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, *grid, _ = x.shape
        window = [min(self.window_size, size) for size in grid]
        counts = [-(-size // side) for size, side in zip(grid, window, strict=True)]
        padding = [n * s - size for n, s, size in zip(counts, window, grid, strict=True)]
        shift = [self.shift_size if n > 1 else 0 for n in counts]

        qkv = self.qkv(x)
        padded = F.pad(qkv, (0, 0, 0, padding[1], 0, padding[0]))
        if any(shift):
            padded = padded.roll([-s for s in shift], dims=(1, 2))
        q, k, v = (self.split_heads(t) for t in _cut(padded, window).chunk(3, dim=-1))

        bias = self._bias(window)[None].to(q.dtype)  # (1, N, T, T)
        if any(shift) or any(padding):
            seen = self._seen(grid, window, padding, shift, x.device)[:, None]  # (windows, 1, T, T)
            bias = bias.masked_fill(~seen, -torch.inf).repeat(batch, 1, 1, 1)
        out = self.attend(q, k, v, bias.expand(q.shape[0], -1, -1, -1))  # (B * windows, T, C)
        out = _paste(out, window, counts)
        if any(shift):
            out = out.roll(shift, dims=(1, 2))
        return out[:, : grid[0], : grid[1]], qkv[..., 2 * self.dim :]

    def _bias(self, window: list[int]) -> Tensor:
        """Bias (N, T, T) of queries (rows) and keys (columns) of a window."""
        span = 2 * self.window_size - 1
        table = self.relative_position_bias_table.unflatten(0, (span, span))
        device = table.device
        y, x = (
            torch.arange(s, device=device)[:, None] - torch.arange(s, device=device) for s in window
        )
        y, x = y + self.window_size - 1, x + self.window_size - 1
        bias = table[y[:, None, :, None], x[None, :, None, :]]  # (h, w, h, w, N)
        return bias.flatten(2, 3).flatten(0, 1).movedim(-1, 0)

    def _seen(
        self,
        grid: list[int],
        window: list[int],
        padding: list[int],
        shift: list[int],
        device: torch.device,
    ) -> Tensor:
        """Boolean (windows, T, T): True if two cells of a rolled window are in the same region.

        The roll moves cells from the opposite edge into the last windows. These cells, and the
        padding, are separate regions.
        """
        regions = []
        for size, extra, offset in zip(grid, padding, shift, strict=True):
            cell = torch.arange(size + extra, device=device).roll(-offset)
            regions.append((cell < offset).int() + 2 * (cell >= size))  # 2 or more is padding
        y, x = regions[0][:, None], regions[1]
        region = torch.where((y < 2) & (x < 2), 2 * y + x, -1)
        region = _cut(region[None, ..., None], window).squeeze(-1)  # (windows, T)
        return region[:, :, None] == region[:, None, :]

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, window_size={self.window_size}, shift_size={self.shift_size}"
        )


class FocalAttention(QKVAttention):
    """Attention to near cells and to pooled distant windows (Focal Transformer, Yang et al. 2021).

    There are two levels, as in the published models. In one softmax, queries of a window attend to

    - the cells of the window and of a margin of `expand_size` cells around it, with a bias per
      relative position, and
    - `focal_window` x `focal_window` pooled windows, centred on their own, with a bias per
      window. A pooled window is a learned weighted sum of its cells, initially the mean.

    Different from the authors' code: the bias in the margin comes from the same table as the bias
    inside; a window cut off by the edge is pooled over its existing cells with rescaled weights,
    not over zeros.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        window_size: Cells per side of a window.
        expand_size: Margin of unpooled cells on each side of the window.
        focal_window: Pooled windows per side, odd. The original has 7, 5, 3 and 1 in its stages.
        **options: As `FullAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        window_size: int = 7,
        expand_size: int = 3,
        focal_window: int = 7,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        check_at_least("window_size", window_size, 1, "the original has 7")
        check_at_least("expand_size", expand_size, 0, "the original has 3")
        check_at_least("focal_window", focal_window, 1, "it must be odd")
        if focal_window % 2 == 0:
            raise OptionError(
                f"focal_window must be odd, the own window in the middle, got {focal_window=}; "
                "the original has 7, 5, 3 and 1 in its stages"
            )
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, **dd, **options)
        self.window_size = window_size
        self.expand_size = expand_size
        self.focal_window = focal_window
        self.pool = nn.Linear(window_size**2, 1, **dd)
        span = 2 * (window_size + expand_size) - 1
        self.fine_bias = nn.Parameter(torch.zeros(num_heads, span, span, **dd))
        self.pooled_bias = nn.Parameter(torch.zeros(num_heads, focal_window, focal_window, **dd))
        self.init_own_weights()

    def init_own_weights(self) -> None:
        nn.init.constant_(self.pool.weight, self.window_size**-2)
        nn.init.zeros_(self.pool.bias)
        nn.init.trunc_normal_(self.fine_bias, std=0.02)
        nn.init.trunc_normal_(self.pooled_bias, std=0.02)

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, height, width, _ = x.shape
        side = self.window_size
        counts = [-(-height // side), -(-width // side)]
        below, right = counts[0] * side - height, counts[1] * side - width
        near = self.expand_size
        far = self.focal_window // 2
        wide = accumulation_dtype(x.dtype)
        here = torch.ones(1, height, width, 1, device=x.device, dtype=wide)  # padding adds zeros

        qkv = self.qkv(x)
        to_windows = (0, 0, 0, right, 0, below)
        q = _cut(F.pad(qkv[..., : self.dim], to_windows), [side, side])  # (B * windows, T, C)

        with_margin = (0, 0, near, right + near, near, below + near)
        fine = _overlapping(F.pad(qkv[..., self.dim :], with_margin), side + 2 * near, side)
        fine_here = _overlapping(F.pad(here, with_margin), side + 2 * near, side)

        cells = _cut(F.pad(x, to_windows), [side, side])
        share = _cut(F.pad(here, to_windows), [side, side]).mean(dim=1)  # (windows, 1)
        pooled = self._pooled(cells, share.repeat(batch, 1)).unflatten(0, (batch, *counts))
        around = (0, 0, far, far, far, far)
        coarse = self.qkv(pooled)[..., self.dim :]
        coarse = _overlapping(F.pad(coarse, around), self.focal_window, 1)
        coarse_here = _overlapping(
            F.pad(here.new_ones(1, *counts, 1), around), self.focal_window, 1
        )

        k, v = torch.cat([fine, coarse], dim=1).chunk(2, dim=-1)  # (B * windows, keys, C)
        seen = torch.cat([fine_here, coarse_here], dim=1).squeeze(-1) > 0  # (windows, keys)
        bias = self._bias()[None].to(k.dtype)  # (1, N, T, keys)
        bias = bias.masked_fill(~seen[:, None, None], -torch.inf).repeat(batch, 1, 1, 1)
        out = self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v), bias)
        out = _paste(out, [side, side], counts)
        return out[:, :height, :width], qkv[..., 2 * self.dim :]

    def _pooled(self, cells: Tensor, share: Tensor) -> Tensor:
        """Pool windows (B * windows, T, C), of which a `share` exists, to one cell each."""
        summed = F.linear(cells.transpose(1, 2), self.pool.weight).squeeze(-1)
        return (summed / share).to(summed.dtype) + self.pool.bias

    def _bias(self) -> Tensor:
        """Bias (N, T, keys) of the queries of a window for fine keys, then pooled keys."""
        side, near = self.window_size, self.expand_size
        device = self.fine_bias.device
        query = torch.arange(side, device=device)[:, None]
        key = torch.arange(-near, side + near, device=device)
        offset = query - key + side + near - 1  # (side, side + 2 near), from 0
        fine = self.fine_bias[:, offset[:, None, :, None], offset[None, :, None, :]]
        fine = fine.flatten(3, 4).flatten(1, 2)  # (N, T, fine keys)
        pooled = self.pooled_bias.flatten(1)[:, None].expand(-1, side**2, -1)
        return torch.cat([fine, pooled], dim=-1)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, window_size={self.window_size}, "
            f"expand_size={self.expand_size}, focal_window={self.focal_window}"
        )


def _cut(x: Tensor, window: list[int]) -> Tensor:
    """(B, H, W, C), both sides multiples of the window's -> (B * windows, T, C)."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))  # (B, i, h, j, w, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _paste(x: Tensor, window: list[int], counts: list[int]) -> Tensor:
    """Inverse of `_cut`: (B * windows, T, C) -> (B, H, W, C)."""
    x = x.unflatten(1, window).unflatten(0, (-1, *counts))  # (B, i, j, h, w, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _overlapping(x: Tensor, side: int, step: int) -> Tensor:
    """Windows with stride `step`: (B, H, W, C) -> (B * windows, side * side, C)."""
    x = x.unfold(1, side, step).unfold(2, side, step)  # (B, i, j, C, h, w)
    return x.flatten(4).transpose(3, 4).flatten(0, 2)
