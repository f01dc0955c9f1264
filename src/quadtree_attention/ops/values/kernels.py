# SPDX-License-Identifier: Apache-2.0
"""The kernel of a learned value pyramid, and its launches: norm, activation and linear layer."""

import triton
import triton.language as tl
from torch import Tensor

from quadtree_attention.ops.kernel import (
    entries,
    kernel,
    parts_of,
    power_of_two,
    precision,
    quotient,
)
from quadtree_attention.ops.norms.kernels import (
    activated,
    map_and_part,
    moments_of,
    statistics,
    store_moments,
)

ROWS = 64  # of a tile
CHANNELS = 64  # of a tile of results
STEP = 32  # channels that are read at a time
MOST_TILES = 1024  # of a map, whose moments every program of the next step adds up


@triton.jit
def rows_of_child(o_row, m_row, i_child, size_0, size_1, above_1, CHILDREN: tl.constexpr):
    """Where a child of each parent lies, and which of them are on the grid."""
    o_from, m_from = o_row, m_row
    if CHILDREN > 1:
        i_0 = quotient(o_row, above_1)
        i_y = i_0 * 2 + (i_child >> 1)
        i_x = (o_row - i_0 * above_1) * 2 + (i_child & 1)
        o_from = i_y * size_1 + i_x
        m_from = m_row & (i_y < size_0) & (i_x < size_1)
    return o_from, m_from


@triton.jit
def store_moments_of_tile(p_moments, b_x, m_x):
    count = tl.sum(tl.sum(m_x.to(tl.float32), axis=1), axis=0)
    mean = tl.sum(tl.sum(tl.where(m_x, b_x, 0.0), axis=1), axis=0) / count
    b_x = tl.where(m_x, b_x - mean, 0.0)
    store_moments(p_moments, count, mean, tl.sum(tl.sum(b_x * b_x, axis=1), axis=0))


@kernel
def norm_linear_kernel(
    p_x, p_y, p_weight, p_bias, p_moments, p_matrix, p_offset, p_new_moments,
    rows_out, size_0, size_1, above_1, parts, eps,
    C: tl.constexpr, CHILDREN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    WITH_MOMENTS: tl.constexpr,
):  # fmt: skip
    """`linear(activation(norm(x)))` of cells, or of all children of a cell side by side.

    If asked to, also the moments of this tile of the result.
    """
    blocks, blocks_n = tl.cdiv(rows_out, BLOCK_R), tl.cdiv(C, BLOCK_N)
    i_map, i_part = map_and_part(blocks * blocks_n)
    i_n, i_block = i_part // blocks, i_part % blocks
    o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row, m_n = o_row < rows_out, o_n < C
    cells = size_0 * size_1
    p_x += i_map * cells * C
    mean, rstd = statistics(p_moments + i_map * parts * 3, parts, eps, BLOCK_P)
    b_y = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for i_child in range(CHILDREN):
        o_from, m_from = rows_of_child(o_row, m_row, i_child, size_0, size_1, above_1, CHILDREN)
        for i_k in range(0, C, BLOCK_K):
            o_k = i_k + tl.arange(0, BLOCK_K)
            m_k = o_k < C
            m_x = m_from[:, None] & m_k[None, :]
            b_x = tl.load(entries(p_x, o_from, o_k, C), mask=m_x, other=0.0).to(tl.float32)
            b_weight = tl.load(p_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_bias = tl.load(p_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_x = activated((b_x - mean) * rstd * b_weight[None, :] + b_bias[None, :], ACT)
            b_x = tl.where(m_x, b_x, 0.0).to(p_x.dtype.element_ty)  # nothing past the edge
            p_part = p_matrix + o_n[None, :] * (CHILDREN * C) + (i_child * C + o_k)[:, None]
            b_matrix = tl.load(p_part, mask=m_k[:, None] & m_n[None, :], other=0.0)
            b_y = tl.dot(b_x, b_matrix.to(b_x.dtype), b_y, input_precision=PRECISION)
    b_y += tl.load(p_offset + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_y = b_y.to(p_y.dtype.element_ty)
    m_y = m_row[:, None] & m_n[None, :]
    p_y += i_map * rows_out * C
    tl.store(entries(p_y, o_row, o_n, C), b_y, mask=m_y)
    if WITH_MOMENTS:
        i_tile = (i_map * blocks + i_block) * blocks_n + i_n
        store_moments_of_tile(p_new_moments + i_tile * 3, b_y.to(tl.float32), m_y)


def norm_linear(
    x: Tensor,
    moments: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    offset: Tensor,
    eps: float,
    act: int,
    *,
    by_parent: bool,
    with_moments: bool,
) -> tuple[Tensor, Tensor]:
    """`linear(activation(norm(x)))` with the norm over all of each map.

    Args:
        x: Maps (B, Y, X, C), contiguous, with at least one cell.
        moments: Of the parts of each map, (B, parts, 3).
        weight: Of the norm, (C,).
        bias: Of the norm, (C,).
        matrix: Of the linear layer, (C, C), or (C, 4 * C) by parent.
        offset: Of the linear layer, (C,).
        eps: Added to the variance.
        act: `norms.GELU` or `norms.RELU`.
        by_parent: Take all children of a cell, zeros past the edge.
        with_moments: Give the moments of the result, too.

    Returns:
        (B, Y, X, C), or (B, (Y + 1) // 2, (X + 1) // 2, C) by parent; and its moments, empty where
        nobody asked for them.
    """
    batch, size_0, size_1, channels = x.shape
    above = ((size_0 + 1) // 2, (size_1 + 1) // 2) if by_parent else (size_0, size_1)
    y = x.new_empty(batch, *above, channels)
    rows_out, block = above[0] * above[1], min(power_of_two(channels, 16), CHANNELS)
    tiles, parts = parts_of(rows_out, ROWS) * parts_of(channels, block), moments.shape[1]
    by_tile = with_moments and tiles <= MOST_TILES
    new_moments = moments.new_empty(batch, tiles if by_tile else 0, 3)
    norm_linear_kernel[(batch * tiles,)](
        x, y, weight, bias, moments, matrix, offset, new_moments,
        rows_out, size_0, size_1, above[1], parts, eps,
        C=channels, CHILDREN=4 if by_parent else 1, BLOCK_R=ROWS, BLOCK_K=min(STEP, block),
        BLOCK_N=block, BLOCK_P=power_of_two(parts), ACT=act, PRECISION=precision(x.dtype),
        WITH_MOMENTS=by_tile,
        num_stages=2,  # so that a tile of float32 fits into any GPU's shared memory
    )  # fmt: skip
    if with_moments and not by_tile:
        new_moments = moments_of(y.flatten(1, 2))
    return y, new_moments
