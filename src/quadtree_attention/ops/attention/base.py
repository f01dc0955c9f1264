# SPDX-License-Identifier: Apache-2.0
"""Interface of a backend: name, reasons not to run a problem, and attention function."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from torch import Tensor

from quadtree_attention.ops.attention.problem import Problem, Variant
from quadtree_attention.ops.attention.tree import accumulation_dtype


def installed(package: str) -> bool:
    """Return True if a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ValueError:  # its entry in sys.modules is not a package
        return False


class Level(NamedTuple):
    """Result of one level. T query cells in tree order, K kept cells each.

    Attributes:
        total: (B, N, T, Dv), the sum of the messages of all levels so far, in the dtype of the
            inputs at the finest level, in the accumulation dtype above it.
        selection: (B, N, T, K) tree-ordered indices of the kept key cells, ascending; -1 where
            fewer than K cells were visible. None at the finest level.
        scores: (B, N, T, K) attention of the kept cells; None if not requested.
    """

    total: Tensor
    selection: Tensor | None
    scores: Tensor | None


class AttendCoarse(Protocol):
    """Attention of level 0: every query cell attends to every key cell.

    q (B, N, T, D), k (B, N, S, D), v (B, N, S, Dv), visible (B, S) bool or None, weight: the share
    of this level's message in the result, a scalar tensor, or None for 1.
    `topk` is None if no finer level follows. Ties go to the first candidate. With `with_scores`,
    the scores of kept cells are returned; for variant A they have a gradient.
    """

    def __call__(
        self,
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
    ) -> Level: ...


class AttendFine(Protocol):
    """Attention of level l > 0: children of a query cell attend to children of its kept key cells.

    Shapes as in `AttendCoarse`; `parents` and `parent_scores` are (B, N, T/F, Kp): the selection
    and, for variant A only, the scores of the level above; `inherited` (B, N, T/F, Dv) is its
    total, which is added to the message of every child.
    """

    def __call__(
        self,
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
    ) -> Level: ...


class Kept(NamedTuple):
    """The kept cells of every query cell of one level.

    Attributes:
        cells: (B, *grid_l, N, K, ndim) int64 coordinates, in the order of the tree; -1 where fewer
            than K cells were visible.
        scores: (B, *grid_l, N, K) attention of those cells; 0 where there is none.
    """

    cells: Tensor
    scores: Tensor


class Attend(Protocol):
    """Attention over all levels; called without autocast.

    q, k and v are lists of maps (B, *grid, N, D): one, to be averaged into levels, or one per
    level, coarse -> fine. Masks are (B, *grid) of the finest maps, level_weights are logits (L,).
    Returns the result (B, *grid, N, Dv) and, if requested, the kept cells of the selecting levels.
    """

    def __call__(
        self,
        problem: Problem,
        q: Sequence[Tensor],
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        *,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        level_weights: Tensor | None,
        with_selection: bool,
    ) -> tuple[Tensor, list[Kept]]: ...


class Backend(NamedTuple):
    """A backend of quadtree attention.

    Attributes:
        name: Value of the option `backend`.
        reasons: Function that returns the reasons why a problem cannot be run; empty if it can.
        attend: The attention. Backends that run level by level create it with `levelwise`.
    """

    name: str
    reasons: Callable[[Problem], list[str]]
    attend: Attend


def level_shares(problem: Problem, level_weights: Tensor) -> Tensor:
    """Return the share of each level in the result of variant B, (L,)."""
    return level_weights.to(accumulation_dtype(problem.dtype)).softmax(dim=0)
