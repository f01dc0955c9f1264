# SPDX-License-Identifier: Apache-2.0
"""Pieces that several kernels have in common.

Names in kernels: `p_` pointers, `b_` blocks of values, `o_` offsets, `m_` masks, `i_` program and
loop indices, `s_` strides. Addresses are computed in 64 bits.

The cells of a level are the rows of an array, in row-major order of the level's grid. Where one
kernel tells the next about a cell (selections), it writes its *place*: the coordinates packed
into one 32-bit number, so that the children of a cell follow by shifts, without a division. `BITS`
says how many bits each axis has there, see `limits.bits_of`.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

import triton
import triton.language as tl

from quadtree_attention.ops import launches
from quadtree_attention.ops.backends.triton import replay

# Numbers that differ from map to map: kernels are not compiled anew for multiples of 16 and for 1.
SIZES = {
    "above_0", "above_1", "above_2", "added_row", "batch_heads", "cells", "cells_above",
    "entries", "heads", "iterations", "key_0", "key_1", "key_2", "keys", "level", "new_row",
    "parts", "per_head", "per_span", "query_1", "query_2", "rows", "rows_out", "size_0", "size_1",
    "size_2", "spans",
}  # fmt: skip


class Kernel:
    """A kernel to launch on a grid, which tells of its launches where they are noted."""

    def __init__(self, function: Callable[..., None]) -> None:
        update_wrapper(self, function)
        parameters = signature(function).parameters
        self.parameters = list(parameters)
        self.constants = {x.name for x in parameters.values() if x.annotation is tl.constexpr}
        self.sizes = [name for name in self.parameters if name in SIZES]
        self.jit: Any = triton.jit(function, do_not_specialize=self.sizes)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if launches.is_recording():
            return partial(launches.note, self, grid)
        return partial(self._launch_and_tell, grid) if replay.is_noting() else self.jit[grid]

    def _launch_and_tell(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        compiled = self.jit[grid](*arguments, **constants)
        rest = self.parameters[len(arguments) :]
        values = [*arguments, *(constants[name] for name in rest)]
        if not isinstance(self.jit, triton.JITFunction):  # the interpreter compiles nothing
            replay.note(self.jit[grid], values, by_address=False)
        else:
            replay.note_kernel(compiled, (*grid, 1, 1)[:3], values)


def kernel(function: Callable[..., None]) -> Any:
    """A kernel that takes sizes. None of its parameters has a default."""
    return Kernel(function)


@triton.jit
def quotient(o_x, size):
    """`o_x // size` where that is below `LARGEST_QUOTIENT`: many times cheaper than a division."""
    o_q = (o_x.to(tl.float32) * (1.0 / size)).to(tl.int32)
    o_q -= (o_q * size > o_x).to(tl.int32)
    return o_q + ((o_q + 1) * size <= o_x).to(tl.int32)


@triton.jit
def place_of(o_row, size_1, size_2, BITS: tl.constexpr):
    """Packs the coordinates of a row number."""
    NDIM: tl.constexpr = len(BITS)
    o_place = o_row
    if NDIM == 2:
        i_0 = quotient(o_row, size_1)
        o_place = (i_0 << BITS[1]) | (o_row - i_0 * size_1)
    elif NDIM == 3:
        i_01 = quotient(o_row, size_2)
        i_0 = quotient(i_01, size_1)
        i_1 = i_01 - i_0 * size_1
        o_place = (i_0 << (BITS[1] + BITS[2])) | (i_1 << BITS[2]) | (o_row - i_01 * size_2)
    return o_place


@triton.jit
def coordinate(o_place, AXIS: tl.constexpr, BITS: tl.constexpr):
    """Coordinate of a place along one axis of a grid with two or three."""
    NDIM: tl.constexpr = len(BITS)
    o_x = o_place
    if AXIS + 1 < NDIM:
        o_x = o_x >> (BITS[NDIM - 1] + (BITS[1] if AXIS + 2 < NDIM else 0))
    if AXIS > 0:
        o_x = o_x & ((1 << BITS[AXIS]) - 1)
    return o_x


@triton.jit
def row_at(o_place, size_1, size_2, BITS: tl.constexpr):
    """Row number of a place."""
    NDIM: tl.constexpr = len(BITS)
    o_row = o_place
    if NDIM == 2:
        o_row = coordinate(o_place, 0, BITS) * size_1 + coordinate(o_place, 1, BITS)
    elif NDIM == 3:
        i_01 = coordinate(o_place, 0, BITS) * size_1 + coordinate(o_place, 1, BITS)
        o_row = i_01 * size_2 + coordinate(o_place, 2, BITS)
    return o_row


@triton.jit
def child_of(o_place, o_child, BITS: tl.constexpr):
    """Place of a child, one level down; children count row by row."""
    NDIM: tl.constexpr = len(BITS)
    o_step = o_child & 1
    if NDIM == 2:
        o_step = ((o_child >> 1) << BITS[1]) | o_step
    elif NDIM == 3:
        o_step = (((o_child >> 1) & 1) << BITS[2]) | o_step
        o_step = ((o_child >> 2) << (BITS[1] + BITS[2])) | o_step
    return o_place * 2 + o_step


@triton.jit
def is_on_grid(o_place, size_0, size_1, size_2, BITS: tl.constexpr):
    """Whether a place lies on the grid; odd sizes leave children that do not."""
    NDIM: tl.constexpr = len(BITS)
    if NDIM == 1:
        m_place = o_place < size_0
    else:
        m_place = coordinate(o_place, 0, BITS) < size_0
        m_place = m_place & (coordinate(o_place, 1, BITS) < size_1)
    if NDIM == 3:
        m_place = m_place & (coordinate(o_place, 2, BITS) < size_2)
    return m_place


@triton.jit
def entries(p_x, o_row, o_c, C: tl.constexpr):
    """Addresses of channels `o_c` of rows of a dense array."""
    return p_x + o_row.to(tl.int64)[:, None] * C + o_c[None, :]


@triton.jit
def load_rows(p_x, o_row, m_row, s_t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of an array whose last axis is dense; zeros where `m_row` is false."""
    o_d = tl.arange(0, BLOCK_D)
    p_rows = p_x + o_row.to(tl.int64)[:, None] * s_t + o_d[None, :]
    return tl.load(p_rows, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(p_x, b_x, o_row, m_row, s_t, D: tl.constexpr):
    o_d = tl.arange(0, b_x.shape[1])
    p_rows = p_x + o_row.to(tl.int64)[:, None] * s_t + o_d[None, :]
    tl.store(p_rows, b_x, mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def share_of_levels(p_logits, LEVELS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Softmax of the logits of all levels."""
    o_l = tl.arange(0, BLOCK_L)
    b_logits = tl.load(p_logits + o_l, mask=o_l < LEVELS, other=float("-inf")).to(tl.float32)
    b_shares = tl.exp(b_logits - tl.max(b_logits, axis=0))
    return b_shares / tl.sum(b_shares, axis=0)


@triton.jit
def finite_max(b_score, AXIS: tl.constexpr):
    """Maximum along an axis; 0 where nothing is shown, so that exp(score - max) stays 0."""
    b_max = tl.max(b_score, axis=AXIS, keep_dims=True)
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def safe_reciprocal(b_sum):
    return tl.where(b_sum == 0.0, 0.0, 1.0 / b_sum)


@triton.jit
def ordered(b_bits):
    """Between the bits of a float and an integer that sorts alike; its own inverse."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def middle(b_low, b_high, i_step):
    """A number between two `ordered` ones: halfway by value at first, by bits if that drags on."""
    b_value = ordered(b_low).to(tl.float32, bitcast=True)
    b_value = 0.5 * b_value + 0.5 * ordered(b_high - 1).to(tl.float32, bitcast=True)
    b_half = (b_low & b_high) + ((b_low ^ b_high) >> 1)
    b_middle = tl.where(i_step < 16, ordered(b_value.to(tl.int32, bitcast=True)), b_half)
    return tl.minimum(tl.maximum(b_middle, b_low + 1), b_high - 1)


SPREAD: tl.constexpr = tl.constexpr(-1)  # the axis of rows that lie along axes 0 and 2 of three


@triton.jit
def row_sum(b_x, AXIS: tl.constexpr):
    """Sums over rows, which lie along `AXIS`, or are `SPREAD`."""
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
    """Whether something holds for any row; there is one entry for each."""
    m_any = m_row.to(tl.int32)
    if len(m_row.shape) == 3:
        m_any = tl.max(tl.max(m_any, axis=2), axis=0)
    else:
        m_any = tl.max(m_any, axis=AXIS)
    return tl.max(m_any, axis=0)


@triton.jit
def lower_bound(b_rank, b_shown, TOPK: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """The TOPK-th highest shown value of each row, or a value below it after `STEPS` halvings.

    By counting: no sort, and no second array to carry along. For rows see `row_sum`. Returns the
    bound as a float and how many values reach it.
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
        for _ in tl.static_range(3):  # asking whether to go on costs as much as a step
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
    """Which entries of each row are among its `TOPK` highest shown ones; ties go to the first.

    `b_rank` (G, R, C) float32, `b_shown` of the same shape; rows are `SPREAD`, or along axis 2.
    Returns the choice, the places of the chosen side by side, and their number, (1, R, 1) or
    (G, R, 1).
    """
    b_bound, b_count = lower_bound(b_rank, b_shown, TOPK, 51, AXIS)
    b_chosen = b_shown & (b_rank >= b_bound)
    if any_row(b_count > TOPK, AXIS):
        # More entries than room share the last value: the first ones have it.
        b_above = b_shown & (b_rank > b_bound)
        b_equal = b_shown & (b_rank == b_bound)
        b_room = TOPK - row_sum(b_above.to(tl.int32), AXIS)
        b_chosen = b_above | (b_equal & (place_in_row(b_equal, AXIS) < b_room))
    return b_chosen, place_in_row(b_chosen, AXIS), row_sum(b_chosen.to(tl.int32), AXIS)


@triton.jit
def count_before(b_number):
    """For each entry of a row, the sum of those before it: (R, C) -> (R, C).

    As a product with a triangle of ones, which keeps the entries where they are. Exact for
    numbers of few bits, such as 0, 1 and 1024.
    """
    o_c = tl.arange(0, b_number.shape[1])
    b_triangle = (o_c[:, None] < o_c[None, :]).to(tl.float16)
    return tl.dot(b_number.to(tl.float16), b_triangle).to(tl.int32)


@triton.jit
def place_in_row(b_set, AXIS: tl.constexpr):
    """How many entries before this one are set, in rows that are `SPREAD` or along axis 2."""
    PARTS: tl.constexpr = b_set.shape[0]
    b_ones = b_set.to(tl.int32)
    b_place = count_before(tl.reshape(b_ones, (PARTS * b_set.shape[1], b_set.shape[2])))
    b_place = tl.reshape(b_place, b_set.shape)
    if AXIS == SPREAD:
        i_part = tl.arange(0, PARTS)[:, None, None]
        for i in tl.static_range(PARTS - 1):
            b_place += tl.where(i_part > i, row_sum(tl.where(i_part == i, b_ones, 0), AXIS), 0)
    return b_place
