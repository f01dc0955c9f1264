# SPDX-License-Identifier: Apache-2.0
"""Kernels of a learned value pyramid, and their launches: norm, activation and linear layer."""

from typing import Any

import torch
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
    map_norm_bwd_kernel,
    moments_of,
    slope,
    statistics,
    store_moments,
    tile_of,
)

ROWS = 64  # of a tile
CHANNELS = 64  # channels of a tile of results
STEP = 32  # channels that are read at a time
MOST_TILES = 1024  # maximum tiles of a map, whose moments every program of the next step adds


@triton.jit
def rows_of_child(o_row, m_row, i_child, size_0, size_1, above_1, CHILDREN: tl.constexpr):
    """Row of a child of each parent, and a mask of children on the grid."""
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
    p_x, p_y, p_weight, p_bias, p_moments, p_matrix, p_offset, p_new_moments, p_stats,
    rows_out, size_0, size_1, above_1, parts, eps, C,
    CHILDREN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, WITH_MOMENTS: tl.constexpr,
):  # fmt: skip
    """`linear(activation(norm(x)))` of cells, or of the concatenated children of a cell.

    Also mean and reciprocal standard deviation of the map, and with `WITH_MOMENTS` the moments of
    this tile of the result.
    """
    blocks, blocks_n = tl.cdiv(rows_out, BLOCK_R), tl.cdiv(C, BLOCK_N)
    i_map, i_part = map_and_part(blocks * blocks_n)
    i_n, i_block = i_part // blocks, i_part % blocks
    o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row, m_n = o_row < rows_out, o_n < C
    cells = size_0 * size_1
    p_x += i_map * cells * C
    mean, rstd = statistics(p_moments + i_map * parts * 3, parts, eps)
    if i_part == 0:
        tl.store(p_stats + i_map * 2, mean)
        tl.store(p_stats + i_map * 2 + 1, rstd)
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
            b_x = tl.where(m_x, b_x, 0.0).to(p_y.dtype.element_ty)  # zeros past the edge
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


@kernel
def norm_linear_bwd_kernel(
    p_dy, p_x, p_weight, p_bias, p_stats, p_matrix, p_activated, p_dz, p_sums,
    rows_out, size_0, size_1, above_1, C,
    CHILDREN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recomputed input of the linear layer, and the gradient before the activation.

    Also the partial sums over the rows of this tile for the gradients of the norm's weight and
    bias, and of the offset.
    """
    blocks, blocks_n = tl.cdiv(rows_out, BLOCK_R), tl.cdiv(C, BLOCK_N)
    i_map, i_part = map_and_part(blocks * blocks_n * CHILDREN)
    i_child, i_tile = i_part % CHILDREN, i_part // CHILDREN
    i_n, i_block = i_tile // blocks, i_tile % blocks
    o_row = i_block * BLOCK_R + tl.arange(0, BLOCK_R)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row, m_n = o_row < rows_out, o_n < C
    cells = size_0 * size_1
    p_x += i_map * cells * C
    p_dz += i_map * cells * C
    p_dy += i_map * rows_out * C
    p_activated += i_map * rows_out * C * CHILDREN + i_child * C
    mean, rstd = tl.load(p_stats + i_map * 2), tl.load(p_stats + i_map * 2 + 1)
    b_grad = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for i_k in range(0, C, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < C
        m_dy = m_row[:, None] & m_k[None, :]
        b_dy = tl.load(entries(p_dy, o_row, o_k, C), mask=m_dy, other=0.0)
        p_part = p_matrix + o_k[:, None] * (CHILDREN * C) + (i_child * C + o_n)[None, :]
        b_matrix = tl.load(p_part, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_grad = tl.dot(b_dy, b_matrix.to(b_dy.dtype), b_grad, input_precision=PRECISION)
    o_from, m_from = rows_of_child(o_row, m_row, i_child, size_0, size_1, above_1, CHILDREN)
    m_x = m_from[:, None] & m_n[None, :]
    b_x = tl.load(entries(p_x, o_from, o_n, C), mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.where(m_x, (b_x - mean) * rstd, 0.0)
    b_weight = tl.load(p_weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_z = b_x * b_weight[None, :] + b_bias[None, :]
    b_y = tl.where(m_x, activated(b_z, ACT), 0.0)  # zeros past the edge
    m_y = m_row[:, None] & m_n[None, :]
    p_activated = entries(p_activated, o_row, o_n, C * CHILDREN)
    tl.store(p_activated, b_y.to(p_activated.dtype.element_ty), mask=m_y)
    b_grad = tl.where(m_x, b_grad * slope(b_z, ACT), 0.0)
    tl.store(entries(p_dz, o_from, o_n, C), b_grad.to(p_dz.dtype.element_ty), mask=m_x)
    p_sums += ((i_map * blocks + i_block) * CHILDREN + i_child) * 3 * C + o_n
    tl.store(p_sums, tl.sum(b_grad * b_x, axis=0), mask=m_n)
    tl.store(p_sums + C, tl.sum(b_grad, axis=0), mask=m_n)
    m_once = m_y & (o_n * 0 + i_child == 0)[None, :]
    b_dy = tl.load(entries(p_dy, o_row, o_n, C), mask=m_once, other=0.0).to(tl.float32)
    tl.store(p_sums + 2 * C, tl.sum(b_dy, axis=0), mask=m_n)


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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `linear(activation(norm(x)))` with the norm over each whole map.

    Args:
        x: Maps (B, Y, X, C), contiguous, with at least one cell.
        moments: Moments of the parts of each map, (B, parts, 3).
        weight: Weight of the norm, (C,).
        bias: Bias of the norm, (C,).
        matrix: Weight of the linear layer, (C, C), or (C, 4 * C) by parent.
        offset: Bias of the linear layer, (C,).
        eps: Added to the variance.
        act: `norms.GELU` or `norms.RELU`.
        by_parent: Concatenate the children of a cell, with zero padding.
        with_moments: Return the moments of the result, too.
        dtype: Dtype of the matrix product and the result; None: dtype of x.

    Returns:
        (B, Y, X, C), or (B, (Y + 1) // 2, (X + 1) // 2, C) by parent; its moments, empty without
        `with_moments`; mean and reciprocal standard deviation of each map, (B, 2).
    """
    batch, channels, dtype = x.shape[0], x.shape[-1], dtype or x.dtype
    sizes, children = _sizes(x, by_parent)
    rows_out, tile = sizes[0], _tile(channels, dtype)
    y = x.new_empty(batch, *_grid_out(x, by_parent), channels, dtype=dtype)
    tiles = parts_of(rows_out, ROWS) * parts_of(channels, tile["BLOCK_N"])
    by_tile = with_moments and tiles <= MOST_TILES
    new_moments = moments.new_empty(batch, tiles if by_tile else 0, 3)
    stats = moments.new_empty(batch, 2)
    with torch.cuda.device_of(x):
        norm_linear_kernel[(batch * tiles,)](
            x, y, weight, bias, moments, matrix, offset, new_moments, stats,
            *sizes, moments.shape[1], eps, channels, CHILDREN=children, ACT=act,
            WITH_MOMENTS=by_tile, **tile,
            num_stages=2,  # so that a tile of float32 fits into any GPU's shared memory
        )  # fmt: skip
        if with_moments and not by_tile:
            new_moments = moments_of(y.flatten(1, 2))
    return y, new_moments, stats


def norm_linear_backward(
    dy: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrix: Tensor,
    act: int,
    *,
    by_parent: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `norm_linear`; all tensors are contiguous.

    Returns:
        Gradients of x; of the norm's weight and bias and of the offset, (3, C) float32; of the
        matrix, in float32 if the matrix product supports it.
    """
    batch, channels = x.shape[0], x.shape[-1]
    sizes, children = _sizes(x, by_parent)
    rows_out, tile = sizes[0], _tile(channels, dy.dtype)
    blocks = parts_of(rows_out, ROWS)
    programs = batch * blocks * parts_of(channels, tile["BLOCK_N"]) * children
    activated = dy.new_empty(batch * rows_out, children * channels)
    dz, dx = torch.empty_like(x), torch.empty_like(x)
    sums = stats.new_empty(batch, blocks * children, 3, channels)
    with torch.cuda.device_of(x):
        norm_linear_bwd_kernel[(programs,)](
            dy, x, weight, bias, stats, matrix, activated, dz, sums, *sizes, channels,
            CHILDREN=children, ACT=act, **tile, num_stages=2,
            num_warps=8 if tile["BLOCK_N"] == CHANNELS else 4,  # else float32 spills registers
        )  # fmt: skip
        by_map = sums.sum(dim=1)  # (B, 3, C)
        cells, rows = x.shape[1] * x.shape[2], tile_of(channels)
        map_norm_bwd_kernel[(batch * parts_of(cells, rows["BLOCK_R"]),)](
            dz, x, dx, weight, bias, stats, by_map, cells, cells, 0, 3 * channels, channels,
            ACT=0, BY_PARENT=False, **rows,
        )  # fmt: skip
        rows_of_dy = dy.view(-1, channels)
        wide = {"out_dtype": torch.float32} if dy.is_cuda and dy.itemsize == 2 else {}
        dmatrix = torch.mm(rows_of_dy.t(), activated, **wide)
        dboth = by_map[0] if batch == 1 else by_map.sum(dim=0)
    return dx, dboth, dmatrix


def _grid_out(x: Tensor, by_parent: bool) -> list[int]:
    return [(size + 1) // 2 if by_parent else size for size in x.shape[1:-1]]


def _sizes(x: Tensor, by_parent: bool) -> tuple[list[int], int]:
    """Return rows of the result, sides of the map and columns of the result; children of a cell."""
    above = _grid_out(x, by_parent)
    return [above[0] * above[1], *x.shape[1:-1], above[1]], 4 if by_parent else 1


def _tile(channels: int, dtype: torch.dtype) -> dict[str, Any]:
    block = min(power_of_two(channels, 16), CHANNELS)
    return {
        "BLOCK_R": ROWS, "BLOCK_K": min(STEP, block), "BLOCK_N": block,
        "PRECISION": precision(dtype),
    }  # fmt: skip
