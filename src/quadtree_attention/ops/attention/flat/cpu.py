# SPDX-License-Identifier: Apache-2.0
"""One level of variant C as a PyTorch operator of the cpu backend, with its gradients."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quadtree_attention.ops.attention.cpu.arrays import Array, crop, flat, flat_rows, number
from quadtree_attention.ops.attention.cpu.operators import WHAT, _pad_cells
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES
from quadtree_attention.ops.attention.cpu.threads import run
from quadtree_attention.ops.attention.flat.level import FlatLevel, LevelInputs
from quadtree_attention.ops.attention.tree import accumulation_dtype
from quadtree_attention.ops.autograd import apply, backward_pass, operator


def attend_level(level: LevelInputs) -> FlatLevel:
    """Compute `reference.attend_level`."""
    bias, constant = _split(level.bias)
    next_bias, next_constant = _split(0.0 if level.next_bias is None else level.next_bias)
    inherited, inherited_lse = level.inherited or (None, None)
    out, lse, selection, _, scores = apply(
        WHAT, _Level, level.q, level.k, level.v, bias, level.parents, inherited, inherited_lse,
        level.rows, level.next_k, next_bias, constant, next_constant, level.scale, level.topk or 0,
        level.with_message, level.with_scores,
    )  # fmt: skip
    return FlatLevel(
        out if level.with_message else None,
        lse if level.with_message else None,
        selection if level.topk else None,
        scores if level.topk and level.with_scores else None,
    )


def _split(bias: float | Tensor) -> tuple[Tensor | None, float]:
    return (bias, 0.0) if isinstance(bias, Tensor) else (None, bias)


class FlatShape(NamedTuple):
    """Sizes of a level, as arguments of kernels.

    Attributes:
        heads: Heads of one batch entry.
        families: Families of query cells of one head, which share their candidates.
        cells: Query cells of a family.
        group: Rows of a query cell.
        shared: Rows that inherit one state.
        children: Key cells of a family, an even number.
        key_families: Families of key cells of one head.
        kept: Families of keys that are candidates of a family of queries.
        topk: Cells to keep; 0 at the finest level.
        next_children: Children of a key cell; 1 without lookahead.
        width: Numbers in a row of queries or keys, a multiple of `LANES`.
        value_width: Numbers in a row of values, a multiple of `LANES`.
    """

    heads: int
    families: int
    cells: int
    group: int
    shared: int
    children: int
    key_families: int
    kept: int
    topk: int
    next_children: int
    width: int
    value_width: int


class _Inputs(NamedTuple):
    shape: FlatShape
    dtype: torch.dtype
    lead: int  # batch entries times heads
    k: Array
    v: Array
    bias: Array
    constant: float  # bias of all cells; 0 if `bias` has one per cell

    @property
    def cells(self) -> int:
        """Number of query cells of one head, including the padding of the last family."""
        return self.shape.families * self.shape.cells

    @property
    def rows(self) -> int:
        return self.cells * self.shape.group

    @property
    def key_cells(self) -> int:
        return self.shape.key_families * self.shape.children

    @property
    def work(self) -> int:
        """Number of multiplications of one forward pass."""
        shape = self.shape
        pairs = self.lead * self.rows * shape.kept * shape.children
        return pairs * (shape.width + shape.value_width)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    parents: Tensor | None,
    inherited_lse: Tensor | None,
    rows: Tensor | None,
    next_k: Tensor | None,
    constant: float,
    topk: int,
) -> _Inputs:
    batch, heads, queries, dim = q.shape
    keys, value_dim = v.shape[2:]
    if parents is None:  # level 0: blocks of cells, all of which are candidates
        cells = children = BLOCK
        families, kept = -(-queries // BLOCK), -(-keys // BLOCK)
        key_families = kept
    else:
        families, kept = parents.shape[2:]
        cells = children = queries // families
        key_families = keys // children
    group = 1 if rows is None else rows.shape[2] // queries
    shared = queries * group // inherited_lse.shape[2] if inherited_lse is not None else 1
    shape = FlatShape(
        heads, families, cells, group, shared, children, key_families, kept, topk,
        1 if next_k is None else next_k.shape[2] // keys, dim + -dim % LANES,
        value_dim + -value_dim % LANES,
    )  # fmt: skip
    dtype = accumulation_dtype(q.dtype)
    key_cells = key_families * children
    if key_cells != keys:  # level 0: padding cells of the last family are hidden
        if bias is None:
            bias, constant = torch.full((batch, keys), constant, dtype=dtype), 0.0
        bias = F.pad(bias, (0, key_cells - keys), value=-torch.inf)
    return _Inputs(
        shape, dtype, batch * heads, flat_rows(k, dtype, key_cells, shape.width),
        flat_rows(v, dtype, key_cells, shape.value_width), flat(bias, dtype),
        constant,
    )  # fmt: skip


def _outputs(
    q: Tensor,
    cells: int,
    rows: int,
    width: int,
    topk: int,
    with_message: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate result, log-sum-exp, selection, positions, scores; empty if not requested."""
    lead = q.shape[:2]
    dtype = accumulation_dtype(q.dtype)
    kept = (*lead, cells, topk) if topk else (0,)
    return (
        q.new_empty((*lead, rows, width) if with_message else (0,), dtype=dtype),
        q.new_empty((*lead, rows) if with_message else (0,), dtype=dtype),
        q.new_empty(kept, dtype=torch.int32),
        q.new_empty(kept, dtype=torch.int32),
        q.new_empty(kept if with_scores else (0,), dtype=dtype),
    )


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, bias, parents, inherited, inherited_lse, rows, next_k, next_bias, constant,
    next_constant, scale, topk, with_message, with_scores,
):  # fmt: skip
    count = q.shape[2] if rows is None else rows.shape[2]
    return _outputs(q, q.shape[2], count, v.shape[3], topk, with_message, with_scores)


@operator("cpu_flat", _fake)
def _level(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    parents: Tensor | None,
    inherited: Tensor | None,
    inherited_lse: Tensor | None,
    rows: Tensor | None,
    next_k: Tensor | None,
    next_bias: Tensor | None,
    constant: float,
    next_constant: float,
    scale: float,
    topk: int,
    with_message: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one level, see `LevelInputs`. Return the tensors of `_outputs`."""
    from quadtree_attention.ops.attention.flat.cpu_kernels import flat_forward

    level = _inputs(q, k, v, bias, parents, inherited_lse, rows, next_k, constant, topk)
    shape, dtype = level.shape, level.dtype
    outputs = _outputs(
        q, level.cells, level.rows, shape.value_width, topk, with_message, with_scores
    )
    above = 0 if inherited_lse is None else level.rows // shape.shared
    next_cells = level.key_cells * shape.next_children
    if next_bias is not None and next_bias.shape[1] != next_cells:
        next_bias = F.pad(next_bias, (0, next_cells - next_bias.shape[1]), value=-torch.inf)
    run(
        flat_forward, level.lead * shape.families, level.work, shape, number(scale, dtype),
        number(level.constant, dtype), number(next_constant, dtype),
        flat_rows(q, dtype, level.cells, shape.width),
        flat_rows(rows, dtype, level.rows, shape.width), level.k, level.v, level.bias,
        flat(parents, torch.int32), flat_rows(next_k, dtype, next_cells, shape.width),
        flat(next_bias, dtype), flat_rows(inherited, dtype, above, shape.value_width),
        flat(_pad_cells(inherited_lse, above, 0), dtype), *(x.view(-1).numpy() for x in outputs),
    )  # fmt: skip
    out, lse, *kept = outputs
    if with_message:
        count = q.shape[2] * shape.group
        out, lse = crop(out, count, v.shape[3], dtype), lse[:, :, :count].contiguous()
    return out, lse, *(x[:, :, : q.shape[2]].contiguous() if x.ndim > 1 else x for x in kept)  # type: ignore[return-value]


def _fake_backward(  # type: ignore[no-untyped-def]
    grad, grad_lse, q, k, v, bias, parents, inherited, inherited_lse, *_
):
    dtype = accumulation_dtype(q.dtype)
    empty = q.new_empty(0, dtype=dtype)
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        *(empty if x is None else x.new_empty(x.shape) for x in (inherited, inherited_lse)),
    )


@operator("cpu_flat_backward", _fake_backward)
def _level_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    parents: Tensor | None,
    inherited: Tensor | None,
    inherited_lse: Tensor | None,
    selection: Tensor,
    positions: Tensor,
    lse: Tensor,
    cells: int,
    constant: float,
    scale: float,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, k, v and the inherited state; empty for missing inputs."""
    from quadtree_attention.ops.attention.flat import cpu_kernels as kernels

    q = rows[:, :, :cells]  # used for the number of query cells only
    level = _inputs(q, k, v, bias, parents, inherited_lse, rows, None, constant, topk)
    shape, dtype = level.shape, level.dtype
    count = rows.shape[2]
    above = 0 if inherited_lse is None else level.rows // shape.shared
    dq = rows.new_empty(*rows.shape[:2], level.rows, shape.width, dtype=dtype)
    dk = k.new_empty(*k.shape[:2], level.key_cells, shape.width, dtype=dtype)
    dv = v.new_empty(*v.shape[:2], level.key_cells, shape.value_width, dtype=dtype)
    dots = rows.new_empty(*rows.shape[:2], level.rows, dtype=dtype)
    dinherited = rows.new_empty(*rows.shape[:2], above, shape.value_width, dtype=dtype)
    dinherited_lse = rows.new_empty(*rows.shape[:2], above, dtype=dtype)
    lse = torch.where(lse == -torch.inf, torch.inf, lse)  # so that all weights are 0
    common = (shape, number(scale, dtype), number(level.constant, dtype))
    padded_grad = flat_rows(grad, dtype, level.rows, shape.value_width)
    padded_rows = flat_rows(rows, dtype, level.rows, shape.width)
    padded_lse = flat(_pad(lse, level.rows, torch.inf), dtype)
    run(
        kernels.flat_backward_rows, level.lead * shape.families, 2 * level.work, *common,
        padded_grad, flat(_pad(grad_lse, level.rows, 0), dtype), padded_rows, level.k, level.v,
        level.bias, flat(parents, torch.int32),
        flat(_pad_cells(positions, level.cells, -1), torch.int32),
        padded_lse, flat_rows(inherited, dtype, above, shape.value_width),
        flat(_pad(inherited_lse, above, -torch.inf), dtype),
        *(x.view(-1).numpy() for x in (dq, dots, dinherited, dinherited_lse)),
    )  # fmt: skip
    run(
        kernels.flat_backward_keys, level.lead * shape.key_families, 2 * level.work, *common,
        padded_grad, padded_rows, level.k, level.v, level.bias, padded_lse, flat(dots, dtype),
        *_inverse(parents, shape.key_families),
        *_inverse(_pad_cells(selection, level.cells, -1) if topk else None, level.key_cells),
        dk.view(-1).numpy(), dv.view(-1).numpy(),
    )  # fmt: skip
    empty = rows.new_empty(0, dtype=dtype)
    return (
        crop(dq, count, rows.shape[3], rows.dtype),
        crop(dk, k.shape[2], k.shape[3], k.dtype),
        crop(dv, v.shape[2], v.shape[3], v.dtype),
        empty if inherited is None else crop(dinherited, dinherited.shape[2], v.shape[3], dtype),
        empty if inherited_lse is None else dinherited_lse,
    )


def _pad(x: Tensor | None, count: int, value: float) -> Tensor | None:
    """Pad the cells of (B, N, T)."""
    if x is None or x.shape[2] == count:
        return x
    return F.pad(x, (0, count - x.shape[2]), value=value)


class _Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        q, k, v, bias, parents, inherited, inherited_lse, rows, *_ = arguments
        constant, _next, scale, topk, with_message, _scores = arguments[10:]
        outputs = _level(*arguments)
        _, lse, selection, positions, scores = outputs
        ctx.save_for_backward(
            q if rows is None else rows, k, v, bias, parents, inherited, inherited_lse, selection,
            positions, lse,
        )  # fmt: skip
        ctx.options = (q.shape[2], constant, scale, topk)
        ctx.exact = rows is not None
        constants = (selection, positions, scores)
        ctx.mark_non_differentiable(*(constants if with_message else outputs))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_lse: Any, *_: Any) -> tuple[Any, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 16
        saved = ctx.saved_tensors  # read once: checkpoint returns recomputed tensors only once
        if grad is None:
            grad = saved[9].new_zeros(*saved[9].shape, saved[2].shape[3])
        dq, dk, dv, dinherited, dinherited_lse = backward_pass(
            WHAT, _level_backward, grad, grad_lse, *saved, *ctx.options
        )
        if saved[5] is None:
            dinherited = dinherited_lse = None
        return (
            None if ctx.exact else dq, dk, dv, None, None, dinherited, dinherited_lse,
            dq if ctx.exact else None, *(None,) * 8,
        )  # fmt: skip


def _inverse(selection: Tensor | None, cells: int) -> tuple[Array, Array]:
    """Apply `invert` to a selection (B, N, T, K); empty for None."""
    from quadtree_attention.ops.attention.flat.invert import invert

    if selection is None:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    batch, heads, queries, kept = selection.shape
    rows, size = batch * heads, queries * kept
    offsets = np.empty(rows * (cells + 1), np.int32)
    entries = np.empty(rows * size, np.int32)
    run(
        invert, rows, rows * (size + cells) * 4, flat(selection, torch.int32), size, cells,
        offsets, entries,
    )  # fmt: skip
    return offsets, entries
