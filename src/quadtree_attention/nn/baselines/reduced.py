# SPDX-License-Identifier: Apache-2.0
"""Attentions to a smaller map of keys and values."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.nn.baselines.base import MapAttention, check_at_least


class _ReducedAttention(MapAttention):
    """Queries of every cell, keys and values of a smaller map made by `reduce`.

    Names of weights are as in timm's PVTv2. LePE needs values at the resolution of the queries: it
    convolves the value projection of `x` itself.
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

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        reduced = self.reduce(x)
        k, v = self.kv(reduced).chunk(2, dim=-1)
        out = self.attend(self.split_heads(self.q(x)), self.split_heads(k), self.split_heads(v))
        if self.lepe is not None and reduced is not x:
            bias = None if self.kv.bias is None else self.kv.bias[self.dim :]
            v = F.linear(x, self.kv.weight[self.dim :], bias)
        return out, v


class SpatialReductionAttention(_ReducedAttention):
    """Keys and values from a map reduced by a strided convolution (PVTv2, Wang et al. 2022).

    Compatible with weights of timm's `pvt_v2`, with equal results: rows and columns past the last
    whole patch of `sr_ratio` cells have no key. A side shorter than one patch, for which the
    original fails, is padded with zeros. LePE convolves the value projection of `x` itself, not of
    the reduced map.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        sr_ratio: Cells per side of a patch that becomes one key; 1 is full attention.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, sr_ratio: int = 1, **options: Any) -> None:
        check_at_least("sr_ratio", sr_ratio, 1, "1 reduces nothing")
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
    """Keys and values from a map averaged to `pool_size` cells per side (PVTv2 "li").

    The number of keys is fixed, so the cost is linear in the number of cells. Compatible with
    weights of timm's `pvt_v2_b2_li`, with equal results. LePE convolves the value projection of `x`
    itself, not of the reduced map.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        pool_size: Keys per side of the map.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, pool_size: int = 7, **options: Any) -> None:
        check_at_least("pool_size", pool_size, 1, "the original has 7")
        super().__init__(dim, num_heads, 1, **options)
        self.pool_size = pool_size

    def reduce(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x.movedim(-1, 1), self.pool_size)
        return F.gelu(self.norm(self.sr(pooled).movedim(1, -1)))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool_size={self.pool_size}"
