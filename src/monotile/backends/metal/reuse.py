"""Register reuse: a result takes the registers of a value that nothing reads afterwards."""

from __future__ import annotations

from ... import ir
from ...ir import Op, Value
from .analysis import Accumulations, Analysis
from .expressions import Expressions


class RegisterReuse:
    def __init__(self, analysis: Analysis, accumulations: Accumulations, expressions: Expressions) -> None:
        self.analysis, self.accumulations, self.expressions = analysis, accumulations, expressions
        # For a value that a loop carries to its next iteration: the parameters it replaces, with their registers.
        self.replaces: dict[Value, list[tuple[Value, str]]] = {}

    def find(self, value: Value) -> str | None:
        """Return registers that a value can overwrite: those of the loop-carried value it replaces, or those of an
        operand with the same shape, dtype and layout."""
        op = value.op
        if op is None:
            return None
        for parameter, name in self.replaces.get(value, ()):
            if self._last_read(parameter, op) and self._reads_elementwise(op, parameter):
                return name
        if op.kind in ir.ELEMENTWISE and op not in self.accumulations.by_add:
            for operand in self._read_elementwise(op):
                if self._alike(operand, value) and self._last_read(operand, op) and self._in_block_of(operand, op):
                    return self.expressions.names[operand]
        return None

    def _alike(self, operand: Value, value: Value) -> bool:
        expressions = self.expressions
        if operand.shape != value.shape or operand.dtype != value.dtype or operand not in expressions.names:
            return False
        same_axis = expressions.orientations.of(operand) == expressions.orientations.of(value)
        return same_axis and expressions.layouts.of(operand) == expressions.layouts.of(value)

    def _in_block_of(self, operand: Value, op: Op) -> bool:
        """True for a result of the same block; results of loops and branches are not overwritten."""
        if operand.op is None or operand.op.blocks:
            return False
        return self.analysis.block_of.get(operand.op) is self.analysis.block_of[op]

    def _last_read(self, value: Value, op: Op) -> bool:
        """True if nothing reads a value after an op, in the same iteration of the loop around it."""
        readers = [self.accumulations.add_of.get(reader, reader) for reader in self.analysis.readers.get(value, [])]
        return not any(reader is not op and self.analysis.may_follow(reader, op) for reader in readers)

    def of_branch(self, op: Op, result: Value) -> str | None:
        """Return the registers of a loop-carried value that the result of a branch replaces. Values that a block of the
        branch yields for it may then overwrite them, too."""
        for parameter, name in self.replaces.get(result, ()):
            if self._last_read(parameter, op):
                for block in op.blocks:
                    value = block.terminator.operands[op.results.index(result)]
                    known = self.replaces.setdefault(value, [])
                    if self.analysis.defined_in(value, block) and (parameter, name) not in known:
                        known.append((parameter, name))
                return name
        return None

    def _reads_elementwise(self, op: Op, value: Value) -> bool:
        """True if each element of an op's result depends on no other element of a value."""
        match = self.accumulations.by_add.get(op)
        if match is None:
            return op.kind in ir.ELEMENTWISE and value in self._read_elementwise(op)
        if value in self.analysis.registers_read(match.dot):
            return False
        if match.addend is value:
            return True
        return match.addend in self.analysis.inlined and value in self._read_elementwise(match.addend.op or op)

    def _read_elementwise(self, op: Op) -> list[Value]:
        """Return the values of which an elementwise op reads no element but the one it computes, in program order."""
        found: dict[Value, None] = {}
        elsewhere: set[Value] = set()
        stack = [(v, True) for v in reversed(op.operands)]
        while stack:
            value, same_element = stack.pop()
            if value not in self.analysis.inlined:
                if same_element:
                    found[value] = None
                else:
                    elsewhere.add(value)
            elif value.op is not None:
                same_element = same_element and value.op.kind in ir.ELEMENTWISE
                stack += [(v, same_element) for v in reversed(value.op.operands)]
        return [value for value in found if value not in elsewhere]
