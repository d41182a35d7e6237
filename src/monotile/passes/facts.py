"""Small facts about scalars that the passes rely on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..affine import Linear, linear
from ..ir import Block, Kernel, Value, constant, walk


def loop_starts(kernel: Kernel) -> dict[Block, Value]:
    """The first value of each loop's counter, by the loop's body."""
    return {op.blocks[0]: op.operands[0] for op in walk(kernel.body) if op.kind == "for"}


def nonnegative(form: Linear | None, starts: Mapping[Block, Value]) -> bool:
    """Whether a sum of integer scalars, taken without wrapping, is known to be 0 or more."""
    if form is None or form.iotas:
        return False
    return form.const >= 0 and all(factor > 0 and _atom(v, starts) for v, factor in form.terms.items())


def _atom(value: Value, starts: Mapping[Block, Value]) -> bool:
    owner = value.owner
    if isinstance(owner, Block):  # a loop's counter only grows
        return value is owner.params[0] and owner in starts and nonnegative(linear(starts[owner]), starts)
    if owner.kind in ("dim", "program_id"):
        return True
    forms = [linear(v) for v in owner.operands]
    parts = [nonnegative(form, starts) and not _may_wrap(form) for form in forms]
    if owner.kind == "max":
        return any(parts)
    return owner.kind in ("floordiv", "mod", "min") and all(parts)


def _may_wrap(form: Linear | None) -> bool:
    """Whether a sum may be beyond int32: lengths leave a margin of 2^16, and not more."""
    if form is None or len(form.terms) > 1 or any(factor != 1 for factor in form.terms.values()):
        return True
    return form.const >= 2**16 and bool(form.terms)


def least(value: Value) -> float:
    """A number that a float scalar is known not to be below; NaN aside."""
    known = constant(value)
    if known is not None:
        return float(known)
    op = value.op
    if op is None:
        return -math.inf
    bounds = [least(v) for v in op.operands] if op.kind in ("max", "mul") else []
    if op.kind == "max":
        return max(bounds)
    if op.kind == "mul" and all(b >= 0.0 for b in bounds):
        return bounds[0] * bounds[1] if bounds[0] * bounds[1] >= 2.0**-126 else 0.0
    return 0.0 if op.kind == "abs" else -math.inf
