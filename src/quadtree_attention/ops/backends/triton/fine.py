# SPDX-License-Identifier: Apache-2.0
"""Kernels of the finer levels, where the F children of a query cell share their candidates.

A program holds the F queries of a family (padded to the 16 rows a matrix unit wants) and all their
candidates, the F children of each of the K kept cells, in registers. Scores, softmax, message and
selection never leave the chip; backward recomputes them from the stored selection.
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
def family_candidates(p_parents, p_visible, i_row, heads, families, keys,
                      KEPT: tl.constexpr, CANDIDATES: tl.constexpr, F: tl.constexpr,
                      MASKED: tl.constexpr):  # fmt: skip
    """Candidates of a family, which of them are shown, and its batch entry and head."""
    i_bn = i_row // families
    i_b = i_bn // heads
    o_c = tl.arange(0, CANDIDATES)
    p_parents += i_row * KEPT + o_c // F
    b_parent = tl.load(p_parents, mask=o_c // F < KEPT, other=-1).to(tl.int64)
    b_cell = tl.where(b_parent >= 0, b_parent * F + o_c % F, -1)
    b_shown = b_cell >= 0
    if MASKED:
        b_shown = b_shown & (tl.load(p_visible + i_b * keys + b_cell, mask=b_shown, other=0) != 0)
    return b_cell, b_shown, i_b, i_bn - i_b * heads


@triton.jit
def family_scores(b_score, m_shown, b_parent_score, F: tl.constexpr):
    """Variant A: shares of the children of each kept cell times that cell's score.

    `b_score` (ROWS, C), `b_parent_score` (ROWS or 1, K), C = K * F. Also returns the shares.
    """
    ROWS: tl.constexpr = b_score.shape[0]
    CANDIDATES: tl.constexpr = b_score.shape[1]
    KEPT: tl.constexpr = CANDIDATES // F
    b_family = tl.reshape(b_score, (ROWS, KEPT, F))
    b_weight = tl.exp(b_family - finite_max(b_family, 2))
    b_share = b_weight * safe_reciprocal(tl.sum(b_weight, axis=2, keep_dims=True))
    b_scores = tl.reshape(b_share * b_parent_score[:, :, None], (ROWS, CANDIDATES))
    b_share = tl.where(m_shown, tl.reshape(b_share, (ROWS, CANDIDATES)), 0.0)
    return tl.where(m_shown, b_scores, 0.0), b_share


@triton.jit
def fine_fwd_kernel(
    p_q, p_k, p_v, p_visible, p_weight, p_parents, p_parent_scores, p_inherited,
    p_total, p_selection, p_scores,
    scale, heads, families, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    F: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, CANDIDATES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
    VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    WITH_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_family = i_row % families
    o_m = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < F
    b_cell, b_shown, i_b, i_n = family_candidates(
        p_parents, p_visible, i_row, heads, families, keys, KEPT, CANDIDATES, F, MASKED
    )
    p_q += i_b * sq_b + i_n * sq_n + (i_family * F + o_m)[:, None] * sq_t + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
    p_k += i_b * sk_b + i_n * sk_n + b_cell[:, None] * sk_t + o_d[None, :]
    b_k = tl.load(p_k, mask=b_shown[:, None] & (o_d < D)[None, :], other=0.0)
    b_score = dot(b_q, tl.trans(b_k), PRECISION) * scale  # (ROWS, C)
    b_score = tl.where(b_shown[None, :], b_score, float("-inf"))
    if VARIANT_A:
        o_above = tl.arange(0, CANDIDATES // F)
        p_above = p_parent_scores + i_row * KEPT + o_above
        b_above = tl.load(p_above, mask=o_above < KEPT, other=0.0)
        b_attention, _ = family_scores(b_score, b_shown[None, :], b_above[None, :], F)
    else:
        b_attention = tl.exp(b_score - finite_max(b_score, 1))
        b_attention *= safe_reciprocal(tl.sum(b_attention, axis=1, keep_dims=True))

    if TOPK > 0:
        # Only the first F rows are queries: fold the padding away before choosing.
        b_rank = tl.where(m_m[:, None], b_attention if VARIANT_A else b_score, 0.0)
        b_rank = tl.sum(tl.reshape(b_rank, (ROWS // F, F, CANDIDATES)), axis=0)  # (F, C)
        b_chosen, o_slot, b_count = choose_best(b_rank, b_shown[None, :], TOPK)
        o_k = tl.arange(0, BLOCK_TOPK)[None, :]
        o_out = ((i_row * F + tl.arange(0, F)) * TOPK)[:, None]
        m_rest = (o_k >= b_count) & (o_k < TOPK)
        b_cells = tl.broadcast_to(b_cell.to(tl.int32)[None, :], (F, CANDIDATES))
        tl.store(p_selection + o_out + o_slot, b_cells, mask=b_chosen)
        tl.store(p_selection + o_out + o_k, -1, mask=m_rest)
        if WITH_SCORES:
            b_kept = b_rank
            if not VARIANT_A:
                b_kept = tl.exp(b_rank - finite_max(b_rank, 1))
                b_kept *= safe_reciprocal(tl.sum(b_kept, axis=1, keep_dims=True))
            tl.store(p_scores + o_out + o_slot, b_kept, mask=b_chosen)
            tl.store(p_scores + o_out + o_k, 0.0, mask=m_rest)
        if VARIANT_A:  # kept cells speak one level down
            b_silent = b_chosen.to(tl.float32)[None, :, :]
            b_silent = tl.broadcast_to(b_silent, (ROWS // F, F, CANDIDATES))
            b_attention *= 1.0 - tl.reshape(b_silent, (ROWS, CANDIDATES))

    # Values come late: the choice above needs the registers.
    p_v += i_b * sv_b + i_n * sv_n + b_cell[:, None] * sv_t + o_dv[None, :]
    b_v = tl.load(p_v, mask=b_shown[:, None] & (o_dv < DV)[None, :], other=0.0)
    b_message = dot(b_attention.to(b_v.dtype), b_v, PRECISION)  # (ROWS, BLOCK_DV)
    if WEIGHTED:
        b_message *= tl.load(p_weight)
    p_inherited += i_row * DV + o_dv
    b_inherited = tl.load(p_inherited, mask=o_dv < DV, other=0.0).to(tl.float32)
    p_total += (i_row * F + o_m)[:, None] * DV + o_dv[None, :]
    m_out = m_m[:, None] & (o_dv < DV)[None, :]
    tl.store(p_total, b_message + b_inherited[None, :], mask=m_out)


@triton.jit
def fine_bwd_kernel(
    p_q, p_k, p_v, p_visible, p_weight, p_parents, p_parent_scores, p_selection,
    p_dtotal, p_dscores,
    p_dq, p_dweight, p_dparent_scores, p_dinherited, p_lse, p_delta,
    scale, heads, families, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    F: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr, CANDIDATES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    i_family = i_row % families
    o_m = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < F
    b_cell, b_shown, i_b, i_n = family_candidates(
        p_parents, p_visible, i_row, heads, families, keys, KEPT, CANDIDATES, F, MASKED
    )
    m_k = b_shown[:, None] & (o_d < D)[None, :]
    m_v = b_shown[:, None] & (o_dv < DV)[None, :]
    m_q = m_m[:, None] & (o_d < D)[None, :]
    m_o = m_m[:, None] & (o_dv < DV)[None, :]

    p_q += i_b * sq_b + i_n * sq_n + (i_family * F + o_m)[:, None] * sq_t + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    p_k += i_b * sk_b + i_n * sk_n + b_cell[:, None] * sk_t + o_d[None, :]
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    p_v += i_b * sv_b + i_n * sv_n + b_cell[:, None] * sv_t + o_dv[None, :]
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    p_dtotal += (i_row * F + o_m)[:, None] * DV + o_dv[None, :]
    b_do = tl.load(p_dtotal, mask=m_o, other=0.0)
    tl.store(p_dinherited + i_row * DV + o_dv, tl.sum(b_do.to(tl.float32), axis=0), mask=o_dv < DV)
    b_do = b_do.to(b_v.dtype)

    b_score = dot(b_q, tl.trans(b_k), PRECISION) * scale
    b_score = tl.where(b_shown[None, :], b_score, float("-inf"))
    b_dattention = dot(b_do, tl.trans(b_v), PRECISION)  # gradient of every attention weight
    w = tl.load(p_weight).to(tl.float32) if WEIGHTED else 1.0
    if VARIANT_A:
        o_k = tl.arange(0, CANDIDATES // F)
        b_parent_score = tl.load(p_parent_scores + i_row * KEPT + o_k, mask=o_k < KEPT, other=0.0)
        b_attention, b_share = family_scores(b_score, b_shown[None, :], b_parent_score[None, :], F)
        if TOPK > 0:
            # A kept cell is silent here; its gradient is the one of its score.
            for r in range(TOPK):
                o_kept = (i_row * F + o_m) * TOPK + r
                b_kept = tl.load(p_selection + o_kept, mask=m_m, other=-1).to(tl.int64)
                b_dkept = tl.load(p_dscores + o_kept, mask=m_m, other=0.0)
                m_kept = (b_kept[:, None] == b_cell[None, :]) & b_shown[None, :]
                b_dattention = tl.where(m_kept, b_dkept[:, None], b_dattention)
        # attention = parent score * share, share = softmax within the family
        b_dfamily = tl.reshape(b_dattention * b_share, (ROWS, CANDIDATES // F, F))
        b_dparent = tl.sum(b_dfamily, axis=2)  # (ROWS, K)
        b_dparent_sum = tl.sum(tl.where(m_m[:, None], b_dparent, 0.0), axis=0)
        p_dparent_scores += i_row * KEPT + o_k
        tl.store(p_dparent_scores, b_dparent_sum, mask=o_k < KEPT)
        b_mean = tl.broadcast_to(b_dparent[:, :, None], (ROWS, CANDIDATES // F, F))
        b_mean = tl.reshape(b_mean, (ROWS, CANDIDATES))
        b_dscore = b_attention * (b_dattention - b_mean)
    else:
        b_max = finite_max(b_score, 1)
        b_attention = tl.exp(b_score - b_max)
        b_sum = tl.sum(b_attention, axis=1, keep_dims=True)
        b_attention *= safe_reciprocal(b_sum)
        b_delta = tl.sum(b_attention * b_dattention, axis=1, keep_dims=True)
        if WEIGHTED:
            tl.store(p_dweight + i_row, tl.sum(tl.where(m_m[:, None], b_delta, 0.0)))
        b_dscore = b_attention * (b_dattention - b_delta) * w
        b_lse = b_max + tl.log(tl.where(b_sum == 0.0, 1.0, b_sum))
        p_stat = (i_row * F + o_m)[:, None]
        tl.store(p_lse + p_stat, b_lse, mask=m_m[:, None])
        tl.store(p_delta + p_stat, b_delta, mask=m_m[:, None])
    b_dscore = tl.where(m_m[:, None], b_dscore * scale, 0.0)
    b_dq = dot(b_dscore.to(b_k.dtype), b_k, PRECISION)
    p_dq += (i_row * F + o_m)[:, None] * D + o_d[None, :]
    tl.store(p_dq, b_dq, mask=m_q)


@triton.jit
def count_users_kernel(p_parents, p_count, entries, per_head, key_families, BLOCK: tl.constexpr):
    """How many query families kept each key family."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_parent = tl.load(p_parents + o, mask=o < entries, other=-1)
    o_key = (o // per_head) * key_families + b_parent
    tl.atomic_add(p_count + o_key, 1, mask=b_parent >= 0, sem="relaxed")


@triton.jit
def list_users_kernel(p_parents, p_first, p_cursor, p_users, p_slots,
                      entries, per_head, key_families,
                      KEPT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Writes them side by side, in no particular order."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_parent = tl.load(p_parents + o, mask=o < entries, other=-1)
    m = b_parent >= 0
    o_key = (o // per_head) * key_families + b_parent
    o_place = tl.atomic_add(p_cursor + o_key, 1, mask=m, sem="relaxed")
    o_place += tl.load(p_first + o_key, mask=m, other=0)
    tl.store(p_users + o_place, (o // KEPT).to(tl.int32), mask=m)
    tl.store(p_slots + o_place, (o % KEPT).to(tl.int32), mask=m)


@triton.jit
def fine_bwd_keys_kernel(
    p_q, p_k, p_v, p_visible, p_weight, p_parent_scores, p_selection, p_dtotal, p_dscores,
    p_users, p_slots, p_first, p_lse, p_delta, p_dk, p_dv,
    scale, heads, families, key_families, keys,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t,
    F: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, one program per family of key cells: no atomics on them.

    `p_users` lists the query families that kept each key family, `p_slots` the place of the key
    family in their selection, and `p_first` where the list of each key family begins.
    """
    i_key = tl.program_id(0).to(tl.int64)
    i_bn = i_key // key_families
    i_family = i_key - i_bn * key_families
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads

    o_m = tl.arange(0, ROWS)  # rows: queries of several families
    o_c = tl.arange(0, 16)  # columns: the F keys, padded
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_cell = i_family * F + o_c
    b_shown = o_c < F
    if MASKED:
        b_shown = b_shown & (tl.load(p_visible + i_b * keys + o_cell, mask=b_shown, other=0) != 0)
    m_k = b_shown[:, None] & (o_d < D)[None, :]
    m_v = b_shown[:, None] & (o_dv < DV)[None, :]
    p_k += i_b * sk_b + i_n * sk_n + o_cell[:, None] * sk_t + o_d[None, :]
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    p_v += i_b * sv_b + i_n * sv_n + o_cell[:, None] * sv_t + o_dv[None, :]
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    w = tl.load(p_weight).to(tl.float32) if WEIGHTED else 1.0
    b_dk = tl.zeros((16, BLOCK_D), tl.float32)
    b_dv = tl.zeros((16, BLOCK_DV), tl.float32)
    i_begin = tl.load(p_first + i_key)
    i_end = tl.load(p_first + i_key + 1)
    for i_user in range(i_begin, i_end, ROWS // F):
        o_user = i_user + o_m // F
        m_user = o_user < i_end
        b_row = tl.load(p_users + o_user, mask=m_user, other=0).to(tl.int64)  # query family
        o_query = b_row * F + o_m % F
        o_token = o_query - i_bn * families * F
        p_queries = p_q + i_b * sq_b + i_n * sq_n + o_token[:, None] * sq_t + o_d[None, :]
        b_q = tl.load(p_queries, mask=m_user[:, None] & (o_d < D)[None, :], other=0.0)
        p_grads = p_dtotal + o_query[:, None] * DV + o_dv[None, :]
        b_do = tl.load(p_grads, mask=m_user[:, None] & (o_dv < DV)[None, :], other=0.0)
        b_do = b_do.to(b_v.dtype)
        b_score = dot(b_q, tl.trans(b_k), PRECISION) * scale
        m_pair = m_user[:, None] & b_shown[None, :]
        b_score = tl.where(m_pair, b_score, float("-inf"))
        b_dattention = dot(b_do, tl.trans(b_v), PRECISION)
        if VARIANT_A:
            b_slot = tl.load(p_slots + o_user, mask=m_user, other=0)
            p_parent = p_parent_scores + b_row * KEPT + b_slot
            b_parent_score = tl.load(p_parent, mask=m_user, other=0.0)
            b_share = tl.exp(b_score - finite_max(b_score, 1))
            b_share *= safe_reciprocal(tl.sum(b_share, axis=1, keep_dims=True))
            b_attention = b_share * b_parent_score[:, None]
            b_spoken = b_attention
            if TOPK > 0:
                for r in range(TOPK):
                    o_kept = o_query * TOPK + r
                    b_kept = tl.load(p_selection + o_kept, mask=m_user, other=-1).to(tl.int64)
                    b_dkept = tl.load(p_dscores + o_kept, mask=m_user, other=0.0)
                    m_kept = (b_kept[:, None] == o_cell[None, :]) & m_pair
                    b_dattention = tl.where(m_kept, b_dkept[:, None], b_dattention)
                    b_spoken = tl.where(m_kept, 0.0, b_spoken)
            b_mean = tl.sum(b_dattention * b_share, axis=1, keep_dims=True)
            b_dscore = b_attention * (b_dattention - b_mean)
        else:
            b_lse = tl.load(p_lse + o_query, mask=m_user, other=0.0)
            b_delta = tl.load(p_delta + o_query, mask=m_user, other=0.0)
            b_attention = tl.exp(b_score - b_lse[:, None])
            b_dscore = b_attention * (b_dattention - b_delta[:, None]) * w
            b_spoken = b_attention * w
        b_dscore = tl.where(m_pair, b_dscore * scale, 0.0)
        b_spoken = tl.where(m_pair, b_spoken, 0.0)
        b_dk += dot(tl.trans(b_dscore.to(b_q.dtype)), b_q, PRECISION)
        b_dv += dot(tl.trans(b_spoken.to(b_do.dtype)), b_do, PRECISION)
    o_row = i_bn * keys + o_cell
    tl.store(
        p_dk + o_row[:, None] * D + o_d[None, :], b_dk, mask=(o_c < F)[:, None] & (o_d < D)[None, :]
    )
    tl.store(
        p_dv + o_row[:, None] * DV + o_dv[None, :],
        b_dv,
        mask=(o_c < F)[:, None] & (o_dv < DV)[None, :],
    )
