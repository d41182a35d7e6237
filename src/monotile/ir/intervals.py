"""Between which numbers an integer lies: what lets plain arithmetic stand for that which wraps, rounds or clamps."""

from __future__ import annotations

from ..dtypes import DType
from .ops import Op, Value

MOST_LENGTH = 2**31 - 2**16  # of a tensor's side
Interval = tuple[int, int]


def interval(value: Value, depth: int = 16) -> Interval:
    """The least and greatest an integer can be."""
    op, limits = value.op, _limits(value.dtype)
    if op is None or depth == 0 or not value.dtype.is_int:
        return limits
    if op.kind == "const":
        return int(op.attrs["value"]), int(op.attrs["value"])
    if op.kind == "arange":
        return 0, value.shape[0] - 1
    if op.kind == "dim":
        return 0, MOST_LENGTH
    if op.kind == "program_id":
        return 0, limits[1]
    found = _exactly(op, depth)
    return found if found is not None and limits[0] <= found[0] and found[1] <= limits[1] else limits


def _limits(dtype: DType) -> Interval:
    return dtype.limits if dtype.is_int else (0, 0)


def _exactly(op: Op, depth: int) -> Interval | None:
    """What an op gives if nothing wraps."""
    kind = op.kind
    if kind == "where":
        (_, a, b) = op.operands
        (low, high), (least, most) = interval(a, depth - 1), interval(b, depth - 1)
        return min(low, least), max(high, most)
    if not op.operands or not all(v.dtype.is_int for v in op.operands):
        return None
    (low, high), *others = (interval(v, depth - 1) for v in op.operands)
    if kind in ("cast", "expand", "trans", "broadcast"):
        return low, high
    if len(others) != 1:
        return None
    least, most = others[0]
    if kind in ("add", "sub"):
        return (low + least, high + most) if kind == "add" else (low - most, high - least)
    if kind == "mul":
        products = [a * b for a in (low, high) for b in (least, most)]
        return min(products), max(products)
    if kind in ("min", "max"):
        choose = min if kind == "min" else max
        return choose(low, least), choose(high, most)
    if kind in ("floordiv", "mod") and least > 0:
        return (
            (min(low // least, low // most), max(high // least, high // most)) if kind == "floordiv" else (0, most - 1)
        )
    return None


def is_exact(op: Op) -> bool:
    """Whether sums and products never wrap, and quotients never round towards zero from below."""
    limits = _limits(op.result.dtype)
    if op.kind in ("floordiv", "mod"):
        return interval(op.operands[0])[0] >= 0 and interval(op.operands[1])[0] > 0
    found = _exactly(op, 16)
    return found is not None and limits[0] <= found[0] and found[1] <= limits[1]


def chosen(op: Op) -> Value | None:
    """The operand that a minimum or maximum always is."""
    if op.kind not in ("min", "max") or not op.result.dtype.is_int:
        return None
    a, b = op.operands
    if a is b:
        return a
    (low, high), (least, most) = interval(a), interval(b)
    lesser = a if high <= least else b if most <= low else None
    if lesser is None or a.shape != b.shape:
        return None
    return lesser if op.kind == "min" else b if lesser is a else a
