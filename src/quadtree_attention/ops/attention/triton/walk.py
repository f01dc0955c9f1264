# SPDX-License-Identifier: Apache-2.0
"""The whole attention, forward and backward: which kernels run on what, and what is kept."""

from typing import NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention.triton import launch
from quadtree_attention.ops.attention.triton.launch import Grids, Level, Options, grids_of


class Maps(NamedTuple):
    """Queries, keys or values as they came: one map to be averaged, or one per level."""

    maps: list[Tensor]  # (B, *grid_l, N, D), coarse -> fine
    shown: list[Tensor]  # (B, T_l) per level, or empty

    def grids(self, num_levels: int) -> Grids:
        return grids_of(self.maps[-1].shape[1:-2], num_levels)

    def new_pooled(self, num_levels: int) -> Tensor:
        """Room for the levels above the finest, if they are to be made."""
        x = self.maps[0]
        cells = 0 if len(self.maps) == num_levels else sum(self.grids(num_levels).cells[:-1])
        return x.new_empty(x.shape[0] * x.shape[-2] * cells * x.shape[-1])


class Results(NamedTuple):
    """What forward gives. All but `out` is for backward or for those who ask for the selection.

    Attributes:
        out: (B, *grid, N, Dv).
        message: (B, N, T_0, Dv) float32, unweighted message of level 0; empty with one level.
        lse: (B, N, T_0) float32, log-sum-exp of level 0.
        pooled: Levels above the finest of q, k and v, if they were to be averaged.
        selections: (B, N, T_l, K_l) int32 places per level but the finest.
        scores: (B, N, T_l, K_l) float32; empty tensors where nobody needs them.
    """

    out: Tensor
    message: Tensor
    lse: Tensor
    pooled: list[Tensor]
    selections: list[Tensor]
    scores: list[Tensor]


def new_results(q: Maps, k: Maps, v: Maps, options: Options) -> Results:
    """Empty results, as they are known before anything runs; lists of levels stay empty."""
    finest, value_dim = q.maps[-1], v.maps[-1].shape[-1]
    levels = options.num_levels
    batch, heads = finest.shape[0], finest.shape[-2]
    cells = q.grids(levels).cells[0]
    out = finest.new_empty(*finest.shape[:-1], value_dim)
    lse = finest.new_empty((batch, heads, cells), dtype=torch.float32)
    message = lse.new_empty((*lse.shape, value_dim) if levels > 1 else 0)
    return Results(out, message, lse, [x.new_pooled(levels) for x in (q, k, v)], [], [])


def levels_of(x: Maps, pooled: Tensor, num_levels: int, *, fill: bool) -> list[Tensor]:
    """Rows (B, N, T_l, D) of all levels, coarse -> fine; averages the map first if `fill`."""
    rows = [launch.rows_of(level) for level in x.maps]
    if len(rows) == num_levels:
        return rows
    grids = x.grids(num_levels)
    if fill:
        return launch.pool(rows[0], grids, x.shown, pooled)
    lead = (rows[0].shape[0], rows[0].shape[1])
    return [*launch.pooled_views(pooled, grids, lead, rows[0].shape[-1]), rows[0]]


def make_levels(
    q: Maps, k: Maps, v: Maps, pooled: list[Tensor], options: Options, *, fill: bool
) -> list[Level]:
    count = options.num_levels
    grids, key_grids = q.grids(count), k.grids(count)
    rows = [
        levels_of(x, buffer, count, fill=fill) for x, buffer in zip((q, k, v), pooled, strict=True)
    ]
    shown: list[Tensor | None] = [*k.shown] or [None] * count
    return [
        Level(*arrays, grids.sizes[i], key_grids.sizes[i], grids.bits, key_grids.bits, shown[i])  # type: ignore[call-arg]
        for i, arrays in enumerate(zip(*rows, strict=True))
    ]


def hides(k: Maps, options: Options) -> bool:
    """Whether some candidate may be missing: hidden, or off a grid that is not halved evenly."""
    return bool(k.shown) or k.grids(options.num_levels).is_padded


def forward(q: Maps, k: Maps, v: Maps, options: Options) -> Results:
    results = new_results(q, k, v, options)
    out = launch.rows_of(results.out)
    if out.numel() == 0:
        for i, kept in enumerate(options.topk):
            shape = (*out.shape[:2], q.grids(options.num_levels).cells[i], kept)
            results.selections.append(out.new_empty(shape, dtype=torch.int32))
            results.scores.append(results.lse.new_empty(*shape[:3], kept * options.with_scores))
        return results
    with torch.cuda.device_of(out):
        levels = make_levels(q, k, v, results.pooled, options, fill=True)
        total = results.message if len(levels) > 1 else out
        selection, scores = launch.attend_coarse(levels[0], total, results.lse, options)
        for i, level in enumerate(levels[1:], start=1):
            results.selections.append(selection)
            results.scores.append(scores)
            inherited, total = total, out
            if i < len(levels) - 1:
                total = inherited.new_empty(*level.q.shape[:3], inherited.shape[-1])
            selection, scores = launch.attend_fine(
                i, level, selection, scores, inherited, total, hides(k, options), options
            )
    return results


class Gradients(NamedTuple):
    """Gradients of the maps, coarse -> fine; those of the weights by level, in parts to sum up."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    weights: list[Tensor]


def backward(
    dout: Tensor,
    q: Maps,
    k: Maps,
    v: Maps,
    results: Results,
    options: Options,
    *,
    deterministic: bool,
) -> Gradients:
    dq, dk, dv = ([x.new_empty(x.shape) for x in maps.maps] for maps in (q, k, v))
    if dout.numel() == 0:
        for x in (*dq, *dk, *dv):
            x.zero_()
        return Gradients(dq, dk, dv, [results.lse.new_empty(0)] * options.num_levels)
    with torch.cuda.device_of(dout):
        levels = make_levels(q, k, v, results.pooled, options, fill=False)
        buffers = [torch.empty_like(buffer) for buffer in results.pooled]
        rows = [
            levels_of(Maps(part, x.shown), buffer, len(levels), fill=False)
            for part, x, buffer in zip((dq, dk, dv), (q, k, v), buffers, strict=True)
        ]
        dweights = _level_gradients(
            dout, levels, rows, results, hides(k, options), deterministic, options
        )
        for maps, part, buffer in zip((q, k, v), rows, buffers, strict=True):
            if buffer.numel() > 0:
                launch.unpool(part[-1], maps.grids(len(levels)), maps.shown, buffer)
    return Gradients(dq, dk, dv, dweights)


def _level_gradients(
    dout: Tensor,
    levels: list[Level],
    rows: list[list[Tensor]],
    results: Results,
    hides: bool,
    deterministic: bool,
    options: Options,
) -> list[Tensor]:
    """Writes the gradients of q, k, v of every level to `rows`; gives those of the weights."""
    selections = [*results.selections, results.lse.new_empty(0, dtype=torch.int32)]
    scores = [*results.scores, results.lse.new_empty(0)]
    dtotal, dscores = launch.rows_of(dout), None
    dweights = []
    for i in range(len(levels) - 1, 0, -1):
        dweight, dtotal, dscores = launch.fine_gradients(
            i, levels[i], (selections[i - 1], scores[i - 1], selections[i]), dtotal, dscores,
            (rows[0][i], rows[1][i], rows[2][i]), hides, deterministic, options,
        )  # fmt: skip
        dweights.append(dweight)
    message = results.message if len(levels) > 1 else launch.rows_of(results.out)
    dweight = launch.coarse_gradients(
        levels[0], (selections[0], scores[0], results.lse, message), dtotal, dscores,
        (rows[0][0], rows[1][0], rows[2][0]), options,
    )  # fmt: skip
    return [dweight, *reversed(dweights)]
