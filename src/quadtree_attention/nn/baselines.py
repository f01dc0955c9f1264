# SPDX-License-Identifier: Apache-2.0
"""The attentions quadtree attention is compared with, behind its interface.

All are self-attention on maps (B, H, W, C) of any size, channels last. What they share, the check
of the input, the optional position encoding (LePE) and the output projection, is in
`MapAttention`; each class below adds only how its queries find their keys.

Cells that exist only because a map was padded are never seen as keys.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.ops.tree import accumulation_dtype


class MapAttention(nn.Module):
    """What the baselines share. Subclasses define `attend`.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        lepe: Add a depthwise convolution of the value map to the result, before the projection.
        attn_drop: Dropout on the attention weights.
        proj_drop: Dropout after the output projection.
    """

    lepe: DepthwiseConv | None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        lepe: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise OptionError(
                f"dim must be a positive multiple of num_heads, got {dim=}, {num_heads=}; "
                "change one of them"
            )
        self.dim = dim
        self.num_heads = num_heads
        self.lepe = DepthwiseConv(dim, device=device, dtype=dtype) if lepe else None
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, W, C) -> the attended values and the value map, both (B, H, W, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)"""
        if x.ndim != 4 or x.shape[-1] != self.dim or 0 in x.shape[1:]:
            raise ShapeError(
                f"x must be (batch, *, *, {self.dim}), channels last, with at least one cell, "
                f"got x.shape={tuple(x.shape)}; "
                "images in (batch, channels, y, x) need x.permute(0, 2, 3, 1)"
            )
        out, v = self.attend(x)
        if self.lepe is not None:
            out = out + self.lepe(v)
        return self.proj_drop(self.proj(out))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, *cells, C) -> (B, N, T, D)"""
        heads = x.unflatten(-1, (self.num_heads, self.dim // self.num_heads))
        return heads.flatten(1, -3).transpose(1, 2)

    def merge_heads(self, x: Tensor, like: Tensor) -> Tensor:
        """(B, N, T, D) -> (B, H, W, C), the shape of `like`."""
        return x.transpose(1, 2).reshape(like.shape)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        dropout = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)


class _QKVAttention(MapAttention):
    """Queries, keys and values of every cell from one projection."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **options)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)


class FullAttention(_QKVAttention):
    """Every cell attends to every cell.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        qkv_bias: Whether the query, key and value projection has a bias.
        lepe: Add a depthwise convolution of the value map to the result, before the projection.
        attn_drop: Dropout on the attention weights.
        proj_drop: Dropout after the output projection.
    """

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out = self.sdpa(self.split_heads(q), self.split_heads(k), self.split_heads(v))
        return self.merge_heads(out, like=x), v


class TopKAttention(_QKVAttention):
    """Every query attends to the `topk` of all keys it scores highest (KVT, Wang et al. 2022).

    All pairs are scored: time and memory grow with the square of the number of cells. No gradient
    goes through the selection.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        topk: Keys kept per query and head; more than there are keeps all.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, topk: int = 100, **options: Any) -> None:
        _check_at_least("topk", topk, 1, "1 keeps the best key only")
        super().__init__(dim, num_heads, **options)
        self.topk = topk

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        queries, keys = self.split_heads(q), self.split_heads(k)
        kept = self._selected(queries, keys)
        out = self.sdpa(queries, keys, self.split_heads(v), attn_mask=kept)
        return self.merge_heads(out, like=x), v

    @torch.no_grad()
    def _selected(self, q: Tensor, k: Tensor) -> Tensor:
        """Boolean (B, N, T, T), True for the keys a query keeps."""
        scores = q @ k.transpose(-2, -1)  # (B, N, T, T)
        best = scores.topk(min(self.topk, scores.shape[-1]), dim=-1, sorted=False).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, topk={self.topk}"


class LinearAttention(_QKVAttention):
    """Attention with the kernel `phi(q) phi(k)`, `phi = elu + 1` (Katharopoulos et al. 2020).

    The product of keys and values is summed over the map once, so the cost is linear in the number
    of cells. There is no attention matrix, hence no dropout on it. Sums are kept in float32.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        qkv_bias: Whether the query, key and value projection has a bias.
        lepe: Add a depthwise convolution of the value map to the result, before the projection.
        proj_drop: Dropout after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = False,
        lepe: bool = False,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, lepe=lepe, proj_drop=proj_drop, **dd)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        wide = accumulation_dtype(q.dtype)
        with torch.autocast(x.device.type, enabled=False):
            queries = F.elu(self.split_heads(q).to(wide)) + 1
            keys = F.elu(self.split_heads(k).to(wide)) + 1
            values = keys.transpose(-2, -1) @ self.split_heads(v).to(wide)  # (B, N, D, D)
            total = keys.sum(dim=-2).unsqueeze(-1)  # (B, N, D, 1)
            # where all features of a query have underflowed to 0, so has the numerator
            norm = (queries @ total).clamp(min=torch.finfo(wide).tiny)
            out = queries @ values / norm
        return self.merge_heads(out.to(q.dtype), like=x), v


class _ReducedAttention(MapAttention):
    """Queries of every cell, keys and values of a smaller map made by `reduce`.

    The names of the weights are those of PVTv2 in timm. LePE needs values at the resolution of
    the queries: it convolves the value projection of `x` itself.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel: int | None,
        *,
        qkv_bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, **dd, **options)
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **dd)
        if kernel is not None:
            self.sr = nn.Conv2d(dim, dim, kernel_size=kernel, stride=kernel, **dd)
            self.norm = nn.LayerNorm(dim, **dd)

    def reduce(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, h, w, C)"""
        raise NotImplementedError

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        reduced = self.reduce(x)
        k, v = self.kv(reduced).chunk(2, dim=-1)
        out = self.sdpa(self.split_heads(self.q(x)), self.split_heads(k), self.split_heads(v))
        if self.lepe is not None and reduced is not x:
            bias = None if self.kv.bias is None else self.kv.bias[self.dim :]
            v = F.linear(x, self.kv.weight[self.dim :], bias)
        return self.merge_heads(out, like=x), v


class SpatialReductionAttention(_ReducedAttention):
    """Keys and values from a map reduced by a strided convolution (PVTv2, Wang et al. 2022).

    Takes the weights of timm's `pvt_v2` and equals it wherever that runs: rows and columns past
    the last whole patch of `sr_ratio` cells have no key. A side shorter than one patch, where
    the original fails, is filled up with zeros. LePE convolves the value projection of `x` itself,
    not that of the reduced map.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        sr_ratio: Cells of a side that become one key; 1 is full attention.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, sr_ratio: int = 1, **options: Any) -> None:
        _check_at_least("sr_ratio", sr_ratio, 1, "1 reduces nothing")
        super().__init__(dim, num_heads, sr_ratio if sr_ratio > 1 else None, **options)
        self.sr_ratio = sr_ratio

    def reduce(self, x: Tensor) -> Tensor:
        if self.sr_ratio == 1:
            return x
        _, height, width, _ = x.shape
        short = (0, 0, 0, max(self.sr_ratio - width, 0), 0, max(self.sr_ratio - height, 0))
        return self.norm(self.sr(F.pad(x, short).movedim(-1, 1)).movedim(1, -1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sr_ratio={self.sr_ratio}"


class LinearSpatialReductionAttention(_ReducedAttention):
    """Keys and values from a map averaged to `pool_size` cells a side (PVTv2 "li").

    The number of keys is fixed, so the cost is linear in the number of cells. Takes the weights
    of timm's `pvt_v2_b2_li` and equals it. LePE convolves the value projection of `x` itself, not
    that of the reduced map.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        pool_size: Keys per side of the map.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, pool_size: int = 7, **options: Any) -> None:
        _check_at_least("pool_size", pool_size, 1, "the original has 7")
        super().__init__(dim, num_heads, 1, **options)
        self.pool_size = pool_size

    def reduce(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x.movedim(-1, 1), self.pool_size)
        return F.gelu(self.norm(self.sr(pooled).movedim(1, -1)))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool_size={self.pool_size}"


class WindowAttention(_QKVAttention):
    """Attention inside windows, with a bias per relative position (Swin, Liu et al. 2021).

    With `shift_size` the windows start that many cells further down and right; alternate blocks
    with 0 and `window_size // 2` to connect them. An axis that fits into one window is not
    shifted. Where the windows do not divide the map, those at its edge are smaller. The
    names of the weights are Swin's.

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
        _check_at_least("window_size", window_size, 1, "Swin has 7")
        _check_at_least("shift_size", shift_size, 0, "0 does not shift")
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
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
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
        out = self.sdpa(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))

        out = out.transpose(1, 2).flatten(2)  # (B * windows, T, C)
        out = _paste(out, window, counts)
        if any(shift):
            out = out.roll(shift, dims=(1, 2))
        return out[:, : grid[0], : grid[1]], qkv[..., 2 * self.dim :]

    def _bias(self, window: list[int]) -> Tensor:
        """(N, T, T), of a query in the window (rows) for a key in it (columns)."""
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
        """Boolean (windows, T, T): whether two cells of a rolled window are together in truth.

        The roll brings cells from the far edge into the last windows: they, and the padding, are
        regions of their own.
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


class FocalAttention(_QKVAttention):
    """Near cells one by one, far ones as pooled windows (Focal Transformer, Yang et al. 2021).

    Two levels, as in the published models. The queries of a window attend, in one softmax, to

    - the cells of that window and of a margin of `expand_size` cells around it, with a bias per
      relative position, and
    - `focal_window` x `focal_window` pooled windows, their own in the middle, with a bias per
      window. A pooled window is a learned weighted sum of its cells, the mean at first.

    Different from the authors' code: the bias in the margin comes from the same table as that
    inside; a window cut off by the edge is pooled over the cells it has (weights scaled
    up to the share that is there), not over zeros.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        window_size: Cells per side of a window.
        expand_size: Cells seen one by one on each side around the window.
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
        _check_at_least("window_size", window_size, 1, "the original has 7")
        _check_at_least("expand_size", expand_size, 0, "the original has 3")
        _check_at_least("focal_window", focal_window, 1, "it must be odd")
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
        nn.init.constant_(self.pool.weight, window_size**-2)
        nn.init.zeros_(self.pool.bias)
        span = 2 * (window_size + expand_size) - 1
        self.fine_bias = nn.Parameter(torch.zeros(num_heads, span, span, **dd))
        self.pooled_bias = nn.Parameter(torch.zeros(num_heads, focal_window, focal_window, **dd))
        nn.init.trunc_normal_(self.fine_bias, std=0.02)
        nn.init.trunc_normal_(self.pooled_bias, std=0.02)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
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
        out = self.sdpa(self.split_heads(q), self.split_heads(k), self.split_heads(v), bias)
        out = _paste(out.transpose(1, 2).flatten(2), [side, side], counts)
        return out[:, :height, :width], qkv[..., 2 * self.dim :]

    def _pooled(self, cells: Tensor, share: Tensor) -> Tensor:
        """Windows (B * windows, T, C), of which `share` (B * windows, 1) exists, as one cell."""
        summed = F.linear(cells.transpose(1, 2), self.pool.weight).squeeze(-1)
        return (summed / share).to(summed.dtype) + self.pool.bias

    def _bias(self) -> Tensor:
        """(N, T, keys), of a query of the window for its fine, then its pooled keys."""
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


BASELINES: dict[str, type[MapAttention]] = {
    "spatial_reduction": SpatialReductionAttention,
    "linear_spatial_reduction": LinearSpatialReductionAttention,
    "window": WindowAttention,
    "focal": FocalAttention,
    "linear": LinearAttention,
    "topk": TopKAttention,
    "full": FullAttention,
}


def make_attention(name: str, dim: int, num_heads: int = 8, **options: Any) -> MapAttention:
    """Builds a baseline by name.

    Args:
        name: A key of `BASELINES`.
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        **options: Keyword arguments of that class.

    Example:
        >>> import torch
        >>> attention = make_attention("window", 32, 4, window_size=7, shift_size=3, lepe=True)
        >>> attention(torch.randn(1, 10, 15, 32)).shape
        torch.Size([1, 10, 15, 32])
    """
    if name not in BASELINES:
        raise OptionError(
            f"attention must be one of {', '.join(BASELINES)}, got {name!r}; choose one of them"
        )
    known = _options_of(BASELINES[name])
    unknown = [option for option in options if option not in known]
    if unknown:
        raise OptionError(
            f"attention {name!r} accepts the options {', '.join(known)}, "
            f"got {', '.join(unknown)}; leave out what it does not have"
        )
    return BASELINES[name](dim, num_heads, **options)


def _options_of(kind: type[MapAttention]) -> list[str]:
    """Keyword-only arguments of a baseline, those its base takes for it included."""
    found: dict[str, None] = {}
    for cls in kind.__mro__:  # down to the class that passes nothing on
        parameters = inspect.signature(cls).parameters.values()
        found |= dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(found)


def _check_at_least(name: str, value: int, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(
            f"{name} must be an integer of at least {least}, got {name}={value!r}; {hint}"
        )


def _cut(x: Tensor, window: list[int]) -> Tensor:
    """(B, H, W, C), both sides multiples of the window's -> (B * windows, T, C)."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))  # (B, i, h, j, w, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _paste(x: Tensor, window: list[int], counts: list[int]) -> Tensor:
    """Undoes `_cut`: (B * windows, T, C) -> (B, H, W, C)."""
    x = x.unflatten(1, window).unflatten(0, (-1, *counts))  # (B, i, j, h, w, C)
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _overlapping(x: Tensor, side: int, step: int) -> Tensor:
    """(B, H, W, C) -> (B * windows, side * side, C), a window every `step` cells."""
    x = x.unfold(1, side, step).unfold(2, side, step)  # (B, i, j, C, h, w)
    return x.flatten(4).transpose(3, 4).flatten(0, 2)
