"""Loads that place other loads, as the table of pages places the keys."""

from __future__ import annotations

from ....ir import Op, Value

LOADS = ("load", "gather")


def load_levels(loop: Op) -> int:
    """Return how many loads of an iteration follow one another until the operand of a dot is there; at least 1."""
    (body,) = loop.blocks
    levels: dict[Value, int] = {}
    for op in body.ops:
        level = max((levels.get(v, 0) for v in op.operands), default=0) + (op.kind in LOADS)
        levels.update(dict.fromkeys(op.results, level))
        if op.kind == "dot":  # what is computed from it waits for more than loads
            levels[op.result] = 0
    operands = (levels.get(v, 0) for op in body.ops if op.kind == "dot" for v in op.operands)
    return max(operands, default=1) or 1
