"""Detaching: a fold of something cheap gets a copy of its own to fold.

`visible.max(axis=0)` asks, for each key, whether any query sees it, while the same `visible` also masks the scores.
Computed once, the two would tie the loops over scores to the fold. Comparisons of positions and loads cost little, so
the fold gets its own copy of them, with axes of its own, and runs on its own.
"""

from __future__ import annotations

from ...ir import ELEMENTWISE, MEMORY, Block, Kernel, Op, Value, clone, uses, walk

CHEAP = ELEMENTWISE | {"load", "gather", "arange", "expand", "trans", "broadcast"}


def detach(kernel: Kernel) -> None:
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
    """The tile ops a value is made of, in order, if all are cheap and stand in the same block; else nothing. What is
    loaded
    from a tensor the kernel writes cannot be loaded again later."""
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
