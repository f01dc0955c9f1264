# SPDX-License-Identifier: Apache-2.0
"""Pyramids of means, and the way back to the grid, as PyTorch operators."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.errors import ShapeError
from quadtree_attention.ops import tree as plain
from quadtree_attention.ops.backends.cpu.arrays import Array, flat
from quadtree_attention.ops.backends.cpu.shape import LANES
from quadtree_attention.ops.backends.cpu.threads import run
from quadtree_attention.ops.tree import Tree, accumulation_dtype


def pyramid(tree: Tree, x: Tensor, visible: Sequence[Tensor | None]) -> list[Tensor]:
    """As `tree.pyramid`, without a copy in between."""
    if not _has_kernels(tree, x):
        return plain.pyramid(tree, x, visible)
    shown = [level for level in visible if level is not None]
    return list(reversed(build_pyramid(x, shown, list(tree.grid), tree.num_levels)))


def to_grid(tree: Tree, x: Tensor) -> Tensor:
    """As `tree.to_grid`."""
    if not _has_kernels(tree, x):
        return plain.to_grid(tree, x)
    return finest_to_grid(x, list(tree.grid), tree.num_levels)


def _has_kernels(tree: Tree, x: Tensor) -> bool:
    """Half precisions, narrow rows and single levels are left to PyTorch."""
    wide = x.dtype == accumulation_dtype(x.dtype) and x.shape[-1] >= LANES
    return wide and tree.num_levels > 1


def _check_width(x: Tensor) -> None:
    """Kernels read whole vectors; `_has_kernels` keeps narrower rows away from them."""
    if x.shape[-1] < LANES:
        raise ShapeError(f"rows need {LANES} numbers or more, got {x.shape[-1]}; use tree.pyramid")


@lru_cache(maxsize=64)
def _order(tree: Tree) -> Array:
    """The place on the grid, row by row, of every finest cell in tree order; -1 for padding."""
    places = torch.arange(1, 1 + prod(tree.grid), dtype=torch.int32).reshape(tree.grid)
    return flat(tree.to_tree(places, tree.finest, axis=0) - 1, torch.int32)


def _shown(shown: list[Tensor], level: int) -> Array:
    return flat(shown[level] if shown else None, torch.bool)


def _tree_to_grid(
    tree: Tree, own: Tensor, above: Tensor | None, shown: list[Tensor], out: Tensor
) -> None:
    from quadtree_attention.ops.backends.cpu.kernels.trees import tree_to_grid

    _check_width(own)
    cells, dtype = tree.num_cells(tree.finest - 1), own.dtype
    run(
        tree_to_grid, own.shape[0] * cells, own.numel() * 4, flat(own, dtype), flat(above, dtype),
        _order(tree), _shown(shown, tree.finest), cells, prod(tree.grid), own.shape[1],
        tree.num_children, own.shape[3], out.view(-1).numpy(),
    )  # fmt: skip


def _grid_to_tree(tree: Tree, x: Tensor, out: Tensor) -> None:
    from quadtree_attention.ops.backends.cpu.kernels.trees import grid_to_tree

    _check_width(x)
    cells = tree.num_cells(tree.finest - 1)
    run(
        grid_to_tree, x.shape[0] * cells, x.numel() * 4, flat(x, x.dtype), _order(tree), cells,
        prod(tree.grid), x.shape[-2], tree.num_children, x.shape[-1], out.view(-1).numpy(),
    )  # fmt: skip


@torch.library.custom_op("quadtree_attention::cpu_pyramid", mutates_args=())
def build_pyramid(x: Tensor, shown: list[Tensor], grid: list[int], num_levels: int) -> list[Tensor]:
    """Levels (B, N, T_l, D), fine -> coarse, of a map (B, *grid, N, D)."""
    from quadtree_attention.ops.backends.cpu.kernels.trees import pool

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


@torch.library.custom_op("quadtree_attention::cpu_pyramid_backward", mutates_args=())
def build_pyramid_backward(
    grads: list[Tensor], shown: list[Tensor], grid: list[int], num_levels: int
) -> Tensor:
    """Gradient of the map from those of all levels, fine -> coarse."""
    from quadtree_attention.ops.backends.cpu.kernels.trees import unpool

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


def _fake_levels(x: Tensor, tree: Tree) -> list[Tensor]:
    batch, heads, width = x.shape[0], *x.shape[-2:]
    levels = reversed(range(tree.num_levels))
    return [x.new_empty(batch, heads, tree.num_cells(i), width) for i in levels]


def _fake_map(x: Tensor, grid: list[int]) -> Tensor:
    """(B, N, T, D) -> (B, *grid, N, D)"""
    return x.new_empty(x.shape[0], *grid, x.shape[1], x.shape[3])


@build_pyramid.register_fake
def _(x, shown, grid, num_levels):  # type: ignore[no-untyped-def]
    return _fake_levels(x, Tree(tuple(grid), num_levels))


@build_pyramid_backward.register_fake
def _(grads, shown, grid, num_levels):  # type: ignore[no-untyped-def]
    return _fake_map(grads[0], grid)


def _save_pyramid(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, shown, *ctx.options = inputs
    ctx.save_for_backward(*shown)


def _backward_pyramid(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    shown = list(ctx.saved_tensors)
    return build_pyramid_backward(grads, shown, *ctx.options), [None] * len(shown), None, None


build_pyramid.register_autograd(_backward_pyramid, setup_context=_save_pyramid)


@torch.library.custom_op("quadtree_attention::cpu_to_grid", mutates_args=())
def finest_to_grid(x: Tensor, grid: list[int], num_levels: int) -> Tensor:
    """The finest level (B, N, T, D) as a map (B, *grid, N, D)."""
    out = _fake_map(x, grid)
    _tree_to_grid(Tree(tuple(grid), num_levels), x, None, [], out)
    return out


@torch.library.custom_op("quadtree_attention::cpu_to_grid_backward", mutates_args=())
def finest_to_grid_backward(grad: Tensor, grid: list[int], num_levels: int) -> Tensor:
    tree = Tree(tuple(grid), num_levels)
    out = grad.new_empty(grad.shape[0], grad.shape[-2], tree.num_cells(tree.finest), grad.shape[-1])
    _grid_to_tree(tree, grad, out)
    return out


@finest_to_grid.register_fake
def _(x, grid, num_levels):  # type: ignore[no-untyped-def]
    return _fake_map(x, grid)


@finest_to_grid_backward.register_fake
def _(grad, grid, num_levels):  # type: ignore[no-untyped-def]
    return _fake_levels(grad, Tree(tuple(grid), num_levels))[0]


def _save_to_grid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.options = inputs


def _backward_to_grid(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return finest_to_grid_backward(grad, *ctx.options), None, None


finest_to_grid.register_autograd(_backward_to_grid, setup_context=_save_to_grid)
