"""Statements that compute values into registers, copy them, and store them to tensors."""

from __future__ import annotations

from ...ir import Op, Value, starts
from .analysis import Analysis
from .dialect import bare
from .exchange import Exchange
from .expressions import Coordinate, ElementIndex, Expressions, tile_axes
from .layout import COLUMN, ROW
from .registers import Registers
from .reuse import RegisterReuse
from .threadgroup import ThreadgroupMemory
from .writer import Writer


class Values:
    def __init__(
        self,
        analysis: Analysis,
        reuse: RegisterReuse,
        registers: Registers,
        exchange: Exchange,
        expressions: Expressions,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
    ) -> None:
        self.analysis, self.registers, self.exchange = analysis, registers, exchange
        self.expressions, self.writer, self.threadgroup = expressions, writer, threadgroup
        self.reuse = reuse

    def target(self, value: Value) -> str:
        """Return the registers for a value: reused ones, or new ones."""
        return self.reuse.find(value) or self.registers.declare(value)

    def define(self, value: Value, name: str, text: str) -> None:
        """Define a scalar under a name."""
        self.expressions.names[value] = name
        self.writer.line(f"const {self.expressions.type(value)} {name} = {text};")

    def compute(self, value: Value) -> None:
        """Compute a value into registers."""
        if not value.shape:
            text = bare(self.expressions.scalar(value))
            self.define(value, self.writer.name(self.registers.hint(value)), text)
            return
        name = self.target(value)
        compute = self._scan if value.kind == "scan" else self._compute
        self.exchange.statement(lambda: compute(value, name))
        self.expressions.names[value] = name

    def _compute(self, value: Value, name: str) -> None:
        expressions, registers = self.expressions, self.registers
        layout, shape, axis = expressions.layouts.of(value), expressions.shape(value), registers.axis(value)
        run = layout.run_length(shape.columns) if shape.columns > 1 and value.kind == "load" else 1
        first = registers.index(layout, shape)
        if run == 1 or value.shape[-1] % run or expressions.vector(value, first, run) is None:
            registers.assign(value, name, lambda index: expressions.at(value, index, axis))
            return

        def body(index: ElementIndex) -> list[str]:
            text = expressions.vector(value, index, run)
            target = expressions.register(value, name, *registers.with_offset(index, shape, "e").registers)
            loaded = self.writer.name(f"{name}_vector")
            line = f"const {expressions.type(value)}{run} {loaded} = {bare(text or '')};"
            return [line, f"UNROLL for (int e = 0; e < {run}; ++e) {target} = {loaded}[e];"]

        registers.for_each(layout, shape, body, run=run, sealed=True)

    def _scan(self, value: Value, name: str) -> None:
        """Compute running sums, each from the beginning: lanes hold few elements of an axis."""
        expressions, registers, op = self.expressions, self.registers, value.op
        assert op is not None
        layout, shape, axis = expressions.layouts.of(value), expressions.shape(value), registers.axis(value)
        (operand,), side = op.operands, value.shape[op.attrs["axis"]]
        along = axis if len(value.shape) == 1 else (ROW, COLUMN)[op.attrs["axis"]]

        def body(index: ElementIndex) -> list[str]:
            there = Coordinate("k")
            place = ElementIndex(there, index.column) if along == ROW else ElementIndex(index.row, there)
            target = expressions.register(value, name, *index.registers)
            dialect, element = expressions.dialect, expressions.at(operand, place, axis)
            last = f"min({index.along(along).text}, {side - 1})"
            total = bare(dialect.combined("sum", value.dtype, target, element))
            start = f"{target} = {dialect.identity('sum', value.dtype)};"
            return [start, f"for (int k = 0; k <= {last}; ++k) {target} = {total};"]

        registers.for_each(layout, shape, body, sealed=True)

    def copy(self, target: str, value: Value, result: Value) -> None:
        """Copy a value into the registers of a result."""
        axis = self.registers.axis(result)
        self.exchange.statement(
            lambda: self.registers.assign(result, target, lambda index: self.expressions.at(value, index, axis))
        )

    def fence(self, op: Op) -> None:
        """Order the accesses to a tensor of which the kernel may access an element twice."""
        if op.attrs["tensor"].index in self.analysis.fenced:
            self.threadgroup.barrier("mem_device")

    def store(self, op: Op) -> None:
        value, tensor = op.operands[0], op.attrs["tensor"]
        self.fence(op)
        expressions, dialect, registers = self.expressions, self.expressions.dialect, self.registers
        shape, axis, layout = expressions.shape(value), registers.axis(value), expressions.layouts.of(value)
        kind, run = dialect.memory_type(tensor.dtype), 1 if op.kind == "scatter" else self._store_width(op)

        def body(index: ElementIndex) -> list[str]:
            if op.kind == "scatter":
                place, in_tensor = expressions.scattered(op, index, axis)
            else:
                pointer, offset, in_tensor = expressions.address(op, starts(op), index, axis)
                place = f"{pointer}[{offset}]"
            tests = [*registers.padding_tests(layout, shape, index), *registers.owner_tests(layout, shape), *in_tensor]
            indices = [index]
            if run > 1:
                indices = [registers.with_offset(index, shape, str(e)) for e in range(run)]
            elements = [expressions.at(value, each, axis) for each in indices]
            texts = [bare(dialect.cast(element, value.dtype, tensor.dtype)) for element in elements]
            signs = self.analysis.infinities.in_store(value)
            if tensor.dtype.name == "float32" and signs:
                texts = [dialect.restored(text, sum(signs)) for text in texts]
            line = f"{place} = {dialect.to_memory(texts[0], tensor.dtype)};"
            if run > 1:
                line = f"*(device packed_{kind}{run} *)({pointer} + {offset}) = {kind}{run}({', '.join(texts)});"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.exchange.statement(lambda: registers.for_each(layout, shape, body, run=run))

    def _store_width(self, op: Op) -> int:
        """Return how many adjacent elements one store writes."""
        value, tensor = op.operands[0], op.attrs["tensor"]
        layout, columns = self.expressions.layouts.of(value), self.expressions.shape(value).columns
        if len(value.shape) != 2 or columns == 1 or self.expressions.dialect.as_bits(tensor.dtype):
            return 1
        run, last = layout.run_length(columns), tile_axes(op)[-1]
        return run if tensor.unit == last and not op.attrs["checked"][last] and columns % run == 0 else 1
