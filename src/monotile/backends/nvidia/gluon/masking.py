"""Masking of scores, `where(seen, scores, -inf)`, as Gluon text.

Written like any other op, all bools of a tile are computed before the first is used, and there are few registers for
them: they are packed into bits and unpacked again, at several instructions each. A bool that is used for nothing else
is therefore computed where it is used: `mask_by_bytes` compares the bytes of a bool tile, `mask_by_numbers` those of an
additive mask with -inf."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ....dtypes import bool_, float32
from ....ir import Op, Value, constant

Uses = Mapping[Value, list[Op]]


def masks_scores(op: Op) -> bool:
    """Return True if an op is such a selection, for a whole tile."""
    if op.kind != "where" or constant(op.operands[2]) != -math.inf:
        return False
    seen, scores, _ = op.operands
    return scores.dtype is float32 and len(scores.shape) == 2 and seen.shape == scores.shape


def additive_mask(seen: Value) -> Value | None:
    """Return the tile that a bool compares with -inf."""
    if seen.op is None or seen.op.kind != "ne":
        return None
    for mask, other in (seen.op.operands, seen.op.operands[::-1]):
        if constant(other) == -math.inf and mask.dtype is float32 and mask.shape == seen.shape:
            return mask
    return None


def only_masks(seen: Value, uses: Uses) -> bool:
    """Return True if a bool tile is used for nothing but masking scores."""
    readers = uses.get(seen, [])
    return seen.dtype is bool_ and bool(readers) and all(masks_scores(op) and op.operands[0] is seen for op in readers)
