"""What a mask hides, as Gluon text: `where(seen, scores, -inf)`.

Written like any other op, all truth values of a tile are computed before the first is used, and there are few registers
for them: they are packed into bits and unpacked again, at several instructions each. Where a truth value serves for
nothing else it is therefore made where it is used: `hide_bytes` compares the bytes of a bool tile, `hide_numbers` those
of an additive mask with -inf."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....dtypes import bool_, float32
from ....ir import Op, Value, constant

Uses = Mapping[Value, list[Op]]


def hides(op: Op) -> bool:
    """Whether an op is such a choice, for a whole tile."""
    if op.kind != "where" or constant(op.operands[2]) != -math.inf:
        return False
    seen, scores, _ = op.operands
    return scores.dtype is float32 and len(scores.shape) == 2 and seen.shape == scores.shape


def mask_of(seen: Value) -> Value | None:
    """The numbers that a truth value compares with -inf."""
    if seen.op is None or seen.op.kind != "ne":
        return None
    for mask, other in (seen.op.operands, seen.op.operands[::-1]):
        if constant(other) == -math.inf and mask.dtype is float32 and mask.shape == seen.shape:
            return mask
    return None


def only_hides(seen: Value, uses: Uses) -> bool:
    """Whether a truth value serves for nothing else."""
    readers = uses.get(seen, [])
    return seen.dtype is bool_ and bool(readers) and all(hides(op) and op.operands[0] is seen for op in readers)
