"""One element of a value, as text, at a point of a tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import ir
from ...errors import InternalError
from ...ir import Op, Value
from .layout import COLUMN, ROW, Family, Shape, shape_of
from .orient import Orientations
from .words import TYPES, elementwise, number, type_of


@dataclass(frozen=True)
class Point:
    """A row and a column; `i` and `j` are the registers that hold them, or None where it is just a place."""

    row: str
    column: str
    i: str | None = None
    j: str | None = None

    def swapped(self) -> Point:
        return Point(self.column, self.row)


class Elements:
    """Texts of elements. Values with registers have names; the others are computed on the spot. What is asked for at a
    place where no register of this lane holds it is read from threadgroup memory: `wanted` gathers such values, and the
    statement is written again once they are `published`."""

    def __init__(self, family: Family, orientations: Orientations, inlined: set[Value]) -> None:
        self.family, self.orientations, self.inlined = family, orientations, inlined
        self.names: dict[Value, str] = {}
        self.published: dict[Value, str] = {}
        self.wanted: list[Value] = []
        self.helpers: set[str] = set()
        self.tensors: dict[int, TensorText] = {}

    def shape(self, value: Value) -> Shape:
        return shape_of(value, self.orientations.of(value))

    def scalar(self, value: Value) -> str:
        return self.at(value, Point("0", "0", "0", "0"))

    def at(self, value: Value, point: Point, axis: str = COLUMN) -> str:
        """`axis` says along what a value of rank 1 is read."""
        if value in self.names:
            return self._held(value, point, axis)
        op = value.op
        if op is None:
            raise InternalError("a block's parameter has no register")
        kind = op.kind
        if kind == "const":
            return number(op.attrs["value"], value.dtype)
        if kind == "dim":
            lengths = self.tensors[op.attrs["tensor"].index].dims
            return lengths[int(op.attrs["axis"])]
        if kind == "arange":
            if value.shape[0] == 1:
                return "0"
            return f"({point.row if axis == ROW else point.column})"
        if kind in ir.SHAPE_ONLY:
            return self._reshaped(op, point, axis)
        if kind == "load":
            return self.load(op, point, axis)
        if kind == "gather":
            return self.gather(op, point, axis)
        operands = [self.at(v, self._broadcast(v, point, axis), axis) for v in op.operands]
        return elementwise(op, operands, self.helpers)

    def _broadcast(self, operand: Value, point: Point, axis: str) -> Point:
        """A side of 1 is read at 0."""
        if len(operand.shape) == 2:
            if operand.shape[0] == 1:
                point = replace(point, row="0")
            if operand.shape[1] == 1:
                point = replace(point, column="0")
        return point

    def _reshaped(self, op: Op, point: Point, axis: str) -> str:
        (operand,) = op.operands
        if op.kind == "trans":
            return self.at(operand, point.swapped())
        if op.kind == "expand" and len(operand.shape) == 1:
            return self.at(operand, point, ROW if op.attrs["position"] == 1 else COLUMN)
        return self.at(operand, self._broadcast(operand, point, axis), axis)

    def _held(self, value: Value, point: Point, axis: str) -> str:
        name, shape = self.names[value], self.shape(value)
        kind = shape.kind
        if kind == "scalar":
            return name
        turned = len(value.shape) == 1 and self.orientations.of(value) != axis
        need_i, need_j = kind in ("tile", ROW), kind in ("tile", COLUMN)
        if not turned and not (need_i and point.i is None) and not (need_j and point.j is None):
            return name + (f"[{point.i}]" if need_i else "") + (f"[{point.j}]" if need_j else "")
        if value not in self.published:
            if value not in self.wanted:
                self.wanted.append(value)
            return "0"
        return self._elsewhere(value, shape, point, axis)

    def _elsewhere(self, value: Value, shape: Shape, point: Point, axis: str) -> str:
        """From threadgroup memory, where padding has no place."""
        room, kind = self.published[value], shape.kind
        if len(value.shape) == 1:
            sides = [(point.row if axis == ROW else point.column, value.shape[0])]
        else:
            sides = [(point.row, shape.rows)] * (shape.rows > 1) + [(point.column, shape.columns)] * (shape.columns > 1)
        place = f"({sides[0][0]}) * {shape.columns} + {sides[1][0]}" if kind == "tile" else sides[0][0]
        padded = [s for s in sides if self.family.row_padded(s[1]) or self.family.column_padded(s[1])]
        tests = " && ".join(f"{at} < {side}" for at, side in padded)
        return f"({tests} ? {room}[{place}] : {type_of(value)}(0))" if tests else f"{room}[{place}]"

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op, point: Point, axis: str) -> str:
        address, inside = self.place(op, op.operands, point, axis)
        inside = " && ".join([*self._held_tests(op.result, point, axis), *([inside] if inside else [])])
        text = self.tensors[op.attrs["tensor"].index].name + f"[{address}]"
        return f"({inside} ? {text} : {TYPES[op.result.dtype.name]}(0))" if inside else text

    def _held_tests(self, value: Value, point: Point, axis: str) -> list[str]:
        """A register may hold padding, for which nothing must be read."""
        if not value.shape:
            return []
        rows, columns = value.shape if len(value.shape) == 2 else (1, 1)
        if len(value.shape) == 1:
            rows, columns = (value.shape[0], 1) if axis == ROW else (1, value.shape[0])
        tests = []
        if rows > 1 and point.i is not None and self.family.row_padded(rows):
            tests.append(f"{point.row} < {rows}")
        if columns > 1 and point.j is not None and self.family.column_padded(columns):
            tests.append(f"{point.column} < {columns}")
        return tests

    def place(self, op: Op, starts: tuple[Value, ...], point: Point, axis: str) -> tuple[str, str]:
        """The offset of an element of a slice, and the text of the test that it is inside the tensor."""
        tensor = self.tensors[op.attrs["tensor"].index]
        coordinates = [point.row, point.column]
        if sum(extent is not None for extent in op.attrs["extents"]) == 1:
            coordinates = [point.row if axis == ROW else point.column]
        terms, tests = [], []
        for n, (start, extent) in enumerate(zip(starts, op.attrs["extents"], strict=True)):
            position = self.scalar(start)
            if extent is not None:
                within = coordinates.pop(0) if extent > 1 else (coordinates.pop(0), "0")[1]
                position = within if position == "0" else position if within == "0" else f"{position} + {within}"
            terms.append(tensor.term(n, position))
            if op.attrs["checked"][n]:
                tests.append(
                    f"uint({position}) < uint({tensor.dims[n]})"
                    if start.dtype.name != "int64"
                    else f"ulong({position}) < ulong({tensor.dims[n]})"
                )
        return " + ".join(t for t in terms if t) or "0", " && ".join(tests)

    def gather(self, op: Op, point: Point, axis: str) -> str:
        tensor = self.tensors[op.attrs["tensor"].index]
        checked = op.attrs.get("checked", (True,) * len(op.operands))
        terms, tests = [], []
        for n, index in enumerate(op.operands):
            position = self.at(index, self._broadcast(index, point, axis), axis)
            terms.append(tensor.term(n, position))
            if checked[n]:
                wide = index.dtype.name == "int64"
                tests.append(
                    f"{'ulong' if wide else 'uint'}({position}) < {'ulong' if wide else 'uint'}({tensor.dims[n]})"
                )
        tests = [*self._held_tests(op.result, point, axis), *tests]
        text = f"{tensor.name}[{' + '.join(t for t in terms if t) or '0'}]"
        return f"({' && '.join(tests)} ? {text} : {type_of(op.result)}(0))" if tests else text


@dataclass(frozen=True)
class TensorText:
    """A tensor parameter: its pointer, and its lengths and strides as text."""

    name: str
    dims: tuple[str, ...]
    strides: tuple[str, ...]

    def term(self, dimension: int, position: str) -> str:
        """A position's part of an element's offset; 64 bits, since a tensor may be large."""
        if position == "0":
            return ""
        stride = self.strides[dimension]
        return f"long({position})" + ("" if stride == "1" else f" * {stride}")
