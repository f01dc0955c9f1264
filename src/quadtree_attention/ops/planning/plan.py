# SPDX-License-Identifier: Apache-2.0
"""Estimated cost of a call of `quadtree_attention` and of dense attention on the same maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from quadtree_attention.errors import DTypeError, OptionError, ShapeError
from quadtree_attention.ops.attention.problem import Problem, Variant, make_problem
from quadtree_attention.ops.planning.cost import (
    SPEEDS,
    Cost,
    Speed,
    dense_cost,
    fixed_seconds,
    level_flops,
    quadtree_cost,
)
from quadtree_attention.ops.planning.flops import candidates_per_query

Winner = Literal["quadtree", "dense"]

CLOSE = 1.5  # for a smaller ratio of estimated times, the advice is to measure both


@dataclass(frozen=True)
class LevelPlan:
    """One level of quadtree attention.

    Attributes:
        grid: Size of the query map.
        key_grid: Size of the key map.
        candidates: Key cells that each query cell is compared with.
        kept: Key cells that each query cell keeps for the next level; 0 at the finest level.
        flops: FLOPs of the forward pass, all heads and batch entries together.
    """

    grid: tuple[int, ...]
    key_grid: tuple[int, ...]
    candidates: int
    kept: int
    flops: int


@dataclass(frozen=True)
class Plan:
    """Cost of a call of `quadtree_attention`, and of dense attention on the same maps.

    Attributes:
        problem: Description of the call.
        levels: One entry per level, coarse -> fine.
        quadtree: Quadtree attention by the fused backend of the device.
        dense: `torch.nn.functional.scaled_dot_product_attention` by a fused kernel.
        cheaper: The faster one by device time alone, as in a CUDA graph.
        cheaper_eager: The faster one if the host launches every kernel, without a CUDA graph;
            on a CPU the same as `cheaper`.
        advice: Recommendation with its reason.
    """

    problem: str
    levels: tuple[LevelPlan, ...]
    quadtree: Cost
    dense: Cost
    cheaper: Winner
    cheaper_eager: Winner
    advice: str


def plan(
    grid: Sequence[int],
    key_grid: Sequence[int] | None = None,
    *,
    heads: int = 1,
    dim: int,
    num_levels: int,
    topk: int | Sequence[int],
    value_dim: int | None = None,
    batch: int = 1,
    variant: Variant = "B",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Plan:
    """Estimate the cost of a call of `quadtree_attention`, and of dense attention on the same maps.

    Nothing is run or allocated, and the device need not be present. FLOPs are exact for the two
    matrix products of every level; backward counts 2.5 times forward, as in flash attention: five
    products instead of two. Memory is that of the fused backends, within a few tens of percent.
    `cheaper` compares estimated times, which include gathering rows and launching the kernels of
    every level.

    Args:
        grid: Size of the query map, 1 to 3 axes.
        key_grid: Size of the key map. None: equals `grid`.
        heads: Number of heads.
        dim: Width of queries and keys, per head.
        num_levels, topk, variant: As for `quadtree_attention`.
        value_dim: Width of values, per head. None: equals `dim`.
        batch: Maps per call.
        dtype: Data type of queries, keys and values.
        device: A device of type "cpu" or "cuda", or its name.

    Raises:
        ShapeError, DTypeError, OptionError: `quadtree_attention` does not accept such tensors or
            options, or the type of device is unknown.

    Example:
        >>> cost = plan((200, 336), dim=32, num_levels=4, topk=32, device="cuda")
        >>> cost.cheaper, cost.dense.flops // cost.quadtree.flops
        ('quadtree', 364)
    """
    problem = describe_problem(
        grid, key_grid, heads=heads, dim=dim, num_levels=num_levels, topk=topk,
        value_dim=value_dim, batch=batch, variant=variant, dtype=dtype, device=device,
    )  # fmt: skip
    speed = SPEEDS[problem.device.type]
    quadtree, dense = quadtree_cost(problem, speed), dense_cost(problem, speed)
    return Plan(
        problem=str(problem),
        levels=_levels(problem),
        quadtree=quadtree,
        dense=dense,
        cheaper=_winner(quadtree.seconds, dense.seconds),
        cheaper_eager=_winner(quadtree.eager_seconds, dense.eager_seconds),
        advice=_advice(problem, quadtree, dense, speed),
    )


def describe_problem(
    grid: Sequence[int],
    key_grid: Sequence[int] | None = None,
    *,
    heads: int = 1,
    dim: int,
    num_levels: int,
    topk: int | Sequence[int],
    value_dim: int | None = None,
    batch: int = 1,
    variant: Variant = "B",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Problem:
    """Return the `Problem` of tensors of these sizes; arguments and errors are those of `plan`."""
    device = _known_device(device)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError(f"dtype must be a torch.dtype, got {dtype!r}; try torch.float32")
    queries = _sizes("grid", grid)
    keys = queries if key_grid is None else _sizes("key_grid", key_grid)
    lead, count, width = _size("batch", batch), _size("heads", heads), _size("dim", dim)
    value_width = width if value_dim is None else _size("value_dim", value_dim)
    problem = make_problem(
        _without_memory((lead, *queries, count, width), dtype),
        _without_memory((lead, *keys, count, width), dtype),
        _without_memory((lead, *keys, count, value_width), dtype),
        num_levels=num_levels,
        topk=topk,
        variant=variant,
    )
    return replace(problem, device=device)


def _known_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in SPEEDS:
        raise OptionError(
            f"device must be of type {' or '.join(SPEEDS)}, got {device!r}; choose the "
            "more similar one: FLOPs are equal on all devices, memory almost"
        )
    return found


def _sizes(name: str, grid: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise ShapeError(
            f"{name} must be a sequence of sizes, one per axis, got {grid!r}; "
            "a row of 64 cells is (64,)"
        )
    return tuple(_size(f"{name}[{axis}]", size) for axis, size in enumerate(grid))


def _size(name: str, size: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ShapeError(
            f"{name} must be an integer of at least 1, got {size!r}; "
            "pass the sizes of the tensors of the call"
        )
    return size


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the meta device."""
    if prod(shape) * dtype.itemsize >= 2**63:
        raise ShapeError(
            f"a tensor can hold less than 2**63 bytes, got the shape {shape}; pass smaller sizes"
        )
    return torch.empty(shape, dtype=dtype, device="meta")


def _levels(problem: Problem) -> tuple[LevelPlan, ...]:
    candidates = candidates_per_query(problem.key_tree, problem.topk)
    kept = (*problem.topk, 0)
    return tuple(
        LevelPlan(
            grid=problem.query_tree.grid_at(i),
            key_grid=problem.key_tree.grid_at(i),
            candidates=candidates[i],
            kept=kept[i],
            flops=flops,
        )
        for i, flops in enumerate(level_flops(problem))
    )


def _winner(quadtree: float, dense: float) -> Winner:
    return "quadtree" if quadtree < dense else "dense"


def _advice(problem: Problem, quadtree: Cost, dense: Cost, speed: Speed) -> str:
    if problem.num_levels == 1:
        return (
            "Use dense attention: with one level quadtree attention equals dense attention. "
            "Set num_levels to 2 or more to skip cells."
        )
    return f"{_verdict(problem, quadtree, dense, speed)}{_caveat(problem, quadtree, dense, speed)}"


def _verdict(problem: Problem, quadtree: Cost, dense: Cost, speed: Speed) -> str:
    estimate = f"by an estimate for {speed.machine}"
    if 1 / CLOSE < quadtree.seconds / dense.seconds < CLOSE:
        return f"Measure both: dense and quadtree attention take about equally long, {estimate}."
    if quadtree.seconds < dense.seconds:
        faster = _factor(dense.seconds, quadtree.seconds)
        return f"Use quadtree attention: it is about {faster} times as fast as dense, {estimate}."
    slower = _factor(quadtree.seconds, dense.seconds)
    why = _why_dense(problem, quadtree, dense, speed)
    return f"Use dense attention: quadtree takes about {slower} times as long, since {why}."


def _why_dense(problem: Problem, quadtree: Cost, dense: Cost, speed: Speed) -> str:
    """Return the reason why dense attention is faster: FLOPs, launches, or gathering."""
    if quadtree.flops > dense.flops:
        return "topk keeps so many cells that more scores are computed than by dense attention"
    if 2 * fixed_seconds(problem, speed) > quadtree.seconds:
        return (
            f"launching the kernels of {problem.num_levels} levels takes longer than dense "
            "attention on a map this small"
        )
    return "gathering and selecting cells takes longer than the skipped cells save"


def _caveat(problem: Problem, quadtree: Cost, dense: Cost, speed: Speed) -> str:
    """Return disadvantages of quadtree attention where it is faster."""
    if _winner(quadtree.seconds, dense.seconds) == "dense":
        return ""
    if _winner(quadtree.eager_seconds, dense.eager_seconds) == "dense":
        return (
            " This holds in a CUDA graph: without one, the host needs about "
            f"{_milliseconds(problem.num_levels * speed.launch)} to launch the kernels, and dense "
            f"attention, which takes {_milliseconds(dense.seconds)}, is faster."
        )
    if quadtree.training_memory > dense.training_memory:
        more = _factor(quadtree.training_memory, dense.training_memory)
        return f" Training needs {more} times as much memory as dense attention."
    return ""


def _factor(large: float, small: float) -> str:
    """Format a ratio with two digits."""
    ratio = large / small
    return f"{ratio:.1f}" if ratio < 10 else f"{float(f'{ratio:.2g}'):,.0f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
