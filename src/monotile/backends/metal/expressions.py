"""Expressions: the Metal text of one element of a value, or of a few adjacent elements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ... import ir
from ...errors import InternalError
from ...ir import Op, Value
from ...ir.intervals import chosen
from .analysis import covers
from .dialect import MetalDialect, bare
from .distribution import Layouts, Orientations
from .layout import COLUMN, ROW, FragmentLayout, Index, OrientedShape, TileLayout, oriented_shape, plus
from .preamble import Preamble, factor
from .threadgroup import ThreadgroupTile


@dataclass(frozen=True)
class Coordinate:
    """A row or a column. `index` are the registers that hold it, along the rows or columns (`axis`) of a layout. A
    uniform coordinate is the same for all lanes, and can be read from the `lane` that holds it."""

    text: str
    layout: TileLayout | None = None
    axis: str = ROW
    index: Index | None = None
    uniform: bool = False
    lane: str | None = None

    def in_registers(self, layout: TileLayout, axis: str) -> bool:
        """True if this lane's registers of that layout hold the coordinate."""
        return self.index is not None and self.lane is None and self.layout == layout and self.axis == axis

    def owner(self, layout: TileLayout, axis: str) -> tuple[Index, str] | None:
        """Return the register and the lane that hold a uniform coordinate."""
        if not self.uniform:
            return None
        if self.lane is not None and self.layout == layout and self.axis == axis and self.index is not None:
            return self.index, self.lane
        found = layout.row_owner(self.text) if axis == ROW else None
        return ((found[0],), found[1]) if found is not None else None


ZERO = Coordinate("0", uniform=True)


@dataclass(frozen=True)
class ElementIndex:
    row: Coordinate
    column: Coordinate

    def along(self, axis: str) -> Coordinate:
        return self.row if axis == ROW else self.column

    @property
    def registers(self) -> tuple[Index, Index]:
        return self.row.index or (), self.column.index or ()


@dataclass(frozen=True)
class HoistedLine:
    """A shuffle that must stand before the expression that uses it, where all lanes are active."""

    line: str
    by_column: bool  # depends on the column


@dataclass(frozen=True)
class Slice:
    """A load's tile: the pointer to its first element, and the test that the tile is in the tensor ("" if it is)."""

    pointer: str
    test: str


@dataclass
class Expressions:
    """Writes expressions. A value with registers has a name; other values are computed in place. An element that no
    register of this lane holds is read from threadgroup memory: `missing` collects the values that are not there yet,
    and the statement is written again once they are in `tiles`."""

    layouts: Layouts
    orientations: Orientations
    dialect: MetalDialect
    preamble: Preamble
    names: dict[Value, str] = field(default_factory=dict)
    tiles: dict[Value, ThreadgroupTile] = field(default_factory=dict)
    slices: dict[Op, Slice] = field(default_factory=dict)
    missing: list[Value] = field(default_factory=list)
    tiles_read: list[ThreadgroupTile] = field(default_factory=list)  # by the expressions of the current statement
    hoisted: list[HoistedLine] = field(default_factory=list)  # by the expressions of the current statement
    shuffle_count: int = 0

    def shape(self, value: Value) -> OrientedShape:
        return oriented_shape(value, self.orientations.of(value))

    def type(self, value: Value) -> str:
        return self.dialect.register_type(value.dtype)

    def take_hoisted(self) -> list[HoistedLine]:
        """Return the hoisted lines of the expressions so far, and forget them."""
        found = list(self.hoisted)
        self.hoisted.clear()
        return found

    def scalar(self, value: Value) -> str:
        return self.at(value, ElementIndex(ZERO, ZERO))

    def at(self, value: Value, index: ElementIndex, axis: str = COLUMN) -> str:
        """Return an element; `axis` is the coordinate that indexes a vector."""
        if value in self.names:
            return self._from_registers(value, index, axis)
        if self.tile_of(value) is not None:
            return self._from_threadgroup(value, self.shape(value), index, axis)
        op = value.op
        if op is None:
            raise InternalError("a block's parameter has no register")
        kind = op.kind
        if op.attrs.get("real"):
            return self.dialect.infinity(op.attrs["value"])
        if kind == "const":
            return self.dialect.number(op.attrs["value"], value.dtype)
        if kind == "dim":
            return self.preamble.length(op.attrs["tensor"], int(op.attrs["axis"]))
        if kind == "arange":
            return factor(index.along(axis).text) if value.shape[0] > 1 else "0"
        if kind in ir.SHAPE_ONLY or kind == "reduce":
            return self._reshaped(op, index, axis)
        if kind == "reshape":
            return self._rearranged(op, index, axis)
        if kind == "load":
            return self._load(op, index, axis)
        if kind == "gather":
            return self._gather(op, index, axis)
        known = chosen(op)
        if known is not None:
            return self.at(known, _broadcast(known, index), axis)
        operands = [self.at(v, _broadcast(v, index), axis) for v in op.operands]
        return self.dialect.elementwise(op, operands)

    def _reshaped(self, op: Op, index: ElementIndex, axis: str) -> str:
        (operand,) = op.operands
        if op.kind == "trans":
            return self.at(operand, ElementIndex(index.column, index.row))
        if op.kind == "reduce":  # over a length of 1
            along = index.along(axis)
            place = ElementIndex(ZERO, along) if op.attrs["axis"] == 0 else ElementIndex(along, ZERO)
            return self.folded_alone(op, self.at(operand, place))
        if op.kind == "expand" and len(operand.shape) == 1:
            return self.at(operand, index, ROW if op.attrs["position"] == 1 else COLUMN)
        return self.at(operand, _broadcast(operand, index), axis)

    def folded_alone(self, op: Op, text: str) -> str:
        """Return the reduction of a single element: a maximum or minimum ignores NaN."""
        fold, dtype = op.attrs["fold"], op.operands[0].dtype
        if fold == "sum" or not dtype.is_float:
            return text
        return self.dialect.combined(fold, dtype, self.dialect.identity(fold, dtype), text)

    def _rearranged(self, op: Op, index: ElementIndex, axis: str) -> str:
        """Return an element of a reshape, which another lane may hold."""
        (operand,), result = op.operands, op.result
        flat = index.along(axis).text
        if len(result.shape) == 2:
            flat = f"({index.row.text}) * {result.shape[1]} + {index.column.text}"
        row = column = Coordinate(flat)
        if len(operand.shape) == 2:
            row, column = Coordinate(f"({flat}) / {operand.shape[1]}"), Coordinate(f"({flat}) % {operand.shape[1]}")
        text = self.at(operand, _broadcast(operand, ElementIndex(row, column)), axis)
        return self._guarded(self._padding_tests(result, index, axis), text, self.dialect.zero(result.dtype))

    # ---- registers and threadgroup memory ----------------------------------------------------------------------------

    def register(self, value: Value, name: str, row: Index, column: Index) -> str:
        """Return a register of a value. A dimension along which a lane holds one element has no index."""
        shape, layout = self.shape(value), self.layouts.of(value)
        counts: tuple[int, ...] = (layout.rows_per_lane(shape.rows),) if shape.rows > 1 else ()
        index = row if shape.rows > 1 else ()
        if shape.columns > 1:
            counts, index = counts + layout.columns_per_lane(shape.columns), index + column
        texts = [f"[{i}]" if count > 1 else "" for i, count in zip(index, counts, strict=True)]
        if self.in_matrices(value):
            texts.insert(2, ".thread_elements()")
        return name + "".join(texts)

    def in_matrices(self, value: Value) -> bool:
        """True for float tiles in a fragment layout: they are simdgroup matrices."""
        fragments = isinstance(self.layouts.of(value), FragmentLayout)
        return self.shape(value).kind == "tile" and value.dtype.is_float and fragments

    def _from_registers(self, value: Value, index: ElementIndex, axis: str) -> str:
        name, shape, layout = self.names[value], self.shape(value), self.layouts.of(value)
        kind = shape.kind
        if kind == "scalar":
            return name
        row, column = index.row, index.column
        if len(value.shape) == 1:
            along = index.along(axis)
            row, column = (along, ZERO) if kind == ROW else (ZERO, along)
        needed = [(row, ROW)] * (shape.rows > 1) + [(column, COLUMN)] * (shape.columns > 1)
        if all(coordinate.in_registers(layout, along) for coordinate, along in needed):
            return self.register(value, name, row.index or (), column.index or ())
        owners = [coordinate.owner(layout, along) for coordinate, along in needed]
        if layout.simdgroups == 1 and all(owner is not None for owner in owners):
            return self._from_lane(value, name, shape, [owner for owner in owners if owner is not None])
        if value in self.tiles:
            return self._from_threadgroup(value, shape, index, axis)
        if value not in self.missing:
            self.missing.append(value)
        return "0"

    def _from_lane(self, value: Value, name: str, shape: OrientedShape, owners: list[tuple[Index, str]]) -> str:
        """Return an element that one lane holds and all lanes need."""
        row = owners[0][0] if shape.rows > 1 else ()
        column = owners[-1][0] if shape.columns > 1 else ()
        lane = "0"
        for _, text in owners:
            lane = plus(lane, text)
        self.shuffle_count += 1
        temporary = f"{name.rstrip('_0123456789')}_{'rc'[shape.columns > 1]}{self.shuffle_count}"
        source = f"{self.dialect.use('from_lane')}({self.register(value, name, row, column)}, {lane})"
        self.hoisted.append(HoistedLine(f"const {self.type(value)} {temporary} = {source};", shape.columns > 1))
        return temporary

    def tile_of(self, value: Value) -> ThreadgroupTile | None:
        """Return the tile in threadgroup memory that holds a value, alone or as the first columns of a wider one."""
        found = self.tiles.get(value)
        if found is None and value.kind == "load":
            found = next((tile for other, tile in self.tiles.items() if covers(other, value)), None)
        return found

    def read_tile(self, tile: ThreadgroupTile) -> None:
        """Record that the statement reads a tile, which may take a barrier."""
        if tile not in self.tiles_read:
            self.tiles_read.append(tile)

    def _from_threadgroup(self, value: Value, shape: OrientedShape, index: ElementIndex, axis: str) -> str:
        """Return an element of a tile in threadgroup memory, where there is no padding."""
        tile, layout = self.tile_of(value), self.layouts.of(value)
        assert tile is not None
        self.read_tile(tile)
        if len(value.shape) == 1:
            sides = [(index.along(axis), value.shape[0])]
        else:
            sides = [(index.row, shape.rows)] * (shape.rows > 1) + [(index.column, shape.columns)] * (shape.columns > 1)
        offset = sides[0][0].text
        if len(sides) == 2:
            offset = f"({offset}) * {tile.stride} + {sides[1][0].text}"
        elif value not in self.tiles and shape.columns == 1:  # the first column of a wider tile
            offset = f"({offset}) * {tile.stride}"
        padded = [(at.text, length) for at, length in sides if _is_padded((layout, at.layout), length)]
        text = self.dialect.from_memory(f"{tile.name}[{offset}]", value.dtype)
        return self._guarded([f"{at} < {length}" for at, length in padded], text, self.dialect.zero(value.dtype))

    # ---- device memory -----------------------------------------------------------------------------------------------

    def _load(self, op: Op, index: ElementIndex, axis: str) -> str:
        pointer, offset, tests = self.address(op, ir.starts(op), index, axis)
        tests = [*self._padding_tests(op.result, index, axis), *tests]
        text = self.dialect.from_memory(f"{pointer}[{offset}]", op.result.dtype)
        return self._guarded(tests, text, self.dialect.zero(op.result.dtype))

    def _gather(self, op: Op, index: ElementIndex, axis: str) -> str:
        element, tests = self.scattered(op, index, axis)
        tests = [*self._padding_tests(op.result, index, axis), *tests]
        text = self.dialect.from_memory(element, op.result.dtype)
        return self._guarded(tests, text, self.dialect.zero(op.result.dtype))

    def scattered(self, op: Op, index: ElementIndex, axis: str) -> tuple[str, list[str]]:
        """Return the place in a tensor that a gather or scatter gives an element, and the tests that it is inside."""
        tensor = op.attrs["tensor"]
        checked = op.attrs.get("checked", (True,) * len(op.operands))
        terms, tests = [], []
        for n, position_value in enumerate(ir.starts(op)):
            position = bare(self.at(position_value, _broadcast(position_value, index), axis))
            terms.append(self._offset(op, n, position))
            if checked[n]:
                tests.append(_in_range(position, self._length(op, n), position_value))
        return f"{self.preamble.pointer(tensor)}[{' + '.join(t for t in terms if t) or '0'}]", tests

    def _guarded(self, tests: list[str], text: str, otherwise: str) -> str:
        return f"({' && '.join(tests)} ? {text} : {otherwise})" if tests else text

    def _padding_tests(self, value: Value, index: ElementIndex, axis: str) -> list[str]:
        """Return the tests that a register does not hold padding, for which nothing may be read."""
        if not value.shape:
            return []
        if len(value.shape) == 1:
            sides = [(index.along(axis), value.shape[0])]
        else:
            sides = [(index.row, value.shape[0]), (index.column, value.shape[1])]
        tests = []
        for coordinate, length in sides:
            layout = coordinate.layout
            if length == 1 or layout is None or coordinate.lane is not None:
                continue
            padded = layout.row_padded(length) if coordinate.axis == ROW else layout.column_padded(length)
            if padded:
                tests.append(f"{coordinate.text} < {length}")
        return tests

    def slice_start(self, op: Op, starts: tuple[Value, ...]) -> tuple[str, list[str]]:
        """Return the offset of a slice's first element, and the tests that the positions which are the same for all of
        its elements are in the tensor."""
        terms, tests = [], []
        for n, (start, extent) in enumerate(zip(starts, op.attrs["extents"], strict=True)):
            position = bare(self.scalar(start))
            terms.append(self._offset(op, n, position))
            if extent is None and op.attrs["checked"][n]:
                tests.append(_in_range(position, self._length(op, n), start))
        return " + ".join(t for t in terms if t), tests

    def _length(self, op: Op, axis: int) -> str:
        """Return the length of a tensor or view, which positions of an access are compared with."""
        view = ir.view_of(op, axis)
        return self.preamble.length(op.attrs["tensor"], axis) if view is None else bare(self.scalar(view[1]))

    def _offset(self, op: Op, axis: int, position: str) -> str:
        """Return the contribution of a position to an element's offset, with that of the view's origin."""
        view, tensor = ir.view_of(op, axis), op.attrs["tensor"]
        positions = [position] if view is None else [bare(self.scalar(view[0])), position]
        return " + ".join(t for p in positions if (t := self.preamble.offset(tensor, axis, p)))

    def address(self, op: Op, starts: tuple[Value, ...], index: ElementIndex, axis: str) -> tuple[str, str, list[str]]:
        """Return the pointer to a slice, the offset of an element in it, and the tests that it is in the tensor."""
        tensor = op.attrs["tensor"]
        coordinates = [index.row.text, index.column.text]
        if sum(extent is not None for extent in op.attrs["extents"]) == 1:
            coordinates = [index.along(axis).text]
        known = self.slices.get(op)
        if known is not None:
            pointer, offset, tests = known.pointer, "", [known.test] if known.test else []
        else:
            offset, tests = self.slice_start(op, starts)
            pointer = self.preamble.pointer(tensor)
        terms = [offset]
        for n, (start, extent) in enumerate(zip(starts, op.attrs["extents"], strict=True)):
            if extent is None:
                continue
            within = coordinates.pop(0)
            within = within if extent > 1 else "0"
            terms.append(self.preamble.tile_offset(tensor, n, within))
            if op.attrs["checked"][n]:
                position = plus(bare(self.scalar(start)), within)
                tests.append(_in_range(position, self._length(op, n), start))
        return pointer, " + ".join(t for t in terms if t) or "0", tests

    # ---- vectors -----------------------------------------------------------------------------------------------------

    def vector(self, value: Value, index: ElementIndex, width: int) -> str | None:
        """Return `width` columns of a tile as one vector; None where they are not adjacent in memory."""
        op, kind = value.op, f"{self.type(value)}{width}"
        if self.dialect.as_bits(value.dtype):
            return None
        if not value.shape or (op is not None and op.kind == "broadcast" and not op.operands[0].shape):
            return f"{kind}({self.scalar(value)})"
        if value in self.names or value in self.tiles or op is None or value.dtype.name == "bool":
            return None
        tile = self.tile_of(value)
        if tile is not None:  # of a wider value: rows begin at multiples of 16 bytes
            self.read_tile(tile)
            tests, offset = self._padding_tests(value, index, COLUMN), f"({index.row.text}) * {tile.stride}"
            text = f"*(threadgroup const {kind} *)({tile.name} + {plus(offset, index.column.text)})"
            return self._guarded(tests, text, f"{kind}({self.dialect.zero(value.dtype)})")
        if op.kind == "load" and len(value.shape) == 2 and value.shape[1] > 1:
            last = tile_axes(op)[1]
            if op.attrs["tensor"].unit != last or op.attrs["checked"][last]:
                return None
            pointer, offset, tests = self.address(op, ir.starts(op), index, COLUMN)
            tests = [*self._padding_tests(value, index, COLUMN), *tests]
            text = f"{kind}(*(device const packed_{kind} *)({plus(pointer, offset)}))"
            return self._guarded(tests, text, f"{kind}({self.dialect.zero(value.dtype)})")
        if op.kind == "where" and op.operands[0].shape[1:] in ((), (1,)):
            parts = [self.vector(v, _broadcast(v, index), width) for v in op.operands[1:]]
            if None in parts:
                return None
            return f"({self.at(op.operands[0], index)} ? {parts[0]} : {parts[1]})"
        if op.kind == "cast" and value.dtype.is_float:
            inner = self.vector(op.operands[0], index, width)
            return None if inner is None or not op.operands[0].dtype.is_float else f"{kind}({inner})"
        return None


def tile_axes(op: Op) -> list[int]:
    """Return the axes of the tensor along which an access has an extent."""
    return [n for n, extent in enumerate(op.attrs["extents"]) if extent is not None]


def _broadcast(operand: Value, index: ElementIndex) -> ElementIndex:
    """Index a dimension of length 1 at 0."""
    if len(operand.shape) == 2:
        if operand.shape[0] == 1:
            index = replace(index, row=ZERO)
        if operand.shape[1] == 1:
            index = replace(index, column=ZERO)
    return index


def _in_range(position: str, length: str, index: Value) -> str:
    """Return the test 0 <= position < length, as one unsigned comparison."""
    kind = "ulong" if index.dtype.name == "int64" else "uint"
    return f"{kind}({position}) < {kind}({length})"


def _is_padded(layouts: tuple[TileLayout | None, ...], length: int) -> bool:
    """True if a coordinate of one of the layouts may be beyond a length."""
    return any(each is not None and (each.row_padded(length) or each.column_padded(length)) for each in layouts)
