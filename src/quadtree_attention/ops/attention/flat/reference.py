# SPDX-License-Identifier: Apache-2.0
"""The specification of variant C: one level in plain PyTorch.

A level updates the online-softmax state of the level above by the terms of the candidates that are
not kept. Axis letters are as in the reference of variants A and B. G is the number of rows (queries
of the message) per query cell: 1, or with `exact_queries` the number of tokens of the cell.
"""

from functools import partial

import torch
from torch import Tensor

from quadtree_attention.ops.attention.flat.level import Bias, FlatLevel, LevelInputs
from quadtree_attention.ops.attention.reference import (
    _BYTES_PER_SCORE,
    _BYTES_PER_VALUE,
    _best,
    _chunk,
    _run_of,
    _slices,
)
from quadtree_attention.ops.attention.tree import accumulation_dtype, repeat

Parts = tuple[Tensor | None, ...]  # out, lse, selection, scores of a chunk


def attend_level(level: LevelInputs) -> FlatLevel:
    """Run one level of variant C; level 0 has no parents, and all key cells are candidates."""
    batch, heads, cells, dim = level.q.shape
    lead = batch * heads
    kept = None if level.parents is None else level.parents.shape[3]
    above = 1 if level.parents is None else level.parents.shape[2]
    width = level.k.shape[2] if kept is None else kept * (cells // above)
    children = cells // above  # query cells that share their candidates
    rows = None if level.rows is None else _flat(level.rows, lead * above)
    group = 1 if level.rows is None else level.rows.shape[2] // cells
    inherited = None
    if level.inherited is not None:
        repeats = cells * group // level.inherited[1].shape[2]
        above_out, above_lse = level.inherited[0], level.inherited[1][..., None]
        inherited = tuple(_flat(repeat(x, repeats), lead * above) for x in (above_out, above_lse))
    q = _flat(level.q, lead * above)
    step = partial(_step, level=level, group=group)
    families = torch.arange(lead * above, device=q.device)
    # A chunk is some families with all their cells, or at level 0 some cells of one family.
    per_cell = group * width * _BYTES_PER_SCORE
    per_family = width * (dim + level.v.shape[3]) * _BYTES_PER_VALUE
    family_slices = _slices(lead * above, _chunk(lead * above, per_family + children * per_cell))
    cell_slices = _slices(children, _chunk(children, per_cell) if kept is None else children)
    run = _run_of(len(family_slices) * len(cell_slices))
    results = []
    for family in family_slices:
        parts = []
        for cell in cell_slices:
            row = (
                slice(None) if cell.start is None else slice(cell.start * group, cell.stop * group)
            )
            parts.append(
                run(
                    step, q[family, cell], None if rows is None else rows[family, row],
                    families[family],
                    None if inherited is None else inherited[0][family, row],
                    None if inherited is None else inherited[1][family, row],
                )
            )  # fmt: skip
        results.append(tuple(_cat(x, 1) for x in zip(*parts, strict=True)))
    out, lse, selection, scores = (_cat(x, 0) for x in zip(*results, strict=True))
    shape = (batch, heads, cells * group)
    return FlatLevel(
        None if out is None else out.reshape(*shape, out.shape[-1]),
        None if lse is None else lse.reshape(shape),
        None if selection is None else selection.reshape(*shape[:2], cells, -1),
        None if scores is None else scores.reshape(*shape[:2], cells, -1),
    )


def _step(
    q: Tensor,
    rows: Tensor | None,
    families: Tensor,
    inherited: Tensor | None,
    inherited_lse: Tensor | None,
    *,
    level: LevelInputs,
    group: int,
) -> Parts:
    """Run R families: q (R, T, D), rows (R, T*G, D), inherited (R, T*G, Dv) and (R, T*G, 1)."""
    cells = _candidates(level, families)  # (R, C); -1: none
    keys = _gather(level.k, families, cells, level)  # (R, C, D)
    bias = _bias(level.bias, families, cells, level)  # (R, C) or a number
    logits = _logits(q, keys, bias, level.scale)  # (R, T, C)
    selection = scores = kept = None
    if level.topk is not None:
        rank = logits
        if level.next_k is not None:
            rank = _mass_of_children(q, families, cells, level)
        rank = rank.masked_fill(logits == -torch.inf, -torch.inf).detach()
        best = _best(rank, level.topk)
        seen = rank.gather(-1, best) != -torch.inf
        selection = cells[:, None].expand(rank.shape).gather(-1, best).masked_fill(~seen, -1)
        if level.with_scores:
            scores = (logits - _finite(_lse(logits))).exp().gather(-1, best).detach()
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
    if not level.with_message:
        return None, None, selection, scores
    if rows is not None:
        logits = _logits(rows, keys, bias, level.scale)  # (R, T*G, C)
    if kept is not None:
        kept = kept[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)
        logits = logits.masked_fill(kept, -torch.inf)
    values = _gather(level.v, families, cells, level)  # (R, C, Dv)
    out, lse = _add(logits, values, inherited, inherited_lse)
    return out, lse.squeeze(-1), selection, scores


def _candidates(level: LevelInputs, families: Tensor) -> Tensor:
    """Return the key cells that are candidates of query families, (R, C)."""
    if level.parents is None:
        return torch.arange(level.k.shape[2], device=families.device).expand(len(families), -1)
    children = level.q.shape[2] // level.parents.shape[2]
    parents = level.parents.flatten(0, 2)[families][..., None].long()  # (R, K, 1)
    cells = parents * children + torch.arange(children, device=parents.device)
    return cells.masked_fill(parents < 0, -1).flatten(1)


def _gather(x: Tensor, families: Tensor, cells: Tensor, level: LevelInputs) -> Tensor:
    """Gather rows of x (B, N, S, D) in the accumulation dtype, zeros for missing cells."""
    heads = _heads(families, level)
    if level.parents is None:
        return _accumulate(x.flatten(0, 1)[heads])
    numbers = (heads[:, None] * x.shape[2] + cells.clamp(min=0)).flatten()
    rows = x.flatten(0, 2).index_select(0, numbers).reshape(*cells.shape, x.shape[3])
    return _accumulate(rows).masked_fill((cells < 0)[..., None], 0)


def _bias(bias: Bias, families: Tensor, cells: Tensor, level: LevelInputs) -> Bias:
    """Return the logarithm of the number of tokens of each candidate, (R, C)."""
    if isinstance(bias, Tensor):
        batch = _heads(families, level) // level.q.shape[1]
        bias = bias[batch[:, None], cells.clamp(min=0)]
        return bias.masked_fill(cells < 0, -torch.inf)
    if level.parents is None:
        return bias
    dtype = accumulation_dtype(level.q.dtype)
    number = torch.full(cells.shape, bias, dtype=dtype, device=cells.device)
    return number.masked_fill(cells < 0, -torch.inf)


def _heads(families: Tensor, level: LevelInputs) -> Tensor:
    """Return the index of batch entry and head of each family."""
    return families if level.parents is None else families // level.parents.shape[2]


def _logits(q: Tensor, keys: Tensor, bias: Bias, scale: float) -> Tensor:
    logits = (_accumulate(q) * scale) @ keys.mT
    return logits + (bias[:, None].to(logits.dtype) if isinstance(bias, Tensor) else bias)


def _mass_of_children(q: Tensor, families: Tensor, cells: Tensor, level: LevelInputs) -> Tensor:
    """Return the log-sum-exp of the scores of each candidate's children, (R, T, C)."""
    assert level.next_k is not None and level.next_bias is not None
    children = level.next_k.shape[2] // level.k.shape[2]
    below = cells[..., None] * children + torch.arange(children, device=cells.device)
    below = below.masked_fill(cells[..., None] < 0, -1).flatten(1)
    heads = _heads(families, level)
    numbers = (heads[:, None] * level.next_k.shape[2] + below.clamp(min=0)).flatten()
    keys = level.next_k.flatten(0, 2).index_select(0, numbers)
    keys = _accumulate(keys).reshape(*below.shape, -1)
    bias = _bias(level.next_bias, families, below, level)
    logits = _logits(q, keys, bias, level.scale).unflatten(-1, (-1, children))
    return _lse(logits).squeeze(-1)


def _add(
    logits: Tensor, values: Tensor, inherited: Tensor | None, inherited_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add the terms of `logits` to the state of rows: result (R, T, Dv), log-sum-exp (R, T, 1)."""
    high = logits.detach().amax(dim=-1, keepdim=True)
    if inherited_lse is not None:
        high = torch.maximum(high, inherited_lse.detach())
    high = _finite(high)
    weights = (logits - high).exp()
    total, out = weights.sum(dim=-1, keepdim=True), weights @ values
    if inherited is not None and inherited_lse is not None:
        share = (inherited_lse - high).exp()
        total, out = total + share, out + share * inherited
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    return out / total, (high + total.log()).masked_fill(nothing, -torch.inf)


def _lse(logits: Tensor) -> Tensor:
    return logits.logsumexp(dim=-1, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    """Replace -inf by 0."""
    return x.masked_fill(x == -torch.inf, 0)


def _accumulate(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _flat(x: Tensor, families: int) -> Tensor:
    """(B, N, T, D) -> (families, T / families, D)"""
    return x.reshape(families, x.shape[0] * x.shape[1] * x.shape[2] // max(families, 1), x.shape[3])


def _cat(parts: tuple[Tensor | None, ...], dim: int) -> Tensor | None:
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    return torch.cat([x for x in parts if x is not None], dim)
