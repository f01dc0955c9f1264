# SPDX-License-Identifier: Apache-2.0
"""Forward: the tensors of all launches of a call, in order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quadtree_attention.ops.attention.triton.layout import kept_in, row_strides
from quadtree_attention.ops.attention.triton.schedule import Look, Pool, forward_schedule

Maps = Sequence[Sequence[Tensor]]  # of q, k and v: one, or one per level, coarse -> fine


def as_rows(maps: Maps) -> list[list[Tensor]]:
    """Return the maps, copied if they are not rows in memory."""
    return [
        [x if row_strides(x.shape, x.stride()) else x.contiguous() for x in part] for part in maps
    ]


def look_of(
    maps: Maps, shown: Sequence[Sequence[Tensor]], logits: Tensor | None, *options: object
) -> Look:
    """Key of the schedule of a call; `options` from `topk` on."""
    return Look(
        tuple(tuple((x.shape, x.stride()) for x in part) for part in maps),
        maps[0][0].dtype,
        (bool(shown[0]), bool(shown[1])),
        logits is not None,
        *options,  # type: ignore[arg-type]
    )


def levels_of(maps: Sequence[Tensor], pooled: Sequence[Tensor]) -> list[Tensor]:
    """Return all levels, coarse -> fine."""
    return [*pooled[-2::-1], *maps]


def average(
    pools: Sequence[Pool],
    levels: Sequence[Sequence[Tensor]],
    shown: Sequence[Sequence[Tensor]],
) -> None:
    """Launch kernels of `pyramid.py`; `levels` of q, k and v, coarse -> fine."""
    for maps, level, step in pools:
        x = [levels[part][level] for part in maps]
        masks = shown[maps[0] > 0]
        step(
            x[0], x[len(x) // 2], x[-1], masks[level] if masks else None, levels[maps[0]][level - 1]
        )


def attend(
    maps: Maps, shown: Sequence[Sequence[Tensor]], logits: Tensor | None, *options: object
) -> list[Tensor]:
    """Return the result (B, *grid, N, Dv), and the buffer for backward.

    Args:
        maps: Maps of q, k and v: one, or one per level, coarse -> fine.
        shown: Visible cells of each level, of queries and keys, (B, T_l) each; empty without
            masks.
        logits: Logits of the levels, (L,); None: equal weights.
        options: As in `Look`, from `topk` on.
    """
    maps = as_rows(maps)
    look = look_of(maps, shown, logits, *options)
    finest, value = maps[0][-1], maps[2][-1]
    out = finest.new_empty((*finest.shape[:-1], value.shape[-1]))
    if out.numel() == 0:  # the batch is empty
        return [out, finest.new_empty(0, dtype=torch.float32)]
    plan = forward_schedule(look)
    buffer = finest.new_empty(sum(plan.layout.parts), dtype=torch.float32)
    kept = kept_in(buffer, plan.layout, finest.dtype)
    with torch.cuda.device_of(out):
        q, k, v = (levels_of(x, y) for x, y in zip(maps, kept.pooled, strict=True))
        average(plan.pools, (q, k, v), shown)
        masks: Sequence[Tensor | None] = shown[1] or [None] * len(q)
        scores = kept.scores if look.with_scores else [None] * len(kept.places)
        message = kept.message if plan.choose else out
        if plan.choose is None:
            plan.coarse(q[0], k[0], v[0], masks[0], out, kept.lse, None, None)
            return [out, buffer]
        between = buffer.new_empty(sum(plan.between)).split_with_sizes(plan.between)
        parts, part_lse, listed, count = between
        listed, count = listed.view(torch.int64), count.view(torch.int32)
        plan.coarse(q[0], k[0], v[0], masks[0], parts, part_lse, listed, count)
        plan.choose(
            v[0], parts, part_lse, listed, count, message, kept.lse, kept.places[0], scores[0]
        )
        del between, parts, part_lse, listed, count
        totals = [message]
        if plan.totals:
            totals += buffer.new_empty(sum(plan.totals)).split_with_sizes(plan.totals)
        for i, step in enumerate(plan.fine):
            is_finest = i == len(plan.fine) - 1
            step(
                q[i + 1], k[i + 1], v[i + 1], masks[i + 1], logits, kept.places[i], scores[i],
                totals[i], out if is_finest else totals[i + 1],
                None if is_finest else kept.places[i + 1], None if is_finest else scores[i + 1],
            )  # fmt: skip
    return [out, buffer]
