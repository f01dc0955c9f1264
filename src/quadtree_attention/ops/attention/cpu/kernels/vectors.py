# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Vectors of `LANES` numbers for Numba, which LLVM maps to the registers of the processor.

Numba checks `array[i]` for negative indices; `at` and `load` are not checked. No fast-math flag is
set: NaN and infinity follow IEEE 754.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as typed_intrinsic
from numba.extending import models, register_model

from quadtree_attention.ops.attention.cpu.shape import LANES

intrinsic: Any = typed_intrinsic  # an intrinsic is called without its typing context
inlined = njit(nogil=True, error_model="numpy", forceinline=True)
function = njit(nogil=True, error_model="numpy")


def kernel(python: Callable[..., None]) -> Any:
    """Compile a function called by PyTorch; cache the code if there is a writable folder."""
    try:
        compiled = njit(nogil=True, error_model="numpy", cache=True)(python)
    except RuntimeError:  # there is no writable folder for the cache
        return function(python)
    _forget_old_code(Path(str(compiled.stats.cache_path)), python)
    return compiled


def _forget_old_code(folder: Path, python: Callable[..., None]) -> None:
    """Drop outdated cached code: Numba checks the date of a kernel's file, not of its helpers."""
    sources = Path(__file__).parent
    newest = max(file.stat().st_mtime for file in sources.glob("*.py"))
    stem = f"{python.__module__.rpartition('.')[2]}.{python.__qualname__}-"
    for index in folder.glob(f"{stem}*.nbi"):
        with suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()


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


def _pointer(context: Any, builder: Any, array: Any, data: Any, index: Any) -> Any:
    return builder.gep(cgutils.create_struct_proxy(array)(context, builder, data).data, [index])


def _vector_pointer(context: Any, builder: Any, array: Any, data: Any, index: Any, n: int) -> Any:
    pointer = _pointer(context, builder, array, data, index)
    return builder.bitcast(pointer, _llvm(array.dtype, n).as_pointer())


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fuse(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The sum a * b + c."""
    bits = 32 if isinstance(a.type.element, ir.FloatType) else 64
    return _call(builder, f"llvm.fmuladd.v{a.type.count}f{bits}", a.type, a, b, c)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    number = ir.VectorType(ir.IntType(32), len(lanes))
    return builder.shuffle_vector(a, b, ir.Constant(number, lanes))


def _spread(builder: Any, number: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    return _shuffle(builder, one, one, [0] * LANES)


# ---- memory --------------------------------------------------------------------------------------


@intrinsic
def at(typing_context, array, index):
    """Load one number."""

    def build(context, builder, signature, args):
        return builder.load(_pointer(context, builder, array, *args))

    return array.dtype(array, types.intp), build


@intrinsic
def load(typing_context, array, index):
    def build(context, builder, signature, args):
        data, index = args
        pointer = _vector_pointer(context, builder, array, data, index, LANES)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Vector(array.dtype)(array, types.intp), build


@intrinsic
def store(typing_context, array, index, vector):
    def build(context, builder, signature, args):
        data, index, vector = args
        pointer = _vector_pointer(context, builder, array, data, index, LANES)
        builder.store(vector, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), build


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the cache line of an element."""

    def build(context, builder, signature, args):
        pointer = builder.bitcast(_pointer(context, builder, array, *args), cgutils.voidptr_t)
        hints = [ir.Constant(ir.IntType(32), i) for i in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)
        return context.get_dummy_value()

    return types.void(array, types.intp), build


@intrinsic
def zeros(typing_context, array):
    def build(context, builder, signature, args):
        return _constant(_llvm(array.dtype), 0.0)

    return Vector(array.dtype)(array), build


@intrinsic
def splat(typing_context, number):
    def build(context, builder, signature, args):
        return _spread(builder, args[0])

    return Vector(number)(number), build


# ---- arithmetic ----------------------------------------------------------------------------------


def _binary(operation: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def apply(typing_context, a, b):
        return a(a, b), lambda context, builder, signature, args: operation(builder, *args)

    return apply


add = _binary(lambda builder, a, b: builder.fadd(a, b))
subtract = _binary(lambda builder, a, b: builder.fsub(a, b))
multiply = _binary(lambda builder, a, b: builder.fmul(a, b))
divide = _binary(lambda builder, a, b: builder.fdiv(a, b))
# Maximum or minimum of each lane; `a` if one of them is NaN.
higher = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a))
lower = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", b, a), b, a))


@intrinsic
def fma(typing_context, a, b, c):
    """The sum a * b + c."""
    return a(a, b, c), lambda context, builder, signature, args: _fuse(builder, *args)


@intrinsic
def replace(typing_context, a, old, new):
    """`new` in the lanes where a == old."""

    def build(context, builder, signature, args):
        a, old, new = args
        return builder.select(builder.fcmp_ordered("==", a, old), new, a)

    return a(a, old, new), build


# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2, lowest power first.
_EXP_FLOAT = (  # Cephes, 2e-7 relative
    5.0000001201e-1,
    1.6666665459e-1,
    4.1665795894e-2,
    8.3334519073e-3,
    1.3981999507e-3,
    1.9875691500e-4,
)
_EXP_DOUBLE = tuple(1 / math.factorial(i) for i in range(2, 16))
_LN2_FLOAT = (math.log(2),)
_LN2_DOUBLE = (0.693145751953125, 1.42860682030941723212e-6)  # in two parts, for more digits


@intrinsic
def exp(typing_context, x):
    """e**x for x below 88; 0 if the result is subnormal, NaN for NaN."""
    is_float = x.dtype == types.float32

    def build(context, builder, signature, args):
        (y,) = args
        vector = _llvm(x.dtype)
        digits, bias = (23, 127) if is_float else (52, 1023)
        integers = ir.VectorType(ir.IntType(32 if is_float else 64), LANES)

        # Adding 1.5 * 2**digits puts the nearest integer into the lowest bits; NaN stays NaN.
        shift = _constant(vector, 1.5 * 2.0**digits)
        shifted = _fuse(builder, y, _constant(vector, 1 / math.log(2)), shift)
        power = builder.fsub(shifted, shift)
        rest = y
        for part in _LN2_FLOAT if is_float else _LN2_DOUBLE:
            rest = _fuse(builder, power, _constant(vector, -part), rest)
        # Pairs of terms in parallel: a dependency chain of half the length.
        terms = [_constant(vector, c) for c in (_EXP_FLOAT if is_float else _EXP_DOUBLE)]
        pairs = [_fuse(builder, b, rest, a) for a, b in zip(terms[::2], terms[1::2], strict=True)]
        square = builder.fmul(rest, rest)
        series = pairs.pop()
        for pair in (*reversed(pairs), builder.fadd(rest, _constant(vector, 1.0))):
            series = _fuse(builder, series, square, pair)
        exponent = builder.add(builder.bitcast(shifted, integers), _constant(integers, bias))
        factor = builder.bitcast(builder.shl(exponent, _constant(integers, digits)), vector)
        is_low = builder.fcmp_ordered("<", y, _constant(vector, -87.0 if is_float else -708.0))
        return builder.select(is_low, _constant(vector, 0.0), builder.fmul(series, factor))

    return x(x), build


# ---- across lanes --------------------------------------------------------------------------------


def _reduction(operation: Callable[[Any, Any, Any], Any]) -> Any:
    """Create a reduction that halves a vector until one number remains."""

    @intrinsic
    def reduce(typing_context, vector):
        def build(context, builder, signature, args):
            (x,) = args
            for half in (4, 2, 1):
                low = _shuffle(builder, x, x, list(range(half)))
                high = _shuffle(builder, x, x, list(range(half, 2 * half)))
                x = operation(builder, low, high)
            return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))

        return vector.dtype(vector), build

    return reduce


total = _reduction(lambda builder, a, b: builder.fadd(a, b))
highest = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a))
lowest = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", b, a), b, a))


@intrinsic
def store_sums(typing_context, array, index, stride, scale, a, b, c, d, e, f, g, h):
    """Store the sums over the lanes of eight vectors, times `scale`.

    The sums of a and b are stored at array[index] and array[index + 1], those of c and d one stride
    further, and so on.
    """

    def build(context, builder, signature, args):
        data, index, stride, scale = args[:4]

        def fold(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
            return builder.fadd(_shuffle(builder, x, y, first), _shuffle(builder, x, y, second))

        # (x0+x2, y0+y2, x1+x3, y1+y3) of both halves, then their two pairs, then the halves
        pairs = [
            fold(x, y, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
            for x, y in zip(args[4::2], args[5::2], strict=True)
        ]
        quads = [
            fold(x, y, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
            for x, y in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        sums = fold(quads[0], quads[1], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        sums = builder.fmul(sums, _spread(builder, scale))
        for i in range(0, LANES, 2):
            pointer = _vector_pointer(context, builder, array, data, index, 2)
            pair = _shuffle(builder, sums, sums, [i, i + 1])
            builder.store(pair, pointer, align=array.dtype.bitwidth // 8)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    vector = Vector(array.dtype)
    return types.void(array, types.intp, types.intp, array.dtype, *(vector,) * 8), build


@intrinsic
def not_below(typing_context, vector, bar):
    """One bit per lane that is not below the lane of another vector; NaN compares as not below."""

    def build(context, builder, signature, args):
        bits = builder.fcmp_unordered(">=", *args)
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(vector, bar), build


@intrinsic
def count_bits(typing_context, bits):
    return types.int64(types.int64), lambda context, builder, signature, args: builder.ctpop(*args)


@intrinsic
def store_positions(typing_context, array, index, bytes_of_positions, first):
    """Store eight int32 numbers: `first` plus each byte of an integer, lowest byte first."""

    def build(context, builder, signature, args):
        data, index, packed, first = args
        integers = ir.VectorType(ir.IntType(32), LANES)
        positions = builder.bitcast(packed, ir.VectorType(ir.IntType(8), LANES))
        first = _spread(builder, builder.trunc(first, ir.IntType(32)))
        positions = builder.add(builder.zext(positions, integers), first)
        pointer = _pointer(context, builder, array, data, index)
        builder.store(positions, builder.bitcast(pointer, integers.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64, types.intp), build
