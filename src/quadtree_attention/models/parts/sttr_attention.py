# SPDX-License-Identifier: Apache-2.0
"""Attention along rows of STTR as published, with two additive position terms per score.

The sine encoding of the distance of two columns is projected by the query and key weights of each
attention; products of queries with encoded keys and of keys with encoded queries are added to the
scores. All scores of a layer are stored, and the encoding of every pair of columns is projected in
every layer, as in the published network, so that work and memory are the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quadtree_attention.errors import OptionError
from quadtree_attention.nn.norm import TokenNorm

TEMPERATURE = 10000.0
CPU_SCORES = 2**25  # scores computed at a time on a CPU without gradients


class RelativeAttention(nn.Module):
    """Attention of rows to other rows of the same width, with position terms.

    Args:
        dim: Channels.
        num_heads: Heads.
    """

    def __init__(self, dim: int, num_heads: int, **dd: Any) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads or dim % 2:
            raise OptionError(
                "channels must be even and a multiple of the heads, got "
                f"{dim=}, {num_heads=}; change one of them"
            )
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            nn.Linear(dim, dim, **dd) for _ in range(4)
        )

    def forward(self, rows: Tensor, others: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor]:
        """Return messages and scores.

        Args:
            rows: Queries (R, W, C).
            others: Keys and values (R, W, C).
            encoding: (W, W, C), encoded distance of each column of `rows` and of `others`.

        Returns:
            Messages (R, W, C), and scores (R, W, W) before softmax, summed over heads.
        """
        scale = (rows.shape[-1] // self.num_heads) ** -0.5
        q = self._heads(self.q_proj(rows) * scale)  # (R, W, N, D)
        k, v = self._heads(self.k_proj(others)), self._heads(self.v_proj(others))
        encoded_q = self._heads(self.q_proj(encoding) * scale)  # (W, W, N, D)
        encoded_k = self._heads(self.k_proj(encoding))
        step = _rows_at_a_time(q)
        parts = [
            _attend(*part, encoded_q, encoded_k)
            for part in zip(q.split(step), k.split(step), v.split(step), strict=True)
        ]
        messages, scores = (torch.cat(kind) for kind in zip(*parts, strict=True))
        return self.proj(messages.flatten(-2)), scores

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def _attend(
    q: Tensor, k: Tensor, v: Tensor, encoded_q: Tensor, encoded_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Messages (R, W, N, D), and scores (R, W, W) summed over heads."""
    scores = torch.einsum("rind,rjnd->rnij", q, k)
    scores = scores + torch.einsum("rind,ijnd->rnij", q, encoded_k)
    scores = scores + torch.einsum("rjnd,ijnd->rnij", k, encoded_q)
    messages = torch.einsum("rnij,rjnd->rind", scores.softmax(dim=-1).to(v.dtype), v)
    return messages, scores.sum(dim=1)


def _rows_at_a_time(q: Tensor) -> int:
    rows, width, heads = q.shape[:3]
    whole = torch.is_grad_enabled() or q.device.type != "cpu" or torch.compiler.is_compiling()
    return rows if whole else max(1, CPU_SCORES // (heads * width**2))


def sine_encoding(width: int, dim: int, step: float, like: Tensor) -> Tensor:
    """Interleaved sines and cosines of the distance (first minus second column): (W, W, C).

    Args:
        width: Number of columns.
        dim: Channels.
        step: Pixels per column.
        like: Tensor with the device and dtype of the result.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    distance = torch.arange(1 - width, width, device=like.device).to(wide) * step
    channel = torch.arange(0, dim, 2, device=like.device).to(wide)
    angle = distance[:, None] / TEMPERATURE ** (channel / dim)
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)  # (2W - 1, C)
    column = torch.arange(width, device=like.device)
    return table[column[:, None] - column + width - 1].to(like.dtype)


class RelativeBlock(nn.Module):
    """Pre-norm self attention, then cross attention: right to left, then left to updated right."""

    def __init__(self, dim: int, num_heads: int, **dd: Any) -> None:
        super().__init__()
        self.self_norm, self.cross_norm, self.right_norm = (
            TokenNorm(dim, 1e-5, before_linear=True, **dd) for _ in range(3)
        )
        self.self_attn = RelativeAttention(dim, num_heads, **dd)
        self.cross_attn = RelativeAttention(dim, num_heads, **dd)

    def forward(self, x: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor]:
        """(2R, W, C), left rows before right ones -> the same, and scores of left with right."""
        normed = self.self_norm(x)
        x = x + self.self_attn(normed, normed, encoding)[0]
        left, right = x.chunk(2)
        left_seen, right_seen = self.cross_norm(x).chunk(2)
        # distances are from left to right columns in both directions
        right = right + self.cross_attn(right_seen, left_seen, encoding.transpose(0, 1))[0]
        message, scores = self.cross_attn(left_seen, self.right_norm(right), encoding)
        return torch.cat([left + message, right]), scores


class RelativeTransformer(nn.Module):
    """Sequence of blocks; returns the scores of the last cross attention.

    Args:
        dim: Channels.
        num_layers: Number of blocks.
        num_heads: Heads.
        step: Pixels per column.
    """

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, *, step: float, **dd: Any
    ) -> None:
        super().__init__()
        self.step = step
        self.blocks = nn.ModuleList(RelativeBlock(dim, num_heads, **dd) for _ in range(num_layers))
        # Part of the published weights, but unused there too
        self.norm = nn.LayerNorm(dim, **dd).requires_grad_(False)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """(2B, H, W, C), left views before right ones -> scores (B, H, W, W)"""
        count, height, width, dim = x.shape
        encoding = sine_encoding(width, dim, self.step, x)
        rows = x.flatten(0, 1)
        scores = rows.new_zeros(())
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                rows, scores = checkpoint(block, rows, encoding, use_reentrant=False)
            else:
                rows, scores = block(rows, encoding)
        return scores.view(count // 2, height, width, width)
