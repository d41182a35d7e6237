"""Dots that are added to memory: `y[...] += dot(a, b)`."""

from __future__ import annotations

from ...ir import ELEMENTWISE, Block, Kernel, Op, Value, clone, uses
from ...ir.matchers import accumulation

Users = dict[Value, list[Op]]


def dots_added_to_memory(kernel: Kernel) -> list[Op]:
    users = uses(kernel.body)
    return [
        op
        for block in _blocks(kernel.body)
        for op in block.ops
        if op.kind == "dot" and _is_added_to_memory(op, block, users)
    ]


def _is_added_to_memory(dot: Op, block: Block, users: Users) -> bool:
    """True if a tile of a tensor is loaded, the dot is added to it, and the sum is stored to the same tensor."""
    for add in users.get(dot.result, []):
        found = accumulation(add, block.ops, users)
        load = found.addend.op if found is not None else None
        if load is None or load.kind != "load" or len(users[load.result]) > 1:
            return False
        if any(o.kind != "store" or o.attrs["tensor"] is not load.attrs["tensor"] for o in users.get(add.result, [])):
            return False
    return True


def unshare_loads(kernel: Kernel) -> None:
    """Give dots that are added to memory operands of their own, down to the loads: their lanes may run along another
    axis than those of the other dots that read the same tile."""
    homes = {op: block for block in _blocks(kernel.body) for op in block.ops}
    mapping: dict[Value, Value] = {}
    for dot in dots_added_to_memory(kernel):
        dot.operands = tuple(_unshared(v, homes, mapping) for v in dot.operands)


def _unshared(value: Value, homes: dict[Op, Block], mapping: dict[Value, Value]) -> Value:
    """Return a copy of a value that is loaded, or computed from loads element by element; else the value itself."""
    op = value.op
    if value in mapping or op is None or op.kind not in (*ELEMENTWISE, "load"):
        return mapping.get(value, value)
    operands = [_unshared(v, homes, mapping) if v.shape == value.shape else v for v in op.operands]
    if op.kind != "load" and all(a is b for a, b in zip(operands, op.operands, strict=True)):
        return value
    block, copy = homes[op], clone(op, {})
    copy.operands = tuple(operands)
    block.ops.insert(block.ops.index(op) + 1, copy)
    homes[copy] = block
    mapping[value] = copy.result
    return copy.result


def _blocks(block: Block) -> list[Block]:
    return [block, *(inner for op in block.ops for b in op.blocks for inner in _blocks(b))]
