# SPDX-License-Identifier: Apache-2.0
"""The public functions: quadtree attention on grids of any size."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from quadtree_attention.ops.attention.flat.functional import (
    ONLY_C,
    Prefix,
    attend_map,
    flat_problem,
)
from quadtree_attention.ops.attention.flat.functional import run as run_flat
from quadtree_attention.ops.attention.problem import (
    Variant,
    check_levels_of_maps,
    check_pyramids,
    make_problem,
)
from quadtree_attention.ops.autocast import autocast_dtype, without_autocast
from quadtree_attention.ops.backends import Kept, choose, explain_backends


class LevelSelection(NamedTuple):
    """The kept cells of every query cell of one level, best first.

    Attributes:
        cells: (B, *query_grid, N, K, ndim) int64 grid coordinates, (y, x) order, on the key grid
            of this level; -1 where fewer than K cells were visible.
        scores: (B, *query_grid, N, K) attention of the kept cells; 0 for missing cells. They have
            no gradient.
    """

    cells: Tensor
    scores: Tensor


Selection = tuple[LevelSelection, ...]  # one entry per level that selects, coarse -> fine


class PyramidOptions(TypedDict, total=False):
    """Keyword options of both functions, for type checkers; see the docstrings."""

    topk: Required[int | Sequence[int]]
    variant: Variant
    level_weights: Tensor | None
    scale: float | None
    key_mask: Tensor | None
    backend: str


class Options(PyramidOptions, total=False):
    num_levels: Required[int]
    query_mask: Tensor | None
    prefix_keys: Tensor | None
    prefix_values: Tensor | None
    exact_queries: bool
    lookahead: bool


@overload
def quadtree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_selection: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def quadtree_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_selection: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Selection]: ...


@overload
def quadtree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_selection: bool = False,
    return_lse: bool = False,
    prefix_queries: Tensor | None = None,
    **options: Unpack[Options],
) -> Any: ...


def quadtree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_levels: int,
    topk: int | Sequence[int],
    variant: Variant = "B",
    level_weights: Tensor | None = None,
    scale: float | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    return_selection: bool = False,
    return_lse: bool = False,
    prefix_queries: Tensor | None = None,
    prefix_keys: Tensor | None = None,
    prefix_values: Tensor | None = None,
    exact_queries: bool = False,
    lookahead: bool = False,
) -> Any:
    """Compute quadtree attention: coarse attention, refined at the selected cells.

    Queries, keys and values are averaged into pyramids of `num_levels` levels. At the coarsest
    level every query cell attends to every key cell and keeps its `topk` best; at each finer level
    its children attend only to the children of the kept cells. All children of a query cell share
    the selection of their parent. With one level this is full attention.

    Any grid of size 1 or more on every axis is accepted: sizes that do not divide by
    `2**(num_levels - 1)` behave as if the missing cells were hidden by a mask. Sums are
    accumulated in float32 (float64 in float64). No gradient flows through the selection. The
    result of a query without visible keys is 0. Ties are resolved in favour of the first cell, in
    row-major order at the coarsest level and in the order of children below it.

    Args:
        q: Queries (B, *grid, N, D); the grid has 1, 2 or 3 axes.
        k: Keys (B, *key_grid, N, D); the key grid may have another size than the query grid.
        v: Values (B, *key_grid, N, Dv).
        num_levels: Levels of the pyramids: up to 4 on maps of any size, and more until the coarsest
            level of the larger map is a single cell.
        topk: Cells that each query cell keeps: one number, or one per selecting level
            (`num_levels - 1` of them, coarse -> fine). Values above the number of cells keep all.
        variant: "B" runs a softmax over all candidates of a level and mixes the levels by
            `level_weights`; "A" multiplies the scores of children by the score of their kept
            parent, so that the weights of a query sum to 1 over the key grid; "C" runs one softmax
            over the cells of all levels that were not kept, weighted by their number of tokens. "C"
            equals dense attention if `topk` keeps all cells, and approximates it otherwise.
        level_weights: Logits (L,) of the mix of variant B, coarse -> fine. None: equal weights.
        scale: Factor on the scores. None: `D ** -0.5`.
        query_mask: Boolean (B, *grid), True = visible. Hidden queries are excluded from averaged
            queries; every query, hidden or not, still gets a result.
        key_mask: Boolean (B, *key_grid), True = visible. Hidden keys have no effect.
        backend: "auto", or the name of a backend, without fallback to another.
        return_selection: Also return the kept cells per level, with their scores.
        return_lse: Also return the log-sum-exp (B, *grid, N) of the scores, for
            `merge_attentions`; variant C, or one level. All further options are for variant C only.
        prefix_queries: (B, Pq, N, D), queries without a grid position; they attend to all tokens.
        prefix_keys, prefix_values: (B, P, N, D), tokens without a grid position, which all queries
            attend to.
        exact_queries: Scores of cells of all levels use the query of each token instead of the mean
            query of a cell. Closer to dense attention; costs tokens x coarsest cells more.
        lookahead: Rank cells by the log-sum-exp of their children's scores instead of their own
            score. Costs up to F times the scores.

    With variant C the heads of q may be a multiple of those of k and v (grouped queries).

    Returns:
        The result (B, *grid, N, Dv), or a tuple in this order: the result, the result of prefix
        queries (B, Pq, N, Dv) if given, with `return_selection` a tuple of `LevelSelection`,
        coarse -> fine, and with `return_lse` the log-sum-exp.

    Raises:
        ShapeError, DTypeError, OptionError: An argument is not accepted.
        BackendUnsupportedError: The requested backend cannot run this call.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 30, 40, 4, 16).unbind()
        >>> quadtree_attention(q, k, v, num_levels=3, topk=8).shape
        torch.Size([1, 30, 40, 4, 16])
    """
    q, k, v = _cast_for_autocast(q, k, v)
    prefix = Prefix(*_cast_for_autocast(prefix_queries, prefix_keys, prefix_values))
    if variant == "C" or return_lse or exact_queries or lookahead or prefix.is_given:
        return attend_map(
            q, k, v, prefix,
            num_levels=num_levels, topk=topk, variant=variant, level_weights=level_weights,
            scale=scale, query_mask=query_mask, key_mask=key_mask, backend=backend,
            return_selection=return_selection, return_lse=return_lse,
            exact_queries=exact_queries, lookahead=lookahead,
        )  # fmt: skip
    problem = make_problem(
        q, k, v,
        num_levels=num_levels, topk=topk, variant=variant, level_weights=level_weights,
        scale=scale, query_mask=query_mask, key_mask=key_mask,
    )  # fmt: skip
    with without_autocast(problem.device.type):
        out, kept = choose(backend, problem).attend(
            problem, [q], [k], [v],
            query_mask=query_mask, key_mask=key_mask, level_weights=level_weights,
            with_selection=return_selection,
        )  # fmt: skip
    return (out, _best_first(kept)) if return_selection else out


@overload
def quadtree_attention_pyramid(
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    return_selection: Literal[False] = False,
    **options: Unpack[PyramidOptions],
) -> Tensor: ...


@overload
def quadtree_attention_pyramid(
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    return_selection: Literal[True],
    **options: Unpack[PyramidOptions],
) -> tuple[Tensor, Selection]: ...


def quadtree_attention_pyramid(
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    topk: int | Sequence[int],
    variant: Variant = "B",
    level_weights: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    backend: str = "auto",
    return_selection: bool = False,
) -> Tensor | tuple[Tensor, Selection]:
    """Compute `quadtree_attention` on given pyramids.

    There is no `query_mask`, since the caller averages the queries.

    Args:
        qs: Queries (B, *grid_l, N, D), one map per level, coarse -> fine. Each map has half the
            size of the next finer one, rounded up.
        ks: Keys (B, *key_grid_l, N, D), one map per level.
        vs: Values (B, *key_grid_l, N, Dv), one map per level.
        topk, variant, level_weights, scale: As for `quadtree_attention`.
        key_mask: Boolean (B, *key_grid) of the finest map, True = visible. A coarser cell is
            visible if any of its children is.
        backend, return_selection: As for `quadtree_attention`.

    Returns:
        As `quadtree_attention`.

    Example:
        >>> maps = [torch.randn(1, 8, 10, 2, 16), torch.randn(1, 15, 20, 2, 16)]
        >>> quadtree_attention_pyramid(maps, maps, maps, topk=4).shape
        torch.Size([1, 15, 20, 2, 16])
    """
    check_levels_of_maps(qs, ks, vs)
    qs, ks, vs = (_cast_for_autocast(*levels) for levels in (qs, ks, vs))
    check_pyramids(qs, ks, vs)
    problem = make_problem(
        qs[-1], ks[-1], vs[-1],
        num_levels=len(qs), topk=topk, variant=variant, level_weights=level_weights,
        scale=scale, query_mask=None, key_mask=key_mask,
    )  # fmt: skip
    if variant == "C":
        out, kept, *_ = run_flat(
            backend, flat_problem(problem, exact_queries=False, lookahead=False), qs, ks, vs,
            prefix=Prefix(), query_mask=None, key_mask=key_mask, with_selection=return_selection,
        )  # fmt: skip
        return (out, _best_first(kept)) if return_selection else out
    with without_autocast(problem.device.type):
        out, kept = choose(backend, problem).attend(
            problem, qs, ks, vs,
            query_mask=None, key_mask=key_mask, level_weights=level_weights,
            with_selection=return_selection,
        )  # fmt: skip
    return (out, _best_first(kept)) if return_selection else out


def available_backends(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> dict[str, list[str]]:
    """Return every backend with its reasons not to run this call of `quadtree_attention`.

    An empty list means that the backend can run it; "auto" selects the first such backend.

    Args:
        q, k, v: As for `quadtree_attention`.
        **options: The options of that call; `backend` and `return_selection` have no effect.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 30, 40, 4, 16).unbind()
        >>> available_backends(q, k, v, num_levels=3, topk=8)["reference"]
        []
    """
    ignored = ("backend", "return_selection", *ONLY_C)
    asked = {k: v for k, v in options.items() if k not in ignored}
    return explain_backends(make_problem(*_cast_for_autocast(q, k, v), **asked))  # type: ignore[arg-type]


def _cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast tensors to the autocast dtype, as for PyTorch's own attention."""
    device = next((x.device.type for x in tensors if isinstance(x, Tensor)), "cpu")
    dtype = autocast_dtype(device)
    if dtype is None:
        return tensors
    casts = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in casts else x for x in tensors)


def _best_first(kept: list[Kept]) -> Selection:
    result = []
    for cells, scores in kept:
        rank = scores.masked_fill(cells[..., 0] < 0, -1)
        order = rank.sort(dim=-1, descending=True, stable=True).indices
        cells = cells.gather(-2, order[..., None].expand(cells.shape))
        result.append(LevelSelection(cells, scores.gather(-1, order).detach()))
    return tuple(result)
