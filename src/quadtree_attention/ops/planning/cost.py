# SPDX-License-Identifier: Apache-2.0
"""Cost of attention from sizes alone: FLOPs, bytes, memory, and estimated time.

FLOPs are counted exactly. Bytes and memory follow what the fused backends allocate, read and write.
Times are estimated by a small model that compares two calls.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from quadtree_attention.ops.attention.problem import Problem
from quadtree_attention.ops.attention.tree import Tree, accumulation_dtype
from quadtree_attention.ops.planning.flops import (
    attention_flops,
    backward_flops,
    candidates_per_query,
    dense_flops,
)

INDEX_BYTES = 4  # selections are int32
QUERY_BLOCK = 128  # queries that share one pass over all keys in a fused kernel

# True if the fused backend of a device copies the finest maps to tree order and the result back.
# Otherwise it reads and writes maps in place and stores only the coarser levels.
COPIES_FINEST = {"cuda": False, "cpu": True}


@dataclass(frozen=True)
class Speed:
    """Constants of the time estimate for one kind of device; in seconds, or per second.

    Dense attention takes `start + max(pairs / softmax_pairs, FLOPs / matmul_flops)`: bound by
    matrix products, or by exponentials if heads are narrow; longer if there are fewer blocks of
    queries than units. Quadtree attention takes `levels * level + gathered bytes / gather_bytes
    + coarse pairs / scan_pairs`: a fixed time per level, gathered rows, and the coarsest level,
    which scans all keys and selects. A pair is one query with one key.

    Attributes:
        machine: Machine of the measurement.
        units: Blocks of queries that dense attention processes in parallel.
        start: Fixed time of a call of dense attention.
        level: Fixed time of a level of quadtree attention.
        launch: Host time for launching the kernels of one level without a CUDA graph.
        gather_bytes: Bytes of candidates gathered and attended to.
        scan_pairs: Pairs of the coarsest level.
        softmax_pairs: Pairs of dense attention if bound by exponentials.
        matmul_flops: FLOPs of dense attention if bound by matrix products.
        copy_bytes: Bytes copied to tree order and back, in variant C.
        slowdown: Factor on the time of dense attention, by bytes per number.
        gather_slowdown: Factor on the time of gathering, by bytes per number.
    """

    machine: str
    units: int
    start: float
    level: float
    launch: float
    gather_bytes: float
    scan_pairs: float
    softmax_pairs: float
    matmul_flops: float
    copy_bytes: float
    slowdown: dict[int, float]
    gather_slowdown: dict[int, float]


# Calibrated on the forward rows of benchmarks/results/speed/ops*.json: every estimate is within
# 25 % of the measured median, eager rows of the GPU within 65 %. On the GPU, `launch` is from the
# eager rows and the rest from the rows of CUDA graphs, in bfloat16; dense attention in float32 took
# 12 times as long. `start` and `level` of the CPU are from calls on small maps. Not measured: half
# precision on the CPU, assumed as fast as float32, and float64, assumed half as fast. Backward
# takes about 2.5 times as long as forward in both, so `cheaper` holds for training, too.
SPEEDS = {
    "cuda": Speed(
        machine="an NVIDIA H200",
        units=132,
        start=10e-6,
        level=11e-6,
        launch=300e-6,
        gather_bytes=4.9e12,
        scan_pairs=9e10,
        softmax_pairs=1.85e12,
        matmul_flops=6e14,
        copy_bytes=1.5e12,  # not measured
        slowdown={2: 1, 4: 12, 8: 24},
        gather_slowdown={2: 1, 4: 1.8, 8: 1.8},  # float32 needs three products instead of one
    ),
    "cpu": Speed(
        machine="2 threads of an AMD EPYC",
        units=2,
        start=25e-6,
        level=1e-3,
        launch=0,
        gather_bytes=2.2e10,
        scan_pairs=1.15e8,
        softmax_pairs=1e9,
        matmul_flops=1e11,
        copy_bytes=3e9,
        slowdown={2: 1, 4: 1, 8: 2},
        gather_slowdown={2: 1, 4: 1, 8: 1},
    ),
}


@dataclass(frozen=True)
class Cost:
    """Cost of one call of attention.

    Attributes:
        flops: FLOPs of forward; a multiply-add counts as two.
        training_flops: FLOPs of forward and backward. Backward counts 2.5 times forward: five
            matrix products instead of two, as in flash attention.
        bytes_moved: Bytes read and written by the forward kernels. Bytes that several kernels
            read count once per kernel, cached or not.
        memory: Peak memory of forward beyond its inputs, in bytes, the result included.
        training_memory: Peak memory of forward and backward, gradients included.
        seconds: Estimated time of forward on the machine of the calibration. Ratios of these
            times carry over to other machines, the times do not.
        eager_seconds: The same if the host launches every kernel, without a CUDA graph.
    """

    flops: int
    training_flops: int
    bytes_moved: int
    memory: int
    training_memory: int
    seconds: float
    eager_seconds: float


class Bytes(NamedTuple):
    """Bytes of queries, keys and values, all heads and batch entries together."""

    q: int
    k: int
    v: int


def quadtree_cost(problem: Problem, speed: Speed) -> Cost:
    """Cost of quadtree attention by the fused backend of the device."""
    flops = sum(level_flops(problem))
    seconds = _quadtree_seconds(problem, speed)
    return Cost(
        flops=flops,
        training_flops=flops + backward_flops(flops),
        bytes_moved=_quadtree_bytes_moved(problem),
        memory=_quadtree_memory(problem),
        training_memory=_quadtree_training_memory(problem),
        seconds=seconds,
        eager_seconds=max(seconds, problem.num_levels * speed.launch),
    )


def dense_cost(problem: Problem, speed: Speed) -> Cost:
    """Cost of `scaled_dot_product_attention` over all cells, by a kernel that stores no scores."""
    queries, keys = prod(problem.query_tree.grid), prod(problem.key_tree.grid)
    flops = dense_flops(
        batch=problem.batch,
        heads=problem.num_heads,
        dim=problem.head_dim,
        value_dim=problem.value_dim,
        queries=queries,
        keys=keys,
    )
    seconds = _dense_seconds(_rows(problem) * queries * keys, flops, problem, speed)
    inputs, result = _input_bytes(problem), _result_bytes(problem)
    return Cost(
        flops=flops,
        training_flops=flops + backward_flops(flops),
        bytes_moved=inputs.q + ceil(queries / QUERY_BLOCK) * (inputs.k + inputs.v) + result,
        memory=result + _rows(problem) * queries * _wide(problem),  # and one log-sum-exp each
        training_memory=_dense_training_memory(problem),
        seconds=seconds,
        eager_seconds=seconds,
    )


def level_flops(problem: Problem) -> list[int]:
    """Forward FLOPs of quadtree attention, per level, coarse -> fine."""
    return attention_flops(
        batch=problem.batch,
        heads=problem.num_heads,
        dim=problem.head_dim,
        value_dim=problem.value_dim,
        query_tree=problem.query_tree,
        key_tree=problem.key_tree,
        topk=problem.topk,
    )


def fixed_seconds(problem: Problem, speed: Speed) -> float:
    """Part of the time of quadtree attention that does not depend on the size of the maps."""
    return problem.num_levels * speed.level


def _quadtree_seconds(problem: Problem, speed: Speed) -> float:
    if problem.num_levels == 1:  # equals dense attention
        flops = sum(level_flops(problem))
        return speed.level + _dense_seconds(_coarse_pairs(problem), flops, problem, speed)
    gathered = _gathered_bytes(problem) * speed.gather_slowdown[problem.dtype.itemsize]
    copied = 0
    if problem.variant == "C":
        copied = sum(_input_bytes(problem)) + sum(_pyramid_bytes(problem)) + _result_bytes(problem)
    return (
        fixed_seconds(problem, speed)
        + gathered / speed.gather_bytes
        + _coarse_pairs(problem) / speed.scan_pairs
        + copied / speed.copy_bytes
    )


def _dense_seconds(pairs: int, flops: int, problem: Problem, speed: Speed) -> float:
    work = max(pairs / speed.softmax_pairs, flops / speed.matmul_flops)
    queries = prod(problem.query_tree.grid_at(problem.num_levels - 1))
    blocks = _rows(problem) * ceil(queries / QUERY_BLOCK)
    # Kernels of wide dtypes have smaller blocks of queries, so the two factors do not multiply.
    slowdown = max(speed.units / max(1, blocks), speed.slowdown[problem.dtype.itemsize])
    return speed.start + work * slowdown


def saved_bytes(problem: Problem) -> int:
    """Bytes that quadtree attention saves for backward, beyond its inputs."""
    cells = _cells(problem.query_tree)
    numbers = sum(cells) if _in_tree_order(problem) else cells[0] * _kept_per_cell(problem)
    if problem.variant == "C":  # the state of every level; of the finest, its log-sum-exp
        numbers = sum(cells) + sum(cells[:-1]) * problem.value_dim
    statistics = _rows(problem) * numbers * _wide(problem)
    return sum(_pyramid_bytes(problem)) + _selection_bytes(problem) + statistics


def _kept_per_cell(problem: Problem) -> int:
    """Numbers stored per coarsest cell: a log-sum-exp and, unless it is the result, the message."""
    return 1 + (problem.value_dim if problem.num_levels > 1 else 0)


def _quadtree_memory(problem: Problem) -> int:
    return (
        sum(_pyramid_bytes(problem))
        + _selection_bytes(problem)
        + _total_bytes(problem)
        + _result_bytes(problem)
    )


def _quadtree_training_memory(problem: Problem) -> int:
    """Peak memory, reached in backward of the finest level: its gradients and all saved tensors."""
    gradients = _summed_gradients if _in_tree_order(problem) else _listed_gradients
    return saved_bytes(problem) + _result_bytes(problem) + gradients(problem)


def _summed_gradients(problem: Problem) -> int:
    """Bytes of gradients if those of keys and values are summed in the accumulation dtype."""
    finest = problem.num_levels - 1
    queries = _rows(problem) * problem.query_tree.num_cells(finest)
    keys = _rows(problem) * problem.key_tree.num_cells(finest)
    width = problem.head_dim + (problem.value_dim if _copies_finest(problem) else 0)
    sums = keys * (problem.head_dim + problem.value_dim) * _wide(problem)
    return queries * width * problem.dtype.itemsize + sums


def _listed_gradients(problem: Problem) -> int:
    """Bytes of gradients in the dtype of the inputs, with a list of queries for every key."""
    gradients = sum(_input_bytes(problem)) + sum(_pyramid_bytes(problem))
    if problem.num_levels == 1:
        return gradients + _rows(problem) * _cells(problem.query_tree)[0] * _wide(problem)
    families, queries = _cells(problem.query_tree)[-2:]
    users = families * problem.topk[-1] * (2 if problem.variant == "A" else 1) * INDEX_BYTES
    statistics = 2 * queries if problem.variant == "B" else families * problem.topk[-1]
    inherited = families * problem.value_dim
    return gradients + _rows(problem) * (users + (statistics + inherited) * _wide(problem))


def _dense_training_memory(problem: Problem) -> int:
    """Bytes of the result, three gradients, two numbers per query, and temporary tensors.

    Kernels in half precision sum dq in float32. On a GPU, kernels in float32 copy keys and values,
    so that the rows of a head are contiguous.
    """
    queries = _rows(problem) * prod(problem.query_tree.grid)
    inputs = _input_bytes(problem)
    extra = 0
    if problem.dtype.itemsize < _wide(problem):
        extra = queries * problem.head_dim * _wide(problem)
    elif problem.device.type == "cuda" and problem.num_heads > 1:
        extra = inputs.k + inputs.v
    return _result_bytes(problem) + sum(inputs) + 2 * queries * _wide(problem) + extra


def _quadtree_bytes_moved(problem: Problem) -> int:
    """Bytes of inputs, pyramids, candidates, partial results and selections."""
    every_query = _bytes_of(problem, sum(_cells(problem.query_tree)), 0).q
    passes = ceil(problem.query_tree.num_cells(0) / QUERY_BLOCK)
    coarse_keys = _rows(problem) * problem.key_tree.num_cells(0) * _row_bytes(problem)
    return (
        sum(_input_bytes(problem))
        + sum(_pyramid_bytes(problem))
        + every_query
        + passes * coarse_keys
        + _gathered_bytes(problem)
        + 2 * (_total_bytes(problem) + _selection_bytes(problem))
        + _result_bytes(problem)
    )


def _gathered_bytes(problem: Problem) -> int:
    """Bytes of candidates below the coarsest level, once per group of sibling query cells."""
    candidates = candidates_per_query(problem.key_tree, problem.topk)
    rows = sum(
        prod(problem.query_tree.grid_at(level - 1)) * candidates[level]
        for level in range(1, problem.num_levels)
    )
    return _rows(problem) * rows * _row_bytes(problem)


def _coarse_pairs(problem: Problem) -> int:
    return _rows(problem) * problem.query_tree.num_cells(0) * problem.key_tree.num_cells(0)


def _input_bytes(problem: Problem) -> Bytes:
    queries, keys = prod(problem.query_tree.grid), prod(problem.key_tree.grid)
    return _bytes_of(problem, queries, keys)


def _pyramid_bytes(problem: Problem) -> Bytes:
    """Bytes of the levels that are stored apart from the inputs, padding included."""
    stored = None if _copies_finest(problem) else -1
    queries, keys = (sum(_cells(tree)[:stored]) for tree in (problem.query_tree, problem.key_tree))
    return _bytes_of(problem, queries, keys)


def _bytes_of(problem: Problem, queries: int, keys: int) -> Bytes:
    number = _rows(problem) * problem.dtype.itemsize
    return Bytes(
        q=number * queries * problem.head_dim,
        k=number * keys * problem.head_dim,
        v=number * keys * problem.value_dim,
    )


def _result_bytes(problem: Problem) -> int:
    cells = _rows(problem) * prod(problem.query_tree.grid)
    return cells * problem.value_dim * problem.dtype.itemsize


def _total_bytes(problem: Problem) -> int:
    """Bytes of partial results; above the finest level in the accumulation dtype."""
    *coarser, finest = _cells(problem.query_tree)
    numbers = sum(coarser) * _wide(problem)
    if _copies_finest(problem):
        numbers += finest * problem.dtype.itemsize
    return _rows(problem) * problem.value_dim * numbers


def _selection_bytes(problem: Problem) -> int:
    """Bytes of the kept cells of all selecting levels and, in variant A, of their scores."""
    cells = _cells(problem.query_tree)[:-1]
    kept = sum(count * topk for count, topk in zip(cells, problem.topk, strict=True))
    each = INDEX_BYTES + (_wide(problem) if problem.variant == "A" else 0)
    return _rows(problem) * kept * each


def _rows(problem: Problem) -> int:
    return problem.batch * problem.num_heads


def _row_bytes(problem: Problem) -> int:
    """Bytes of one key and its value."""
    return (problem.head_dim + problem.value_dim) * problem.dtype.itemsize


def _wide(problem: Problem) -> int:
    """Bytes of a number in the accumulation dtype."""
    return accumulation_dtype(problem.dtype).itemsize


def _copies_finest(problem: Problem) -> bool:
    """True if the finest maps are copied to tree order; never with one level."""
    return problem.num_levels > 1 and _in_tree_order(problem)


def _in_tree_order(problem: Problem) -> bool:
    """True if the backend of the device, or variant C, copies the finest maps."""
    return COPIES_FINEST[problem.device.type] or problem.variant == "C"


def _cells(tree: Tree) -> list[int]:
    return [tree.num_cells(level) for level in range(tree.num_levels)]
