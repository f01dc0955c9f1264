# SPDX-License-Identifier: Apache-2.0
"""Kernels of a level of variant C below the coarsest, on arrays in tree order.

A family is CHILDREN adjacent query cells with one list of candidates: the children of the KEPT
cells of their parent. GROUP is the number of rows (queries of the message) per query cell: 1, or
with exact queries the tokens of a cell. Rows of all heads are concatenated. `kept` are the
candidates that every query cell keeps; they are excluded from the softmax.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.attention.triton.kernels.select import (
    any_row,
    finite_max,
    lower_bound,
    safe_reciprocal,
)
from quadtree_attention.ops.kernel import kernel, load_rows, store_rows


@triton.jit
def candidates(
    p_parents, p_bias, i_family, i_b, o_c, number, keys,
    CHILDREN: tl.constexpr, KEPT: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Key cells of some candidates, their mask, and the bias of their scores."""
    m_c = o_c < KEPT * CHILDREN
    o_parent = tl.load(p_parents + i_family * KEPT + o_c // CHILDREN, mask=m_c, other=-1)
    m_c = o_parent >= 0
    o_key = o_parent * CHILDREN + o_c % CHILDREN
    b_bias = tl.where(m_c, number, float("-inf"))
    if BIASED:
        b_bias = tl.load(p_bias + i_b * keys + o_key, mask=m_c, other=float("-inf"))
    return o_key, m_c, b_bias


@triton.jit
def masses_of_children(
    p_next_k, p_next_bias, b_mass, b_high, b_q, i_b, o_key, m_c, o_d, i_child, scale, next_number,
    keys, CHILDREN: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one child of every candidate to its running maximum and sum."""
    o_below = o_key * CHILDREN + i_child
    p_k = p_next_k + o_below.to(tl.int64)[:, None] * D + o_d[None, :]
    b_k = tl.load(p_k, mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
    b_bias = tl.where(m_c, next_number, float("-inf"))
    if BIASED:
        p_bias = p_next_bias + i_b * keys * CHILDREN + o_below
        b_bias = tl.load(p_bias, mask=m_c, other=float("-inf"))
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_bias[None, :]
    b_new = tl.maximum(b_high, b_score)
    b_offset = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_mass = b_mass * tl.exp(b_high - b_offset) + tl.exp(b_score - b_offset)
    return b_mass, b_new


@kernel
def flat_choose_kernel(
    p_q, p_k, p_bias, p_parents, p_next_k, p_next_bias, p_selection, p_kept, p_scores,
    scale, number, next_number, heads, cells, keys,
    CHILDREN: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
    BIASED: tl.constexpr, AHEAD: tl.constexpr, WITH_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The TOPK best candidates of the query cells of a family; `cells` families per head."""
    i_family = tl.program_id(0).to(tl.int64)
    i_bn = i_family // cells
    i_b = i_bn // heads
    o_t = tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    m_t = o_t < CHILDREN
    o_key, m_c, b_bias = candidates(
        p_parents, p_bias, i_family, i_b, o_c, number, keys, CHILDREN, KEPT, BIASED
    )
    o_row = i_family * CHILDREN + o_t
    p_k += i_bn * keys * D
    b_score = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for i_d in tl.static_range(0, D, BLOCK_D):
        o_d = i_d + tl.arange(0, BLOCK_D)
        m_d = (o_d < D)[None, :]
        b_q = tl.load(p_q + o_row[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d, other=0.0)
        p_keys = p_k + o_key.to(tl.int64)[:, None] * D + o_d[None, :]
        b_k = tl.load(p_keys, mask=m_c[:, None] & m_d, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k), acc=b_score, input_precision=PRECISION)
    b_score = b_score * scale + b_bias[None, :]
    m_shown = (b_score > float("-inf")) & m_t[:, None]
    b_rank = b_score
    if AHEAD:  # one block of channels
        p_next_k += i_bn * keys * CHILDREN * D
        b_mass = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        b_high = tl.full((BLOCK_T, BLOCK_C), float("-inf"), tl.float32)
        for i_child in tl.static_range(CHILDREN):
            b_mass, b_high = masses_of_children(
                p_next_k, p_next_bias, b_mass, b_high, b_q, i_b, o_key, m_c, o_d, i_child, scale,
                next_number, keys, CHILDREN, D, BIASED, PRECISION,
            )  # fmt: skip
        b_rank = b_high + tl.log(b_mass)
        m_shown = m_shown & (b_high > float("-inf"))
    b_bound, b_reach = lower_bound(b_rank, m_shown, TOPK, 51, 1)
    b_chosen = m_shown & (b_rank >= b_bound)
    if any_row(b_reach > TOPK, 1):
        # More ties at the last value than slots: the first ones are kept.
        b_above = m_shown & (b_rank > b_bound)
        b_equal = m_shown & (b_rank == b_bound)
        b_room = TOPK - tl.sum(b_above.to(tl.int32), axis=1, keep_dims=True)
        b_chosen = b_above | (b_equal & (tl.cumsum(b_equal.to(tl.int32), axis=1) <= b_room))
    b_ones = b_chosen.to(tl.int32)
    o_place = o_row[:, None] * TOPK + tl.cumsum(b_ones, axis=1) - 1
    b_count = tl.sum(b_ones, axis=1, keep_dims=True)
    b_key = tl.broadcast_to(o_key[None, :], (BLOCK_T, BLOCK_C))
    tl.store(p_selection + o_place, b_key, mask=b_chosen)
    o_k = tl.arange(0, BLOCK_TOPK)[None, :]
    m_rest = m_t[:, None] & (o_k >= b_count) & (o_k < TOPK)
    o_rest = o_row[:, None] * TOPK + o_k
    tl.store(p_selection + o_rest, -1, mask=m_rest)
    p_kept += o_row[:, None] * (KEPT * CHILDREN) + o_c[None, :]
    tl.store(p_kept, b_ones.to(tl.int8), mask=m_t[:, None] & (o_c < KEPT * CHILDREN)[None, :])
    if WITH_SCORES:
        b_weight = tl.exp(b_score - finite_max(b_score, 1))
        b_weight *= safe_reciprocal(tl.sum(b_weight, axis=1, keep_dims=True))
        tl.store(p_scores + o_place, b_weight, mask=b_chosen)
        tl.store(p_scores + o_rest, 0.0, mask=m_rest)


@triton.jit
def scores_of_rows(
    b_q, b_k, b_bias, p_kept, o_cell, m_t, o_c, scale,
    CANDIDATES: tl.constexpr, EXCLUDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores (rows, candidates), -inf for candidates that are hidden or kept by the cell."""
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_bias[None, :]
    if EXCLUDING:
        m_kept = m_t[:, None] & (o_c < CANDIDATES)[None, :]
        p_kept += o_cell.to(tl.int64)[:, None] * CANDIDATES + o_c[None, :]
        b_score = tl.where(tl.load(p_kept, mask=m_kept, other=0) != 0, float("-inf"), b_score)
    return b_score


@kernel
def flat_message_kernel(
    p_rows, p_k, p_v, p_bias, p_parents, p_kept, p_inherited, p_inherited_lse, p_out, p_lse,
    scale, number, heads, cells, keys,
    CHILDREN: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    EXCLUDING: tl.constexpr, INHERITING: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the terms of a level to the inherited states of rows; SHARED rows inherit one state."""
    ROWS: tl.constexpr = CHILDREN * GROUP
    TILES: tl.constexpr = (ROWS + BLOCK_T - 1) // BLOCK_T
    i_family = tl.program_id(0).to(tl.int64) // TILES
    i_bn = i_family // cells
    i_b = i_bn // heads
    o_t = tl.program_id(0) % TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < ROWS
    o_row = i_family * ROWS + o_t
    b_q = load_rows(p_rows, o_row, m_t, D, D, BLOCK_D)
    b_max = tl.full((BLOCK_T, 1), float("-inf"), tl.float32)
    b_message = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    if INHERITING:
        o_above = o_row // SHARED
        b_max = tl.load(p_inherited_lse + o_above, mask=m_t, other=float("-inf"))[:, None]
        b_message = load_rows(p_inherited, o_above, m_t, DV, DV, BLOCK_DV)
    b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    b_message = tl.where(b_max == float("-inf"), 0.0, b_message)
    p_k += i_bn * keys * D
    p_v += i_bn * keys * DV
    for i_c in range(0, KEPT * CHILDREN, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        o_key, m_c, b_bias = candidates(
            p_parents, p_bias, i_family, i_b, o_c, number, keys, CHILDREN, KEPT, BIASED
        )
        b_k = load_rows(p_k, o_key, m_c, D, D, BLOCK_D)
        b_score = scores_of_rows(
            b_q, b_k, b_bias, p_kept, i_family * CHILDREN + o_t // GROUP, m_t, o_c, scale,
            KEPT * CHILDREN, EXCLUDING, PRECISION,
        )  # fmt: skip
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1, keep_dims=True))
        b_offset = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp(b_score - b_offset)
        b_decay = tl.exp(b_max - b_offset)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1, keep_dims=True)
        b_v = load_rows(p_v, o_key, m_c, DV, DV, BLOCK_DV)
        b_message *= b_decay
        b_message = tl.dot(b_weight.to(b_v.dtype), b_v, acc=b_message, input_precision=PRECISION)
        b_max = b_new_max
    store_rows(p_out, b_message * safe_reciprocal(b_sum), o_row, m_t, DV, DV)
    tl.store(p_lse + o_row[:, None], b_max + tl.log(b_sum), mask=m_t[:, None])  # -inf: no term


@triton.jit
def slopes_of(
    b_score, b_lse, b_delta, b_do, b_v, m_t, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Shares of the terms, and the gradients of their products q.k; rows are along axis 0."""
    b_share = tl.exp(b_score - b_lse[:, None])
    b_share = tl.where((m_t & (b_lse > float("-inf")))[:, None], b_share, 0.0)
    b_dshare = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    return b_share, b_share * (b_dshare - b_delta[:, None]) * scale


@kernel
def flat_bwd_rows_kernel(
    p_rows, p_k, p_v, p_bias, p_parents, p_kept, p_inherited, p_inherited_lse, p_out, p_lse,
    p_dout, p_dlse, p_drows, p_delta, p_dinherited, p_dinherited_lse,
    scale, number, heads, cells, keys,
    CHILDREN: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    EXCLUDING: tl.constexpr, INHERITING: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of rows and of their inherited states; and delta, for the gradients of keys."""
    ROWS: tl.constexpr = CHILDREN * GROUP
    TILES: tl.constexpr = (ROWS + BLOCK_T - 1) // BLOCK_T
    i_family = tl.program_id(0).to(tl.int64) // TILES
    i_bn = i_family // cells
    i_b = i_bn // heads
    o_t = tl.program_id(0) % TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < ROWS
    o_row = i_family * ROWS + o_t
    b_q = load_rows(p_rows, o_row, m_t, D, D, BLOCK_D)
    b_do = load_rows(p_dout, o_row, m_t, DV, DV, BLOCK_DV)
    b_lse = tl.load(p_lse + o_row, mask=m_t, other=float("-inf"))
    b_out = load_rows(p_out, o_row, m_t, DV, DV, BLOCK_DV)
    b_delta = tl.sum(b_do * b_out, axis=1) - tl.load(p_dlse + o_row, mask=m_t, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=m_t)
    if INHERITING:
        o_above = o_row // SHARED
        b_above = tl.load(p_inherited_lse + o_above, mask=m_t, other=float("-inf"))
        b_inherited = load_rows(p_inherited, o_above, m_t, DV, DV, BLOCK_DV)
        m_share = m_t & (b_above > float("-inf"))
        b_share = tl.where(m_share, tl.exp(b_above - b_lse), 0.0)
        b_dlse = b_share * (tl.sum(b_do * b_inherited, axis=1) - b_delta)
        b_dinherited = b_do * b_share[:, None]
        if SHARED == 1:
            store_rows(p_dinherited, b_dinherited, o_row, m_t, DV, DV)
            tl.store(p_dinherited_lse + o_row, b_dlse, mask=m_t)
        else:  # all rows of the family, which are one tile, share one state
            o_dv = tl.arange(0, BLOCK_DV)
            p_sum = p_dinherited + i_family * DV + o_dv
            tl.store(p_sum, tl.sum(b_dinherited, axis=0), mask=o_dv < DV)
            tl.store(p_dinherited_lse + i_family, tl.sum(b_dlse, axis=0))
    p_k += i_bn * keys * D
    p_v += i_bn * keys * DV
    b_dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i_c in range(0, KEPT * CHILDREN, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        o_key, m_c, b_bias = candidates(
            p_parents, p_bias, i_family, i_b, o_c, number, keys, CHILDREN, KEPT, BIASED
        )
        b_k = load_rows(p_k, o_key, m_c, D, D, BLOCK_D)
        b_v = load_rows(p_v, o_key, m_c, DV, DV, BLOCK_DV)
        b_score = scores_of_rows(
            b_q, b_k, b_bias, p_kept, i_family * CHILDREN + o_t // GROUP, m_t, o_c, scale,
            KEPT * CHILDREN, EXCLUDING, PRECISION,
        )  # fmt: skip
        _, b_slope = slopes_of(
            b_score, b_lse, b_delta, b_do.to(b_v.dtype), b_v, m_t, scale, PRECISION
        )
        b_dq = tl.dot(b_slope.to(b_k.dtype), b_k, acc=b_dq, input_precision=PRECISION)
    store_rows(p_drows, b_dq, o_row, m_t, D, D)


@kernel
def flat_bwd_keys_kernel(
    p_rows, p_k, p_v, p_bias, p_kept, p_lse, p_dout, p_delta, p_first, p_entries, p_dk, p_dv,
    scale, number, heads, cells, keys,
    CHILDREN: tl.constexpr, GROUP: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    EXCLUDING: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a family of keys, from the rows of the query families with it as candidate.

    `entries` lists (query family, slot in its parents) as one number, from `first` of the key
    family to `first` of the next one; `cells` key families per head.
    """
    ROWS: tl.constexpr = CHILDREN * GROUP
    i_family = tl.program_id(0).to(tl.int64)
    i_b = i_family // cells // heads
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < CHILDREN
    o_key = i_family * CHILDREN + o_s
    b_k = load_rows(p_k, o_key, m_s, D, D, BLOCK_D)
    b_v = load_rows(p_v, o_key, m_s, DV, DV, BLOCK_DV)
    b_bias = tl.where(m_s, number, float("-inf"))
    if BIASED:
        o_bias = i_b * keys + i_family % cells * CHILDREN + o_s
        b_bias = tl.load(p_bias + o_bias, mask=m_s, other=float("-inf"))
    b_dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
    i_first = tl.load(p_first + i_family)
    i_rows = (tl.load(p_first + i_family + 1) - i_first).to(tl.int32) * ROWS
    for i_t in range(0, i_rows, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        m_t = o_t < i_rows
        b_entry = tl.load(p_entries + i_first + o_t // ROWS, mask=m_t, other=0)
        o_query = b_entry // KEPT
        o_row = o_query * ROWS + o_t % ROWS
        b_q = load_rows(p_rows, o_row, m_t, D, D, BLOCK_D)
        b_do = load_rows(p_dout, o_row, m_t, DV, DV, BLOCK_DV).to(b_v.dtype)
        b_lse = tl.load(p_lse + o_row, mask=m_t, other=float("-inf"))
        b_delta = tl.load(p_delta + o_row, mask=m_t, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_bias[None, :]
        if EXCLUDING:
            o_cell = o_query * CHILDREN + o_t % ROWS // GROUP
            o_kept = o_cell * (KEPT * CHILDREN) + b_entry % KEPT * CHILDREN
            m_kept = m_t[:, None] & m_s[None, :]
            b_kept = tl.load(p_kept + o_kept[:, None] + o_s[None, :], mask=m_kept, other=0)
            b_score = tl.where(b_kept != 0, float("-inf"), b_score)
        b_share, b_slope = slopes_of(b_score, b_lse, b_delta, b_do, b_v, m_t, scale, PRECISION)
        b_dk = tl.dot(tl.trans(b_slope.to(b_q.dtype)), b_q, acc=b_dk, input_precision=PRECISION)
        b_dv = tl.dot(tl.trans(b_share.to(b_do.dtype)), b_do, acc=b_dv, input_precision=PRECISION)
    store_rows(p_dk, b_dk, o_key, m_s, D, D)
    store_rows(p_dv, b_dv, o_key, m_s, DV, DV)
