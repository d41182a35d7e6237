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
    if dtype.name == "float8_e5m2":
        return _from_half(e, e.binary("shl", e.convert("zext", byte, "i16"), e.number(8, "i16")))
    # Bits 14 and 15 are the sign; the number is too small by 2^8.
    half = e.binary("shl", e.convert("sext", byte, "i16"), e.number(7, "i16"))
    number = _from_half(e, e.binary("and", half, e.number(-0x4001, "i16")))
    number = e.binary("fmul", number, e.number(256.0, "float"))
    beyond = e.number(480.0, "float")  # what the code of NaN would be
    return e.select(
        e.binary("fcmp oeq", e.intrinsic("fabs", number), beyond, "i1"), e.number(float("nan"), "float"), number
    )


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
