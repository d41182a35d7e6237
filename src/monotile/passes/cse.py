"""Common subexpression and dead code elimination."""

from __future__ import annotations

from typing import Any

from ..ir import PURE, WRITES, Block, Kernel, Op, Value, replace, walk


def cse(kernel: Kernel) -> None:
    """Merge equal pure ops; an op may be replaced by an earlier one of its own block or of an enclosing block."""
    written = kernel.written
    renamed: dict[Value, Value] = {}

    def visit(block: Block, outer: dict[Any, Op]) -> None:
        seen = dict(outer)
        kept = []
        for op in block.ops:
            op.operands = tuple(renamed.get(v, v) for v in op.operands)
            for inner in op.blocks:
                visit(inner, seen)
            if op.kind in PURE and not _loads_written(op, written):
                key = (
                    op.kind,
                    op.operands,
                    tuple(sorted(op.attrs.items(), key=lambda kv: kv[0])),
                    op.result.type,
                    _const_repr(op),
                )
                first = seen.setdefault(key, op)
                if first is not op:
                    renamed[op.result] = first.result
                    continue
            kept.append(op)
        block.ops = kept

    visit(kernel.body, {})
    replace(kernel.body, renamed)


def _loads_written(op: Op, written: frozenset[int]) -> bool:
    """Return True for a load of a tensor that the kernel also writes: its order among the stores matters."""
    return op.kind in ("load", "gather") and op.attrs["tensor"].index in written


def _const_repr(op: Op) -> str:
    """Distinguish 0.0 from -0.0, which Python calls equal, and True from 1."""
    return repr(op.attrs["value"]) if op.kind == "const" else ""


def dce(kernel: Kernel) -> None:
    """Remove pure ops whose results nothing reads, and loops and branches that only contain such ops."""
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
    return any(inner.kind in WRITES for block in op.blocks for inner in walk(block))
