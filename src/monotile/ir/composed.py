"""Words that are made of several ops, or of one with rules of its own. `b` is the builder."""

from __future__ import annotations

import math
from typing import Any

from .. import dtypes
from ..dtypes import bfloat16, bool_, float32, int8, int32, uint8
from ..errors import ShapeMismatch, UndefinedForDType, UnsupportedPython
from .ops import Type, Value

COUNTING = ("add", "sub", "mul", "div")  # of a bool and a number, where `Builder.counts_bools`
MAX_POWER = 64
POWER_CURE = f"use whole powers up to {MAX_POWER}, sqrt(x), 1 / sqrt(x), or exp2(y * log2(x)) for x > 0"
WHOLE = 2.0**23  # float32 numbers from here up are whole
EXACT = 2**24  # whole numbers up to here are exact in float32


def power(b: Any, x: Value, exponent: Any) -> Value:
    """Multiply a whole power out by squaring; a negative power is one division more, and 0.5 is a square root."""
    if exponent in (0.5, -0.5):
        root: Value = b.unary("sqrt", x)
        return root if exponent > 0 else b.binary("div", 1.0, root)
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    if type(exponent) is not int or abs(exponent) > MAX_POWER:
        raise b.fail(UnsupportedPython, "'**' of a run-time value takes a constant, small, whole power", POWER_CURE)
    x = b.cast(x, dtypes.computed(x.dtype))
    if x.dtype is bool_ or (exponent < 0 and not x.dtype.is_float):
        raise b.fail(UndefinedForDType, f"'** {exponent}' is not defined for {x.dtype}", "cast first: .astype(float32)")
    result: Value | None = None
    for digit in f"{abs(exponent):b}":  # from the greatest
        result = None if result is None else b.binary("mul", result, result)
        if digit == "1":
            result = x if result is None else b.binary("mul", result, x)
    if result is None:
        one: Value = b.broadcast(b.value(1, x.dtype), x.shape)
        return one
    return b.binary("div", 1.0, result) if exponent < 0 else result


def power_of(b: Any, base: Any, exponent: Value) -> Value:
    """Raise a constant to a run-time float: `2.0 ** x` is exp2(x)."""
    if base == 2 and exponent.dtype.is_float:
        result: Value = b.unary("exp2", exponent)
        return result
    cure = "use exp2(x * log2(c)) for a constant c > 0, or 1 << x for powers of two of integers"
    raise b.fail(UnsupportedPython, f"{base} ** {exponent.type} is not part of the kernel language", cure)


def rounded(b: Any, how: str, x: Value) -> Value:
    """Round to a whole float: `floor`, `ceil`, `round` (ties to even) or `trunc`. Integers, infinities and NaN stay."""
    x = b.cast(x, dtypes.computed(x.dtype))
    if x.dtype is bool_:
        raise b.fail(UndefinedForDType, f"'{how}' is not defined for bool", "cast the bool: .astype(int32)")
    if x.dtype.is_int:
        return x
    size = b.unary("abs", x)
    count = b.cast(size, int32)
    whole = b.cast(count, float32)
    if how == "round":
        rest, odd = b.binary("sub", size, whole), b.binary("eq", b.binary("and", count, 1), 1)
        away = b.binary("or", b.binary("gt", rest, 0.5), b.binary("and", b.binary("eq", rest, 0.5), odd))
        whole = b.where(away, b.binary("add", whole, 1.0), whole)
    elif how != "trunc":
        away = b.binary("lt" if how == "floor" else "gt", x, 0.0)
        whole = b.where(away, b.binary("add", whole, 1.0), whole)
    signed = b.where(b.binary("lt", x, 0.0), b.unary("neg", whole), whole)
    changes = b.binary("and", b.binary("lt", size, WHOLE), b.binary("ne", b.cast(count, float32), size))
    result: Value = b.where(changes, signed, x)
    b.flat.add(result)
    return result


def reshape(b: Any, value: Value, shape: tuple[Any, ...]) -> Value:
    """Give a tile another shape; its elements keep their order, rows first. One side may be -1."""
    b.rank(len(shape))
    count, known = math.prod(value.shape), math.prod([s for s in shape if isinstance(s, int) and s > 0])
    sides = [count // known if isinstance(s, int) and s == -1 else b.side(s) for s in shape]
    if not sides or shape.count(-1) > 1 or math.prod(sides) != count:
        found = f"a tile {value.shape} of {count} elements does not have the shape {shape}"
        raise b.fail(ShapeMismatch, found, "give sides whose product is the number of elements")
    result: Value = (
        _with_ones(b, value, tuple(sides)) or b.emit("reshape", (value,), Type(value.dtype, tuple(sides))).result
    )
    return result


def _with_ones(b: Any, value: Value, shape: tuple[int, ...]) -> Value | None:
    """Return a reshape that only adds, drops or moves a side of 1, as an op that moves nothing; None for others."""
    if shape == value.shape:
        return value
    if len(value.shape) == 1 and 1 in shape:
        return b.expand(value, shape.index(1)) if value.shape[0] > 1 else b.expand(value, 0)  # type: ignore[no-any-return]
    if len(value.shape) == len(shape) == 2 and shape == value.shape[::-1]:
        return b.trans(value) if 1 in shape else None
    if (
        len(shape) == 1
        and 1 in value.shape
        and value.dtype is dtypes.computed(value.dtype)
        and value.dtype is not bool_
    ):
        return b.reduce("sum", value, value.shape.index(1))  # type: ignore[no-any-return]
    return None


def position_of_extremum(b: Any, fold: str, x: Value, axis: int) -> Value:
    """Return the first position of the maximum or minimum along an axis. NaN is ignored; where no float is above -inf
    (below inf), it is 0."""
    x = b.cast(x, int32) if x.dtype is bool_ else b.cast(x, dtypes.computed(x.dtype))
    best = b.reduce(fold, x, axis)
    axis %= len(x.shape)
    side, spread = x.shape[axis], best
    positions = b.arange(side)
    if len(x.shape) == 2:
        positions, spread = b.expand(positions, 1 - axis), b.expand(best, axis)
    found = b.reduce("min", b.where(b.binary("eq", x, spread), positions, side), axis)
    if x.dtype.is_float:
        found = b.where(b.binary("eq", best, -math.inf if fold == "max" else math.inf), 0, found)
    return found  # type: ignore[no-any-return]


def integer_dot(b: Any, x: Value, y: Value) -> Value:
    """Multiply matrices of int8 or uint8 with int32 sums. Their numbers are bfloat16 numbers, and sums of few enough
    products are exact in float32: long rows are cut."""
    most = 255 if uint8 in (x.dtype, y.dtype) else 128
    side = x.shape[1]
    exact = EXACT // (most * most)
    positions = b.expand(b.arange(side), 0)
    total: Value | None = None
    x, y = b.cast(x, bfloat16), b.cast(y, bfloat16)
    for first in range(0, side, exact):
        part = x
        if side > exact:
            inside = b.binary("eq", b.binary("floordiv", positions, exact), first // exact)
            part = b.where(inside, x, b.cast(b.value(0.0), bfloat16))
        product = b.cast(b.dot(part, y), int32)
        total = product if total is None else b.binary("add", total, product)
    assert total is not None
    return total


def multiplies_integers(x: Value, y: Value) -> bool:
    return all(v.dtype in (int8, uint8) for v in (x, y))


def counted(b: Any, operand: Any, other: Any) -> Any:
    """Convert a bool to 0 or 1 in the type of the number beside it; leave two bools as they are."""
    if isinstance(other, Value):
        kind = other.dtype
    else:
        kind = bool_ if isinstance(other, bool) else int32 if isinstance(other, int) else float32
    if kind is bool_:
        return operand
    if isinstance(operand, Value):
        return b.cast(operand, dtypes.computed(kind)) if operand.dtype is bool_ else operand
    return int(operand) if isinstance(operand, bool) else operand
