# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls
"""Building blocks: products of rows, weighted sums of rows, softmax.

Three of them, on four rows at a time, take most of the time:
    products   every product of four rows with a list of rows: logits, or gradients times values
    combine    four weighted sums over a list of rows: messages, or gradients of queries
    scatter    weighted sums of four rows, added to a list of rows: gradients of keys and values
A list contains indices of families of `children` adjacent rows, an even number. Widths of operands
are multiples of `LANES`; rows of products and weights have stride `stride`.
"""

import math

import numpy as np

from quadtree_attention.ops.attention.cpu.kernels.vectors import (
    add,
    at,
    count_bits,
    exp,
    fma,
    function,
    higher,
    highest,
    inlined,
    load,
    multiply,
    prefetch,
    splat,
    store,
    store_sums,
    subtract,
    total,
    zeros,
)
from quadtree_attention.ops.attention.cpu.shape import BLOCK, LANES

AHEAD = 3  # families that are prefetched
LINE = 16  # numbers in a cache line


@inlined
def padded(count):
    return (count + LANES - 1) // LANES * LANES


@inlined
def row_of(families, j, children):
    """Return row j of a list; `children` is a power of two."""
    return at(families, j >> count_bits(children - 1)) * children + (j & (children - 1))


@function
def products(
    a, first, last, b, base, families, count, children, width, scale, out, stride, padding, other,
    other_width,
):  # fmt: skip
    """out[i, j] = scale * a[first + i] . b[base + row j] for four i, up to and including `last`.

    Beyond `last` the last row is repeated.

    Args:
        families, count: The list and its length.
        padding: Value that pads rows of `out` to whole vectors.
        other: Array whose listed rows are prefetched.
    """
    # Loops with constant sizes are twice as fast.
    if children == 4 and width == 32 and other_width == 32:
        _products(a, first, last, b, base, families, count, 4, 32, scale, out, stride, other, 32)
    elif children == 4 and width == 64 and other_width == 64:
        _products(a, first, last, b, base, families, count, 4, 64, scale, out, stride, other, 64)
    else:
        _products(
            a, first, last, b, base, families, count, children, width, scale, out, stride, other,
            other_width,
        )  # fmt: skip
    for i in range(BLOCK):
        for j in range(count * children, padded(count * children)):
            out[i * stride + j] = padding


@inlined
def _products(
    a, first, last, b, base, families, count, children, width, scale, out, stride, other,
    other_width,
):  # fmt: skip
    a0 = first * width
    a1 = min(first + 1, last) * width
    a2 = min(first + 2, last) * width
    a3 = min(first + 3, last) * width
    for n in range(count):
        row = base + at(families, n) * children
        soon = (base + at(families, min(n + AHEAD, count - 1)) * children) * width
        for d in range(0, children * width, LINE):
            prefetch(b, soon + d)
        for d in range(0, children * other_width, LINE):
            prefetch(other, row * other_width + d)
        for j in range(0, children, 2):
            b0 = (row + j) * width
            b1 = b0 + width
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zeros(a)
            for d in range(0, width, LANES):
                y0 = load(b, b0 + d)
                y1 = load(b, b1 + d)
                x = load(a, a0 + d)
                s00 = fma(x, y0, s00)
                s01 = fma(x, y1, s01)
                x = load(a, a1 + d)
                s10 = fma(x, y0, s10)
                s11 = fma(x, y1, s11)
                x = load(a, a2 + d)
                s20 = fma(x, y0, s20)
                s21 = fma(x, y1, s21)
                x = load(a, a3 + d)
                s30 = fma(x, y0, s30)
                s31 = fma(x, y1, s31)
            column = n * children + j
            store_sums(out, column, stride, scale, s00, s01, s10, s11, s20, s21, s30, s31)


@function
def combine(weights, stride, b, base, families, count, children, width, out):
    """out[i] += sum over j of weights[i, j] * b[base + row j] for four i."""
    if children == 4 and width == 32:
        _combine(weights, stride, b, base, families, count, 4, 32, out)
    elif children == 4 and width == 64:
        _combine(weights, stride, b, base, families, count, 4, 64, out)
    else:
        _combine(weights, stride, b, base, families, count, children, width, out)


@inlined
def _combine(weights, stride, b, base, families, count, children, width, out):
    d = 0
    while d + 2 * LANES <= width:
        _combine_columns(weights, stride, b, base, families, count, children, width, out, d, LANES)
        d += 2 * LANES
    if d < width:  # the last column twice
        _combine_columns(weights, stride, b, base, families, count, children, width, out, d, 0)


@inlined
def _combine_columns(weights, stride, b, base, families, count, children, width, out, d, second):
    """Two columns of vectors: the one at `d` and the one `second` numbers further."""
    o0 = d
    o1 = o0 + width
    o2 = o1 + width
    o3 = o2 + width
    s00 = load(out, o0)
    s01 = load(out, o0 + second)
    s10 = load(out, o1)
    s11 = load(out, o1 + second)
    s20 = load(out, o2)
    s21 = load(out, o2 + second)
    s30 = load(out, o3)
    s31 = load(out, o3 + second)
    for n in range(count):
        row = (base + at(families, n) * children) * width + d
        for j in range(children):
            w = n * children + j
            y0 = load(b, row + j * width)
            y1 = load(b, row + j * width + second)
            x = splat(at(weights, w))
            s00 = fma(x, y0, s00)
            s01 = fma(x, y1, s01)
            x = splat(at(weights, w + stride))
            s10 = fma(x, y0, s10)
            s11 = fma(x, y1, s11)
            x = splat(at(weights, w + 2 * stride))
            s20 = fma(x, y0, s20)
            s21 = fma(x, y1, s21)
            x = splat(at(weights, w + 3 * stride))
            s30 = fma(x, y0, s30)
            s31 = fma(x, y1, s31)
    store(out, o0, s00)
    store(out, o0 + second, s01)
    store(out, o1, s10)
    store(out, o1 + second, s11)
    store(out, o2, s20)
    store(out, o2 + second, s21)
    store(out, o3, s30)
    store(out, o3 + second, s31)


@function
def scatter(weights, stride, a, first, last, out, base, families, count, children, width):
    """out[base + row j] += sum over four i of weights[i, j] * a[first + i], including `last`.

    Beyond `last` the last row is repeated; its weights must be 0.
    """
    if children == 4 and width == 32:
        _scatter(weights, stride, a, first, last, out, base, families, count, 4, 32)
    elif children == 4 and width == 64:
        _scatter(weights, stride, a, first, last, out, base, families, count, 4, 64)
    else:
        _scatter(weights, stride, a, first, last, out, base, families, count, children, width)


@inlined
def _scatter(weights, stride, a, first, last, out, base, families, count, children, width):
    d = 0
    while d + 2 * LANES <= width:
        _scatter_columns(
            weights, stride, a, first, last, out, base, families, count, children, width, d, LANES
        )
        d += 2 * LANES
    if d < width:  # the last column twice: the second store is correct
        _scatter_columns(
            weights, stride, a, first, last, out, base, families, count, children, width, d, 0
        )


@inlined
def _scatter_columns(
    weights, stride, a, first, last, out, base, families, count, children, width, d, second
):
    """Two columns of vectors: the one at `d` and the one `second` numbers further."""
    a0 = first * width + d
    a1 = min(first + 1, last) * width + d
    a2 = min(first + 2, last) * width + d
    a3 = min(first + 3, last) * width + d
    x00 = load(a, a0)
    x01 = load(a, a0 + second)
    x10 = load(a, a1)
    x11 = load(a, a1 + second)
    x20 = load(a, a2)
    x21 = load(a, a2 + second)
    x30 = load(a, a3)
    x31 = load(a, a3 + second)
    for n in range(count):
        row = (base + at(families, n) * children) * width + d
        for j in range(children):
            w = n * children + j
            y0 = load(out, row + j * width)
            y1 = load(out, row + j * width + second)
            x = splat(at(weights, w))
            y0 = fma(x, x00, y0)
            y1 = fma(x, x01, y1)
            x = splat(at(weights, w + stride))
            y0 = fma(x, x10, y0)
            y1 = fma(x, x11, y1)
            x = splat(at(weights, w + 2 * stride))
            y0 = fma(x, x20, y0)
            y1 = fma(x, x21, y1)
            x = splat(at(weights, w + 3 * stride))
            y0 = fma(x, x30, y0)
            y1 = fma(x, x31, y1)
            store(out, row + j * width, y0)
            store(out, row + j * width + second, y1)


@inlined
def clear(array):
    clear_range(array, 0, array.size)


@inlined
def clear_range(array, start, count):
    for i in range(start, start + count, LANES):
        store(array, i, zeros(array))


@inlined
def copy_row(source, start, count, out):
    for j in range(0, padded(count), LANES):
        store(out, j, load(source, start + j))


@inlined
def scale_row(row, start, count, factor):
    factor = splat(factor)
    for j in range(start, start + padded(count), LANES):
        store(row, j, multiply(load(row, j), factor))


@inlined
def dot(a, b, start, count):
    sums = zeros(a)
    for j in range(start, start + padded(count), LANES):
        sums = fma(load(a, j), load(b, j), sums)
    return total(sums)


@inlined
def maximum(row, start, count):
    """Return the maximum of a padded row, ignoring NaN."""
    high = splat(-row.dtype.type(np.inf))
    for j in range(start, start + padded(count), LANES):
        high = higher(high, load(row, j))
    return highest(high)


@inlined
def exponentials(row, start, count, shift):
    """Replace a padded row by exp(row - shift) and return the sum."""
    shift = splat(shift)
    sums = zeros(row)
    for j in range(start, start + padded(count), LANES):
        x = exp(subtract(load(row, j), shift))
        store(row, j, x)
        sums = add(sums, x)
    return total(sums)


@inlined
def softmax(row, start, count, high):
    """Replace a row of logits by exponentials; return 1 / their sum and the log-sum-exp.

    Without visible entries these are 0 and infinity, so that all weights are 0.
    """
    zero = row.dtype.type(0)
    infinity = row.dtype.type(np.inf)
    shift = high if high != -infinity else zero
    sums = exponentials(row, start, count, shift)
    if sums == 0:
        return zero, infinity
    return row.dtype.type(1) / sums, shift + math.log(sums)
