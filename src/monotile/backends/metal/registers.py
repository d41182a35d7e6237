"""Registers, loops over them, and exchanges between lanes through threadgroup memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from ... import ir
from ...errors import InternalError
from ...ir import Kernel, Value
from .assign import Families, Orientations, Plan, homes, inlined, read_by
from .layout import COLUMN, ROW, Family, Shape
from .msl import type_of
from .points import ZERO, Coordinate, Elements, Point, bare
from .writer import Nest, Rooms

HINTS = {"dot": "product", "max": "top", "min": "least", "sum": "total"}


@dataclass(frozen=True)
class State:
    """What has been written so far, to come back to."""

    top: int
    lines: list[str]
    depth: int
    scopes: list[set[str]]
    last: Nest | None
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    slices: dict[ir.Op, tuple[str, str]]


class Registers(Rooms):
    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel, self.plan = kernel, plan
        families = Families(kernel, plan)
        super().__init__(kernel.name, families.main)
        self.elements = Elements(families, Orientations(kernel), inlined(kernel, plan.engine == "lanes"))
        self.comment = ""
        self.noted: ir.Loc | None = None
        self.homes = homes(kernel.body)
        self.users = ir.uses(kernel.body)
        self.readers: dict[Value, list[ir.Op]] = {}  # the statements that read a value with registers
        for op in ir.walk(kernel.body):
            if not any(r in self.elements.inlined for r in op.results):
                for value in read_by(op, self.elements.inlined) if not op.blocks else set(op.operands):
                    self.readers.setdefault(value, []).append(op)
        read = {op.attrs["tensor"].index for op in ir.walk(kernel.body) if op.kind in ("load", "gather")}
        self.mixed = read & kernel.written  # threads must be ordered between their writes and reads

    # ---- names and registers -----------------------------------------------------------------------------------------

    def hint(self, value: Value) -> str:
        """What a value is called: its name in the source, or that of what is made of it at once."""
        if value.hint:
            return value.hint
        op, users = value.op, self.users.get(value, [])
        if op is not None and op.kind == "dot" and len(users) == 1 and self.homes[op] is self.homes[users[0]]:
            value = users[0].results[0] if users[0].results else value
            if value.hint:
                return value.hint
        kind = op.attrs["fold"] if op is not None and op.kind == "reduce" else value.kind
        starts = {n for user in users if user.kind in ir.MEMORY for n in self._starts(user, value)}
        return HINTS.get(str(kind), "first_row" if starts == {0} else "t")

    def _starts(self, op: ir.Op, value: Value) -> set[int]:
        """Of which sides of its tile a scalar is the start in an access."""
        starts = op.operands[op.kind == "store" :]
        sides = [v for v, extent in zip(starts, op.attrs.get("extents", ()), strict=False) if extent is not None]
        return {n for n, v in enumerate(sides) if v is value}

    def note(self, op: ir.Op) -> None:
        """The author's line stands, as a comment, before what is written for it first."""
        tile = any(r.shape for r in op.results) or op.kind == "store"
        skip = op.blocks or any(r in self.elements.inlined for r in op.results) or op.kind in ("load", "yield")
        if tile and not skip and op.loc is not None and op.loc.text and op.loc != self.noted:
            same = self.noted is not None and (self.noted.file, self.noted.line) == (op.loc.file, op.loc.line)
            self.comment = "" if same else f"// {op.loc.text.strip()}"
            self.noted = op.loc

    def noted_line(self) -> None:
        if self.comment:
            self.line(self.comment)
            self.comment = ""

    def declare(self, value: Value, hint: str = "") -> str:
        name = self.name(hint or self.hint(value))
        shape, family = self.elements.shape(value), self.elements.families.of(value)
        sizes = [family.rows_held(shape.rows)] if shape.rows > 1 else []
        sizes += family.columns_held(shape.columns) if shape.columns > 1 else ()
        kind = type_of(value)
        if self.elements.in_matrices(value):
            sizes.pop()
            kind = f"simdgroup_{kind}8x8"
        self.before(f"{kind} {name}{''.join(f'[{n}]' for n in sizes if n > 1)};")
        return name

    def axis(self, value: Value) -> str:
        return self.elements.orientations.of(value)

    def point(self, family: Family, shape: Shape) -> Point:
        """The point of registers i, j and e."""
        row = column = ZERO
        if shape.rows > 1:
            i = "i" if family.rows_held(shape.rows) > 1 else "0"
            row = Coordinate(family.row(i), family, ROW, (i,), uniform=family.row_place(i) == (i, "0"))
        if shape.columns > 1:
            index = tuple(v if n > 1 else "0" for v, n in family.column_loops(shape.columns))
            column = Coordinate(family.column(index, shape.columns), family, COLUMN, index)
        return Point(row, column)

    def inside(self, family: Family, shape: Shape, point: Point) -> list[str]:
        """Tests that a register holds an element of the tile and not padding."""
        tests = []
        if shape.rows > 1 and family.row_padded(shape.rows):
            tests.append(f"{point.row.text} < {shape.rows}")
        if shape.columns > 1 and family.column_padded(shape.columns):
            tests.append(f"{point.column.text} < {shape.columns}")
        return tests

    def owner(self, family: Family, shape: Shape) -> list[str]:
        """Tests that pick one of the lanes that hold the same element."""
        tests = [family.first_of_row] * (shape.columns == 1) + [family.first_of_column] * (shape.rows == 1)
        return list(dict.fromkeys(t for t in tests if t))

    # ---- loops over registers ----------------------------------------------------------------------------------------

    def nest(
        self, family: Family, shape: Shape, body: Callable[[Point], list[str]], *, run: int = 1, sealed: bool = False
    ) -> None:
        """Loops over the registers of a shape, with what `body` says of a point inside. They go on where the loops
        before ended, if those were the same. With a `run` the last loop is left to the body, for all of a run."""
        elements = self.elements
        point = self.point(family, shape)
        loops = [("i", family.rows_held(shape.rows))] if shape.rows > 1 else []
        columns = family.column_loops(shape.columns) if shape.columns > 1 else []
        if run > 1:
            columns = columns[:-1]
            index = (*(point.column.index or ())[:-1], "0")
            column = Coordinate(family.column(index, shape.columns), family, COLUMN, index)
            point = Point(point.row, column)
        elements.hoisted.clear()
        elements.touched.clear()
        texts = body(point)
        hoisted = list(elements.hoisted)
        elements.hoisted.clear()
        free = not elements.touched and not hoisted
        self.settle()
        headers = [(v, n) for v, n in loops + columns if n > 1]
        key = (family, tuple(headers))
        if headers and free and self.last is not None and self.last.key == key and self.last.end == len(self.lines):
            del self.lines[-self.last.braces :]
            self.depth += self.last.braces
            start = self.last.start
            self.noted_line()
        else:
            start = len(self.lines)
            self.noted_line()
            for n, (variable, count) in enumerate(headers):
                if n == len([v for v, c in loops if c > 1]):
                    self._lines([h.line for h in hoisted if not h.by_column])
                    hoisted = [h for h in hoisted if h.by_column]
                self.unrolled(variable, count)
            self._lines([h.line for h in hoisted])
        self._lines(texts)
        self.close(len(headers))
        self.last = Nest(key, start, len(self.lines), len(headers)) if headers and not sealed else None

    def _lines(self, texts: list[str]) -> None:
        for text in texts:
            self.line(text)

    def settle(self) -> None:
        """A barrier, if what is about to be read was written since the last one."""
        for room in self.elements.touched:
            self.will_read(room)
        self.elements.touched.clear()

    def assign(self, value: Value, name: str, text: Callable[[Point], str]) -> None:
        family, shape = self.elements.families.of(value), self.elements.shape(value)

        def body(point: Point) -> list[str]:
            target = self.elements.reference(value, name, point.row.index or (), point.column.index or ())
            return [f"{target} = {bare(text(point))};"]

        self.nest(family, shape, body)

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def statement(self, write: Callable[[], None]) -> None:
        """Values that a statement reads in places of other lanes are put into threadgroup memory first."""
        elements = self.elements
        elements.wanted.clear()
        state = self.state()
        write()
        if elements.wanted:
            wanted = list(elements.wanted)
            self.restore(state)
            elements.wanted.clear()
            for value in wanted:
                self.publish(value)
            write()
            if elements.wanted:
                raise InternalError("a value is neither in registers nor in threadgroup memory")
            for value in wanted:
                del elements.rooms[value]
        if not self.plan.early:
            self.top = state.top

    def state(self) -> State:
        return State(
            self.top, list(self.lines), self.depth, [set(s) for s in self.scopes], copy.copy(self.last),
            list(self.reads), list(self.writes), dict(self.elements.slices),
        )  # fmt: skip

    def restore(self, state: State) -> None:
        self.top, self.depth, self.last = state.top, state.depth, copy.copy(state.last)
        self.lines, self.scopes = list(state.lines), [set(s) for s in state.scopes]
        self.reads, self.writes = list(state.reads), list(state.writes)
        self.elements.slices = dict(state.slices)

    def publish(self, value: Value) -> None:
        elements = self.elements
        shape, family, name = elements.shape(value), elements.families.of(value), elements.names[value]
        size, kind = value.dtype.bytes, elements.memory_type(value.dtype)
        rows = shape.rows if shape.kind == "tile" else 1
        width = shape.columns if shape.columns > 1 else shape.rows
        room = self.take(kind, size, rows, width, f"all_{name}", "an exchange between lanes")
        self.will_write(room)

        def body(point: Point) -> list[str]:
            place = point.row.text if shape.columns == 1 else point.column.text
            if shape.kind == "tile":
                place = f"({point.row.text}) * {width} + {point.column.text}"
            held = elements.reference(value, name, point.row.index or (), point.column.index or ())
            tests = self.inside(family, shape, point) + self.owner(family, shape)
            return [
                (f"if ({' && '.join(tests)}) " if tests else "")
                + f"{room.name}[{place}] = {elements.kept(held, value.dtype)};"
            ]

        self.nest(family, shape, body, sealed=True)
        elements.rooms[value] = room
