# SPDX-License-Identifier: Apache-2.0
"""Execution of a call on the chosen backend."""

from collections.abc import Sequence

from torch import Tensor

from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.autocast import without_autocast
from quadtree_attention.ops.backends import Backend, Kept


def attend(
    backend: Backend,
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
    """Runs `problem` with a backend, see `backends.choose`; the rest is as in `Attend`."""
    with without_autocast(problem.device.type):
        return backend.attend(
            problem,
            q,
            k,
            v,
            query_mask=query_mask,
            key_mask=key_mask,
            level_weights=level_weights,
            with_selection=with_selection,
        )
