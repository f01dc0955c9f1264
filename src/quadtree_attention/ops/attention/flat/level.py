# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of a level of variant C, for all backends. Arrays are in tree order."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Bias = float | Tensor  # logarithm of the tokens in a cell: of all cells, or (B, S); -inf: hidden


class LevelInputs(NamedTuple):
    """One level: T query cells, S key cells.

    Attributes:
        q, k, v: (B, N, T, D), (B, N, S, D), (B, N, S, Dv): means over the tokens of a cell.
        bias: Logarithm of the number of visible tokens of every key cell.
        parents: (B, N, T/F, Kp) key cells kept by the level above, -1 for none; None at level 0.
        inherited: Result and log-sum-exp of the terms of the levels above, one row per parent of
            query cells, or one per row of `rows`; None at level 0.
        rows: (B, N, T*G, D), the queries of the message; None: `q`.
        next_k, next_bias: Keys and bias of the next finer level. If given, cells are ranked by the
            log-sum-exp of their children's scores.
        scale: Factor on q.k.
        topk: Cells to keep; None at the finest level.
        with_message: True: add the terms of cells that are not kept.
        with_scores: True: return the softmax of kept cells.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    parents: Tensor | None
    inherited: tuple[Tensor, Tensor] | None
    rows: Tensor | None
    next_k: Tensor | None
    next_bias: Bias | None
    scale: float
    topk: int | None
    with_message: bool
    with_scores: bool


class FlatLevel(NamedTuple):
    """Result of one level.

    Attributes:
        out: (B, N, T*G, Dv), the softmax-weighted mean of all values so far, in the accumulation
            dtype; zeros where no term was added yet. None without a message.
        lse: (B, N, T*G), logarithm of the sum of the exponentials so far; -inf if there is no term.
        selection: (B, N, T, K) kept key cells, ascending, -1 where fewer were visible; None at the
            finest level.
        scores: (B, N, T, K), softmax over the candidates of this level; None unless requested.
    """

    out: Tensor | None
    lse: Tensor | None
    selection: Tensor | None
    scores: Tensor | None


AttendLevel = Callable[[LevelInputs], FlatLevel]
