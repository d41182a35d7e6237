"""Hidden loads: columns that a mask hides from every row are not loaded.

In `where(seen, dot(Q, K.T) * scale, -inf)`, a key that no row of the block sees gives a column of products that nothing
reads. If `seen` is a conjunction of position tests, that column of the right operand becomes zero and is not loaded.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, Block, Kernel, Op, Value, uses
from ...ir.builder import Builder
from ...ir.matchers import untransposed
from .bool_reductions import PositionBounds, all_blocks, any_within, bounds_on


def skip_hidden_loads(kernel: Kernel) -> None:
    users = uses(kernel.body)
    for block in all_blocks(kernel.body):
        for op in [o for o in block.ops if o.kind == "where"]:
            dot = _dot_of(op.operands[1], users)
            bounds = bounds_on(op.operands[0], 0) if dot is not None and dot in block.ops else None
            if dot is not None and bounds is not None and untransposed(dot.operands[1])[0].kind == "load":
                _mask_right_operand(block, dot, op.operands[0], bounds)


def _mask_right_operand(block: Block, dot: Op, seen: Value, bounds: PositionBounds) -> None:
    """Replace the columns of a dot's right operand that no row sees by zero, if the bounds are known before the dot."""
    at = block.ops.index(dot)
    later = {result for after in block.ops[at:] for result in after.results}
    needed = {v for form in (*bounds.lower, *bounds.upper, *bounds.forms) for v in form.terms}
    if later & {*needed, *bounds.others}:
        return
    rest, block.ops = block.ops[at:], block.ops[:at]
    b = Builder(block)
    b.loc = dot.loc
    seen_by_any = any_within(b, bounds, seen.shape, 0)
    right, transposed = untransposed(dot.operands[1])
    zero = b.const(0.0, right.dtype)
    kept = b.where(b.expand(seen_by_any, 1 if transposed else 0), right, zero)
    dot.operands = (dot.operands[0], b.trans(kept) if transposed else kept)
    block.ops += rest


def _dot_of(value: Value, users: dict[Value, list[Op]]) -> Op | None:
    """Return the dot from which a value is computed element by element, if nothing else reads the values between."""
    while value.op is not None and len(users[value]) == 1:
        if value.kind == "dot":
            return value.op
        tiles = [v for v in value.op.operands if v.shape == value.shape]
        if value.kind not in ELEMENTWISE or len(tiles) != 1:
            return None
        value = tiles[0]
    return None
