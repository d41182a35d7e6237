"""Loop-invariant code motion."""

from __future__ import annotations

from ..ir import PURE, Block, Kernel, Op, Value, walk


def motion(kernel: Kernel) -> None:
    """Hoist pure ops whose operands a loop does not change."""
    _block(kernel.body, kernel.written)


def _block(block: Block, written: frozenset[int]) -> None:
    ops: list[Op] = []
    for op in block.ops:
        for inner in op.blocks:
            _block(inner, written)
        if op.kind == "for":
            ops.extend(_hoist(op, written))
        ops.append(op)
    block.ops = ops


def _hoist(loop: Op, written: frozenset[int]) -> list[Op]:
    """Remove and return the ops of the body that depend on nothing defined in it. Loads may move too, since a load
    cannot fault wherever it points, unless the kernel writes their tensor."""
    (body,) = loop.blocks
    inside: set[Value] = set(body.params)
    for op in walk(body):
        inside.update(op.results)
        for block in op.blocks:
            inside.update(block.params)
    moved, kept = [], []
    for op in body.ops:
        fixed = op.kind in PURE and not any(v in inside for v in op.operands)
        if fixed and not (op.kind in ("load", "gather") and op.attrs["tensor"].index in written):
            moved.append(op)
            inside.difference_update(op.results)
        else:
            kept.append(op)
    body.ops = kept
    return moved
