# SPDX-License-Identifier: Apache-2.0
"""Variant C: the functions behind `quadtree_attention(variant="C")`, and `quadtree_sdpa`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import log2, prod
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.ops.attention.base import Kept
from quadtree_attention.ops.attention.flat.backends import FLAT
from quadtree_attention.ops.attention.flat.forest import Forest
from quadtree_attention.ops.attention.flat.merge import merge_attentions
from quadtree_attention.ops.attention.flat.walk import FlatBackend, FlatProblem, attend
from quadtree_attention.ops.attention.problem import (
    Problem,
    Variant,
    check_depth,
    check_levels,
    check_topk,
    check_variant,
    effective_topk,
    make_problem,
)
from quadtree_attention.ops.attention.tree import Tree, accumulation_dtype
from quadtree_attention.ops.autocast import without_autocast
from quadtree_attention.ops.backends import choose

Grid = Sequence[int]
ONLY_C = (
    "return_lse", "prefix_queries", "prefix_keys", "prefix_values", "exact_queries", "lookahead",
)  # fmt: skip
WHOLE_LEVEL_SHARE = 4  # maximum cost of the coarsest level, as a fraction of the finest one


class Prefix(NamedTuple):
    """Tokens without a grid position: (B, P, N, D) each, or None; visible keys (B, P)."""

    queries: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    mask: Tensor | None = None

    @property
    def is_given(self) -> bool:
        return any(x is not None for x in self)


class FlatResult(NamedTuple):
    """Result, kept cells, log-sum-exp; result and log-sum-exp of the prefix queries."""

    out: Tensor
    kept: list[Kept]
    lse: Tensor
    prefix_out: Tensor | None
    prefix_lse: Tensor | None


def attend_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: Prefix,
    *,
    num_levels: int,
    topk: int | Sequence[int],
    variant: Variant,
    level_weights: Tensor | None,
    scale: float | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    backend: str,
    return_selection: bool,
    return_lse: bool,
    exact_queries: bool,
    lookahead: bool,
) -> Any:
    """Run `quadtree_attention` with variant C or `return_lse`; its docstring has the options."""
    from quadtree_attention.ops.attention.functional import _best_first

    _check_options(variant, num_levels, exact_queries or lookahead or prefix.is_given)
    if variant == "C" and _are_maps(q, k, v):
        k, v = share_heads(q, k, v, axis=-2)
    problem = make_problem(
        q, k, v,
        num_levels=num_levels, topk=topk, variant=variant, level_weights=level_weights,
        scale=scale, query_mask=query_mask, key_mask=key_mask,
    )  # fmt: skip
    prefix = Prefix(prefix.queries, *_share_prefix(prefix, q))
    check_prefix(prefix, q, v)
    result = run(
        backend, flat_problem(problem, exact_queries=exact_queries, lookahead=lookahead),
        [q], [k], [v],
        prefix=prefix, query_mask=query_mask, key_mask=key_mask, with_selection=return_selection,
    )  # fmt: skip
    results: list[Any] = [result.out]
    if result.prefix_out is not None:
        results.append(result.prefix_out)
    if return_selection:
        results.append(_best_first(result.kept))
    if return_lse:
        results.append(result.lse)
    return results[0] if len(results) == 1 else tuple(results)


def _check_options(variant: str, num_levels: int, only_c: bool) -> None:
    check_variant(variant)
    if variant == "C":
        return
    if only_c:
        raise OptionError(
            "prefix tokens, exact_queries and lookahead belong to variant 'C', got them with "
            f"{variant=}; pass variant='C' or leave them out"
        )
    if num_levels != 1:
        raise OptionError(
            f"return_lse needs variant 'C' or one level, got {variant=} with {num_levels=}; "
            "the levels of 'A' and 'B' have no common softmax"
        )


def _share_prefix(prefix: Prefix, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if prefix.keys is None or prefix.values is None or not _are_maps(prefix.keys, prefix.values):
        return prefix.keys, prefix.values
    return share_heads(q, prefix.keys, prefix.values, axis=-2)


def _are_maps(*tensors: Any) -> bool:
    """Return True for tensors with heads; later checks raise errors for others."""
    return all(isinstance(x, Tensor) and x.ndim >= 4 for x in tensors)


def flat_problem(
    problem: Problem, *, exact_queries: bool, lookahead: bool, pooled: bool = True
) -> FlatProblem:
    """Create a problem of variant C from a checked problem."""
    return FlatProblem(
        **{**vars(problem), "variant": "C"},
        exact_queries=exact_queries, lookahead=lookahead, pooled=pooled,
    )  # fmt: skip


def share_heads(q: Tensor, k: Tensor, v: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Repeat the heads of k and v so that groups of query heads share one.

    Raises:
        ShapeError: The query heads are not a multiple of the key heads.
    """
    heads, shared = q.shape[axis], k.shape[axis]
    if heads == shared or k.shape[axis] != v.shape[axis]:
        return k, v
    if shared == 0 or heads % shared:
        raise ShapeError(
            f"the heads of q must be a multiple of those of k and v, got {heads} and {shared}; "
            "grouped queries share a key head among neighbouring query heads"
        )
    groups = heads // shared
    return k.repeat_interleave(groups, dim=axis), v.repeat_interleave(groups, dim=axis)


def check_prefix(prefix: Prefix, q: Tensor, v: Tensor) -> None:
    """Check prefix tensors (B, P, N, D) against maps (B, *grid, N, D).

    Raises:
        OptionError: Keys are given without values, or values without keys.
        ShapeError, DTypeError: A tensor does not fit the maps.
    """
    if (prefix.keys is None) != (prefix.values is None):
        given, missing = ("keys", "values") if prefix.values is None else ("values", "keys")
        raise OptionError(
            f"prefix_keys and prefix_values belong together, got prefix_{given} alone; "
            f"pass prefix_{missing} too"
        )
    for name, x, width in (
        ("prefix_queries", prefix.queries, q.shape[-1]),
        ("prefix_keys", prefix.keys, q.shape[-1]),
        ("prefix_values", prefix.values, v.shape[-1]),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype != q.dtype or x.device != q.device:
            got = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise DTypeError(f"{name} must be {q.dtype} on {q.device} as q is, got {got}; cast it")
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (q.shape[0], q.shape[-2], width):
            raise ShapeError(
                f"{name} must be (batch, tokens, heads, dim), that is ({q.shape[0]}, P, "
                f"{q.shape[-2]}, {width}), got {name}.shape={tuple(x.shape)}; prefix tokens have "
                "no grid axes"
            )
    tokens = [x.shape[1] for x in (prefix.keys, prefix.values) if x is not None]
    if len(set(tokens)) > 1:
        raise ShapeError(
            f"prefix_keys and prefix_values must hold the same tokens, got {tokens[0]} and "
            f"{tokens[1]}; pass one value per key"
        )


def run(
    backend: str,
    problem: FlatProblem,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    prefix: Prefix,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_selection: bool,
) -> FlatResult:
    """Run attention of grid and prefix tokens; `backend` is a name or "auto"."""
    chosen = FLAT[choose(backend, problem).name]
    with without_autocast(problem.device.type):
        return _run(
            chosen, problem, q, k, v,
            prefix=prefix, query_mask=query_mask, key_mask=key_mask, with_selection=with_selection,
        )  # fmt: skip


def _run(
    backend: FlatBackend,
    problem: FlatProblem,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    prefix: Prefix,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_selection: bool,
) -> FlatResult:
    out, lse, kept = attend(
        backend, problem, q, k, v,
        query_mask=query_mask, key_mask=key_mask, with_selection=with_selection,
    )  # fmt: skip
    if prefix.keys is not None and prefix.values is not None and prefix.keys.shape[1]:
        rows = q[-1].flatten(1, -3).transpose(1, 2)  # (B, N, T, D)
        keys, values = prefix.keys.transpose(1, 2), prefix.values.transpose(1, 2)
        part, part_lse = dense(rows, keys, values, prefix.mask, problem.scale)
        part = part.transpose(1, 2).reshape(out.shape)
        out, lse = merge_attentions([out, part], [lse, part_lse.transpose(1, 2).reshape(lse.shape)])
    prefix_out = prefix_lse = None
    if prefix.queries is not None:
        prefix_out, prefix_lse = _attend_densely(problem, k[-1], v[-1], prefix, key_mask)
    return FlatResult(out, kept, lse, prefix_out, prefix_lse)


def _attend_densely(
    problem: FlatProblem, k: Tensor, v: Tensor, prefix: Prefix, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of prefix queries to all tokens: (B, Pq, N, Dv), log-sum-exp (B, Pq, N)."""
    assert prefix.queries is not None
    keys, values = (x.flatten(1, -3).transpose(1, 2) for x in (k, v))  # (B, N, T, D)
    mask = None if key_mask is None else key_mask.flatten(1)
    queries = prefix.queries.transpose(1, 2)
    parts = [dense(queries, keys, values, mask, problem.scale)]
    if prefix.keys is not None and prefix.values is not None and prefix.keys.shape[1]:
        first = (prefix.keys.transpose(1, 2), prefix.values.transpose(1, 2))
        parts.append(dense(queries, *first, prefix.mask, problem.scale))
    out, lse = merge_attentions(*zip(*parts, strict=True))
    return out.transpose(1, 2), lse.transpose(1, 2)


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run full attention (B, N, T, D) of few queries or few keys, with its log-sum-exp (B, N, T).

    Args:
        mask: Visible keys (B, S), or None.
    """
    dtype = accumulation_dtype(q.dtype)
    if mask is not None:  # hidden tokens have no effect, even if NaN
        k, v = (torch.where(mask[:, None, :, None], x, 0) for x in (k, v))
    logits = (q.to(dtype) * scale) @ k.to(dtype).mT
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    high = logits.detach().amax(dim=-1, keepdim=True)
    high = high.masked_fill(high == -torch.inf, 0)
    weights = (logits - high).exp()
    total = weights.sum(dim=-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    lse = (high + total.log()).masked_fill(nothing, -torch.inf)
    return (weights @ v.to(dtype) / total).to(q.dtype), lse.squeeze(-1)


def quadtree_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid | Sequence[Grid],
    key_grid: Grid | Sequence[Grid] | None = None,
    topk: int | Sequence[int] = 16,
    num_levels: int | None = None,
    prefix: int = 0,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    exact_queries: bool = False,
    lookahead: bool = False,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Variant C of quadtree attention with the arguments of `scaled_dot_product_attention`.

    The sequence consists of `prefix` tokens without a grid position (class, register, camera
    tokens), followed by the tokens of one grid, or of several concatenated grids (images or
    frames), in row-major order. Queries select from the cells of all grids. Every query attends to
    the prefix, and prefix queries attend to all tokens. If `topk` is at least the number of
    candidates, the result equals `scaled_dot_product_attention`.

    Args:
        q: Queries (B, N, T, D), T = prefix + tokens of the grids.
        k: Keys (B, Nk, S, D); N is a multiple of Nk.
        v: Values (B, Nk, S, Dv).
        grid: Size of the query grid, (H, W) for example, or a list of sizes.
        key_grid: The same for keys and values. None: `grid`.
        topk: Cells that each query cell keeps per level: one number, or one per selecting level.
        num_levels: Levels of the trees. None: chosen so that the coarsest level is cheap.
        prefix: Number of prefix tokens of q, k and v.
        scale: Factor on the scores. None: `D ** -0.5`.
        key_mask: Boolean (B, S), True = visible.
        exact_queries, lookahead, backend, return_lse: As for `quadtree_attention`.

    Returns:
        The result (B, N, T, Dv); with `return_lse`, a pair of it and the log-sum-exp (B, N, T).

    Raises:
        ShapeError, DTypeError, OptionError: An argument is not accepted.
        BackendUnsupportedError: The requested backend cannot run this call.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 4, 1 + 30 * 40, 16).unbind()
        >>> quadtree_sdpa(q, k, v, grid=(30, 40), prefix=1, topk=8).shape
        torch.Size([1, 4, 1201, 16])
    """
    from quadtree_attention.ops.attention.functional import _cast_for_autocast

    q, k, v = _cast_for_autocast(q, k, v)
    grids = as_grids("grid", grid)
    key_grids = grids if key_grid is None else as_grids("key_grid", key_grid)
    _check_sequences(q, k, v, prefix, grids, key_grids)
    levels = default_levels(grids, key_grids, topk) if num_levels is None else num_levels
    check_levels(levels)
    check_depth(levels, *grids, *key_grids)
    k, v = share_heads(q, k, v, axis=1)
    mask = _mask_of_grid(key_mask, k, prefix)
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    first = Prefix()
    if prefix:
        shown = None if key_mask is None else key_mask[:, :prefix]
        queries, keys, values = (x[:, :prefix] for x in heads_last)
        first = Prefix(queries, keys, values, shown)
    maps = [
        x[:, prefix:] if len(sizes) > 1 else x[:, prefix:].unflatten(1, sizes[0])
        for x, sizes in zip(heads_last, (grids, key_grids, key_grids), strict=True)
    ]
    if mask is not None and len(key_grids) == 1:
        mask = mask.unflatten(1, key_grids[0])
    if len(grids) == 1 != len(key_grids):  # both sides get one token axis, or both grid axes
        maps[0] = maps[0].flatten(1, -3)
    if len(key_grids) == 1 != len(grids):
        maps[1:] = [x.flatten(1, -3) for x in maps[1:]]
        mask = None if mask is None else mask.flatten(1)
    single = len(grids) == len(key_grids) == 1
    problem = make_problem(
        *maps, num_levels=1, topk=1, variant="C", scale=scale, key_mask=mask
    )  # levels were checked for each grid
    trees = [
        Tree(sizes[0], levels) if single else Forest.of(sizes, levels)
        for sizes in (grids, key_grids)
    ]
    kept = effective_topk(check_topk(topk, levels), trees[1])
    problem = replace(problem, query_tree=trees[0], key_tree=trees[1], topk=kept)
    flat = flat_problem(problem, exact_queries=exact_queries, lookahead=lookahead)
    result = run(
        backend, flat, [maps[0]], [maps[1]], [maps[2]],
        prefix=first, query_mask=None, key_mask=mask, with_selection=False,
    )  # fmt: skip
    out = result.out.flatten(1, -3)  # (B, T, N, Dv)
    if result.prefix_out is not None:
        out = torch.cat([result.prefix_out, out], dim=1)
    out = out.transpose(1, 2)
    if not return_lse:
        return out
    lse = result.lse.flatten(1, -2).transpose(1, 2)
    if result.prefix_lse is not None:
        lse = torch.cat([result.prefix_lse.transpose(1, 2), lse], dim=2)
    return out, lse


def default_levels(
    grids: Sequence[Grid], key_grids: Sequence[Grid], topk: int | Sequence[int]
) -> int:
    """Return the minimum number of levels whose coarsest level is cheap relative to the finest."""
    if isinstance(topk, Sequence):
        return len(topk) + 1
    (topk,) = check_topk(topk, 2)
    ndim = len(grids[0])
    queries, keys = (sum(prod(grid) for grid in sizes) for sizes in (grids, key_grids))
    for levels in range(1, 16):
        cells = 2 ** (ndim * (levels - 1))
        fine = queries * topk * 2**ndim
        if queries * keys / cells**2 * WHOLE_LEVEL_SHARE <= fine:
            break
    longest = max(side for grid in (*grids, *key_grids) for side in grid)
    return max(1, min(levels, int(log2(longest)) + 1))


def as_grids(name: str, grid: Grid | Sequence[Grid]) -> list[tuple[int, ...]]:
    """Return one or several grids as a list of tuples.

    Raises:
        OptionError: The grids are not sizes of 1 to 3 axes each.
    """
    sizes: list[tuple[int, ...]] = []
    with suppress(TypeError):
        entries: list[Any] = list(grid)
        nested = bool(entries) and not isinstance(entries[0], Integral)
        sizes = [tuple(one) for one in (entries if nested else [entries])]
    same = bool(sizes) and all(len(one) == len(sizes[0]) for one in sizes)
    sides = [side for one in sizes for side in one]
    if not same or not 1 <= len(sizes[0]) <= 3 or not all(map(is_whole, sides)):
        raise OptionError(
            f"{name} must be the size of a grid with 1, 2 or 3 axes, such as (32, 48), or a list "
            f"of sizes with the same number of axes, got {grid!r}"
        )
    return [tuple(int(side) for side in one) for one in sizes]


def is_whole(value: Any, least: int = 1) -> bool:
    """Return True for an integer, also of NumPy, of at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _check_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: int,
    grids: list[tuple[int, ...]],
    key_grids: list[tuple[int, ...]],
) -> None:
    if not is_whole(prefix, 0):
        raise OptionError(f"prefix must be a number of tokens, 0 or more, got {prefix=}")
    if len(grids[0]) != len(key_grids[0]):
        raise OptionError(
            f"grid and key_grid must have the same number of axes, got {grids} and {key_grids}"
        )
    for name, x, option, sizes in (
        ("q", q, "grid", grids),
        ("k", k, "key_grid", key_grids),
        ("v", v, "key_grid", key_grids),
    ):
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} must be a tensor (batch, heads, tokens, dim), got {got}")
        expected = prefix + sum(prod(one) for one in sizes)
        if x.shape[2] != expected:
            shown = " + ".join("x".join(map(str, one)) for one in sizes)
            raise ShapeError(
                f"{name} must have prefix + {option} = {prefix} + {shown} = {expected} tokens, got "
                f"{x.shape[2]}: {name}.shape={tuple(x.shape)}; set prefix and {option} to match"
            )


def _mask_of_grid(key_mask: Tensor | None, k: Tensor, prefix: int) -> Tensor | None:
    """Return the part of a mask (B, S) on the grid."""
    if key_mask is None:
        return None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        got = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise DTypeError(f"key_mask must be a bool tensor with True = visible, got {got}")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ShapeError(
            f"key_mask must be (batch, tokens of k), that is {(k.shape[0], k.shape[2])}, got "
            f"key_mask.shape={tuple(key_mask.shape)}"
        )
    return key_mask[:, prefix:]
