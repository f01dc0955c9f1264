# SPDX-License-Identifier: Apache-2.0
"""Parts of the softmax, and selection of the best candidates of a query."""

import triton
import triton.language as tl

MOST_LEVELS: tl.constexpr = tl.constexpr(32)  # a grid has fewer than 2**31 cells


@triton.jit
def finite_max(b_score, AXIS: tl.constexpr):
    """Maximum along an axis; 0 without visible entries, so that exp(score - max) stays 0."""
    b_max = tl.max(b_score, axis=AXIS, keep_dims=True)
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def safe_reciprocal(b_sum):
    return tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)


@triton.jit
def shares_of(p_logits, levels):
    """Softmax of the logits of all levels, and 0 past them."""
    o_l = tl.arange(0, MOST_LEVELS)
    b_logits = tl.load(p_logits + o_l, mask=o_l < levels, other=float("-inf")).to(tl.float32)
    b_shares = tl.exp(b_logits - tl.max(b_logits, axis=0))
    return b_shares / tl.sum(b_shares, axis=0)


@triton.jit
def share_at(p_logits, level, levels):
    """Share of a level in the result, the softmax of the logits."""
    m_level = tl.arange(0, MOST_LEVELS) == level
    return tl.sum(tl.where(m_level, shares_of(p_logits, levels), 0.0), axis=0)


@triton.jit
def ordered(b_bits):
    """Map the bits of a float to an integer of the same order; the map is its own inverse."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def middle(b_low, b_high, i_step):
    """Bisect between two `ordered` numbers: by value in the first steps, then by bits."""
    b_value = ordered(b_low).to(tl.float32, bitcast=True)
    b_value = 0.5 * b_value + 0.5 * ordered(b_high - 1).to(tl.float32, bitcast=True)
    b_half = (b_low & b_high) + ((b_low ^ b_high) >> 1)
    b_middle = tl.where(i_step < 16, ordered(b_value.to(tl.int32, bitcast=True)), b_half)
    return tl.minimum(tl.maximum(b_middle, b_low + 1), b_high - 1)


SPREAD: tl.constexpr = tl.constexpr(-1)  # axis code of rows along axes 0 and 2 of three


@triton.jit
def row_sum(b_x, AXIS: tl.constexpr):
    """Sums over rows along `AXIS`, or `SPREAD` rows."""
    if AXIS == SPREAD:
        b_sum = tl.sum(tl.sum(b_x, axis=2, keep_dims=True), axis=0, keep_dims=True)
    else:
        b_sum = tl.sum(b_x, axis=AXIS, keep_dims=True)
    return b_sum


@triton.jit
def row_max(b_x, AXIS: tl.constexpr):
    if AXIS == SPREAD:
        b_max = tl.max(tl.max(b_x, axis=2, keep_dims=True), axis=0, keep_dims=True)
    else:
        b_max = tl.max(b_x, axis=AXIS, keep_dims=True)
    return b_max


@triton.jit
def any_row(m_row, AXIS: tl.constexpr):
    """True if any row is True; there is one entry per row."""
    m_any = m_row.to(tl.int32)
    if len(m_row.shape) == 3:
        m_any = tl.max(tl.max(m_any, axis=2), axis=0)
    else:
        m_any = tl.max(m_any, axis=AXIS)
    return tl.max(m_any, axis=0)


@triton.jit
def lower_bound(b_rank, b_shown, TOPK: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """The TOPK-th highest shown value of each row, or a value below it after `STEPS` halvings.

    It counts values, without sorting or a second array. For rows see `row_sum`. Returns the bound
    as a float and the number of values that reach it.
    """
    b_value = tl.where(b_shown, b_rank, float("-inf"))
    b_high = row_max(b_value, AXIS).to(tl.int32, bitcast=True)
    b_low = -row_max(tl.where(b_shown, -b_rank, float("-inf")), AXIS)
    b_count = row_sum(b_shown.to(tl.int32), AXIS)
    b_low = ordered(b_low.to(tl.int32, bitcast=True))
    b_high = ordered(b_high) + 1
    i_step = 0
    unsettled = 1
    while (i_step < STEPS) & (unsettled > 0):
        for _ in tl.static_range(3):  # the termination check costs as much as a step
            b_try = middle(b_low, b_high, i_step)
            b_reach = b_value >= ordered(b_try).to(tl.float32, bitcast=True)
            b_found = row_sum(b_reach.to(tl.int32), AXIS)
            m_go = (b_count > TOPK) & (b_high - b_low != 1)
            m_up = m_go & (b_found >= TOPK)
            b_high = tl.where(m_go & (b_found < TOPK), b_try, b_high)
            b_low = tl.where(m_up, b_try, b_low)
            b_count = tl.where(m_up, b_found, b_count)
        unsettled = any_row((b_count > TOPK) & (b_high - b_low != 1), AXIS)
        i_step += 3
    return ordered(b_low).to(tl.float32, bitcast=True), b_count


@triton.jit
def choose_best(b_rank, b_shown, TOPK: tl.constexpr, AXIS: tl.constexpr):
    """Mask of the `TOPK` highest visible entries of each row; ties go to the first.

    `b_rank` (G, R, C) float32, `b_shown` of the same shape; rows are `SPREAD`, or along axis 2.
    Returns the mask, consecutive positions of the selected entries, and their number, (1, R, 1) or
    (G, R, 1).
    """
    b_bound, b_count = lower_bound(b_rank, b_shown, TOPK, 51, AXIS)
    b_chosen = b_shown & (b_rank >= b_bound)
    if any_row(b_count > TOPK, AXIS):
        # More ties at the last value than slots: the first ones are kept.
        b_above = b_shown & (b_rank > b_bound)
        b_equal = b_shown & (b_rank == b_bound)
        b_room = TOPK - row_sum(b_above.to(tl.int32), AXIS)
        b_chosen = b_above | (b_equal & (place_in_row(b_equal, AXIS) < b_room))
    return b_chosen, place_in_row(b_chosen, AXIS), row_sum(b_chosen.to(tl.int32), AXIS)


@triton.jit
def count_before(b_number):
    """Exclusive cumulative sum of each row: (R, C) -> (R, C).

    It is a product with a triangular matrix of ones, which keeps the layout. Exact for numbers of
    few bits, such as 0, 1 and 1024.
    """
    o_c = tl.arange(0, b_number.shape[1])
    b_triangle = (o_c[:, None] < o_c[None, :]).to(tl.float16)
    return tl.dot(b_number.to(tl.float16), b_triangle).to(tl.int32)


@triton.jit
def place_in_row(b_set, AXIS: tl.constexpr):
    """Number of preceding entries that are set, in rows that are `SPREAD` or along axis 2."""
    PARTS: tl.constexpr = b_set.shape[0]
    b_ones = b_set.to(tl.int32)
    b_place = count_before(tl.reshape(b_ones, (PARTS * b_set.shape[1], b_set.shape[2])))
    b_place = tl.reshape(b_place, b_set.shape)
    if AXIS == SPREAD:
        i_part = tl.arange(0, PARTS)[:, None, None]
        for i in tl.static_range(PARTS - 1):
            b_place += tl.where(i_part > i, row_sum(tl.where(i_part == i, b_ones, 0), AXIS), 0)
    return b_place
