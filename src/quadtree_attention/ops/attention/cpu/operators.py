# SPDX-License-Identifier: Apache-2.0
"""Attention of one level as a PyTorch operator, with its fake implementation and gradients.

No tensor of size (queries x candidates) is stored. Backward recomputes scores from the inputs, the
selection and one log-sum-exp per query.
"""

import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.ops.attention.base import Level
from quadtree_attention.ops.attention.cpu.arrays import Array, crop, flat, flat_rows, number
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES, Shape
from quadtree_attention.ops.attention.cpu.threads import run
from quadtree_attention.ops.attention.problem import Variant
from quadtree_attention.ops.attention.tree import accumulation_dtype
from quadtree_attention.ops.autograd import apply, backward_pass, operator

PARTS = min(2 * (os.cpu_count() or 1), 16)  # parts of the backward pass, over all heads
PART_BYTES = 128 * 2**20  # maximum size of all partial sums of dk and dv
FEWEST_FAMILIES = 32  # minimum families of a part

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    outputs = attend(
        q, k, v, visible, weight, None, None, None, scale, topk or 0, variant == "A", with_scores
    )
    return _level(outputs, topk, with_scores)


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
    above = (parents, parent_scores, inherited)
    outputs = attend(
        q, k, v, visible, weight, *above, scale, topk or 0, variant == "A", with_scores
    )
    return _level(outputs, topk, with_scores)


def _level(outputs: Outputs, topk: int | None, with_scores: bool) -> Level:
    total, selection, scores, _, _ = outputs
    if topk is None:
        return Level(total, None, None)
    return Level(total, selection, scores if with_scores else None)


class _Inputs(NamedTuple):
    """Inputs of a level in the format of the kernels."""

    shape: Shape
    dtype: torch.dtype  # dtype of computation
    rows: int  # batch entries times heads
    q: Array
    k: Array
    v: Array
    visible: Array

    @property
    def families(self) -> int:
        """Number of query families of all heads."""
        return self.rows * self.shape.families

    @property
    def key_families(self) -> int:
        return self.rows * self.shape.key_families

    @property
    def work(self) -> int:
        """Number of multiplications of one forward pass."""
        shape = self.shape
        candidates = shape.kept * shape.children
        return self.families * shape.children * candidates * (shape.width + shape.value_width)

    def queries_like(self, x: Tensor) -> Array:
        """Return (B, N, T, Dv) as a flat array with rows as wide as values."""
        shape = self.shape
        return flat_rows(x, self.dtype, shape.families * shape.children, shape.value_width)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    parents: Tensor | None,
    topk: int,
    is_a: bool,
) -> _Inputs:
    batch, heads, queries, dim = q.shape
    keys, value_dim = v.shape[2:]
    if parents is None:  # level 0: blocks of cells, all of which are candidates
        children, families, key_families = BLOCK, -(-queries // BLOCK), -(-keys // BLOCK)
        kept = key_families
    else:
        families, kept = parents.shape[2:]
        children = queries // families
        key_families = keys // children
    shape = Shape(
        heads, families, children, key_families, kept, topk, dim + -dim % LANES,
        value_dim + -value_dim % LANES, int(is_a),
    )  # fmt: skip
    dtype = accumulation_dtype(q.dtype)
    cells, key_cells = families * children, key_families * children
    if visible is not None:  # hidden values may be NaN, and 0 * NaN is NaN
        k, v = (torch.where(visible[:, None, :, None], x, 0) for x in (k, v))
    if key_cells != keys:
        seen = k.new_ones(batch, keys, dtype=torch.bool) if visible is None else visible
        visible = F.pad(seen, (0, key_cells - keys))
    return _Inputs(
        shape, dtype, batch * heads, flat_rows(q, dtype, cells, shape.width),
        flat_rows(k, dtype, key_cells, shape.width),
        flat_rows(v, dtype, key_cells, shape.value_width), flat(visible, torch.bool),
    )  # fmt: skip


def _outputs(
    q: Tensor, cells: int, topk: int, width: int, is_a: bool, with_scores: bool, with_lse: bool
) -> Outputs:
    """Allocate total, selection, scores, positions of kept cells among candidates, log-sum-exp.

    Outputs that are not needed are empty.
    """
    lead = (*q.shape[:2], cells)
    dtype = accumulation_dtype(q.dtype)
    nothing = (0,)
    kept = (*lead, topk) if topk else nothing
    return (
        q.new_empty(*lead, width, dtype=dtype),
        q.new_empty(kept, dtype=torch.int32),
        q.new_empty(kept if with_scores else nothing, dtype=dtype),
        q.new_empty(kept if is_a else nothing, dtype=torch.int32),
        q.new_empty(lead if with_lse else nothing, dtype=dtype),
    )


def _result_dtype(q: Tensor, topk: int) -> torch.dtype:
    return accumulation_dtype(q.dtype) if topk else q.dtype


def _fake_attend(  # type: ignore[no-untyped-def]
    q, k, v, visible, weight, parents, parent_scores, inherited, scale, topk, is_a, with_scores
):
    with_lse = parent_scores is None
    outputs = _outputs(q, q.shape[2], topk, v.shape[3], is_a, with_scores, with_lse)
    return (outputs[0].to(_result_dtype(q, topk)), *outputs[1:])


@operator("cpu_attend", _fake_attend)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor | None,
    parent_scores: Tensor | None,
    inherited: Tensor | None,
    scale: float,
    topk: int,
    is_a: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one level; level 0 without `parents`. Return the tensors of `_outputs`."""
    from quadtree_attention.ops.attention.cpu.kernels.forward import forward

    level = _inputs(q, k, v, visible, parents, topk, is_a)
    cells = level.shape.families * level.shape.children
    with_lse = parent_scores is None
    outputs = _outputs(q, cells, topk, level.shape.value_width, is_a, with_scores, with_lse)
    run(
        forward, level.families, level.work, level.shape, number(scale, level.dtype),
        number(weight, level.dtype), level.q, level.k, level.v, level.visible,
        flat(parents, torch.int32), flat(parent_scores, level.dtype),
        flat_rows(inherited, level.dtype, level.shape.families, level.shape.value_width),
        *(x.view(-1).numpy() for x in outputs),
    )  # fmt: skip
    total, *others = outputs
    if cells != q.shape[2]:
        others = [x[:, :, : q.shape[2]].contiguous() if x.ndim > 1 else x for x in others]
    total = crop(total, q.shape[2], v.shape[3], _result_dtype(q, topk))
    return (total, *others)  # type: ignore[return-value]


# ---- backward ------------------------------------------------------------------------------------


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, grad_scores, q, k, v, visible, weight, parents, parent_scores, *_
):
    dtype = accumulation_dtype(q.dtype)
    inherited = (0,) if parents is None else (*parents.shape[:3], v.shape[3])
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        q.new_empty(0, dtype=dtype) if weight is None else weight.new_empty(()),
        q.new_empty((0,) if parent_scores is None else parent_scores.shape, dtype=dtype),
        q.new_empty(inherited, dtype=dtype),
    )


@operator("cpu_attend_backward", _fake_backward)
def _attend_backward(
    grad: Tensor,
    grad_scores: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    weight: Tensor | None,
    parents: Tensor | None,
    parent_scores: Tensor | None,
    selection: Tensor,
    positions: Tensor,
    lse: Tensor,
    scale: float,
    topk: int,
    is_a: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v, weight, parent_scores and inherited; empty if there is none."""
    from quadtree_attention.ops.attention.cpu.kernels.backward import backward

    level = _inputs(q, k, v, visible, parents, topk, is_a)
    shape, dtype = level.shape, level.dtype
    cells = shape.families * shape.children
    lead = q.shape[:2]
    parts = _parts(level)
    dq = q.new_empty(*lead, cells, shape.width, dtype=dtype)
    dk = q.new_empty(*lead, parts, shape.key_families * shape.children, shape.width, dtype=dtype)
    dv = q.new_empty(*dk.shape[:4], shape.value_width, dtype=dtype)
    shares = q.new_empty(*lead, cells, dtype=dtype)
    dscores = q.new_empty((0,) if parent_scores is None else parent_scores.shape, dtype=dtype)
    dinherited = q.new_empty((0,), dtype=dtype)
    if parents is not None:
        dinherited = q.new_empty(*parents.shape[:3], shape.value_width, dtype=dtype)
    run(
        backward, level.rows * parts, 3 * level.work, shape, parts, number(scale, dtype),
        number(weight, dtype), level.queries_like(grad),
        flat(_pad_cells(grad_scores, cells, 0), dtype), level.q, level.k, level.v, level.visible,
        flat(parents, torch.int32), flat(parent_scores, dtype),
        flat(_pad_cells(positions, cells, -1), torch.int32), flat(_pad_cells(lse, cells, 0), dtype),
        *(x.view(-1).numpy() for x in (dq, dk, dv, shares, dscores, dinherited)),
    )  # fmt: skip
    return (
        crop(dq, q.shape[2], q.shape[3], q.dtype),
        _sum_of_parts(dk, k, visible),
        _sum_of_parts(dv, v, visible),
        shares.new_empty(0) if weight is None else shares.sum().to(weight.dtype),
        dscores,
        dinherited if parents is None else crop(dinherited, shape.families, v.shape[3], dtype),
    )


def _parts(level: _Inputs) -> int:
    """Return the number of parts of a head's queries, independent of the number of threads."""
    shape = level.shape
    size = level.key_families * shape.children * (shape.width + shape.value_width)
    room = PART_BYTES // max(1, size * level.dtype.itemsize)
    wanted = -(-PARTS // max(1, level.rows))
    return max(1, min(wanted, room, shape.families // FEWEST_FAMILIES))


def _sum_of_parts(x: Tensor, like: Tensor, visible: Tensor | None) -> Tensor:
    """Sum over parts: (B, N, P, S, D) -> (B, N, S, D); hidden rows are 0 for any gradient."""
    x = x.sum(dim=2) if x.shape[2] > 1 else x[:, :, 0]
    x = crop(x, like.shape[2], like.shape[3], like.dtype)
    return x if visible is None else torch.where(visible[:, None, :, None], x, 0)


def _pad_cells(x: Tensor | None, cells: int, value: int) -> Tensor | None:
    """Pad the cells of (B, N, T) or (B, N, T, K); empty tensors stay empty."""
    if x is None or x.ndim == 1 or x.shape[2] == cells:
        return x
    return F.pad(x, (*(0, 0) * (x.ndim - 3), 0, cells - x.shape[2]), value=value)


# ---- both ----------------------------------------------------------------------------------------

WHAT = "the cpu backend of quadtree attention"


def attend(*arguments: Any) -> Outputs:
    """Call the operator `cpu_attend` with its gradient."""
    return apply(WHAT, _Attend, *arguments)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Outputs:
        *tensors, _, scale, topk, is_a, _ = arguments
        outputs = _attend(*arguments)
        _, selection, scores, positions, lse = outputs
        ctx.save_for_backward(*tensors, selection, positions, lse)
        ctx.options = (scale, topk, is_a)
        constant = (selection, positions, lse) if is_a else (selection, scores, positions, lse)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Any, _0: Any, grad_scores: Any, *_: Any) -> tuple[Any, ...]:
        if grad is None and grad_scores is None:
            return (None,) * 12
        saved = ctx.saved_tensors  # read once: checkpoint returns recomputed tensors only once
        q, _1, v, _2, weight, parents, scores = saved[:7]
        if grad is None:
            dtype = _result_dtype(q, ctx.options[1])
            grad = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        dq, dk, dv, dweight, dscores, dinherited = backward_pass(
            WHAT, _attend_backward, grad, grad_scores, *saved, *ctx.options
        )
        return (
            dq, dk, dv, None, None if weight is None else dweight, None,
            None if scores is None else dscores, None if parents is None else dinherited,
            None, None, None, None,
        )  # fmt: skip
