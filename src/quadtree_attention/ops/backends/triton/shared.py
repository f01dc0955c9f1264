# SPDX-License-Identifier: Apache-2.0
"""Pieces that several kernels have in common.

Names in kernels: `p_` pointers, `b_` blocks of values, `o_` offsets, `m_` masks, `i_` program and
loop indices, `s_` strides. Addresses are computed in 64 bits.
"""

import triton
import triton.language as tl


@triton.jit
def dot(b_a, b_b, PRECISION: tl.constexpr):
    return tl.dot(b_a, b_b, input_precision=PRECISION)


@triton.jit
def finite_max(b_score, AXIS: tl.constexpr):
    """Maximum along an axis; 0 where nothing is shown, so that exp(score - max) stays 0."""
    b_max = tl.max(b_score, axis=AXIS, keep_dims=True)
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def safe_reciprocal(b_sum):
    return tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)


@triton.jit
def choose_best(b_rank, b_shown, TOPK: tl.constexpr):
    """Which entries of each row are among its `TOPK` highest shown ones; ties go to the first.

    The TOPK-th highest value is found bit by bit, by counting: no sort, no second array to carry
    along, and a loop that compiles in no time and ends as soon as every row has its TOPK.
    `b_rank` (R, C) float32, `b_shown` broadcastable.
    Returns the choice (R, C), its places side by side (R, C), and how many were chosen (R, 1).
    """
    b_bits = (b_rank + 0.0).to(tl.uint32, bitcast=True)  # -0.0 and 0.0 are the same
    # An order-preserving map to unsigned numbers; hidden entries become 0, the lowest.
    b_order = tl.where(b_bits >= 0x80000000, ~b_bits, b_bits | 0x80000000)
    b_order = tl.where(b_shown, b_order, 0)
    b_limit = tl.zeros((b_rank.shape[0], 1), tl.uint32)
    b_count = tl.sum((b_order >= b_limit).to(tl.int32), axis=1, keep_dims=True)
    i_bit = 0
    unsettled = 1
    while (i_bit < 32) & (unsettled > 0):
        b_try = b_limit | (tl.full((1, 1), 0x80000000, tl.uint32) >> i_bit)
        b_found = tl.sum((b_order >= b_try).to(tl.int32), axis=1, keep_dims=True)
        b_limit = tl.where(b_found >= TOPK, b_try, b_limit)
        b_count = tl.where(b_found >= TOPK, b_found, b_count)
        unsettled = tl.max(tl.max((b_count > TOPK).to(tl.int32), axis=1), axis=0)
        i_bit += 1
    b_chosen = (b_order >= b_limit) & b_shown
    if unsettled > 0:  # more entries than room share the last value: the first ones have it
        b_above = b_order > b_limit
        b_equal = (b_order == b_limit) & b_shown
        b_room = TOPK - tl.sum(b_above.to(tl.int32), axis=1, keep_dims=True)
        b_chosen = b_above | (b_equal & (tl.cumsum(b_equal.to(tl.int32), axis=1) <= b_room))
    b_ones = b_chosen.to(tl.int32)
    return b_chosen, tl.cumsum(b_ones, axis=1) - 1, tl.sum(b_ones, axis=1, keep_dims=True)
