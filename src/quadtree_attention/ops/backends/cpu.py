# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for the CPU, compiled by Numba on first use.

This file is the PyTorch side: custom operators with fakes, gradients and FLOP formulas, and the
threads that run the kernels of `cpu_kernels`. Numba's own parallel loops are not used: its thread
pools cannot be entered by two Python threads at once or do not survive a fork, and their size is a
global setting. Kernels release the GIL instead, and plain Python threads share out their ranges.

Nothing of the size (queries x candidates) is kept. Backward recomputes scores from the inputs, the
selection and one log-sum-exp per query.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.ops.backends.base import Backend, Level, installed
from quadtree_attention.ops.problem import DTYPES, Problem, Variant
from quadtree_attention.ops.tree import Tree, accumulation_dtype
from quadtree_attention.ops.tree import pyramid as tree_pyramid
from quadtree_attention.ops.tree import to_grid as tree_to_grid

Array = np.ndarray[Any, Any]
LARGEST_INDEX = 2**31 - 1  # cells and entries of a selection are counted in int32


def attend_coarse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    *,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> Level:
    total, selection, scores, _, _ = _coarse(
        q, k, v, visible, weight, scale, topk or 0, variant == "A", with_scores
    )
    return _level(total, selection, scores, topk, with_scores)


def attend_fine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    inherited: Tensor,
    *,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> Level:
    total, selection, scores, _, _ = _fine(
        q, k, v, visible, weight, parents, parent_scores, inherited, scale, topk or 0, with_scores
    )
    return _level(total, selection, scores, topk, with_scores)


def _level(
    total: Tensor, selection: Tensor, scores: Tensor, topk: int | None, with_scores: bool
) -> Level:
    if topk is None:
        return Level(total, None, None)
    return Level(total, selection, scores if with_scores else None)


# ---- threads -------------------------------------------------------------------------------------

_PIECES_PER_THREAD = 8  # so that a thread that finishes early finds more to do
_SMALLEST_SHARE = 200_000  # multiplications that are worth waking a thread for

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < count:
        # A pool that is replaced finishes what it was given, then its threads end.
        pool = ThreadPoolExecutor(count, thread_name_prefix="quadtree_attention")
        _pool, _pool_size = pool, count
    return pool


def _run(kernel: Callable[..., None], count: int, work: int, *args: object) -> None:
    """Runs a kernel over the range 0 ... count - 1, on as many threads as PyTorch would use.

    Args:
        kernel: Called with the two ends of a part of the range, then `args`.
        count: Length of the range.
        work: Multiplications altogether, to judge how many threads are worth it.
    """
    threads = min(torch.get_num_threads(), 1 + work // _SMALLEST_SHARE, count)
    if threads <= 1:
        if count > 0:
            kernel(0, count, *args)
        return
    pieces = min(count, threads * _PIECES_PER_THREAD)
    ends = [count * i // pieces for i in range(pieces + 1)]
    todo = deque(pairwise(ends))

    def work_off() -> None:
        while True:
            try:
                first, last = todo.popleft()
            except IndexError:
                return
            kernel(first, last, *args)

    pool = _helpers(threads - 1)
    futures = [pool.submit(work_off) for _ in range(threads - 1)]
    work_off()
    for future in futures:
        if not future.cancel():  # one that has not begun is not needed any more
            future.result()


def _kernels() -> Any:
    from quadtree_attention.ops.backends import cpu_kernels

    return cpu_kernels


# ---- arrays --------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    width: int  # `dim`, rounded up to whole vectors
    value_width: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> _Sizes:
    batch, heads, queries, dim = q.shape
    keys, value_dim = v.shape[2:]
    lanes = _kernels().LANES
    return _Sizes(
        batch, heads, queries, keys, dim, value_dim, dim + -dim % lanes,
        value_dim + -value_dim % lanes,
    )  # fmt: skip


def _rows(x: Tensor, dtype: torch.dtype, width: int) -> Array:
    """A flat array of rows that are `width` numbers wide."""
    x = x.detach().to(dtype)
    if width != x.shape[-1]:
        x = F.pad(x, (0, width - x.shape[-1]))
    return x.contiguous().view(-1).numpy()


def _flat(x: Tensor | None, dtype: torch.dtype) -> Array:
    """A flat array; empty for None."""
    if x is None:
        return torch.zeros(0, dtype=dtype).numpy()
    return x.detach().to(dtype).contiguous().view(-1).numpy()


def _crop(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return x[..., :width].to(dtype).contiguous()


def _number(x: Tensor | float | None, dtype: torch.dtype) -> Any:
    """A scalar of the type that the kernels calculate in; 1 for None."""
    return np.dtype(str(dtype).removeprefix("torch.")).type(1.0 if x is None else float(x))


def _seen(visible: Tensor | None, batch: int, keys: int) -> tuple[Array, Array]:
    """Visible keys of every batch entry, first (B, S), and how many there are (B,)."""
    if visible is None:
        seen = torch.arange(keys, dtype=torch.int32).expand(batch, keys)
        return _flat(seen, torch.int32), np.full(batch, keys, np.int64)
    order = visible.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    return _flat(order, torch.int32), _flat(visible.sum(dim=1), torch.int64)


def _inverse(selection: Tensor, cells: int) -> tuple[Array, Array]:
    """`cpu_kernels.invert` of a selection (B, N, T, K)."""
    batch, heads, queries, kept = selection.shape
    size = queries * kept
    offsets = np.empty(batch * heads * (cells + 1), np.int32)
    entries = np.empty(batch * heads * size, np.int32)
    _run(
        _kernels().invert, batch * heads, batch * heads * (size + cells) * 4,
        _flat(selection, torch.int32), size, cells, offsets, entries,
    )  # fmt: skip
    return offsets, entries


# ---- forward -------------------------------------------------------------------------------------

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _outputs(
    q: Tensor, topk: int, width: int, *, is_a: bool, with_scores: bool, with_lse: bool
) -> Outputs:
    """Total, selection, scores, positions of the kept among the candidates, log-sum-exp.

    Whatever is not needed is empty.
    """
    lead = q.shape[:3]
    dtype = accumulation_dtype(q.dtype)
    nothing = (0,)
    kept = (*lead, topk) if topk else nothing
    return (
        torch.empty(*lead, width, dtype=dtype, device=q.device),
        torch.empty(kept, dtype=torch.int32, device=q.device),
        torch.empty(kept if with_scores else nothing, dtype=dtype, device=q.device),
        torch.empty(kept if is_a else nothing, dtype=torch.int32, device=q.device),
        torch.empty(lead if with_lse else nothing, dtype=dtype, device=q.device),
    )


def _result_dtype(q: Tensor, topk: int) -> torch.dtype:
    return accumulation_dtype(q.dtype) if topk else q.dtype


@torch.library.custom_op("quadtree_attention::cpu_coarse", mutates_args=())
def _coarse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    scale: float,
    topk: int,
    is_a: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels, sizes, dtype = _kernels(), _sizes(q, k, v), accumulation_dtype(q.dtype)
    outputs = _outputs(
        q, topk, sizes.value_width, is_a=is_a, with_scores=with_scores, with_lse=True
    )
    blocks = sizes.rows * -(-sizes.queries // kernels.BLOCK)
    _run(
        kernels.coarse_forward, blocks, _work(sizes, sizes.keys),
        _rows(q, dtype, sizes.width), _rows(k, dtype, sizes.width),
        _rows(v, dtype, sizes.value_width), *_seen(visible, sizes.batch, sizes.keys),
        sizes.heads, sizes.queries, sizes.keys, sizes.width, sizes.value_width,
        _number(scale, dtype), _number(weight, dtype), topk, is_a,
        *(x.view(-1).numpy() for x in outputs),
    )  # fmt: skip
    total, *others = outputs
    return (_crop(total, sizes.value_dim, _result_dtype(q, topk)), *others)  # type: ignore[return-value]


@torch.library.custom_op("quadtree_attention::cpu_fine", mutates_args=())
def _fine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    inherited: Tensor,
    scale: float,
    topk: int,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels, sizes, dtype = _kernels(), _sizes(q, k, v), accumulation_dtype(q.dtype)
    is_a = parent_scores is not None
    outputs = _outputs(
        q, topk, sizes.value_width, is_a=is_a, with_scores=with_scores, with_lse=not is_a
    )
    families, kept = parents.shape[2:]
    children = sizes.queries // families
    _run(
        kernels.fine_forward, sizes.rows * families, _work(sizes, kept * children),
        _rows(q, dtype, sizes.width), _rows(k, dtype, sizes.width),
        _rows(v, dtype, sizes.value_width), _flat(visible, torch.bool), visible is not None,
        _flat(parents, torch.int32), _flat(parent_scores, dtype),
        _rows(inherited, dtype, sizes.value_width), sizes.heads, families, children,
        sizes.keys // children, kept, sizes.width, sizes.value_width, _number(scale, dtype),
        _number(weight, dtype), topk, is_a, *(x.view(-1).numpy() for x in outputs),
    )  # fmt: skip
    total, *others = outputs
    return (_crop(total, sizes.value_dim, _result_dtype(q, topk)), *others)  # type: ignore[return-value]


def _work(sizes: _Sizes, candidates: int) -> int:
    """Multiplications of one forward pass."""
    return sizes.rows * sizes.queries * candidates * (sizes.width + sizes.value_width)


def _fake(q: Tensor, v: Tensor, topk: int, **options: bool) -> Outputs:
    total, *others = _outputs(q, topk, v.shape[-1], **options)
    return (total.to(_result_dtype(q, topk)), *others)  # type: ignore[return-value]


@_coarse.register_fake
def _(q, k, v, visible, weight, scale, topk, is_a, with_scores):  # type: ignore[no-untyped-def]
    return _fake(q, v, topk, is_a=is_a, with_scores=with_scores, with_lse=True)


@_fine.register_fake
def _(q, k, v, visible, weight, parents, parent_scores, inherited, scale, topk, with_scores):  # type: ignore[no-untyped-def]
    is_a = parent_scores is not None
    return _fake(q, v, topk, is_a=is_a, with_scores=with_scores, with_lse=not is_a)


# ---- backward ------------------------------------------------------------------------------------


@torch.library.custom_op("quadtree_attention::cpu_coarse_backward", mutates_args=())
def _coarse_backward(
    grad: Tensor,
    grad_scores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    selection: Tensor,
    positions: Tensor,
    lse: Tensor,
    scale: float,
    topk: int,
    is_a: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels, sizes, dtype = _kernels(), _sizes(q, k, v), accumulation_dtype(q.dtype)
    arrays = (
        _rows(grad, dtype, sizes.value_width), _flat(grad_scores, dtype),
        _rows(q, dtype, sizes.width), _rows(k, dtype, sizes.width),
        _rows(v, dtype, sizes.value_width),
    )  # fmt: skip
    numbers = (_number(scale, dtype), _number(weight, dtype))
    work = 2 * _work(sizes, sizes.keys)
    dq = torch.empty(*q.shape[:3], sizes.width, dtype=dtype)
    dots, shares = torch.empty_like(lse), torch.empty_like(lse)
    _run(
        kernels.coarse_backward_queries, sizes.rows * -(-sizes.queries // kernels.BLOCK), work,
        *arrays, *_seen(visible, sizes.batch, sizes.keys), _flat(positions, torch.int32),
        _flat(lse, dtype), sizes.heads, sizes.queries, sizes.keys, sizes.width, sizes.value_width,
        *numbers, topk, is_a, *(x.view(-1).numpy() for x in (dq, dots, shares)),
    )  # fmt: skip
    dk = torch.empty(*k.shape[:3], sizes.width, dtype=dtype)
    dv = torch.empty(*v.shape[:3], sizes.value_width, dtype=dtype)
    nothing = np.empty(0, np.int32)
    inverse = _inverse(selection, sizes.keys) if is_a and topk else (nothing, nothing)
    blocks = -(-sizes.keys // kernels.BLOCK)
    _run(
        kernels.backward_keys, sizes.rows * blocks, work,
        *arrays, _flat(visible, torch.bool), visible is not None, _flat(None, dtype),
        _flat(lse, dtype), _flat(dots, dtype), True, nothing, nothing, 1, *inverse, topk,
        sizes.heads, sizes.queries, kernels.BLOCK, blocks, sizes.keys, sizes.width,
        sizes.value_width, *numbers, is_a, dk.view(-1).numpy(), dv.view(-1).numpy(),
    )  # fmt: skip
    return (
        _crop(dq, sizes.dim, q.dtype),
        _crop(dk, sizes.dim, k.dtype),
        _crop(dv, sizes.value_dim, v.dtype),
        _weight_gradient(shares, weight),
    )


@torch.library.custom_op("quadtree_attention::cpu_fine_backward", mutates_args=())
def _fine_backward(
    grad: Tensor,
    grad_scores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    selection: Tensor,
    positions: Tensor,
    lse: Tensor,
    scale: float,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels, sizes, dtype = _kernels(), _sizes(q, k, v), accumulation_dtype(q.dtype)
    is_a = parent_scores is not None
    families, kept = parents.shape[2:]
    children = sizes.queries // families
    arrays = (
        _rows(grad, dtype, sizes.value_width), _flat(grad_scores, dtype),
        _rows(q, dtype, sizes.width), _rows(k, dtype, sizes.width),
        _rows(v, dtype, sizes.value_width), _flat(visible, torch.bool), visible is not None,
    )  # fmt: skip
    numbers = (_number(scale, dtype), _number(weight, dtype))
    work = 2 * _work(sizes, kept * children)
    dq = torch.empty(*q.shape[:3], sizes.width, dtype=dtype)
    dots, shares = torch.empty_like(lse), torch.empty(q.shape[:3], dtype=dtype)
    above = parents.shape if is_a else (0,)
    dparent_scores = torch.empty(above, dtype=dtype)
    dinherited = torch.empty(*parents.shape[:3], sizes.value_width, dtype=dtype)
    _run(
        kernels.fine_backward_queries, sizes.rows * families, work,
        *arrays, _flat(parents, torch.int32), _flat(parent_scores, dtype),
        _flat(positions, torch.int32), _flat(lse, dtype), sizes.heads, families, children,
        sizes.keys // children, kept, sizes.width, sizes.value_width, *numbers, topk, is_a,
        *(x.view(-1).numpy() for x in (dq, dots, shares, dparent_scores, dinherited)),
    )  # fmt: skip
    dk = torch.empty(*k.shape[:3], sizes.width, dtype=dtype)
    dv = torch.empty(*v.shape[:3], sizes.value_width, dtype=dtype)
    nothing = np.empty(0, np.int32)
    key_families = sizes.keys // children
    _run(
        kernels.backward_keys, sizes.rows * key_families, work,
        *arrays, _flat(parent_scores, dtype), _flat(lse, dtype), _flat(dots, dtype), False,
        *_inverse(parents, key_families), kept,
        *(_inverse(selection, sizes.keys) if is_a and topk else (nothing, nothing)), topk,
        sizes.heads, sizes.queries, children, key_families, sizes.keys, sizes.width,
        sizes.value_width, *numbers, is_a, dk.view(-1).numpy(), dv.view(-1).numpy(),
    )  # fmt: skip
    return (
        _crop(dq, sizes.dim, q.dtype),
        _crop(dk, sizes.dim, k.dtype),
        _crop(dv, sizes.value_dim, v.dtype),
        _weight_gradient(shares, weight),
        dparent_scores,
        _crop(dinherited, sizes.value_dim, dtype),
    )


def _weight_gradient(shares: Tensor, weight: Tensor | None) -> Tensor:
    return shares.new_empty(0) if weight is None else shares.sum().to(weight.dtype)


@_coarse_backward.register_fake
def _(grad, grad_scores, q, k, v, visible, weight, *rest):  # type: ignore[no-untyped-def]
    return _fake_gradients(q, k, v, weight)


@_fine_backward.register_fake
def _(grad, grad_scores, q, k, v, visible, weight, parents, parent_scores, *rest):  # type: ignore[no-untyped-def]
    dtype = accumulation_dtype(q.dtype)
    scores = parents.shape if parent_scores is not None else (0,)
    inherited = (*parents.shape[:3], v.shape[-1])
    return (
        *_fake_gradients(q, k, v, weight),
        q.new_empty(scores, dtype=dtype),
        q.new_empty(inherited, dtype=dtype),
    )


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(q.dtype)
    dweight = q.new_empty(0, dtype=dtype) if weight is None else weight.new_empty(())
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dweight)


def _save_coarse(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, visible, weight, scale, topk, is_a, _ = inputs
    _, selection, _, positions, lse = output
    ctx.save_for_backward(q, k, v, visible, weight, selection, positions, lse)
    ctx.options = (scale, topk, is_a)
    _mark(ctx, output, is_a)


def _save_fine(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    q, k, v, visible, weight, parents, parent_scores, _, scale, topk, _ = inputs
    _, selection, _, positions, lse = output
    ctx.save_for_backward(
        q, k, v, visible, weight, parents, parent_scores, selection, positions, lse
    )
    ctx.options = (scale, topk)
    _mark(ctx, output, parent_scores is not None)


def _mark(ctx: Any, output: Outputs, is_a: bool) -> None:
    _, selection, scores, positions, lse = output
    constant = (selection, positions, lse) if is_a else (selection, scores, positions, lse)
    ctx.mark_non_differentiable(*constant)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, backward: Any, grad: Tensor | None, grad_scores: Tensor | None) -> Any:
    if grad is None and grad_scores is None:
        return None
    tensors = ctx.saved_tensors
    if grad is None:
        q, _, v = tensors[:3]
        grad = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=_result_dtype(q, ctx.options[1]))
    return backward(grad, grad_scores, *tensors, *ctx.options)


def _backward_coarse(ctx: Any, grad: Any, _0: Any, grad_scores: Any, *_: Any) -> tuple[Any, ...]:
    results = _gradients(ctx, _coarse_backward, grad, grad_scores)
    if results is None:
        return (None,) * 9
    dq, dk, dv, dweight = results
    has_weight = ctx.saved_tensors[4] is not None
    return (dq, dk, dv, None, dweight if has_weight else None, None, None, None, None)


def _backward_fine(ctx: Any, grad: Any, _0: Any, grad_scores: Any, *_: Any) -> tuple[Any, ...]:
    results = _gradients(ctx, _fine_backward, grad, grad_scores)
    if results is None:
        return (None,) * 11
    dq, dk, dv, dweight, dparent_scores, dinherited = results
    has_weight, is_a = ctx.saved_tensors[4] is not None, ctx.saved_tensors[6] is not None
    return (
        dq, dk, dv, None, dweight if has_weight else None, None,
        dparent_scores if is_a else None, dinherited, None, None, None,
    )  # fmt: skip


_coarse.register_autograd(_backward_coarse, setup_context=_save_coarse)
_fine.register_autograd(_backward_fine, setup_context=_save_fine)


# ---- pyramids ------------------------------------------------------------------------------------


def pyramid(tree: Tree, x: Tensor, visible: Sequence[Tensor | None]) -> list[Tensor]:
    """As `tree.pyramid`, without a copy in between; half precisions leave it to PyTorch."""
    if x.dtype != accumulation_dtype(x.dtype) or tree.num_levels == 1:
        return tree_pyramid(tree, x, visible)
    shown = [level for level in visible if level is not None]
    levels = _pyramid(x, shown, list(tree.grid), tree.num_levels)
    return list(reversed(levels))


@lru_cache(maxsize=64)
def _order(tree: Tree) -> Array:
    """The place on the grid, row by row, of every finest cell in tree order; -1 for padding."""
    places = torch.arange(1, 1 + prod(tree.grid), dtype=torch.int32).reshape(tree.grid)
    return _flat(tree.to_tree(places, tree.finest, axis=0) - 1, torch.int32)


def _reorder(
    kernel: Callable[..., None], tree: Tree, x: Tensor, out: Tensor, batch: int, heads: int
) -> None:
    """Copies the rows of the finest level from grid order to tree order, or back."""
    cells = tree.num_cells(tree.finest)
    _run(
        kernel, batch * cells, x.numel() * 4,
        _flat(x, x.dtype), _order(tree), cells, prod(tree.grid), heads, x.shape[-1],
        out.view(-1).numpy(),
    )  # fmt: skip


@torch.library.custom_op("quadtree_attention::cpu_pyramid", mutates_args=())
def _pyramid(x: Tensor, shown: list[Tensor], grid: list[int], num_levels: int) -> list[Tensor]:
    """Levels (B, N, T_l, D), fine -> coarse, of a map (B, *grid, N, D)."""
    kernels, tree = _kernels(), Tree(tuple(grid), num_levels)
    batch, heads, width = x.shape[0], *x.shape[-2:]
    levels = _fake_pyramid(x, tree)
    _reorder(kernels.grid_to_tree, tree, x, levels[0], batch, heads)
    for i, (fine, coarse) in enumerate(pairwise(levels)):
        visible = shown[tree.finest - i] if shown else None
        cells = coarse.shape[2]
        _run(
            kernels.pool, batch * heads * cells, fine.numel() * 2,
            _flat(fine, x.dtype), _flat(visible, torch.bool), visible is not None, cells, heads,
            tree.num_children, width, coarse.view(-1).numpy(),
        )  # fmt: skip
    return levels


@torch.library.custom_op("quadtree_attention::cpu_pyramid_backward", mutates_args=())
def _pyramid_backward(
    grads: list[Tensor], shown: list[Tensor], grid: list[int], num_levels: int
) -> Tensor:
    """Gradient of the map from those of all levels, fine -> coarse."""
    kernels, tree = _kernels(), Tree(tuple(grid), num_levels)
    batch, heads, _, width = grads[0].shape
    dtype, children = grads[0].dtype, tree.num_children
    above = grads[-1]
    for i in reversed(range(1, len(grads) - 1)):
        visible = shown[tree.finest - i] if shown else None
        below = grads[i].clone(memory_format=torch.contiguous_format)
        _run(
            kernels.unpool, batch * heads * above.shape[2], below.numel() * 2,
            _flat(above, dtype), _flat(visible, torch.bool), visible is not None, above.shape[2],
            heads, children, width, below.view(-1).numpy(),
        )  # fmt: skip
        above = below
    visible = shown[tree.finest] if shown else None
    result = torch.empty(batch, *grid, heads, width, dtype=dtype)
    _run(
        kernels.unpool_to_grid, batch * above.shape[2], result.numel() * 4,
        _flat(above, dtype), _flat(grads[0], dtype), _flat(visible, torch.bool),
        visible is not None, _order(tree), above.shape[2], prod(grid), heads, children, width,
        result.view(-1).numpy(),
    )  # fmt: skip
    return result


def _fake_pyramid(x: Tensor, tree: Tree) -> list[Tensor]:
    batch, heads, width = x.shape[0], *x.shape[-2:]
    return [
        torch.empty(batch, heads, tree.num_cells(i), width, dtype=x.dtype, device=x.device)
        for i in reversed(range(tree.num_levels))
    ]


@_pyramid.register_fake
def _(x, shown, grid, num_levels):  # type: ignore[no-untyped-def]
    return _fake_pyramid(x, Tree(tuple(grid), num_levels))


@_pyramid_backward.register_fake
def _(grads, shown, grid, num_levels):  # type: ignore[no-untyped-def]
    batch, heads, _, width = grads[0].shape
    return grads[0].new_empty(batch, *grid, heads, width)


def _save_pyramid(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, shown, grid, num_levels = inputs
    ctx.save_for_backward(*shown)
    ctx.options = (grid, num_levels)


def _backward_pyramid(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    shown = list(ctx.saved_tensors)
    return _pyramid_backward(grads, shown, *ctx.options), [None] * len(shown), None, None


_pyramid.register_autograd(_backward_pyramid, setup_context=_save_pyramid)


def to_grid(tree: Tree, x: Tensor) -> Tensor:
    """As `tree.to_grid`; half precisions leave it to PyTorch."""
    if x.dtype != accumulation_dtype(x.dtype) or tree.num_levels == 1:
        return tree_to_grid(tree, x)
    return _to_grid(x, list(tree.grid), tree.num_levels)


@torch.library.custom_op("quadtree_attention::cpu_to_grid", mutates_args=())
def _to_grid(x: Tensor, grid: list[int], num_levels: int) -> Tensor:
    """The finest level (B, N, T, D) as a map (B, *grid, N, D)."""
    batch, heads, _, width = x.shape
    out = torch.empty(batch, *grid, heads, width, dtype=x.dtype)
    _reorder(_kernels().tree_to_grid, Tree(tuple(grid), num_levels), x, out, batch, heads)
    return out


@torch.library.custom_op("quadtree_attention::cpu_to_grid_backward", mutates_args=())
def _to_grid_backward(grad: Tensor, grid: list[int], num_levels: int) -> Tensor:
    tree = Tree(tuple(grid), num_levels)
    batch, heads, width = grad.shape[0], *grad.shape[-2:]
    out = torch.empty(batch, heads, tree.num_cells(tree.finest), width, dtype=grad.dtype)
    _reorder(_kernels().grid_to_tree, tree, grad, out, batch, heads)
    return out


@_to_grid.register_fake
def _(x, grid, num_levels):  # type: ignore[no-untyped-def]
    batch, heads, _, width = x.shape
    return x.new_empty(batch, *grid, heads, width)


@_to_grid_backward.register_fake
def _(grad, grid, num_levels):  # type: ignore[no-untyped-def]
    cells = Tree(tuple(grid), num_levels).num_cells(num_levels - 1)
    return grad.new_empty(grad.shape[0], grad.shape[-2], cells, grad.shape[-1])


def _save_to_grid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[1:]


def _backward_to_grid(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _to_grid_backward(grad, *ctx.options), None, None


_to_grid.register_autograd(_backward_to_grid, setup_context=_save_to_grid)


# ---- FLOPs ---------------------------------------------------------------------------------------


def _flops(queries: Any, values: Any, candidates: int) -> int:
    batch, heads, cells, dim = queries
    return 2 * batch * heads * cells * candidates * (dim + values[3])


def _coarse_flops(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> int:
    return _flops(q, v, k[2])


def _fine_flops(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> int:
    *_, families, kept = args[2]
    return _flops(q, v, kept * (q[2] // families))


def _coarse_backward_flops(grad: Any, grad_scores: Any, *args: Any, **options: Any) -> int:
    return _coarse_flops(*args) * 5 // 2


def _fine_backward_flops(grad: Any, grad_scores: Any, *args: Any, **options: Any) -> int:
    return _fine_flops(*args) * 5 // 2


_FORMULAS = {
    "cpu_coarse": _coarse_flops,
    "cpu_fine": _fine_flops,
    "cpu_coarse_backward": _coarse_backward_flops,
    "cpu_fine_backward": _fine_backward_flops,
}


def _register_flop_formulas() -> None:
    """Tells PyTorch's FLOP counter about the operators, once it has been imported.

    Importing it here would import Triton. A counter that is already running gets them as well.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or torch.ops.quadtree_attention.cpu_coarse in module.flop_registry:
        return
    operators = {getattr(torch.ops.quadtree_attention, n): f for n, f in _FORMULAS.items()}
    for operator, formula in operators.items():
        module.register_flop_formula(operator)(formula)
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, module.FlopCounterMode):
            counter.flop_registry.update({o: module.flop_registry[o] for o in operators})


# ---- the record ----------------------------------------------------------------------------------


NUMBA_INSTALLED = installed("numba")


def _reasons(problem: Problem) -> list[str]:
    if torch.compiler.is_exporting():
        return ["exported programs use the reference"]
    reasons = []
    if problem.device.type not in ("cpu", "meta"):
        reasons.append(f"it runs on the CPU, and the tensors are on {problem.device}")
    if problem.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        reasons.append(f"the dtype must be one of {names}, got {problem.dtype}")
    finest = problem.num_levels - 1
    kept = max(problem.topk, default=1)
    cells = max(
        problem.key_tree.num_cells(finest), problem.query_tree.num_cells(finest) * kept
    )  # entries of a selection
    if cells > LARGEST_INDEX:
        reasons.append(f"cells times topk must stay below 2**31, got {cells}")
    if not NUMBA_INSTALLED:
        reasons.append("numba is not installed; pip install numba")
    if not torch.compiler.is_compiling():
        _register_flop_formulas()
    return reasons


CPU = Backend("cpu", _reasons, attend_coarse, attend_fine, pyramid, to_grid)
