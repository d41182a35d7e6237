"""Where a barrier is needed. Threads of a program share the elements of a tile as Triton sees fit, so an element that
one
thread writes may be read, or written again, by another: between two such accesses of one tensor all threads must
meet."""

from __future__ import annotations

from ....ir import Block, Kernel, Op, Value, walk
from ....ir.affine import linear

Accesses = set[tuple[Op, bool]]  # an op, and whether it is from an earlier turn of the loop around it


def barriers(kernel: Kernel) -> set[Op]:
    """The loads and stores before which all threads must meet."""
    finder = _Finder(kernel)
    finder.block(kernel.body, set())
    return finder.found


class _Finder:
    def __init__(self, kernel: Kernel) -> None:
        self.written, self.found = kernel.written, set[Op]()
        self.loops: list[Op] = []

    def block(self, block: Block, before: Accesses) -> Accesses:
        """The accesses since the last barrier, after this block."""
        since = set(before)
        for op in block.ops:
            if op.kind in ("load", "store", "gather") and op.attrs["tensor"].index in self.written:
                if op in self.found or any(self.conflict(old, op, turned=turned) for old, turned in since):
                    self.found.add(op)
                    since = set()
                since = (since - {(op, True)}) | {(op, False)}
            elif op.kind == "if":
                since = self.block(op.blocks[0], since) | self.block(op.blocks[1], since)
            elif op.kind == "for":
                self.loops.append(op)
                once = self.block(op.blocks[0], since)
                again = self.block(op.blocks[0], {(old, True) for old, _ in once} | since)
                self.loops.pop()
                since |= {(old, False) for old, _ in again}
        return since

    def conflict(self, old: Op, new: Op, *, turned: bool) -> bool:
        if old.attrs["tensor"].index != new.attrs["tensor"].index or "store" not in (old.kind, new.kind):
            return False
        return not (turned and old is new and len(self.loops) == 1 and _moves_on(new, self.loops[0]))


def _moves_on(store: Op, loop: Op) -> bool:
    """Whether a store in a loop writes other elements in every turn."""
    (body,) = loop.blocks
    inside: set[Value] = {v for op in walk(body) for v in op.results} | set(body.params)
    for start, extent in zip(store.operands[1:], store.attrs["extents"], strict=True):
        form = linear(start)
        if form is None:
            continue
        terms = dict(form.terms)
        factor = terms.pop(body.params[0], 0)
        if abs(factor) * loop.attrs["step"] >= (extent or 1) and not inside.intersection(terms):
            return True
    return False
