# SPDX-License-Identifier: Apache-2.0
"""Variant C from the coarsest level to the finest, for all backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, prod
from typing import NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.attention import tree as plain
from quadtree_attention.ops.attention.base import Kept
from quadtree_attention.ops.attention.flat.forest import Forest
from quadtree_attention.ops.attention.flat.level import AttendLevel, Bias, FlatLevel, LevelInputs
from quadtree_attention.ops.attention.levels import Pyramid, ToGrid, ToTree
from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.attention.tree import Tree, accumulation_dtype, group, hide


@dataclass(frozen=True)
class FlatProblem(Problem):
    """A problem of variant C.

    Attributes:
        exact_queries: Scores of cells of all levels use the query of each token, not the mean
            query of a cell.
        lookahead: Cells are ranked by the log-sum-exp of their children's scores.
        pooled: Cells that were not kept are terms of the softmax; if False, they are dropped.
    """

    exact_queries: bool = False
    lookahead: bool = False
    pooled: bool = True


class FlatBackend(NamedTuple):
    """Functions of one backend: a level, and conversion to and from tree order."""

    attend_level: AttendLevel
    pyramid: Pyramid = plain.pyramid
    to_tree: ToTree = plain.to_tree
    to_grid: ToGrid = plain.to_grid


def attend(
    backend: FlatBackend,
    problem: FlatProblem,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_selection: bool,
) -> tuple[Tensor, Tensor, list[Kept]]:
    """Return the result (B, *grid, N, Dv), the log-sum-exp (B, *grid, N) and the kept cells.

    Args:
        q, k, v: Maps (B, *grid, N, D), one or one per level; those of a forest are (B, T, N, D).
    """
    query_tree, key_tree = problem.query_tree, problem.key_tree
    finest = problem.num_levels - 1
    key_counts = _counts(key_tree, key_mask, problem)
    biases = [_bias(counts, i, problem) for i, counts in enumerate(key_counts)]
    query_counts = _counts(query_tree, query_mask, problem)
    qs = _levels(backend, query_tree, q, query_mask, query_counts)
    if query_mask is not None:  # hidden queries are excluded from means, but get a result
        qs[-1] = _finest(backend, query_tree, q[-1])
    ks = _levels(backend, key_tree, k, key_mask, key_counts)
    vs = _levels(backend, key_tree, v, key_mask, key_counts)
    exact = problem.exact_queries and finest > 0
    levels: list[FlatLevel] = []
    state: tuple[Tensor, Tensor] | None = None
    for i in range(problem.num_levels):
        message = problem.pooled or i == finest
        ahead = problem.lookahead and i < finest
        level = backend.attend_level(
            LevelInputs(
                qs[i], ks[i], vs[i], biases[i],
                parents=levels[-1].selection if levels else None,
                inherited=state,
                rows=qs[-1] if exact and i < finest else None,
                next_k=ks[i + 1] if ahead else None,
                next_bias=biases[i + 1] if ahead else None,
                scale=problem.scale,
                topk=problem.topk[i] if i < finest else None,
                with_message=message,
                with_scores=with_selection,
            )
        )  # fmt: skip
        levels.append(level)
        if level.out is not None and level.lse is not None:
            state = (level.out, level.lse)
    assert state is not None
    out = _to_grid(backend, query_tree, state[0].to(problem.dtype), _is_heads_first(q[-1]))
    lse = plain.to_grid(query_tree, state[1][..., None]).squeeze(-1)
    return out, lse, _kept(problem, levels) if with_selection else []


def _counts(tree: Tree, mask: Tensor | None, problem: Problem) -> list[Tensor | None]:
    """Count the visible tokens of every cell (B, T_l), coarse -> fine; None where all are full."""
    if mask is None and not tree.is_padded:
        return [None] * tree.num_levels
    shown = tree.visible(mask, problem.batch, problem.device)[-1]
    assert shown is not None
    counts = [shown.to(accumulation_dtype(problem.dtype))]
    for _ in range(tree.num_levels - 1):
        counts.append(group(counts[-1], tree.num_children, axis=1).sum(dim=-1))
    return list(reversed(counts))


def _bias(counts: Tensor | None, level: int, problem: Problem) -> Bias:
    if counts is None:
        return (problem.num_levels - 1 - level) * log(problem.num_children)
    return counts.log()


def _levels(
    backend: FlatBackend,
    tree: Tree,
    maps: Sequence[Tensor],
    mask: Tensor | None,
    counts: Sequence[Tensor | None],
) -> list[Tensor]:
    """Compute means over the visible tokens of all cells, in tree order, coarse -> fine."""
    if len(maps) == tree.num_levels > 1:
        levels = [backend.to_tree(tree, x, i) for i, x in enumerate(maps)]
        if mask is None:
            return levels
        return [
            x if n is None else torch.where((n > 0)[:, None, :, None], x, 0)
            for x, n in zip(levels, counts, strict=True)
        ]
    levels = _means(backend, tree, hide(maps[0], mask))
    if counts[-1] is None:
        return levels
    rescaled = []
    for i, (x, visible) in enumerate(zip(levels[:-1], counts[:-1], strict=True)):
        assert visible is not None
        size = tree.num_children ** (tree.finest - i)
        factor = (size / visible.clamp(min=1)).to(x.dtype)
        rescaled.append(x * factor[:, None, :, None])
    return [*rescaled, levels[-1]]


def _means(backend: FlatBackend, tree: Tree, x: Tensor) -> list[Tensor]:
    """Compute means over all tokens of a cell, with zeros past the edge."""
    if not isinstance(tree, Forest):
        hidden = [None] * tree.num_levels
        if not _is_heads_first(x):
            return backend.pyramid(tree, x, hidden)
        lead = (x.shape[0], x.shape[-2])  # heads become batch entries: no copy is needed
        levels = backend.pyramid(tree, x.movedim(-2, 1).flatten(0, 1).unsqueeze(-2), hidden)
        return [level.reshape(*lead, *level.shape[2:]) for level in levels]
    parts = x.split([prod(one.grid) for one in tree.trees], dim=1)
    pyramids = [
        backend.pyramid(one, part.unflatten(1, one.grid), [None] * tree.num_levels)
        for one, part in zip(tree.trees, parts, strict=True)
    ]
    return [torch.cat(level, dim=2) for level in zip(*pyramids, strict=True)]


def _is_heads_first(x: Tensor) -> bool:
    """Return True if a map (B, *grid, N, D) has the memory layout (B, N, *grid, D)."""
    return x.shape[-2] > 1 and x.stride(-2) > x.stride(1)


def _to_grid(backend: FlatBackend, tree: Tree, x: Tensor, heads_first: bool) -> Tensor:
    """Convert (B, N, T, D) to (B, *grid, N, D), in the memory layout of the queries."""
    if isinstance(tree, Forest):
        return plain.to_grid(tree, x)
    if not heads_first:
        return backend.to_grid(tree, x)
    grid = backend.to_grid(tree, x.flatten(0, 1).unsqueeze(1)).squeeze(-2)  # (B*N, *grid, D)
    return grid.unflatten(0, x.shape[:2]).movedim(1, -2)


def _finest(backend: FlatBackend, tree: Tree, x: Tensor) -> Tensor:
    if isinstance(tree, Forest):
        return plain.to_tree(tree, x, tree.finest)
    return backend.to_tree(tree, x, tree.finest)


def _kept(problem: Problem, levels: list[FlatLevel]) -> list[Kept]:
    tree = problem.query_tree
    kept = []
    for i, level in enumerate(levels[:-1]):
        assert level.selection is not None and level.scores is not None
        cells = tree.from_tree(level.selection.movedim(1, 2), i, axis=1)  # (B, *grid_l, N, K)
        scores = tree.from_tree(level.scores.movedim(1, 2), i, axis=1)
        kept.append(Kept(problem.key_tree.coordinates(cells.long(), i), scores))
    return kept
