# SPDX-License-Identifier: Apache-2.0
"""Kernels of the finer levels, where the F children of a query cell share their candidates.

A program holds the F queries of a family and all their candidates, the F children of each of the
K kept cells, in registers. A matrix unit needs at least 16 rows; instead of padding F queries, the
candidates are divided into parts, and row (g, f) is query f with part g, without redundant work.
If there are too few candidates (in 1-D, 12 for two queries and K 6), a program holds several
families instead, and row (g, f) is query f of family g with the candidates of family g.
Scores, softmax, message and selection stay in registers; backward recomputes them.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.attention.triton.kernels.places import (
    child_of,
    is_on_grid,
    place_of,
    row_at,
)
from quadtree_attention.ops.attention.triton.kernels.select import (
    SPREAD,
    choose_best,
    finite_max,
    row_max,
    row_sum,
    safe_reciprocal,
    share_at,
)
from quadtree_attention.ops.kernel import kernel, load_rows, quotient, store_rows


@triton.jit
def families_of(size_0, size_1, size_2):
    """Number of families per head."""
    return (size_0 + 1) // 2 * ((size_1 + 1) // 2) * ((size_2 + 1) // 2)


@triton.jit
def family_of_part(i_first, i_part, FAMILIES: tl.constexpr):
    """Index of the family of a part, over all heads."""
    i_row = i_first
    if FAMILIES > 1:
        i_row += i_part
    return i_row


@triton.jit
def of_families(m_row, i_row, rows, FAMILIES: tl.constexpr):
    """Mask out rows without a family, which the last program may have."""
    if FAMILIES > 1:
        m_row = m_row & (i_row < rows)
    return m_row


@triton.jit
def candidates_of_part(i_part, FAMILIES: tl.constexpr, WIDTH: tl.constexpr):
    """Index of the first candidate of a part, among those of its family."""
    return i_part * WIDTH if FAMILIES == 1 else 0


@triton.jit
def head_of_part(i_first, i_part, heads, families, FAMILIES: tl.constexpr):
    """Batch entry and head (combined and separate) of a part's family, and its index in the head.

    Only the index of the first family is divided; the others are derived from it.
    """
    i_bn = i_first // families
    i_b = i_bn // heads
    i_n = i_bn - i_b * heads
    o_family = i_first - i_bn * families
    if FAMILIES > 1:
        o_family += i_part
        i_step = quotient(o_family, families)
        o_family -= i_step * families
        i_bn += i_step
        i_n += i_step
        i_step = quotient(i_n, heads)
        i_n -= i_step * heads
        i_b += i_step
    return i_bn.to(tl.int64), i_b.to(tl.int64), i_n.to(tl.int64), o_family


@triton.jit
def family(i_first, i_part, rows, heads, size_0, size_1, size_2, o_child, BITS: tl.constexpr,
           FAMILIES: tl.constexpr):  # fmt: skip
    """Batch entry and head of a query family, and rows and mask of its queries."""
    above_1, above_2 = (size_1 + 1) // 2, (size_2 + 1) // 2
    families = families_of(size_0, size_1, size_2)
    i_bn, i_b, i_n, o_family = head_of_part(i_first, i_part, heads, families, FAMILIES)
    o_place = child_of(place_of(o_family, above_1, above_2, BITS), o_child, BITS)
    m_query = is_on_grid(o_place, size_0, size_1, size_2, BITS)
    m_query = of_families(m_query, family_of_part(i_first, i_part, FAMILIES), rows, FAMILIES)
    return i_bn, i_b, i_n, row_at(o_place, size_1, size_2, BITS), m_query


@triton.jit
def offsets(i_b, i_n, o_row, s_b, s_n, s_t):
    """Offset of the rows of a head."""
    return i_b * s_b + i_n * s_n + o_row.to(tl.int64) * s_t


@triton.jit
def candidates(p_parents, p_shown, o_c, m_c, i_b, key_0, key_1, key_2,
               KEPT: tl.constexpr, KEY_BITS: tl.constexpr, HIDES: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Places and rows of the candidates `o_c`, and the mask of visible ones."""
    F: tl.constexpr = 2 ** len(KEY_BITS)
    m_shown = m_c & (o_c // F < KEPT)
    o_parent = tl.load(p_parents + o_c // F, mask=m_shown, other=-1)
    if HIDES:
        m_shown = m_shown & (o_parent >= 0)
    else:  # all exist, unless scores were NaN: then any cell may be used
        o_parent = tl.maximum(o_parent, 0)
    o_place = child_of(o_parent, o_c % F, KEY_BITS)
    o_row = row_at(o_place, key_1, key_2, KEY_BITS)
    if HIDES:
        m_shown = m_shown & is_on_grid(o_place, key_0, key_1, key_2, KEY_BITS)
    if MASKED:
        p_row = p_shown + i_b * key_0 * key_1 * key_2 + o_row
        m_shown = m_shown & (tl.load(p_row, mask=m_shown, other=0) != 0)
    return o_place, o_row, m_shown


@triton.jit
def load_part(p_x, p_parents, p_shown, g, i_first, rows, heads, families, key_0, key_1, key_2,
              s_b, s_n, s_t,
              D: tl.constexpr, BLOCK_D: tl.constexpr, KEPT: tl.constexpr, FAMILIES: tl.constexpr,
              WIDTH: tl.constexpr, KEY_BITS: tl.constexpr, HIDES: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Keys or values of the candidates of part `g`; zeros for hidden ones."""
    i_row = family_of_part(i_first, g, FAMILIES)
    _, i_b, i_n, _ = head_of_part(i_first, g, heads, families, FAMILIES)
    o_c = candidates_of_part(g, FAMILIES, WIDTH) + tl.arange(0, WIDTH)
    m_c = of_families(o_c >= 0, o_c * 0 + i_row, rows, FAMILIES)
    _, o_row, m_row = candidates(
        p_parents + i_row.to(tl.int64) * KEPT, p_shown, o_c, m_c, i_b,
        key_0, key_1, key_2, KEPT, KEY_BITS, HIDES, MASKED,
    )  # fmt: skip
    return load_rows(p_x + i_b * s_b + i_n * s_n, o_row, m_row, s_t, D, BLOCK_D)


@triton.jit
def family_scores(
    p_q, p_k, p_parents, p_shown, o_query, m_query, i_first, rows, heads, families, scale,
    key_0, key_1, key_2, sk_b, sk_n, sk_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, KEPT: tl.constexpr, FAMILIES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, KEY_BITS: tl.constexpr,
    HIDES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the queries at `o_query`, (ROWS, WIDTH): row (g, f) is query f with part g."""
    i_part = tl.arange(0, ROWS) // 2 ** len(KEY_BITS)
    b_q = load_rows(p_q, o_query, m_query, 1, D, BLOCK_D)
    b_score = tl.zeros((ROWS, WIDTH), tl.float32)
    for g in tl.static_range(PARTS):
        b_k = load_part(
            p_k, p_parents, p_shown, g, i_first, rows, heads, families, key_0, key_1, key_2,
            sk_b, sk_n, sk_t, D, BLOCK_D, KEPT, FAMILIES, WIDTH, KEY_BITS, HIDES, MASKED,
        )  # fmt: skip
        b_here = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision=PRECISION)
        b_score = tl.where((i_part == g)[:, None], b_here, b_score)
    return b_score * scale, b_q


@triton.jit
def add_part(b_sum, b_weight, b_x, m_own, FAMILIES: tl.constexpr, PRECISION: tl.constexpr):
    """`b_sum` plus the weighted sum of the candidates of a part, in the rows of this part.

    Other families are masked instead of multiplied by 0, which would give NaN for infinities.
    """
    if FAMILIES > 1:
        b_here = tl.dot(b_weight.to(b_x.dtype), b_x, input_precision=PRECISION)
        b_sum = tl.where(m_own[:, None], b_here, b_sum)
    else:
        b_own = tl.where(m_own[:, None], b_weight, 0.0).to(b_x.dtype)
        b_sum = tl.dot(b_own, b_x, acc=b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def all_candidates(p_parents, p_shown, i_first, rows, heads, families, key_0, key_1, key_2,
                   KEPT: tl.constexpr, FAMILIES: tl.constexpr, PARTS: tl.constexpr,
                   GROUPS: tl.constexpr, WIDTH: tl.constexpr, KEY_BITS: tl.constexpr,
                   HIDES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Places of the candidates of all parts, and their mask: (G, 1, W)."""
    i_part = tl.arange(0, GROUPS)[:, None, None]
    i_row = family_of_part(i_first, i_part, FAMILIES)
    o_c = candidates_of_part(i_part, FAMILIES, WIDTH) + tl.arange(0, WIDTH)[None, None, :]
    _, i_b, _, _ = head_of_part(i_first, i_part, heads, families, FAMILIES)
    o_place, _, m_shown = candidates(
        p_parents + i_row.to(tl.int64) * KEPT, p_shown, o_c,
        of_families(i_part < PARTS, i_row, rows, FAMILIES), i_b,
        key_0, key_1, key_2, KEPT, KEY_BITS, HIDES, MASKED,
    )  # fmt: skip
    return o_place, m_shown


@triton.jit
def spread(b_x, NDIM: tl.constexpr):
    """(ROWS, W) -> (G, F, W), queries on axis 1."""
    return tl.reshape(b_x, (b_x.shape[0] // 2**NDIM, 2**NDIM, b_x.shape[1]))


@triton.jit
def shares(b_score, NDIM: tl.constexpr):
    """Softmax over the children of each kept cell, (G, F, W) -> (G, F, W / F, F)."""
    F: tl.constexpr = 2**NDIM
    b_family = tl.reshape(b_score, (b_score.shape[0], F, b_score.shape[2] // F, F))
    b_share = tl.exp(b_family - finite_max(b_family, 3))
    return b_share * safe_reciprocal(tl.sum(b_share, axis=3, keep_dims=True))


@triton.jit
def kept_cells(i_first, rows, KEPT: tl.constexpr, FAMILIES: tl.constexpr, ROWS: tl.constexpr,
               PARTS: tl.constexpr, WIDTH: tl.constexpr, NDIM: tl.constexpr):  # fmt: skip
    """Positions of the kept cells of all parts in their list, and their mask: (G, 1, W / F, 1)"""
    F: tl.constexpr = 2**NDIM
    i_part = tl.arange(0, ROWS // F)[:, None, None, None]
    i_row = family_of_part(i_first, i_part, FAMILIES)
    o_kept = candidates_of_part(i_part, FAMILIES, WIDTH // F)
    o_kept = o_kept + tl.arange(0, WIDTH // F)[None, None, :, None]
    m_kept = of_families((i_part < PARTS) & (o_kept < KEPT), i_row, rows, FAMILIES)
    return i_row.to(tl.int64) * KEPT + o_kept, m_kept


@kernel
def fine_fwd_kernel(
    p_q, p_k, p_v, p_shown, p_logits, p_parents, p_parent_scores, p_inherited,
    p_total, p_selection, p_scores,
    scale, share, level, levels, rows, heads, size_0, size_1, size_2, key_0, key_1, key_2,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t,
    QUERY_BITS: tl.constexpr, KEY_BITS: tl.constexpr, KEPT: tl.constexpr, FAMILIES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, BLOCK_TOPK: tl.constexpr,
    VARIANT_A: tl.constexpr, HIDES: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    WITH_SCORES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    NDIM: tl.constexpr = len(QUERY_BITS)
    F: tl.constexpr = 2**NDIM
    GROUPS: tl.constexpr = ROWS // F
    AXIS: tl.constexpr = SPREAD if FAMILIES == 1 else 2  # axes of the candidates of a query
    i_first = tl.program_id(0) * FAMILIES
    families = families_of(size_0, size_1, size_2)
    i_part = tl.arange(0, ROWS) // F
    o_f = tl.arange(0, ROWS) % F
    _, i_b, i_n, o_query, m_query = family(
        i_first, i_part, rows, heads, size_0, size_1, size_2, o_f, QUERY_BITS, FAMILIES
    )
    b_score, _ = family_scores(
        p_q, p_k, p_parents, p_shown, offsets(i_b, i_n, o_query, sq_b, sq_n, sq_t), m_query,
        i_first, rows, heads, families, scale, key_0, key_1, key_2, sk_b, sk_n, sk_t,
        D, BLOCK_D, KEPT, FAMILIES, ROWS, PARTS, WIDTH, KEY_BITS, HIDES, MASKED, PRECISION,
    )  # fmt: skip
    b_score = spread(b_score, NDIM)
    o_place, m_shown = all_candidates(
        p_parents, p_shown, i_first, rows, heads, families, key_0, key_1, key_2,
        KEPT, FAMILIES, PARTS, GROUPS, WIDTH, KEY_BITS, HIDES, MASKED,
    )  # fmt: skip
    m_shown = tl.broadcast_to(m_shown, b_score.shape)
    b_score = tl.where(m_shown, b_score, float("-inf"))
    if VARIANT_A:
        o_kept, m_kept = kept_cells(i_first, rows, KEPT, FAMILIES, ROWS, PARTS, WIDTH, NDIM)
        b_above = tl.load(p_parent_scores + o_kept, mask=m_kept, other=0.0)
        b_attention = tl.reshape(shares(b_score, NDIM) * b_above, b_score.shape)
        b_attention = tl.where(m_shown, b_attention, 0.0)
        b_rank = b_attention
    else:
        b_max = row_max(b_score, AXIS)
        b_attention = tl.exp(b_score - tl.where(b_max == float("-inf"), 0.0, b_max))
        b_norm = safe_reciprocal(row_sum(b_attention, AXIS))
        b_rank = b_score

    if TOPK > 0:
        b_chosen, o_slot, b_count = choose_best(b_rank, m_shown, TOPK, AXIS)
        i_part3 = tl.arange(0, GROUPS)[:, None, None]
        o_child = tl.arange(0, F)[None, :, None]
        i_bn, _, _, o_out, m_out = family(
            i_first, i_part3, rows, heads, size_0, size_1, size_2, o_child, QUERY_BITS, FAMILIES
        )
        o_out = (i_bn * size_0 * size_1 * size_2 + o_out) * TOPK
        # A single tensor to convert to the layout of stores; slots are in range for any input.
        o_slot = tl.where(b_chosen & m_out & (o_slot < TOPK), o_slot, -1)
        o_k = tl.arange(0, BLOCK_TOPK)[None, None, :]
        m_rest = (o_k >= b_count) & (o_k < TOPK) & m_out
        b_places = tl.broadcast_to(o_place, b_score.shape)
        tl.store(p_selection + o_out + o_slot, b_places, mask=o_slot >= 0)
        tl.store(p_selection + o_out + o_k, -1, mask=m_rest)
        if WITH_SCORES:
            b_kept = b_attention if VARIANT_A else b_attention * b_norm
            tl.store(p_scores + o_out + o_slot, b_kept, mask=o_slot >= 0)
            tl.store(p_scores + o_out + o_k, 0.0, mask=m_rest)
        if VARIANT_A:  # kept cells contribute at the next level
            b_attention = tl.where(b_chosen, 0.0, b_attention)

    # Values are loaded late, since the selection above needs the registers.
    b_weight = tl.reshape(b_attention, (ROWS, WIDTH))
    b_message = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for g in tl.static_range(PARTS):
        b_v = load_part(
            p_v, p_parents, p_shown, g, i_first, rows, heads, families, key_0, key_1, key_2,
            sv_b, sv_n, sv_t, DV, BLOCK_DV, KEPT, FAMILIES, WIDTH, KEY_BITS, HIDES, MASKED,
        )  # fmt: skip
        b_message = add_part(b_message, b_weight, b_v, i_part == g, FAMILIES, PRECISION)
    OUT: tl.constexpr = F if FAMILIES == 1 else ROWS
    if FAMILIES == 1:
        b_message = tl.sum(spread(b_message, NDIM), axis=0)  # (F, BLOCK_DV)
    if not VARIANT_A:
        b_message *= tl.reshape(b_norm, (OUT, 1))
    b_message *= share_at(p_logits, level, levels) if WEIGHTED else share
    o_out = tl.arange(0, OUT)
    i_out = family_of_part(i_first, o_out // F, FAMILIES) + tl.zeros((OUT,), tl.int32)
    b_inherited = load_rows(p_inherited, i_out, i_out < rows, DV, DV, BLOCK_DV)
    if level == 1:  # the message of level 0 is unweighted
        b_inherited *= share_at(p_logits, 0, levels) if WEIGHTED else share
    b_message += b_inherited
    _, i_b, i_n, o_out, m_out = family(
        i_first, o_out // F, rows, heads, size_0, size_1, size_2, o_out % F, QUERY_BITS, FAMILIES
    )
    o_out = offsets(i_b, i_n, o_out, so_b, so_n, so_t)
    store_rows(p_total, b_message, o_out, m_out, 1, DV)


@kernel
def fine_bwd_kernel(
    p_q, p_k, p_v, p_shown, p_logits, p_parents, p_parent_scores, p_selection,
    p_dtotal, p_dscores,
    p_dq, p_dweight, p_dparent_scores, p_dinherited, p_lse, p_delta,
    scale, share, level, levels, rows, heads, size_0, size_1, size_2, key_0, key_1, key_2,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t, sdq_b, sdq_n, sdq_t,
    QUERY_BITS: tl.constexpr, KEY_BITS: tl.constexpr, KEPT: tl.constexpr, FAMILIES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, HIDES: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries and inherited messages, and statistics for the gradients of keys."""
    NDIM: tl.constexpr = len(QUERY_BITS)
    F: tl.constexpr = 2**NDIM
    GROUPS: tl.constexpr = ROWS // F
    AXIS: tl.constexpr = SPREAD if FAMILIES == 1 else 2  # axes of the candidates of a query
    i_first = tl.program_id(0) * FAMILIES
    families = families_of(size_0, size_1, size_2)
    i_part = tl.arange(0, ROWS) // F
    o_f = tl.arange(0, ROWS) % F
    _, i_b, i_n, o_query, m_query = family(
        i_first, i_part, rows, heads, size_0, size_1, size_2, o_f, QUERY_BITS, FAMILIES
    )
    b_score, _ = family_scores(
        p_q, p_k, p_parents, p_shown, offsets(i_b, i_n, o_query, sq_b, sq_n, sq_t), m_query,
        i_first, rows, heads, families, scale, key_0, key_1, key_2, sk_b, sk_n, sk_t,
        D, BLOCK_D, KEPT, FAMILIES, ROWS, PARTS, WIDTH, KEY_BITS, HIDES, MASKED, PRECISION,
    )  # fmt: skip
    b_dattention, b_do = family_scores(  # the gradient of an attention weight is do . v
        p_dtotal, p_v, p_parents, p_shown, offsets(i_b, i_n, o_query, so_b, so_n, so_t), m_query,
        i_first, rows, heads, families, 1.0, key_0, key_1, key_2, sv_b, sv_n, sv_t,
        DV, BLOCK_DV, KEPT, FAMILIES, ROWS, PARTS, WIDTH, KEY_BITS, HIDES, MASKED, PRECISION,
    )  # fmt: skip
    b_do = spread(b_do.to(tl.float32), NDIM)
    if FAMILIES == 1:  # every part has the same queries
        b_do = tl.where(tl.arange(0, GROUPS)[:, None, None] == 0, b_do, 0.0)
    b_dinherited = tl.sum(b_do, axis=1)  # (G, BLOCK_DV)
    i_out = i_first + tl.arange(0, GROUPS)
    m_out = (tl.arange(0, GROUPS) < FAMILIES) & (i_out < rows)
    store_rows(p_dinherited, b_dinherited, i_out, m_out, DV, DV)

    b_score = spread(b_score, NDIM)
    b_dattention = spread(b_dattention, NDIM)
    o_place, m_shown = all_candidates(
        p_parents, p_shown, i_first, rows, heads, families, key_0, key_1, key_2,
        KEPT, FAMILIES, PARTS, GROUPS, WIDTH, KEY_BITS, HIDES, MASKED,
    )  # fmt: skip
    m_shown = tl.broadcast_to(m_shown, b_score.shape)
    b_score = tl.where(m_shown, b_score, float("-inf"))
    i_part3 = tl.arange(0, GROUPS)[:, None, None]
    o_child = tl.arange(0, F)[None, :, None]
    i_bn, _, _, o_query3, m_query3 = family(
        i_first, i_part3, rows, heads, size_0, size_1, size_2, o_child, QUERY_BITS, FAMILIES
    )
    o_query3 = i_bn * size_0 * size_1 * size_2 + o_query3
    if VARIANT_A:
        o_kept, m_kept = kept_cells(i_first, rows, KEPT, FAMILIES, ROWS, PARTS, WIDTH, NDIM)
        b_above = tl.load(p_parent_scores + o_kept, mask=m_kept, other=0.0)
        b_share = shares(b_score, NDIM)
        if TOPK > 0:
            # A kept cell is not in the message here; its gradient is that of its score.
            for r in range(TOPK):
                o_slot = o_query3 * TOPK + r
                b_kept = tl.load(p_selection + o_slot, mask=m_query3, other=-1)
                b_dkept = tl.load(p_dscores + o_slot, mask=m_query3, other=0.0)
                m_silent = (b_kept == o_place) & m_shown
                b_dattention = tl.where(m_silent, b_dkept, b_dattention)
        # attention = score of the parent * share, and the share is a softmax within the family
        b_dfamily = tl.reshape(b_dattention, b_share.shape)
        b_dfamily = tl.where(tl.reshape(m_shown, b_share.shape), b_dfamily, 0.0)
        b_mean = tl.sum(b_dfamily * b_share, axis=3, keep_dims=True)
        b_dparent = tl.sum(b_mean, axis=1, keep_dims=True)
        tl.store(p_dparent_scores + o_kept, b_dparent, mask=m_kept)
        b_dscore = tl.reshape(b_share * b_above * (b_dfamily - b_mean), b_score.shape)
    else:
        b_max = row_max(b_score, AXIS)
        b_max = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_attention = tl.exp(b_score - b_max)
        b_sum = row_sum(b_attention, AXIS)
        b_attention *= safe_reciprocal(b_sum)
        b_delta = row_sum(b_attention * b_dattention, AXIS)
        w = share_at(p_logits, level, levels) if WEIGHTED else share
        if WEIGHTED:
            b_delta_sum = tl.sum(tl.sum(tl.sum(b_delta, axis=2), axis=1), axis=0)
            tl.store(p_dweight + tl.program_id(0), b_delta_sum)
        b_dscore = b_attention * (b_dattention - b_delta) * w
        b_lse = b_max + tl.log(tl.where(b_sum == 0.0, 1.0, b_sum))
        tl.store(p_lse + o_query3, b_lse, mask=m_query3)
        tl.store(p_delta + o_query3, b_delta, mask=m_query3)
    b_dscore = tl.reshape(tl.where(m_shown, b_dscore * scale, 0.0), (ROWS, WIDTH))
    b_dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for g in tl.static_range(PARTS):
        b_k = load_part(
            p_k, p_parents, p_shown, g, i_first, rows, heads, families, key_0, key_1, key_2,
            sk_b, sk_n, sk_t, D, BLOCK_D, KEPT, FAMILIES, WIDTH, KEY_BITS, HIDES, MASKED,
        )  # fmt: skip
        b_dq = add_part(b_dq, b_dscore, b_k, i_part == g, FAMILIES, PRECISION)
    OUT: tl.constexpr = F if FAMILIES == 1 else ROWS
    if FAMILIES == 1:
        b_dq = tl.sum(spread(b_dq, NDIM), axis=0)
    o_out = tl.arange(0, OUT)
    _, i_b, i_n, o_out, m_out = family(
        i_first, o_out // F, rows, heads, size_0, size_1, size_2, o_out % F, QUERY_BITS, FAMILIES
    )
    o_out = offsets(i_b, i_n, o_out, sdq_b, sdq_n, sdq_t)
    store_rows(p_dq, b_dq, o_out, m_out, 1, D)


@kernel
def fine_bwd_keys_kernel(
    p_q, p_k, p_v, p_shown, p_logits, p_parent_scores, p_selection, p_dtotal, p_dscores,
    p_users, p_slots, p_first, p_lse, p_delta, p_dk, p_dv,
    scale, share, level, levels, heads, size_0, size_1, size_2, key_0, key_1, key_2,
    sq_b, sq_n, sq_t, sk_b, sk_n, sk_t, sv_b, sv_n, sv_t, so_b, so_n, so_t,
    sdk_b, sdk_n, sdk_t, sdv_b, sdv_n, sdv_t,
    QUERY_BITS: tl.constexpr, KEY_BITS: tl.constexpr, BLOCK_M: tl.constexpr, KEPT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOPK: tl.constexpr, VARIANT_A: tl.constexpr, MASKED: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, one program per family of key cells, without atomics.

    `p_users` lists the query families that kept each key family, `p_slots` the index of the key
    family in their selection, and `p_first` the start of the list of each key family.
    """
    F: tl.constexpr = 2 ** len(QUERY_BITS)
    i_key = tl.program_id(0)
    o_c = tl.arange(0, 16)  # columns: the F keys, padded
    i_bn, i_b, i_n, o_key, m_key = family(
        i_key, 0, 0, heads, key_0, key_1, key_2, o_c % F, KEY_BITS, FAMILIES=1
    )
    m_key = m_key & (o_c < F)
    b_shown = m_key
    if MASKED:
        p_row = p_shown + i_b * key_0 * key_1 * key_2 + o_key
        b_shown = b_shown & (tl.load(p_row, mask=b_shown, other=0) != 0)
    o_key_place = place_of(o_key, key_1, key_2, KEY_BITS)
    b_k = load_rows(p_k + i_b * sk_b + i_n * sk_n, o_key, b_shown, sk_t, D, BLOCK_D)
    b_v = load_rows(p_v + i_b * sv_b + i_n * sv_n, o_key, b_shown, sv_t, DV, BLOCK_DV)
    p_q += i_b * sq_b + i_n * sq_n
    p_dtotal += i_b * so_b + i_n * so_n
    w = share_at(p_logits, level, levels) if WEIGHTED else share
    b_dk = tl.zeros((16, BLOCK_D), tl.float32)
    b_dv = tl.zeros((16, BLOCK_DV), tl.float32)
    o_m = tl.arange(0, BLOCK_M)  # rows: queries of several families
    i_first = i_bn * size_0 * size_1 * size_2
    i_begin = tl.load(p_first + i_key)  # 64 bits; the list itself is short
    count = (tl.load(p_first + i_key + 1) - i_begin).to(tl.int32)
    p_users += i_begin
    if VARIANT_A:
        p_slots += i_begin
    for i_user in range(0, count, BLOCK_M // F):
        o_user = i_user + o_m // F
        m_user = o_user < count
        b_user = tl.load(p_users + o_user, mask=m_user, other=0)  # place of a query family
        o_place = child_of(b_user, o_m % F, QUERY_BITS)
        m_query = m_user & is_on_grid(o_place, size_0, size_1, size_2, QUERY_BITS)
        o_query = row_at(o_place, size_1, size_2, QUERY_BITS)
        b_q = load_rows(p_q, o_query, m_query, sq_t, D, BLOCK_D)
        b_do = load_rows(p_dtotal, o_query, m_query, so_t, DV, BLOCK_DV).to(b_v.dtype)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        m_pair = m_query[:, None] & b_shown[None, :]
        b_score = tl.where(m_pair, b_score, float("-inf"))
        b_dattention = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if VARIANT_A:
            b_slot = tl.load(p_slots + o_user, mask=m_user, other=0)
            above_1, above_2 = (size_1 + 1) // 2, (size_2 + 1) // 2
            families = families_of(size_0, size_1, size_2)
            o_above = i_bn * families + row_at(b_user, above_1, above_2, QUERY_BITS)
            p_above = p_parent_scores + o_above * KEPT + b_slot
            b_share = tl.exp(b_score - finite_max(b_score, 1))
            b_share *= safe_reciprocal(tl.sum(b_share, axis=1, keep_dims=True))
            b_attention = b_share * tl.load(p_above, mask=m_user, other=0.0)[:, None]
            b_spoken = b_attention
            if TOPK > 0:
                for r in range(TOPK):
                    o_kept = (i_first + o_query) * TOPK + r
                    b_kept = tl.load(p_selection + o_kept, mask=m_query, other=-1)
                    b_dkept = tl.load(p_dscores + o_kept, mask=m_query, other=0.0)
                    m_kept = (b_kept[:, None] == o_key_place[None, :]) & m_pair
                    b_dattention = tl.where(m_kept, b_dkept[:, None], b_dattention)
                    b_spoken = tl.where(m_kept, 0.0, b_spoken)
            b_mean = tl.sum(b_dattention * b_share, axis=1, keep_dims=True)
            b_dscore = b_attention * (b_dattention - b_mean)
        else:
            b_lse = tl.load(p_lse + i_first + o_query, mask=m_query, other=0.0)
            b_delta = tl.load(p_delta + i_first + o_query, mask=m_query, other=0.0)
            b_attention = tl.exp(b_score - b_lse[:, None])
            b_dscore = b_attention * (b_dattention - b_delta[:, None]) * w
            b_spoken = b_attention * w
        b_dscore = tl.where(m_pair, b_dscore * scale, 0.0)
        b_spoken = tl.where(m_pair, b_spoken, 0.0)
        b_dk = tl.dot(tl.trans(b_dscore.to(b_q.dtype)), b_q, acc=b_dk, input_precision=PRECISION)
        b_dv = tl.dot(tl.trans(b_spoken.to(b_do.dtype)), b_do, acc=b_dv, input_precision=PRECISION)
    store_rows(p_dk + i_b * sdk_b + i_n * sdk_n, b_dk, o_key, m_key, sdk_t, D)
    store_rows(p_dv + i_b * sdv_b + i_n * sdv_n, b_dv, o_key, m_key, sdv_t, DV)
