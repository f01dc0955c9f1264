# SPDX-License-Identifier: Apache-2.0
"""Quadtree attention as a module."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.nn.merged import MergedLinear, as_one, can_merge
from quadtree_attention.nn.position import DepthwiseConv
from quadtree_attention.nn.value_pyramid import (
    Activation,
    ValueBranch,
    mean_over_children,
    plus_parents,
    visible_levels,
)
from quadtree_attention.ops.attention.problem import (
    Problem,
    Variant,
    check_depth,
    check_levels,
    check_mask,
    check_scale,
    check_topk,
    check_variant,
    effective_topk,
)
from quadtree_attention.ops.attention.tree import Tree, grid_of, hide
from quadtree_attention.ops.autocast import without_autocast
from quadtree_attention.ops.backends import Backend, choose, fuses, fuses_more
from quadtree_attention.ops.depthwise.cpu import add_levels, can_add
from quadtree_attention.ops.depthwise.functional import add_positions, can_fuse

ValuePyramid = Literal["mean", "conv"]


class QuadtreeAttention(nn.Module):
    """Multi-head quadtree attention with projections, on maps of any size, channels last.

    Args:
        dim: Channels; a multiple of `num_heads`.
        num_heads: Heads.
        num_levels: Levels of the pyramids; 1 is full attention.
        topk: Cells kept per query cell: one number, or one per level that selects
            (`num_levels - 1`, coarse -> fine).
        variant: "B" mixes levels by learned weights; "A" multiplies scores along the tree.
        ndim: Grid axes: 1 for rows, 2 for images, 3 for volumes.
        qkv_bias: Whether the query, key and value projections have a bias.
        scale: Factor on the scores; None means `head_dim ** -0.5`.
        value_pyramid: "mean" averages values like queries and keys; "conv" computes every coarser
            value map from the next finer one by learned layers.
        value_act: Activation in a learned value pyramid, "gelu" or "relu"; only with
            `value_pyramid="conv"`.
        lepe: Add a depthwise convolution of every level's value map to that level's message.
            Variant B and self-attention only.
        proj_drop: Dropout after the output projection.
        backend: "auto" or the name of a backend.

    `level_logits`, the learned mix of variant B, are initialised from a standard normal as in the
    original: the initial mix of levels is random.

    Example:
        >>> import torch
        >>> attention = QuadtreeAttention(64, num_heads=4, num_levels=3, topk=8)
        >>> attention(torch.randn(1, 30, 45, 64)).shape
        torch.Size([1, 30, 45, 64])
    """

    fused = False  # see `fuse_for_inference`
    merged: MergedLinear | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        num_levels: int = 3,
        topk: int | Sequence[int] = 8,
        variant: Variant = "B",
        ndim: int = 2,
        qkv_bias: bool = False,
        scale: float | None = None,
        value_pyramid: ValuePyramid = "mean",
        value_act: Activation | None = None,
        lepe: bool = False,
        proj_drop: float = 0.0,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_levels(num_levels)
        check_variant(variant)
        _check_options(dim, num_heads, ndim, value_pyramid, value_act, lepe, variant)
        self.dim = dim
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.topk = check_topk(topk, num_levels)
        self.variant: Variant = variant
        self.ndim = ndim
        self.scale = check_scale(scale, dim // num_heads)
        self.value_pyramid = value_pyramid
        self.backend = backend
        dd = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.k_proj = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias, **dd)
        self.level_logits = nn.Parameter(torch.randn(num_levels, **dd)) if variant == "B" else None
        self.value_branches = nn.ModuleList(  # entry i computes level i from level i + 1
            ValueBranch(dim, 2**ndim, value_act or "gelu", **dd)
            for _ in range(num_levels - 1 if value_pyramid == "conv" else 0)
        )
        self.lepe = nn.ModuleList(
            DepthwiseConv(dim, ndim, backend=backend, **dd)
            for _ in range(num_levels if lepe else 0)
        )
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to `context`, or to `x` itself.

        Args:
            x: Map (B, *grid, C).
            context: The other map (B, *context_grid, C) of cross attention; None: x itself.
            mask: Boolean (B, *grid), True = visible; hidden cells of x have no effect.
            context_mask: Boolean (B, *context_grid), True = visible; only with `context`.

        Returns:
            (B, *grid, C)
        """
        self._check_inputs(x, context, mask, context_mask)
        x = hide(x, mask)
        if context is None:
            context, context_mask = x, mask
        else:
            context = hide(context, context_mask)
        q, k, v = self._projected(x, context)
        q, k = self._heads(q), self._heads(k)
        problem = self._problem(x, context, q.dtype)
        backend = choose(self.backend, problem)
        values = [v]
        shown: list[Tensor | None] = []
        if self.value_pyramid != "mean" or self.lepe:  # the backend computes plain means
            shown = visible_levels(problem.key_tree, context_mask)
            values = self._value_levels(v, problem.key_tree, shown, backend.name)
        out = self.attend(
            q, k, [self._heads(x) for x in values], mask, context_mask, problem, backend
        ).flatten(-2)
        if self.lepe:
            out = self._plus_position(out, values, shown, backend.name)
        return self.proj_drop(self.proj(out))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Sequence[Tensor],
        mask: Tensor | None,
        context_mask: Tensor | None,
        problem: Problem,
        backend: Backend,
    ) -> Tensor:
        """Return the messages (B, *grid, N, D).

        Every call of the attention goes through this method; `inspect.record` replaces it.

        Args:
            q: Queries (B, *grid, N, D).
            k: Keys (B, *key_grid, N, D).
            v: Values (B, *key_grid, N, D), or one map per level, coarse -> fine.
            mask: Visible cells of the queries (B, *grid).
            context_mask: Visible cells of the keys (B, *key_grid).
            problem: Sizes and options of the call.
            backend: The backend selected for the call.
        """
        with without_autocast(problem.device.type):
            out, _ = backend.attend(
                problem, [q], [k], v,
                query_mask=mask, key_mask=context_mask, level_weights=self.level_logits,
                with_selection=False,
            )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, num_levels={self.num_levels}, "
            f"topk={self.topk}, variant={self.variant!r}, ndim={self.ndim}, "
            f"value_pyramid={self.value_pyramid!r}, backend={self.backend!r}"
        )

    def _projected(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, *grid, C) to queries, and the context to keys and values."""
        layers = [self.q_proj, self.k_proj, self.v_proj]
        if self.merged is None or not self.merged.stands_for(layers):
            fused = fuses_more() and fuses(x, self.backend)
            if not (fused and x is context and can_merge(layers)):
                return self.q_proj(x), self.k_proj(context), self.v_proj(context)
            q, k, v = as_one(layers, x)
            return q, k, v.contiguous()  # value pyramid and position encoding need dense maps
        if x is not context:
            (q,), (k, v) = self.merged(x, 0, 1), self.merged(context, 1, 3)
        elif self.value_branches:  # the norms need dense maps
            (q, k), (v,) = self.merged(x, 0, 2), self.merged(x, 2, 3)
        else:
            q, k, v = self.merged(x, 0, 3)
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., N, D)."""
        return x.unflatten(-1, (self.num_heads, self.dim // self.num_heads))

    def _value_levels(
        self, v: Tensor, tree: Tree, shown: list[Tensor | None], backend: str
    ) -> list[Tensor]:
        """Return value maps (B, *grid_at(level), C), coarse -> fine."""
        levels = [v]
        for i in reversed(range(self.num_levels - 1)):
            parents = tree.grid_at(i)
            if self.value_pyramid == "mean":
                levels.append(mean_over_children(levels[-1], shown[i + 1], parents))
            else:
                branch = self.value_branches[i]
                levels.append(branch(levels[-1], parents, shown[i + 1], shown[i], backend))
        return list(reversed(levels))

    def _plus_position(
        self, out: Tensor, values: list[Tensor], shown: list[Tensor | None], backend: str
    ) -> Tensor:
        """Add LePE, mixed over levels like the messages, to the message (B, *grid, C)."""
        assert self.level_logits is not None
        maps = [hide(level, visible) for level, visible in zip(values, shown, strict=True)]
        convs: list[Any] = list(self.lepe)
        weights, biases = [conv.weight for conv in convs], [conv.bias for conv in convs]
        if can_fuse([out, *maps], [*weights, *biases], backend, asked=self.fused):
            return add_positions(out, maps, weights, biases, self.level_logits)
        shares = self.level_logits.softmax(dim=0)
        local = [conv(x, share) for conv, x, share in zip(convs, maps, shares, strict=True)]
        if can_add([out, *local], backend):
            return add_levels(out, local)
        total = local[0]
        for finer in local[1:]:
            total = plus_parents(finer, total)
        return out + total

    def _problem(self, x: Tensor, context: Tensor, dtype: torch.dtype) -> Problem:
        query_grid, key_grid = grid_of(x.shape[1:-1]), grid_of(context.shape[1:-1])
        check_depth(self.num_levels, query_grid, key_grid)
        key_tree = Tree(key_grid, self.num_levels)
        head_dim = self.dim // self.num_heads
        return Problem(
            batch=x.shape[0],
            query_tree=Tree(query_grid, self.num_levels),
            key_tree=key_tree,
            num_heads=self.num_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            topk=effective_topk(self.topk, key_tree),
            variant=self.variant,
            scale=self.scale,
            dtype=dtype,
            device=x.device,
        )

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        context_mask: Tensor | None,
    ) -> None:
        self._check_map("x", x)
        check_mask("mask", mask, "x", x.shape[:-1], x.device)
        if context is None:
            if context_mask is not None:
                raise OptionError(
                    "context_mask needs a context, got context=None; "
                    "for self-attention pass mask, which hides cells of x as keys, too"
                )
            return
        if self.lepe:
            raise OptionError(
                "lepe=True adds the value map of x to its own cells, got a context; "
                "build the module with lepe=False for cross attention"
            )
        self._check_map("context", context)
        check_mask("context_mask", context_mask, "context", context.shape[:-1], context.device)
        if context.shape[0] != x.shape[0]:
            raise ShapeError(
                f"x and context must have the same batch size, got x.shape={tuple(x.shape)}, "
                f"context.shape={tuple(context.shape)}; use Tensor.expand to share one"
            )

    def _check_map(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(
                f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it first, "
                "for example with torch.as_tensor"
            )
        if x.ndim != self.ndim + 2 or x.shape[-1] != self.dim or 0 in x.shape[1:]:
            raise ShapeError(
                f"{name} must be (batch, {', '.join('*' * self.ndim)}, {self.dim}), channels last, "
                f"with at least one cell, got {name}.shape={tuple(x.shape)}; "
                "images in (batch, channels, y, x) need x.permute(0, 2, 3, 1)"
            )


def _check_options(
    dim: int,
    num_heads: int,
    ndim: int,
    value_pyramid: str,
    value_act: str | None,
    lepe: bool,
    variant: Variant,
) -> None:
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise OptionError(
            f"dim must be a positive multiple of num_heads, got {dim=}, {num_heads=}; "
            "change one of them"
        )
    if ndim not in (1, 2, 3):
        raise OptionError(f"ndim must be 1, 2 or 3, got {ndim=}; images have 2")
    if value_pyramid not in get_args(ValuePyramid):
        raise OptionError(
            f"value_pyramid must be 'mean' or 'conv', got {value_pyramid=}; 'mean' has no weights"
        )
    if value_act is not None and value_pyramid != "conv":
        raise OptionError(
            f"value_act belongs to value_pyramid='conv', got {value_act=} with "
            f"{value_pyramid=}; leave it out"
        )
    if lepe and variant == "A":
        raise OptionError(
            "lepe=True weighs the position encoding by the level weights of variant 'B', got "
            "variant='A'; choose one"
        )
