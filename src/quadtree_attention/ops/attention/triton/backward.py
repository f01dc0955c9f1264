# SPDX-License-Identifier: Apache-2.0
"""Backward: the tensors of all launches of a call, in order.

From fine to coarse, each level has two launches: one for the gradients of its queries and of the
inherited messages, and one for the gradients of its keys and values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quadtree_attention.ops import replay
from quadtree_attention.ops.attention.triton.forward import (
    Maps,
    as_rows,
    average,
    levels_of,
    look_of,
)
from quadtree_attention.ops.attention.triton.layout import (
    grids_of,
    kept_in,
    pooled_in,
    row_strides,
)
from quadtree_attention.ops.attention.triton.schedule import Backward, backward_schedule
from quadtree_attention.ops.attention.triton.users import Users, listed_users, sorted_users


def gradients(
    dout: Tensor,
    out: Tensor | None,
    buffer: Tensor,
    maps: Maps,
    shown: Sequence[Sequence[Tensor]],
    logits: Tensor | None,
    *options: object,
    deterministic: bool,
) -> list[Tensor]:
    """Return the gradients of all maps of q, k and v, and of the logits (empty if there are none).

    Args:
        dout: Gradient of the result.
        out: The result, if there is one level.
        buffer: Memory saved by forward.
        maps, shown, logits, options: As for `forward.attend`.
        deterministic: True: repeated calls are bit-identical.
    """
    maps = as_rows(maps)
    ((dout,),) = as_rows([[dout]])
    look = look_of(maps, shown, logits, *options)
    dmaps = [[x.new_empty(x.shape) for x in part] for part in maps]
    dlogits = buffer.new_empty(0 if logits is None else len(logits))
    grads = [x for part in dmaps for x in part]
    if dout.numel() == 0:
        for x in (*grads, dlogits):
            x.zero_()
        return [*grads, dlogits]
    strides = row_strides(dout.shape, dout.stride())
    assert strides is not None
    plan = backward_schedule(look, strides)
    with torch.cuda.device_of(dout):
        kept = kept_in(buffer, plan.layout, dout.dtype)
        levels = [levels_of(x, y) for x, y in zip(maps, kept.pooled, strict=True)]
        dbuffer = dout.new_empty(sum(map(sum, plan.layout.pooled)))
        dpooled = pooled_in(dbuffer, plan.layout, dout.dtype)
        dlevels = [levels_of(x, y) for x, y in zip(dmaps, dpooled, strict=True)]
        q, k, v = levels
        dq, dk, dv = dlevels
        masks: Sequence[Tensor | None] = shown[1] or [None] * len(q)
        scores: Sequence[Tensor | None] = kept.scores if look.with_scores else [None] * len(q)

        sizes = (plan.delta, *plan.inherited, *plan.scores, *plan.stats, *plan.stats)
        delta, *pieces = buffer.new_empty(sum(sizes)).split_with_sizes(sizes)
        count, variant_a = len(plan.fine), look.variant == "A"
        inherited, pieces = pieces[:count], pieces[count:]
        nothing: list[Any] = [None] * count
        dscores, stats = (pieces, nothing * 2) if variant_a else (nothing, pieces)
        lses, deltas = stats[:count], stats[count:]
        counters, dshares = _zeros(plan, buffer, deterministic=deterministic)
        users: list[Users] = []
        if count and deterministic:
            grids, key_grids = (grids_of(tuple(x[-1].shape[1:-2]), count + 1) for x in maps[:2])
            heads = dout.shape[0] * dout.shape[-2]
            users = sorted_users(kept.places, grids, key_grids, look.topk, heads)
        elif count:
            room = buffer.new_empty(plan.entries * (2 if variant_a else 1), dtype=torch.int32)
            users = listed_users(kept.places, counters, room, plan.listing, with_slots=variant_a)

        dtotal, dkept = dout, None
        for i in range(count - 1, -1, -1):
            queries, keys = plan.fine[i]
            common = q[i + 1], k[i + 1], v[i + 1], masks[i + 1], logits
            selection = kept.places[i + 1] if i + 1 < count else None
            queries(
                *common, kept.places[i], scores[i], selection, dtotal, dkept, dq[i + 1],
                dshares[i + 1], dscores[i], inherited[i], lses[i], deltas[i],
            )  # fmt: skip
            keys(
                *common, scores[i], selection, dtotal, dkept, *users[i], lses[i], deltas[i],
                dk[i + 1], dv[i + 1],
            )  # fmt: skip
            dtotal, dkept = inherited[i], dscores[i]
        queries, keys = plan.coarse
        common = q[0], k[0], v[0], masks[0], logits
        selection = kept.places[0] if count else None
        kept_scores, message = (scores[0], kept.message) if count else (None, out)
        queries(
            *common, selection, kept_scores, kept.lse, message, dtotal, dkept, dq[0], dshares[0],
            delta,
        )  # fmt: skip
        keys(*common, selection, kept.lse, delta, dtotal, dkept, dk[0], dv[0])
        average(plan.pools, dlevels, shown)
        if plan.logits is not None:
            plan.logits(logits, dshares[0], dlogits)
    return [*grads, dlogits]


def _zeros(
    plan: Backward, buffer: Tensor, *, deterministic: bool
) -> tuple[Tensor, list[Tensor] | list[None]]:
    """Return zeros for the counters of the lists, and for partial gradients of the level shares."""
    levels = len(plan.fine) + 1
    counters = plan.listing.counters if plan.fine and not deterministic else 0
    zeros = buffer.new_empty(counters + levels * plan.width // 2, dtype=torch.int64)
    if len(zeros):
        replay.noted(torch.Tensor.zero_, zeros)
    if plan.width == 0:
        return zeros, [None] * levels
    return zeros, list(zeros[counters:].view(torch.float32).split(plan.width))
