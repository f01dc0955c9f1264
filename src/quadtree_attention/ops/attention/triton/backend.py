# SPDX-License-Identifier: Apache-2.0
"""The triton backend: one torch operator each way, with gradient, fake and FLOPs.

Triton itself is imported when an operator first runs, not before.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.base import Backend, Kept, installed, level_shares
from quadtree_attention.ops.attention.problem import Problem, needs_grad
from quadtree_attention.ops.attention.tree import Tree, is_exporting
from quadtree_attention.ops.attention.triton import limits
from quadtree_attention.ops.autograd import apply, backward_pass, operator
from quadtree_attention.ops.flop_counter import register_formulas
from quadtree_attention.ops.planning.flops import attention_flops, backward_flops

if TYPE_CHECKING:
    from quadtree_attention.ops.attention.triton.walk import Results

TRITON_INSTALLED = installed("triton")
WHAT = "the triton backend of quadtree attention"


def _run(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    query_shown: list[Tensor],
    key_shown: list[Tensor],
    weights: Tensor | None,
    topk: list[int],
    scale: float,
    variant: str,
    with_scores: bool,
    with_rest: bool,
) -> list[Tensor]:
    """The result, and with the rest all that backward needs, see `_packed`."""
    from quadtree_attention.ops.attention.triton.launch import Options
    from quadtree_attention.ops.attention.triton.walk import Maps, forward

    def run() -> list[Tensor]:
        options = Options(tuple(topk), scale, variant, with_scores, weights)
        maps = Maps(q, query_shown), Maps(k, key_shown), Maps(v, key_shown)
        results = forward(*maps, options)
        return _packed(results) if with_rest else [results.out]

    others = query_shown, key_shown, [] if weights is None else [weights]
    options = ("forward", *topk, scale, variant, with_scores, with_rest)
    return _replayed(run, (q, k, v), others, options)


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, query_shown, key_shown, weights, topk, scale, variant, with_scores, with_rest
):
    finest, num_levels = q[-1], len(topk) + 1
    tree = Tree(tuple(finest.shape[1:-2]), num_levels)
    lead, value_dim = (finest.shape[0], finest.shape[-2]), v[-1].shape[-1]
    cells = [prod(tree.grid_at(i)) for i in range(num_levels)]

    def f32(*shape: int) -> Tensor:
        return finest.new_empty(shape, dtype=torch.float32)

    def pooled(maps: list[Tensor]) -> Tensor:
        if len(maps) == num_levels:
            return finest.new_empty(0)
        above = Tree(tuple(maps[0].shape[1:-2]), num_levels)
        rows = sum(prod(above.grid_at(i)) for i in range(num_levels - 1))
        return finest.new_empty(prod(lead) * rows * maps[0].shape[-1])

    out = finest.new_empty(*finest.shape[:-1], value_dim)
    if not with_rest:
        return [out]
    return [
        out,
        f32(*lead, cells[0], value_dim) if topk else f32(0),
        f32(*lead, cells[0]),
        *(pooled(maps) for maps in (q, k, v)),
        *(f32(*lead, n, kept).int() for n, kept in zip(cells, topk, strict=False)),
        *(f32(*lead, n, kept if with_scores else 0) for n, kept in zip(cells, topk, strict=False)),
    ]


_forward = operator("triton", _fake)(_run)


def _run_backward(
    dout: Tensor,
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    query_shown: list[Tensor],
    key_shown: list[Tensor],
    weights: Tensor | None,
    results: list[Tensor],
    topk: list[int],
    scale: float,
    variant: str,
    deterministic: bool,
) -> list[Tensor]:
    """Gradients of all maps of q, k and v, and of the weights (empty if there are none)."""
    from quadtree_attention.ops.attention.triton.launch import Options
    from quadtree_attention.ops.attention.triton.walk import Maps, backward

    def run() -> list[Tensor]:
        options = Options(tuple(topk), scale, variant, variant == "A", weights)
        maps = Maps(q, query_shown), Maps(k, key_shown), Maps(v, key_shown)
        grads = backward(dout, *maps, _unpacked(results), options, deterministic=deterministic)
        return [*grads.q, *grads.k, *grads.v, *grads.weights]

    if deterministic:  # sorts, which is no launch
        grads = run()
    else:
        others = query_shown, key_shown, [] if weights is None else [weights], results
        grads = _replayed(run, ([dout], q, k, v), others, ("backward", *topk, scale, variant))
    count = len(q) + len(k) + len(v)
    dweights = grads[count:]
    if weights is None:
        return [*grads[:count], dweights[0].new_empty(0)]
    return [*grads[:count], torch.stack([part.sum() for part in dweights])]


def _fake_backward(  # type: ignore[no-untyped-def]
    dout, q, k, v, query_shown, key_shown, weights, results, topk, scale, variant, deterministic
):
    count = 0 if weights is None else len(topk) + 1
    return [
        *(x.new_empty(x.shape) for x in (*q, *k, *v)),
        dout.new_empty(count, dtype=torch.float32),
    ]


_backward = operator("triton_backward", _fake_backward)(_run_backward)


def _replayed(
    run: Callable[[], list[Tensor]],
    maps: Sequence[list[Tensor]],
    others: Sequence[list[Tensor]],
    options: tuple[Hashable, ...],
) -> list[Tensor]:
    """What `run` gives, by launches that were noted if it comes to nothing else."""
    from quadtree_attention.ops import replay
    from quadtree_attention.ops.attention.triton.launch import lies_in_rows

    def only_launches() -> bool:
        return all(lies_in_rows(x) for part in maps for x in part)

    parts = [*maps, *others]
    inputs = [x for part in parts for x in part]
    return replay.replayed(run, inputs, (*options, *map(len, parts)), only_launches)


def _packed(results: "Results") -> list[Tensor]:
    out, message, lse, pooled, selections, scores = results
    return [out, message, lse, *pooled, *selections, *scores]


def _unpacked(tensors: list[Tensor]) -> "Results":
    from quadtree_attention.ops.attention.triton.walk import Results

    selecting = (len(tensors) - 6) // 2
    out, message, lse, *pooled = tensors[:6]
    return Results(out, message, lse, pooled, tensors[6 : 6 + selecting], tensors[6 + selecting :])


class _Call(NamedTuple):
    """What a call of the operator takes but tensors; those are handed over one after the other.

    Attributes:
        counts: How many tensors each of q, k, v, query_shown and key_shown has; weights come last.
        others: From `topk` on.
    """

    counts: tuple[int, ...]
    topk: tuple[int, ...]
    scale: float
    variant: str
    with_scores: bool
    with_rest: bool

    def lists(self, tensors: Sequence[Tensor]) -> tuple[list[list[Tensor]], Tensor | None]:
        """The five lists, and the weights."""
        parts, rest = [], list(tensors)
        for count in self.counts:
            parts.append(rest[:count])
            rest = rest[count:]
        return parts, rest[0] if rest else None


class _Attention(torch.autograd.Function):
    """Result, and with the rest what `_packed` gives, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        lists, weights = call.lists(tensors)
        out, *rest = _forward(*lists, weights, list(call.topk), *call[2:])
        if call.with_rest:
            # a single level recomputes from its result, others have their own messages
            own = out.new_empty(0) if call.topk else out
            ctx.call, ctx.num_rest = call, len(rest)
            ctx.save_for_backward(own, *rest, *tensors)
            ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        return out, *rest

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        call, count = ctx.call, ctx.num_rest + 1
        kept = ctx.saved_tensors  # once: checkpoint recomputes them, and gives them once
        if dout is None:
            return (None,) * (1 + len(kept) - count)
        deterministic = torch.are_deterministic_algorithms_enabled()

        def run(dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
            lists, weights = call.lists(saved[count:])
            grads = _backward(
                dout, *lists, weights, list(saved[:count]), list(call.topk), call.scale,
                call.variant, deterministic,
            )  # fmt: skip
            return tuple(grads)

        *dmaps, dweights = backward_pass(WHAT, run, dout, *kept)
        masks = [None] * sum(call.counts[3:])
        if len(kept) == count + sum(call.counts):
            return None, *dmaps, *masks
        return None, *dmaps, *masks, dweights.to(kept[-1].dtype)


def _forward_flops(
    q: Any, k: Any, v: Any, query_shown: Any, key_shown: Any, weights: Any, topk: Any,
    *args: Any, **options: Any,
) -> int:  # fmt: skip
    """From shapes, as the counter gives them in place of tensors."""
    batch, *grid, heads, dim = q[-1]
    return sum(
        attention_flops(
            batch=batch,
            heads=heads,
            dim=dim,
            value_dim=v[-1][-1],
            query_tree=Tree(tuple(grid), len(topk) + 1),
            key_tree=Tree(tuple(k[-1][1:-2]), len(topk) + 1),
            topk=topk,
        )
    )


def _backward_flops(
    dout: Any, q: Any, k: Any, v: Any, query_shown: Any, key_shown: Any, weights: Any, results: Any,
    topk: Any, *args: Any, **options: Any,
) -> int:  # fmt: skip
    return backward_flops(_forward_flops(q, k, v, query_shown, key_shown, weights, topk))


def attend(
    problem: Problem,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    level_weights: Tensor | None,
    with_selection: bool,
) -> tuple[Tensor, list[Kept]]:
    if not torch.compiler.is_compiling():
        register_formulas({"triton": _forward_flops, "triton_backward": _backward_flops})
    query_tree, key_tree = problem.query_tree, problem.key_tree
    weights = None if level_weights is None else level_shares(problem, level_weights)
    lists = q, k, v, _shown(query_tree, query_mask), _shown(key_tree, key_mask)
    tensors = [x for part in lists for x in part] + ([] if weights is None else [weights])
    call = _Call(
        tuple(len(part) for part in lists), problem.topk, problem.scale, problem.variant,
        with_selection or problem.variant == "A", with_selection or needs_grad(*tensors),
    )  # fmt: skip
    out, *rest = apply(WHAT, _Attention, call, *tensors)
    if not with_selection:
        return out, []
    results = _unpacked([out, *rest])
    return out, [
        _kept(query_tree.grid_at(i), limits.bits_of(key_tree.grid), places, scores)
        for i, (places, scores) in enumerate(zip(results.selections, results.scores, strict=True))
    ]


def _shown(tree: Tree, mask: Tensor | None) -> list[Tensor]:
    """Which cells of each level are not hidden by a mask, (B, T_l) in row-major order."""
    if mask is None:
        return []
    levels = tree.visible(mask, mask.shape[0], mask.device)
    return [
        tree.from_tree(shown, i, axis=1).flatten(1).contiguous()
        for i, shown in enumerate(levels)
        if shown is not None
    ]


def _kept(grid: tuple[int, ...], key_bits: tuple[int, ...], places: Tensor, scores: Tensor) -> Kept:
    from quadtree_attention.ops.attention.triton.launch import coordinates_of

    cells = torch.stack(coordinates_of(places, key_bits), dim=-1)
    cells = torch.where(places[..., None] < 0, -1, cells).long()
    return Kept(cells.movedim(1, 2).unflatten(1, grid), scores.movedim(1, 2).unflatten(1, grid))


def _reasons(problem: Problem) -> list[str]:
    reasons = []
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not TRITON_INSTALLED:
        reasons.append("triton is not installed; it comes with the CUDA builds of torch for Linux")
    if problem.device.type != "cuda" and not interpreted:
        reasons.append(f"it needs a CUDA device, the tensors are on {problem.device}")
    if problem.dtype == torch.float64:
        reasons.append("it computes in float32 at most, the tensors are float64")
    if is_exporting():  # sizes may be symbolic there
        return [*reasons, "exported programs use the reference"]
    return reasons + limits.reasons(problem)


TRITON = Backend("triton", _reasons, attend)
