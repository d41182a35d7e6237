"""Products of few rows without matrices: every lane holds a part of each row, and reads its part of the right operand
with vector loads."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Op, Value
from .dots import Dots
from .layout import COLUMN, LANES, ROW, Family, Shape, Spread
from .points import ZERO, Coordinate, Point, bare
from .staging import base

Loops = list[tuple[str, int]]


@dataclass(frozen=True)
class Part:
    """A lane's columns of one row of a tile, as floats: lines that load them, loops over them, and one of them."""

    lines: list[str]
    head: str
    text: str
    column: Coordinate


class LaneDots(Dots):
    def lane_dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        write = self._over_lanes if op.operands[1].kind == "trans" else self._along_lanes
        self.statement(lambda: write(op, result, addend, name))
        self.last = None

    def _part(self, value: Value, row: Coordinate) -> Part:
        elements, side = self.elements, value.shape[1]
        family = elements.families.of(value)
        named = [("u" if v == "j" else v, n) for v, n in family.column_loops(side)]  # j counts something else here
        index = tuple(v if n > 1 else "0" for v, n in named)
        loops, run = [(v, n) for v, n in named if n > 1], family.neighbours(side)
        column = Coordinate(family.column(index, side), family, COLUMN, index)
        first = Coordinate(family.column((*index[:-1], "0"), side), family, COLUMN, (*index[:-1], "0"))
        text = elements.vector(value, Point(row, first), run) if run > 1 else None
        if text is not None:
            chunks = [n for v, n in loops if v == "u"]
            x = "x[u]" if chunks else "x"
            lines = [f"float{run} x{f'[{chunks[0]}]' if chunks else ''};"]
            lines.append(_head([("u", n) for n in chunks]) + f"{x} = float{run}({bare(text)});")
            return Part(lines, _head(loops), f"{x}[e]", column)
        x = "x" + "".join(f"[{v}]" for v, _ in loops)
        lines = [f"float x{''.join(f'[{n}]' for _, n in loops)};"]
        lines.append(f"{_head(loops)}{x} = float({bare(elements.at(value, Point(row, column)))});")
        return Part(lines, _head(loops), x, column)

    # ---- k over lanes: a (m, k) times the transpose of x (n, k) ------------------------------------------------------

    def _over_lanes(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """A lane's part of 32 sums at a time; then each sum is completed in the lane that keeps it."""
        a, right, elements = op.operands[0], base(op.operands[1]), self.elements
        m, n = a.shape[0], right.shape[0]
        spread = elements.families.of(result)
        assert isinstance(spread, Spread)
        elements.helpers.add("sums_over_lanes")
        blocks, parts = spread.columns_held(n)[0], self.name("parts")
        elements.touched.clear()
        key = f"{spread.columns} * j + c" if blocks > 1 else "c"
        part = self._part(right, Coordinate(key, elements.families.of(right), ROW, (key,), uniform=True))
        left = elements.at(a, Point(_row(m, elements.families.of(a)), part.column))
        self.settle()
        if blocks > 1:
            self.unrolled("j", blocks)
        self.line(f"float {parts}[{LANES}] = {{}};")
        self.open(f"UNROLL for (int c = 0; c < {spread.columns}; ++c)")
        if n % spread.columns:
            self.open(f"if ({key} < {n})")
        for text in part.lines:
            self.line(text)
        place = f"{parts}[r * {spread.columns} + c]" if m > 1 else f"{parts}[c]"
        rows = _head([("r", m)] if m > 1 else [])
        self.line(f"{rows}{part.head}{place} = fma(float({left}), {part.text}, {place});")
        self.close(1 + bool(n % spread.columns))
        point = self.point(spread, Shape(m, n))
        target = elements.reference(result, name, point.row.index or (), point.column.index or ())
        more = "" if addend is None else f"{elements.at(addend, point)} + "
        self.line(f"{target} = {more}sums_over_lanes({parts}, lane);")
        self.close(blocks > 1)

    # ---- n over lanes: a (m, k) times b (k, n) -----------------------------------------------------------------------

    def _along_lanes(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """Row by row of b; the element of a that meets it comes from the lane that holds it."""
        a, b = op.operands
        (m, k), elements = a.shape, self.elements
        axis = self.axis(addend) if addend is not None else COLUMN
        self.assign(result, name, lambda p: "0.0f" if addend is None else elements.at(addend, p, axis))
        self.last = None
        elements.hoisted.clear()
        elements.touched.clear()
        loops, lanes, at = _walk(elements.families.of(a), k)
        left = elements.at(a, Point(_row(m, elements.families.of(result)), at))
        shuffles = [h.line for h in elements.hoisted]
        elements.hoisted.clear()
        held = self._holds(b)
        part = self._part(
            b, Coordinate(at.text, elements.families.of(b), ROW, (at.text,), uniform=True) if held else at
        )
        before = [h.line for h in elements.hoisted]
        elements.hoisted.clear()
        self.settle()
        for variable, count in loops:
            self.unrolled(variable, count)
        self.open(f"{'UNROLL ' if held else ''}for (int c = 0; c < {lanes}; ++c)")
        if k % (lanes * _product(loops)):
            self.line(f"if ({at.text} >= {k}) break;")
        for line in [*before, *part.lines]:
            self.line(line)
        if m > 1:
            self.unrolled("r", m)
        for line in shuffles:
            self.line(line)
        target = elements.reference(result, name, ("r",) if m > 1 else (), part.column.index or ())
        self.line(f"{part.head}{target} = fma(float({left}), {part.text}, {target});")
        self.close(len(loops) + 1 + (m > 1))

    def _holds(self, b: Value) -> bool:
        """Whether registers of b itself are read, so that the row must be known to the compiler."""
        stack = [b]
        while stack:
            v = stack.pop()
            if v in self.elements.names:
                if len(v.shape) == 2 and min(v.shape) > 1:
                    return True
            elif v.op is not None:
                stack += v.op.operands
        return False


def _row(rows: int, family: Family) -> Coordinate:
    return Coordinate("r", family, ROW, ("r",), uniform=True) if rows > 1 else ZERO


def _head(loops: Loops) -> str:
    return "".join(f"UNROLL for (int {v} = 0; {v} < {n}; ++{v}) " for v, n in loops)


def _walk(family: Family, k: int) -> tuple[Loops, int, Coordinate]:
    """All k of a left operand: loops over the registers that hold them, how many lanes hold each, and the place."""
    named = [({"j": "kb", "e": "ke"}[v], n) for v, n in family.column_loops(k)]
    index = tuple(v if n > 1 else "0" for v, n in named)
    lanes = family.columns if isinstance(family, Spread) else LANES
    run = family.neighbours(k)
    text = "c" if run == 1 else f"{run} * c + {index[-1]}"
    if index[0] != "0":
        text = f"{lanes * run} * {index[0]} + {text}"
    return [(v, n) for v, n in named if n > 1], lanes, Coordinate(text, family, COLUMN, index, True, "c")


def _product(loops: Loops) -> int:
    total = 1
    for _, count in loops:
        total *= count
    return total
