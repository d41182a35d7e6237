"""Detach: give a fold of cheap ops, or a dot that streams a tile, a separate copy of what it reads.

`visible.max(axis=0)` asks, for each key, whether any query sees it, while the same `visible` also masks the scores.
Computed once, it would fuse the fold into the nest of the scores. Comparisons of positions and loads cost little, so
the fold gets a copy of them, which has separate axes and a nest of its own.

Where values are the keys themselves, both dots read one tile, with lanes along different axes of it. A dot of few rows
streams its tile (streamed_dots.py) if nothing else reads it: each gets a load of its own.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, MEMORY, Block, Kernel, Op, Value, clone, uses, walk
from .target import STREAMED_ROWS

CHEAP = ELEMENTWISE | {"load", "gather", "arange", "expand", "trans", "broadcast"}


def detach(kernel: Kernel) -> None:
    """Copy the cheap operands of every fold that other ops read too."""
    used = uses(kernel.body)
    homes = {op: block for block in _blocks(kernel.body) for op in block.ops}
    for op in [o for o in walk(kernel.body) if o.kind == "reduce"]:
        chain = _chain(op.operands[0], homes.get(op), kernel.written)
        shared = any(user is not op and user not in chain for made in chain for user in used[made.result])
        if chain and shared:
            block = homes[op]
            mapping: dict[Value, Value] = {}
            copies = [clone(made, mapping) for made in chain]
            at = block.ops.index(op)
            block.ops[at:at] = copies
            op.operands = (mapping[op.operands[0]],)


def detach_streams(kernel: Kernel) -> None:
    """Copy the load of a dot with few rows if another such dot reads it before."""
    homes = {op: block for block in _blocks(kernel.body) for op in block.ops}
    taken: set[Op] = set()
    for dot in [o for o in walk(kernel.body) if o.kind == "dot" and o.operands[0].shape[0] <= STREAMED_ROWS]:
        chain = _chain(dot.operands[1], homes.get(dot), kernel.written)
        if taken.isdisjoint(chain):
            taken.update(op for op in chain if op.kind == "load" or (op.kind == "gather" and is_tile(op.result)))
            continue
        mapping: dict[Value, Value] = {}
        block = homes[dot]
        at = block.ops.index(dot)
        block.ops[at:at] = [clone(made, mapping) for made in chain]
        dot.operands = (dot.operands[0], mapping[dot.operands[1]], *dot.operands[2:])


def is_tile(value: Value) -> bool:
    """True for a value of two sides that are not 1."""
    return len(value.shape) == 2 and min(value.shape) > 1


def _chain(value: Value, home: Block | None, written: frozenset[int]) -> list[Op]:
    """Return the tile ops a value is computed from, in order, if all are cheap and in the same block; else nothing. A
    load from a tensor that the kernel writes cannot be repeated later."""
    found: dict[Op, None] = {}

    def visit(value: Value) -> bool:
        op = value.op
        if not value.shape:
            return True
        if op is None or op.kind not in CHEAP or (op.kind in MEMORY and op.attrs["tensor"].index in written):
            return False
        if op in found or home is None or op not in home.ops:
            return True  # made before the loop: it is read from there
        if not all(visit(v) for v in op.operands):
            return False
        found[op] = None
        return True

    return list(found) if visit(value) else []


def _blocks(block: Block) -> list[Block]:
    return [block, *(inner for op in block.ops for b in op.blocks for inner in _blocks(b))]
