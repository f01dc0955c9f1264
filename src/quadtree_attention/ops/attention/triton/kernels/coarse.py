# SPDX-License-Identifier: Apache-2.0
"""Kernels of the coarsest level: every query cell attends to every key cell.

A program processes a block of queries and a span of the keys in two passes. The first pass computes
the message and the maximum score in each column of its tiles; the K-th highest maximum is a lower
bound that the K best keys reach and few others do. The second pass lists the keys that reach it.
Another kernel merges the spans and selects the best keys of the lists.
Backward has one kernel for queries, and one for keys and values.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.attention.triton.kernels.places import place_of, row_at
from quadtree_attention.ops.attention.triton.kernels.select import (
    any_row,
    lower_bound,
    middle,
    ordered,
    safe_reciprocal,
    share_at,
)
from quadtree_attention.ops.kernel import kernel, load_rows, store_rows


@triton.jit
def key_rows(p_shown, i_start, i_b, keys, BLOCK_S: tl.constexpr, MASKED: tl.constexpr):
    """Indices of a block of keys, and the mask of visible ones."""
    o_s = i_start + tl.arange(0, BLOCK_S)
    m_shown = o_s < keys
    if MASKED:
        m_shown = m_shown & (tl.load(p_shown + i_b * keys + o_s, mask=m_shown, other=0) != 0)
    return o_s, m_shown


@triton.jit
def scores_of(b_q, b_k, m_shown, scale, PRECISION: tl.constexpr):
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    return tl.where(m_shown[None, :], b_score, float("-inf"))


@triton.jit
def list_keys(
    p_list, b_q, p_k, p_shown, b_bound, o_row, m_t, i_b, i_begin, i_end,
    scale, rows, keys, sk_t,
    BLOCK_S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOPK: tl.constexpr,
    ROOM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """List the keys that reach the bound, with at most TOPK keys equal to it.

    An entry is a score and a key in one number. The lists of all queries are interleaved,
    (ROOM, rows), for the kernel that reads them.
    Returns the numbers of keys above the bound and equal to it; at most ROOM are written.
    """
    b_above = tl.zeros(b_bound.shape, tl.int32)
    b_equal = tl.zeros(b_bound.shape, tl.int32)
    for i_s in range(i_begin, i_end, BLOCK_S):
        o_s, m_shown = key_rows(p_shown, i_s, i_b, keys, BLOCK_S, MASKED)
        b_k = load_rows(p_k, o_s, m_shown, sk_t, D, BLOCK_D)
        b_score = scores_of(b_q, b_k, m_shown, scale, PRECISION)
        m_above = b_score > b_bound
        m_equal = (b_score == b_bound) & m_shown[None, :]
        # Two counters in one number; the upper half counts equal keys.
        b_ones = tl.where(m_above, 1, tl.where(m_equal, 1 << 16, 0))
        b_before = tl.cumsum(b_ones, axis=1) - b_ones
        b_equal_before = b_equal + (b_before >> 16)
        o_slot = b_above + (b_before & 0xFFFF) + tl.minimum(b_equal_before, TOPK)
        m_list = (m_above | (m_equal & (b_equal_before < TOPK))) & (o_slot < ROOM) & m_t[:, None]
        o_slot = tl.where(m_list, o_slot, -1)  # a single tensor to convert to the layout of stores
        b_pair = (b_score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | o_s[None, :]
        tl.store(p_list + o_slot.to(tl.int64) * rows + o_row, b_pair, mask=o_slot >= 0)
        b_all = tl.sum(b_ones, axis=1, keep_dims=True)
        b_above += b_all & 0xFFFF
        b_equal += b_all >> 16
    return b_above, b_equal


@kernel
def coarse_fwd_kernel(
    p_q, p_k, p_v, p_shown, p_message, p_lse, p_list, p_count,
    scale, spans, rows, heads, cells, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Messages of the spans and lists of the best keys, concatenated over spans."""
    blocks = tl.cdiv(cells, BLOCK_T)
    i_span = tl.program_id(0) % spans
    i_block = tl.program_id(0) // spans
    i_bn = (i_block // blocks).to(tl.int64)
    o_t = (i_block % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    span = tl.cdiv(tl.cdiv(keys, spans), BLOCK_S) * BLOCK_S
    i_begin = i_span * span
    i_end = tl.minimum(i_begin + span, keys)
    m_t = o_t < cells
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    p_k += i_b * sk_b + i_n * sk_n
    p_v += i_b * sv_b + i_n * sv_n
    b_q = load_rows(p_q + i_b * sq_b + i_n * sq_n, o_t, m_t, sq_t, D, BLOCK_D)
    b_max = tl.full((BLOCK_T, 1), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_T, 1), tl.float32)
    b_message = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    b_peak = tl.full((BLOCK_T, BLOCK_S), float("-inf"), tl.float32)
    for i_s in range(i_begin, i_end, BLOCK_S):
        o_s, m_shown = key_rows(p_shown, i_s, i_b, keys, BLOCK_S, MASKED)
        b_k = load_rows(p_k, o_s, m_shown, sk_t, D, BLOCK_D)
        b_score = scores_of(b_q, b_k, m_shown, scale, PRECISION)
        if TOPK > 0:
            b_peak = tl.maximum(b_peak, b_score)
        b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1, keep_dims=True))
        b_offset = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp(b_score - b_offset)
        b_decay = tl.exp(b_max - b_offset)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1, keep_dims=True)
        b_v = load_rows(p_v, o_s, m_shown, sv_t, DV, BLOCK_DV)
        b_message *= b_decay
        b_message = tl.dot(b_weight.to(b_v.dtype), b_v, acc=b_message, input_precision=PRECISION)
        b_max = b_new_max
    o_row = (i_bn * cells + o_t)[:, None]
    b_lse = b_max + tl.log(b_sum)  # -inf without visible keys
    if TOPK == 0:  # spans are not merged later
        b_lse = tl.where(b_sum == 0, 0.0, b_lse)
    tl.store(p_lse + i_span.to(tl.int64) * rows + o_row, b_lse, mask=m_t[:, None])
    b_message *= safe_reciprocal(b_sum)
    p_message += i_span.to(tl.int64) * rows * DV + i_b * so_b + i_n * so_n
    store_rows(p_message, b_message, o_t, m_t, so_t, DV)

    if TOPK > 0:
        p_list += i_span.to(tl.int64) * ROOM * rows
        b_bound, b_reach = lower_bound(b_peak, b_peak > float("-inf"), TOPK, 9, 1)
        b_bound = tl.where(b_reach >= TOPK, b_bound, float("-inf"))
        b_low = ordered(b_bound.to(tl.int32, bitcast=True))
        b_high = ordered(b_max.to(tl.int32, bitcast=True)) + 1
        b_count = tl.zeros((BLOCK_T, 1), tl.int32)
        crowded = 1
        i_step = 0
        while (crowded > 0) & (i_step < 64):  # one iteration, unless the list is full
            b_above, b_equal = list_keys(
                p_list, b_q, p_k, p_shown, b_bound, o_row, m_t, i_b, i_begin, i_end,
                scale, rows, keys, sk_t,
                BLOCK_S, D, BLOCK_D, TOPK, ROOM, MASKED, PRECISION,
            )  # fmt: skip
            b_count = b_above + tl.minimum(b_equal, TOPK)
            # If more keys than fit reach the bound, bisect the interval above it.
            b_here = ordered(b_bound.to(tl.int32, bitcast=True))
            m_few = b_above + b_equal < TOPK
            m_many = b_count > ROOM
            m_move = m_many | (m_few & (b_here > b_low))
            b_low = tl.where(m_many, b_here, b_low)
            b_high = tl.where(m_move & m_few, b_here, b_high)
            b_next = tl.where(b_high - b_low == 1, b_low, middle(b_low, b_high, i_step))
            b_bound = ordered(tl.where(m_move, b_next, b_here)).to(tl.float32, bitcast=True)
            crowded = any_row(m_move & m_t[:, None], 1)
            tl.debug_barrier()  # another thread may write the same slot in the next pass
            i_step += 1
        tl.store(p_count + i_span.to(tl.int64) * rows + o_row, b_count, mask=m_t[:, None])


@kernel
def coarse_choose_kernel(
    p_v, p_parts, p_part_lse, p_list, p_count, p_message, p_lse, p_selection, p_scores,
    spans, rows, heads, cells, key_1, key_2, sv_b, sv_n, sv_t,
    KEY_BITS: tl.constexpr, MOST_SPANS: tl.constexpr, BLOCK_T: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, ROOM: tl.constexpr,
    VARIANT_A: tl.constexpr, WITH_SCORES: tl.constexpr,
):  # fmt: skip
    """Merged message (unweighted: the next level applies the weight) and the best keys."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_row = o_row < rows
    rows = rows.to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV)[None, :]
    m_message = m_row[:, None] & (o_dv < DV)
    b_max = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_T,), tl.float32)
    b_message = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    for i_span in range(spans):
        b_part_lse = tl.load(p_part_lse + i_span * rows + o_row, mask=m_row, other=float("-inf"))
        p_part = p_parts + i_span * rows * DV + o_row[:, None] * DV + o_dv
        b_part = tl.load(p_part, mask=m_message, other=0.0)
        b_new_max = tl.maximum(b_max, b_part_lse)
        b_offset = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_decay = tl.exp(b_max - b_offset)
        b_weight = tl.exp(b_part_lse - b_offset)
        b_sum = b_sum * b_decay + b_weight
        b_message = b_message * b_decay[:, None] + b_part * b_weight[:, None]
        b_max = b_new_max
    b_message *= safe_reciprocal(b_sum)[:, None]
    b_lse = tl.where(b_max == float("-inf"), 0.0, b_max) + tl.log(tl.where(b_sum == 0, 1.0, b_sum))
    tl.store(p_lse + o_row, b_lse, mask=m_row)

    # The lists have one query per column.
    o_slot = tl.arange(0, MOST_SPANS * ROOM)[:, None]
    o_count = o_slot // ROOM * rows + o_row[None, :]
    m_count = (o_slot // ROOM < spans) & m_row[None, :]
    m_list = o_slot % ROOM < tl.load(p_count + o_count, mask=m_count, other=0)
    o_list = o_slot * rows + o_row[None, :]
    b_pair = tl.load(p_list + o_list, mask=m_list, other=0)
    b_score = (b_pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b_bound, b_reach = lower_bound(b_score, m_list, TOPK, 51, 0)
    b_chosen = m_list & (b_score >= b_bound)
    if any_row(b_reach > TOPK, 0):
        # More ties at the last value than slots: the first ones are kept.
        b_above = m_list & (b_score > b_bound)
        b_equal = m_list & (b_score == b_bound)
        b_room = TOPK - tl.sum(b_above.to(tl.int32), axis=0, keep_dims=True)
        b_chosen = b_above | (b_equal & (tl.cumsum(b_equal.to(tl.int32), axis=0) <= b_room))
    o_place = tl.cumsum(b_chosen.to(tl.int32), axis=0) - 1
    b_chosen = b_chosen & (o_place < TOPK)
    o_slot = o_row[None, :] * TOPK + o_place
    o_k = tl.arange(0, BLOCK_TOPK)[:, None]
    m_rest = (o_k >= tl.sum(b_chosen.to(tl.int32), axis=0, keep_dims=True)) & (o_k < TOPK)
    m_rest = m_rest & m_row[None, :]
    o_rest = o_row[None, :] * TOPK + o_k
    b_key = (b_pair & 0x7FFFFFFF).to(tl.int32)
    tl.store(p_selection + o_slot, place_of(b_key, key_1, key_2, KEY_BITS), mask=b_chosen)
    tl.store(p_selection + o_rest, -1, mask=m_rest)
    if WITH_SCORES:
        tl.store(p_scores + o_slot, tl.exp(b_score - b_lse[None, :]), mask=b_chosen)
        tl.store(p_scores + o_rest, 0.0, mask=m_rest)
    if VARIANT_A:
        # Kept cells are replaced by their children: subtract their messages here. The selection is
        # read back from memory behind a barrier, which orders the threads of this program.
        tl.debug_barrier()
        i_bn = (o_row // cells)[:, None]
        p_v += i_bn // heads * sv_b + i_bn % heads * sv_n
        for i_k in range(TOPK):
            b_place = tl.load(p_selection + o_row * TOPK + i_k, mask=m_row, other=-1)[:, None]
            b_share = tl.load(p_scores + o_row * TOPK + i_k, mask=m_row, other=0.0)[:, None]
            p_value = p_v + row_at(b_place, key_1, key_2, KEY_BITS).to(tl.int64) * sv_t + o_dv
            b_value = tl.load(p_value, mask=(b_place >= 0) & (o_dv < DV), other=0.0)
            b_message -= b_share * b_value.to(tl.float32)
    tl.store(p_message + o_row[:, None] * DV + o_dv, b_message, mask=m_message)


@triton.jit
def pair_gradients(
    b_q, b_k, b_v, b_do, b_lse, m_t, o_s, m_shown, o_row, p_selection, p_dscores,
    scale, key_1, key_2,
    KEY_BITS: tl.constexpr, TOPK: tl.constexpr, VARIANT_A: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries and keys, its share in the message here, and its gradient."""
    b_attention = tl.exp(scores_of(b_q, b_k, m_shown, scale, PRECISION) - b_lse)
    b_attention = tl.where(m_t[:, None], b_attention, 0.0)
    b_dattention = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_spoken = b_attention
    if VARIANT_A and TOPK > 0:
        # Kept cells are not in the message of this level; their gradient is that of their score.
        o_place = place_of(o_s, key_1, key_2, KEY_BITS)
        for r in range(TOPK):
            b_kept = tl.load(p_selection + o_row * TOPK + r, mask=m_t, other=-1)
            b_dkept = tl.load(p_dscores + o_row * TOPK + r, mask=m_t, other=0.0)
            m_kept = b_kept[:, None] == o_place[None, :]
            b_dattention = tl.where(m_kept, b_dkept[:, None], b_dattention)
            b_spoken = tl.where(m_kept, 0.0, b_spoken)
    return b_attention, b_spoken, b_dattention


@kernel
def coarse_bwd_queries_kernel(
    p_q, p_k, p_v, p_shown, p_logits, p_selection, p_scores, p_lse, p_message,
    p_dtotal, p_dscores, p_dq, p_dweight, p_delta,
    scale, share, levels, heads, cells, keys, key_1, key_2,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t, sm_b, sm_n, sm_t,
    sdq_b, sdq_n, sdq_t,
    KEY_BITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(cells, BLOCK_T)
    i_bn = (tl.program_id(0) // blocks).to(tl.int64)
    o_t = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < cells
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    p_k += i_b * sk_b + i_n * sk_n
    p_v += i_b * sv_b + i_n * sv_n
    o_row = i_bn * cells + o_t
    b_q = load_rows(p_q + i_b * sq_b + i_n * sq_n, o_t, m_t, sq_t, D, BLOCK_D)
    b_do = load_rows(p_dtotal + i_b * so_b + i_n * so_n, o_t, m_t, so_t, DV, BLOCK_DV)
    b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)[:, None]
    w = share_at(p_logits, 0, levels) if WEIGHTED else share
    # Mean gradient of each row. Kept cells are not in the message; they have the score's gradient.
    b_message = load_rows(p_message + i_b * sm_b + i_n * sm_n, o_t, m_t, sm_t, DV, BLOCK_DV)
    b_delta = tl.sum(b_do.to(tl.float32) * b_message.to(tl.float32), axis=1)
    if VARIANT_A and TOPK > 0:
        for r in range(TOPK):
            b_kept = tl.load(p_scores + o_row * TOPK + r, mask=m_t, other=0.0)
            b_delta += b_kept * tl.load(p_dscores + o_row * TOPK + r, mask=m_t, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=m_t)
    if WEIGHTED:
        tl.store(p_dweight + tl.program_id(0), tl.sum(tl.where(m_t, b_delta, 0.0), axis=0))
    b_do = b_do.to(b_q.dtype)
    b_dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i_s in range(0, keys, BLOCK_S):
        o_s, m_shown = key_rows(p_shown, i_s, i_b, keys, BLOCK_S, MASKED)
        b_k = load_rows(p_k, o_s, m_shown, sk_t, D, BLOCK_D)
        b_v = load_rows(p_v, o_s, m_shown, sv_t, DV, BLOCK_DV)
        b_attention, _, b_dattention = pair_gradients(
            b_q, b_k, b_v, b_do, b_lse, m_t, o_s, m_shown, o_row, p_selection, p_dscores,
            scale, key_1, key_2, KEY_BITS, TOPK, VARIANT_A, PRECISION,
        )  # fmt: skip
        b_dscore = b_attention * (b_dattention - b_delta[:, None])
        b_dq = tl.dot(b_dscore.to(b_k.dtype), b_k, acc=b_dq, input_precision=PRECISION)
    store_rows(p_dq + i_b * sdq_b + i_n * sdq_n, b_dq * (scale * w), o_t, m_t, sdq_t, D)


@kernel
def coarse_bwd_keys_kernel(
    p_q, p_k, p_v, p_shown, p_logits, p_selection, p_lse, p_delta, p_dtotal, p_dscores,
    p_dk, p_dv,
    scale, share, levels, heads, cells, keys, key_1, key_2,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t,
    sdk_b, sdk_n, sdk_t, sdv_b, sdv_n, sdv_t,
    KEY_BITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(keys, BLOCK_S)
    i_bn = (tl.program_id(0) // blocks).to(tl.int64)
    i_s = (tl.program_id(0) % blocks) * BLOCK_S
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_s, m_shown = key_rows(p_shown, i_s, i_b, keys, BLOCK_S, MASKED)
    b_k = load_rows(p_k + i_b * sk_b + i_n * sk_n, o_s, m_shown, sk_t, D, BLOCK_D)
    b_v = load_rows(p_v + i_b * sv_b + i_n * sv_n, o_s, m_shown, sv_t, DV, BLOCK_DV)
    p_q += i_b * sq_b + i_n * sq_n
    p_dtotal += i_b * so_b + i_n * so_n
    w = share_at(p_logits, 0, levels) if WEIGHTED else share
    b_dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
    for i_t in range(0, cells, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        m_t = o_t < cells
        o_row = i_bn * cells + o_t
        b_q = load_rows(p_q, o_t, m_t, sq_t, D, BLOCK_D)
        b_do = load_rows(p_dtotal, o_t, m_t, so_t, DV, BLOCK_DV).to(b_v.dtype)
        b_lse = tl.load(p_lse + o_row, mask=m_t, other=0.0)[:, None]
        b_delta = tl.load(p_delta + o_row, mask=m_t, other=0.0)[:, None]
        b_attention, b_spoken, b_dattention = pair_gradients(
            b_q, b_k, b_v, b_do, b_lse, m_t, o_s, m_shown, o_row, p_selection, p_dscores,
            scale, key_1, key_2, KEY_BITS, TOPK, VARIANT_A, PRECISION,
        )  # fmt: skip
        b_dscore = b_attention * (b_dattention - b_delta)
        b_dk = tl.dot(tl.trans(b_dscore.to(b_q.dtype)), b_q, acc=b_dk, input_precision=PRECISION)
        b_dv = tl.dot(tl.trans(b_spoken.to(b_do.dtype)), b_do, acc=b_dv, input_precision=PRECISION)
    m_s = o_s < keys
    store_rows(p_dk + i_b * sdk_b + i_n * sdk_n, b_dk * (scale * w), o_s, m_s, sdk_t, D)
    store_rows(p_dv + i_b * sdv_b + i_n * sdv_n, b_dv * w, o_s, m_s, sdv_t, DV)
