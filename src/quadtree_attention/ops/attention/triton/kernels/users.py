# SPDX-License-Identifier: Apache-2.0
"""Lists of the query families that kept each key family, for all levels.

The selections of all levels are concatenated, coarse -> fine, each padded to whole programs, so
that one launch processes all of them. The lists are concatenated, too. Programs compute their
level from their index.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.attention.triton.kernels.places import place_of, row_at
from quadtree_attention.ops.attention.triton.kernels.select import MOST_LEVELS, shares_of
from quadtree_attention.ops.kernel import kernel


@triton.jit
def side_above(size, i_up):
    """A side of a grid, `i_up` levels above."""
    return ((size - 1) >> i_up) + 1


@triton.jit
def cells_above(size_0, size_1, size_2, i_up):
    """Number of cells of a grid `i_up` levels above, in 64 bits."""
    cells = side_above(size_0, i_up).to(tl.int64) * side_above(size_1, i_up)
    return cells * side_above(size_2, i_up)


@triton.jit
def level_of_program(batch_heads, above, kept, size_0, size_1, size_2, key_0, key_1, key_2,
                     BLOCK: tl.constexpr):  # fmt: skip
    """The level of the block of this program.

    Args:
        above: Number of levels from the finest grid up to the first selection.
        kept: K of each level, 8 bits of 64 each, the first one in the lowest.

    Returns:
        Number of levels from the finest grid up to its level, its K, the index of this block, the
        number of entries in its selection, and the number of key families of previous levels.
    """
    i_block = tl.program_id(0)
    o_first = tl.zeros((), tl.int64)
    k = (kept & 255).to(tl.int32)
    entries = batch_heads * cells_above(size_0, size_1, size_2, above) * k
    while i_block >= (entries + BLOCK - 1) // BLOCK:
        i_block -= ((entries + BLOCK - 1) // BLOCK).to(tl.int32)
        o_first += (batch_heads * cells_above(key_0, key_1, key_2, above) + 3) // 4 * 4
        above -= 1
        kept = kept >> 8
        k = (kept & 255).to(tl.int32)
        entries = batch_heads * cells_above(size_0, size_1, size_2, above) * k
    return above, k, i_block, entries, o_first


@triton.jit
def load_entries(p_parents, batch_heads, above, kept, size_0, size_1, size_2, key_0, key_1, key_2,
                 KEY_BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Level, K, index in the head, key family and mask of a block of entries.

    Key families are counted from the first one of the first level.
    """
    above, k, i_block, entries, o_first = level_of_program(
        batch_heads, above, kept, size_0, size_1, size_2, key_0, key_1, key_2, BLOCK
    )
    o = tl.arange(0, BLOCK)
    o_entry = i_block.to(tl.int64) * BLOCK + o
    p_parents += tl.program_id(0).to(tl.int64) * BLOCK
    b_parent = tl.load(p_parents + o, mask=o_entry < entries, other=-1)
    per_head = entries // batch_heads
    i_bn = o_entry // per_head
    o_key = o_first + i_bn * cells_above(key_0, key_1, key_2, above)
    o_key += row_at(b_parent, side_above(key_1, above), side_above(key_2, above), KEY_BITS)
    return above, k, o_entry - i_bn * per_head, o_key, b_parent >= 0


@kernel
def count_users_kernel(p_parents, p_count, batch_heads, above, kept,
                       size_0, size_1, size_2, key_0, key_1, key_2,
                       KEY_BITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Number of query families that kept each key family."""
    _, _, _, o_key, m = load_entries(
        p_parents, batch_heads, above, kept, size_0, size_1, size_2, key_0, key_1, key_2,
        KEY_BITS, BLOCK,
    )  # fmt: skip
    tl.atomic_add(p_count + 1 + o_key, 1, mask=m, sem="relaxed")


@kernel
def list_users_kernel(p_parents, p_first, p_cursor, p_users, p_slots, batch_heads, above, kept,
                      size_0, size_1, size_2, key_0, key_1, key_2,
                      QUERY_BITS: tl.constexpr, KEY_BITS: tl.constexpr, BLOCK: tl.constexpr,
                      WITH_SLOTS: tl.constexpr):  # fmt: skip
    """Write the users of every key family, in nondeterministic order.

    Users are places of query families. Slots are indices of the key family in the selection of the
    query family.
    """
    above, k, o_entry, o_key, m = load_entries(
        p_parents, batch_heads, above, kept, size_0, size_1, size_2, key_0, key_1, key_2,
        KEY_BITS, BLOCK,
    )  # fmt: skip
    o_list = tl.load(p_first + o_key, mask=m, other=0)
    o_list += tl.atomic_add(p_cursor + o_key, 1, mask=m, sem="relaxed")
    o_family = o_entry // k
    query_1, query_2 = side_above(size_1, above), side_above(size_2, above)
    b_user = place_of(o_family.to(tl.int32), query_1, query_2, QUERY_BITS)
    tl.store(p_users + o_list, b_user, mask=m)
    if WITH_SLOTS:
        tl.store(p_slots + o_list, (o_entry - o_family * k).to(tl.int32), mask=m)


@kernel
def logits_bwd_kernel(p_logits, p_dshare, p_dlogits, levels, width, BLOCK: tl.constexpr):
    """Gradients of the level logits from the gradients of their shares, in `width` parts each."""
    o_l = tl.arange(0, MOST_LEVELS)
    b_dshare = tl.zeros((MOST_LEVELS,), tl.float32)
    for i_level in range(levels):
        b_sum = tl.zeros((BLOCK,), tl.float32)
        for i_part in range(0, width, BLOCK):
            o_part = i_part + tl.arange(0, BLOCK)
            b_sum += tl.load(p_dshare + o_part, mask=o_part < width, other=0.0)
        b_dshare = tl.where(o_l == i_level, tl.sum(b_sum, axis=0), b_dshare)
        p_dshare += width
    b_shares = shares_of(p_logits, levels)
    b_mean = tl.sum(b_shares * b_dshare, axis=0)
    tl.store(p_dlogits + o_l, b_shares * (b_dshare - b_mean), mask=o_l < levels)
