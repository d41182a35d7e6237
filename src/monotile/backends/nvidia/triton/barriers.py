"""Where a barrier is needed. Triton distributes a tile's elements over the threads of a program as it sees fit, so an
element that one thread writes may be read, or written again, by another: a barrier must separate two such accesses of
one tensor."""

from __future__ import annotations

from ....ir import MEMORY, WRITES, Block, Kernel, Op, Value, starts, walk
from ....ir.affine import linear

Accesses = set[tuple[Op, bool]]  # an op, and True if it ran in an earlier iteration of the loop around it


def barriers(kernel: Kernel) -> set[Op]:
    """Return the loads and stores that need a barrier in front of them."""
    finder = _Finder(kernel)
    finder.block(kernel.body, set())
    return finder.found


class _Finder:
    def __init__(self, kernel: Kernel) -> None:
        self.written, self.found = kernel.written, set[Op]()
        self.loops: list[Op] = []

    def block(self, block: Block, before: Accesses) -> Accesses:
        """Return the accesses since the last barrier, after this block."""
        since = set(before)
        for op in block.ops:
            if op.kind in MEMORY and op.attrs["tensor"].index in self.written:
                if op in self.found or any(self.conflict(old, op, earlier=earlier) for old, earlier in since):
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

    def conflict(self, old: Op, new: Op, *, earlier: bool) -> bool:
        if old.attrs["tensor"].index != new.attrs["tensor"].index or not WRITES & {old.kind, new.kind}:
            return False
        return not (
            earlier and old is new and new.kind != "scatter" and len(self.loops) == 1 and _moves_on(new, self.loops[0])
        )


def _moves_on(store: Op, loop: Op) -> bool:
    """Return True if a store in a loop writes other elements in every iteration."""
    (body,) = loop.blocks
    inside: set[Value] = {v for op in walk(body) for v in op.results} | set(body.params)
    if inside.intersection(store.operands[1 + store.attrs["tensor"].rank :]):  # its view moves
        return False
    for start, extent in zip(starts(store), store.attrs["extents"], strict=True):
        form = linear(start)
        if form is None:
            continue
        terms = dict(form.terms)
        factor = terms.pop(body.params[0], 0)
        if abs(factor) * loop.attrs["step"] >= (extent or 1) and not inside.intersection(terms):
            return True
    return False
