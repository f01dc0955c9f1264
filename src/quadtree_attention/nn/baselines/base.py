# SPDX-License-Identifier: Apache-2.0
"""Base class of the baseline attentions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention.errors import OptionError, ShapeError
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.ops.attention.problem import check_mask


class MapAttention(nn.Module):
    """Base of the baseline attentions. Subclasses define `attended`.

    All scores are computed in one method, `attend(q, k, v, ...)`, which `inspect.record` replaces.

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

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, W, C) -> messages and value map, both (B, H, W, C)."""
        raise NotImplementedError

    def init_own_weights(self) -> None:
        """Initialise parameters outside of submodules, or with a different initialisation.

        Models that initialise modules by type call this after the submodules.
        """

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)

        Args:
            x: The map.
            mask: Boolean (B, H, W), True = visible, of maps padded at the bottom and right; every
                sample is processed at its size before padding, and the padding becomes 0.

        Raises:
            OptionError: The mask hides other cells: partly hidden windows and reduced maps are not
                defined for these attentions.
        """
        if x.ndim != 4 or x.shape[-1] != self.dim or 0 in x.shape[1:]:
            raise ShapeError(
                f"x must be (batch, *, *, {self.dim}), channels last, with at least one cell, "
                f"got x.shape={tuple(x.shape)}; "
                "images in (batch, channels, y, x) need x.permute(0, 2, 3, 1)"
            )
        check_mask("mask", mask, "x", tuple(x.shape[:-1]), x.device)
        return self._whole(x) if mask is None else self._by_size(x, _sizes(mask))

    def _whole(self, x: Tensor) -> Tensor:
        out, v = self.attended(x)
        if self.lepe is not None:
            out = out + self.lepe(v)
        return self.proj_drop(self.proj(out))

    def _by_size(self, x: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
        """Process samples of equal size as one batch; zeros in the padding."""
        parts, order = [], []
        for height, width in dict.fromkeys(sizes):
            samples = [i for i, size in enumerate(sizes) if size == (height, width)]
            part = self._whole(x[samples, : max(1, height), : max(1, width)])
            part = part[:, :height, :width]  # empty if a sample is fully hidden
            parts.append(F.pad(part, (0, 0, 0, x.shape[2] - width, 0, x.shape[1] - height)))
            order += samples
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat(parts)[inverse]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, *cells, C) -> (B, *cells, N, D)"""
        return x.unflatten(-1, (self.num_heads, self.dim // self.num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the attended values (B, *cells, C).

        Args:
            q: Queries (B, *cells, N, D).
            k: Keys (B, *key_cells, N, D).
            v: Values, likewise.
            bias: Added to the scores, or a boolean mask of visible keys (B, N, T, S).
        """
        dropout = self.attn_drop.p if self.training else 0.0
        queries, keys, values = (tokens(x) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, dropout_p=dropout
        )
        return out.transpose(1, 2).reshape(*q.shape[:-2], self.dim)


class QKVAttention(MapAttention):
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


def tokens(x: Tensor) -> Tensor:
    """(B, *cells, N, D) -> (B, N, T, D)"""
    return x.flatten(1, -3).transpose(1, 2)


def _sizes(mask: Tensor) -> list[tuple[int, int]]:
    """Visible rows and columns of every sample; raises for masks that are not rectangles."""
    counts = torch.stack([mask.any(dim=2).sum(dim=1), mask.any(dim=1).sum(dim=1)], dim=1)  # (B, 2)
    rows, columns = (
        torch.arange(size, device=mask.device) < counts[:, i, None]
        for i, size in enumerate(mask.shape[1:])
    )
    fits = torch.equal(mask, rows[:, :, None] & columns[:, None])
    if not fits:
        raise OptionError(
            "mask must hide rows below and columns to the right only, which is all that the "
            "baseline attentions support, got one that hides other cells; pad there, or "
            "use quadtree attention, which takes any mask"
        )
    return [(height, width) for height, width in counts.tolist()]


def check_at_least(name: str, value: int, least: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(
            f"{name} must be an integer of at least {least}, got {name}={value!r}; {hint}"
        )
