"""Sinking: the maximum of scaled numbers is the maximum, scaled.

`max(x * c)` over a tile becomes `max(x) * c` where c is one number known to be positive: one product for each fold
instead of one for each element. Rounding keeps order, so the result is the same to the bit. A mask in between
(`where(seen, x * c, -inf)`) comes first: it becomes `where(seen, x, -inf) * c`, which is the same too. The product
itself stays for others that read it.
"""

from __future__ import annotations

import math

from ..ir import Block, Kernel, Op, Type, Value, constant
from .facts import least


def sink(kernel: Kernel) -> None:
    _block(kernel.body)


def _block(block: Block) -> None:
    ops, block.ops = block.ops, []
    for op in ops:
        for inner in op.blocks:
            _block(inner)
        new = _folded(op) if op.kind == "reduce" else _masked(op) if op.kind == "where" else None
        if new is not None:  # what the op gave is now made by a product
            block.ops.append(new[0])
            op.kind, op.operands, op.attrs = "mul", (new[0].result, new[1]), {}
        block.ops.append(op)


def _folded(fold: Op) -> tuple[Op, Value] | None:
    """A fold of what was scaled, and the factor; None where the fold stays as it is."""
    scaled = _scaled(fold.operands[0]) if fold.attrs["fold"] == "max" else None
    return (_op(fold, (scaled[0],)), scaled[1]) if scaled is not None else None


def _masked(where: Op) -> tuple[Op, Value] | None:
    seen, value, other = where.operands
    scaled = _scaled(value) if constant(other) == -math.inf else None
    return (_op(where, (seen, scaled[0], other)), scaled[1]) if scaled is not None else None


def _scaled(value: Value) -> tuple[Value, Value] | None:
    """The tile and the positive factor that a value is the product of."""
    product = value.op
    if product is None or product.kind != "mul" or not value.dtype.is_float:
        return None
    for tile, factor in (product.operands, product.operands[::-1]):
        if tile.shape == value.shape and not factor.shape and least(factor) > 0.0:
            return tile, factor
    return None


def _op(like: Op, operands: tuple[Value, ...]) -> Op:
    return Op(like.kind, operands, like.attrs, (Type(like.result.dtype, like.result.shape),), loc=like.loc)
