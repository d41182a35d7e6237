"""Shifts and divisions of integers, defined for every operand."""

from __future__ import annotations

from ...ir import Op
from ...ir.intervals import shifts_in_range
from .emit import Emitter, Reg


def shift(e: Emitter, op: Op, a: Reg, count: Reg) -> Reg:
    """Shift; a count that is negative or not below the number of bits moves every bit out."""
    unsigned, bits = op.result.dtype.is_unsigned, op.result.dtype.bits
    instruction = "shl" if op.kind == "shl" else "lshr" if unsigned else "ashr"
    if shifts_in_range(op):
        return e.binary(instruction, a, count)
    inside = e.binary("icmp ult", count, e.number(bits, a.type), "i1")
    if instruction == "ashr":
        return e.binary(instruction, a, e.select(inside, count, e.number(bits - 1, a.type)))
    zero = e.number(0, a.type)
    return e.select(inside, e.binary(instruction, a, e.select(inside, count, zero)), zero)


def divide_positive(e: Emitter, kind: str, a: Reg, b: Reg) -> Reg:
    """Divide a number that is not negative by one that is positive."""
    return e.binary("udiv" if kind == "floordiv" else "urem", a, b)


def divide_unsigned(e: Emitter, kind: str, a: Reg, b: Reg) -> Reg:
    """Divide; a zero divisor gives zero."""
    zero = e.number(0, a.type)
    nothing = e.binary("icmp eq", b, zero, "i1")
    safe = e.select(nothing, e.number(1, a.type), b)
    return e.select(nothing, zero, e.binary("udiv" if kind == "floordiv" else "urem", a, safe))


def divide(e: Emitter, kind: str, a: Reg, b: Reg) -> Reg:
    """Divide rounding down, as Python does; a zero divisor gives zero, and the least integer over -1 wraps."""
    zero, one = e.number(0, a.type), e.number(1, a.type)
    least = e.number(-(2 ** (63 if a.type == "i64" else 31)), a.type)
    nothing = e.binary("icmp eq", b, zero, "i1")
    wraps = e.binary("and", e.binary("icmp eq", a, least, "i1"), e.binary("icmp eq", b, e.number(-1, a.type), "i1"))
    safe = e.select(e.binary("or", nothing, wraps), one, b)
    quotient, rest = e.binary("sdiv", a, safe), e.binary("srem", a, safe)
    differs = e.binary("icmp slt", e.binary("xor", rest, safe), zero, "i1")
    down = e.binary("and", differs, e.binary("icmp ne", rest, zero, "i1"))
    if kind == "floordiv":
        result = e.select(down, e.binary("sub", quotient, one), quotient)
    else:
        result = e.select(down, e.binary("add", rest, safe), rest)
    return e.select(nothing, zero, result)
