# SPDX-License-Identifier: Apache-2.0
"""Pyramids of means, and conversion from tree order to the grid, as PyTorch operators."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.errors import ShapeError
from quadtree_attention.ops.attention import tree as plain
from quadtree_attention.ops.attention.cpu.arrays import Array, flat
from quadtree_attention.ops.attention.cpu.operators import WHAT
from quadtree_attention.ops.attention.cpu.shape import LANES
from quadtree_attention.ops.attention.cpu.threads import run
from quadtree_attention.ops.attention.tree import Tree, accumulation_dtype
from quadtree_attention.ops.autograd import apply, backward_pass, operator

MOST_ORDERS, MOST_BYTES = 64, 64 * 2**20  # limits of the cache of orders


def pyramid(tree: Tree, x: Tensor, visible: Sequence[Tensor | None]) -> list[Tensor]:
    """Compute `tree.pyramid` without an intermediate copy."""
    if not _has_kernels(tree, x):
        return plain.pyramid(tree, x, visible)
    shown = [level for level in visible if level is not None]
    return list(reversed(apply(WHAT, _Pyramid, tree, x, *shown)))


def to_tree(tree: Tree, x: Tensor, level: int) -> Tensor:
    """Compute `tree.to_tree`."""
    top = Tree(tree.grid_at(level), level + 1)  # tree with this level as the finest
    if not _has_kernels(top, x):
        return plain.to_tree(tree, x, level)
    return apply(WHAT, _ToTree, top, x)


def to_grid(tree: Tree, x: Tensor) -> Tensor:
    """Compute `tree.to_grid`."""
    if not _has_kernels(tree, x):
        return plain.to_grid(tree, x)
    return apply(WHAT, _ToGrid, tree, x)


_lock = Lock()
_orders: dict[Tree, Array] = {}


def _has_kernels(tree: Tree, x: Tensor) -> bool:
    """Return False for half precision, narrow rows and single levels, which PyTorch computes."""
    wide = x.dtype == accumulation_dtype(x.dtype) and x.shape[-1] >= LANES
    return wide and tree.num_levels > 1


def _check_width(x: Tensor) -> None:
    """Raise `ShapeError` for rows narrower than a vector, which `_has_kernels` excludes."""
    if x.shape[-1] < LANES:
        raise ShapeError(f"rows need {LANES} numbers or more, got {x.shape[-1]}; use tree.pyramid")


def _order(tree: Tree) -> Array:
    """Return the row-major grid index of every finest cell in tree order; -1 for padding.

    Orders of recent trees are cached, up to `MOST_ORDERS` and `MOST_BYTES`, always the last one.
    """
    with _lock:
        order = _orders.pop(tree, None)
        if order is None:
            places = torch.arange(1, 1 + prod(tree.grid), dtype=torch.int32).reshape(tree.grid)
            order = flat(tree.to_tree(places, tree.finest, axis=0) - 1, torch.int32)
        _orders[tree] = order  # most recently used
        nbytes = sum(x.nbytes for x in _orders.values())
        while len(_orders) > 1 and (nbytes > MOST_BYTES or len(_orders) > MOST_ORDERS):
            nbytes -= _orders.pop(next(iter(_orders))).nbytes
        return order


def _shown(shown: list[Tensor], level: int) -> Array:
    return flat(shown[level] if shown else None, torch.bool)


def _tree_to_grid(
    tree: Tree, own: Tensor, above: Tensor | None, shown: list[Tensor], out: Tensor
) -> None:
    from quadtree_attention.ops.attention.cpu.kernels.trees import tree_to_grid

    _check_width(own)
    cells, dtype = tree.num_cells(tree.finest - 1), own.dtype
    run(
        tree_to_grid, own.shape[0] * cells, own.numel() * 4, flat(own, dtype), flat(above, dtype),
        _order(tree), _shown(shown, tree.finest), cells, prod(tree.grid), own.shape[1],
        tree.num_children, own.shape[3], out.view(-1).numpy(),
    )  # fmt: skip


def _grid_to_tree(tree: Tree, x: Tensor, out: Tensor) -> None:
    from quadtree_attention.ops.attention.cpu.kernels.trees import grid_to_tree

    _check_width(x)
    cells = tree.num_cells(tree.finest - 1)
    run(
        grid_to_tree, x.shape[0] * cells, x.numel() * 4, flat(x, x.dtype), _order(tree), cells,
        prod(tree.grid), x.shape[-2], tree.num_children, x.shape[-1], out.view(-1).numpy(),
    )  # fmt: skip


def _fake_levels(x: Tensor, tree: Tree) -> list[Tensor]:
    batch, heads, width = x.shape[0], *x.shape[-2:]
    levels = reversed(range(tree.num_levels))
    return [x.new_empty(batch, heads, tree.num_cells(i), width) for i in levels]


def _fake_map(x: Tensor, grid: list[int]) -> Tensor:
    """(B, N, T, D) -> (B, *grid, N, D)"""
    return x.new_empty(x.shape[0], *grid, x.shape[1], x.shape[3])


@operator("cpu_pyramid", lambda x, _, grid, levels: _fake_levels(x, Tree(tuple(grid), levels)))
def build_pyramid(x: Tensor, shown: list[Tensor], grid: list[int], num_levels: int) -> list[Tensor]:
    """Compute the levels (B, N, T_l, D), fine -> coarse, of a map (B, *grid, N, D)."""
    from quadtree_attention.ops.attention.cpu.kernels.trees import pool

    tree = Tree(tuple(grid), num_levels)
    levels = _fake_levels(x, tree)
    _grid_to_tree(tree, x, levels[0])
    for i, (fine, coarse) in enumerate(pairwise(levels)):
        batch, heads, cells, width = coarse.shape
        run(
            pool, batch * heads * cells, fine.numel() * 2, flat(fine, x.dtype),
            _shown(shown, tree.finest - i), cells, heads, tree.num_children, width,
            coarse.view(-1).numpy(),
        )  # fmt: skip
    return levels


@operator("cpu_pyramid_backward", lambda grads, _, grid, levels: _fake_map(grads[0], grid))
def build_pyramid_backward(
    grads: list[Tensor], shown: list[Tensor], grid: list[int], num_levels: int
) -> Tensor:
    """Compute the gradient of the map from the gradients of all levels, fine -> coarse."""
    from quadtree_attention.ops.attention.cpu.kernels.trees import unpool

    tree = Tree(tuple(grid), num_levels)
    above, dtype = grads[-1], grads[0].dtype
    for i in reversed(range(1, len(grads) - 1)):
        batch, heads, cells, width = above.shape
        below = torch.empty(grads[i].shape, dtype=dtype)
        run(
            unpool, batch * heads * cells, below.numel() * 2, flat(grads[i], dtype),
            flat(above, dtype), _shown(shown, tree.finest - i), cells, heads, tree.num_children,
            width, below.view(-1).numpy(),
        )  # fmt: skip
        above = below
    out = _fake_map(grads[0], grid)
    _tree_to_grid(tree, grads[0], above, shown, out)
    return out


class _Pyramid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tree: Tree, x: Tensor, *shown: Tensor) -> tuple[Tensor, ...]:
        ctx.tree = tree
        ctx.save_for_backward(*shown)
        return tuple(build_pyramid(x, list(shown), list(tree.grid), tree.num_levels))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shown, tree = ctx.saved_tensors, ctx.tree

        def run(*grads: Tensor) -> Tensor:
            return build_pyramid_backward(
                list(grads), list(shown), list(tree.grid), tree.num_levels
            )

        return None, backward_pass(WHAT, run, *grads), *[None] * len(shown)


@operator("cpu_to_grid", lambda x, grid, _: _fake_map(x, grid))
def finest_to_grid(x: Tensor, grid: list[int], num_levels: int) -> Tensor:
    """Convert the finest level (B, N, T, D) to a map (B, *grid, N, D)."""
    out = _fake_map(x, grid)
    _tree_to_grid(Tree(tuple(grid), num_levels), x, None, [], out)
    return out


@operator("cpu_to_tree", lambda x, grid, levels: _fake_levels(x, Tree(tuple(grid), levels))[0])
def grid_to_finest(x: Tensor, grid: list[int], num_levels: int) -> Tensor:
    """Convert a map (B, *grid, N, D) to the finest level (B, N, T, D)."""
    tree = Tree(tuple(grid), num_levels)
    out = x.new_empty(x.shape[0], x.shape[-2], tree.num_cells(tree.finest), x.shape[-1])
    _grid_to_tree(tree, x, out)
    return out


class _ToTree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tree: Tree, x: Tensor) -> Tensor:
        ctx.tree = tree
        return grid_to_finest(x, list(tree.grid), tree.num_levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        grid, levels = list(ctx.tree.grid), ctx.tree.num_levels
        return None, backward_pass(WHAT, finest_to_grid, grad, grid, levels)


class _ToGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tree: Tree, x: Tensor) -> Tensor:
        ctx.tree = tree
        return finest_to_grid(x, list(tree.grid), tree.num_levels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        grid, levels = list(ctx.tree.grid), ctx.tree.num_levels
        return None, backward_pass(WHAT, grid_to_finest, grad, grid, levels)
