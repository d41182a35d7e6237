"""Control flow: the program's index, loops with carried values, and branches."""

from __future__ import annotations

from collections.abc import Callable

from ...ir import Block, Op, Value
from .analysis import Analysis
from .dialect import bare
from .exchange import Exchange
from .expressions import ElementIndex, Expressions
from .registers import Registers
from .threadgroup import ThreadgroupMemory
from .values import Values
from .writer import Writer


class Control:
    """`write_block` writes the ops of a block."""

    def __init__(
        self,
        values: Values,
        registers: Registers,
        exchange: Exchange,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
        write_block: Callable[[Block], None],
    ) -> None:
        self.values, self.registers, self.exchange = values, registers, exchange
        self.writer, self.threadgroup, self.write_block = writer, threadgroup, write_block
        self.expressions: Expressions = values.expressions
        self.analysis: Analysis = values.analysis

    def program_id(self, op: Op) -> None:
        """Write the program's index along each axis; the last axis varies fastest."""
        writer = self.writer
        names = [writer.name(self.registers.hint(result)) for result in op.results]
        rest = "int(gid)"
        for n in reversed(range(len(names))):
            if n == 0:
                writer.line(f"const int {names[n]} = {rest};")
                break
            size = self.expressions.scalar(op.operands[n])
            writer.line(f"const int {names[n]} = {rest} % {size};")
            following = writer.name("rest")
            writer.line(f"const int {following} = {rest} / {size};")
            rest = following
        self.expressions.names.update(zip(op.results, names, strict=True))

    # ---- loops -------------------------------------------------------------------------------------------------------

    def loop(self, op: Op) -> None:
        expressions, writer, threadgroup = self.expressions, self.writer, self.threadgroup
        (block,) = op.blocks
        names = self._carried_registers(op, block)
        low, high = (bare(expressions.scalar(bound)) for bound in op.operands[:2])
        if threadgroup.accesses.writes:  # one barrier before the loop instead of one in every iteration
            threadgroup.barrier()
        writer.scopes.append(set())
        index = writer.name(self.registers.hint(block.params[0]))
        expressions.names[block.params[0]] = index
        expressions.names.update(zip(block.params[1:], names, strict=True))
        writer.last = None
        writer.open(f"for (int {index} = {low}; {index} < {high}; {index} += {op.attrs['step']})")
        for parameter, name, value in zip(block.params[1:], names, block.terminator.operands, strict=True):
            if self.analysis.defined_in(value, block):
                self.values.reuse.replaces.setdefault(value, []).append((parameter, name))
        self._write_body_twice(op, block, names)
        writer.scopes.pop()
        writer.last = None
        writer.close()
        expressions.names.update(zip(op.results, names, strict=True))

    def _carried_registers(self, op: Op, block: Block) -> list[str]:
        """Return the registers of the carried values, initialised."""
        names = []
        finals = block.terminator.operands
        for result, init, parameter, final in zip(op.results, op.operands[2:], block.params[1:], finals, strict=True):
            register = self.expressions.names.get(init)
            block_of = self.analysis.block_of
            after_loop = init.op is not None and init.op.kind == "for" and block_of[init.op] is block_of[op]
            alone = self.analysis.readers.get(init) == [op] and register not in names
            if register is not None and after_loop and alone:
                names.append(register)  # this loop continues with the registers of the loop before it
                continue
            names.append(self.registers.declare(result, parameter.hint or final.hint))
            self.values.copy(names[-1], init, result)
        return names

    def _write_body_twice(self, op: Op, block: Block, names: list[str]) -> None:
        """Write the body, then again as it is when it follows itself: the second time, the accesses since the last
        barrier of an iteration count for the next one."""
        threadgroup = self.threadgroup
        checkpoint, known = self.exchange.save(), dict(self.expressions.names)
        self._write_body(op, block, names)
        left_over = threadgroup.accesses
        self.exchange.restore(checkpoint)
        self.expressions.names = known
        entry = threadgroup.accesses + left_over
        threadgroup.accesses = entry.copy()
        self._write_body(op, block, names)
        threadgroup.accesses = threadgroup.accesses + entry

    def _write_body(self, op: Op, block: Block, names: list[str]) -> None:
        self.write_block(block)
        self._update(names, list(op.results), list(block.terminator.operands))

    def _update(self, names: list[str], results: list[Value], values: list[Value]) -> None:
        """Assign the values that a block yields. Copy a value aside first if it is computed from registers that are
        about to be overwritten, or is in them."""
        aside: dict[int, str] = {}
        for n, (name, result, value) in enumerate(zip(names, results, values, strict=True)):
            register = self.expressions.names.get(value)
            if register != name and (register is None or register in names):
                aside[n] = self.registers.declare(result)
                self.values.copy(aside[n], value, result)
        for n, (name, result, value) in enumerate(zip(names, results, values, strict=True)):
            if n in aside:
                self.registers.assign(result, name, self._register_of(result, aside[n]))
            elif self.expressions.names.get(value) != name:
                self.values.copy(name, value, result)

    def _register_of(self, value: Value, name: str) -> Callable[[ElementIndex], str]:
        return lambda index: self.expressions.register(value, name, *index.registers)

    # ---- branches ----------------------------------------------------------------------------------------------------

    def branch(self, op: Op) -> None:
        writer, threadgroup = self.writer, self.threadgroup
        names = [self.values.reuse.of_branch(op, r) or self.registers.declare(r) for r in op.results]
        writer.last = None
        writer.open(f"if ({bare(self.expressions.scalar(op.operands[0]))})")
        entry = after = threadgroup.accesses.copy()
        for n, block in enumerate(op.blocks):
            if n and not (block.ops[:-1] or names):
                break
            if n:
                writer.otherwise()
            threadgroup.accesses = entry.copy()
            writer.scopes.append(set())
            writer.last = None
            self.write_block(block)
            self._update(names, list(op.results), list(block.terminator.operands))
            writer.scopes.pop()
            after = after + threadgroup.accesses
        threadgroup.accesses = after
        writer.last = None
        writer.close()
        self.expressions.names.update(zip(op.results, names, strict=True))
