# SPDX-License-Identifier: Apache-2.0
"""The loop from the coarsest level to the finest, for backends that run one level at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quadtree_attention.ops.attention import tree as plain
from quadtree_attention.ops.attention.base import (
    AttendCoarse,
    AttendFine,
    Backend,
    Kept,
    Level,
    level_shares,
)
from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.attention.tree import Tree, hide

Visible = Sequence[Tensor | None]  # per level (B, T_l) bool in tree order; None hides nothing
Pyramid = Callable[[Tree, Tensor, Visible], list[Tensor]]
ToTree = Callable[[Tree, Tensor, int], Tensor]
ToGrid = Callable[[Tree, Tensor], Tensor]


def levelwise(
    name: str,
    reasons: Callable[[Problem], list[str]],
    attend_coarse: AttendCoarse,
    attend_fine: AttendFine,
    pyramid: Pyramid = plain.pyramid,
    to_tree: ToTree = plain.to_tree,
    to_grid: ToGrid = plain.to_grid,
) -> Backend:
    """Create a backend from functions for one level, on arrays in tree order.

    Args:
        name, reasons: As for `Backend`.
        attend_coarse: Attention of level 0.
        attend_fine: Attention of a finer level.
        pyramid: All levels of a map by masked means, see `tree.pyramid`.
        to_tree: One level of a given pyramid, see `tree.to_tree`.
        to_grid: Conversion from tree order, see `tree.to_grid`.
    """

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
        query_tree, key_tree = problem.query_tree, problem.key_tree
        shown_queries = query_tree.visible(query_mask, problem.batch, problem.device)
        visible = key_tree.visible(key_mask, problem.batch, problem.device)
        qs = _levels(query_tree, q, None, shown_queries, pyramid, to_tree)
        ks = _levels(key_tree, k, key_mask, visible, pyramid, to_tree)
        vs = _levels(key_tree, v, key_mask, visible, pyramid, to_tree)
        weights = _weights(problem, level_weights)
        with_scores = with_selection or problem.variant == "A"
        levels: list[Level] = []
        for i, arrays in enumerate(zip(qs, ks, vs, visible, weights, strict=True)):
            options = {
                "scale": problem.scale,
                "topk": problem.topk[i] if i < problem.num_levels - 1 else None,
                "variant": problem.variant,
                "with_scores": with_scores,
            }
            if i == 0:
                levels.append(attend_coarse(*arrays, **options))  # type: ignore[arg-type]
                continue
            above = levels[-1]
            assert above.selection is not None  # all other levels have a selection
            scores = above.scores if problem.variant == "A" else None
            levels.append(
                attend_fine(*arrays, above.selection, scores, above.total, **options)  # type: ignore[arg-type]
            )
        out = to_grid(query_tree, levels[-1].total)
        return out, _kept(problem, levels) if with_selection else []

    return Backend(name, reasons, attend)


def _levels(
    tree: Tree,
    maps: Sequence[Tensor],
    mask: Tensor | None,
    visible: Visible,
    pyramid: Pyramid,
    to_tree: ToTree,
) -> list[Tensor]:
    """Return all levels in tree order, coarse -> fine, with zeros for hidden cells."""
    if len(maps) < tree.num_levels or tree.num_levels == 1:
        return pyramid(tree, hide(maps[0], mask), visible)
    levels = [to_tree(tree, x, i) for i, x in enumerate(maps)]
    if mask is None:
        return levels
    return [_hide_rows(x, shown) for x, shown in zip(levels, visible, strict=True)]


def _hide_rows(x: Tensor, visible: Tensor | None) -> Tensor:
    """Set hidden rows to 0: (B, N, S, D) with (B, S) bool or None."""
    return x if visible is None else torch.where(visible[:, None, :, None], x, 0)


def _weights(problem: Problem, level_weights: Tensor | None) -> list[Tensor | None]:
    """Return the share of each level in the result of variant B; None for variant A."""
    if problem.variant == "A":
        return [None] * problem.num_levels
    if level_weights is None:
        level_weights = torch.zeros(problem.num_levels, device=problem.device)
    return list(level_shares(problem, level_weights).unbind())


def _kept(problem: Problem, levels: list[Level]) -> list[Kept]:
    tree = problem.query_tree
    kept = []
    for i, level in enumerate(levels[:-1]):
        assert level.selection is not None and level.scores is not None
        cells = tree.from_tree(level.selection.movedim(1, 2), i, axis=1)  # (B, *grid_l, N, K)
        scores = tree.from_tree(level.scores.movedim(1, 2), i, axis=1)
        kept.append(Kept(problem.key_tree.coordinates(cells.long(), i), scores))
    return kept
