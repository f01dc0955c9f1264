# SPDX-License-Identifier: Apache-2.0
"""Kernels of depthwise convolutions over 3 cells of each axis, of one map or of levels of a tree.

Maps are (B, size_0, size_1, size_2, C); missing grid axes come first and have size 1. The levels of
a tree are numbered from the finest one: level s has `halved(size, s)` cells along an axis. A single
map is a tree with one level.

With several levels, a program processes all cells below `ROOTS` cells of the coarsest level. Cells
are sorted by child index in their parent, then by child index of the parent, and so on, and last by
root, so that values of parents are broadcast to their children along axis 0.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.kernel import entries, kernel, quotient, share_of_levels
from quadtree_attention.ops.norms.kernels import activated, map_and_part, slope


@triton.jit
def halved(size, steps):
    """Cells along an axis, `steps` levels above one with `size` cells."""
    return (size + (1 << steps) - 1) >> steps


@triton.jit
def cells_at(size_0, size_1, size_2, steps):
    return halved(size_0, steps) * halved(size_1, steps) * halved(size_2, steps)


@triton.jit
def coordinates(o_row, size_1, size_2, NDIM: tl.constexpr):
    """Coordinates of rows of a map."""
    i_0, i_1, i_2 = o_row * 0, o_row * 0, o_row
    if NDIM > 1:
        i_1 = quotient(o_row, size_2)
        i_2 = o_row - i_1 * size_2
    if NDIM > 2:
        i_01 = i_1
        i_0 = quotient(i_01, size_1)
        i_1 = i_01 - i_0 * size_1
    return i_0, i_1, i_2


@triton.jit
def cells_below(
    start, size_0, size_1, size_2, ROOTS: tl.constexpr, DOWN: tl.constexpr, STEPS: tl.constexpr,
    NDIM: tl.constexpr,
):  # fmt: skip
    """Cells `DOWN` levels below roots `start` and following, which are `STEPS` above the map.

    Returns:
        Coordinates, rows, and a mask of cells on the grid.
    """
    root_1, root_2 = halved(size_1, STEPS), halved(size_2, STEPS)
    o_cell = tl.arange(0, ROOTS * 2 ** (NDIM * DOWN))
    o_root = start + o_cell % ROOTS
    m_cell = o_root < halved(size_0, STEPS) * root_1 * root_2
    i_0, i_1, i_2 = coordinates(o_root, root_1, root_2, NDIM)
    for i in tl.static_range(DOWN):
        o_child = (o_cell // (ROOTS * 2 ** (NDIM * i))) & (2**NDIM - 1)
        i_2 = i_2 * 2 + (o_child & 1)
        if NDIM > 1:
            i_1 = i_1 * 2 + ((o_child >> 1) & 1)
        if NDIM > 2:
            i_0 = i_0 * 2 + ((o_child >> 2) & 1)
    level_1, level_2 = halved(size_1, STEPS - DOWN), halved(size_2, STEPS - DOWN)
    m_cell = m_cell & (i_0 < halved(size_0, STEPS - DOWN)) & (i_1 < level_1) & (i_2 < level_2)
    return i_0, i_1, i_2, (i_0 * level_1 + i_1) * level_2 + i_2, m_cell


@triton.jit
def near(
    p_x, i_0, i_1, i_2, m_row, o_c, size_0, size_1, size_2,
    C, NDIM: tl.constexpr, RELU: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """Neighbour number `TAP` of each cell, float32; zeros past the edge."""
    i_2 += TAP % 3 - 1
    m_row = m_row & (i_2 >= 0) & (i_2 < size_2)
    o_row = i_2
    if NDIM > 1:
        i_1 += TAP // 3 % 3 - 1
        m_row = m_row & (i_1 >= 0) & (i_1 < size_1)
        o_row = i_1 * size_2 + i_2
    if NDIM > 2:
        i_0 += TAP // 9 - 1
        m_row = m_row & (i_0 >= 0) & (i_0 < size_0)
        o_row = (i_0 * size_1 + i_1) * size_2 + i_2
    m_x = m_row[:, None] & (o_c < C)[None, :]
    b_x = tl.load(entries(p_x, o_row, o_c, C), mask=m_x, other=0.0).to(tl.float32)
    if RELU:
        b_x = tl.where(b_x < 0.0, 0.0, b_x)
    return b_x


@triton.jit
def convolved(
    b_y, p_x, p_weight, i_0, i_1, i_2, m_row, o_c, size_0, size_1, size_2,
    C, NDIM: tl.constexpr, RELU: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Add the convolution at these cells; `TURNED`: with flipped taps, for the gradient."""
    TAPS: tl.constexpr = 3**NDIM
    for i_tap in tl.static_range(TAPS):
        b_x = near(p_x, i_0, i_1, i_2, m_row, o_c, size_0, size_1, size_2, C, NDIM, RELU, i_tap)
        p_tap = p_weight + o_c * TAPS + (TAPS - 1 - i_tap if TURNED else i_tap)
        b_weight = tl.load(p_tap, mask=o_c < C, other=0.0).to(tl.float32)
        b_y += b_x * b_weight[None, :]
    return b_y


@triton.jit
def share_of(p_logits, level, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Weight of a level; 1 without logits."""
    if LEVELS == 0:
        share = 1.0
    else:
        b_shares = share_of_levels(p_logits, LEVELS, BLOCK_L)
        share = tl.sum(tl.where(tl.arange(0, BLOCK_L) == level, b_shares, 0.0), axis=0)
    return share


@triton.jit
def one_of(i, p_0, p_1, p_2, p_3):
    """Return pointer i."""
    p = p_0
    if i == 1:
        p = p_1
    if i == 2:
        p = p_2
    if i == 3:
        p = p_3
    return p


@triton.jit
def handed_down(b_x, F: tl.constexpr):
    """Broadcast values of parents to their children: (M, C) -> (F * M, C)."""
    CELLS: tl.constexpr = b_x.shape[0]
    CHANNELS: tl.constexpr = b_x.shape[1]
    b_x = tl.broadcast_to(b_x[None, :, :], (F, CELLS, CHANNELS))
    return tl.reshape(b_x, (F * CELLS, CHANNELS))


@kernel
def depthwise_fwd_kernel(
    p_x0, p_x1, p_x2, p_x3, p_w0, p_w1, p_w2, p_w3, p_b0, p_b1, p_b2, p_b3,
    p_logits, p_message, p_above, p_y, size_0, size_1, size_2, level,
    C, NDIM: tl.constexpr, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr,
    STEPS: tl.constexpr, ROOTS: tl.constexpr, BLOCK_C: tl.constexpr, ACT: tl.constexpr,
    RELU: tl.constexpr, HAS_MESSAGE: tl.constexpr, HAS_ABOVE: tl.constexpr,
):  # fmt: skip
    """Weighted sum of the convolutions of all levels along the tree, plus the message."""
    tops = cells_at(size_0, size_1, size_2, STEPS)
    blocks = tl.cdiv(tops, ROOTS)
    i_map, i_part = map_and_part(blocks * tl.cdiv(C, BLOCK_C))
    start = (i_part % blocks) * ROOTS
    o_c = (i_part // blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_y = tl.zeros((ROOTS, BLOCK_C), tl.float32)
    if HAS_ABOVE:
        i_0, i_1, i_2, _, m_row = cells_below(start, size_0, size_1, size_2, ROOTS, 0, STEPS, NDIM)
        above_1, above_2 = halved(size_1, STEPS + 1), halved(size_2, STEPS + 1)
        o_above = ((i_0 >> 1) * above_1 + (i_1 >> 1)) * above_2 + (i_2 >> 1)
        p_above += i_map * cells_at(size_0, size_1, size_2, STEPS + 1) * C
        m_above = m_row[:, None] & (o_c < C)[None, :]
        b_y += tl.load(entries(p_above, o_above, o_c, C), mask=m_above, other=0.0).to(tl.float32)
    for i_down in tl.static_range(STEPS + 1):
        if i_down == STEPS:
            p_x, p_weight, p_bias = p_x0, p_w0, p_b0
        elif i_down == STEPS - 1:
            p_x, p_weight, p_bias = p_x1, p_w1, p_b1
        elif i_down == STEPS - 2:
            p_x, p_weight, p_bias = p_x2, p_w2, p_b2
        else:
            p_x, p_weight, p_bias = p_x3, p_w3, p_b3
        level_0, level_1 = halved(size_0, STEPS - i_down), halved(size_1, STEPS - i_down)
        level_2 = halved(size_2, STEPS - i_down)
        i_0, i_1, i_2, o_row, m_row = cells_below(
            start, size_0, size_1, size_2, ROOTS, i_down, STEPS, NDIM
        )
        p_x += i_map * level_0 * level_1 * level_2 * C
        b_own = tl.zeros((ROOTS * 2 ** (NDIM * i_down), BLOCK_C), tl.float32)
        b_own += tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
        b_own = convolved(
            b_own, p_x, p_weight, i_0, i_1, i_2, m_row, o_c, level_0, level_1, level_2,
            C, NDIM, RELU, False,
        )  # fmt: skip
        if i_down > 0:
            b_y = handed_down(b_y, 2**NDIM)
        b_y += b_own * share_of(p_logits, level - (STEPS - i_down), LEVELS, BLOCK_L)
    if ACT > 0:
        b_y = activated(b_y, ACT)
    m_y = m_row[:, None] & (o_c < C)[None, :]
    start_of_map = i_map * size_0 * size_1 * size_2 * C
    if HAS_MESSAGE:
        p_message = entries(p_message + start_of_map, o_row, o_c, C)
        b_y += tl.load(p_message, mask=m_y, other=0.0).to(tl.float32)
    p_y = entries(p_y + start_of_map, o_row, o_c, C)
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


@kernel
def pool_kernel(
    p_dy, p_pooled, batch, size_0, size_1, size_2,
    C, NDIM: tl.constexpr, STEPS: tl.constexpr, ROOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the cells of a map below each cell of the coarser levels, from fine to coarse."""
    F: tl.constexpr = 2**NDIM
    blocks = tl.cdiv(cells_at(size_0, size_1, size_2, STEPS), ROOTS)
    i_map, i_part = map_and_part(blocks * tl.cdiv(C, BLOCK_C))
    start = (i_part % blocks) * ROOTS
    o_c = (i_part // blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    _, _, _, o_row, m_row = cells_below(start, size_0, size_1, size_2, ROOTS, STEPS, STEPS, NDIM)
    p_dy += i_map * size_0 * size_1 * size_2 * C
    m_dy = m_row[:, None] & (o_c < C)[None, :]
    b_sum = tl.load(entries(p_dy, o_row, o_c, C), mask=m_dy, other=0.0).to(tl.float32)
    for i_step in tl.static_range(1, STEPS + 1):
        b_sum = tl.reshape(b_sum, (F, ROOTS * F ** (STEPS - i_step), BLOCK_C))
        b_sum = tl.sum(b_sum, axis=0)
        _, _, _, o_row, m_row = cells_below(
            start, size_0, size_1, size_2, ROOTS, STEPS - i_step, STEPS, NDIM
        )
        cells = cells_at(size_0, size_1, size_2, i_step).to(tl.int64)
        p_out = entries(p_pooled + i_map * cells * C, o_row, o_c, C)
        m_out = m_row[:, None] & (o_c < C)[None, :]
        tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=m_out)
        p_pooled += batch * cells * C


@triton.jit
def spans_at(batch, size_0, size_1, size_2, s, most_spans, BLOCK_R: tl.constexpr):
    """Number of programs that share the sums of a level."""
    return tl.minimum(most_spans, batch * tl.cdiv(cells_at(size_0, size_1, size_2, s), BLOCK_R))


@kernel
def depthwise_bwd_sums_kernel(
    p_dy, p_pooled, p_x0, p_x1, p_x2, p_x3, p_weight, p_bias, p_dz, p_sums,
    batch, size_0, size_1, size_2,
    C, NDIM: tl.constexpr, STEPS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, most_spans, ACT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradients of weight, bias and share over a part of a level.

    With an activation, also the gradient before it. On grids with three axes a program processes
    the taps of one plane.
    """
    TAPS: tl.constexpr = 3**NDIM
    PLANES: tl.constexpr = 3 if NDIM == 3 else 1
    blocks_c = tl.cdiv(C, BLOCK_C)
    i_part = tl.program_id(0)
    i_c = i_part % (blocks_c * PLANES)
    i_span = i_part // (blocks_c * PLANES)
    i_plane, i_c = i_c // blocks_c, i_c % blocks_c
    # The level, and its offset in `p_pooled`.
    s = i_part * 0
    i_row = i_span.to(tl.int64)
    before = i_row * 0
    for i_step in tl.static_range(1, STEPS + 1):
        spans = spans_at(batch, size_0, size_1, size_2, i_step - 1, most_spans, BLOCK_R)
        is_past = (s == i_step - 1) & (i_span >= spans)
        i_span = tl.where(is_past, i_span - spans, i_span)
        s = tl.where(is_past, i_step, s)
        if i_step > 1:
            numbers = cells_at(size_0, size_1, size_2, i_step - 1).to(tl.int64) * batch * C
            before = tl.where(is_past, before + numbers, before)
    spans = spans_at(batch, size_0, size_1, size_2, s, most_spans, BLOCK_R)
    p_x = one_of(s, p_x0, p_x1, p_x2, p_x3)
    p_grad = p_dy
    if s > 0:
        p_grad = p_pooled + before
    n_0, n_1, n_2 = halved(size_0, s), halved(size_1, s), halved(size_2, s)
    cells = n_0 * n_1 * n_2
    blocks = tl.cdiv(cells, BLOCK_R)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C

    b_zero = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7, b_8, b_bias = (
        b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero,
    )  # fmt: skip
    for i_block in range(i_span, batch * blocks, spans):
        i_map = i_block // blocks
        o_row = (i_block - i_map * blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
        m_row = o_row < cells
        start = i_map.to(tl.int64) * cells * C
        p_m = p_x + start
        i_0, i_1, i_2 = coordinates(o_row, n_1, n_2, NDIM)
        m_dy = m_row[:, None] & m_c[None, :]
        b_dy = tl.load(entries(p_grad + start, o_row, o_c, C), mask=m_dy, other=0.0)
        b_dy = b_dy.to(tl.float32)
        if ACT > 0:
            b_z = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            b_z += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
            b_z = convolved(
                b_z, p_m, p_weight, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2,
                C, NDIM, RELU, False,
            )  # fmt: skip
            b_dy *= slope(b_z, ACT)
            p_out = entries(p_dz + start, o_row, o_c, C)
            tl.store(
                p_out,
                b_dy.to(p_out.dtype.element_ty),
                mask=m_dy & (o_row * 0 + i_plane == 0)[:, None],
            )
        b_bias += b_dy
        T: tl.constexpr = 9 if NDIM == 3 else 0  # taps of the plane in the middle
        if NDIM == 3:
            i_0 += i_plane - 1
            m_row = m_row & (i_0 >= 0) & (i_0 < n_0)
        # fmt: off
        b_0 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T)
        b_1 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 1)
        b_2 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 2)
        if NDIM > 1:
            b_3 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 3)
            b_4 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 4)
            b_5 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 5)
            b_6 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 6)
            b_7 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 7)
            b_8 += b_dy * near(p_m, i_0, i_1, i_2, m_row, o_c, n_0, n_1, n_2, C, NDIM, RELU, T + 8)
        # fmt: on
    p_sums += i_row * (TAPS + 1) * C + o_c
    tl.store(p_sums + TAPS * C, tl.sum(b_bias, axis=0), mask=m_c & (o_c * 0 + i_plane == 0))
    p_sums += i_plane * 9 * C
    tl.store(p_sums, tl.sum(b_0, axis=0), mask=m_c)
    tl.store(p_sums + C, tl.sum(b_1, axis=0), mask=m_c)
    tl.store(p_sums + 2 * C, tl.sum(b_2, axis=0), mask=m_c)
    if NDIM > 1:
        tl.store(p_sums + 3 * C, tl.sum(b_3, axis=0), mask=m_c)
        tl.store(p_sums + 4 * C, tl.sum(b_4, axis=0), mask=m_c)
        tl.store(p_sums + 5 * C, tl.sum(b_5, axis=0), mask=m_c)
        tl.store(p_sums + 6 * C, tl.sum(b_6, axis=0), mask=m_c)
        tl.store(p_sums + 7 * C, tl.sum(b_7, axis=0), mask=m_c)
        tl.store(p_sums + 8 * C, tl.sum(b_8, axis=0), mask=m_c)


@kernel
def depthwise_bwd_weights_kernel(
    p_sums, p_w0, p_w1, p_w2, p_w3, p_b0, p_b1, p_b2, p_b3, p_logits, p_dweight, p_dbias, p_gains,
    batch, size_0, size_1, size_2, level,
    C, NDIM: tl.constexpr, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    most_spans,
):  # fmt: skip
    """Add the partial sums: gradients of a tap, or of the bias, of a level.

    Also compute its part of the gradient of the level's share.
    """
    TAPS: tl.constexpr = 3**NDIM
    blocks_c = tl.cdiv(C, BLOCK_C)
    i_c, i_tap = tl.program_id(0) % blocks_c, tl.program_id(0) // blocks_c % (TAPS + 1)
    s = tl.program_id(0) // (blocks_c * (TAPS + 1))
    first = 0
    for i_step in tl.static_range(STEPS):
        spans = spans_at(batch, size_0, size_1, size_2, i_step, most_spans, BLOCK_R)
        first += tl.where(i_step < s, spans, 0)
    spans = spans_at(batch, size_0, size_1, size_2, s, most_spans, BLOCK_R)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for i_p in range(0, spans, BLOCK_P):
        o_p = i_p + tl.arange(0, BLOCK_P)
        p_part = entries(p_sums, (first + o_p) * (TAPS + 1) + i_tap, o_c, C)
        b_sum += tl.load(p_part, mask=(o_p < spans)[:, None] & m_c[None, :], other=0.0)
    b_total = tl.sum(b_sum, axis=0)
    share = share_of(p_logits, level - s, LEVELS, BLOCK_L)
    b_grad = b_total * share
    m_tap = o_c * 0 + i_tap < TAPS
    p_weight = one_of(s, p_w0, p_w1, p_w2, p_w3) + o_c * TAPS + i_tap
    b_weight = tl.load(p_weight, mask=m_c & m_tap, other=0.0).to(tl.float32)
    p_bias = one_of(s, p_b0, p_b1, p_b2, p_b3) + o_c
    b_weight += tl.load(p_bias, mask=m_c & ~m_tap, other=0.0).to(tl.float32)
    p_dweight += (s * C + o_c) * TAPS + i_tap
    tl.store(p_dweight, b_grad.to(p_dweight.dtype.element_ty), mask=m_c & m_tap)
    p_dbias += s * C + o_c
    tl.store(p_dbias, b_grad.to(p_dbias.dtype.element_ty), mask=m_c & ~m_tap)
    tl.store(p_gains + tl.program_id(0), tl.sum(b_total * b_weight, axis=0))


@kernel
def depthwise_bwd_kernel(
    p_dy, p_pooled, p_x, p_w0, p_w1, p_w2, p_w3, p_logits, p_gains, p_dlogits, p_dx,
    batch, size_0, size_1, size_2, level,
    C, NDIM: tl.constexpr, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, gains_of_level,
    BLOCK_G: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Gradients of the maps, concatenated from fine to coarse."""
    blocks_c = tl.cdiv(C, BLOCK_C)
    i_part = tl.program_id(0)
    s = i_part * 0
    before = s.to(tl.int64)  # offset of the level
    for i_step in tl.static_range(1, STEPS + 1):
        cells = cells_at(size_0, size_1, size_2, i_step - 1)
        tiles = batch * tl.cdiv(cells, BLOCK_R) * blocks_c
        is_past = (s == i_step - 1) & (i_part >= tiles)
        i_part = tl.where(is_past, i_part - tiles, i_part)
        before = tl.where(is_past, before + cells.to(tl.int64) * batch * C, before)
        s = tl.where(is_past, i_step, s)
    level_0, level_1, level_2 = halved(size_0, s), halved(size_1, s), halved(size_2, s)
    cells = level_0 * level_1 * level_2
    blocks = tl.cdiv(cells, BLOCK_R)
    i_c = i_part // blocks % blocks_c
    i_map = (i_part // (blocks * blocks_c)).to(tl.int64)
    o_row = (i_part % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    m_row = o_row < cells
    i_0, i_1, i_2 = coordinates(o_row, level_1, level_2, NDIM)
    p_grad = p_dy
    if s > 0:
        finest = (size_0 * size_1 * size_2).to(tl.int64) * batch * C
        p_grad = p_pooled + (before - finest)
    b_dx = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    p_weight = one_of(s, p_w0, p_w1, p_w2, p_w3)
    b_dx = convolved(
        b_dx, p_grad + i_map * cells * C, p_weight, i_0, i_1, i_2, m_row, o_c,
        level_0, level_1, level_2, C, NDIM, False, True,
    )  # fmt: skip
    b_dx *= share_of(p_logits, level - s, LEVELS, BLOCK_L)
    m_dx = m_row[:, None] & (o_c < C)[None, :]
    start = before + i_map * cells * C
    if RELU:
        b_x = tl.load(entries(p_x + start, o_row, o_c, C), mask=m_dx, other=0.0)
        b_dx = tl.where(b_x.to(tl.float32) > 0.0, b_dx, 0.0)
    p_dx = entries(p_dx + start, o_row, o_c, C)
    tl.store(p_dx, b_dx.to(p_dx.dtype.element_ty), mask=m_dx)
    if (tl.program_id(0) == 0) & (LEVELS > 0):
        o_l, o_g = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_G)
        b_shares = share_of_levels(p_logits, LEVELS, BLOCK_L)
        b_dshares = tl.zeros((BLOCK_L,), tl.float32)
        for i_step in tl.static_range(STEPS + 1):
            b_gains = tl.load(
                p_gains + i_step * gains_of_level + o_g, mask=o_g < gains_of_level, other=0.0
            )
            b_dshares += tl.where(o_l == level - i_step, tl.sum(b_gains, axis=0), 0.0)
        b_dlogits = b_shares * (b_dshares - tl.sum(b_shares * b_dshares, axis=0))
        b_dlogits = b_dlogits.to(p_dlogits.dtype.element_ty)
        tl.store(p_dlogits + o_l, b_dlogits, mask=o_l < LEVELS)
