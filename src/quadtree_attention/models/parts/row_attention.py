# SPDX-License-Identifier: Apache-2.0
"""Attention along the rows of two rectified images, and a transformer of such layers.

Corresponding pixels lie on the same row of both views, so rows are independent samples of a batch,
and the cost is quadratic in the width only. In quadtree attention a row is a binary tree.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.nn.block import ConvMlp
from quadtree_attention.nn.norm import TokenNorm
from quadtree_attention.ops import quadtree_attention
from quadtree_attention.ops.attention.tree import is_exporting

RowAttentionKind = Literal["full", "quadtree_a", "quadtree_b"]
# Numbers in the tokens that a CPU processes at a time, 8 MB in float32: a layer needs a dozen
# tensors of this size, and memory above 32 MB is returned to the system after each use.
CPU_NUMBERS = 2**21
SHORTEST_WAVE, LONGEST_WAVE = 1.0, 256.0  # cells per radian, of the position encoding


class RowAttention(nn.Module):
    """Attention of every row to itself, or to the same row of another map.

    Position encoding is rotary: half of the channels of every head are rotated by an angle
    proportional to the column, so that the product of a query and a key depends on their distance
    only. (Quadtree attention can average it over a cell, unlike a table of offsets.)

    Args:
        dim: Channels.
        num_heads: Heads; the channels of each must be a multiple of 4.
        attention: "full", "quadtree_a" or "quadtree_b".
        num_levels: Levels of quadtree attention.
        topk: Cells kept per query cell in quadtree attention.
        backend: Backend of quadtree attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: RowAttentionKind = "quadtree_b",
        *,
        num_levels: int = 4,
        topk: int | Sequence[int] = 6,
        backend: str = "auto",
        **dd: Any,
    ) -> None:
        super().__init__()
        _check_options(dim, num_heads, attention)
        self.num_heads = num_heads
        self.attention = attention
        self.num_levels = num_levels
        self.topk = topk
        self.backend = backend
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            nn.Linear(dim, dim, **dd) for _ in range(4)
        )
        self.level_logits: nn.Parameter | None = None
        if attention == "quadtree_b":
            self.level_logits = nn.Parameter(torch.zeros(num_levels, **dd))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """(B, H, W, C), attends to `context` (B, H, W1, C) or itself -> (B, H, W, C)"""
        rows = x.flatten(0, 1)
        others = rows if context is None else context.flatten(0, 1)
        step = _rows_at_a_time(rows)
        if is_exporting() or step >= rows.shape[0]:
            return self._of_rows(rows, others).view(x.shape)
        out = x[:0]
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            found = self._of_rows(rows[part], others[part])
            if start == 0:
                out = found.new_empty(rows.shape)
            out[part] = found
        return out.view(x.shape)

    def _of_rows(self, rows: Tensor, others: Tensor) -> Tensor:
        """(R, W, C), to (R, W1, C) -> (R, W, C)"""
        q, k, v = (
            tokens.unflatten(-1, (self.num_heads, -1))
            for tokens in (self.q_proj(rows), self.k_proj(others), self.v_proj(others))
        )  # (R, W, N, D)
        return self.proj(self.attend(turned(q), turned(k), v).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(R, W, N, D), keys and values (R, W1, N, D) -> (R, W, N, D); for `inspect.record`."""
        if self.attention == "full":
            q, k, v = (tokens.transpose(1, 2) for tokens in (q, k, v))  # (rows, N, W, D)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return quadtree_attention(
            q,
            k,
            v,
            num_levels=self.num_levels,
            topk=self.topk,
            variant="A" if self.attention == "quadtree_a" else "B",
            level_weights=self.level_logits,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        text = f"{self.attention}, num_heads={self.num_heads}"
        if self.attention != "full":
            text += f", num_levels={self.num_levels}, topk={self.topk}"
        return text


def _rows_at_a_time(rows: Tensor) -> int:
    """Rows per chunk: all, or fewer on a CPU without gradients; see `CPU_NUMBERS`."""
    whole = torch.is_grad_enabled() or rows.device.type != "cpu" or torch.compiler.is_compiling()
    return rows.shape[0] if whole else max(1, CPU_NUMBERS // rows[0].numel())


def turned(x: Tensor) -> Tensor:
    """Rotate the first half of the D channels of (R, W, N, D) by the column."""
    width, dim = x.shape[1], x.shape[-1]
    pairs = dim // 4
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = torch.arange(pairs, device=x.device, dtype=wide) / max(1, pairs - 1)
        frequency = 1 / (SHORTEST_WAVE * (LONGEST_WAVE / SHORTEST_WAVE) ** steps)
        angle = torch.arange(width, device=x.device)[:, None, None] * frequency  # (W, 1, pairs)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x.split([pairs, pairs, dim - 2 * pairs], dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)


class RowBlock(nn.Module):
    """Pre-norm self attention, cross attention and an optional MLP; for both views.

    The views are the two halves of a batch. Both are updated at once, symmetric in the views.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, options: dict[str, Any], **dd: Any
    ) -> None:
        super().__init__()
        self.self_norm = TokenNorm(dim, 1e-6, before_linear=True, **dd)
        self.self_attn = RowAttention(dim, num_heads, **options, **dd)
        self.cross_norm = TokenNorm(dim, 1e-6, before_linear=True, **dd)
        self.cross_attn = RowAttention(dim, num_heads, **options, **dd)
        hidden = int(dim * mlp_ratio)
        self.mlp_norm = TokenNorm(dim, 1e-6, before_linear=True, **dd) if hidden else None
        self.mlp = ConvMlp(dim, hidden, **dd) if hidden else None

    def forward(self, x: Tensor) -> Tensor:
        """(2B, H, W, C), left views before right ones -> the same"""
        rows = x.shape[0] * x.shape[1]
        is_large = not is_exporting() and _rows_at_a_time(x.flatten(0, 1)) < rows
        x = _sum(self.self_attn(self.self_norm(x)), x, in_place=is_large)
        normed = self.cross_norm(x)
        mixed = self.cross_attn(normed, normed.unflatten(0, (2, -1)).flip(0).flatten(0, 1))
        x = _sum(mixed, x, in_place=is_large)
        del normed, mixed
        if self.mlp is None or self.mlp_norm is None:
            return x
        if not is_large:
            return x + self.mlp(self.mlp_norm(x))
        for view in x.chunk(2):  # one view after the other: the same time, half of the memory
            view += self.mlp(self.mlp_norm(view))
        return x


def _sum(x: Tensor, y: Tensor, *, in_place: bool) -> Tensor:
    """Return x + y, in place if gradients and dtypes allow it."""
    return x.add_(y) if in_place and x.dtype == y.dtype else x + y


class RowTransformer(nn.Module):
    """Sequence of blocks with a final norm.

    Args:
        dim: Channels.
        num_layers: Number of blocks.
        num_heads: Heads.
        mlp_ratio: Hidden channels of the MLP per channel; 0 omits it, as in STTR.
        options: Options of `RowAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        mlp_ratio: float,
        options: dict[str, Any],
        **dd: Any,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            RowBlock(dim, num_heads, mlp_ratio, options, **dd) for _ in range(num_layers)
        )
        self.norm = TokenNorm(dim, 1e-6, before_linear=True, **dd)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """(2B, H, W, C) -> (2B, H, W, C)"""
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)


def _check_options(dim: int, num_heads: int, attention: str) -> None:
    checks.one_of(get_args(RowAttentionKind), attention=attention)
    if num_heads < 1 or dim % (4 * num_heads):
        raise OptionError(
            "the channels of every head must be a multiple of 4 for the position encoding, got "
            f"{dim=}, {num_heads=}; change one of them"
        )
