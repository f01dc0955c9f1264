# SPDX-License-Identifier: Apache-2.0
"""Kernels between grids and pyramids in tree order.

One program takes one coarse cell of one head with all cells below it, reads them once from the
grid, writes them in tree order, and averages its way up. The way back is the same walk downwards:
it hands the gradient of every mean to its children and writes the sum to the grid.
"""

import triton
import triton.language as tl


@triton.jit
def grid_place(i_cell, size_0, size_1, size_2, coarse_1, coarse_2,
               NDIM: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr):  # fmt: skip
    """Coordinates of the tokens below a cell, and whether they are on the grid (not padding).

    `ABOVE` levels lie over the cell, `BELOW` levels lead down to the tokens.
    """
    i_place = i_cell >> (NDIM * ABOVE)  # cell of the coarsest level, row-major
    if NDIM == 1:
        i_0, i_1, i_2 = i_place, 0, 0
    elif NDIM == 2:
        i_0, i_1, i_2 = i_place // coarse_1, i_place % coarse_1, 0
    else:
        i_0 = i_place // (coarse_1 * coarse_2)
        i_1 = i_place // coarse_2 % coarse_1
        i_2 = i_place % coarse_2
    o_token = tl.arange(0, 2 ** (NDIM * BELOW))
    o_0, o_1, o_2 = o_token * 0, o_token * 0, o_token * 0
    for i_depth in tl.static_range(ABOVE):
        i_child = i_cell >> (NDIM * (ABOVE - 1 - i_depth))
        i_0 = i_0 * 2 + ((i_child >> (NDIM - 1)) & 1)
        if NDIM > 1:
            i_1 = i_1 * 2 + ((i_child >> (NDIM - 2)) & 1)
        if NDIM > 2:
            i_2 = i_2 * 2 + (i_child & 1)
    for i_depth in tl.static_range(BELOW):
        o_child = o_token >> (NDIM * (BELOW - 1 - i_depth))
        o_0 = o_0 * 2 + ((o_child >> (NDIM - 1)) & 1)
        if NDIM > 1:
            o_1 = o_1 * 2 + ((o_child >> (NDIM - 2)) & 1)
        if NDIM > 2:
            o_2 = o_2 * 2 + (o_child & 1)
    o_0 += i_0 * 2**BELOW
    o_1 += i_1 * 2**BELOW
    o_2 += i_2 * 2**BELOW
    m_token = (o_0 < size_0) & (o_1 < size_1) & (o_2 < size_2)
    return o_0.to(tl.int64), o_1.to(tl.int64), o_2.to(tl.int64), m_token


@triton.jit
def average(b_x, b_shown, F: tl.constexpr, MASKED: tl.constexpr):
    """Means over the shown children of each cell: (M, D) -> (M / F, D)."""
    CELLS: tl.constexpr = b_x.shape[0] // F
    if MASKED:
        b_count = tl.sum(tl.reshape(b_shown, (CELLS, F)), axis=1)
        b_sum = tl.sum(tl.reshape(b_x * b_shown[:, None], (CELLS, F, b_x.shape[1])), axis=1)
        b_mean = b_sum / tl.maximum(b_count, 1.0)[:, None]
        b_shown = tl.where(b_count > 0.0, 1.0, 0.0)
    else:
        b_mean = tl.sum(tl.reshape(b_x, (CELLS, F, b_x.shape[1])), axis=1) * (1.0 / F)
        b_shown = tl.sum(tl.reshape(b_shown, (CELLS, F)), axis=1)  # not used
    return b_mean, b_shown


@triton.jit
def hand_down(b_grad, b_shown, F: tl.constexpr, MASKED: tl.constexpr):
    """Gradient of the children from that of their mean: (M, D) -> (M * F, D)."""
    CELLS: tl.constexpr = b_grad.shape[0]
    D: tl.constexpr = b_grad.shape[1]
    if MASKED:
        b_count = tl.sum(tl.reshape(b_shown, (CELLS, F)), axis=1)
        b_grad = b_grad / tl.maximum(b_count, 1.0)[:, None]
    else:
        b_grad = b_grad * (1.0 / F)
    b_grad = tl.reshape(tl.broadcast_to(b_grad[:, None, :], (CELLS, F, D)), (CELLS * F, D))
    return b_grad * b_shown[:, None] if MASKED else b_grad


@triton.jit
def store_level(p_out, b_x, i_bn, i_cell, cells, D: tl.constexpr):
    """Writes the cells of one level below `i_cell`."""
    COUNT: tl.constexpr = b_x.shape[0]
    o_d = tl.arange(0, b_x.shape[1])
    o_row = (i_bn * cells + i_cell) * COUNT + tl.arange(0, COUNT)
    tl.store(p_out + o_row[:, None] * D + o_d[None, :], b_x, mask=(o_d < D)[None, :])


@triton.jit
def load_level(p_in, i_bn, i_cell, cells, COUNT: tl.constexpr, D: tl.constexpr,
               BLOCK_D: tl.constexpr):  # fmt: skip
    """Reads the cells of one level below `i_cell`."""
    o_d = tl.arange(0, BLOCK_D)
    o_row = (i_bn * cells + i_cell) * COUNT + tl.arange(0, COUNT)
    p_rows = p_in + o_row[:, None] * D + o_d[None, :]
    return tl.load(p_rows, mask=(o_d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def pyramid_fwd_kernel(
    p_x, p_visible, p_0, p_1, p_2, p_3, p_4, p_5,
    heads, cells, size_0, size_1, size_2, coarse_1, coarse_2,
    s_b, s_0, s_1, s_2, s_n,
    NDIM: tl.constexpr, DEPTH: tl.constexpr, BELOW: tl.constexpr, STEPS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, FROM_GRID: tl.constexpr,
):  # fmt: skip
    """Writes level 0 (the tokens, unless they come in tree order) and `STEPS` coarser ones."""
    F: tl.constexpr = 2**NDIM
    TOKENS: tl.constexpr = F**BELOW
    i_bn = (tl.program_id(0) // cells).to(tl.int64)
    i_cell = tl.program_id(0) % cells
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_token = i_cell * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    o_row = (i_bn * cells * TOKENS + o_token)[:, None] * D + o_d[None, :]
    if FROM_GRID:
        o_0, o_1, o_2, m_token = grid_place(
            i_cell, size_0, size_1, size_2, coarse_1, coarse_2, NDIM, DEPTH - BELOW, BELOW
        )
        o_x = i_b * s_b + i_n * s_n + o_0 * s_0 + o_1 * s_1 + o_2 * s_2
        b_in = tl.load(p_x + o_x[:, None] + o_d[None, :], mask=m_token[:, None] & m_d, other=0.0)
        tl.store(p_0 + o_row, b_in, mask=m_d)
    else:
        b_in = tl.load(p_x + o_row, mask=m_d, other=0.0)
    b_shown = tl.full((TOKENS,), 1.0, tl.float32)
    if MASKED:
        b_shown = tl.load(p_visible + i_b * cells * TOKENS + o_token).to(tl.float32)
    b_x = b_in.to(tl.float32)
    for i_step in tl.static_range(STEPS):
        b_x, b_shown = average(b_x, b_shown, F, MASKED)
        b_out = b_x.to(b_in.dtype)
        b_x = b_out.to(tl.float32)
        if i_step == 0:
            store_level(p_1, b_out, i_bn, i_cell, cells, D)
        elif i_step == 1:
            store_level(p_2, b_out, i_bn, i_cell, cells, D)
        elif i_step == 2:
            store_level(p_3, b_out, i_bn, i_cell, cells, D)
        elif i_step == 3:
            store_level(p_4, b_out, i_bn, i_cell, cells, D)
        else:
            store_level(p_5, b_out, i_bn, i_cell, cells, D)


@triton.jit
def pyramid_bwd_kernel(
    p_dx, p_visible, p_0, p_1, p_2, p_3, p_4, p_5,
    heads, cells, size_0, size_1, size_2, coarse_1, coarse_2,
    NDIM: tl.constexpr, DEPTH: tl.constexpr, BELOW: tl.constexpr, STEPS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, FROM_GRID: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of all levels; with no coarser level this is tree order to grid."""
    F: tl.constexpr = 2**NDIM
    TOKENS: tl.constexpr = F**BELOW
    i_bn = (tl.program_id(0) // cells).to(tl.int64)
    i_cell = tl.program_id(0) % cells
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_token = i_cell * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    b_shown = tl.full((TOKENS,), 1.0, tl.float32)
    if MASKED:
        b_shown = tl.load(p_visible + i_b * cells * TOKENS + o_token).to(tl.float32)
    for i_down in tl.static_range(STEPS + 1):  # from the coarsest level, 1 cell, to the tokens
        if STEPS - i_down == 0:
            b_own = load_level(p_0, i_bn, i_cell, cells, F ** (i_down + BELOW - STEPS), D, BLOCK_D)
        elif STEPS - i_down == 1:
            b_own = load_level(p_1, i_bn, i_cell, cells, F**i_down, D, BLOCK_D)
        elif STEPS - i_down == 2:
            b_own = load_level(p_2, i_bn, i_cell, cells, F**i_down, D, BLOCK_D)
        elif STEPS - i_down == 3:
            b_own = load_level(p_3, i_bn, i_cell, cells, F**i_down, D, BLOCK_D)
        elif STEPS - i_down == 4:
            b_own = load_level(p_4, i_bn, i_cell, cells, F**i_down, D, BLOCK_D)
        else:
            b_own = load_level(p_5, i_bn, i_cell, cells, F**i_down, D, BLOCK_D)
        if i_down == 0:
            b_grad = b_own
        else:
            # A cell is shown if any token below it is.
            b_here = tl.max(tl.reshape(b_shown, (F**i_down, TOKENS // F**i_down)), axis=1)
            b_grad = hand_down(b_grad, b_here, F, MASKED) + b_own
    if FROM_GRID:
        o_0, o_1, o_2, m_token = grid_place(
            i_cell, size_0, size_1, size_2, coarse_1, coarse_2, NDIM, DEPTH - BELOW, BELOW
        )
        o_x = ((i_b * size_0 + o_0) * size_1 + o_1) * size_2 + o_2
        o_x = (o_x * heads + i_n)[:, None] * D + o_d[None, :]
        tl.store(p_dx + o_x, b_grad, mask=m_token[:, None] & m_d)
    else:
        o_x = (i_bn * cells * TOKENS + o_token)[:, None] * D + o_d[None, :]
        tl.store(p_dx + o_x, b_grad, mask=m_d)
