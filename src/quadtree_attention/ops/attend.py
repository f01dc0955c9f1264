# SPDX-License-Identifier: Apache-2.0
"""The walk from the coarsest level to the finest, where every call of the package ends."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quadtree_attention.ops.backends import Backend, Level, choose_backend
from quadtree_attention.ops.problem import Problem
from quadtree_attention.ops.tree import accumulation_dtype


def attend(
    problem: Problem,
    q: Tensor | Sequence[Tensor],
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    *,
    shown_queries: Sequence[Tensor | None],
    shown_keys: Sequence[Tensor | None],
    level_weights: Tensor | None,
    backend: str,
    with_scores: bool = False,
) -> tuple[Tensor, list[Level]]:
    """Attends level by level.

    Args:
        problem: The checked problem; its sizes describe the arrays.
        q: Queries: a map (B, *grid, N, D) to be averaged into levels, or levels (B, N, T_l, D) in
            tree order, coarse -> fine; `k` and `v` likewise.
        shown_queries: Which query cells enter the means, (B, T_l) bool or None, coarse -> fine.
        shown_keys: Which key cells may be seen, likewise.
        level_weights: Logits (L,) of variant B; None weighs the levels equally.
        backend: "auto" or a name.
        with_scores: Whether the scores of kept cells are wanted where the maths needs none.

    Returns:
        The result (B, *grid, N, Dv), and what every level gave.
    """
    chosen = choose_backend(backend, problem)
    query_tree, key_tree = problem.query_tree, problem.key_tree
    with _without_autocast(problem.device.type):
        qs = chosen.pyramid(query_tree, q, shown_queries) if isinstance(q, Tensor) else q
        ks = chosen.pyramid(key_tree, k, shown_keys) if isinstance(k, Tensor) else k
        vs = chosen.pyramid(key_tree, v, shown_keys) if isinstance(v, Tensor) else v
        levels = _walk(problem, chosen, qs, ks, vs, shown_keys, level_weights, with_scores)
        return chosen.to_grid(query_tree, levels[-1].total), levels


def _walk(
    problem: Problem,
    chosen: Backend,
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    visible: Sequence[Tensor | None],
    level_weights: Tensor | None,
    with_scores: bool,
) -> list[Level]:
    weights = _weights(problem, level_weights)
    with_scores = with_scores or problem.variant == "A"
    levels: list[Level] = []
    for i, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True)):
        arrays = (q, k, v, visible[i], None if weights is None else weights[i])
        topk = problem.topk[i] if i < problem.num_levels - 1 else None
        if i == 0:
            level = chosen.attend_coarse(
                *arrays,
                scale=problem.scale,
                topk=topk,
                variant=problem.variant,
                with_scores=with_scores,
            )
        else:
            above = levels[-1]
            assert above.selection is not None  # only the finest level selects nothing
            level = chosen.attend_fine(
                *arrays,
                above.selection,
                above.scores if problem.variant == "A" else None,
                above.total,
                scale=problem.scale,
                topk=topk,
                variant=problem.variant,
                with_scores=with_scores,
            )
        levels.append(level)
    return levels


def _weights(problem: Problem, level_weights: Tensor | None) -> Tensor | None:
    """Share of each level in the result of variant B; variant A needs none."""
    if problem.variant == "A":
        return None
    if level_weights is None:
        level_weights = torch.zeros(problem.num_levels, device=problem.device)
    return level_weights.to(accumulation_dtype(problem.dtype)).softmax(dim=0)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Inside the op the dtypes are ours to choose: sums are kept in float32."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
