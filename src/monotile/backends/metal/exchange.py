"""Exchanges between lanes through threadgroup memory, and the checkpoints that let a statement be written again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import InternalError
from ...ir import Op, Value
from .expressions import ElementIndex, Expressions, Slice
from .registers import Registers
from .threadgroup import Accesses, ThreadgroupMemory
from .writer import Writer, WriterState


@dataclass(frozen=True)
class Checkpoint:
    """A state of the rendering to return to."""

    writer: WriterState
    threadgroup: tuple[int, Accesses]
    slices: dict[Op, Slice]
    used: frozenset[str]


class Exchange:
    """Writes statements that read elements of other lanes. With `keep`, the threadgroup memory of a statement is not
    reused by the next one, which saves barriers."""

    def __init__(
        self,
        registers: Registers,
        expressions: Expressions,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
        *,
        keep: bool,
    ) -> None:
        self.registers, self.expressions = registers, expressions
        self.writer, self.threadgroup, self.keep = writer, threadgroup, keep

    def statement(self, write: Callable[[], None]) -> None:
        """Write a statement; if it reads values held by other lanes, publish those first and write it again."""
        expressions = self.expressions
        expressions.missing.clear()
        checkpoint = self.save()
        write()
        if expressions.missing:
            missing = list(expressions.missing)
            self.restore(checkpoint)
            expressions.missing.clear()
            for value in missing:
                self._publish(value)
            write()
            if expressions.missing:
                raise InternalError("a value is neither in registers nor in threadgroup memory")
            for value in missing:
                del expressions.tiles[value]
        if not self.keep:
            self.threadgroup.top = checkpoint.threadgroup[0]

    def save(self) -> Checkpoint:
        used = frozenset(self.expressions.preamble.used)
        return Checkpoint(self.writer.save(), self.threadgroup.save(), dict(self.expressions.slices), used)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.writer.restore(checkpoint.writer)
        self.threadgroup.restore(checkpoint.threadgroup)
        self.expressions.slices = dict(checkpoint.slices)
        self.expressions.preamble.used = set(checkpoint.used)

    def _publish(self, value: Value) -> None:
        """Copy a value from registers to threadgroup memory."""
        expressions, dialect = self.expressions, self.expressions.dialect
        shape, layout, name = expressions.shape(value), expressions.layouts.of(value), expressions.names[value]
        rows = shape.rows if shape.kind == "tile" else 1
        width = shape.columns if shape.columns > 1 else shape.rows
        element = dialect.tile_type(value.dtype), value.dtype.bytes
        tile = self.threadgroup.allocate(element, rows, width, hint=f"all_{name}", purpose="an exchange between lanes")
        self.threadgroup.before_write(tile)

        def body(index: ElementIndex) -> list[str]:
            offset = index.row.text if shape.columns == 1 else index.column.text
            if shape.kind == "tile":
                offset = f"({index.row.text}) * {width} + {index.column.text}"
            register = expressions.register(value, name, *index.registers)
            tests = self.registers.padding_tests(layout, shape, index) + self.registers.owner_tests(layout, shape)
            line = f"{tile.name}[{offset}] = {dialect.to_memory(register, value.dtype)};"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.registers.for_each(layout, shape, body, sealed=True)
        expressions.tiles[value] = tile
