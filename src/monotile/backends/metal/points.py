"""One element of a value, or a few neighbours, as text at a point of a tile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ... import ir
from ...dtypes import DType
from ...errors import InternalError
from ...ir import Op, Value
from ...ir.intervals import chosen
from .assign import Families, Orientations
from .layout import COLUMN, ROW, Family, Fragments, Index, Shape, plus, shape_of
from .msl import TYPES, elementwise, number, type_of


@dataclass(frozen=True)
class Coordinate:
    """A row or a column. `index` are the registers that hold it, of the rows or columns (`axis`) of a family. A
    coordinate that is the same for all lanes may be asked of another lane: `lane` is the one that holds it."""

    text: str
    family: Family | None = None
    axis: str = ROW
    index: Index | None = None
    uniform: bool = False
    lane: str | None = None

    def held(self, family: Family, axis: str) -> bool:
        return self.index is not None and self.lane is None and self.family == family and self.axis == axis

    def place(self, family: Family, axis: str) -> tuple[Index, str] | None:
        """The register and lane of a uniform coordinate."""
        if not self.uniform:
            return None
        if self.lane is not None and self.family == family and self.axis == axis and self.index is not None:
            return self.index, self.lane
        found = family.row_place(self.text) if axis == ROW else None
        return ((found[0],), found[1]) if found is not None else None


ZERO = Coordinate("0", uniform=True)


@dataclass(frozen=True)
class Point:
    row: Coordinate
    column: Coordinate

    def along(self, axis: str) -> Coordinate:
        return self.row if axis == ROW else self.column


@dataclass(frozen=True)
class Room:
    """A tile in threadgroup memory: its name, its bytes, and the elements from one row to the next."""

    name: str
    start: int
    end: int
    width: int


@dataclass(frozen=True)
class Hoisted:
    """A line that must stand before what uses it, where all lanes are together."""

    line: str
    by_column: bool  # whether it depends on the column


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
        return f"long({position})" if stride == "1" else f"{_factor(position)} * {stride}"

    def step(self, dimension: int, position: str) -> str:
        """The same inside a tile, whose constant strides are small."""
        stride = self.strides[dimension]
        if position == "0" or stride == "1":
            return position if position != "0" else ""
        return f"{_factor(position)} * {stride.removesuffix('L')}"


def _factor(position: str) -> str:
    return position if position.isidentifier() or position.isdigit() else f"({position})"


@dataclass
class Elements:
    """Texts of elements. Values with registers have names; the others are computed on the spot. What is asked for at a
    place where no register of this lane holds it is read from threadgroup memory: `wanted` gathers such values, and the
    statement is written again once they are `rooms`."""

    families: Families
    orientations: Orientations
    inlined: set[Value]
    names: dict[Value, str] = field(default_factory=dict)
    rooms: dict[Value, Room] = field(default_factory=dict)
    wanted: list[Value] = field(default_factory=list)
    touched: list[Room] = field(default_factory=list)
    hoisted: list[Hoisted] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    tensors: dict[int, TensorText] = field(default_factory=dict)
    slices: dict[Op, tuple[str, str]] = field(default_factory=dict)  # pointer to a load's tile, test that it is there
    count: int = 0
    bfloat: bool = True  # whether the language has it; else memory holds its bits and registers hold floats

    def memory_type(self, dtype: DType) -> str:
        return "ushort" if self._as_bits(dtype) else TYPES[dtype.name]

    def fetched(self, text: str, dtype: DType) -> str:
        """What memory holds, as a register holds it."""
        return f"widened({text})" if self._as_bits(dtype) else text

    def kept(self, text: str, dtype: DType) -> str:
        """What a register holds, as memory holds it."""
        return f"narrowed({text})" if self._as_bits(dtype) else text

    def _as_bits(self, dtype: DType) -> bool:
        return dtype.name == "bfloat16" and not self.bfloat

    def shape(self, value: Value) -> Shape:
        return shape_of(value, self.orientations.of(value))

    def scalar(self, value: Value) -> str:
        return self.at(value, Point(ZERO, ZERO))

    def at(self, value: Value, point: Point, axis: str = COLUMN) -> str:
        """`axis` says along what a value of rank 1 is read."""
        if value in self.names:
            return self._held(value, point, axis)
        if value in self.rooms:
            return self._elsewhere(value, self.shape(value), point, axis)
        op = value.op
        if op is None:
            raise InternalError("a block's parameter has no register")
        kind = op.kind
        if kind == "const":
            return number(op.attrs["value"], value.dtype)
        if kind == "dim":
            return self.tensors[op.attrs["tensor"].index].dims[int(op.attrs["axis"])]
        if kind == "arange":
            return _grouped(point.along(axis).text) if value.shape[0] > 1 else "0"
        if kind in ir.SHAPE_ONLY or kind == "reduce":
            return self._reshaped(op, point, axis)
        if kind == "load":
            return self.load(op, point, axis)
        if kind == "gather":
            return self.gather(op, point, axis)
        known = chosen(op)
        if known is not None:
            return self.at(known, _broadcast(known, point), axis)
        operands = [self.at(v, _broadcast(v, point), axis) for v in op.operands]
        return elementwise(op, operands, self.helpers)

    def _reshaped(self, op: Op, point: Point, axis: str) -> str:
        (operand,) = op.operands
        if op.kind == "trans":
            return self.at(operand, Point(point.column, point.row))
        if op.kind == "reduce":  # of one element
            along = point.along(axis)
            return self.at(operand, Point(ZERO, along) if op.attrs["axis"] == 0 else Point(along, ZERO))
        if op.kind == "expand" and len(operand.shape) == 1:
            return self.at(operand, point, ROW if op.attrs["position"] == 1 else COLUMN)
        return self.at(operand, _broadcast(operand, point), axis)

    # ---- registers ---------------------------------------------------------------------------------------------------

    def reference(self, value: Value, name: str, row: Index, column: Index) -> str:
        """A register of a value. Where only one is held along a side it has no index there."""
        shape, family = self.shape(value), self.families.of(value)
        sizes: tuple[int, ...] = (family.rows_held(shape.rows),) if shape.rows > 1 else ()
        index = row if shape.rows > 1 else ()
        if shape.columns > 1:
            sizes, index = sizes + family.columns_held(shape.columns), index + column
        texts = [f"[{i}]" if size > 1 else "" for i, size in zip(index, sizes, strict=True)]
        if self.in_matrices(value):
            texts.insert(2, ".thread_elements()")
        return name + "".join(texts)

    def in_matrices(self, value: Value) -> bool:
        """Float tiles in fragments are held as 8x8 matrices."""
        return (
            self.shape(value).kind == "tile" and value.dtype.is_float and isinstance(self.families.of(value), Fragments)
        )

    def _held(self, value: Value, point: Point, axis: str) -> str:
        name, shape, family = self.names[value], self.shape(value), self.families.of(value)
        kind = shape.kind
        if kind == "scalar":
            return name
        if len(value.shape) == 1:
            along = point.along(axis)
            row, column = (along, ZERO) if kind == ROW else (ZERO, along)
        else:
            row, column = point.row, point.column
        needs = [(row, ROW)] * (shape.rows > 1) + [(column, COLUMN)] * (shape.columns > 1)
        if all(c.held(family, a) for c, a in needs):
            return self.reference(value, name, row.index or (), column.index or ())
        places = [c.place(family, a) for c, a in needs]
        if family.simdgroups == 1 and all(p is not None for p in places):
            return self._from_lane(value, name, shape, [p for p in places if p is not None])
        if value in self.rooms:
            return self._elsewhere(value, shape, point, axis)
        if value not in self.wanted:
            self.wanted.append(value)
        return "0"

    def _from_lane(self, value: Value, name: str, shape: Shape, places: list[tuple[Index, str]]) -> str:
        """An element that one lane holds and all want."""
        row = places[0][0] if shape.rows > 1 else ()
        column = places[-1][0] if shape.columns > 1 else ()
        lane = "0"
        for _, text in places:
            lane = plus(lane, text)
        self.helpers.add("from_lane")
        self.count += 1
        temporary = f"{name.rstrip('_0123456789')}_{'rc'[shape.columns > 1]}{self.count}"
        source = self.reference(value, name, row, column)
        line = f"const {type_of(value)} {temporary} = from_lane({source}, {lane});"
        self.hoisted.append(Hoisted(line, shape.columns > 1))
        return temporary

    def _elsewhere(self, value: Value, shape: Shape, point: Point, axis: str) -> str:
        """From threadgroup memory, where padding has no place."""
        room, family = self.rooms[value], self.families.of(value)
        if room not in self.touched:
            self.touched.append(room)
        if len(value.shape) == 1:
            sides = [(point.along(axis).text, value.shape[0])]
        else:
            sides = [(point.row.text, shape.rows)] * (shape.rows > 1)
            sides += [(point.column.text, shape.columns)] * (shape.columns > 1)
        place = f"({sides[0][0]}) * {room.width} + {sides[1][0]}" if len(sides) == 2 else sides[0][0]
        padded = [s for s in sides if family.row_padded(s[1]) or family.column_padded(s[1])]
        tests = " && ".join(f"{at} < {side}" for at, side in padded)
        text = self.fetched(f"{room.name}[{place}]", value.dtype)
        return f"({tests} ? {text} : {type_of(value)}(0))" if tests else text

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op, point: Point, axis: str) -> str:
        pointer, offset, inside = self.place(op, op.operands, point, axis)
        inside = [*self._padding(op.result, point, axis), *inside]
        text = self.fetched(f"{pointer}[{offset}]", op.result.dtype)
        return f"({' && '.join(inside)} ? {text} : {TYPES[op.result.dtype.name]}(0))" if inside else text

    def _padding(self, value: Value, point: Point, axis: str) -> list[str]:
        """A register may hold padding, for which nothing must be read."""
        if not value.shape:
            return []
        if len(value.shape) == 1:
            sides = [(point.along(axis), value.shape[0])]
        else:
            sides = [(point.row, value.shape[0]), (point.column, value.shape[1])]
        tests = []
        for c, side in sides:
            if side == 1 or c.family is None or c.lane is not None:
                continue
            padded = c.family.row_padded(side) if c.axis == ROW else c.family.column_padded(side)
            if padded:
                tests.append(f"{c.text} < {side}")
        return tests

    def start(self, op: Op, starts: tuple[Value, ...]) -> tuple[str, list[str]]:
        """The offset of a slice's first element, and tests that the positions which are the same for all of it are in
        the tensor."""
        tensor = self.tensors[op.attrs["tensor"].index]
        terms, tests = [], []
        for n, (start, extent) in enumerate(zip(starts, op.attrs["extents"], strict=True)):
            position = bare(self.scalar(start))
            terms.append(tensor.term(n, position))
            if extent is None and op.attrs["checked"][n]:
                tests.append(_within(position, tensor.dims[n], start))
        return " + ".join(t for t in terms if t), tests

    def place(self, op: Op, starts: tuple[Value, ...], point: Point, axis: str) -> tuple[str, str, list[str]]:
        """The pointer to a slice, the offset of an element in it, and the tests that it is inside the tensor."""
        tensor = self.tensors[op.attrs["tensor"].index]
        coordinates = [point.row.text, point.column.text]
        if sum(extent is not None for extent in op.attrs["extents"]) == 1:
            coordinates = [point.along(axis).text]
        pointer, there = self.slices.get(op, ("", ""))
        offset, tests = ("", [there] if there else []) if pointer else self.start(op, starts)
        pointer = pointer or tensor.name
        terms = [offset]
        for n, (start, extent) in enumerate(zip(starts, op.attrs["extents"], strict=True)):
            if extent is None:
                continue
            within = coordinates.pop(0)
            within = within if extent > 1 else "0"
            terms.append(tensor.step(n, within))
            if op.attrs["checked"][n]:
                tests.append(_within(plus(bare(self.scalar(start)), within), tensor.dims[n], start))
        return pointer, " + ".join(t for t in terms if t) or "0", tests

    def gather(self, op: Op, point: Point, axis: str) -> str:
        tensor = self.tensors[op.attrs["tensor"].index]
        checked = op.attrs.get("checked", (True,) * len(op.operands))
        terms, tests = [], []
        for n, index in enumerate(op.operands):
            position = bare(self.at(index, _broadcast(index, point), axis))
            terms.append(tensor.term(n, position))
            if checked[n]:
                tests.append(_within(position, tensor.dims[n], index))
        tests = [*self._padding(op.result, point, axis), *tests]
        text = self.fetched(f"{tensor.name}[{' + '.join(t for t in terms if t) or '0'}]", op.result.dtype)
        return f"({' && '.join(tests)} ? {text} : {type_of(op.result)}(0))" if tests else text

    # ---- neighbours --------------------------------------------------------------------------------------------------

    def vector(self, value: Value, point: Point, width: int) -> str | None:
        """`width` columns of a tile from a point on, as one vector; None where they do not lie side by side."""
        op, kind = value.op, f"{type_of(value)}{width}"
        if self._as_bits(value.dtype):
            return None
        if not value.shape or (op is not None and op.kind == "broadcast" and not op.operands[0].shape):
            return f"{kind}({self.scalar(value)})"
        if value in self.names or value in self.rooms or op is None or value.dtype.name == "bool":
            return None
        if op.kind == "load" and len(value.shape) == 2 and value.shape[1] > 1:
            dims = [n for n, extent in enumerate(op.attrs["extents"]) if extent is not None]
            if op.attrs["tensor"].unit != dims[1] or op.attrs["checked"][dims[1]]:
                return None
            pointer, offset, inside = self.place(op, op.operands, point, COLUMN)
            inside = [*self._padding(value, point, COLUMN), *inside]
            text = f"{kind}(*(device const packed_{kind} *)({plus(pointer, offset)}))"
            return f"({' && '.join(inside)} ? {text} : {kind}({type_of(value)}(0)))" if inside else text
        if op.kind == "where" and op.operands[0].shape[1:] in ((), (1,)):
            parts = [self.vector(v, _broadcast(v, point), width) for v in op.operands[1:]]
            if None in parts:
                return None
            return f"({self.at(op.operands[0], point)} ? {parts[0]} : {parts[1]})"
        if op.kind == "cast" and value.dtype.is_float:
            inner = self.vector(op.operands[0], point, width)
            return None if inner is None or not op.operands[0].dtype.is_float else f"{kind}({inner})"
        return None


def _broadcast(operand: Value, point: Point) -> Point:
    """A side of 1 is read at 0."""
    if len(operand.shape) == 2:
        if operand.shape[0] == 1:
            point = replace(point, row=ZERO)
        if operand.shape[1] == 1:
            point = replace(point, column=ZERO)
    return point


def _within(position: str, length: str, index: Value) -> str:
    kind = "ulong" if index.dtype.name == "int64" else "uint"
    return f"{kind}({position}) < {kind}({length})"


def _grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def bare(text: str) -> str:
    """Without a pair of brackets around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for n, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and n < len(text) - 1:
            return text
    return text[1:-1]
