"""Op patterns that several backends match."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from .ops import Op, Value


class Accumulation(NamedTuple):
    """`addend + dot(a, b)`: the dot can start its accumulator from the addend."""

    dot: Op
    addend: Value


def accumulation(add: Op, block: Container[Op], uses: Mapping[Value, list[Op]]) -> Accumulation | None:
    """Match an add whose dot is in the same block and has no other reader."""
    if add.kind != "add":
        return None
    for product, addend in (add.operands, add.operands[::-1]):
        dot = product.op
        if dot is None or dot.kind != "dot" or dot not in block or product.shape != add.result.shape:
            continue
        if uses[product] == [add]:
            return Accumulation(dot, addend)
    return None


def untransposed(value: Value) -> tuple[Value, bool]:
    """Strip transposes from a value; return the operand and True if an odd number was stripped."""
    transposed = False
    while value.op is not None and value.op.kind == "trans":
        value, transposed = value.op.operands[0], not transposed
    return value, transposed
