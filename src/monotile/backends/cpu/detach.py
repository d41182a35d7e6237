"""Detach: give a fold of cheap ops a separate copy of them.

`visible.max(axis=0)` asks, for each key, whether any query sees it, while the same `visible` also masks the scores.
Computed once, it would fuse the fold into the nest of the scores. Comparisons of positions and loads cost little, so
the fold gets a copy of them, which has separate axes and a nest of its own.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, MEMORY, Block, Kernel, Op, Value, clone, uses, walk

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
