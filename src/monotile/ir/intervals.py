"""Integer range analysis: where plain arithmetic may replace wrapping or clamping arithmetic, and where a position is
known not to be negative."""

from __future__ import annotations

from collections.abc import Mapping

from ..dtypes import DType
from .affine import Linear, linear
from .ops import BITWISE, MAX_LENGTH, Block, Op, Value

MAX_DEPTH = 16  # of operands followed; deeper ones count as unknown
Interval = tuple[int, int]
Loops = Mapping[Block, Op]  # loops by their body; a counter is bounded only if its loop is here
NO_LOOPS: Loops = {}


def interval(value: Value, loops: Loops = NO_LOOPS, depth: int = MAX_DEPTH) -> Interval:
    """Return the least and greatest value an integer can take; the limits of its type if nothing is known."""
    op, limits = value.op, _limits(value.dtype)
    if depth == 0 or not value.dtype.is_int:
        return limits
    if op is None:
        return _counter_interval(value, loops, depth) if loops else limits
    if op.kind == "const":
        return int(op.attrs["value"]), int(op.attrs["value"])
    if op.kind == "arange":
        return 0, value.shape[0] - 1
    if op.kind == "dim":
        return 0, MAX_LENGTH
    if op.kind == "program_id":
        size = op.operands[op.results.index(value)]  # a grid over a tensor leaves the margin that lengths leave
        return 0, MAX_LENGTH if interval(size, loops, depth - 1)[1] <= MAX_LENGTH else limits[1]
    found = _unwrapped_interval(op, loops, depth)
    return found if found is not None and _fits(found, limits) else limits


def nonnegative(form: Linear | None, loops: Loops, depth: int = MAX_DEPTH) -> bool:
    """Prove that a sum of integer scalars, computed without wrapping, is 0 or more."""
    if form is None or form.iotas or form.const < 0:
        return False
    return all(factor > 0 and interval(term, loops, depth)[0] >= 0 for term, factor in form.terms.items())


def _counter_interval(value: Value, loops: Loops, depth: int) -> Interval:
    """Bound a loop's counter by its start, from which it only grows, and by its end."""
    limits, body = _limits(value.dtype), value.owner
    if not isinstance(body, Block) or body not in loops or value is not body.params[0]:
        return limits
    start, end = loops[body].operands[:2]
    low = 0 if nonnegative(linear(start), loops, depth - 1) else limits[0]
    return low, max(low, interval(end, loops, depth - 1)[1] - 1)


def _limits(dtype: DType) -> Interval:
    return dtype.limits if dtype.is_int else (0, 0)


def _fits(found: Interval, limits: Interval) -> bool:
    return limits[0] <= found[0] and found[1] <= limits[1]


def _unwrapped_interval(op: Op, loops: Loops, depth: int) -> Interval | None:
    """Return the interval of an op's result if nothing wraps, or None for ops without a rule."""
    kind = op.kind
    if kind == "where":
        (_, a, b) = op.operands
        (low, high), (other_low, other_high) = interval(a, loops, depth - 1), interval(b, loops, depth - 1)
        return min(low, other_low), max(high, other_high)
    if not op.operands or not all(v.dtype.is_int for v in op.operands):
        return None
    (low, high), *others = (interval(v, loops, depth - 1) for v in op.operands)
    if kind in ("cast", "expand", "trans", "broadcast"):
        return low, high
    if len(others) != 1:
        return None
    other_low, other_high = others[0]
    if kind in ("add", "sub"):
        return (low + other_low, high + other_high) if kind == "add" else (low - other_high, high - other_low)
    if kind == "mul":
        products = [a * b for a in (low, high) for b in (other_low, other_high)]
        return min(products), max(products)
    if kind in ("min", "max"):
        choose = min if kind == "min" else max
        return choose(low, other_low), choose(high, other_high)
    if kind in BITWISE:
        return _bitwise_interval(kind, (low, high), others[0])
    return _division_interval(kind, (low, high), others[0]) if kind in ("floordiv", "mod") else None


def _bitwise_interval(kind: str, value: Interval, other: Interval) -> Interval | None:
    """Bound the bits of integers, and shifts by counts that are in range."""
    (low, high), (least, most) = value, other
    if kind == "bitand" and (low >= 0 or least >= 0):
        return 0, min(end for start, end in (value, other) if start >= 0)
    if kind in ("bitor", "bitxor") and low >= 0 and least >= 0:
        return 0, 2 ** max(high.bit_length(), most.bit_length()) - 1
    if kind == "shl" and least >= 0 and most < 64:
        return min(low << least, low << most), max(high << least, high << most)
    if kind == "shr" and least >= 0 and most < 64:
        return min(low >> least, low >> most), max(high >> least, high >> most)
    return None


def _division_interval(kind: str, dividend: Interval, divisor: Interval) -> Interval | None:
    """Bound a quotient or remainder by a divisor that is not negative. Division by 0 gives 0."""
    (low, high), (least, most) = dividend, divisor
    if least < 0:
        return None
    if kind == "mod":
        return 0, max(most - 1, 0)
    if least == 0:
        return min(low, 0), max(high, 0)
    return min(low // least, low // most), max(high // least, high // most)


def is_exact(op: Op) -> bool:
    """Prove that a sum or product never wraps, or that a quotient never rounds a negative number towards zero."""
    if op.kind in ("floordiv", "mod"):
        return interval(op.operands[0])[0] >= 0 and interval(op.operands[1])[0] > 0
    found = _unwrapped_interval(op, NO_LOOPS, MAX_DEPTH)
    return found is not None and _fits(found, _limits(op.result.dtype))


def shifts_in_range(op: Op) -> bool:
    """Prove that the count of a shift is not negative and below the number of bits."""
    low, high = interval(op.operands[1])
    return low >= 0 and high < op.result.dtype.bits


def chosen(op: Op) -> Value | None:
    """Return the operand that an integer minimum or maximum always equals, if one always does."""
    if op.kind not in ("min", "max") or not op.result.dtype.is_int:
        return None
    a, b = op.operands
    if a is b:
        return a
    (low, high), (other_low, other_high) = interval(a), interval(b)
    lesser = a if high <= other_low else b if other_high <= low else None
    if lesser is None or a.shape != b.shape:
        return None
    return lesser if op.kind == "min" else b if lesser is a else a
