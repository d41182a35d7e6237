"""Integer tiles that are computed from positions and constants alone: what they hold is known at compile time."""

from __future__ import annotations

import operator
from collections.abc import Callable

from .ops import Value, constant

OPS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor,
}  # fmt: skip


def known_row(value: Value) -> list[int] | None:
    """Return the numbers of an integer tile with one side, if they depend on positions and constants alone."""
    if not value.dtype.is_int:
        return None
    number = constant(value)
    extents = [n for n in value.shape if n > 1]
    if number is not None:
        return [int(number)] * (extents[0] if extents else 1)
    op = value.op
    if op is None or len(extents) > 1:
        return None
    if op.kind == "arange":
        return list(range(value.shape[0]))
    if op.kind in ("expand", "broadcast", "cast"):
        row = known_row(op.operands[0])
        wide = extents[0] if extents else 1
        row = row * wide if row is not None and len(row) == 1 else row
    elif op.kind in OPS:
        a, b = (known_row(v) for v in op.operands)
        if a is None or b is None or (op.kind in ("floordiv", "mod") and 0 in b):
            return None
        wide = max(len(a), len(b))
        pairs = zip(a * (wide // len(a)), b * (wide // len(b)), strict=True)
        row = [OPS[op.kind](x, y) for x, y in pairs]
    else:
        return None
    low, high = value.dtype.limits
    return row if row is not None and low <= min(row) and max(row) <= high else None


def period(value: Value, lanes: int) -> tuple[int, ...] | None:
    """Return the numbers that every run of `lanes` positions of a tile holds, if they are known and all alike."""
    row = known_row(value)
    if row is None or len(row) % lanes:
        return None
    first = row[:lanes]
    return tuple(first) if all(row[n : n + lanes] == first for n in range(0, len(row), lanes)) else None
