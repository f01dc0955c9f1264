# SPDX-License-Identifier: Apache-2.0
"""Attentions of the matcher: self and cross attention with masks.

All have the interface of `QuadtreeAttention`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadtree_attention import checks
from quadtree_attention.errors import OptionError
from quadtree_attention.models.parts.masks import extent
from quadtree_attention.nn.attention import QuadtreeAttention
from quadtree_attention.nn.baselines import check_attention
from quadtree_attention.nn.baselines.base import tokens
from quadtree_attention.ops.attention.problem import Variant
from quadtree_attention.ops.attention.tree import accumulation_dtype, hide


class ContextAttention(nn.Module):
    """Base class of baseline attentions. Subclasses define `attend_tokens`.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
    """

    def __init__(self, dim: int, num_heads: int, **dd: Any) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise OptionError(
                f"dim must be a multiple of num_heads, got {dim=}, {num_heads=}; change one of them"
            )
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.proj = (
            nn.Linear(dim, dim, bias=False, **dd) for _ in range(4)
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """See `QuadtreeAttention.forward`."""
        if context is None:
            context, context_mask = x, mask
        keys, visible = self.keys(context, context_mask)
        q, k, v = (
            cells.unflatten(-1, (self.num_heads, -1))
            for cells in (self.q_proj(x), self.k_proj(keys), self.v_proj(keys))
        )  # (B, *grid, N, D)
        return self.proj(self.attend(q, k, v, visible).reshape(x.shape))

    def keys(self, context: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input of keys and values, and its visibility."""
        return hide(context, mask), mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Return the messages (B, T, N, D); `inspect.record` replaces this method.

        Args:
            q: Queries (B, *grid, N, D).
            k: Keys (B, *key_grid, N, D).
            v: Values, likewise.
            visible: Visible keys (B, *key_grid); None: all.
        """
        shown = None if visible is None else visible.flatten(1)
        return self.attend_tokens(tokens(q), tokens(k), tokens(v), shown).transpose(1, 2)

    def attend_tokens(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Queries (B, N, T, D), k and v (B, N, S, D), visible (B, S) -> (B, N, T, D)"""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class LinearAttention(ContextAttention):
    """Linear attention with `phi = elu + 1`; sums are accumulated in float32."""

    def attend_tokens(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        wide = accumulation_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            queries, keys = F.elu(q.to(wide)) + 1, F.elu(k.to(wide)) + 1
            if visible is not None:
                keys = torch.where(visible[:, None, :, None], keys, 0)
            values = keys.mT @ v.to(wide)  # (B, N, D, D)
            norm = queries @ keys.sum(dim=-2)[..., None] + 1e-6  # (B, N, T, 1)
            return (queries @ values / norm).to(q.dtype)


class FullAttention(ContextAttention):
    """Every cell attends to every cell."""

    def attend_tokens(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        if visible is None:
            return F.scaled_dot_product_attention(q, k, v)
        # Softmax over no keys is undefined: such queries attend to all keys, and get 0 later.
        nothing = ~visible.any(dim=1)[:, None, None, None]  # (B, 1, 1, 1)
        shown = visible[:, None, None] | nothing
        shown = shown.expand(-1, -1, q.shape[2], -1)  # (B, 1, T, S)
        return torch.where(nothing, 0, F.scaled_dot_product_attention(q, k, v, attn_mask=shown))


class PooledAttention(FullAttention):
    """Spatial reduction: full attention to a map pooled to `pool_size` cells per side.

    Means are over visible cells, and bins of a padded map are the same as without padding.
    """

    def __init__(self, dim: int, num_heads: int, *, pool_size: int = 8, **dd: Any) -> None:
        super().__init__(dim, num_heads, **dd)
        checks.at_least(1, pool_size=pool_size)
        self.pool_size = pool_size

    def keys(self, context: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if mask is None:
            pooled = F.adaptive_avg_pool2d(context.movedim(-1, 1), self.pool_size)
            return pooled.movedim(1, -1), None
        sides = extent(mask)
        down, across = (
            _bins(sides[:, i], context.shape[1 + i], self.pool_size).to(context.dtype)
            for i in range(2)
        )  # (B, pool_size, H), (B, pool_size, W)
        x = hide(context, mask)
        total = torch.einsum("bph,bhwc,bqw->bpqc", down, x, across)
        count = torch.einsum("bph,bhw,bqw->bpq", down, mask.to(context.dtype), across)
        return total / count.clamp(min=1)[..., None], count > 0

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pool_size={self.pool_size}"


def _bins(sizes: Tensor, cells: int, count: int) -> Tensor:
    """Return the cells of each of `count` bins over the first `sizes` (B,): (B, count, cells).

    As in adaptive pooling: bin i starts at `i * size / count`, rounded down, and ends before
    `(i + 1) * size / count`, rounded up.
    """
    edges = torch.arange(count + 1, device=sizes.device) * sizes[:, None]  # (B, count + 1)
    start, end = edges[:, :-1] // count, (edges[:, 1:] + count - 1) // count
    cell = torch.arange(cells, device=sizes.device)
    return (cell >= start[..., None]) & (cell < end[..., None])


_RIVALS: dict[str, type[ContextAttention]] = {
    "linear": LinearAttention,
    "full": FullAttention,
    "spatial_reduction": PooledAttention,
}
_VARIANTS: dict[str, Variant] = {"quadtree_a": "A", "quadtree_b": "B"}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "full": (),
    "spatial_reduction": ("pool_size",),
    **dict.fromkeys(_VARIANTS, ("num_levels", "topk", "backend")),
}
ATTENTIONS = tuple(_OPTIONS)


def build_context_attention(
    name: str, dim: int, num_heads: int, options: Mapping[str, Any], **dd: Any
) -> nn.Module:
    """Return the attention with this name.

    Args:
        name: One of `ATTENTIONS`.
        dim: Channels.
        num_heads: Heads.
        options: `num_levels` (3), `topk` (8 at the finest level with a selection, doubled at every
            coarser) and `backend` of quadtree attention, `pool_size` (8) of spatial reduction.
    """
    check_attention(name, ATTENTIONS)
    known = _OPTIONS[name]
    if unknown := [
        f"{option}={value!r}" for option, value in options.items() if option not in known
    ]:
        accepted = ", ".join(known) or "no options"
        raise OptionError(
            f"attention {name!r} accepts {accepted}, got {', '.join(unknown)}; leave it out"
        )
    if name in _RIVALS:
        return _RIVALS[name](dim, num_heads, **options, **dd)
    levels = options.get("num_levels", 3)
    topk = [8 * 2**i for i in reversed(range(levels - 1))] or 8
    options = {"num_levels": levels, "topk": topk, **options}
    return QuadtreeAttention(dim, num_heads, variant=_VARIANTS[name], **options, **dd)
