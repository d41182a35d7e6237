"""Scalars of a kernel: what they need, for which programs they are the same, and which tiles they place past the end of
a view."""

from __future__ import annotations

from math import gcd

from ....ir import Block, Kernel, Op, Value, constant, view_of

NOT_ARITHMETIC = ("gather", "for", "if", "reduce", "dot", "store")


def scalar_slice(kernel: Kernel, values: tuple[Value, ...]) -> list[Op] | None:
    """Return the ops that scalars need, in no order; None when they need more than arithmetic, and elements of tensors
    that the kernel only reads. A block's parameter needs none."""
    found: dict[int, Op] = {}
    stack = list(values)
    while stack:
        op = stack.pop().op
        if op is None or id(op) in found:
            continue
        if op.kind in NOT_ARITHMETIC or any(v.shape for v in op.results):
            return None
        if op.kind == "load" and op.attrs["tensor"].index in kernel.written:
            return None
        found[id(op)] = op
        stack += op.operands
    return list(found.values())


def depends(value: Value, on: Value, program_id: Op) -> bool:
    """Return True if a scalar may be computed from another; one that comes from memory or a loop may."""
    if value is on:
        return True
    op = value.op
    if op is None:
        return not isinstance(value.owner, Block) or value is not value.owner.params[0]
    if op is program_id:
        return False
    return op.kind in ("load", *NOT_ARITHMETIC) or any(depends(v, on, program_id) for v in op.operands)


def sharing(value: Value, program_id: Op) -> int:
    """Return for how many neighbouring programs, from a multiple of it on, a scalar is the same; 0 for all."""
    last, op = program_id.results[-1], value.op
    if op is None:  # the counter of a loop is that of a block; other parameters may be anything
        return 0 if isinstance(value.owner, Block) and value is value.owner.params[0] else 1
    if op is program_id:
        return 1 if value is last else 0
    if op.kind == "floordiv" and op.operands[0] is last and (constant(op.operands[1]) or 0) > 0:
        return int(constant(op.operands[1]) or 0)
    return gcd(*(sharing(v, program_id) for v in op.operands))


def past_view(load: Op) -> tuple[Value, Value, int] | None:
    """Return the start, the length of the view and the rows of a tile which may have some outside the view; None for
    other tiles."""
    axes = [axis for axis in load.attrs.get("view", ()) if load.attrs["checked"][axis]]
    if not axes:
        return None
    (axis,) = axes
    span = view_of(load, axis)
    assert span is not None
    return load.operands[axis], span[1], load.attrs["extents"][axis]


def is_multiple(value: Value, step: int) -> bool:
    """Return True if a position is a multiple of the step. The end of int32 counts as one: a loop that begins there has
    no iteration."""
    known = constant(value)
    if known is not None:
        return known % step == 0 or known == 2**31 - 1
    op = value.op
    if op is None:
        return False
    if op.kind == "mul":
        return any(is_multiple(v, step) for v in op.operands)
    if op.kind in ("add", "sub", "max", "min"):
        return all(is_multiple(v, step) for v in op.operands)
    return op.kind == "cast" and op.operands[0].dtype.is_int and is_multiple(op.operands[0], step)
