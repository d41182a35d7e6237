"""Access to slices of a kernel's tensors.

A `Tile` is the slice of a load or store: a base pointer plus, for each of its dimensions, axis, stride and bounds.
Accesses come in two forms, inside (no checks) and edge (lanes and rows outside the tensor read zero and are not
written).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ...ir import Kernel, Op, Spread, Tensor, Value, spreads, view_of
from ...ir import starts as ir_starts
from ...ir.fields import Fields
from .axes import Axes, Axis, tile_of
from .emit import Emitter, Index, Reg
from .point import Point
from .spread_reads import read_fields, read_spread, spread_position
from .strided import Positions, Walk, places_in_walk, read_walk, walk_along, write_walk
from .tile_rows import Rows, StridedRows, TableRows
from .vectors import (
    BYTES,
    STORED,
    decode,
    encode,
    gather,
    gather_at,
    lane_mask,
    masked_load,
    masked_store,
    scatter,
    scatter_at,
)

FAR = 2**33  # beyond every position of a tensor


@dataclass
class Dim:
    """One dimension of a tile."""

    axis: Axis | None
    extent: int
    stride: Index
    start: Index
    length: Index
    checked: bool
    wide: bool = False  # the start may be beyond int32
    spread: Spread | None = None  # how positions of the tile become positions in memory


@dataclass
class Tile:
    tensor: Tensor
    base: str
    dims: list[Dim]
    reachable: str | None  # condition: the scalar positions are inside the tensor; None if they always are
    inside: str | None  # condition: the whole tile is; None if it always is
    table: TableRows | None = None  # the addresses of its rows, where these lie anywhere

    @property
    def element(self) -> str:
        return STORED[self.tensor.dtype.name]

    @property
    def rows(self) -> Rows:
        """Return where the rows of a tile of two dimensions begin."""
        return self.table or StridedRows(self.base, self.dims[0].stride, self.element)

    def bytes_along(self, axis: Axis | None) -> int:
        """Return the bytes of memory that the tile is read from along an axis, if it is contiguous there."""
        return next((d.extent for d in self.dims if d.axis is axis), 1) * BYTES[self.element]


class Tensors:
    """Read and write slices of the kernel's tensors."""

    def __init__(self, emitter: Emitter, axes: Axes, kernel: Kernel) -> None:
        self.e, self.axes = emitter, axes
        self.pointer: dict[int, str] = {}
        self.lengths: dict[int, list[Index]] = {}
        self.strides: dict[int, list[Index]] = {}
        self.tiles: dict[Op, Tile] = {}
        self.next_rows: dict[Op, Rows] = {}  # of tiles whose next place was looked up
        self.scalar_word = len(kernel.tensors)
        word = self.scalar_word + len(kernel.scalars)
        for tensor in kernel.tensors:
            self.pointer[tensor.index] = self.argument(tensor.index, "ptr")
            known, rank = tensor.strides, tensor.rank
            self.lengths[tensor.index] = [
                d if isinstance(d, int) else self.argument(word + n) for n, d in enumerate(tensor.dims)
            ]
            self.strides[tensor.index] = [
                known[n] if known[n] is not None else self.argument(word + rank + n)  # type: ignore[misc]
                for n in range(rank)
            ]
            word += 2 * rank

    def argument(self, word: int, type_: str = "i64") -> str:
        return self.e.load(self.e.element("%args", word, "i64"), type_, 8)

    def spans(self, op: Op, index: Callable[[Value], Index]) -> list[tuple[Index, Index]]:
        """Return origin and length of what an access may touch in each dimension: of the tensor, or of a view."""
        views = [view_of(op, n) for n in range(op.attrs["tensor"].rank)]
        lengths = self.lengths[op.attrs["tensor"].index]
        return [(0, n) if v is None else (index(v[0]), index(v[1])) for v, n in zip(views, lengths, strict=True)]

    def define(self, op: Op, starts: list[Index], spans: list[tuple[Index, Index]]) -> None:
        """Emit base address and bounds of the tile of a load or store."""
        e, tensor, positions = self.e, op.attrs["tensor"], ir_starts(op)
        value = op.operands[0] if op.kind == "store" else op.result
        axes = iter(self.axes.dims(value))
        offset: Index = 0
        dims, single, whole = [], [], []
        for n, (start, extent, checked, spread) in enumerate(
            zip(starts, op.attrs["extents"], op.attrs["checked"], spreads(op), strict=True)
        ):
            stride, (origin, length) = self.strides[tensor.index][n], spans[n]
            wide = positions[n].dtype.bits == 64
            start = self._clamp(start) if wide else start
            offset = e.add(offset, e.mul(e.add(origin, start), stride))
            if checked:
                tests = [e.compare("sge", start, 0), e.compare("sle", e.add(start, extent or 1), length)]
                whole += tests
                if extent is None:
                    single += tests
            if extent is not None:
                dims.append(Dim(next(axes), extent, stride, start, length, checked, wide, spread))
        base = e.element(self.pointer[tensor.index], offset, STORED[tensor.dtype.name])
        self.tiles[op] = Tile(tensor, base, dims, e.all(single), e.all(whole))

    def define_rows(self, op: Op, table: TableRows) -> None:
        """Define the tile of a gather of whole rows."""
        tensor, (rows, columns) = op.attrs["tensor"], self.axes.dims(op.result)
        dims = [Dim(a, a.extent, s, 0, a.extent, False) for a, s in ((rows, 0), (columns, 1)) if a is not None]
        self.tiles[op] = Tile(tensor, self.pointer[tensor.index], dims, None, None, table)

    def _locate(self, tile: Tile, pt: Point) -> tuple[str, Dim | None, Reg | None]:
        """Return the address of the point's first element, the dimension of the lanes, and the mask of the elements
        inside the tensor; None if all are. Where none are, the address is another one in the tensor: a masked access of
        a page that is not there takes hundreds of cycles, though it reads and writes nothing."""
        e = self.e
        if tile.table is not None:
            row, column = (pt.at[d.axis] for d in tile.dims if d.axis is not None)
            mask = None if pt.valid is None else Reg(lane_mask(e, pt.valid), "i1", True)
            return tile.table.address(e, row, column), tile.dims[1], mask
        offset: Index = 0
        lane: Dim | None = None
        mask = None
        conditions = [tile.reachable] if pt.edge and tile.reachable is not None else []
        some: list[str] = []
        for dim in tile.dims:
            index: Index = pt.at[dim.axis] if dim.axis is not None else 0
            place = index if dim.spread is None else spread_position(e, dim.spread, index)
            offset = e.add(offset, e.mul(place, dim.stride))
            along = dim.axis is pt.lane and dim.axis is not None
            if along:
                lane = dim
            if pt.edge and dim.checked:
                position = e.add(dim.start, index)
                if along:  # unsigned: a negative position is a very large one
                    first = self._int32(position)
                    lanes = e.binary("add", e.splat(first), e.iota())
                    mask = e.binary("icmp ult", lanes, e.splat(self._int32(dim.length)), "i1")
                    some = [e.compare("ult", e.add(position, e.lanes - 1), e.add(dim.length, e.lanes - 1))]
                    if dim.wide:
                        conditions += some
                else:
                    conditions.append(e.compare("ult", position, dim.length))
        if lane is not None and lane.spread is None and pt.valid is not None:
            tail = Reg(lane_mask(e, pt.valid), "i1", True)
            mask = tail if mask is None else e.binary("and", mask, tail)
        condition = e.all(conditions)
        if condition is not None:
            uniform = Reg(condition, "i1")
            mask = uniform if mask is None else e.binary("and", mask, uniform)
        pointer, reached = e.element(tile.base, offset, tile.element), e.all([*conditions, *some])
        if reached is not None and lane is not None and lane.spread is None:
            pointer = e.op(f"select i1 {reached}, ptr {pointer}, ptr {self.pointer[tile.tensor.index]}")
        return pointer, lane, mask

    def _clamp(self, start: Index) -> Index:
        """Clamp a start far outside every tensor, so that address arithmetic does not overflow."""
        if isinstance(start, int):
            return max(-FAR, min(start, FAR))
        held = self.e.call("i64", "llvm.smin.i64", ("i64", start), ("i64", str(FAR)))
        return self.e.call("i64", "llvm.smax.i64", ("i64", held), ("i64", str(-FAR)))

    def _int32(self, index: Index) -> Reg:
        return Reg(str(index), "i32") if isinstance(index, int) else Reg(self.e.op(f"trunc i64 {index} to i32"), "i32")

    def address(self, op: Op, pt: Point) -> str:
        """Return the address of the first element at a point inside the tensor."""
        return self._locate(self.tiles[op], pt)[0]

    def is_contiguous(self, op: Op, axis: Axis) -> bool:
        """True if memory holds the elements of a load one after the other along an axis."""
        return any(dim.axis is axis and dim.stride == 1 and dim.spread is None for dim in self.tiles[op].dims)

    def read(self, op: Op, pt: Point, test: Reg | None = None) -> Reg:
        """Read the elements at a point; zero outside the tensor and where the test fails."""
        e, tile = self.e, self.tiles[op]
        pointer, lane, mask = self._locate(tile, pt)
        if test is not None:
            mask = test if mask is None else e.binary("and", mask, test)
        size = BYTES[tile.element]
        if lane is not None and lane.spread is not None:
            raw = read_spread(e, pointer, tile.element, lane.spread, lane.stride, pt, mask)
            return decode(e, tile.tensor.dtype, Reg(raw, tile.element, True))
        if lane is None:
            if mask is not None:
                pointer = e.op(f"select i1 {mask.text}, ptr {pointer}, ptr @zero")
            return decode(e, tile.tensor.dtype, Reg(e.load(pointer, tile.element, size), tile.element))
        if lane.stride != 1:
            every = e.splat(mask).text if mask is not None else lane_mask(e, None)
            raw = gather(e, pointer, lane.stride, tile.element, every)
        elif mask is not None:
            raw = masked_load(e, pointer, tile.element, e.splat(mask).text)
        else:
            raw = e.load(pointer, e.vector_type(tile.element), size)
        return decode(e, tile.tensor.dtype, Reg(raw, tile.element, True))

    def read_fields(self, fields: Fields, pt: Point) -> Reg:
        """Read the bit fields at a point whose lanes run along the columns."""
        assert pt.lane is not None
        row, _, mask = self._locate(self.tiles[fields.load], replace(pt, at=pt.at | {pt.lane: 0}))
        return read_fields(self.e, row, fields, pt.at[pt.lane], mask)

    def write(self, op: Op, pt: Point, value: Reg) -> None:
        e, tile = self.e, self.tiles[op]
        pointer, lane, mask = self._locate(tile, pt)
        if lane is None:
            self._write_one(tile, pointer, mask, encode(e, tile.tensor.dtype, value))
            return
        raw = encode(e, tile.tensor.dtype, e.splat(value)).text
        if lane.stride != 1:
            every = e.splat(mask).text if mask is not None else lane_mask(e, None)
            scatter(e, raw, pointer, lane.stride, tile.element, every)
        elif mask is not None:
            masked_store(e, raw, pointer, tile.element, e.splat(mask).text)
        else:
            e.store(raw, pointer, e.vector_type(tile.element), BYTES[tile.element])

    def _write_one(self, tile: Tile, pointer: str, mask: Reg | None, raw: Reg) -> None:
        def write() -> None:
            self.e.store(raw.text, pointer, tile.element, BYTES[tile.element])

        if mask is None:
            write()
        else:
            self.e.when(mask.text, write)

    def read_gather(self, op: Op, positions: Positions, spans: list[tuple[Index, Index]], pt: Point) -> Reg:
        """Gather: every lane has its own position; those outside the tensor or view read zero."""
        e, tensor = self.e, op.attrs["tensor"]
        element = STORED[tensor.dtype.name]
        walk = self._walk(op, positions, pt)
        offset, inside = self.offset(tensor, positions, spans, walk)
        if not inside.vector and not any(r.vector for r in positions.regs):
            pointer = self._pointer(tensor, offset)
            pointer = e.op(f"select i1 {inside.text}, ptr {pointer}, ptr @zero")
            return decode(e, tensor.dtype, Reg(e.load(pointer, element, BYTES[element]), element))
        mask = e.binary("and", e.splat(inside), Reg(lane_mask(e, pt.valid), "i1", True))
        if walk is None:
            raw = gather_at(e, self._pointer(tensor, e.splat(offset)), element, mask.text)
        elif walk.step == 1:
            bits = e.op(f"bitcast {e.vector_type('i1')} {mask.text} to i{e.lanes}")
            reached = e.op(f"icmp ne i{e.lanes} {bits}, 0")
            pointer = e.op(
                f"select i1 {reached}, ptr {self._pointer(tensor, offset)}, ptr {self.pointer[tensor.index]}"
            )
            raw = masked_load(e, pointer, element, mask.text)
        else:
            raw = self._read_walk(tensor, positions, spans, walk, pt, mask)
        return decode(e, tensor.dtype, Reg(raw, element, True))

    def _read_walk(
        self, tensor: Tensor, positions: Positions, spans: list[tuple[Index, Index]], walk: Walk, pt: Point, mask: Reg
    ) -> str:
        """Read whole vectors, or one element at a time if some are outside."""
        e, element = self.e, STORED[tensor.dtype.name]
        found = e.var(e.vector_type(element), "zeroinitializer")
        count = e.lanes if pt.valid is None else pt.valid

        def whole_vectors() -> None:
            first = self.offset(tensor, positions, spans, walk)[0]
            raw = Reg(read_walk(e, self._pointer(tensor, first), element, walk.step, count), element, True)
            if positions.mask is not None:
                raw = e.select(e.splat(positions.mask), raw, Reg("zeroinitializer", element, True))
            e.set(found, raw.text)

        def one_by_one() -> None:
            every = self.offset(tensor, positions, spans)[0]
            e.set(found, gather_at(e, self._pointer(tensor, e.splat(every)), element, mask.text))

        e.when(self._all_inside(positions, spans, walk, walk.step * (count - 1)), whole_vectors, one_by_one)
        return e.get(found)

    def write_scatters(
        self, stores: list[tuple[Op, Reg, Positions]], spans: list[tuple[Index, Index]], pt: Point
    ) -> None:
        """Scatter: every lane has its own position; those outside the tensor or view are not written. Several scatters
        fill each other's gaps."""
        e, tensor = self.e, stores[0][0].attrs["tensor"]
        element = STORED[tensor.dtype.name]
        if pt.lane is None:
            for _, value, positions in stores:
                offset, inside = self.offset(tensor, positions, spans)
                raw, pointer = encode(e, tensor.dtype, value).text, self._pointer(tensor, offset)
                e.when(inside.text, partial(e.store, raw, pointer, element, BYTES[element]))
            return
        raws = [encode(e, tensor.dtype, e.splat(value)).text for _, value, _ in stores]
        valid = Reg(lane_mask(e, pt.valid), "i1", True)

        def one_by_one() -> None:
            for raw, (_, _, positions) in zip(raws, stores, strict=True):
                offset, inside = self.offset(tensor, positions, spans)
                mask = e.binary("and", e.splat(inside), valid)
                scatter_at(e, raw, self._pointer(tensor, e.splat(offset)), element, mask.text)

        walk = self._walk(stores[0][0], stores[0][2], pt)
        if walk is None or (walk.step != 1 and stores[0][2].mask is not None):
            one_by_one()
            return
        places = places_in_walk([op for op, _, _ in stores], walk)
        if places is None:
            for store in stores:
                self.write_scatters([store], spans, pt)
            return
        _, _, positions = stores[places.index(0)]
        offset, inside = self.offset(tensor, positions, spans, walk)
        pointer, step, count = self._pointer(tensor, offset), walk.step, e.lanes if pt.valid is None else pt.valid
        if step == 1:
            masked_store(e, raws[0], pointer, element, e.binary("and", e.splat(inside), valid).text)
            return
        ahead = dict(sorted(zip(places, raws, strict=True)))
        every = self._all_inside(positions, spans, walk, step * (count - 1), max(ahead))
        e.when(every, lambda: write_walk(e, ahead, pointer, element, step, count), one_by_one)

    def _all_inside(
        self, positions: Positions, spans: list[tuple[Index, Index]], walk: Walk, last: int, more: int = 0
    ) -> str:
        """Return the condition that every position from the first lane's to that `last` behind it, and `more` behind
        those, is inside."""
        e, tests = self.e, []
        for n, (index, (_, length)) in enumerate(zip(positions.regs, spans, strict=True)):
            first = e.op(f"extractelement {e.type_of(index)} {index.text}, i64 0") if index.vector else index.text
            first = first if index.type == "i64" else e.op(f"sext i32 {first} to i64")
            low, high = (min(last, 0), max(last, 0) + more) if n == walk.dim else (0, 0)
            tests += [e.compare("sge", e.add(first, low), 0), e.compare("slt", e.add(first, high), length)]
        return str(e.all(tests))

    def _pointer(self, tensor: Tensor, offset: Reg) -> str:
        steps = f"{self.e.type_of(offset)} {offset.text}"
        return self.e.op(f"getelementptr {STORED[tensor.dtype.name]}, ptr {self.pointer[tensor.index]}, {steps}")

    def offset(
        self, tensor: Tensor, positions: Positions, spans: list[tuple[Index, Index]], walk: Walk | None = None
    ) -> tuple[Reg, Reg]:
        """Return the offsets of elements, and the mask of those that are inside the tensor or view. With a walk, the
        offset is that of the first lane."""
        e = self.e
        offset, inside = Reg("0", "i64"), positions.mask or Reg("true", "i1")
        for n, index in enumerate(positions.regs):
            wide = index if index.type == "i64" else e.convert("sext", index, "i64")
            origin, length = spans[n]
            inside = e.binary("and", inside, e.binary("icmp ult", wide, Reg(str(length), "i64"), "i1"))
            if origin != 0:
                wide = e.binary("add", wide, Reg(str(origin), "i64"))
            if walk is not None and n == walk.dim:
                wide = Reg(e.op(f"extractelement {e.vector_type('i64')} {wide.text}, i64 0"), "i64")
            offset = e.binary("add", offset, e.binary("mul", wide, Reg(str(self.strides[tensor.index][n]), "i64")))
        return offset, inside

    def _walk(self, op: Op, positions: Positions, pt: Point) -> Walk | None:
        """Return how the positions of a gather or scatter change along the lanes, if they stay in a contiguous
        dimension of the tensor."""
        dims = self.axes.dims(tile_of(op))
        found = walk_along(positions, dims.index(pt.lane)) if pt.lane is not None and pt.lane in dims else None
        return found if found is not None and self.strides[op.attrs["tensor"].index][found.dim] == 1 else None
