# SPDX-License-Identifier: Apache-2.0
"""The triton backend: torch operators around the kernels, their gradients, fakes and FLOPs.

Triton itself is imported when the first operator runs, not before.
"""

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from quadtree_attention.ops.backends.base import Backend, Level, installed
from quadtree_attention.ops.problem import Problem, Variant
from quadtree_attention.ops.tree import Tree

LARGEST_DIM, LARGEST_TOPK = 256, 128
TRITON_INSTALLED = installed("triton")


@torch.library.custom_op("quadtree_attention::triton_coarse", mutates_args=())
def _coarse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    scale: float,
    topk: int | None,
    variant: str,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton.launch import coarse_forward

    return coarse_forward(
        q, k, v, visible, weight, scale, topk, cast(Variant, variant), with_scores
    )


@_coarse.register_fake
def _(q, k, v, visible, weight, scale, topk, variant, with_scores):  # type: ignore[no-untyped-def]
    shape = q.shape[:3]
    kept = topk or 0
    return (
        q.new_empty(*shape, v.shape[-1], dtype=torch.float32 if kept else q.dtype),
        q.new_empty(*shape, kept, dtype=torch.int32),
        q.new_empty(*shape, kept if with_scores else 0, dtype=torch.float32),
        q.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op("quadtree_attention::triton_coarse_backward", mutates_args=())
def _coarse_backward(
    dtotal: Tensor,
    dscores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    selection: Tensor,
    lse: Tensor,
    scale: float,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton.launch import coarse_backward

    return coarse_backward(
        dtotal, dscores, q, k, v, visible, weight, selection, lse, scale, cast(Variant, variant)
    )


@_coarse_backward.register_fake
def _(dtotal, dscores, q, k, v, visible, weight, selection, lse, scale, variant):  # type: ignore[no-untyped-def]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty((), dtype=torch.float32),
    )


def _coarse_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, visible, weight, ctx.scale, _, ctx.variant, _ = inputs
    _, selection, scores, lse = output
    ctx.save_for_backward(q, k, v, visible, weight, selection, lse)
    ctx.mark_non_differentiable(*_constants(selection, scores, lse, variant=ctx.variant))
    ctx.set_materialize_grads(False)


def _coarse_grad(ctx: Any, dtotal: Tensor | None, _s: Any, dscores: Tensor | None, _l: Any) -> Any:
    q, k, v, visible, weight, selection, lse = ctx.saved_tensors
    dtotal = _or_zeros(dtotal, q, v)
    if ctx.variant == "A" and selection.shape[-1] > 0:
        dscores = torch.zeros_like(selection, dtype=torch.float32) if dscores is None else dscores
        dscores = dscores.contiguous()
    dq, dk, dv, dweight = _coarse_backward(
        dtotal, dscores, q, k, v, visible, weight, selection, lse, ctx.scale, ctx.variant
    )
    return dq, dk, dv, None, _weight_grad(dweight, weight), None, None, None, None


_coarse.register_autograd(_coarse_grad, setup_context=_coarse_setup)


@torch.library.custom_op("quadtree_attention::triton_fine", mutates_args=())
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
    topk: int | None,
    variant: str,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton.launch import fine_forward

    return fine_forward(
        q, k, v, visible, weight, parents, parent_scores, inherited,
        scale, topk, cast(Variant, variant), with_scores,
    )  # fmt: skip


@_fine.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, visible, weight, parents, parent_scores, inherited, scale, topk, variant, with_scores
):
    shape = q.shape[:3]
    kept = topk or 0
    return (
        q.new_empty(*shape, v.shape[-1], dtype=torch.float32 if kept else q.dtype),
        q.new_empty(*shape, kept, dtype=torch.int32),
        q.new_empty(*shape, kept if with_scores else 0, dtype=torch.float32),
    )


@torch.library.custom_op("quadtree_attention::triton_fine_backward", mutates_args=())
def _fine_backward(
    dtotal: Tensor,
    dscores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor,
    parent_scores: Tensor | None,
    selection: Tensor,
    scale: float,
    variant: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from quadtree_attention.ops.backends.triton.launch import fine_backward

    return fine_backward(
        dtotal, dscores, q, k, v, visible, weight, parents, parent_scores, selection,
        scale, cast(Variant, variant), deterministic,
    )  # fmt: skip


@_fine_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dtotal, dscores, q, k, v, visible, weight, parents, parent_scores, selection,
    scale, variant, deterministic,
):  # fmt: skip
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty((), dtype=torch.float32),
        q.new_empty(parents.shape if variant == "A" else (0,), dtype=torch.float32),
        q.new_empty(*parents.shape[:3], v.shape[-1], dtype=torch.float32),
    )


def _fine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, visible, weight, parents, parent_scores, _, ctx.scale, _, ctx.variant, _ = inputs
    _, selection, scores = output
    ctx.save_for_backward(q, k, v, visible, weight, parents, parent_scores, selection)
    ctx.mark_non_differentiable(*_constants(selection, scores, variant=ctx.variant))
    ctx.set_materialize_grads(False)


def _fine_grad(ctx: Any, dtotal: Tensor | None, _s: Any, dscores: Tensor | None) -> Any:
    q, k, v, visible, weight, parents, parent_scores, selection = ctx.saved_tensors
    dtotal = _or_zeros(dtotal, q, v)
    if ctx.variant == "A" and selection.shape[-1] > 0:
        dscores = torch.zeros_like(selection, dtype=torch.float32) if dscores is None else dscores
        dscores = dscores.contiguous()
    dq, dk, dv, dweight, dparent_scores, dinherited = _fine_backward(
        dtotal, dscores, q, k, v, visible, weight, parents, parent_scores, selection,
        ctx.scale, ctx.variant, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return (
        dq, dk, dv, None, _weight_grad(dweight, weight), None,
        dparent_scores if ctx.variant == "A" else None, dinherited, None, None, None, None,
    )  # fmt: skip


_fine.register_autograd(_fine_grad, setup_context=_fine_setup)


@torch.library.custom_op("quadtree_attention::triton_pyramid", mutates_args=())
def _pyramid(
    x: Tensor, visible: Tensor | None, grid: list[int], depth: int, num_levels: int
) -> list[Tensor]:
    """The `num_levels` finest of `depth` levels, coarse -> fine."""
    from quadtree_attention.ops.backends.triton.launch import pyramid_forward

    return pyramid_forward(Tree(tuple(grid), depth), x, visible, num_levels)


@_pyramid.register_fake
def _(x, visible, grid, depth, num_levels):  # type: ignore[no-untyped-def]
    tree = Tree(tuple(grid), depth)
    lead = (x.shape[0], x.shape[-2])
    return [
        x.new_empty(*lead, tree.num_cells(i), x.shape[-1]) for i in range(depth - num_levels, depth)
    ]


@torch.library.custom_op("quadtree_attention::triton_pyramid_backward", mutates_args=())
def _pyramid_backward(
    grads: list[Tensor], visible: Tensor | None, grid: list[int], depth: int
) -> Tensor:
    """Sum of all levels on the grid; with one level, tree order to grid."""
    from quadtree_attention.ops.backends.triton.launch import pyramid_backward

    return pyramid_backward(Tree(tuple(grid), depth), grads, visible)


@_pyramid_backward.register_fake
def _(grads, visible, grid, depth):  # type: ignore[no-untyped-def]
    finest = grads[-1]
    return finest.new_empty(finest.shape[0], *grid, finest.shape[1], finest.shape[3])


def _pyramid_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, visible, ctx.grid, ctx.depth, _ = inputs
    ctx.save_for_backward(visible)


def _pyramid_grad(ctx: Any, grads: list[Tensor]) -> Any:
    (visible,) = ctx.saved_tensors
    return _pyramid_backward(grads, visible, ctx.grid, ctx.depth), None, None, None, None


_pyramid.register_autograd(_pyramid_grad, setup_context=_pyramid_setup)


@torch.library.custom_op("quadtree_attention::triton_to_grid", mutates_args=())
def _to_grid(x: Tensor, grid: list[int], depth: int) -> Tensor:
    from quadtree_attention.ops.backends.triton.launch import pyramid_backward

    return pyramid_backward(Tree(tuple(grid), depth), [x], None)


@_to_grid.register_fake
def _(x, grid, depth):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], *grid, x.shape[1], x.shape[3])


def _to_grid_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.grid, ctx.depth = inputs


def _to_grid_grad(ctx: Any, grad: Tensor) -> Any:
    return _pyramid(grad, None, ctx.grid, ctx.depth, 1)[0], None, None


_to_grid.register_autograd(_to_grid_grad, setup_context=_to_grid_setup)


def build_pyramid(tree: Tree, x: Tensor, visible: Sequence[Tensor | None]) -> list[Tensor]:
    return _pyramid(x, visible[-1], list(tree.grid), tree.num_levels, tree.num_levels)


def to_grid(tree: Tree, x: Tensor) -> Tensor:
    return _to_grid(x, list(tree.grid), tree.num_levels)


def _constants(*outputs: Tensor, variant: str) -> list[Tensor]:
    """Outputs without gradient: the indices and statistics, and the scores of variant B."""
    selection, scores, *statistics = outputs
    return [selection, *([] if variant == "A" else [scores]), *statistics]


def _or_zeros(dtotal: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """Only the scores of a level were used: its total has gradient zero."""
    return q.new_zeros(*q.shape[:3], v.shape[-1]) if dtotal is None else dtotal


def _weight_grad(dweight: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else dweight.to(weight.dtype)


def _level(
    total: Tensor, selection: Tensor, scores: Tensor, topk: int | None, scored: bool
) -> Level:
    if topk is None:
        return Level(total, None, None)
    return Level(total, selection, scores if scored else None)


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
    total, selection, scores, _ = _coarse(
        q, k, v, visible, weight, scale, topk, variant, with_scores
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
    total, selection, scores = _fine(
        q, k, v, visible, weight, parents, parent_scores, inherited,
        scale, topk, variant, with_scores,
    )  # fmt: skip
    return _level(total, selection, scores, topk, with_scores)


def _reasons(problem: Problem) -> list[str]:
    reasons = []
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not TRITON_INSTALLED:
        reasons.append("triton is not installed; it comes with the CUDA builds of torch for Linux")
    if problem.device.type != "cuda" and not interpreted:
        reasons.append(f"it needs a CUDA device, the tensors are on {problem.device}")
    if problem.dtype == torch.float64:
        reasons.append("it computes in float32 at most, the tensors are float64")
    if max(problem.head_dim, problem.value_dim) > LARGEST_DIM:
        reasons.append(
            f"head dims go up to {LARGEST_DIM}, got {problem.head_dim} and {problem.value_dim}"
        )
    if max(problem.topk, default=0) > LARGEST_TOPK:
        reasons.append(f"topk goes up to {LARGEST_TOPK}, got {problem.topk}")
    if torch.compiler.is_exporting():
        reasons.append("exported programs use the reference")
    return reasons


TRITON = Backend("triton", _reasons, attend_coarse, attend_fine, build_pyramid, to_grid)
