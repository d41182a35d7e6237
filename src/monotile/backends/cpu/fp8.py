"""fp8 on a CPU: float32 in registers, a byte in memory.

Where the processor converts float16, vectors of both formats are read through it: float8_e5m2 is its upper byte, and
the fields of float8_e4m3fn fit into those of a float16 that is smaller by 2^8. Elsewhere their fields are moved to
those of a float32, and the steps of subnormal numbers are counted.
"""

from __future__ import annotations

from typing import NamedTuple

from ...dtypes import DType
from .emit import Emitter, Reg


class Format(NamedTuple):
    """A format by the fields of its byte."""

    mantissa: int  # bits
    bias: int  # of the exponent
    greatest: int  # code of the greatest number
    beyond: int  # code of what is greater
    nan: int


FORMATS = {
    "float8_e4m3fn": Format(3, 7, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": Format(2, 15, 0x7B, 0x7C, 0x7E),
}


HALF_FACTOR = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0}


def decode(e: Emitter, dtype: DType, raw: Reg) -> Reg:
    """Convert a byte, or an int32 that holds one, to a float."""
    byte = raw if raw.type == "i8" else e.convert("trunc", raw, "i8")
    if raw.vector and e.has_half:
        return _through_half(e, dtype, byte)
    form = FORMATS[dtype.name]
    drop = 23 - form.mantissa
    wide = e.convert("zext", byte, "i32")
    size = e.binary("and", wide, e.number(0x7F, "i32"))
    step = e.number(2.0 ** (1 - form.bias - form.mantissa), "float")
    small = e.convert("bitcast", e.binary("fmul", e.convert("sitofp", size, "float"), step), "i32")
    moved = e.binary("shl", size, e.number(drop, "i32"))
    normal = e.binary("add", moved, e.number((127 - form.bias) << 23, "i32"))
    bits = e.select(e.binary("icmp ult", size, e.number(1 << form.mantissa, "i32"), "i1"), small, normal)
    special = e.binary("or", moved, e.number(0x7F800000, "i32"))
    bits = e.select(e.binary("icmp ugt", size, e.number(form.greatest, "i32"), "i1"), special, bits)
    sign = e.binary("shl", e.binary("and", wide, e.number(0x80, "i32")), e.number(24, "i32"))
    return e.convert("bitcast", e.binary("or", bits, sign), "float")


def _through_half(e: Emitter, dtype: DType, byte: Reg) -> Reg:
    """Convert as a float16, which keeps subnormal numbers in every mode of the processor."""
    number, factor = _from_half(e, half_bits(e, dtype, byte)), HALF_FACTOR[dtype.name]
    return number if factor == 1.0 else e.binary("fmul", number, e.number(factor, "float"))


def decode_two(e: Emitter, dtype: DType, bytes_: str) -> list[Reg]:
    """Convert the bytes of two vectors, whose fields are moved at once."""
    lanes = e.lanes
    e.lanes *= 2
    words = half_bits(e, dtype, Reg(bytes_, "i8", True))
    kind, factor = e.vector_type("i16"), HALF_FACTOR[dtype.name]
    e.lanes = lanes
    found = []
    for n in (0, lanes):
        picks = ", ".join(f"i32 {n + i}" for i in range(lanes))
        part = e.op(f"shufflevector {kind} {words.text}, {kind} poison, <{lanes} x i32> <{picks}>")
        number = _from_half(e, Reg(part, "i16", True))
        found.append(number if factor == 1.0 else e.binary("fmul", number, e.number(factor, "float")))
    return found


def half_bits(e: Emitter, dtype: DType, byte: Reg) -> Reg:
    """Return the bits of float16 numbers, which are to be multiplied by HALF_FACTOR."""
    if dtype.name == "float8_e5m2":
        return e.binary("shl", e.convert("zext", byte, "i16"), e.number(8, "i16"))
    # Bits 14 and 15 are the sign.
    half = e.binary("shl", e.convert("sext", byte, "i16"), e.number(7, "i16"))
    half = e.binary("and", half, e.number(-0x4001, "i16"))
    # The code of NaN is the greatest: one more carries to bit 14, which makes the exponent that of NaN. Comparisons of
    # floats would take the pipes that multiply.
    carried = e.binary("and", e.binary("add", half, e.number(0x80, "i16")), e.number(0x4000, "i16"))
    return e.binary("or", half, carried)


def _from_half(e: Emitter, bits: Reg) -> Reg:
    """Convert float16 numbers that were made of integers. LLVM does not find VCVTPH2PS for 16 of them."""
    kind, words = e.vector_type("float"), e.vector_type("i16")
    if e.lanes == 16:
        given = ((words, bits.text), (kind, "zeroinitializer"), ("i16", "-1"), ("i32", "4"))
        return Reg(e.call(kind, "llvm.x86.avx512.mask.vcvtph2ps.512", *given), "float", True)
    return e.convert("fpext", e.convert("bitcast", bits, "half"), "float")


def encode(e: Emitter, dtype: DType, x: Reg) -> Reg:
    """Convert a float to a byte in an int32: rounded to nearest, ties to even."""
    form = FORMATS[dtype.name]
    drop = 23 - form.mantissa
    bits = e.convert("bitcast", x, "i32")
    size = e.binary("and", bits, e.number(0x7FFFFFFF, "i32"))
    odd = e.binary("and", e.binary("lshr", size, e.number(drop, "i32")), e.number(1, "i32"))
    rounded = e.binary("add", size, e.binary("add", odd, e.number(2 ** (drop - 1) - 1, "i32")))
    rebased = e.number((127 - form.bias) << form.mantissa, "i32")
    normal = e.binary("sub", e.binary("lshr", rounded, e.number(drop, "i32")), rebased)
    # Below the least normal number the codes are equal steps: adding a number of that precision rounds to them.
    magic = 2.0 ** (24 - form.bias - form.mantissa)
    shifted = e.binary("fadd", e.convert("bitcast", size, "float"), e.number(magic, "float"))
    magic_bits = e.convert(
        "bitcast", e.splat(e.number(magic, "float")) if x.vector else e.number(magic, "float"), "i32"
    )
    small = e.binary("sub", e.convert("bitcast", shifted, "i32"), magic_bits)
    least = e.number((128 - form.bias) << 23, "i32")  # bits of the least normal number
    code = e.select(e.binary("icmp ult", size, least, "i1"), small, normal)
    code = e.select(
        e.binary("icmp ugt", code, e.number(form.greatest, "i32"), "i1"), e.number(form.beyond, "i32"), code
    )
    code = e.select(e.binary("fcmp uno", x, x, "i1"), e.number(form.nan, "i32"), code)
    sign = e.binary("and", e.binary("lshr", bits, e.number(24, "i32")), e.number(0x80, "i32"))
    return e.binary("or", code, sign)
