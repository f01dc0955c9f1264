# SPDX-License-Identifier: Apache-2.0
"""Attentions over all pairs of cells."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.nn.baselines.base import QKVAttention, check_at_least, tokens
from quadtree_attention.ops.attention.tree import accumulation_dtype


class FullAttention(QKVAttention):
    """Every cell attends to every cell.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        qkv_bias: Whether the query, key and value projection has a bias.
        lepe: Add a depthwise convolution of the value map to the result, before the projection.
        attn_drop: Dropout on the attention weights.
        proj_drop: Dropout after the output projection.
    """

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v)), v


class TopKAttention(QKVAttention):
    """Every query attends to its `topk` keys with the highest scores (KVT, Wang et al. 2022).

    All pairs are scored: time and memory are quadratic in the number of cells. No gradient flows
    through the selection.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        topk: Keys kept per query and head; values above the number of keys keep all.
        **options: As `FullAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 8, *, topk: int = 100, **options: Any) -> None:
        check_at_least("topk", topk, 1, "1 keeps the best key only")
        super().__init__(dim, num_heads, **options)
        self.topk = topk

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        queries, keys = self.split_heads(q), self.split_heads(k)
        kept = self._selected(tokens(queries), tokens(keys))
        return self.attend(queries, keys, self.split_heads(v), kept), v

    @torch.no_grad()
    def _selected(self, q: Tensor, k: Tensor) -> Tensor:
        """Boolean mask (B, N, T, T) of the keys kept by each query."""
        scores = q @ k.transpose(-2, -1)  # (B, N, T, T)
        best = scores.topk(min(self.topk, scores.shape[-1]), dim=-1, sorted=False).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, topk={self.topk}"


class LinearAttention(QKVAttention):
    """Attention with the kernel `phi(q) phi(k)`, `phi = elu + 1` (Katharopoulos et al. 2020).

    The product of keys and values is summed over the map once, so the cost is linear in the number
    of cells. Without an attention matrix, there is no attention dropout. Sums are in float32.

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

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.attend(self.split_heads(q), self.split_heads(k), self.split_heads(v)), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = accumulation_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            queries = F.elu(tokens(q).to(wide)) + 1
            keys = F.elu(tokens(k).to(wide)) + 1
            values = keys.transpose(-2, -1) @ tokens(v).to(wide)  # (B, N, D, D)
            total = keys.sum(dim=-2).unsqueeze(-1)  # (B, N, D, 1)
            # if all features of a query underflow to 0, the numerator does, too
            norm = (queries @ total).clamp(min=torch.finfo(wide).tiny)
            out = queries @ values / norm
        return out.to(q.dtype).transpose(1, 2).reshape(*q.shape[:-2], self.dim)
