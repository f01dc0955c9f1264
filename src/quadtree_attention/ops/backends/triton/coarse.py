# SPDX-License-Identifier: Apache-2.0
"""Kernels of the coarsest level: every query cell looks at every key cell.

A first kernel takes one block of queries and one chunk of keys, which gives work to the whole chip
even for a small map; a second one puts the chunks together. Backward has one kernel for queries and
one for keys and values.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.backends.triton.shared import (
    choose_best,
    dot,
    finite_max,
    safe_reciprocal,
)


@triton.jit
def key_block(p_k, p_visible, i_start, i_b, keys, sk_t,
              BLOCK_S: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """A block of rows of k or v (zeros where hidden), which are shown, and their numbers."""
    o_s = i_start + tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    b_shown = o_s < keys
    if MASKED:
        b_shown = b_shown & (tl.load(p_visible + i_b * keys + o_s, mask=b_shown, other=0) != 0)
    p_rows = p_k + o_s.to(tl.int64)[:, None] * sk_t + o_d[None, :]
    return tl.load(p_rows, mask=b_shown[:, None] & (o_d < D)[None, :], other=0.0), b_shown, o_s


@triton.jit
def scores_of(b_q, b_k, b_shown, scale, PRECISION: tl.constexpr):
    b_score = dot(b_q, tl.trans(b_k), PRECISION) * scale
    return tl.where(b_shown[None, :], b_score, float("-inf"))


@triton.jit
def silence_kept(b_attention, b_dattention, p_selection, p_dscores, o_rows, m_rows, o_s,
                 TOPK: tl.constexpr):  # fmt: skip
    """Variant A: kept cells say nothing at this level; their gradient is that of their score."""
    b_spoken = b_attention
    for r in range(TOPK):
        b_kept = tl.load(p_selection + o_rows * TOPK + r, mask=m_rows, other=-1)
        b_dkept = tl.load(p_dscores + o_rows * TOPK + r, mask=m_rows, other=0.0)
        m_kept = b_kept[:, None] == o_s[None, :]
        b_dattention = tl.where(m_kept, b_dkept[:, None], b_dattention)
        b_spoken = tl.where(m_kept, 0.0, b_spoken)
    return b_spoken, b_dattention


@triton.jit
def coarse_fwd_kernel(
    p_q, p_k, p_v, p_visible, p_max, p_sum, p_message, p_best_cells, p_best_scores,
    scale, heads, cells, keys, blocks, chunks,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries against one chunk of keys: maximum, sum, message and best cells."""
    i_chunk = tl.program_id(0) % chunks
    i_block = tl.program_id(0) // chunks
    i_bn = (i_block // blocks).to(tl.int64)
    i_t = i_block % blocks
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < cells
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    p_q += i_b * sq_b + i_n * sq_n + o_t.to(tl.int64)[:, None] * sq_t + o_d[None, :]
    b_q = tl.load(p_q, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    p_k += i_b * sk_b + i_n * sk_n
    p_v += i_b * sv_b + i_n * sv_n
    i_s = i_chunk * BLOCK_S
    b_k, b_shown, o_s = key_block(p_k, p_visible, i_s, i_b, keys, sk_t, BLOCK_S, D, BLOCK_D, MASKED)
    b_score = scores_of(b_q, b_k, b_shown, scale, PRECISION)
    b_max = tl.max(b_score, axis=1, keep_dims=True)
    b_weight = tl.exp(b_score - tl.where(b_max == float("-inf"), 0.0, b_max))
    b_v, _, _ = key_block(p_v, p_visible, i_s, i_b, keys, sv_t, BLOCK_S, DV, BLOCK_DV, MASKED)
    b_message = dot(b_weight.to(b_v.dtype), b_v, PRECISION)
    o_row = ((i_bn * cells + o_t) * chunks + i_chunk)[:, None]
    tl.store(p_max + o_row, b_max, mask=m_t[:, None])
    tl.store(p_sum + o_row, tl.sum(b_weight, axis=1, keep_dims=True), mask=m_t[:, None])
    p_message += o_row * DV + o_dv[None, :]
    tl.store(p_message, b_message, mask=m_t[:, None] & (o_dv < DV)[None, :])
    if TOPK > 0:
        o_k = tl.arange(0, BLOCK_TOPK)[None, :]
        b_chosen, o_slot, b_count = choose_best(b_score, b_shown[None, :], TOPK)
        b_chosen = b_chosen & m_t[:, None]
        b_cells = tl.broadcast_to(o_s[None, :], (BLOCK_T, BLOCK_S))
        tl.store(p_best_cells + o_row * TOPK + o_slot, b_cells, mask=b_chosen)
        tl.store(p_best_scores + o_row * TOPK + o_slot, b_score, mask=b_chosen)
        m_rest = m_t[:, None] & (o_k >= b_count) & (o_k < TOPK)
        tl.store(p_best_cells + o_row * TOPK + o_k, -1, mask=m_rest)
        tl.store(p_best_scores + o_row * TOPK + o_k, float("-inf"), mask=m_rest)


@triton.jit
def coarse_merge_kernel(
    p_v, p_weight, p_max, p_sum, p_message, p_best_cells, p_best_scores,
    p_total, p_selection, p_scores, p_lse,
    heads, cells, chunks, sv_b, sv_n, sv_t,
    BLOCK_T: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_BEST: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
    VARIANT_A: tl.constexpr, WEIGHTED: tl.constexpr, WITH_SCORES: tl.constexpr,
):  # fmt: skip
    """What the chunks found, put together for one block of queries of one head."""
    blocks = tl.cdiv(cells, BLOCK_T)
    i_bn = (tl.program_id(0) // blocks).to(tl.int64)
    o_t = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = (o_t < cells)[:, None]
    o_row = (i_bn * cells + o_t)[:, None]
    o_dv = tl.arange(0, BLOCK_DV)[None, :]
    o_chunk = tl.arange(0, BLOCK_CHUNKS)[None, :]
    m_chunk = m_t & (o_chunk < chunks)
    b_maxima = tl.load(p_max + o_row * chunks + o_chunk, mask=m_chunk, other=float("-inf"))
    b_sums = tl.load(p_sum + o_row * chunks + o_chunk, mask=m_chunk, other=0.0)
    b_max = finite_max(b_maxima, 1)
    b_sum = tl.sum(b_sums * tl.exp(b_maxima - b_max), axis=1, keep_dims=True)
    b_norm = safe_reciprocal(b_sum)
    tl.store(p_lse + o_row, b_max + tl.log(tl.where(b_sum == 0.0, 1.0, b_sum)), mask=m_t)
    b_message = tl.zeros((BLOCK_T, BLOCK_DV), tl.float32)
    for i_chunk in range(chunks):
        b_chunk_max = tl.load(p_max + o_row * chunks + i_chunk, mask=m_t, other=float("-inf"))
        p_part = p_message + (o_row * chunks + i_chunk) * DV + o_dv
        b_part = tl.load(p_part, mask=m_t & (o_dv < DV), other=0.0)
        b_message += tl.exp(b_chunk_max - b_max) * b_part
    b_message *= b_norm
    if TOPK > 0:
        o_best = tl.arange(0, BLOCK_BEST)[None, :]
        m_best = m_t & (o_best < chunks * TOPK)
        p_best = o_row * (chunks * TOPK) + o_best
        b_cell = tl.load(p_best_cells + p_best, mask=m_best, other=-1)
        b_score = tl.load(p_best_scores + p_best, mask=m_best, other=float("-inf"))
        b_chosen, o_slot, b_count = choose_best(b_score, b_cell >= 0, TOPK)
        o_k = tl.arange(0, BLOCK_TOPK)[None, :]
        m_rest = m_t & (o_k >= b_count) & (o_k < TOPK)
        tl.store(p_selection + o_row * TOPK + o_slot, b_cell, mask=b_chosen)
        tl.store(p_selection + o_row * TOPK + o_k, -1, mask=m_rest)
        if WITH_SCORES:
            b_attention = tl.exp(b_score - b_max) * b_norm
            tl.store(p_scores + o_row * TOPK + o_slot, b_attention, mask=b_chosen)
            tl.store(p_scores + o_row * TOPK + o_k, 0.0, mask=m_rest)
        if VARIANT_A:
            # Kept cells speak one level down: take back what they said here.
            tl.debug_barrier()
            i_b = i_bn // heads
            p_v += i_b * sv_b + (i_bn - i_b * heads) * sv_n
            for i_k in range(TOPK):
                b_kept = tl.load(p_selection + o_row * TOPK + i_k, mask=m_t, other=-1).to(tl.int64)
                b_share = tl.load(p_scores + o_row * TOPK + i_k, mask=m_t, other=0.0)
                b_value = tl.load(
                    p_v + b_kept * sv_t + o_dv, mask=(b_kept >= 0) & (o_dv < DV), other=0.0
                )
                b_message -= b_share * b_value.to(tl.float32)
    if WEIGHTED:
        b_message *= tl.load(p_weight)
    tl.store(p_total + o_row * DV + o_dv, b_message, mask=m_t & (o_dv < DV))


@triton.jit
def coarse_bwd_queries_kernel(
    p_q, p_k, p_v, p_visible, p_weight, p_selection, p_lse, p_dtotal, p_dscores,
    p_dq, p_dweight, p_delta,
    scale, heads, cells, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(cells, BLOCK_T)
    i_bn = (tl.program_id(0) // blocks).to(tl.int64)
    i_t = tl.program_id(0) % blocks
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < cells
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_row = i_bn * cells + o_t
    m_q = m_t[:, None] & (o_d < D)[None, :]
    p_q += i_b * sq_b + i_n * sq_n + o_t.to(tl.int64)[:, None] * sq_t + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    p_dtotal += o_row[:, None] * DV + o_dv[None, :]
    b_do = tl.load(p_dtotal, mask=m_t[:, None] & (o_dv < DV)[None, :], other=0.0)
    b_lse = tl.load(p_lse + o_row[:, None], mask=m_t[:, None], other=0.0)
    p_k += i_b * sk_b + i_n * sk_n
    p_v += i_b * sv_b + i_n * sv_n
    w = tl.load(p_weight).to(tl.float32) if WEIGHTED else 1.0

    b_delta = tl.zeros((BLOCK_T, 1), tl.float32)
    b_dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i_s in range(0, keys, BLOCK_S):  # first the mean gradient of each row
        b_k, b_shown, o_s = key_block(
            p_k, p_visible, i_s, i_b, keys, sk_t, BLOCK_S, D, BLOCK_D, MASKED
        )
        b_v, _, _ = key_block(p_v, p_visible, i_s, i_b, keys, sv_t, BLOCK_S, DV, BLOCK_DV, MASKED)
        b_attention = tl.exp(scores_of(b_q, b_k, b_shown, scale, PRECISION) - b_lse)
        b_dattention = dot(b_do.to(b_v.dtype), tl.trans(b_v), PRECISION)
        if VARIANT_A and TOPK > 0:
            _, b_dattention = silence_kept(
                b_attention, b_dattention, p_selection, p_dscores, o_row, m_t, o_s, TOPK
            )
        b_delta += tl.sum(b_attention * b_dattention, axis=1, keep_dims=True)
    for i_s in range(0, keys, BLOCK_S):  # then what differs from it
        b_k, b_shown, o_s = key_block(
            p_k, p_visible, i_s, i_b, keys, sk_t, BLOCK_S, D, BLOCK_D, MASKED
        )
        b_v, _, _ = key_block(p_v, p_visible, i_s, i_b, keys, sv_t, BLOCK_S, DV, BLOCK_DV, MASKED)
        b_attention = tl.exp(scores_of(b_q, b_k, b_shown, scale, PRECISION) - b_lse)
        b_dattention = dot(b_do.to(b_v.dtype), tl.trans(b_v), PRECISION)
        if VARIANT_A and TOPK > 0:
            _, b_dattention = silence_kept(
                b_attention, b_dattention, p_selection, p_dscores, o_row, m_t, o_s, TOPK
            )
        b_dscore = b_attention * (b_dattention - b_delta)
        b_dq += dot(b_dscore.to(b_k.dtype), b_k, PRECISION)
    tl.store(p_delta + o_row[:, None], b_delta, mask=m_t[:, None])
    if WEIGHTED:
        tl.store(p_dweight + tl.program_id(0), tl.sum(tl.where(m_t[:, None], b_delta, 0.0)))
    p_dq += o_row[:, None] * D + o_d[None, :]
    tl.store(p_dq, b_dq * (scale * w), mask=m_q)


@triton.jit
def coarse_bwd_keys_kernel(
    p_q, p_k, p_v, p_visible, p_weight, p_selection, p_lse, p_delta, p_dtotal, p_dscores,
    p_dk, p_dv,
    scale, heads, cells, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(keys, BLOCK_S)
    i_bn = (tl.program_id(0) // blocks).to(tl.int64)
    i_s = (tl.program_id(0) % blocks) * BLOCK_S
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    p_k += i_b * sk_b + i_n * sk_n
    p_v += i_b * sv_b + i_n * sv_n
    b_k, b_shown, o_s = key_block(p_k, p_visible, i_s, i_b, keys, sk_t, BLOCK_S, D, BLOCK_D, MASKED)
    b_v, _, _ = key_block(p_v, p_visible, i_s, i_b, keys, sv_t, BLOCK_S, DV, BLOCK_DV, MASKED)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    p_q += i_b * sq_b + i_n * sq_n
    w = tl.load(p_weight).to(tl.float32) if WEIGHTED else 1.0
    b_dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_S, BLOCK_DV), tl.float32)
    for i_t in range(0, cells, BLOCK_T):
        o_t = i_t + tl.arange(0, BLOCK_T)
        m_t = o_t < cells
        o_row = i_bn * cells + o_t
        p_rows = p_q + o_t.to(tl.int64)[:, None] * sq_t + o_d[None, :]
        b_q = tl.load(p_rows, mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
        p_grads = p_dtotal + o_row[:, None] * DV + o_dv[None, :]
        b_do = tl.load(p_grads, mask=m_t[:, None] & (o_dv < DV)[None, :], other=0.0)
        b_do = b_do.to(b_v.dtype)
        b_lse = tl.load(p_lse + o_row[:, None], mask=m_t[:, None], other=0.0)
        b_delta = tl.load(p_delta + o_row[:, None], mask=m_t[:, None], other=0.0)
        b_attention = tl.exp(scores_of(b_q, b_k, b_shown, scale, PRECISION) - b_lse)
        b_attention = tl.where(m_t[:, None], b_attention, 0.0)
        b_dattention = dot(b_do, tl.trans(b_v), PRECISION)
        b_spoken = b_attention
        if VARIANT_A and TOPK > 0:
            b_spoken, b_dattention = silence_kept(
                b_attention, b_dattention, p_selection, p_dscores, o_row, m_t, o_s, TOPK
            )
        b_dscore = b_attention * (b_dattention - b_delta)
        b_dk += dot(tl.trans(b_dscore.to(b_q.dtype)), b_q, PRECISION)
        b_dv += dot(tl.trans(b_spoken.to(b_do.dtype)), b_do, PRECISION)
    o_out = i_bn * keys + o_s
    p_dk += o_out[:, None] * D + o_d[None, :]
    p_dv += o_out[:, None] * DV + o_dv[None, :]
    tl.store(p_dk, b_dk * (scale * w), mask=(o_s < keys)[:, None] & (o_d < D)[None, :])
    tl.store(p_dv, b_dv * w, mask=(o_s < keys)[:, None] & (o_dv < DV)[None, :])
