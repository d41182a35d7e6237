"""Steps that the elementary functions share."""

from __future__ import annotations

from .emit import Emitter, Reg


def number(e: Emitter, value: float) -> Reg:
    return e.number(value, "float")


def compare(e: Emitter, predicate: str, a: Reg, b: Reg) -> Reg:
    return e.binary(f"fcmp {predicate}", a, b, "i1")


def at_least(e: Emitter, x: Reg, low: float) -> Reg:
    """max(low, x), which is one instruction of x86; NaN stays."""
    return e.select(compare(e, "ogt", number(e, low), x), number(e, low), x)


def at_most(e: Emitter, x: Reg, high: float) -> Reg:
    return e.select(compare(e, "olt", number(e, high), x), number(e, high), x)


def polynomial(e: Emitter, x: Reg, coefficients: tuple[float, ...]) -> Reg:
    """Horner's rule; the coefficients begin with the constant term."""
    *rest, last = coefficients
    result = number(e, last)
    for coefficient in reversed(rest):
        result = e.fma(result, x, number(e, coefficient))
    return result
