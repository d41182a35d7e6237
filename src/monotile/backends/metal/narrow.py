"""Narrowing: what a mask hides from every row is not loaded.

`where(seen, dot(Q, K.T) * scale, -inf)`: a key that no row of the block sees has a column of products that nothing
reads. Where `quantify` can say which keys these are, their part of the right operand becomes zero, and is not read
from memory.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, Kernel, Op, Value, uses
from ...ir.builder import Builder
from .quantify import blocks, bounds_on, build


def narrow(kernel: Kernel) -> None:
    used = uses(kernel.body)
    for block in blocks(kernel.body):
        for op in [o for o in block.ops if o.kind == "where"]:
            dot = _product(op.operands[1], used)
            bounds = bounds_on(op.operands[0], 0) if dot is not None and dot in block.ops else None
            if dot is None or bounds is None or not _is_load(dot.operands[1]):
                continue
            at = block.ops.index(dot)
            later = {result for after in block.ops[at:] for result in after.results}
            needed = {v for form in (*bounds.lower, *bounds.upper, *bounds.forms) for v in form.terms}
            if later & {*needed, *bounds.others}:
                continue
            rest, block.ops = block.ops[at:], block.ops[:at]
            b = Builder(block)
            b.loc = dot.loc
            seen = build(b, bounds, op.operands[0].shape, 0)
            right = dot.operands[1]
            zero = b.const(0.0, right.dtype)
            if right.kind == "trans" and right.op is not None:
                kept = b.where(b.expand(seen, 1), right.op.operands[0], zero)
                kept = b.trans(kept)
            else:
                kept = b.where(b.expand(seen, 0), right, zero)
            dot.operands = (dot.operands[0], kept)
            block.ops += rest


def _product(value: Value, used: dict[Value, list[Op]]) -> Op | None:
    """The product that a value is made of element by element, if nothing else reads what lies between."""
    while value.op is not None and len(used[value]) == 1:
        if value.kind == "dot":
            return value.op
        tiles = [v for v in value.op.operands if v.shape == value.shape]
        if value.kind not in ELEMENTWISE or len(tiles) != 1:
            return None
        value = tiles[0]
    return None


def _is_load(value: Value) -> bool:
    inner = value.op.operands[0] if value.kind == "trans" and value.op is not None else value
    return inner.kind == "load"
