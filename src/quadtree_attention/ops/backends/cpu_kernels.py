# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-subclassing-any
"""Attention of one level and its gradients in Numba, on flat NumPy arrays in tree order.

A kernel computes a range of query families, or of key families, and releases the GIL; whoever calls
it divides the ranges among threads. No two ranges write to the same place, and what is written for
a cell never depends on how the ranges were cut, so results are the same for any number of threads.

The inner loops are written in vectors of `LANES` numbers (`_load`, `_fma`, ...), which LLVM maps to
whatever the processor has. Rows are therefore multiples of `LANES` wide. No fast-math flag is set:
NaN and infinity mean what they should.

Two building blocks do almost all the work, four rows at a time:
    _products   every product of four rows with a list of rows: logits, or gradients times values
    _combine    four weighted sums over a list of rows: messages, or gradients
Lists hold only what is visible, so a hidden row is never read. In the lists of a query its
candidates come kept cell by kept cell; in the lists of a key, query by query.

Letters: T query cells, S key cells, F children, K kept cells, P kept cells of the level above, each
per batch entry and head; a "row" of weights or products is padded to `stride` numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as typed_intrinsic
from numba.extending import models, register_model

LANES = 8
BLOCK = 4  # rows that the building blocks take at a time
AHEAD = 16  # rows that are fetched into the cache before they are needed
CHUNK = 256  # queries of a key that are looked at together


intrinsic: Any = typed_intrinsic  # called without the typing context of its definition
_helper = njit(nogil=True, error_model="numpy")


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # there is no place on this machine where the compiled code could be kept
        return _helper(function)


# ---- vectors -------------------------------------------------------------------------------------


class Vector(types.Type):
    """`LANES` numbers in registers."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector.dtype))


def _llvm(dtype: types.Float, lanes: int = LANES) -> ir.VectorType:
    number = ir.FloatType() if dtype == types.float32 else ir.DoubleType()
    return ir.VectorType(number, lanes)


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _address(context: Any, builder: Any, array: Any, data: Any, index: Any, lanes: int) -> Any:
    pointer = cgutils.create_struct_proxy(array)(context, builder, data).data
    pointer = builder.gep(pointer, [index])
    return builder.bitcast(pointer, _llvm(array.dtype, lanes).as_pointer())


def _call(builder: Any, name: str, vector: ir.VectorType, *args: Any) -> Any:
    suffix = f"v{vector.count}f{32 if isinstance(vector.element, ir.FloatType) else 64}"
    kind = ir.FunctionType(vector, [vector] * len(args))
    function = cgutils.get_or_insert_function(builder.module, kind, f"{name}.{suffix}")
    return builder.call(function, args)


def _fuse(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fmuladd", a.type, a, b, c)  # a * b + c


@intrinsic
def _zeros(typing_context, array):
    def build(context, builder, signature, args):
        return _constant(_llvm(array.dtype), 0.0)

    return Vector(array.dtype)(array), build


@intrinsic
def _splat(typing_context, number):
    def build(context, builder, signature, args):
        vector = _llvm(number)
        one = builder.insert_element(
            ir.Constant(vector, ir.Undefined), args[0], ir.Constant(ir.IntType(32), 0)
        )
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(one, one, lanes)

    return Vector(number)(number), build


@intrinsic
def _load(typing_context, array, index):
    def build(context, builder, signature, args):
        pointer = _address(context, builder, array, args[0], args[1], LANES)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Vector(array.dtype)(array, types.intp), build


@intrinsic
def _store(typing_context, array, index, vector):
    def build(context, builder, signature, args):
        pointer = _address(context, builder, array, args[0], args[1], LANES)
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), build


@intrinsic
def _prefetch(typing_context, array, index):
    """Asks for the cache line of a number that will be read soon."""

    def build(context, builder, signature, args):
        pointer = cgutils.create_struct_proxy(array)(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(pointer, [args[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(number, i) for i in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), build


@intrinsic
def _fma(typing_context, a, b, c):
    """The sum c + a * b."""

    def build(context, builder, signature, args):
        return _fuse(builder, *args)

    return a(a, b, c), build


@intrinsic
def _add(typing_context, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def _subtract(typing_context, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def _multiply(typing_context, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def _divide(typing_context, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def _higher(typing_context, a, b):
    """The higher number of each lane; `a` where one of them is NaN."""

    def build(context, builder, signature, args):
        a, b = args
        return builder.select(builder.fcmp_ordered(">", b, a), b, a)

    return a(a, b), build


@intrinsic
def _lower(typing_context, a, b):
    def build(context, builder, signature, args):
        a, b = args
        return builder.select(builder.fcmp_ordered("<", b, a), b, a)

    return a(a, b), build


@intrinsic
def _replace(typing_context, a, old, new):
    """`new` in the lanes where a == old."""

    def build(context, builder, signature, args):
        a, old, new = args
        return builder.select(builder.fcmp_ordered("==", a, old), new, a)

    return a(a, old, new), build


@intrinsic
def _lane(typing_context, vector, index):
    def build(context, builder, signature, args):
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return vector.dtype(vector, types.intp), build


@intrinsic
def _not_below(typing_context, vector, number):
    """One bit for each lane that is not below a number; NaN is below nothing."""

    def build(context, builder, signature, args):
        bits = builder.fcmp_unordered(">=", *args)
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(vector, number), build


@intrinsic
def _count_bits(typing_context, bits):
    return types.int64(types.int64), lambda context, builder, signature, args: builder.ctpop(*args)


@intrinsic
def _first_bit(typing_context, bits):
    def build(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), build


# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2, highest power first.
_EXP_FLOAT = (  # Cephes, 2e-7 relative
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_EXP_DOUBLE = tuple(1 / math.factorial(i) for i in range(14, 1, -1))


@intrinsic
def _exp(typing_context, x):
    """e**x; 0 where that is not a normal number, NaN for NaN, at most what a number can hold."""
    is_float = x.dtype == types.float32

    def build(context, builder, signature, args):
        vector = _llvm(x.dtype)
        lowest, highest = (-87.0, 88.0) if is_float else (-708.0, 709.0)
        digits, bias = (23, 127) if is_float else (52, 1023)
        integers = ir.VectorType(ir.IntType(32 if is_float else 64), LANES)

        def number(value: float) -> ir.Constant:
            return _constant(vector, value)

        # Adding 1.5 * 2**digits leaves the nearest integer in the lowest bits; NaN stays NaN.
        shift = 1.5 * 2.0**digits
        y = args[0]
        is_low = builder.fcmp_ordered("<", y, number(lowest))
        y = builder.select(is_low, number(lowest), y)
        is_high = builder.fcmp_ordered(">", y, number(highest))
        y = builder.select(is_high, number(highest), y)
        shifted = _fuse(builder, y, number(1 / math.log(2)), number(shift))
        power = builder.fsub(shifted, number(shift))
        high, low = (0.693359375, -2.12194440e-4) if is_float else _LN2_DOUBLE
        rest = _fuse(builder, power, number(-high), y)
        rest = _fuse(builder, power, number(-low), rest)
        first, *others = _EXP_FLOAT if is_float else _EXP_DOUBLE
        series = number(first)
        for coefficient in others:
            series = _fuse(builder, series, rest, number(coefficient))
        series = _fuse(builder, series, builder.fmul(rest, rest), rest)
        series = builder.fadd(series, number(1.0))
        bits = builder.bitcast(shifted, integers)
        bits = builder.shl(
            builder.add(bits, ir.Constant(integers, [bias] * LANES)),
            ir.Constant(integers, [digits] * LANES),
        )
        result = builder.fmul(series, builder.bitcast(bits, vector))
        return builder.select(is_low, number(0.0), result)

    return x(x), build


_LN2_DOUBLE = (0.693145751953125, 1.42860682030941723212e-6)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(
        a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    )


@intrinsic
def _store_sums(typing_context, array, index, stride, scale, a, b, c, d, e, f, g, h):
    """Sums over the lanes of eight vectors, times `scale`.

    The sums of a and b go to array[index] and array[index + 1], those of c and d to one stride
    further, and so on.
    """

    def build(context, builder, signature, args):
        data, index, stride, scale = args[:4]

        def fold(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
            return builder.fadd(_shuffle(builder, x, y, first), _shuffle(builder, x, y, second))

        # (x0+x2, y0+y2, x1+x3, y1+y3) of both halves, then the two pairs of those, then the halves
        pairs = [
            fold(x, y, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for x, y in zip(args[4::2], args[5::2], strict=True)
        ]
        quads = [
            fold(x, y, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
            for x, y in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        sums = fold(quads[0], quads[1], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        lanes = _shuffle(
            builder,
            builder.insert_element(
                ir.Constant(sums.type, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0)
            ),
            sums,
            [0] * LANES,
        )
        sums = builder.fmul(sums, lanes)
        for i in range(BLOCK):
            pointer = _address(context, builder, array, data, index, 2)
            pair = _shuffle(builder, sums, sums, [2 * i, 2 * i + 1])
            builder.store(pair, pointer, align=array.dtype.bitwidth // 8)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    vector = Vector(array.dtype)
    return types.void(array, types.intp, types.intp, array.dtype, *(vector,) * 8), build


@_helper
def _sum(vector):
    left = (_lane(vector, 0) + _lane(vector, 4)) + (_lane(vector, 1) + _lane(vector, 5))
    right = (_lane(vector, 2) + _lane(vector, 6)) + (_lane(vector, 3) + _lane(vector, 7))
    return left + right


@_helper
def _highest(vector):
    best = _lane(vector, 0)
    for i in range(1, LANES):
        best = max(best, _lane(vector, i))
    return best


@_helper
def _lowest(vector):
    best = _lane(vector, 0)
    for i in range(1, LANES):
        best = min(best, _lane(vector, i))
    return best


# ---- building blocks -----------------------------------------------------------------------------


@_helper
def _padded(count):
    return (count + LANES - 1) // LANES * LANES


@_helper
def _products(
    a, first, last, b, base, rows, count, width, scale, out, begin, stride, padding
):  # fmt: skip
    """out[i, j] = scale * a[first + i] . b[base + rows[j]] for four i, up to and with `last`.

    Beyond `last` the last row is used again. `rows` must have room for `AHEAD` more than `count`.
    """
    if count == 0:
        return
    for j in range(AHEAD):
        rows[count + j] = rows[count - 1]
    a0 = first * width
    a1 = min(first + 1, last) * width
    a2 = min(first + 2, last) * width
    a3 = min(first + 3, last) * width
    for j in range(0, count, 2):
        b0 = (base + rows[j]) * width
        b1 = (base + rows[j + 1]) * width
        next0 = (base + rows[j + AHEAD - 2]) * width
        next1 = (base + rows[j + AHEAD - 1]) * width
        s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = _zeros(a)
        for d in range(0, width, LANES):
            y0 = _load(b, b0 + d)
            y1 = _load(b, b1 + d)
            _prefetch(b, next0 + d)
            _prefetch(b, next1 + d)
            x = _load(a, a0 + d)
            s00 = _fma(x, y0, s00)
            s01 = _fma(x, y1, s01)
            x = _load(a, a1 + d)
            s10 = _fma(x, y0, s10)
            s11 = _fma(x, y1, s11)
            x = _load(a, a2 + d)
            s20 = _fma(x, y0, s20)
            s21 = _fma(x, y1, s21)
            x = _load(a, a3 + d)
            s30 = _fma(x, y0, s30)
            s31 = _fma(x, y1, s31)
        _store_sums(out, begin + j, stride, scale, s00, s01, s10, s11, s20, s21, s30, s31)
    for i in range(BLOCK):
        for j in range(count, _padded(count)):
            out[begin + i * stride + j] = padding


@_helper
def _combine(weights, first, stride, b, base, rows, count, width, out, begin):
    """out[i] += sum over j of weights[i, j] * b[base + rows[j]] for four rows i."""
    w0 = first
    w1 = w0 + stride
    w2 = w1 + stride
    w3 = w2 + stride
    d = 0
    while d + 2 * LANES <= width:
        o0 = begin + d
        o1 = o0 + width
        o2 = o1 + width
        o3 = o2 + width
        s00 = _load(out, o0)
        s01 = _load(out, o0 + LANES)
        s10 = _load(out, o1)
        s11 = _load(out, o1 + LANES)
        s20 = _load(out, o2)
        s21 = _load(out, o2 + LANES)
        s30 = _load(out, o3)
        s31 = _load(out, o3 + LANES)
        for j in range(count):
            _prefetch(b, (base + rows[j + AHEAD]) * width + d)
            row = (base + rows[j]) * width + d
            y0 = _load(b, row)
            y1 = _load(b, row + LANES)
            x = _splat(weights[w0 + j])
            s00 = _fma(x, y0, s00)
            s01 = _fma(x, y1, s01)
            x = _splat(weights[w1 + j])
            s10 = _fma(x, y0, s10)
            s11 = _fma(x, y1, s11)
            x = _splat(weights[w2 + j])
            s20 = _fma(x, y0, s20)
            s21 = _fma(x, y1, s21)
            x = _splat(weights[w3 + j])
            s30 = _fma(x, y0, s30)
            s31 = _fma(x, y1, s31)
        _store(out, o0, s00)
        _store(out, o0 + LANES, s01)
        _store(out, o1, s10)
        _store(out, o1 + LANES, s11)
        _store(out, o2, s20)
        _store(out, o2 + LANES, s21)
        _store(out, o3, s30)
        _store(out, o3 + LANES, s31)
        d += 2 * LANES
    if d < width:
        o0 = begin + d
        o1 = o0 + width
        o2 = o1 + width
        o3 = o2 + width
        s0 = _load(out, o0)
        s1 = _load(out, o1)
        s2 = _load(out, o2)
        s3 = _load(out, o3)
        for j in range(count):
            y = _load(b, (base + rows[j]) * width + d)
            s0 = _fma(_splat(weights[w0 + j]), y, s0)
            s1 = _fma(_splat(weights[w1 + j]), y, s1)
            s2 = _fma(_splat(weights[w2 + j]), y, s2)
            s3 = _fma(_splat(weights[w3 + j]), y, s3)
        _store(out, o0, s0)
        _store(out, o1, s1)
        _store(out, o2, s2)
        _store(out, o3, s3)


@_helper
def _clear(array):
    for i in range(0, array.size, LANES):
        _store(array, i, _zeros(array))


@_helper
def _dot(a, b, start, count):
    total = _zeros(a)
    for j in range(start, start + _padded(count), LANES):
        total = _fma(_load(a, j), _load(b, j), total)
    return _sum(total)


@_helper
def _multiply_row(row, start, count, factor):
    factor = _splat(factor)
    for j in range(start, start + _padded(count), LANES):
        _store(row, j, _multiply(_load(row, j), factor))


@_helper
def _extremes(row, start, count):
    """Highest and lowest number of a padded row; -inf is not counted as lowest, NaN not at all."""
    infinity = row.dtype.type(np.inf)
    nothing = _splat(-infinity)
    everything = _splat(infinity)
    high = nothing
    low = everything
    for j in range(start, start + _padded(count), LANES):
        x = _load(row, j)
        high = _higher(high, x)
        low = _lower(low, _replace(x, nothing, everything))
    return _highest(high), _lowest(low)


@_helper
def _exponentials(row, start, count, shift):
    """Replaces a padded row by exp(row - shift) and returns the sum."""
    shift = _splat(shift)
    total = _zeros(row)
    for j in range(start, start + _padded(count), LANES):
        x = _exp(_subtract(_load(row, j), shift))
        _store(row, j, x)
        total = _add(total, x)
    return _sum(total)


@_helper
def _best(rank, start, count, low, high, topk, found, values):
    """Positions of the highest `topk` of rank[start : start + count], ascending; ties to the first.

    NaN counts as highest. Writes to `found` and returns how many there are.

    Args:
        rank: Its row is padded with -inf.
        low, high: Bounds of the numbers of the row.
        found, values: Room for `topk` entries.
    """
    wanted = min(topk, count)
    if wanted == count:
        for j in range(count):
            found[j] = j
        return count
    bar, passed = _bar(rank, start, count, low, high, wanted)
    size = 0
    if passed == wanted:
        lanes = _splat(bar)
        for j in range(0, count, LANES):
            bits = _not_below(_load(rank, start + j), lanes)
            while bits != 0:
                found[size] = j + _first_bit(bits)
                size += 1
                bits &= bits - 1
        return size
    # Some are alike: all that are ahead of the last one to be kept, then the first of its like.
    last, room = _last_kept(rank, start, count, bar, wanted, values)
    for j in range(count):
        x = rank[start + j]
        if _is_ahead(x, last):
            found[size] = j
            size += 1
        elif room > 0 and not _is_ahead(last, x):
            found[size] = j
            size += 1
            room -= 1
    return size


@_helper
def _bar(rank, start, count, low, high, wanted):
    """A number that at least `wanted` of a row are not below, and how many those are."""
    half = rank.dtype.type(0.5)
    bar = -rank.dtype.type(np.inf)
    size = count
    for _ in range(64):
        middle = half * low + half * high
        if size == wanted or not low < middle < high:
            break
        passed = 0
        lanes = _splat(middle)
        for j in range(start, start + count, LANES):
            passed += _count_bits(_not_below(_load(rank, j), lanes))
        if passed >= wanted:
            low = middle
            bar = middle
            size = passed
        else:
            high = middle
    return bar, size


@_helper
def _is_ahead(x, y):
    return x > y or (x != x and y == y)


@_helper
def _last_kept(rank, start, count, bar, wanted, values):
    """The lowest of the `wanted` best of a row, and how many of those are not ahead of it."""
    size = 0
    for j in range(start, start + count):
        x = rank[j]
        if x < bar or (size == wanted and not _is_ahead(x, values[size - 1])):
            continue
        i = min(size, wanted - 1)
        while i > 0 and _is_ahead(x, values[i - 1]):
            values[i] = values[i - 1]
            i -= 1
        values[i] = x
        size = min(size + 1, wanted)
    last = values[wanted - 1]
    room = 0
    for i in range(wanted):
        room += not _is_ahead(values[i], last)
    return last, room


@_helper
def _maximum(row, start, count):
    high = _splat(-row.dtype.type(np.inf))
    for j in range(start, start + _padded(count), LANES):
        high = _higher(high, _load(row, j))
    return _highest(high)


@_helper
def _softmax(row, start, count, high):
    """Turns a row of logits into exponentials; returns 1 / their sum and the log-sum-exp.

    Where nothing can be seen these are 0 and infinity, so that nothing weighs anything.
    """
    zero = row.dtype.type(0)
    infinity = row.dtype.type(np.inf)
    shift = high if high != -infinity else zero
    total = _exponentials(row, start, count, shift)
    if total == 0:
        return zero, infinity
    return row.dtype.type(1) / total, shift + math.log(total)


@_helper
def _visible_children(visible, masked, base, cell, children, rows, count):
    """Appends the visible children of a cell to a list of rows; returns its new length."""
    for child in range(cell * children, (cell + 1) * children):
        if not masked or visible[base + child]:
            rows[count] = child
            count += 1
    return count


@_helper
def _shares(logits, start, kept, starts):
    """Variant A: turns logits into the softmax over the visible children of each kept cell."""
    infinity = logits.dtype.type(np.inf)
    zero = logits.dtype.type(0)
    for p in range(kept):
        high = -infinity
        for j in range(start + starts[p], start + starts[p + 1]):
            high = max(high, logits[j])
        if high == -infinity:
            high = zero
        for j in range(start + starts[p], start + starts[p + 1]):
            logits[j] -= high
    _exponentials(logits, start, starts[kept], zero)
    for p in range(kept):
        total = zero
        for j in range(start + starts[p], start + starts[p + 1]):
            total += logits[j]
        if total != 0:
            total = logits.dtype.type(1) / total
        for j in range(start + starts[p], start + starts[p + 1]):
            logits[j] *= total


# ---- forward -------------------------------------------------------------------------------------


@_helper
def _keep(found, size, weights, start, factor, rows, topk, out, selection, scores):
    """Writes the selection of one query and, if there is room for them, its scores."""
    for i in range(size):
        selection[out + i] = rows[found[i]]
    for i in range(size, topk):
        selection[out + i] = -1
    if scores.size > 0:
        for i in range(size):
            scores[out + i] = weights[start + found[i]] * factor
        for i in range(size, topk):
            scores[out + i] = 0


@_helper
def _attend(logits, start, count, rows, topk, out, selection, scores, found, values):
    """One query of variant B: keeps the best and turns logits into exponentials.

    Returns what they must be multiplied by, and the log-sum-exp.
    """
    size = 0
    if topk > 0:
        high, low = _extremes(logits, start, count)
        size = _best(logits, start, count, low, high, topk, found, values)
    else:
        high = _maximum(logits, start, count)
    factor, lse = _softmax(logits, start, count, high)
    if topk > 0:
        _keep(found, size, logits, start, factor, rows, topk, out, selection, scores)
    return factor, lse


@_helper
def _keep_and_silence(
    logits, weights, start, count, rows, topk, out, selection, scores, positions, found, values
):
    """One query of variant A: keeps the best by score and takes them out of the message.

    Args:
        logits: A copy of what they were; overwritten.
        weights: The scores.
    """
    infinity = logits.dtype.type(np.inf)
    for j in range(count):
        logits[j] = weights[start + j] if logits[j] != -infinity else -1
    high, low = _extremes(logits, 0, count)
    size = _best(logits, 0, count, low, high, topk, found, values)
    _keep(found, size, weights, start, logits.dtype.type(1), rows, topk, out, selection, scores)
    for i in range(size):
        positions[out + i] = found[i]
        weights[start + found[i]] = 0
    for i in range(size, topk):
        positions[out + i] = -1


@_helper
def _copy_row(row, start, count, out):
    for j in range(0, _padded(count), LANES):
        _store(out, j, _load(row, start + j))


@_kernel
def coarse_forward(
    first, last, q, k, v, seen, counts, heads, queries, keys, width, value_width, scale, weight,
    topk, is_a, total, selection, scores, positions, lse,
):  # fmt: skip
    """Level 0 for the blocks of four queries `first` ... `last - 1`, counted over batch and heads.

    Args:
        seen, counts: Visible keys (B, S) of every batch entry and how many there are (B,).
        lse: Output (B, N, T), the logarithm of the sum of exponentials of each query.
    """
    blocks = (queries + BLOCK - 1) // BLOCK
    stride = _padded(keys)
    logits = np.empty(BLOCK * stride, q.dtype)
    copy = np.empty(stride, q.dtype)
    factors = np.empty(BLOCK, q.dtype)
    message = np.empty(BLOCK * value_width, q.dtype)
    rows = np.empty(keys + AHEAD, np.int32)
    found = np.empty(topk, np.int32)
    values = np.empty(topk, q.dtype)
    listed = -1
    count = 0
    for block in range(first, last):
        head = block // blocks
        batch = head // heads
        if batch != listed:
            listed = batch
            count = counts[batch]
            rows[:count] = seen[batch * keys : batch * keys + count]
        query = block % blocks * BLOCK
        size = min(BLOCK, queries - query)
        query += head * queries
        _products(
            q, query, query + size - 1, k, head * keys, rows, count, width, scale, logits, 0,
            stride, -q.dtype.type(np.inf),
        )  # fmt: skip
        for i in range(size):
            start = i * stride
            out = (query + i) * topk
            if is_a and topk > 0:
                _copy_row(logits, start, count, copy)
                high = _maximum(logits, start, count)
                factor, lse[query + i] = _softmax(logits, start, count, high)
                _multiply_row(logits, start, count, factor)
                _keep_and_silence(
                    copy, logits, start, count, rows, topk, out, selection, scores, positions,
                    found, values,
                )  # fmt: skip
                factors[i] = weight
            else:
                factor, lse[query + i] = _attend(
                    logits, start, count, rows, topk, out, selection, scores, found, values
                )
                factors[i] = factor * weight
        _clear(message)
        _combine(logits, 0, stride, v, head * keys, rows, count, value_width, message, 0)
        for i in range(size):
            factor = _splat(factors[i])
            for d in range(0, value_width, LANES):
                x = _multiply(_load(message, i * value_width + d), factor)
                _store(total, (query + i) * value_width + d, x)


@_kernel
def fine_forward(
    first, last, q, k, v, visible, masked, parents, parent_scores, inherited, heads, families,
    children, key_families, kept, width, value_width, scale, weight, topk, is_a, total, selection,
    scores, positions, lse,
):  # fmt: skip
    """A finer level for the query families `first` ... `last - 1`, counted over batch and heads."""
    candidates = kept * children
    stride = _padded(candidates)
    logits = np.empty(BLOCK * stride, q.dtype)
    copy = np.empty(stride, q.dtype)
    factors = np.empty(BLOCK, q.dtype)
    message = np.empty(BLOCK * value_width, q.dtype)
    rows = np.empty(candidates + AHEAD, np.int32)
    starts = np.empty(kept + 1, np.int32)
    found = np.empty(topk, np.int32)
    values = np.empty(topk, q.dtype)
    infinity = q.dtype.type(np.inf)
    for family in range(first, last):
        head = family // families
        keys = head * key_families * children
        shown = head // heads * key_families * children
        count = 0
        starts[0] = 0
        for p in range(kept):
            cell = parents[family * kept + p]
            if 0 <= cell < key_families:
                count = _visible_children(visible, masked, shown, cell, children, rows, count)
            starts[p + 1] = count
        for child in range(0, children, BLOCK):
            query = family * children + child
            size = min(BLOCK, children - child)
            _products(
                q, query, query + size - 1, k, keys, rows, count, width, scale, logits, 0, stride,
                -infinity,
            )  # fmt: skip
            for i in range(size):
                start = i * stride
                out = (query + i) * topk
                if is_a:
                    if topk > 0:
                        _copy_row(logits, start, count, copy)
                    _shares(logits, start, kept, starts)
                    for p in range(kept):
                        score = parent_scores[family * kept + p]
                        for j in range(start + starts[p], start + starts[p + 1]):
                            logits[j] *= score
                    if topk > 0:
                        _keep_and_silence(
                            copy, logits, start, count, rows, topk, out, selection, scores,
                            positions, found, values,
                        )  # fmt: skip
                    factors[i] = weight
                else:
                    factor, lse[query + i] = _attend(
                        logits, start, count, rows, topk, out, selection, scores, found, values
                    )
                    factors[i] = factor * weight
            _clear(message)
            _combine(logits, 0, stride, v, keys, rows, count, value_width, message, 0)
            for i in range(size):
                factor = _splat(factors[i])
                for d in range(0, value_width, LANES):
                    x = _load(inherited, family * value_width + d)
                    x = _fma(_load(message, i * value_width + d), factor, x)
                    _store(total, (query + i) * value_width + d, x)


# ---- backward ------------------------------------------------------------------------------------
#
# With p the share of a candidate and e the gradient of its score (gradient of the message times its
# value, or the gradient of the score itself where the cell was kept in variant A), the gradient of
# its logit is p * (e - sum of p * e), the sum running over the same softmax. One pass goes query by
# query and finds dq and those sums, a second goes key by key and finds dk and dv.


@_kernel
def coarse_backward_queries(
    first, last, grad, grad_scores, q, k, v, seen, counts, positions, lse, heads, queries, keys,
    width, value_width, scale, weight, topk, is_a, dq, dots, shares,
):  # fmt: skip
    """Gradient of the queries of some blocks.

    Args:
        dots: Output (B, N, T), for each query the sum of p * e.
        shares: Output (B, N, T), for each query its part of the gradient of `weight`.
    """
    blocks = (queries + BLOCK - 1) // BLOCK
    stride = _padded(keys)
    logits = np.empty(BLOCK * stride, q.dtype)
    slopes = np.empty(BLOCK * stride, q.dtype)
    message = np.empty(BLOCK * width, q.dtype)
    rows = np.empty(keys + AHEAD, np.int32)
    listed = -1
    count = 0
    zero = q.dtype.type(0)
    one = q.dtype.type(1)
    for block in range(first, last):
        head = block // blocks
        batch = head // heads
        if batch != listed:
            listed = batch
            count = counts[batch]
            rows[:count] = seen[batch * keys : batch * keys + count]
        query = block % blocks * BLOCK
        size = min(BLOCK, queries - query)
        query += head * queries
        end = query + size - 1
        _products(
            q, query, end, k, head * keys, rows, count, width, scale, logits, 0,
            stride, -q.dtype.type(np.inf),
        )  # fmt: skip
        _products(
            grad, query, end, v, head * keys, rows, count, value_width, one, slopes, 0, stride, zero
        )
        _clear(message)
        for i in range(size):
            start = i * stride
            _exponentials(logits, start, count, lse[query + i])
            if is_a and topk > 0:
                share = _override(
                    logits, slopes, start, weight, grad_scores, positions, (query + i) * topk,
                    topk, count,
                )  # fmt: skip
                dot = _dot(logits, slopes, start, count)
            else:
                share = _dot(logits, slopes, start, count)
                dot = share * weight
                _multiply_row(slopes, start, count, weight)
            shares[query + i] = share
            dots[query + i] = dot
            _logit_gradients(logits, slopes, start, count, dot, scale)
        _combine(logits, 0, stride, k, head * keys, rows, count, width, message, 0)
        for i in range(0, size * width, LANES):
            _store(dq, query * width + i, _load(message, i))


@_helper
def _override(weights, slopes, start, weight, grad_scores, positions, kept, topk, count):
    """Weighs the slopes; those of kept cells become the gradients of their scores."""
    for i in range(kept, kept + topk):
        if positions[i] >= 0:
            slopes[start + positions[i]] = 0
    share = _dot(weights, slopes, start, count)
    _multiply_row(slopes, start, count, weight)
    if grad_scores.size > 0:
        for i in range(kept, kept + topk):
            if positions[i] >= 0:
                slopes[start + positions[i]] = grad_scores[i]
    return share


@_helper
def _logit_gradients(weights, slopes, start, count, dot, scale):
    dot = _splat(dot)
    scale = _splat(scale)
    for j in range(start, start + _padded(count), LANES):
        x = _multiply(_subtract(_load(slopes, j), dot), scale)
        _store(weights, j, _multiply(_load(weights, j), x))


@_kernel
def fine_backward_queries(
    first, last, grad, grad_scores, q, k, v, visible, masked, parents, parent_scores, positions,
    lse, heads, families, children, key_families, kept, width, value_width, scale, weight, topk,
    is_a, dq, dots, shares, dparent_scores, dinherited,
):  # fmt: skip
    """Gradient of the queries of some families, of their parents' scores and messages."""
    candidates = kept * children
    stride = _padded(candidates)
    logits = np.empty(BLOCK * stride, q.dtype)
    slopes = np.empty(BLOCK * stride, q.dtype)
    message = np.empty(BLOCK * width, q.dtype)
    rows = np.empty(candidates + AHEAD, np.int32)
    starts = np.empty(kept + 1, np.int32)
    zero = q.dtype.type(0)
    one = q.dtype.type(1)
    for family in range(first, last):
        head = family // families
        keys = head * key_families * children
        shown = head // heads * key_families * children
        count = 0
        starts[0] = 0
        for p in range(kept):
            cell = parents[family * kept + p]
            if 0 <= cell < key_families:
                count = _visible_children(visible, masked, shown, cell, children, rows, count)
            starts[p + 1] = count
            if is_a:
                dparent_scores[family * kept + p] = 0
        for d in range(0, value_width, LANES):
            x = _zeros(q)
            for child in range(children):
                x = _add(x, _load(grad, (family * children + child) * value_width + d))
            _store(dinherited, family * value_width + d, x)
        for child in range(0, children, BLOCK):
            query = family * children + child
            size = min(BLOCK, children - child)
            end = query + size - 1
            _products(
                q, query, end, k, keys, rows, count, width, scale, logits, 0, stride,
                -q.dtype.type(np.inf),
            )  # fmt: skip
            _products(
                grad, query, end, v, keys, rows, count, value_width, one, slopes, 0, stride, zero
            )
            _clear(message)
            for i in range(size):
                start = i * stride
                if is_a:
                    _shares(logits, start, kept, starts)
                    shares[query + i] = _slopes_of_families(
                        logits, slopes, start, weight, grad_scores, positions, (query + i) * topk,
                        topk, count, parent_scores, dparent_scores, family * kept, kept, starts,
                        scale,
                    )  # fmt: skip
                else:
                    _exponentials(logits, start, count, lse[query + i])
                    share = _dot(logits, slopes, start, count)
                    shares[query + i] = share
                    dots[query + i] = share * weight
                    _multiply_row(slopes, start, count, weight)
                    _logit_gradients(logits, slopes, start, count, share * weight, scale)
            _combine(logits, 0, stride, k, keys, rows, count, width, message, 0)
            for i in range(0, size * width, LANES):
                _store(dq, query * width + i, _load(message, i))


@_helper
def _slopes_of_families(
    shares, slopes, start, weight, grad_scores, positions, kept_here, topk, count, parent_scores,
    dparent_scores, above, kept, starts, scale,
):  # fmt: skip
    """Variant A: turns shares into gradients of logits, kept cell by kept cell.

    Returns the part of this query in the gradient of `weight`.
    """
    part = shares.dtype.type(0)
    for i in range(kept_here, kept_here + topk):
        if positions[i] >= 0:
            slopes[start + positions[i]] = 0
    for p in range(kept):
        dot = shares.dtype.type(0)
        for j in range(start + starts[p], start + starts[p + 1]):
            dot += shares[j] * slopes[j]
        part += dot * parent_scores[above + p]
    _multiply_row(slopes, start, count, weight)
    if grad_scores.size > 0:
        for i in range(kept_here, kept_here + topk):
            if positions[i] >= 0:
                slopes[start + positions[i]] = grad_scores[i]
    for p in range(kept):
        dot = shares.dtype.type(0)
        for j in range(start + starts[p], start + starts[p + 1]):
            dot += shares[j] * slopes[j]
        dparent_scores[above + p] += dot
        factor = parent_scores[above + p] * scale
        for j in range(start + starts[p], start + starts[p + 1]):
            shares[j] *= (slopes[j] - dot) * factor
    return part


@_kernel
def invert(first, last, selection, size, cells, offsets, entries):
    """For every cell the entries of the selection that name it, in order, by counting sort.

    Args:
        first, last: Range of heads.
        selection: `size` numbers of cells per head.
        cells: Cells per head.
        offsets: Output (heads, cells + 1): where the entries of a cell begin, within its head.
        entries: Output (heads, size): positions in the selection of that head.
    """
    for head in range(first, last):
        begin = head * (cells + 1)
        base = head * size
        for i in range(begin, begin + cells + 1):
            offsets[i] = 0
        for i in range(size):
            cell = selection[base + i]
            if 0 <= cell < cells:
                offsets[begin + cell + 1] += 1
        for i in range(begin, begin + cells):
            offsets[i + 1] += offsets[i]
        for i in range(size):  # afterwards offsets[cell] is where the next cell begins
            cell = selection[base + i]
            if 0 <= cell < cells:
                entries[base + offsets[begin + cell]] = i
                offsets[begin + cell] += 1
        for i in range(begin + cells, begin, -1):
            offsets[i] = offsets[i - 1]
        offsets[begin] = 0


@_kernel
def backward_keys(
    first, last, grad, grad_scores, q, k, v, visible, masked, parent_scores, lse, dots, is_coarse,
    family_offsets, family_entries, kept, cell_offsets, cell_entries, topk, heads, queries,
    children, key_families, keys, width, value_width, scale, weight, is_a, dk, dv,
):  # fmt: skip
    """Gradients of the keys and values of some families, from the queries that looked at them.

    At level 0, where there are no families, these are `children` consecutive keys, and every query
    looks at them.

    Args:
        family_offsets, family_entries: `invert` of the parents; empty at level 0.
        cell_offsets, cell_entries: `invert` of the selection of this level; empty for variant B.
    """
    stride = CHUNK
    height = (children + BLOCK - 1) // BLOCK * BLOCK
    logits = np.empty(height * stride, q.dtype)
    slopes = np.empty(height * stride, q.dtype)
    weights = np.empty(height * stride, q.dtype)
    key_sums = np.empty(height * width, q.dtype)
    value_sums = np.empty(height * value_width, q.dtype)
    block = np.empty(BLOCK * max(width, value_width), q.dtype)
    rows = np.empty(CHUNK + AHEAD, np.int32)
    factors = np.empty(CHUNK, q.dtype)  # log-sum-exp, or the score of the parent in variant A
    sums = np.empty(CHUNK, q.dtype)
    members = np.empty(height, np.int64)
    cursor = np.empty(height, np.int64)
    zero = q.dtype.type(0)
    one = q.dtype.type(1)
    infinity = q.dtype.type(np.inf)
    keeps = is_a and topk > 0
    by_family = is_a and not is_coarse
    for family in range(first, last):
        head = family // key_families
        start_cell = family % key_families * children
        base = head * keys
        shown = head // heads * keys
        query_base = head * queries
        size = 0
        for cell in range(start_cell, min(start_cell + children, keys)):
            for d in range((base + cell) * width, (base + cell + 1) * width):
                dk[d] = 0
            for d in range((base + cell) * value_width, (base + cell + 1) * value_width):
                dv[d] = 0
            if not masked or visible[shown + cell]:
                members[size] = cell
                if keeps:
                    cursor[size] = cell_offsets[head * (keys + 1) + cell]
                size += 1
        if size == 0:
            continue
        _clear(key_sums)
        _clear(value_sums)
        entry_base = query_base // children * kept
        position, end = 0, queries
        if not is_coarse:
            begin = head * (key_families + 1) + family % key_families
            position, end = family_offsets[begin] * children, family_offsets[begin + 1] * children
        while position < end:
            count = 0
            while position < end and count + children <= CHUNK:
                if is_coarse:
                    group = min(children, end - position)
                    query = position
                else:
                    group = children
                    entry = family_entries[entry_base + position // children]
                    query = entry // kept * children
                if by_family:
                    score = parent_scores[entry_base + entry]
                    for i in range(group):
                        rows[count + i] = query + i
                        factors[count + i] = score
                else:
                    for i in range(group):
                        rows[count + i] = query + i
                        factors[count + i] = lse[query_base + query + i]
                        sums[count + i] = dots[query_base + query + i]
                count += group
                position += group
            padded = _padded(count)
            for j in range(count, padded):
                factors[j] = 0
                sums[j] = 0
            for i in range(0, size, BLOCK):
                # The members of a family that is partly hidden need not be neighbours.
                _gather(k, base, members, i, size, width, block)
                _products(
                    block, 0, BLOCK - 1, q, query_base, rows, count, width, scale, logits,
                    i * stride, stride, -infinity,
                )  # fmt: skip
                _gather(v, base, members, i, size, value_width, block)
                _products(
                    block, 0, BLOCK - 1, grad, query_base, rows, count, value_width, one, slopes,
                    i * stride, stride, zero,
                )  # fmt: skip
            if by_family:
                _shares_of_keys(logits, stride, size, padded)
            for i in range(size):
                _weigh(logits, slopes, weights, i * stride, padded, factors, weight, by_family)
                if keeps:
                    cursor[i] = _override_kept(
                        weights, slopes, i * stride, rows, count, cell_entries,
                        query_base * topk, cursor[i],
                        cell_offsets[head * (keys + 1) + members[i] + 1], topk, grad_scores,
                    )  # fmt: skip
            if by_family:
                _sums_of_keys(logits, slopes, stride, size, padded, sums)
            for i in range(size):
                _key_slopes(logits, slopes, i * stride, padded, factors, sums, scale, by_family)
            for i in range(0, size, BLOCK):
                _combine(
                    logits, i * stride, stride, q, query_base, rows, count, width, key_sums,
                    i * width,
                )  # fmt: skip
                _combine(
                    weights, i * stride, stride, grad, query_base, rows, count, value_width,
                    value_sums, i * value_width,
                )  # fmt: skip
        for i in range(size):
            cell = base + members[i]
            for d in range(0, width, LANES):
                _store(dk, cell * width + d, _load(key_sums, i * width + d))
            for d in range(0, value_width, LANES):
                _store(dv, cell * value_width + d, _load(value_sums, i * value_width + d))


@_helper
def _gather(a, base, members, first, size, width, block):
    """Copies four rows to a block; beyond the last one this is used again."""
    for i in range(BLOCK):
        row = (base + members[min(first + i, size - 1)]) * width
        for d in range(0, width, LANES):
            _store(block, i * width + d, _load(a, row + d))


@_helper
def _shares_of_keys(logits, stride, size, padded):
    """Variant A: softmax over the keys of a family, for each query of a list."""
    nothing = _splat(-logits.dtype.type(np.inf))
    zero = _splat(logits.dtype.type(0))
    one = _splat(logits.dtype.type(1))
    for j in range(0, padded, LANES):
        high = nothing
        for i in range(size):
            high = _higher(high, _load(logits, i * stride + j))
        high = _replace(high, nothing, zero)
        total = zero
        for i in range(size):
            x = _exp(_subtract(_load(logits, i * stride + j), high))
            _store(logits, i * stride + j, x)
            total = _add(total, x)
        total = _divide(one, _replace(total, zero, one))
        for i in range(size):
            _store(logits, i * stride + j, _multiply(_load(logits, i * stride + j), total))


@_helper
def _weigh(logits, slopes, weights, start, padded, factors, weight, by_family):
    """Weights of the values of one key, and the gradients of its scores where it was not kept."""
    weight = _splat(weight)
    for j in range(0, padded, LANES):
        x = _load(logits, start + j)
        if by_family:
            score = _multiply(x, _load(factors, j))
        else:
            x = _exp(_subtract(x, _load(factors, j)))
            _store(logits, start + j, x)
            score = x
        _store(weights, start + j, _multiply(score, weight))
        _store(slopes, start + j, _multiply(_load(slopes, start + j), weight))


@_helper
def _override_kept(
    weights, slopes, start, rows, count, entries, base, cursor, end, topk, grad_scores
):  # fmt: skip
    """A kept key did not speak to the query that kept it; its score has a gradient of its own."""
    j = 0
    while cursor < end:
        entry = entries[base + cursor]
        query = entry // topk
        while j < count and rows[j] < query:
            j += 1
        if j == count:
            break
        if rows[j] == query:
            weights[start + j] = 0
            slopes[start + j] = grad_scores[base + entry] if grad_scores.size > 0 else 0
        cursor += 1
    return cursor


@_helper
def _sums_of_keys(logits, slopes, stride, size, padded, sums):
    for j in range(0, padded, LANES):
        total = _zeros(sums)
        for i in range(size):
            total = _fma(_load(logits, i * stride + j), _load(slopes, i * stride + j), total)
        _store(sums, j, total)


@_helper
def _key_slopes(logits, slopes, start, padded, factors, sums, scale, by_family):
    """Gradients of the logits of one key."""
    scale = _splat(scale)
    for j in range(0, padded, LANES):
        x = _subtract(_load(slopes, start + j), _load(sums, j))
        x = _multiply(_multiply(x, scale), _load(logits, start + j))
        if by_family:
            x = _multiply(x, _load(factors, j))
        _store(logits, start + j, x)


# ---- pyramids ------------------------------------------------------------------------------------


@_kernel
def grid_to_tree(first, last, x, order, cells, places, heads, width, out):
    """Rows of a map (B, places, N, D) in tree order (B, N, T, D); zeros where there is no cell.

    The range counts the cells of all batch entries; `order` names the place of each, or -1.
    """
    for i in range(first, last):
        batch = i // cells
        cell = i % cells
        place = order[cell]
        for head in range(heads):
            row = ((batch * heads + head) * cells + cell) * width
            if place < 0:
                for d in range(row, row + width):
                    out[d] = 0
            else:
                start = ((batch * places + place) * heads + head) * width - row
                for d in range(row, row + width):
                    out[d] = x[start + d]


@_kernel
def tree_to_grid(first, last, x, order, cells, places, heads, width, out):
    """Undoes `grid_to_tree`."""
    for i in range(first, last):
        batch = i // cells
        cell = i % cells
        place = order[cell]
        if place >= 0:
            for head in range(heads):
                row = ((batch * places + place) * heads + head) * width
                start = ((batch * heads + head) * cells + cell) * width - row
                for d in range(row, row + width):
                    out[d] = x[start + d]


@_kernel
def pool(first, last, x, visible, masked, cells, heads, children, width, out):
    """Means over the visible children of cells; the range counts cells of all heads."""
    for i in range(first, last):
        batch = i // cells // heads
        row = i * width
        for d in range(row, row + width):
            out[d] = 0
        count = 0
        for child in range(children):
            if masked and not visible[(batch * cells + i % cells) * children + child]:
                continue
            count += 1
            start = (i * children + child) * width - row
            for d in range(row, row + width):
                out[d] += x[start + d]
        if count > 1:
            factor = x.dtype.type(count)
            for d in range(row, row + width):
                out[d] /= factor


@_helper
def _share_of_child(like, visible, masked, first, children):
    """What a visible child contributes to the mean of its parent."""
    count = children
    if masked:
        count = 0
        for child in range(first, first + children):
            count += visible[child]
    return like.dtype.type(1) / like.dtype.type(max(count, 1))


@_kernel
def unpool(first, last, above, visible, masked, cells, heads, children, width, below):
    """Adds the gradients of means to those of the children; the range counts cells of all heads."""
    for i in range(first, last):
        shown = (i // cells // heads * cells + i % cells) * children
        factor = _share_of_child(above, visible, masked, shown, children)
        for child in range(children):
            if masked and not visible[shown + child]:
                continue
            start = (i * children + child) * width
            for d in range(width):
                below[start + d] += factor * above[i * width + d]


@_kernel
def unpool_to_grid(
    first, last, above, below, visible, masked, order, cells, places, heads, children, width, out
):
    """As `unpool` for the finest level, onto the grid; the range counts parents of all batches."""
    for i in range(first, last):
        batch = i // cells
        parent = i % cells
        factor = _share_of_child(above, visible, masked, i * children, children)
        for child in range(children):
            place = order[parent * children + child]
            if place < 0:
                continue
            own = factor if not masked or visible[i * children + child] else above.dtype.type(0)
            for head in range(heads):
                target = ((batch * places + place) * heads + head) * width
                source = (batch * heads + head) * cells + parent
                start = (source * children + child) * width
                source *= width
                for d in range(width):
                    out[target + d] = below[start + d] + own * above[source + d]
