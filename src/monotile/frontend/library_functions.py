"""Functions of array libraries that are made of several words: activations, roundings, powers and tests of numbers, as
torch defines them. library_words.py lists them beside those that are one word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..dtypes import DType, float32, to_numpy
from ..errors import UnsupportedPython, WrongCall
from ..ir import Value, composed

Handler = Callable[..., Any]
SMALL = 0.5  # up to which log(1 + x) and exp(x) - 1 would lose digits
INVERSE_LN2, LOG10_2 = 1.4426950408889634, 0.3010299956639812
SQRT_HALF, GELU_FACTOR, GELU_CUBE = 0.7071067811865476, 0.7978845608028654, 0.044715


def _float(s: Any, x: Any) -> Value:
    """A number as a float; whole ones become float32, as they do in these libraries."""
    value: Value = s.builder.value(s.number(x))
    return value if value.dtype.is_float else s.builder.cast(value, float32)


def _pair(s: Any, a: Any, b: Any) -> tuple[Any, Any, bool]:
    """Two numbers, and whether both are whole."""
    a, b = s.number(a), s.number(b)
    kinds = [x.dtype.is_int if isinstance(x, Value) else isinstance(x, int) for x in (a, b)]
    return a, b, all(kinds)


# ---- signs and tests -------------------------------------------------------------------------------------------------


def sign(s: Any, x: Any) -> Any:
    b, value = s.builder, s.builder.value(s.number(x))
    one, zero = (b.cast(b.value(n), value.dtype) for n in (1, 0))
    below = b.where(b.binary("lt", value, zero), b.unary("neg", one), zero)
    return b.where(b.binary("lt", zero, value), one, below)


def isnan(s: Any, x: Any) -> Any:
    value = _float(s, x)
    return s.builder.unary("not", s.builder.binary("le", s.builder.unary("abs", value), math.inf))


def isinf(s: Any, x: Any) -> Any:
    return s.builder.binary("eq", s.builder.unary("abs", _float(s, x)), math.inf)


def isfinite(s: Any, x: Any) -> Any:
    return s.builder.binary("lt", s.builder.unary("abs", _float(s, x)), math.inf)


def nan_to_num(s: Any, x: Any, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    b, value = s.builder, _float(s, x)
    most = float(ml_dtypes.finfo(to_numpy(value.dtype)).max)
    above, below = most if posinf is None else posinf, -most if neginf is None else neginf
    found = b.where(b.binary("eq", value, math.inf), above, b.where(b.binary("eq", value, -math.inf), below, value))
    return b.where(isnan(s, value), nan, found)


def where_method(s: Any, x: Any, condition: Any, other: Any) -> Any:
    return s.builder.where(s.number(condition), s.number(x), s.number(other))


# ---- activations -----------------------------------------------------------------------------------------------------


def relu(s: Any, x: Any, inplace: bool = False) -> Any:
    b, value = s.builder, s.builder.value(s.number(x))
    return b.where(b.binary("le", value, 0), b.cast(b.value(0), value.dtype), value)


def relu6(s: Any, x: Any, inplace: bool = False) -> Any:
    b, value = s.builder, relu(s, x)
    return b.where(b.binary("ge", value, 6), b.cast(b.value(6), value.dtype), value)


def leaky_relu(s: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    value = _float(s, x)
    return s.builder.where(s.builder.binary("lt", value, 0.0), s.builder.binary("mul", value, negative_slope), value)


def silu(s: Any, x: Any, inplace: bool = False) -> Any:
    value = _float(s, x)
    return s.builder.binary("mul", value, s.builder.unary("sigmoid", value))


def gelu(s: Any, x: Any, approximate: str = "none") -> Any:
    b, value = s.builder, _float(s, x)
    if approximate == "tanh":
        cube = b.binary("mul", composed.power(b, value, 3), GELU_CUBE)
        inner = b.unary("tanh", b.binary("mul", b.binary("add", value, cube), GELU_FACTOR))
    else:
        inner = b.unary("erf", b.binary("mul", value, SQRT_HALF))
    return b.binary("mul", b.binary("mul", value, 0.5), b.binary("add", inner, 1.0))


def softplus(s: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    b, value = s.builder, b_times(s, x, beta)
    small = log1p(s, b.unary("exp", b.unary("neg", b.unary("abs", value))))
    found = b.binary("add", b.binary("max", value, 0.0), small)
    return b.binary("div", b.where(b.binary("lt", threshold, value), value, found), beta)


def b_times(s: Any, x: Any, factor: float) -> Value:
    value: Value = s.builder.binary("mul", _float(s, x), factor)
    return value


# ---- logarithms and powers -------------------------------------------------------------------------------------------


def log1p(s: Any, x: Any) -> Any:
    """log(1 + x). For small x, log(u) x / (u - 1) with u = 1 + x rounded, in which roundings cancel."""
    b, value = s.builder, _float(s, x)
    u = b.binary("add", value, 1.0)
    rest, log = b.binary("sub", u, 1.0), b.unary("log", u)
    return _corrected(s, value, (log, log, rest))


def expm1(s: Any, x: Any) -> Any:
    """exp(x) - 1. For small x, (u - 1) x / log(u) with u = exp(x) rounded, in which roundings cancel."""
    b, value = s.builder, _float(s, x)
    u = b.unary("exp", value)
    rest = b.binary("sub", u, 1.0)
    return _corrected(s, value, (rest, rest, b.unary("log", u)))


def _corrected(s: Any, x: Value, parts: tuple[Value, Value, Value]) -> Any:
    """`plain`, or for small x `over` * x / `under`, which is x where `under` is 0."""
    b, (plain, over, under) = s.builder, parts
    none = b.binary("eq", under, 0.0)
    ratio = b.binary("div", x, b.where(none, 1.0, under))
    near = b.where(none, x, b.binary("mul", over, ratio))
    return b.where(b.binary("lt", b.unary("abs", x), SMALL), near, plain)


def log10(s: Any, x: Any) -> Any:
    return s.builder.binary("mul", s.builder.unary("log2", _float(s, x)), LOG10_2)


def pow(s: Any, x: Any, exponent: Any) -> Any:
    """A run-time number to a constant power, or a constant above 0 to a run-time one."""
    b, x, exponent = s.builder, s.number(x), s.number(exponent)
    if not isinstance(exponent, Value):
        whole = float(exponent).is_integer() and abs(exponent) <= composed.MAX_POWER
        if whole or exponent in (0.5, -0.5):
            return composed.power(b, b.value(x), exponent)
        return b.unary("exp2", b.binary("mul", b.unary("log2", _float(s, x)), float(exponent)))
    if isinstance(x, Value) or not x > 0:
        cure = "give a constant exponent, or a constant base above 0; exp2(y * log2(x)) is x ** y for x > 0"
        raise s.fail(UnsupportedPython, "pow of two run-time values, or of a base that is not above 0", cure)
    return b.unary("exp2", b.binary("mul", _float(s, exponent), math.log2(x)))


# ---- division --------------------------------------------------------------------------------------------------------


def div(s: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return s.builder.binary("div", s.number(a), s.number(b))
    if rounding_mode not in ("floor", "trunc"):
        raise s.fail(WrongCall, f"div: rounding_mode is {rounding_mode!r}", 'use "floor", "trunc" or None')
    if rounding_mode == "floor":
        return floor_divide(s, a, b)
    a, b, whole = _pair(s, a, b)
    if not whole:
        return composed.rounded(s.builder, "trunc", s.builder.binary("div", a, b))
    quotient, towards = s.builder.binary("floordiv", a, b), _differ(s, a, b)
    return s.builder.where(towards, s.builder.binary("add", quotient, 1), quotient)


def floor_divide(s: Any, a: Any, b: Any) -> Any:
    a, b, whole = _pair(s, a, b)
    if whole:
        return s.builder.binary("floordiv", a, b)
    return composed.rounded(s.builder, "floor", s.builder.binary("div", a, b))


def remainder(s: Any, a: Any, b: Any) -> Any:
    """With the sign of the divisor."""
    a, b, whole = _pair(s, a, b)
    if whole:
        return s.builder.binary("mod", a, b)
    return s.builder.binary("sub", a, s.builder.binary("mul", floor_divide(s, a, b), b))


def fmod(s: Any, a: Any, b: Any) -> Any:
    """With the sign of the dividend."""
    a, b, whole = _pair(s, a, b)
    if whole:
        rest = s.builder.binary("mod", a, b)
        return s.builder.where(_differ(s, a, b), s.builder.binary("sub", rest, b), rest)
    return s.builder.binary("sub", a, s.builder.binary("mul", div(s, a, b, "trunc"), b))


def _differ(s: Any, a: Any, b: Any) -> Value:
    """True where a division of whole numbers leaves a rest and their signs differ."""
    signs = s.builder.binary("xor", s.builder.binary("lt", a, 0), s.builder.binary("lt", b, 0))
    rest = s.builder.binary("ne", s.builder.binary("mod", a, b), 0)
    found: Value = s.builder.binary("and", rest, signs)
    return found


def frac(s: Any, x: Any) -> Any:
    value = _float(s, x)
    return s.builder.binary("sub", value, composed.rounded(s.builder, "trunc", value))


def scaled(kind: str) -> Handler:
    """`add` and `sub`, whose second operand torch multiplies by `alpha`."""

    def build(s: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
        b = s.number(b) if isinstance(alpha, int) and alpha == 1 else s.builder.binary("mul", s.number(b), alpha)
        return s.builder.binary(kind, s.number(a), b)

    return build


# ---- limits of types -------------------------------------------------------------------------------------------------


class TypeLimits(NamedTuple):
    """`finfo` and `iinfo` of an element type."""

    min: float
    max: float
    bits: int
    eps: float = 1.0
    tiny: float = 1.0
    smallest_normal: float = 1.0


def limits(dtype: DType) -> TypeLimits:
    if dtype.is_float:
        found: Any = ml_dtypes.finfo(to_numpy(dtype))
        tiny = float(found.smallest_normal)
        return TypeLimits(float(found.min), float(found.max), found.bits, float(found.eps), tiny, tiny)
    whole = np.iinfo(to_numpy(dtype))
    return TypeLimits(int(whole.min), int(whole.max), whole.bits)
