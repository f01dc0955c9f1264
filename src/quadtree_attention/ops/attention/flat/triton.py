# SPDX-License-Identifier: Apache-2.0
"""One level of variant C by Triton kernels, with its gradients.

The coarsest level is small (see `default_levels`) and runs as in the reference, with torch's matrix
products.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.flat import reference
from quadtree_attention.ops.attention.flat.level import FlatLevel, LevelInputs
from quadtree_attention.ops.attention.triton.operator import WHAT
from quadtree_attention.ops.autograd import apply, backward_pass, operator

ROWS_AT_ONCE = 64


def attend_level(level: LevelInputs) -> FlatLevel:
    """Compute `reference.attend_level`."""
    if level.parents is None:
        return reference.attend_level(level)
    bias, number = _split(level.bias)
    next_bias, next_number = _split(0.0 if level.next_bias is None else level.next_bias)
    inherited, inherited_lse = level.inherited or (None, None)
    out, lse, selection, _, scores = apply(
        WHAT, _Level, level.q, level.k, level.v, bias, level.parents, inherited, inherited_lse,
        level.rows, level.next_k, next_bias, number, next_number, level.scale, level.topk or 0,
        level.with_message, level.with_scores,
    )  # fmt: skip
    return FlatLevel(
        out if level.with_message else None,
        lse if level.with_message else None,
        selection if level.topk else None,
        scores if level.topk and level.with_scores else None,
    )


def _split(bias: float | Tensor) -> tuple[Tensor | None, float]:
    return (bias, 0.0) if isinstance(bias, Tensor) else (None, float(bias))


class _Sizes(NamedTuple):
    lead: int  # batch entries times heads
    heads: int
    families: int  # families of query cells per head
    keys: int  # per head
    children: int
    kept: int
    group: int  # rows of a query cell

    @property
    def candidates(self) -> int:
        return self.kept * self.children

    @property
    def rows(self) -> int:
        """Rows of a family."""
        return self.children * self.group


def _sizes(queries: int, k: Tensor, parents: Tensor, rows: int) -> _Sizes:
    batch, heads, families, kept = parents.shape
    return _Sizes(
        batch * heads, heads, families, k.shape[2], queries // families, kept, rows // queries
    )


def _outputs(
    q: Tensor, rows: int, width: int, topk: int, candidates: int, with_message: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Allocate result, log-sum-exp, selection, kept candidates, scores; empty if not requested."""
    lead = q.shape[:2]
    chosen = (*lead, q.shape[2])
    return (
        q.new_empty((*lead, rows, width) if with_message else (0,), dtype=torch.float32),
        q.new_empty((*lead, rows) if with_message else (0,), dtype=torch.float32),
        q.new_empty((*chosen, topk) if topk else (0,), dtype=torch.int32),
        q.new_empty((*chosen, candidates) if topk else (0,), dtype=torch.int8),
        q.new_empty((*chosen, topk) if topk and with_scores else (0,), dtype=torch.float32),
    )


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, bias, parents, inherited, inherited_lse, rows, next_k, next_bias, number,
    next_number, scale, topk, with_message, with_scores,
):  # fmt: skip
    count = q.shape[2] if rows is None else rows.shape[2]
    candidates = parents.shape[3] * (q.shape[2] // parents.shape[2])
    return _outputs(q, count, v.shape[3], topk, candidates, with_message, with_scores)


@operator("triton_flat", _fake)
def _level(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    inherited: Tensor | None,
    inherited_lse: Tensor | None,
    rows: Tensor | None,
    next_k: Tensor | None,
    next_bias: Tensor | None,
    number: float,
    next_number: float,
    scale: float,
    topk: int,
    with_message: bool,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run one level, see `LevelInputs`. Return the tensors of `_outputs`."""
    from quadtree_attention.ops.attention.flat import triton_kernels as kernels
    from quadtree_attention.ops.kernel import power_of_two, precision

    q, k, v, parents = (x.contiguous() for x in (q, k, v, parents))
    tokens = q if rows is None else rows.contiguous()
    sizes = _sizes(q.shape[2], k, parents, tokens.shape[2])
    outputs = _outputs(
        q, tokens.shape[2], v.shape[3], topk, sizes.candidates, with_message, with_scores
    )
    out, lse, selection, kept, scores = outputs
    numbers = sizes.heads, sizes.families, sizes.keys
    biases = q.new_zeros(1, dtype=torch.float32) if bias is None else bias.float().contiguous()
    if sizes.lead * sizes.families == 0:
        return outputs
    if topk:
        block = power_of_two(sizes.candidates, 16)
        ahead = next_k is not None
        width = power_of_two(q.shape[3], 16)
        if not ahead:  # channels of keys loaded at a time
            width = min(width, max(16, 2**15 // (block * q.element_size())))
        below = k if next_k is None else next_k.contiguous()
        next_biases = biases if next_bias is None else next_bias.float().contiguous()
        kernels.flat_choose_kernel[(sizes.lead * sizes.families,)](
            q, k, biases, parents, below, next_biases, selection, kept, scores,
            scale, number, next_number, *numbers,
            CHILDREN=sizes.children, KEPT=sizes.kept, BLOCK_T=16, BLOCK_C=block, D=q.shape[3],
            BLOCK_D=width, TOPK=topk, BLOCK_TOPK=power_of_two(topk), BIASED=bias is not None,
            AHEAD=ahead, WITH_SCORES=with_scores, PRECISION=precision(q.dtype), num_warps=4,
        )  # fmt: skip
    if with_message:
        constants = _constants(sizes, q, v, inherited_lse, bool(topk), bias is not None)
        states = (out, lse) if inherited is None else (inherited, inherited_lse)
        tiles = -(-sizes.rows // constants["BLOCK_T"])
        kernels.flat_message_kernel[(sizes.lead * sizes.families * tiles,)](
            tokens, k, v, biases, parents, kept, *(_wide(x) for x in states), out, lse, scale,
            number, *numbers, **constants,
        )  # fmt: skip
    return outputs


def _constants(
    sizes: _Sizes, q: Tensor, v: Tensor, inherited_lse: Tensor | None, excluding: bool, biased: bool
) -> dict[str, Any]:
    from quadtree_attention.ops.kernel import power_of_two, precision

    shared = 1
    if inherited_lse is not None:
        shared = sizes.lead * sizes.families * sizes.rows // inherited_lse.numel()
    block_t = min(ROWS_AT_ONCE, power_of_two(sizes.rows, 16))
    return {
        "CHILDREN": sizes.children, "GROUP": sizes.group, "SHARED": shared, "KEPT": sizes.kept,
        "BLOCK_T": block_t,
        "BLOCK_C": min(64 if q.element_size() == 2 else 32, power_of_two(sizes.candidates, 16)),
        "D": q.shape[3], "BLOCK_D": power_of_two(q.shape[3], 16),
        "DV": v.shape[3], "BLOCK_DV": power_of_two(v.shape[3], 16),
        "EXCLUDING": excluding, "INHERITING": inherited_lse is not None, "BIASED": biased,
        "PRECISION": precision(q.dtype), "num_warps": 2 if block_t == 16 else 4, "num_stages": 2,
    }  # fmt: skip


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _fake_backward(  # type: ignore[no-untyped-def]
    dout, dlse, rows, k, v, bias, parents, inherited, inherited_lse, *_
):
    empty = rows.new_empty(0, dtype=torch.float32)
    return (
        *(x.new_empty(x.shape) for x in (rows, k, v)),
        *(empty if x is None else x.new_empty(x.shape) for x in (inherited, inherited_lse)),
    )


@operator("triton_flat_backward", _fake_backward)
def _level_backward(
    dout: Tensor,
    dlse: Tensor | None,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    parents: Tensor,
    inherited: Tensor | None,
    inherited_lse: Tensor | None,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    cells: int,
    number: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows, k, v and the inherited state; empty for missing inputs."""
    from quadtree_attention.ops.attention.flat import triton_kernels as kernels
    from quadtree_attention.ops.kernel import power_of_two

    rows, k, v, parents = (x.contiguous() for x in (rows, k, v, parents))
    sizes = _sizes(cells, k, parents, rows.shape[2])
    biases = k.new_zeros(1, dtype=torch.float32) if bias is None else bias.float().contiguous()
    dout = dout.float().contiguous()
    dlse = torch.zeros_like(lse) if dlse is None else dlse.float().contiguous()
    drows, dk, dv = (torch.empty_like(x) for x in (rows, k, v))
    delta = torch.empty_like(lse)
    empty = lse.new_empty(0)
    states = (empty, empty) if inherited is None else (_wide(inherited), _wide(inherited_lse))
    grads = tuple(torch.empty_like(x) for x in states if x is not None)
    if sizes.lead * sizes.families == 0:
        return drows, dk.zero_(), dv.zero_(), *grads  # type: ignore[return-value]
    constants = _constants(sizes, rows, v, inherited_lse, kept.numel() > 0, bias is not None)
    tiles = -(-sizes.rows // constants["BLOCK_T"])
    kernels.flat_bwd_rows_kernel[(sizes.lead * sizes.families * tiles,)](
        rows, k, v, biases, parents, kept, *states, out, lse, dout, dlse, drows, delta, *grads,
        scale, number, sizes.heads, sizes.families, sizes.keys, **constants,
    )  # fmt: skip
    first, entries = _listed(parents, sizes)
    for name in ("SHARED", "INHERITING", "BLOCK_C"):
        del constants[name]
    block_t = 64 if rows.element_size() == 2 else 32
    constants |= {"BLOCK_T": block_t, "BLOCK_S": power_of_two(sizes.children, 16)}
    key_families = sizes.keys // sizes.children
    kernels.flat_bwd_keys_kernel[(sizes.lead * key_families,)](
        rows, k, v, biases, kept, lse, dout, delta, first, entries, dk, dv,
        scale, number, sizes.heads, key_families, sizes.keys, **constants | {"num_warps": 4},
    )  # fmt: skip
    return drows, dk, dv, *grads  # type: ignore[return-value]


def _listed(parents: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    """Return the start of the list of every key family, and its positions in `parents`."""
    key_families = sizes.keys // sizes.children
    flat = parents.view(sizes.lead, -1)
    head = torch.arange(sizes.lead, device=flat.device, dtype=torch.int32)[:, None] * key_families
    last = sizes.lead * key_families  # index after all lists
    named = torch.where(flat < 0, last, flat + head).flatten()
    named, entries = named.sort(stable=True)
    bounds = torch.arange(last + 1, device=flat.device, dtype=torch.int32)
    return torch.searchsorted(named, bounds), entries


class _Level(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        q, k, v, bias, parents, inherited, inherited_lse, rows, *_ = arguments
        number, _next, scale, _topk, with_message, _scores = arguments[10:]
        outputs = _level(*arguments)
        out, lse, selection, kept, scores = outputs
        ctx.save_for_backward(
            q if rows is None else rows, k, v, bias, parents, inherited, inherited_lse, kept, out,
            lse,
        )  # fmt: skip
        ctx.options = (q.shape[2], number, scale)
        ctx.exact = rows is not None
        constants = (selection, kept, scores)
        ctx.mark_non_differentiable(*(constants if with_message else outputs))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
        if dout is None and dlse is None:
            return (None,) * 16
        saved = ctx.saved_tensors  # read once: checkpoint returns recomputed tensors only once
        if dout is None:
            dout = torch.zeros_like(saved[8])
        drows, dk, dv, dinherited, dinherited_lse = backward_pass(
            WHAT, _level_backward, dout, dlse, *saved, *ctx.options
        )
        if saved[5] is None:
            dinherited = dinherited_lse = None
        return (
            None if ctx.exact else drows, dk, dv, None, None, dinherited, dinherited_lse,
            drows if ctx.exact else None, *(None,) * 8,
        )  # fmt: skip
