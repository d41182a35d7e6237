"""Dots of few rows, without matrices: every lane holds a segment of each row, and reads its segment of the right
operand with vector loads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...ir import Op, Value
from ...ir.matchers import untransposed
from .dialect import bare
from .exchange import Exchange
from .expressions import ZERO, Coordinate, ElementIndex, Expressions
from .layout import COLUMN, LANES, ROW, LaneGridLayout, Loops, OrientedShape, TileLayout
from .registers import Registers, column_coordinate
from .writer import Writer, unrolled


@dataclass(frozen=True)
class RowSegment:
    """A lane's columns of one row of a tile, as floats: the lines that load them, the headers of loops over them, and
    the element inside those loops."""

    lines: list[str]
    loops: str
    text: str
    column: Coordinate


class LaneDots:
    def __init__(self, registers: Registers, exchange: Exchange, expressions: Expressions, writer: Writer) -> None:
        self.registers, self.exchange, self.expressions, self.writer = registers, exchange, expressions, writer

    def dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """Write result = addend + a @ b with float32 sums."""
        _, transposed = untransposed(op.operands[1])
        write = self._reduce_over_lanes if transposed else self._broadcast_left
        self.exchange.statement(lambda: write(op, result, addend, name))
        self.writer.last = None

    def _segment(self, value: Value, row: Coordinate) -> RowSegment:
        expressions, length = self.expressions, value.shape[1]
        layout = expressions.layouts.of(value)
        named = [("u" if v == "j" else v, n) for v, n in layout.column_loops(length)]  # j is a loop of the dot
        index = tuple(v if n > 1 else "0" for v, n in named)
        loops, run = [(v, n) for v, n in named if n > 1], layout.run_length(length)
        column = column_coordinate(layout, length, *index)
        first = column_coordinate(layout, length, *index[:-1], "0")
        text = expressions.vector(value, ElementIndex(row, first), run) if run > 1 else None
        if text is not None:
            vectors = [(v, n) for v, n in loops if v == "u"]
            x = "x" + "".join(f"[{v}]" for v, _ in vectors)
            lines = [f"float{run} x{''.join(f'[{n}]' for _, n in vectors)};"]
            lines.append(f"{unrolled(vectors)}{x} = float{run}({bare(text)});")
            return RowSegment(lines, unrolled(loops), f"{x}[e]", column)
        x = "x" + "".join(f"[{v}]" for v, _ in loops)
        lines = [f"float x{''.join(f'[{n}]' for _, n in loops)};"]
        lines.append(f"{unrolled(loops)}{x} = float({bare(expressions.at(value, ElementIndex(row, column)))});")
        return RowSegment(lines, unrolled(loops), x, column)

    # ---- k over lanes: a (m, k) times the transpose of x (n, k) ------------------------------------------------------

    def _reduce_over_lanes(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """Give every lane a part of 32 sums at a time, then complete each sum in the lane that holds it."""
        expressions, writer = self.expressions, self.writer
        a, right = op.operands[0], untransposed(op.operands[1])[0]
        m, n = a.shape[0], right.shape[0]
        grid = expressions.layouts.of(result)
        assert isinstance(grid, LaneGridLayout)
        blocks, parts = grid.columns_per_lane(n)[0], writer.name("parts")
        expressions.tiles_read.clear()
        expressions.hoisted.clear()
        key = f"{grid.columns} * j + c" if blocks > 1 else "c"
        segment = self._segment(right, Coordinate(key, expressions.layouts.of(right), ROW, (key,), uniform=True))
        before = [hoisted.line for hoisted in expressions.take_hoisted()]
        left = expressions.at(a, ElementIndex(_row(m, expressions.layouts.of(a)), segment.column))
        shuffles = [hoisted.line for hoisted in expressions.take_hoisted()]
        index = self.registers.index(grid, OrientedShape(m, n))
        start = "" if addend is None else f"{expressions.at(addend, index)} + "
        before_sum = [hoisted.line for hoisted in expressions.take_hoisted()]
        self.registers.wait_for_tiles()
        if blocks > 1:
            writer.open_unrolled("j", blocks)
        writer.line(f"float {parts}[{LANES}] = {{}};")
        writer.open_unrolled("c", grid.columns)
        uneven = n % grid.columns != 0
        if uneven:
            writer.open(f"if ({key} < {n})")
        writer.write_all([*before, *segment.lines])
        part = f"{parts}[r * {grid.columns} + c]" if m > 1 else f"{parts}[c]"
        line = f"{segment.loops}{part} = fma(float({left}), {segment.text}, {part});"
        if shuffles and m > 1:
            writer.open_unrolled("r", m)
            writer.write_all([*shuffles, line])
            writer.close()
        else:
            writer.write_all([*shuffles, unrolled([("r", m)] if m > 1 else []) + line])
        writer.close(1 + uneven)
        target = expressions.register(result, name, *index.registers)
        writer.write_all(before_sum)
        writer.line(f"{target} = {start}{expressions.dialect.use('sums_over_lanes')}({parts}, lane);")
        writer.close(blocks > 1)

    # ---- n over lanes: a (m, k) times b (k, n) -----------------------------------------------------------------------

    def _broadcast_left(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """Go through the rows of b; the element of a that meets a row comes from the lane that holds it."""
        expressions, writer, registers = self.expressions, self.writer, self.registers
        a, b = op.operands
        m, k = a.shape
        axis = registers.axis(addend) if addend is not None else COLUMN
        registers.assign(result, name, lambda i: "0.0f" if addend is None else expressions.at(addend, i, axis))
        writer.last = None
        expressions.hoisted.clear()
        expressions.tiles_read.clear()
        loops, lanes, at = _elements_of_k(expressions.layouts.of(a), k)
        left = expressions.at(a, ElementIndex(_row(m, expressions.layouts.of(result)), at))
        shuffles = [hoisted.line for hoisted in expressions.take_hoisted()]
        in_registers = self._reads_tile_registers(b)
        row = Coordinate(at.text, expressions.layouts.of(b), ROW, (at.text,), uniform=True) if in_registers else at
        segment = self._segment(b, row)
        before = [hoisted.line for hoisted in expressions.take_hoisted()]
        registers.wait_for_tiles()
        for variable, count in loops:
            writer.open_unrolled(variable, count)
        writer.open(f"{'UNROLL ' if in_registers else ''}for (int c = 0; c < {lanes}; ++c)")
        if k % (lanes * math.prod(count for _, count in loops)):
            writer.line(f"if ({at.text} >= {k}) break;")
        writer.write_all([*before, *segment.lines])
        if m > 1:
            writer.open_unrolled("r", m)
        writer.write_all(shuffles)
        target = expressions.register(result, name, ("r",) if m > 1 else (), segment.column.index or ())
        writer.line(f"{segment.loops}{target} = fma(float({left}), {segment.text}, {target});")
        writer.close(len(loops) + 1 + (m > 1))

    def _reads_tile_registers(self, b: Value) -> bool:
        """True if registers of a tile are part of b: the compiler must then know the row."""
        stack = [b]
        while stack:
            v = stack.pop()
            if v in self.expressions.names:
                if len(v.shape) == 2 and min(v.shape) > 1:
                    return True
            elif v.op is not None:
                stack += v.op.operands
        return False


def _row(rows: int, layout: TileLayout) -> Coordinate:
    return Coordinate("r", layout, ROW, ("r",), uniform=True) if rows > 1 else ZERO


def _elements_of_k(layout: TileLayout, k: int) -> tuple[Loops, int, Coordinate]:
    """Return the loops over the registers that hold the left operand's k, the number of lanes that hold each, and the
    coordinate of an element in lane c."""
    named = [({"j": "kb", "e": "ke"}[v], n) for v, n in layout.column_loops(k)]
    index = tuple(v if n > 1 else "0" for v, n in named)
    lanes = layout.columns if isinstance(layout, LaneGridLayout) else LANES
    run = layout.run_length(k)
    text = "c" if run == 1 else f"{run} * c + {index[-1]}"
    if index[0] != "0":
        text = f"{lanes * run} * {index[0]} + {text}"
    return [(v, n) for v, n in named if n > 1], lanes, Coordinate(text, layout, COLUMN, index, True, "c")
