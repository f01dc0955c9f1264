# SPDX-License-Identifier: Apache-2.0
"""What a backend is: a name, its reasons not to run, and two functions that attend one level."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from quadtree_attention.ops.problem import Problem, Variant


class Level(NamedTuple):
    """What one level gives. T query cells in tree order, K kept cells each.

    Attributes:
        message: (B, N, T, Dv) in the accumulation dtype: what this level says to its own cells.
        selection: (B, N, T, K) tree-ordered numbers of the kept key cells, best first; -1 where
            fewer than K cells were visible. None at the finest level.
        scores: (B, N, T, K) attention of the kept cells; None where nobody needs it.
    """

    message: Tensor
    selection: Tensor | None
    scores: Tensor | None


class AttendCoarse(Protocol):
    """Level 0: every query cell looks at every key cell.

    q (B, N, T, D), k (B, N, S, D), v (B, N, S, Dv), visible (B, S) bool or None.
    `topk` is None if no finer level follows. Ties go to the candidate that comes first.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        *,
        scale: float,
        topk: int | None,
        variant: Variant,
        with_scores: bool,
    ) -> Level: ...


class AttendFine(Protocol):
    """Level l > 0: the F children of a query cell look at the F children of each kept key cell.

    Shapes as in `AttendCoarse`; `parents` and `parent_scores` are (B, N, T/F, Kp): the selection
    and, for variant A only, the scores of the level above.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        parents: Tensor,
        parent_scores: Tensor | None,
        *,
        scale: float,
        topk: int | None,
        variant: Variant,
        with_scores: bool,
    ) -> Level: ...


class Backend(NamedTuple):
    """One way to compute quadtree attention.

    Attributes:
        name: What users write in `backend=`.
        reasons: Why a problem cannot be run, one sentence each; empty if it can.
        attend_coarse: Attention of level 0.
        attend_fine: Attention of a finer level.
    """

    name: str
    reasons: Callable[[Problem], list[str]]
    attend_coarse: AttendCoarse
    attend_fine: AttendFine
