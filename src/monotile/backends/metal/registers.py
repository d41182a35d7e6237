"""Registers, loops over them, and exchanges between lanes through threadgroup memory."""

from __future__ import annotations

from collections.abc import Callable

from ... import ir
from ...errors import DeviceLimit
from ...ir import Kernel, Value
from .layout import Family, Fragments, Lanes, Shape
from .orient import Orientations, inlined
from .points import Elements, Point
from .words import type_of

THREADGROUP_LIMIT = 32 << 10
MOST_SIMDGROUPS = 4


class Writer:
    """Lines of text, with the places to come back to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def unrolled(self, index: str, count: int) -> None:
        """A loop over registers, which have no addresses: its index must be known to the compiler."""
        self.open(f"UNROLL for (int {index} = 0; {index} < {count}; ++{index})")

    def close(self) -> None:
        self.depth -= 1
        self.line("}")


class Registers(Writer):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        dots = [op for op in ir.walk(kernel.body) if op.kind == "dot"]
        tallest = max((op.result.shape[0] for op in dots), default=1)
        simdgroups = max(1, min(MOST_SIMDGROUPS, tallest // 8))
        self.family: Family = Fragments(simdgroups) if dots else Lanes(1)
        self.elements = Elements(self.family, Orientations(kernel), inlined(kernel))
        self.room_used = self.room_base = self.room_bytes = (
            0  # threadgroup memory: next free byte, of this statement, most
        )
        self.unsettled: list[tuple[int, int]] = []  # parts of it read since the last barrier
        self.count = 0
        self.longs: list[tuple[int, str, int]] = []
        self.mixed = self._mixed()

    def _mixed(self) -> set[int]:
        """Tensors that are both written and read, so that threads must be ordered between the two."""
        read = {op.attrs["tensor"].index for op in ir.walk(self.kernel.body) if op.kind in ("load", "gather")}
        return read & self.kernel.written

    # ---- names and registers -----------------------------------------------------------------------------------------

    def fresh(self, value: Value) -> str:
        self.count += 1
        hint = "".join(c for c in value.hint if c.isalnum() or c == "_") if value.hint else "v"
        return f"{hint}_{self.count}"

    def declare(self, value: Value) -> str:
        name, shape = self.fresh(value), self.elements.shape(value)
        rows = f"[{self.family.rows_held(shape.rows)}]" if shape.rows > 1 else ""
        columns = f"[{self.family.columns_held(shape.columns)}]" if shape.columns > 1 else ""
        self.line(f"{type_of(value)} {name}{rows}{columns};")
        return name

    def loops(self, shape: Shape) -> tuple[Point, int]:
        """Opens loops over the registers of a shape; gives the point inside and how many braces to close."""
        opened, i, j = 0, "0", "0"
        if shape.rows > 1:
            i, held = "i", self.family.rows_held(shape.rows)
            self.unrolled("i", held)
            opened += 1
        if shape.columns > 1:
            j, held = "j", self.family.columns_held(shape.columns)
            self.unrolled("j", held)
            opened += 1
        row = f"({self.family.row(i)})" if shape.rows > 1 else "0"
        column = f"({self.family.column(j)})" if shape.columns > 1 else "0"
        return Point(row, column, i, j), opened

    def inside(self, shape: Shape, point: Point) -> list[str]:
        """Tests that a register holds an element of the tile and not padding."""
        tests = []
        if shape.rows > 1 and self.family.row_padded(shape.rows):
            tests.append(f"{point.row} < {shape.rows}")
        if shape.columns > 1 and self.family.column_padded(shape.columns):
            tests.append(f"{point.column} < {shape.columns}")
        return tests

    def owner(self, shape: Shape) -> list[str]:
        """Tests that pick one of the lanes that hold the same element."""
        tests = []
        if shape.columns == 1:
            tests.append(self.family.first_of_row)
        if shape.rows == 1:
            if self.family.first_of_column:
                tests.append(self.family.first_of_column)
            if self.family.simdgroups > 1:
                tests.append("sg == 0")
        return tests

    def assign(self, name: str, shape: Shape, text: Callable[[Point], str]) -> None:
        point, opened = self.loops(shape)
        target = name + ("[i]" if shape.rows > 1 else "") + ("[j]" if shape.columns > 1 else "")
        self.line(f"{target} = {text(point)};")
        for _ in range(opened):
            self.close()

    def axis(self, value: Value) -> str:
        return self.elements.orientations.of(value)

    # ---- threadgroup memory ------------------------------------------------------------------------------------------

    def barrier(self, flags: str = "mem_threadgroup") -> None:
        scope = "simdgroup" if self.family.simdgroups == 1 else "threadgroup"
        self.line(f"{scope}_barrier(mem_flags::{flags});")
        if flags == "mem_threadgroup":
            self.unsettled.clear()

    def settle(self, start: int, end: int) -> None:
        """A barrier, if threads may still be reading this part of the room."""
        if any(low < end and start < high for low, high in self.unsettled):
            self.barrier()

    def take(self, size: int, what: str) -> tuple[int, int]:
        """Room for one more thing in the statement's threadgroup memory."""
        start, end = self.room_used, self.room_used + -(-size // 16) * 16
        if end > THREADGROUP_LIMIT:
            found = f"{self.kernel.name} needs {end} bytes of threadgroup memory for {what}, of {THREADGROUP_LIMIT}"
            raise DeviceLimit(f"{found}; use smaller blocks")
        self.room_bytes = max(self.room_bytes, end)
        self.room_used = end
        return start, end

    def statement(self, write: Callable[[], None]) -> None:
        """Writes a statement. Its part of the room follows that of the one before, so that one may be filled while the
        other is read; where the room ends it starts over."""
        start, count, depth, unsettled = len(self.lines), self.count, self.depth, list(self.unsettled)
        try:
            self.room_base = self.room_used
            self._statement(write)
        except DeviceLimit:
            if self.room_base == 0:
                raise
            del self.lines[start:]
            self.count, self.depth, self.unsettled = count, depth, unsettled
            self.elements.published.clear()
            self.room_base = self.room_used = 0
            self._statement(write)

    def _statement(self, write: Callable[[], None]) -> None:
        """Values that it reads in places of other lanes are put into threadgroup memory first."""
        elements = self.elements
        elements.wanted.clear()
        start, count, unsettled = len(self.lines), self.count, list(self.unsettled)
        write()
        if not elements.wanted:
            return
        del self.lines[start:]
        self.count, self.unsettled, self.room_used = count, unsettled, self.room_base
        self.publish(list(elements.wanted))
        elements.wanted.clear()
        write()
        self.close()
        elements.published.clear()

    def publish(self, values: list[Value]) -> None:
        self.open("")
        places = []
        for value in values:
            shape = self.elements.shape(value)
            size = shape.rows * shape.columns * value.dtype.bytes
            places.append((value, shape, *self.take(size, "an exchange between lanes")))
        self.settle(places[0][2], places[-1][3])
        for value, shape, start, _ in places:
            name, kind = f"room_{self.count}", type_of(value)
            self.count += 1
            self.line(f"threadgroup {kind} *{name} = (threadgroup {kind} *)(room + {start // 16});")
            point, opened = self.loops(shape)
            tests = self.inside(shape, point) + self.owner(shape)
            place = point.row if shape.rows > 1 else point.column
            if shape.kind == "tile":
                place = f"{point.row} * {shape.columns} + {point.column}"
            held = self.elements.names[value] + ("[i]" if shape.rows > 1 else "") + ("[j]" if shape.columns > 1 else "")
            self.line((f"if ({' && '.join(tests)}) " if tests else "") + f"{name}[{place}] = {held};")
            for _ in range(opened):
                self.close()
            self.elements.published[value] = name
        self.barrier()
        self.unsettled.append((places[0][2], places[-1][3]))
