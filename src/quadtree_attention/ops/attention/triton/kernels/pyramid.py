# SPDX-License-Identifier: Apache-2.0
"""Kernels of the pyramids: means in forward, gradients of the means in backward.

A program reads the `F**STEPS` tokens below one cell and computes the means of all levels. It reads
a map once and writes all coarser levels; backward adds the gradients of all coarser levels to the
gradient of the map. A launch processes up to three maps of the same sizes and strides. Tokens are
sorted by child index in their parent, then by child index of the parent, and so on, so that a mean
is a sum over axis 0 in registers.
Levels are concatenated in one buffer, from fine to coarse.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.attention.triton.kernels.places import (
    child_of,
    is_on_grid,
    place_of,
    row_at,
)
from quadtree_attention.ops.kernel import kernel, load_rows, store_rows


@triton.jit
def halved(size, STEPS: tl.constexpr):
    return (size + 2**STEPS - 1) // 2**STEPS


@triton.jit
def cells_below(i_place, size_0, size_1, size_2, BITS: tl.constexpr, STEPS: tl.constexpr):
    """Row indices of the cells `STEPS` levels below a place, and their mask."""
    NDIM: tl.constexpr = len(BITS)
    o_cell = tl.arange(0, 2 ** (NDIM * STEPS))
    o_place = o_cell * 0 + i_place
    for i_step in tl.static_range(STEPS):
        o_child = (o_cell >> (NDIM * i_step)) & (2**NDIM - 1)
        o_place = child_of(o_place, o_child, BITS)
    m_cell = is_on_grid(o_place, size_0, size_1, size_2, BITS)
    return row_at(o_place, size_1, size_2, BITS), m_cell


@triton.jit
def average(b_x, b_shown, F: tl.constexpr, HIDES: tl.constexpr):
    """Means over the visible children of each cell: (M, D) -> (M / F, D)."""
    CELLS: tl.constexpr = b_x.shape[0] // F
    b_count = tl.sum(tl.reshape(b_shown, (F, CELLS)), axis=0)
    if HIDES:
        b_sum = tl.sum(tl.reshape(b_x * b_shown[:, None], (F, CELLS, b_x.shape[1])), axis=0)
        b_mean = b_sum / tl.maximum(b_count, 1.0)[:, None]
    else:
        b_mean = tl.sum(tl.reshape(b_x, (F, CELLS, b_x.shape[1])), axis=0) * (1.0 / F)
    return b_mean, tl.where(b_count > 0.0, 1.0, 0.0)


@triton.jit
def hand_down(b_grad, b_shown, F: tl.constexpr, HIDES: tl.constexpr):
    """Gradient of the children from that of their mean: (M, D) -> (M * F, D)."""
    CELLS: tl.constexpr = b_grad.shape[0]
    D: tl.constexpr = b_grad.shape[1]
    if HIDES:
        b_count = tl.sum(tl.reshape(b_shown, (F, CELLS)), axis=0)
        b_grad = b_grad / tl.maximum(b_count, 1.0)[:, None]
    else:
        b_grad = b_grad * (1.0 / F)
    b_grad = tl.reshape(tl.broadcast_to(b_grad[None, :, :], (F, CELLS, D)), (CELLS * F, D))
    return b_grad * b_shown[:, None] if HIDES else b_grad


@triton.jit
def tokens(p_shown, batch_heads, heads, size_0, size_1, size_2,
           BITS: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The cell of this program (map, map and head, batch entry, place) and the tokens below it.

    For the tokens: rows, mask of tokens on the grid, and visibility (1.0 or 0.0).
    """
    top_1, top_2 = halved(size_1, STEPS), halved(size_2, STEPS)
    top = halved(size_0, STEPS) * top_1 * top_2
    i_bn = tl.program_id(0) // top
    i_place = place_of(tl.program_id(0) - i_bn * top, top_1, top_2, BITS)
    i_map = i_bn // batch_heads
    i_bn = (i_bn - i_map * batch_heads).to(tl.int64)
    i_b = i_bn // heads
    o_row, m_row = cells_below(i_place, size_0, size_1, size_2, BITS, STEPS)
    b_shown = m_row.to(tl.float32)
    if MASKED:
        p_row = p_shown + i_b * size_0 * size_1 * size_2 + o_row
        b_shown = tl.load(p_row, mask=m_row, other=0).to(tl.float32)
    return i_map, i_bn, i_b, i_place, o_row, m_row, b_shown


@triton.jit
def map_of(p_0, p_1, p_2, i_map):
    """Select one of three maps."""
    return tl.where(i_map == 0, p_0, tl.where(i_map == 1, p_1, p_2))


@kernel
def pyramid_fwd_kernel(
    p_x0, p_x1, p_x2, p_shown, p_levels,
    batch_heads, heads, size_0, size_1, size_2, s_m, s_b, s_n, s_t,
    BITS: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HIDES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = 2 ** len(BITS)
    i_map, i_bn, i_b, i_place, o_row, m_row, b_shown = tokens(
        p_shown, batch_heads, heads, size_0, size_1, size_2, BITS, STEPS, MASKED
    )
    p_levels += i_map.to(tl.int64) * s_m
    p_x = map_of(p_x0, p_x1, p_x2, i_map) + i_b * s_b + (i_bn - i_b * heads) * s_n
    b_out = load_rows(p_x, o_row, m_row, s_t, D, BLOCK_D)
    for i_step in tl.static_range(1, STEPS + 1):
        b_mean, b_shown = average(b_out.to(tl.float32), b_shown, F, HIDES)
        b_out = b_mean.to(b_out.dtype)
        level_0, level_1 = halved(size_0, i_step), halved(size_1, i_step)
        level_2 = halved(size_2, i_step)
        o_row, m_row = cells_below(i_place, level_0, level_1, level_2, BITS, STEPS - i_step)
        cells = (level_0 * level_1 * level_2).to(tl.int64)
        store_rows(p_levels + i_bn * cells * D, b_out, o_row, m_row, D, D)
        p_levels += batch_heads * cells * D


@kernel
def pyramid_bwd_kernel(
    p_dx0, p_dx1, p_dx2, p_shown, p_dlevels,
    batch_heads, heads, size_0, size_1, size_2, s_m, s_b, s_n, s_t,
    BITS: tl.constexpr, STEPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HIDES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of all coarser levels to those of the maps."""
    F: tl.constexpr = 2 ** len(BITS)
    i_map, i_bn, i_b, i_place, o_token, m_token, b_shown = tokens(
        p_shown, batch_heads, heads, size_0, size_1, size_2, BITS, STEPS, MASKED
    )
    p_dlevels += i_map.to(tl.int64) * s_m
    for i_step in tl.static_range(1, STEPS + 1):  # to the end of the buffer, the coarsest level
        cells = (halved(size_0, i_step) * halved(size_1, i_step)).to(tl.int64)
        p_dlevels += batch_heads * cells * halved(size_2, i_step) * D
    b_grad = tl.zeros((1, BLOCK_D), tl.float32)
    for i_down in tl.static_range(STEPS):
        level_0, level_1 = halved(size_0, STEPS - i_down), halved(size_1, STEPS - i_down)
        level_2 = halved(size_2, STEPS - i_down)
        cells = (level_0 * level_1).to(tl.int64) * level_2
        p_dlevels -= batch_heads * cells * D
        o_row, m_row = cells_below(i_place, level_0, level_1, level_2, BITS, i_down)
        b_own = load_rows(p_dlevels + i_bn * cells * D, o_row, m_row, D, D, BLOCK_D)
        b_grad += b_own.to(tl.float32)
        # A cell is visible if any token below it is.
        b_here = tl.reshape(b_shown, (F ** (STEPS - 1 - i_down), F ** (i_down + 1)))
        b_here = tl.max(b_here, axis=0)
        b_grad = hand_down(b_grad, b_here, F, HIDES)
    p_dx = map_of(p_dx0, p_dx1, p_dx2, i_map) + i_b * s_b + (i_bn - i_b * heads) * s_n
    b_grad += load_rows(p_dx, o_token, m_token, s_t, D, BLOCK_D).to(tl.float32)
    store_rows(p_dx, b_grad, o_token, m_token, s_t, D)
