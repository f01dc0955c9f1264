# SPDX-License-Identifier: Apache-2.0
"""The walk from the coarsest level to the finest, on arrays in tree order.

Both public functions and the modules end here; backends only ever see one level at a time.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quadtree_attention.ops.backends import Backend, Level, choose_backend
from quadtree_attention.ops.problem import Problem
from quadtree_attention.ops.tree import accumulation_dtype, repeat


def attend_levels(
    problem: Problem,
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    visible: Sequence[Tensor | None],
    level_weights: Tensor | None,
    backend: str,
    with_scores: bool = False,
) -> tuple[Tensor, list[Level]]:
    """Attends level by level and merges the messages.

    Args:
        problem: The checked problem; its sizes describe the arrays.
        qs: Queries (B, N, T_l, D) in tree order, coarse -> fine; `ks` and `vs` likewise.
        visible: Which key cells may be seen, (B, S_l) bool or None, coarse -> fine.
        level_weights: Logits (L,) of variant B; None weighs the levels equally.
        with_scores: Whether the scores of kept cells are wanted where the maths needs none.

    Returns:
        The result (B, N, T, Dv) of the finest level in the dtype of the inputs, and every level.
    """
    chosen = choose_backend(backend, problem)
    with _without_autocast(problem.device.type):
        return _walk(problem, chosen, qs, ks, vs, visible, level_weights, with_scores)


def _walk(
    problem: Problem,
    chosen: Backend,
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    visible: Sequence[Tensor | None],
    level_weights: Tensor | None,
    with_scores: bool,
) -> tuple[Tensor, list[Level]]:
    weights = _weights(problem, level_weights)
    levels: list[Level] = []
    total: Tensor | None = None
    for i, (q, k, v) in enumerate(zip(qs, ks, vs, strict=True)):
        topk = problem.topk[i] if i < problem.num_levels - 1 else None
        scores_needed = with_scores or problem.variant == "A"
        if i == 0:
            level = chosen.attend_coarse(
                q, k, v, visible[0],
                scale=problem.scale, topk=topk,
                variant=problem.variant, with_scores=scores_needed,
            )  # fmt: skip
        else:
            above = levels[-1]
            assert above.selection is not None  # only the finest level selects nothing
            level = chosen.attend_fine(
                q, k, v, visible[i],
                above.selection, above.scores if problem.variant == "A" else None,
                scale=problem.scale, topk=topk,
                variant=problem.variant, with_scores=scores_needed,
            )  # fmt: skip
        message = level.message if weights is None else level.message * weights[i]
        total = message if total is None else repeat(total, problem.num_children) + message
        levels.append(level)
    assert total is not None
    return total.to(problem.dtype), levels


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
