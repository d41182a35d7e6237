"""Reductions: over a lane's registers, then over the lanes that hold a row or column, then over simdgroups."""

from __future__ import annotations

from ...dtypes import DType
from ...ir import Op, Value
from .dialect import bare
from .exchange import Exchange
from .expressions import ElementIndex, Expressions
from .layout import COLUMN, ROW, LaneGridLayout, Loops, OrientedShape, TileLayout
from .registers import Registers, column_coordinate
from .threadgroup import ThreadgroupMemory
from .writer import Writer, unrolled


class Reductions:
    def __init__(
        self,
        registers: Registers,
        exchange: Exchange,
        expressions: Expressions,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
    ) -> None:
        self.registers, self.exchange, self.expressions = registers, exchange, expressions
        self.writer, self.threadgroup = writer, threadgroup

    def reduce(self, op: Op) -> None:
        operand, result = op.operands[0], op.result
        name = self.registers.declare(result)
        self.exchange.statement(lambda: self._reduce(op, operand, result, name))
        self.expressions.names[result] = name

    def _reduce(self, op: Op, operand: Value, result: Value, name: str) -> None:
        expressions, registers = self.expressions, self.registers
        layout, shape = expressions.layouts.of(operand), expressions.shape(operand)
        along = COLUMN if len(operand.shape) == 2 and op.attrs["axis"] == 1 else ROW  # the coordinate that goes
        if len(operand.shape) == 1:
            along = registers.axis(operand)
        if (shape.columns if along == COLUMN else shape.rows) == 1:
            axis = registers.axis(operand)
            registers.assign(result, name, lambda at: expressions.folded_alone(op, expressions.at(operand, at, axis)))
            return
        kept = OrientedShape(rows=shape.rows) if along == COLUMN else OrientedShape(columns=shape.columns)
        reduced = OrientedShape(columns=shape.columns) if along == COLUMN else OrientedShape(rows=shape.rows)
        if along == COLUMN:
            self._over_columns(op, name, layout, kept, reduced)
        else:
            self._over_rows(op, name, layout, kept, reduced)
        simdgroups = layout.column_simdgroups if along == COLUMN else layout.row_simdgroups
        if simdgroups > 1:
            self._over_simdgroups(op, name, layout, kept, along)

    def _element(self, op: Op, layout: TileLayout, reduced: OrientedShape, index: ElementIndex) -> str:
        """Return an element of the operand, or the identity for padding."""
        operand = op.operands[0]
        text = self.expressions.at(operand, index, self.registers.axis(operand))
        tests = self.registers.padding_tests(layout, reduced, index)
        identity = self.expressions.dialect.identity(op.attrs["fold"], operand.dtype)
        return f"({' && '.join(tests)} ? {text} : {identity})" if tests else text

    def _over_columns(self, op: Op, name: str, layout: TileLayout, kept: OrientedShape, reduced: OrientedShape) -> None:
        """Reduce each row over this lane's columns, then over the lanes that hold the row."""

        def body(row: ElementIndex) -> list[str]:
            target = self._target(op, name, row)
            if isinstance(layout, LaneGridLayout):
                return self._over_lanes(op, target, self._pairwise(op, layout, reduced, row), [], layout.row_masks)
            index = ElementIndex(row.row, self.registers.index(layout, reduced).column)
            text = self._element(op, layout, reduced, index)
            return self._over_lanes(op, target, text, layout.column_loops(reduced.columns), layout.row_masks)

        self.registers.for_each(layout, kept, body)

    def _pairwise(self, op: Op, layout: LaneGridLayout, reduced: OrientedShape, row: ElementIndex) -> str:
        """Reduce a lane's columns half with half. Lanes and registers are then reduced in the same order however many
        rows share the lanes, so a row's sum does not depend on the number of rows."""
        reduction, dtype = op.attrs["fold"], op.operands[0].dtype
        texts = []
        for n in range(layout.columns_per_lane(reduced.columns)[0]):
            index = ElementIndex(row.row, column_coordinate(layout, reduced.columns, str(n)))
            texts.append(self._element(op, layout, reduced, index))
        while len(texts) > 1:
            half = (len(texts) + 1) // 2
            pairs = zip(texts, texts[half:], strict=False)
            combined = [self.expressions.dialect.combined(reduction, dtype, a, b) for a, b in pairs]
            texts = combined + texts[len(combined) : half]
        return texts[0]

    def _over_rows(self, op: Op, name: str, layout: TileLayout, kept: OrientedShape, reduced: OrientedShape) -> None:
        """Reduce each column over this lane's rows, then over the lanes that hold the column."""

        def body(column: ElementIndex) -> list[str]:
            index = ElementIndex(self.registers.index(layout, reduced).row, column.column)
            text = self._element(op, layout, reduced, index)
            loops = [("i", layout.rows_per_lane(reduced.rows))]
            return self._over_lanes(op, self._target(op, name, column), text, loops, layout.column_masks)

        self.registers.for_each(layout, kept, body)

    def _over_lanes(self, op: Op, target: str, text: str, loops: Loops, masks: tuple[int, ...]) -> list[str]:
        """Reduce an element over loops, then over the lanes that xor shuffles with these masks reach."""
        dialect, reduction, dtype = self.expressions.dialect, op.attrs["fold"], op.operands[0].dtype
        lines = self._over_loops(reduction, dtype, target, text, loops) if loops else [f"{target} = {bare(text)};"]
        for mask in masks:
            other = f"{dialect.use('shuffle_xor')}({target}, {mask})"
            lines.append(f"{target} = {bare(dialect.combined(reduction, dtype, target, other))};")
        return lines

    def _over_loops(self, reduction: str, dtype: DType, target: str, text: str, loops: Loops) -> list[str]:
        dialect = self.expressions.dialect
        lines, depth = [f"{target} = {dialect.identity(reduction, dtype)};"], 0
        for variable, count in loops:
            if count > 1:
                lines.append("  " * depth + unrolled([(variable, count)]).rstrip())
                depth += 1
        return [*lines, "  " * depth + f"{target} = {bare(dialect.combined(reduction, dtype, target, text))};"]

    def _target(self, op: Op, name: str, index: ElementIndex) -> str:
        return self.expressions.register(op.result, name, *index.registers)

    def _over_simdgroups(self, op: Op, name: str, layout: TileLayout, kept: OrientedShape, along: str) -> None:
        """Combine the results of the simdgroups in threadgroup memory."""
        dialect, reduction, dtype = self.expressions.dialect, op.attrs["fold"], op.operands[0].dtype
        by_rows = along == COLUMN
        simdgroups = layout.column_simdgroups if by_rows else layout.row_simdgroups
        length = kept.rows * kept.columns
        tile = self.threadgroup.allocate(
            (dialect.tile_type(dtype), dtype.bytes), simdgroups, length,
            hint=f"{name}_parts", purpose="a reduction over simdgroups",
        )  # fmt: skip
        self.threadgroup.before_write(tile)
        first_lane = ["fn % 8 == 0"] if by_rows or kept.columns == 1 else []
        first_lane += ["fm % 8 == 0"] if not by_rows or kept.rows == 1 else []

        def put(index: ElementIndex) -> list[str]:
            at = index.row.text if by_rows else index.column.text
            tests = [*self.registers.padding_tests(layout, kept, index), *first_lane]
            offset = f"sg * {length} + {at}" if length > 1 else "sg"
            value = dialect.to_memory(self._target(op, name, index), dtype)
            return [f"if ({' && '.join(tests)}) {tile.name}[{offset}] = {value};"]

        self.registers.for_each(layout, kept, put)
        self.writer.last = None
        self.threadgroup.before_read(tile)

        def get(index: ElementIndex) -> list[str]:
            at = index.row.text if by_rows else index.column.text
            tests = self.registers.padding_tests(layout, kept, index)
            parts = [f"{tile.name}[{f'{s * length} + {at}' if s else at}]" for s in range(simdgroups)]
            text = dialect.from_memory(parts[0], dtype)
            for part in parts[1:]:
                text = dialect.combined(reduction, dtype, text, dialect.from_memory(part, dtype))
            line = f"{self._target(op, name, index)} = {bare(text)};"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.registers.for_each(layout, kept, get)
