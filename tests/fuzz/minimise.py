"""Make a failing kernel smaller while it fails: drop stores, loops, branches and operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from monotile import ir
from monotile.errors import MonotileError
from monotile.ir import WRITES, Block, Kernel, Op, Value, verify
from monotile.ir.builder import Builder
from monotile.passes.cse import dce

from .arguments import Program


def minimise(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a program that still fails and of which no single part can be taken out."""
    smaller: Program | None = program
    while smaller is not None:
        program = smaller
        smaller = next((p for p in _smaller(program) if fails(p)), None)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield the program without one of its parts, larger parts first."""
    for change in (_without_store, _without_blocks, _with_constant):
        for n in range(len(list(ir.walk(program.kernel.body)))):
            kernel = ir.copy(program.kernel)
            try:
                if not change(kernel, n):
                    continue
                dce(kernel)
                verify.check(kernel, "minimise")
            except MonotileError:
                continue
            if _size(kernel) < _size(program.kernel):
                yield replace(program, kernel=kernel)


def _size(kernel: Kernel) -> int:
    return sum(1 + (op.kind not in ("const", "broadcast")) for op in ir.walk(kernel.body))


def _at(kernel: Kernel, n: int) -> tuple[Block, Op]:
    blocks = [kernel.body, *(block for op in ir.walk(kernel.body) for block in op.blocks)]
    op = list(ir.walk(kernel.body))[n]
    return next(block for block in blocks if op in block.ops), op


def _without_store(kernel: Kernel, n: int) -> bool:
    block, op = _at(kernel, n)
    if op.kind in WRITES:
        block.ops.remove(op)
    return op.kind in WRITES


def _without_blocks(kernel: Kernel, n: int) -> bool:
    """Put the initial values of a loop in its place, or the first branch of an `if`."""
    block, op = _at(kernel, n)
    if op.kind == "for":
        block.ops.remove(op)
        ir.replace(kernel.body, dict(zip(op.results, op.operands[2:], strict=True)))
    elif op.kind == "if":
        at, (*inner, end) = block.ops.index(op), op.blocks[0].ops
        block.ops[at : at + 1] = inner
        ir.replace(kernel.body, dict(zip(op.results, end.operands, strict=True)))
    return op.kind in ("for", "if")


def _with_constant(kernel: Kernel, n: int) -> bool:
    """Put a constant in the place of a value."""
    block, op = _at(kernel, n)
    if len(op.results) != 1 or op.blocks or op.kind in ("const", "program_id", "dim", "param"):
        return False
    value = op.result
    if op.kind == "broadcast" and ir.constant(value) is not None:
        return False
    scratch = Block()
    builder = Builder(scratch)
    number: Value = builder.const({"float": 1.0, "int": 1, "bool": True}[value.dtype.kind], value.dtype)
    number = builder.broadcast(number, value.shape) if value.shape else number
    at = block.ops.index(op)
    block.ops[at : at + 1] = scratch.ops
    ir.replace(kernel.body, {value: number})
    return True
