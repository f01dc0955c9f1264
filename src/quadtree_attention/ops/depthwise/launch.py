# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels of depthwise convolutions."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quadtree_attention.ops.depthwise.kernels import (
    depthwise_bwd_kernel,
    depthwise_bwd_sums_kernel,
    depthwise_bwd_weights_kernel,
    depthwise_fwd_kernel,
    pool_kernel,
)
from quadtree_attention.ops.kernel import parts_of, power_of_two

TILE = {1: 2048, 2: 2048, 3: 1024}  # numbers of a tile, by axes; neighbours are in registers
# Numbers of a tile at the coarsest level of a launch, at least one per thread of a warp: with 16,
# values handed down to children were wrong on a GPU (Triton 3.6, H200), and right in the
# interpreter.
LEAST_TILE = 32
SUMS_TILE = 1024  # with ten sums per number in registers
LARGEST_BLOCK = 128  # channels of a tile
PROGRAMS = 512  # programs that share the sums of a level, about four per multiprocessor
BLOCK_P = 16  # parts that are added up at a time


class Options(NamedTuple):
    """Options of a call, without its tensors.

    Attributes:
        level: Index of the finest level among the logits.
        act: `norms.GELU` or `norms.RELU` of the result; 0: none.
        relu: True applies a ReLU to the maps first.
    """

    level: int = 0
    act: int = 0
    relu: bool = False


def forward(
    message: Tensor | None,
    above: Tensor | None,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logits: Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the weighted sum of the convolutions of levels along the tree, plus the message.

    Args:
        message: (B, *grid, C) or None; all tensors are contiguous.
        above: Values of the parents of the coarsest level, (B, *parents, C), or None.
        values: (B, *grid_at(level), C), coarse -> fine, at most four, with three axes two.
        weights: (C, 1, 3, ...) of each level.
        biases: (C,) of each level.
        logits: (L,) of all levels; their softmax is the weight of the levels. None: one level.
        options: Options of the call.
        dtype: Dtype of the result.

    Returns:
        (B, *grid, C)
    """
    finest = values[-1]
    y = torch.empty_like(finest, dtype=dtype)
    steps, sizes, shape = len(values) - 1, _sizes(finest), _shape(finest, logits)
    tile = _tree_tile(finest, steps)
    programs = _tree_programs(finest, steps, tile)
    with torch.cuda.device_of(finest):
        depthwise_fwd_kernel[(programs,)](
            *_four(values), *_four(weights), *_four(biases), _or(logits, finest),
            _or(message, finest), _or(above, finest), y, *sizes, options.level,
            **shape, STEPS=steps, **tile, ACT=options.act, RELU=options.relu,
            HAS_MESSAGE=message is not None, HAS_ABOVE=above is not None,
        )  # fmt: skip
    return y


def backward(
    dy: Tensor,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    logits: Tensor | None,
    options: Options,
    with_above: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `forward`.

    Returns:
        Gradients of all values, concatenated fine -> coarse; of weights (levels, C, taps) and
        biases (levels, C), fine -> coarse; of logits (L,), or nothing; of `above`, or nothing.
    """
    finest, steps = values[-1], len(values) - 1
    sizes, shape, batch = _sizes(finest), _shape(finest, logits), finest.shape[0]
    channels, ndim = shape["C"], shape["NDIM"]
    cells = [prod(-(-size // 2**s) for size in sizes) for s in range(steps + 1)]
    with torch.cuda.device_of(finest):
        pooled = dy
        if steps:
            pooled = _pool(dy, steps, dy.dtype)
        dabove = dy.new_empty(0, dtype=torch.float32)
        if with_above:
            coarsest = pooled[pooled.numel() - batch * cells[-1] * channels :] if steps else dy
            dabove = _pool(coarsest.view(values[0].shape), 1, torch.float32)

        planes = 3 if ndim == 3 else 1
        block = min(power_of_two(channels, 4), 64)
        tile = {"BLOCK_C": block, "BLOCK_R": SUMS_TILE // block}
        blocks_c = parts_of(channels, block)
        most = max(1, PROGRAMS // (blocks_c * planes))
        spans = sum(min(most, batch * parts_of(count, tile["BLOCK_R"])) for count in cells)
        sums = dy.new_empty(spans, 3**ndim + 1, channels, dtype=torch.float32)
        dz = torch.empty_like(dy) if options.act else dy
        depthwise_bwd_sums_kernel[(spans * blocks_c * planes,)](
            dy, pooled, *_four(values), weights[-1], biases[-1], dz, sums, batch, *sizes,
            C=channels, NDIM=ndim, STEPS=steps, **tile, most_spans=most, ACT=options.act,
            RELU=options.relu,
        )  # fmt: skip

        programs = (steps + 1) * (3**ndim + 1) * blocks_c
        dweight = weights[0].new_empty(steps + 1, channels, 3**ndim)
        dbias = biases[0].new_empty(steps + 1, channels)
        gains = sums.new_empty(programs)
        depthwise_bwd_weights_kernel[(programs,)](
            sums, *_four(weights), *_four(biases), _or(logits, sums), dweight, dbias, gains, batch,
            *sizes, options.level, **shape, STEPS=steps, **tile, BLOCK_P=BLOCK_P, most_spans=most,
        )  # fmt: skip

        dx = finest.new_empty(batch * sum(cells) * channels)
        dlogits = finest.new_empty(0) if logits is None else torch.empty_like(logits)
        block_c = min(power_of_two(channels, 4), LARGEST_BLOCK)
        rows = TILE[ndim] // block_c
        tiles = sum(batch * parts_of(count, rows) for count in cells) * parts_of(channels, block_c)
        gains_of_level = (3**ndim + 1) * blocks_c
        depthwise_bwd_kernel[(tiles,)](
            dz, pooled, finest, *_four(weights), _or(logits, dx), gains, dlogits, dx, batch, *sizes,
            options.level, **shape, STEPS=steps, BLOCK_C=block_c, BLOCK_R=rows,
            gains_of_level=gains_of_level, BLOCK_G=power_of_two(gains_of_level), RELU=options.relu,
        )  # fmt: skip
    return dx, dweight, dbias, dlogits, dabove


def _pool(dy: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Sum the cells below each cell of coarser levels, fine -> coarse in one array."""
    batch, channels, sizes = dy.shape[0], dy.shape[-1], _sizes(dy)
    cells = sum(prod(-(-size // 2**s) for size in sizes) for s in range(1, steps + 1))
    pooled = dy.new_empty(batch * cells * channels, dtype=dtype)
    tile = _tree_tile(dy, steps)
    pool_kernel[(_tree_programs(dy, steps, tile),)](
        dy, pooled, batch, *sizes, C=channels, NDIM=dy.ndim - 2, STEPS=steps, **tile
    )
    return pooled


def _sizes(x: Tensor) -> list[int]:
    """Return the sizes of a grid padded to three axes."""
    return [*(1,) * (5 - x.ndim), *x.shape[1:-1]]


def _shape(x: Tensor, logits: Tensor | None) -> dict[str, Any]:
    levels = 0 if logits is None else len(logits)
    return {"C": x.shape[-1], "NDIM": x.ndim - 2, "LEVELS": levels, "BLOCK_L": power_of_two(levels)}


def _tree_tile(x: Tensor, steps: int) -> dict[str, int]:
    cells, numbers = 2 ** ((x.ndim - 2) * steps), TILE[x.ndim - 2]
    assert numbers // cells >= LEAST_TILE
    block = min(power_of_two(x.shape[-1], 4), LARGEST_BLOCK, numbers // cells)
    return {"ROOTS": numbers // (cells * block), "BLOCK_C": block}


def _tree_programs(x: Tensor, steps: int, tile: dict[str, int]) -> int:
    batch, *grid, channels = x.shape
    roots = prod(-(-size // 2**steps) for size in grid)
    return batch * parts_of(roots, tile["ROOTS"]) * parts_of(channels, tile["BLOCK_C"])


def _four(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors fine -> coarse, padded to the four that kernels take."""
    found = list(reversed(tensors))
    return found + found[:1] * (4 - len(found))


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return x, or as placeholder a tensor that the kernel does not read."""
    return other if x is None else x
