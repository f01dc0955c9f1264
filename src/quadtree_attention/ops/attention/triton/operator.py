# SPDX-License-Identifier: Apache-2.0
"""The operators of the triton backend, and the autograd function that connects them.

Triton is imported when an operator first runs.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.tree import Tree
from quadtree_attention.ops.attention.triton.layout import layout_of, row_strides
from quadtree_attention.ops.autograd import backward_pass, operator
from quadtree_attention.ops.flop_counter import register_formulas
from quadtree_attention.ops.planning.flops import attention_flops, backward_flops

WHAT = "the triton backend of quadtree attention"


def _run(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    query_shown: list[Tensor],
    key_shown: list[Tensor],
    logits: Tensor | None,
    topk: list[int],
    scale: float,
    variant: str,
    with_scores: bool,
    with_rest: bool,
) -> list[Tensor]:
    """Return the result and the memory for backward, see `Layout`.

    Padding between the parts of this memory is uninitialised.
    """
    from quadtree_attention.ops.attention.triton import forward

    options = tuple(topk), scale, variant, with_scores

    def run() -> list[Tensor]:
        found = forward.attend((q, k, v), (query_shown, key_shown), logits, *options)
        return found if with_rest else found[:1]

    others = query_shown, key_shown, [] if logits is None else [logits]
    return _replayed(run, (q, k, v), others, ("forward", *options, with_rest))


def _fake(  # type: ignore[no-untyped-def]
    q, k, v, query_shown, key_shown, logits, topk, scale, variant, with_scores, with_rest
):
    finest = q[-1]
    out = finest.new_empty(*finest.shape[:-1], v[-1].shape[-1])
    if not with_rest:
        return [out]
    shapes = [[(x.shape[0], *map(int, x.shape[1:])) for x in part] for part in (q, k, v)]
    layout = layout_of(shapes, topk, finest.dtype.itemsize, with_scores=with_scores)
    return [out, finest.new_empty(sum(layout.parts), dtype=torch.float32)]


_forward = operator("triton", _fake)(_run)


def _run_backward(
    dout: Tensor,
    out: Tensor | None,
    rest: Tensor,
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    query_shown: list[Tensor],
    key_shown: list[Tensor],
    logits: Tensor | None,
    topk: list[int],
    scale: float,
    variant: str,
    with_scores: bool,
    deterministic: bool,
) -> list[Tensor]:
    """Return the gradients of the maps of q, k and v, and of the logits (empty if None)."""
    from quadtree_attention.ops.attention.triton import backward

    options = tuple(topk), scale, variant, with_scores

    def run() -> list[Tensor]:
        shown = query_shown, key_shown
        return backward.gradients(
            dout, out, rest, (q, k, v), shown, logits, *options, deterministic=deterministic
        )

    if deterministic:  # sorts by torch, which is not recorded
        return run()
    own = [x for x in (out, logits) if x is not None]
    return _replayed(
        run, ([dout], q, k, v), (query_shown, key_shown, [rest], own), ("backward", *options)
    )


def _fake_backward(  # type: ignore[no-untyped-def]
    dout, out, rest, q, k, v, query_shown, key_shown, logits, *options
):
    count = 0 if logits is None else len(logits)
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
    """Return the results of `run`, by cached launches if it runs nothing else on the device."""
    from quadtree_attention.ops import replay

    def only_launches() -> bool:
        return all(row_strides(x.shape, x.stride()) and x.numel() for part in maps for x in part)

    parts = [*maps, *others]
    inputs = [x for part in parts for x in part]
    return replay.replayed(run, inputs, (*options, *map(len, parts)), only_launches)


class Call(NamedTuple):
    """Options of a call of the operator; tensors are separate arguments.

    Attributes:
        counts: Number of tensors of each of q, k, v, query_shown and key_shown; logits come last.
        topk, scale, variant, with_scores: Options of the operator.
        with_rest: True if gradients or the selection are requested.
        with_selection: True if the memory of selections is returned.
    """

    counts: tuple[int, ...]
    topk: tuple[int, ...]
    scale: float
    variant: str
    with_scores: bool
    with_rest: bool
    with_selection: bool

    def lists(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Tensor | None]:
        """Return the five lists, and the logits."""
        parts, begin = [], 0
        for count in self.counts:
            parts.append(list(tensors[begin : begin + count]))
            begin += count
        return parts, tensors[begin] if begin < len(tensors) else None


class Attention(torch.autograd.Function):
    """Autograd function of the result, and of the selection, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        lists, logits = call.lists(tensors)
        out, *rest = _forward(*lists, logits, call.topk, *call[2:6])
        if call.with_rest:
            # with a single level, backward uses the result as message
            own = [] if call.topk else [out]
            ctx.call = call
            ctx.save_for_backward(*rest, *own, *tensors)
        ctx.set_materialize_grads(False)
        if not call.with_selection:
            return out
        ctx.mark_non_differentiable(*rest)
        return out, *rest

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        call = ctx.call
        kept = ctx.saved_tensors  # read once: checkpoint returns recomputed tensors only once
        first = 1 if call.topk else 2
        if dout is None:
            return (None,) * (1 + len(kept) - first)
        deterministic = torch.are_deterministic_algorithms_enabled()

        def run(dout: Tensor, rest: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
            out, tensors = (None, saved) if call.topk else (saved[0], saved[1:])
            lists, logits = call.lists(tensors)
            return tuple(
                _backward(dout, out, rest, *lists, logits, call.topk, *call[2:5], deterministic)
            )

        *dmaps, dlogits = backward_pass(WHAT, run, dout, *kept)
        masks = [None] * sum(call.counts[3:])
        if len(kept) == first + sum(call.counts):
            return None, *dmaps, *masks
        return None, *dmaps, *masks, dlogits.to(kept[-1].dtype)


def _forward_flops(
    q: Any, k: Any, v: Any, query_shown: Any, key_shown: Any, logits: Any, topk: Any,
    *args: Any, **options: Any,
) -> int:  # fmt: skip
    """Return FLOPs from shapes, which the counter passes instead of tensors."""
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
    dout: Any, out: Any, rest: Any, q: Any, k: Any, v: Any, query_shown: Any, key_shown: Any,
    logits: Any, topk: Any, *args: Any, **options: Any,
) -> int:  # fmt: skip
    return backward_flops(_forward_flops(q, k, v, query_shown, key_shown, logits, topk))


def count_flops() -> None:
    """Register the FLOPs of the operators with torch's counter when it is imported."""
    register_formulas({"triton": _forward_flops, "triton_backward": _backward_flops})
