"""Registers: their names and declarations, the loops over them, and assignments to them."""

from __future__ import annotations

from collections.abc import Callable

from ... import ir
from ...ir import Value
from .analysis import Analysis
from .dialect import bare
from .expressions import ZERO, Coordinate, ElementIndex, Expressions, HoistedLine
from .layout import COLUMN, ROW, Loops, OrientedShape, TileLayout
from .threadgroup import ThreadgroupMemory
from .writer import LoopNest, Writer

HINTS = {"dot": "product", "max": "max_value", "min": "min_value", "sum": "total"}


class Registers:
    def __init__(
        self, analysis: Analysis, expressions: Expressions, writer: Writer, threadgroup: ThreadgroupMemory
    ) -> None:
        self.analysis, self.expressions = analysis, expressions
        self.writer, self.threadgroup = writer, threadgroup

    # ---- names -------------------------------------------------------------------------------------------------------

    def hint(self, value: Value) -> str:
        """Return a value's name in the source, or one made of its op or its use."""
        if value.hint:
            return value.hint
        op, users, block_of = value.op, self.analysis.users.get(value, []), self.analysis.block_of
        if op is not None and op.kind == "dot" and len(users) == 1 and block_of[op] is block_of[users[0]]:
            value = users[0].results[0] if users[0].results else value
            if value.hint:
                return value.hint
        kind = op.attrs["fold"] if op is not None and op.kind == "reduce" else value.kind
        starts = {n for user in users if user.kind in ir.MEMORY for n in _start_axes(user, value)}
        return HINTS.get(str(kind), "first_row" if starts == {0} else "t")

    def declare(self, value: Value, hint: str = "") -> str:
        """Declare the registers of a value and return their name."""
        expressions = self.expressions
        name = self.writer.name(hint or self.hint(value))
        shape, layout = expressions.shape(value), expressions.layouts.of(value)
        counts = [layout.rows_per_lane(shape.rows)] if shape.rows > 1 else []
        counts += layout.columns_per_lane(shape.columns) if shape.columns > 1 else ()
        kind = expressions.type(value)
        if expressions.in_matrices(value):
            counts.pop()
            kind = f"simdgroup_{kind}8x8"
        self.writer.declare(f"{kind} {name}{''.join(f'[{n}]' for n in counts if n > 1)};")
        return name

    # ---- elements of a lane ------------------------------------------------------------------------------------------

    def axis(self, value: Value) -> str:
        return self.expressions.orientations.of(value)

    def index(self, layout: TileLayout, shape: OrientedShape) -> ElementIndex:
        """Return the element that the registers with loop indices i, j and e hold."""
        row = column = ZERO
        if shape.rows > 1:
            i = "i" if layout.rows_per_lane(shape.rows) > 1 else "0"
            row = Coordinate(layout.row(i), layout, ROW, (i,), uniform=layout.row_owner(i) == (i, "0"))
        if shape.columns > 1:
            index = tuple(v if n > 1 else "0" for v, n in layout.column_loops(shape.columns))
            column = column_coordinate(layout, shape.columns, *index)
        return ElementIndex(row, column)

    def padding_tests(self, layout: TileLayout, shape: OrientedShape, index: ElementIndex) -> list[str]:
        """Return the tests that a register holds an element of the tile and not padding."""
        tests = []
        if shape.rows > 1 and layout.row_padded(shape.rows):
            tests.append(f"{index.row.text} < {shape.rows}")
        if shape.columns > 1 and layout.column_padded(shape.columns):
            tests.append(f"{index.column.text} < {shape.columns}")
        return tests

    def owner_tests(self, layout: TileLayout, shape: OrientedShape) -> list[str]:
        """Return the tests that select one of the lanes that hold the same element."""
        tests = [layout.first_of_row] * (shape.columns == 1) + [layout.first_of_column] * (shape.rows == 1)
        return list(dict.fromkeys(t for t in tests if t))

    # ---- loops -------------------------------------------------------------------------------------------------------

    def for_each(
        self,
        layout: TileLayout,
        shape: OrientedShape,
        body: Callable[[ElementIndex], list[str]],
        *,
        run: int = 1,
        sealed: bool = False,
    ) -> None:
        """Write loops over the registers of a shape, around the lines that `body` returns for an element. They are
        appended to the last loops if those were the same, and `sealed` forbids to append to these. With a `run`, the
        loop over adjacent columns is left to the body."""
        expressions, writer = self.expressions, self.writer
        index = self.index(layout, shape)
        rows = [("i", layout.rows_per_lane(shape.rows))] if shape.rows > 1 else []
        columns = layout.column_loops(shape.columns) if shape.columns > 1 else []
        if run > 1:
            columns = columns[:-1]
            index = self.with_offset(index, shape, "0")
        expressions.hoisted.clear()
        expressions.tiles_read.clear()
        texts = body(index)
        hoisted = expressions.take_hoisted()
        independent = not expressions.tiles_read and not hoisted
        self.wait_for_tiles()
        row_loops, loops = _proper(rows), _proper(rows + columns)
        key = (layout, tuple(loops))
        start = writer.reopen(key) if loops and independent else None
        if start is not None:
            writer.write_comment()
        else:
            start = len(writer.lines)
            writer.write_comment()
            self._open_loops(loops, len(row_loops), hoisted)
        writer.write_all(texts)
        writer.close(len(loops))
        writer.last = LoopNest(key, start, len(writer.lines), len(loops)) if loops and not sealed else None

    def _open_loops(self, loops: Loops, row_loops: int, hoisted: list[HoistedLine]) -> None:
        """Open loops, with each hoisted line as far out as its coordinates allow."""
        for n, (variable, count) in enumerate(loops):
            if n == row_loops:
                self.writer.write_all([h.line for h in hoisted if not h.by_column])
                hoisted = [h for h in hoisted if h.by_column]
            self.writer.open_unrolled(variable, count)
        self.writer.write_all([h.line for h in hoisted])

    def with_offset(self, index: ElementIndex, shape: OrientedShape, offset: str) -> ElementIndex:
        """Return the element at an offset in the run of adjacent columns."""
        column = index.column
        assert column.layout is not None and column.index is not None
        registers = (*column.index[:-1], offset)
        return ElementIndex(index.row, column_coordinate(column.layout, shape.columns, *registers))

    def wait_for_tiles(self) -> None:
        """Write a barrier if a tile that the statement reads was written since the last one."""
        self.threadgroup.before_read(*self.expressions.tiles_read)
        self.expressions.tiles_read.clear()

    def assign(self, value: Value, name: str, text: Callable[[ElementIndex], str]) -> None:
        """Assign an expression to every register of a value."""
        layout, shape = self.expressions.layouts.of(value), self.expressions.shape(value)

        def body(index: ElementIndex) -> list[str]:
            target = self.expressions.register(value, name, *index.registers)
            return [f"{target} = {bare(text(index))};"]

        self.for_each(layout, shape, body)


def column_coordinate(layout: TileLayout, length: int, *index: str) -> Coordinate:
    """Return the column that a lane's registers with these indices hold."""
    return Coordinate(layout.column(index, length), layout, COLUMN, index)


def _proper(loops: Loops) -> Loops:
    return [(variable, count) for variable, count in loops if count > 1]


def _start_axes(op: ir.Op, value: Value) -> set[int]:
    """Return the sides of an access's tile at which a scalar is the start."""
    starts = op.operands[op.kind in ir.WRITES :]
    sides = [v for v, extent in zip(starts, op.attrs.get("extents", ()), strict=False) if extent is not None]
    return {n for n, v in enumerate(sides) if v is value}
