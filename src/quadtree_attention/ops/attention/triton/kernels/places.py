# SPDX-License-Identifier: Apache-2.0
"""Places: coordinates of a cell in one number.

The cells of a level are the rows of an array, in row-major order of the level's grid. Kernels pass
cells to other kernels (selections) as *places*: the coordinates packed into one 32-bit number, so
that the children of a cell are computed by shifts, without a division. `BITS` is the number of bits
of each axis, see `limits.bits_of`.
"""

import triton
import triton.language as tl

from quadtree_attention.ops.kernel import quotient


@triton.jit
def place_of(o_row, size_1, size_2, BITS: tl.constexpr):
    """Pack the coordinates of a row index."""
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
    """Row index of a place."""
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
    """Place of a child at the next finer level; children are in row-major order."""
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
    """True for places on the grid; with odd sizes, some children are outside."""
    NDIM: tl.constexpr = len(BITS)
    if NDIM == 1:
        m_place = o_place < size_0
    else:
        m_place = coordinate(o_place, 0, BITS) < size_0
        m_place = m_place & (coordinate(o_place, 1, BITS) < size_1)
    if NDIM == 3:
        m_place = m_place & (coordinate(o_place, 2, BITS) < size_2)
    return m_place
