"""Loops that decide by scalars what to do with each block, as with a block map (hidden, partial, full).

The whole body of such a loop is a chain of branches,

    if c1: state = f(state)
    elif c2: state = g(state)

and it does nothing where no condition holds. Each branch is a *block case*, and is treated as a loop with that body
alone. The producer then fetches only the blocks that some consumer has a case for, and a run of blocks with one case is
a plain loop, whose iterations can overlap (overlap.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir import Block, Kernel, Op, Value, needed

NOT_SCALAR = ("for", "if", "reduce", "dot", "store", "gather", "program_id")


@dataclass
class BlockCases:
    loop: Op
    conditions: list[Value]  # of each case; the first that holds counts
    scalars: list[Op]  # the ops of an iteration that the conditions need, in order
    bodies: list[Op]  # for each case the loop as it would be with this case alone


def find_cases(kernel: Kernel, loop: Op) -> BlockCases | None:
    """Return the cases of a loop; None where its body is not such a chain."""
    (body,) = loop.blocks
    conditions, case_ops, before = [], [], []
    block, carried = body, body.params[1:]
    while True:
        *ops, last = block.ops
        if not ops and tuple(last.operands) == carried:
            break
        if not ops or ops[-1].kind != "if" or tuple(last.operands) != ops[-1].results:
            return None
        branch = ops.pop()
        if any(op.blocks or op.kind == "store" for op in (*ops, *branch.blocks[0].ops)):
            return None
        before += ops
        conditions.append(branch.operands[0])
        case_ops.append([*before, *branch.blocks[0].ops])
        block = branch.blocks[1]
    scalars = needed(before, conditions)
    plain = not any(op.kind in NOT_SCALAR or any(v.shape for v in op.results) for op in scalars)
    read_only = all(op.kind != "load" or op.attrs["tensor"].index not in kernel.written for op in scalars)
    if not conditions or not plain or not read_only:
        return None
    return BlockCases(loop, conditions, scalars, [_with_body(loop, ops) for ops in case_ops])


def _with_body(loop: Op, ops: list[Op]) -> Op:
    """Make a loop with these ops as its body. The ops still belong to the kernel's own loop: this one is only read."""
    (body,) = loop.blocks
    *inside, last = ops
    block = Block()
    block.params = body.params
    block.ops = [*needed(inside, last.operands), last]
    found = Op("for", loop.operands, loop.attrs, blocks=(block,), loc=loop.loc)
    found.results = loop.results
    return found
