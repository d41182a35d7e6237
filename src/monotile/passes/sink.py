"""Sinking: the maximum of scaled numbers is the maximum, scaled.

`max(x * c)` over a tile becomes `max(x) * c` where c is one number known to be positive: one product for each fold
instead of one for each element. Rounding keeps order, so the result is the same to the bit. A mask in between
(`where(seen, x * c, -inf)`) sinks with it. The product itself stays for others that read it: what subtracts from it can
then be one fused operation with it.
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
        new = _sunk(op) if op.kind == "reduce" and op.attrs["fold"] == "max" else []
        block.ops += new[:-1]
        if new:  # the fold's own result is now made by the product
            op.kind, op.operands, op.attrs = new[-1].kind, new[-1].operands, {}
        block.ops.append(op)


def _sunk(fold: Op) -> list[Op]:
    """The ops that replace a fold, its own replacement last; none where it stays."""
    outer = fold.operands[0].op
    masked = outer is not None and outer.kind == "where" and constant(outer.operands[2]) == -math.inf
    product = outer.operands[1].op if masked and outer is not None else outer
    if outer is None or product is None or product.kind != "mul" or not product.result.dtype.is_float:
        return []
    for tile, factor in (product.operands, product.operands[::-1]):
        if tile.shape == product.result.shape and not factor.shape and least(factor) > 0.0:
            found, new = tile, []
            if masked:
                new.append(_op("where", (outer.operands[0], tile, outer.operands[2]), outer.result.type, outer))
                found = new[-1].result
            new.append(_op("reduce", (found,), fold.result.type, fold))
            return [*new, _op("mul", (new[-1].result, factor), fold.result.type, fold)]
    return []


def _op(kind: str, operands: tuple[Value, ...], type_: Type, like: Op) -> Op:
    attrs = like.attrs if kind == like.kind else {}
    return Op(kind, operands, attrs, (type_,), loc=like.loc)
