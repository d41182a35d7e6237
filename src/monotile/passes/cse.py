"""Common subexpressions and dead code."""

from __future__ import annotations

from typing import Any

from ..ir import PURE, Block, Kernel, Op, Value, replace, walk


def cse(kernel: Kernel) -> None:
    """Equal pure ops become one; an op sees the ones before it in its own block and in the blocks around it."""
    written = kernel.written
    renamed: dict[Value, Value] = {}

    def visit(block: Block, outer: dict[Any, Op]) -> None:
        seen = dict(outer)
        kept = []
        for op in block.ops:
            op.operands = tuple(renamed.get(v, v) for v in op.operands)
            for inner in op.blocks:
                visit(inner, seen)
            if op.kind in PURE and not _reads(op, written):
                key = (
                    op.kind,
                    op.operands,
                    tuple(sorted(op.attrs.items(), key=lambda kv: kv[0])),
                    op.result.type,
                    _sign(op),
                )
                first = seen.setdefault(key, op)
                if first is not op:
                    renamed[op.result] = first.result
                    continue
            kept.append(op)
        block.ops = kept

    visit(kernel.body, {})
    replace(kernel.body, renamed)


def _reads(op: Op, written: frozenset[int]) -> bool:
    """Whether the op reads a tensor the kernel also writes: then when it reads matters."""
    return op.kind in ("load", "gather") and op.attrs["tensor"].index in written


def _sign(op: Op) -> str:
    """Tells 0.0 from -0.0, which Python calls equal, and True from 1."""
    return repr(op.attrs["value"]) if op.kind == "const" else ""


def dce(kernel: Kernel) -> None:
    """Removes ops without effect whose results nothing reads, and loops and branches that do nothing else."""
    changed = True
    while changed:
        read = {v for op in walk(kernel.body) for v in op.operands}
        changed = _sweep(kernel.body, read)


def _sweep(block: Block, read: set[Value]) -> bool:
    changed = False
    kept = []
    for op in block.ops:
        for inner in op.blocks:
            changed |= _sweep(inner, read)
        unread = not any(r in read for r in op.results)
        if unread and (op.kind in PURE or (op.kind in ("for", "if") and not _stores(op))):
            changed = True
        else:
            kept.append(op)
    block.ops = kept
    return changed


def _stores(op: Op) -> bool:
    return any(inner.kind == "store" for block in op.blocks for inner in walk(block))
