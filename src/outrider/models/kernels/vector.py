"""Sixteen float32 numbers as one value inside a kernel, and the scalars of bfloat16.

Owns what numba lacks: a vector type whose every operation is written out, so that the compiler
neither chooses how a loop is cut into vectors nor reorders a sum. LLVM maps it to what the
processor has (one AVX-512 register, two of AVX2, four of NEON); the bits are the same.

Arrays hold float32, or bfloat16 as ``uint16`` bits; ``load`` and ``store`` convert, rounding to
nearest even. Used by the other modules of :mod:`outrider.models.kernels` only.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from outrider.models.kernels.compiler import helper, operation

LANES = 16

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_FLOATS, _HALVES, _INTS = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
_NAN_BITS = 0x7FC0  # the quiet NaN of bfloat16


class Vector(types.Type):
    """numba's type of sixteen lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vector16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    """Held as an LLVM vector, hence in registers."""

    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


_vector = Vector()


@operation
def splat(_context, _number):
    """The number in every lane."""

    def generate(_context, builder, _signature, args):
        first = builder.insert_element(
            ir.Constant(_FLOATS, ir.Undefined), args[0], ir.Constant(_I32, 0)
        )
        return builder.shuffle_vector(
            first, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES)
        )

    return _vector(types.float32), generate


@operation
def fma(_context, _a, _b, _c):
    """``a * b + c``, rounded once."""

    def generate(_context, builder, _signature, args):
        return _call(builder, "llvm.fma.v16f32", args)

    return _vector(_vector, _vector, _vector), generate


@operation
def add(_context, _a, _b):
    """``a + b``."""
    return _vector(_vector, _vector), lambda _c, builder, _s, args: builder.fadd(*args)


@operation
def subtract(_context, _a, _b):
    """``a - b``."""
    return _vector(_vector, _vector), lambda _c, builder, _s, args: builder.fsub(*args)


@operation
def multiply(_context, _a, _b):
    """``a * b``."""
    return _vector(_vector, _vector), lambda _c, builder, _s, args: builder.fmul(*args)


@operation
def divide(_context, _a, _b):
    """``a / b``."""
    return _vector(_vector, _vector), lambda _c, builder, _s, args: builder.fdiv(*args)


@operation
def larger(_context, _a, _b):
    """``b`` where it is larger than ``a``, else ``a``: a NaN of ``a`` stays, one of ``b`` goes."""
    return _vector(_vector, _vector), lambda _c, builder, _s, args: _larger(builder, *args)


@operation
def smaller(_context, _a, _b):
    """``b`` where it is smaller than ``a``, else ``a``: a NaN of ``a`` stays, one of ``b`` goes."""

    def generate(_context, builder, _signature, args):
        return builder.select(builder.fcmp_ordered("<", args[1], args[0]), args[1], args[0])

    return _vector(_vector, _vector), generate


@operation
def round_down(_context, _a):
    """The largest whole number that is not above."""

    def generate(_context, builder, _signature, args):
        return _call(builder, "llvm.floor.v16f32", args)

    return _vector(_vector), generate


@operation
def power_of_two(_context, _a):
    """``2 ** a`` of whole numbers from -126 to 127."""

    def generate(_context, builder, _signature, args):
        # Saturating: of a NaN it makes some number, where the plain conversion is undefined.
        whole = _call(builder, "llvm.fptosi.sat.v16i32.v16f32", args, _INTS)
        exponent = builder.add(whole, _every(127))
        return builder.bitcast(builder.shl(exponent, _every(23)), _FLOATS)

    return _vector(_vector), generate


@operation
def sum_of(_context, _a):
    """The sum of the lanes: halves are added to one another until one lane is left."""

    def generate(_context, builder, _signature, args):
        return _folded(builder, args[0], builder.fadd)

    return types.float32(_vector), generate


@operation
def largest_of(_context, _a):
    """The largest lane."""

    def generate(_context, builder, _signature, args):
        return _folded(builder, args[0], lambda a, b: _larger(builder, a, b))

    return types.float32(_vector), generate


@operation
def load(_context, array, _start):
    """Sixteen elements of a flat array from ``start`` on."""

    def generate(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        if array.dtype == types.uint16:
            bits = builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
            wide = builder.shl(builder.zext(bits, _INTS), _every(16))
            return builder.bitcast(wide, _FLOATS)
        return builder.load(builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)

    return _vector(array, types.int64), generate


@operation
def store(_context, array, _start, _value):
    """Write the lanes to a flat array from ``start`` on, in the array's precision."""

    def generate(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        if array.dtype == types.uint16:
            bits = builder.bitcast(args[2], _INTS)
            is_odd = builder.and_(builder.lshr(bits, _every(16)), _every(1))
            rounded = builder.lshr(
                builder.add(builder.add(bits, _every(0x7FFF)), is_odd), _every(16)
            )
            is_nan = builder.fcmp_unordered("uno", args[2], args[2])
            halves = builder.trunc(builder.select(is_nan, _every(_NAN_BITS), rounded), _HALVES)
            builder.store(halves, builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
        else:
            builder.store(args[2], builder.bitcast(pointer, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, _vector), generate


@helper
def exp(x):
    """``e ** x`` to one unit in the last place; below -87 it is e ** -87, above 88 e ** 88.

    Cephes' expf: x = n ln 2 + r, a polynomial of r, times 2 ** n. A NaN stays one.
    """
    x = smaller(larger(x, splat(np.float32(-87.0))), splat(np.float32(88.0)))
    n = round_down(fma(x, splat(np.float32(1.4426950408889634)), splat(np.float32(0.5))))
    r = fma(n, splat(np.float32(-0.693359375)), x)
    r = fma(n, splat(np.float32(2.12194440e-4)), r)
    p = splat(np.float32(1.9875691500e-4))
    p = fma(p, r, splat(np.float32(1.3981999507e-3)))
    p = fma(p, r, splat(np.float32(8.3334519073e-3)))
    p = fma(p, r, splat(np.float32(4.1665795894e-2)))
    p = fma(p, r, splat(np.float32(1.6666665459e-1)))
    p = fma(p, r, splat(np.float32(5.0000001201e-1)))
    p = fma(p, multiply(r, r), add(r, splat(np.float32(1.0))))
    return multiply(p, power_of_two(n))


@operation
def _from_bits(_context, _bits):
    """The float32 of these 32 bits."""
    return types.float32(types.uint32), lambda _c, builder, _s, args: builder.bitcast(args[0], _F32)


@operation
def _to_bits(_context, _number):
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda _c, builder, _s, args: builder.bitcast(args[0], _I32)


def widened(_stored):
    """One stored element as float32."""
    raise NotImplementedError("only inside a kernel")


@overload(widened, inline="always")
def _widened(_stored):
    if _stored == types.uint16:
        return lambda _stored: _from_bits(np.uint32(_stored) << np.uint32(16))
    return lambda _stored: _stored


def narrowed(_number, _like):
    """A float32 in the precision of ``like``, an element of the array it goes to."""
    raise NotImplementedError("only inside a kernel")


@overload(narrowed, inline="always")
def _narrowed(_number, _like):
    if _like == types.uint16:
        return lambda _number, _like: _rounded(_number)
    return lambda _number, _like: _number


@helper
def _rounded(number):
    """bfloat16's bits, rounded to nearest even."""
    if number != number:  # noqa: PLR0124  (NaN, in the words that compile to one comparison)
        return np.uint16(_NAN_BITS)
    bits = _to_bits(number)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))


def _every(number: int) -> ir.Constant:
    return ir.Constant(_INTS, [number] * LANES)


def _call(builder, name: str, args, result=_FLOATS):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [_FLOATS] * len(args)), name
    )
    return builder.call(function, args)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _folded(builder, value, combine):
    """Combine the upper half of the lanes with the lower one until one is left."""
    width = LANES // 2
    while width:
        lower, upper = (
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width))),
            )
            for first in (0, width)
        )
        value = combine(lower, upper)
        width //= 2
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _element(context, builder, array_type, array, index):
    """A pointer to an array's element."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
