"""Loops that look at each block before they do something with it.

Such a loop's whole turn is a chain of branches on scalars,

    if c1: state = f(state)
    elif c2: state = g(state)

and nothing where no condition holds. Its *arms* are loops with one of the bodies each. Programs that share what they
fetch then need only the blocks for which some program takes an arm, and a run of turns through one arm is a plain loop,
which can be cut into parts (turns.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir import Block, Kernel, Op, Value, needed

SCALARS = ("for", "if", "reduce", "dot", "store", "gather", "program_id")


@dataclass
class Arms:
    loop: Op
    conditions: list[Value]  # of each arm: the first that holds counts
    scalars: list[Op]  # what the conditions need of a turn, in order
    bodies: list[Op]  # the loop as it would be with one arm


def arms_of(kernel: Kernel, loop: Op) -> Arms | None:
    """The arms of a loop; None where its turns are not such a chain."""
    (body,) = loop.blocks
    conditions, taken, before = [], [], []
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
        taken.append([*before, *branch.blocks[0].ops])
        block = branch.blocks[1]
    scalars = needed(before, conditions)
    plain = not any(op.kind in SCALARS or any(v.shape for v in op.results) for op in scalars)
    known = all(op.kind != "load" or op.attrs["tensor"].index not in kernel.written for op in scalars)
    if not conditions or not plain or not known:
        return None
    return Arms(loop, conditions, scalars, [_alone(loop, ops) for ops in taken])


def _alone(loop: Op, ops: list[Op]) -> Op:
    """A loop with these ops as its body. They still belong to the kernel's own loop: this one is only looked at."""
    (body,) = loop.blocks
    *inside, last = ops
    alone = Block()
    alone.params = body.params
    alone.ops = [*needed(inside, last.operands), last]
    found = Op("for", loop.operands, loop.attrs, blocks=(alone,), loc=loop.loc)
    found.results = loop.results
    return found
