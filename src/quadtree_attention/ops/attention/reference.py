# SPDX-License-Identifier: Apache-2.0
"""The specification: quadtree attention of one level in plain PyTorch.

It supports every dtype and device, all derivatives of torch (second, forward mode, `torch.func`)
and export. Query cells are processed in chunks, which are recomputed in backward, so that the
temporary memory is about `WORKSPACE_BYTES` per level for maps of any size.

Axes: R query cells of a chunk, S key cells, C candidates of a query (K kept cells x F children).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils.checkpoint import checkpoint

from quadtree_attention.ops.attention.base import Level
from quadtree_attention.ops.attention.levels import levelwise
from quadtree_attention.ops.attention.problem import Problem, Variant
from quadtree_attention.ops.attention.tree import (
    accumulation_dtype,
    as_dtype,
    is_exporting,
    is_known,
    repeat,
)

WORKSPACE_BYTES = 256 * 2**20

Result = tuple[Tensor, Tensor | None, Tensor | None]  # message, selection, scores of a chunk


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
    batch, heads, cells, dim = q.shape
    dtype = q.dtype
    if topk is not None and not is_known(k.shape[2] >= topk):
        visible = k.new_ones(batch, k.shape[2], dtype=torch.bool) if visible is None else visible
        k, v = F.pad(k, (0, 0, 0, topk)), F.pad(v, (0, 0, 0, topk))
        visible = F.pad(visible, (0, topk))
    rows, keys = batch * heads, k.shape[2]
    q, k, v = (_accumulate(x.reshape(rows, x.shape[2], x.shape[3])) for x in (q, k, v))
    shown = None if visible is None else _per_head(visible, heads).unsqueeze(1)  # (BN, 1, S)
    step = partial(_coarse_step, scale=scale, topk=topk, variant=variant, with_scores=with_scores)
    bytes_per_query = keys * _BYTES_PER_SCORE
    rows_each = _chunk(rows, bytes_per_query + keys * (dim + v.shape[-1]) * 4)
    cells_each = _chunk(cells, bytes_per_query * rows_each)
    row_slices, cell_slices = _slices(rows, rows_each), _slices(cells, cells_each)
    run = _run_of(len(row_slices) * len(cell_slices))
    results = []
    for row in row_slices:
        q_row, k_row, v_row, mask = (_part(x, row) for x in (q, k, v, shown))
        parts = [run(step, _part(q_row, cell, 1), k_row, v_row, mask) for cell in cell_slices]
        results.append(_concatenate(parts, dim=1))
    return _level(_concatenate(results, dim=0), (batch, heads, cells), None, weight, dtype)


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
    batch, heads, cells, dim = q.shape
    dtype = q.dtype
    above, kept = parents.shape[2:]
    children = cells // above
    families = k.shape[2] // children  # key cells of the level above
    # One row per family of query cells and head; its key families start at `first`.
    rows = batch * heads * above
    q = _accumulate(q).reshape(rows, children, dim)
    k = _accumulate(k).reshape(batch * heads * families, children, dim)
    v = _accumulate(v).reshape(batch * heads * families, children, v.shape[-1])
    if visible is not None:
        visible = _per_head(visible, heads).reshape(batch * heads * families, children)
    parents = parents.reshape(rows, kept)
    if parent_scores is not None:
        parent_scores = parent_scores.reshape(rows, kept)
    first = torch.arange(batch * heads, device=q.device).unsqueeze(1) * families
    first = first.expand(batch * heads, above).reshape(rows, 1)
    step = partial(_fine_step, scale=scale, topk=topk, variant=variant, with_scores=with_scores)
    per_candidate = (dim + v.shape[-1]) * _BYTES_PER_VALUE + children * _BYTES_PER_SCORE
    slices = _slices(rows, _chunk(rows, kept * children * per_candidate))
    run = _run_of(len(slices))
    parts = [
        run(
            step, _part(q, row), k, v, visible, _part(parents, row), _part(first, row),
            _part(parent_scores, row),
        )
        for row in slices
    ]  # fmt: skip
    return _level(_concatenate(parts, dim=0), (batch, heads, cells), inherited, weight, dtype)


def _coarse_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shown: Tensor | None,
    *,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> Result:
    logits = _logits(q, k, shown, scale)  # (R, T, S)
    scores = _softmax(logits, shown)
    cells = torch.arange(k.shape[1], device=q.device).expand(logits.shape[0], -1)  # (R, S)
    return _finish(logits, scores, v, cells, shown, topk, variant, with_scores)


def _fine_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    parents: Tensor,
    first: Tensor,
    parent_scores: Tensor | None,
    *,
    scale: float,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> Result:
    count, children = q.shape[:2]
    kept = parents.shape[1]
    rows = (parents.clamp(min=0) + first).flatten()
    keys = k.index_select(0, rows).reshape(count, kept * children, k.shape[-1])  # (R, C, D)
    values = v.index_select(0, rows).reshape(count, kept * children, v.shape[-1])
    shown = None
    if visible is not None:
        shown = visible.index_select(0, rows).reshape(count, kept, children)
        shown = (shown & (parents >= 0).unsqueeze(2)).flatten(1).unsqueeze(1)  # (R, 1, C)
        if not is_exporting():  # hidden keys may be NaN, and 0 * NaN is NaN
            keys = keys.masked_fill(~shown.mT, 0)
            values = values.masked_fill(~shown.mT, 0)
    logits = _logits(q, keys, shown, scale)  # (R, F, C)
    if parent_scores is None:
        scores = _softmax(logits, shown)
    else:
        split = (kept, children)
        families = None if shown is None else shown.unflatten(-1, split)
        shares = _softmax(logits.unflatten(-1, split), families)  # (R, F, K, F)
        scores = (parent_scores.unsqueeze(1).unsqueeze(3) * shares).flatten(-2)
    cells = parents.unsqueeze(2) * children + torch.arange(children, device=q.device)
    return _finish(logits, scores, values, cells.flatten(1), shown, topk, variant, with_scores)


def _accumulate(x: Tensor) -> Tensor:
    return as_dtype(x, accumulation_dtype(x.dtype))


def _logits(q: Tensor, k: Tensor, shown: Tensor | None, scale: float) -> Tensor:
    logits = (q * scale) @ k.mT
    return logits if shown is None else logits.masked_fill(~shown, -torch.inf)


def _softmax(logits: Tensor, shown: Tensor | None) -> Tensor:
    """Softmax over the last axis; zeros for rows without visible entries."""
    if shown is None:
        return logits.softmax(dim=-1)
    if is_exporting():  # fewer operators; its gradient would be NaN for rows without visible ones
        return logits.softmax(dim=-1).masked_fill(~shown, 0)
    highest = logits.detach().amax(dim=-1, keepdim=True)
    weights = (logits - highest.masked_fill(highest == -torch.inf, 0)).exp()
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


def _finish(
    logits: Tensor,
    scores: Tensor,
    values: Tensor,
    cells: Tensor,
    shown: Tensor | None,
    topk: int | None,
    variant: Variant,
    with_scores: bool,
) -> Result:
    """Compute message and selection of a chunk from the scores of its candidates.

    Args:
        logits, scores: Before and after the softmax (R, T or F, C).
        values: (R, C, D).
        cells: Key cells of the candidates (R, C).
        shown: Visible candidates (R, 1, C); None: all.
        topk, variant, with_scores: As for `attend_coarse`.
    """
    if topk is None:
        return scores @ values, None, None
    # B ranks by logits, which differ for cells whose softmax underflows to 0.
    rank = logits if variant == "B" else scores.masked_fill(logits == -torch.inf, -1)
    best = _best(rank.detach(), topk)
    if shown is not None:
        cells = cells.masked_fill(~shown.squeeze(1), -1)
    selection = cells.gather(1, best.flatten(1)).reshape(best.shape)
    kept_scores = scores.gather(-1, best) if with_scores else None
    if variant == "A":  # kept cells are replaced by their children at the next level
        scores = scores.scatter(-1, best, 0)
    return scores @ values, selection, kept_scores


def _best(rank: Tensor, topk: int) -> Tensor:
    """Positions of the `topk` highest entries of the last axis, ascending; ties to the first."""
    if is_exporting():  # ONNX has no sort, but its TopK keeps ties in order
        return rank.topk(topk, dim=-1).indices.topk(topk, dim=-1, largest=False).values
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    return best.sort(dim=-1).values


# Peak bytes of a chunk, in backward: per score (logits, scores, their gradients, the sorted copy
# with its positions), and per gathered number (itself, its masked copy, gradients).
_BYTES_PER_SCORE = 48
_BYTES_PER_VALUE = 16


def _chunk(count: int, bytes_each: int) -> int:
    """Return how many of `count` pieces fit into the workspace; all if `count` is symbolic."""
    if not isinstance(count, int) or not isinstance(bytes_each, int):
        return count
    return max(1, min(count, WORKSPACE_BYTES // max(bytes_each, 1)))


def _part(x: Any, part: slice, axis: int = 0) -> Any:
    """Slice an axis; the tensor itself for the whole axis, which is no operator of an export."""
    if x is None or part == slice(None):
        return x
    return x[(slice(None),) * axis + (part,)]


def _slices(count: int, step: int) -> list[slice]:
    if not isinstance(count, int) or count == 0:
        return [slice(None)]
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _run_of(chunks: int) -> Callable[..., Result]:
    """Return the function that runs steps of a level; several chunks are checkpointed."""
    recompute = torch.is_grad_enabled() and chunks > 1 and _are_hooks_allowed()
    return _recompute if recompute else _call


def _call(step: Callable[..., Result], *args: Tensor | None) -> Result:
    return step(*args)


def _recompute(step: Callable[..., Result], *args: Tensor | None) -> Result:
    if _has_tangents(args):  # torch 2.11 has no forward mode of checkpoints
        return step(*args)
    return checkpoint(step, *args, use_reentrant=False, preserve_rng_state=False)


def _has_tangents(args: Sequence[Tensor | None]) -> bool:
    """Return True if a tensor has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    return any(x is not None and unpack_dual(x).tangent is not None for x in args)


def _are_hooks_allowed() -> bool:
    """True if saved tensors can have hooks, as `checkpoint` needs; not in `torch.func.grad`."""
    if torch.compiler.is_compiling():
        return True
    try:
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            return True
    except RuntimeError:
        return False


def _itself(x: Tensor) -> Tensor:
    return x


def _concatenate(chunks: list[Result], dim: int) -> Result:
    if len(chunks) == 1:
        return chunks[0]
    messages, selections, scores = zip(*chunks, strict=True)
    return (
        torch.cat(messages, dim),
        None if selections[0] is None else torch.cat(selections, dim),
        None if scores[0] is None else torch.cat(scores, dim),
    )


def _level(
    result: Result,
    shape: tuple[int, int, int],
    inherited: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
) -> Level:
    """Add the message of this level to the total of the level above; (B, N, T) is the shape."""
    message, selection, scores = result
    total = message.reshape(*shape, message.shape[-1])
    if weight is not None:
        total = total * weight
    if inherited is not None:
        total = repeat(inherited, shape[2] // inherited.shape[2]) + total
    if selection is None:  # the finest level
        return Level(as_dtype(total, dtype), None, None)
    selection = selection.reshape(*shape, selection.shape[-1])
    return Level(total, selection, None if scores is None else scores.reshape(selection.shape))


def _per_head(visible: Tensor, heads: int) -> Tensor:
    """(B, S) -> (BN, S)"""
    return visible.unsqueeze(1).expand(-1, heads, -1).flatten(0, 1)


def _reasons(problem: Problem) -> list[str]:
    return []


REFERENCE = levelwise("reference", _reasons, attend_coarse, attend_fine)
