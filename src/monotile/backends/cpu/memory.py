"""Memory of a kernel: slices of its tensors, and scratch buffers for the tiles it keeps.

Registers hold every float as float32 and every small integer as int32; conversion happens at the tensor's edge. A
`Tile` is a load's or store's slice: a base pointer plus, for each of its dimensions, axis, stride and bounds.
Accesses come in two forms, inside (no checks) and edge (lanes and rows outside the tensor read zero and are not
written).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dtypes import DType
from ...ir import Op, Tensor, Value
from ...passes.axes import Axes, Axis
from ...passes.storage import Interval, assign
from .emit import Emitter, Index, Reg

# How an element type is kept in memory and in registers.
STORED = {
    "float32": "float", "float16": "half", "bfloat16": "i16", "int64": "i64", "int32": "i32", "int8": "i8",
    "uint8": "i8", "bool": "i8",
}  # fmt: skip
BYTES = {"float": 4, "half": 2, "i16": 2, "i64": 8, "i32": 4, "i8": 1}

FAR = 2**33  # no position of a tensor is so great


def register_type(dtype: DType) -> str:
    if dtype.is_float:
        return "float"
    return "i1" if dtype.kind == "bool" else "i64" if dtype.bits == 64 else "i32"


@dataclass
class Point:
    """Where a nest stands: an index along each of its axes, which of them the lanes run along, and what is known
    there."""

    at: dict[Axis, Index]
    lane: Axis | None = None
    valid: int | None = None  # lanes of the tile in this vector, when not all
    edge: bool = False  # whether tensors may end here
    panel: tuple[Index, int] | None = None  # the panel and the vector in it, for lanes along the panel axis
    memo: dict[Value, Reg] = field(default_factory=dict)
    group: int = 0  # which vector of its register group this is

    def translated(self, mine: tuple[Axis | None, ...], theirs: tuple[Axis | None, ...]) -> Point:
        """The same place for a value whose dimensions are called otherwise."""
        if all(b is None or a is b for a, b in zip(mine, theirs, strict=True)):
            return self
        at = {b: self.at[a] if a is not None else 0 for a, b in zip(mine, theirs, strict=True) if b is not None}
        lane = next((b for a, b in zip(mine, theirs, strict=True) if a is self.lane and a is not None), None)
        return Point(at, lane, self.valid, self.edge, self.panel)


@dataclass
class Dim:
    """One dimension of a tile."""

    axis: Axis | None
    extent: int
    stride: Index
    start: Index
    length: Index
    checked: bool
    wide: bool = False  # whether the start may be beyond int32


@dataclass
class Tile:
    tensor: Tensor
    base: str
    dims: list[Dim]
    reachable: str | None  # whether the positions given as single numbers lie inside; None when known
    inside: str | None  # whether the whole tile does; None when known

    @property
    def element(self) -> str:
        return STORED[self.tensor.dtype.name]


@dataclass(eq=False)
class Buffer:
    """Scratch for one value: [panel][row][lane] or [row][lane], the lanes padded to whole vectors."""

    name: str
    element: str
    strides: dict[Axis, int]
    lane: Axis | None
    size: int
    panel_stride: int = 0
    first: int = -1
    last: int = -1


class Scratch:
    """Buffers and when they are in use; offsets are assigned when the whole kernel is known."""

    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter
        self.buffers: list[Buffer] = []
        self.clock = 0

    def new(
        self, element: str, strides: dict[Axis, int], lane: Axis | None, count: int, panel_stride: int = 0
    ) -> Buffer:
        buffer = Buffer(self.e.fresh("b"), element, strides, lane, count * BYTES[element], panel_stride)
        self.buffers.append(buffer)
        return buffer

    def touch(self, buffer: Buffer) -> None:
        if buffer.first < 0:
            buffer.first = self.clock
        buffer.last = max(buffer.last, self.clock)

    def end_loop(self, began: int) -> None:
        """What a loop found in use when it began stays in use until it ends: the next turn may read it. What it fills
        panel by panel is in use from its beginning: earlier panels must outlive what later turns do."""
        for buffer in self.buffers:
            if 0 <= buffer.first < began <= buffer.last:
                buffer.last = self.clock
            if buffer.panel_stride and buffer.first > began:
                buffer.first, buffer.last = began, max(buffer.last, self.clock)

    def finish(self) -> int:
        """Places the buffers; returns the bytes a program needs."""
        used = [b for b in self.buffers if b.first >= 0]
        offsets, total = assign([Interval(b.size, b.first, b.last) for b in used])
        for buffer, offset in zip(used, offsets, strict=True):
            self.e.entry.append(f"  {buffer.name} = getelementptr i8, ptr %scratch, i64 {offset}")
        return total

    # ---- access ------------------------------------------------------------------------------------------------------

    def address(self, buffer: Buffer, at: dict[Axis, Index], panel: tuple[Index, int] | None) -> str:
        self.touch(buffer)
        e = self.e
        offset: Index = 0
        for axis, stride in buffer.strides.items():
            if panel is not None and axis is buffer.lane:
                offset = e.add(offset, e.add(e.mul(panel[0], buffer.panel_stride), panel[1] * e.lanes))
            else:
                offset = e.add(offset, e.mul(at[axis], stride))
        return e.element(buffer.name, offset, buffer.element)

    def read(self, buffer: Buffer, pt: Point) -> Reg:
        e = self.e
        pointer = self.address(buffer, pt.at, pt.panel if pt.lane is buffer.lane else None)
        if pt.lane not in buffer.strides or pt.lane is None:
            return self._decode(Reg(e.load(pointer, buffer.element, BYTES[buffer.element]), buffer.element))
        kind = e.vector_type(buffer.element)
        if buffer.lane is pt.lane:
            return self._decode(Reg(e.load(pointer, kind, BYTES[buffer.element]), buffer.element, True))
        raw = gather(e, pointer, buffer.strides[pt.lane], buffer.element, lane_mask(e, pt.valid))
        return self._decode(Reg(raw, buffer.element, True))

    def write(self, buffer: Buffer, pt: Point, value: Reg) -> None:
        e = self.e
        pointer = self.address(buffer, pt.at, pt.panel if pt.lane is buffer.lane else None)
        if pt.lane is not None and pt.lane in buffer.strides:
            value = e.splat(value)
        value = e.convert("zext", value, "i8") if buffer.element == "i8" else value
        kind = e.vector_type(buffer.element) if value.vector else buffer.element
        if value.vector and buffer.lane is not pt.lane:
            assert pt.lane is not None
            scatter(e, value.text, pointer, buffer.strides[pt.lane], buffer.element, lane_mask(e, pt.valid))
        else:
            e.store(value.text, pointer, kind, BYTES[buffer.element])

    def _decode(self, raw: Reg) -> Reg:
        return self.e.convert("trunc", raw, "i1") if raw.type == "i8" else raw


# ---- vectors in memory -----------------------------------------------------------------------------------------------


def lane_mask(e: Emitter, valid: int | None) -> str:
    bits = [i < (e.lanes if valid is None else valid) for i in range(e.lanes)]
    return "<" + ", ".join(f"i1 {str(b).lower()}" for b in bits) + ">"


def _pointers(e: Emitter, pointer: str, stride: Index, element: str) -> str:
    lanes = e.vector_type("i64")
    steps = e.op(
        f"mul {lanes} <{', '.join(f'i64 {i}' for i in range(e.lanes))}>, {e.splat(Reg(str(stride), 'i64')).text}"
    )
    return e.op(f"getelementptr {element}, ptr {pointer}, {lanes} {steps}")


def suffix(e: Emitter, element: str) -> str:
    return f"v{e.lanes}{ {'float': 'f32', 'half': 'f16'}.get(element, element) }"


def gather(e: Emitter, pointer: str, stride: Index, element: str, mask: str) -> str:
    return gather_at(e, _pointers(e, pointer, stride, element), element, mask)


def gather_at(e: Emitter, pointers: str, element: str, mask: str) -> str:
    kind, masks, addresses = e.vector_type(element), e.vector_type("i1"), e.vector_type("ptr")
    name = f"llvm.masked.gather.{suffix(e, element)}.v{e.lanes}p0"
    args = ((addresses, pointers), ("i32", str(BYTES[element])), (masks, mask), (kind, "zeroinitializer"))
    return e.call(kind, name, *args)


def scatter(e: Emitter, value: str, pointer: str, stride: Index, element: str, mask: str) -> None:
    kind, masks, addresses = e.vector_type(element), e.vector_type("i1"), e.vector_type("ptr")
    name = f"llvm.masked.scatter.{suffix(e, element)}.v{e.lanes}p0"
    pointers = _pointers(e, pointer, stride, element)
    e.call("void", name, (kind, value), (addresses, pointers), ("i32", str(BYTES[element])), (masks, mask))


def masked_load(e: Emitter, pointer: str, element: str, mask: str) -> str:
    kind = e.vector_type(element)
    args = (("ptr", pointer), ("i32", str(BYTES[element])), (e.vector_type("i1"), mask), (kind, "zeroinitializer"))
    return e.call(kind, f"llvm.masked.load.{suffix(e, element)}.p0", *args)


def masked_store(e: Emitter, value: str, pointer: str, element: str, mask: str) -> None:
    if element in ("i8", "i16", "i32"):
        # LLVM 22 turns a masked store of truncated integers, when it knows the mask and one lane is left,
        # into a store of the wide integer, which overwrites what follows. So it must not know the mask.
        mask = e.op(f"and {e.vector_type('i1')} {mask}, {_every_lane(e)}")
    args = (
        (e.vector_type(element), value),
        ("ptr", pointer),
        ("i32", str(BYTES[element])),
        (e.vector_type("i1"), mask),
    )
    e.call("void", f"llvm.masked.store.{suffix(e, element)}.p0", *args)


def _every_lane(e: Emitter) -> str:
    """A mask of all lanes that the optimiser cannot see through; read once, when the function begins."""
    lines = [
        "  %ones = load volatile i16, ptr @ones",
        f"  %few = trunc i16 %ones to i{e.lanes}",
        f"  %every = bitcast i{e.lanes} {'%ones' if e.lanes == 16 else '%few'} to {e.vector_type('i1')}",
    ]
    if lines[0] not in e.entry:
        e.entry += [line for line in lines if e.lanes < 16 or "%few =" not in line]
    return "%every"


# ---- conversion between memory and registers -------------------------------------------------------------------------


def decode(e: Emitter, dtype: DType, raw: Reg) -> Reg:
    """A tensor's element as a register value."""
    if dtype.name == "bfloat16":
        wide = e.binary("shl", e.convert("zext", raw, "i32"), e.number(16, "i32"))
        return e.convert("bitcast", wide, "float")
    if dtype.name == "float16":
        return e.convert("fpext", raw, "float")
    if dtype.name == "bool":
        zero = Reg("zeroinitializer" if raw.vector else "0", "i8", raw.vector)
        return e.binary("icmp ne", raw, zero, "i1")
    if dtype.bits == 8:
        return e.convert("zext" if dtype.name == "uint8" else "sext", raw, "i32")
    return raw


def encode(e: Emitter, dtype: DType, value: Reg) -> Reg:
    """A register value as a tensor's element. The value already is representable: a cast came before the store."""
    if dtype.name == "bfloat16":
        bits = e.convert("bitcast", value, "i32")
        return e.convert("trunc", e.binary("lshr", bits, e.number(16, "i32")), "i16")
    if dtype.name == "float16":
        return e.convert("fptrunc", value, "half")
    if dtype.name == "bool":
        return e.convert("zext", value, "i8")
    return e.convert("trunc", value, "i8") if dtype.bits == 8 else value


# ---- tiles of tensors ------------------------------------------------------------------------------------------------


class Tensors:
    """Reads and writes slices of the kernel's tensors."""

    def __init__(self, emitter: Emitter, axes: Axes, tensors: tuple[Tensor, ...]) -> None:
        self.e, self.axes = emitter, axes
        self.pointer: dict[int, str] = {}
        self.lengths: dict[int, list[Index]] = {}
        self.strides: dict[int, list[Index]] = {}
        self.tiles: dict[Op, Tile] = {}
        word = 0
        for tensor in tensors:
            self.pointer[tensor.index] = self.argument(word, "ptr")
            known, rank = tensor.strides, tensor.rank
            self.lengths[tensor.index] = [
                d if isinstance(d, int) else self.argument(word + 1 + n) for n, d in enumerate(tensor.dims)
            ]
            self.strides[tensor.index] = [
                known[n] if known[n] is not None else self.argument(word + 1 + rank + n)  # type: ignore[misc]
                for n in range(rank)
            ]
            word += 1 + 2 * rank
        self.scalar_word = word

    def argument(self, word: int, type_: str = "i64") -> str:
        return self.e.load(self.e.element("%args", word, "i64"), type_, 8)

    def define(self, op: Op, starts: list[Index]) -> None:
        """Base address and bounds of a load's or store's tile."""
        e, tensor = self.e, op.attrs["tensor"]
        value = op.operands[0] if op.kind == "store" else op.result
        axes = iter(self.axes.dims(value))
        offset: Index = 0
        dims, single, whole = [], [], []
        for n, (start, extent, checked) in enumerate(
            zip(starts, op.attrs["extents"], op.attrs["checked"], strict=True)
        ):
            stride, length = self.strides[tensor.index][n], self.lengths[tensor.index][n]
            wide = op.operands[(op.kind == "store") + n].dtype.bits == 64
            start = self._near(start) if wide else start
            offset = e.add(offset, e.mul(start, stride))
            if checked:
                tests = [e.compare("sge", start, 0), e.compare("sle", e.add(start, extent or 1), length)]
                whole += tests
                if extent is None:
                    single += tests
            if extent is not None:
                dims.append(Dim(next(axes), extent, stride, start, length, checked, wide))
        base = e.element(self.pointer[tensor.index], offset, STORED[tensor.dtype.name])
        self.tiles[op] = Tile(tensor, base, dims, e.all(single), e.all(whole))

    def _place(self, tile: Tile, pt: Point) -> tuple[str, Dim | None, Reg | None]:
        """Pointer of the point's first element, the dimension its lanes run along, and the mask of what may be
        touched."""
        e = self.e
        offset: Index = 0
        lane: Dim | None = None
        mask: Reg | None = None
        conditions = [tile.reachable] if pt.edge and tile.reachable is not None else []
        for dim in tile.dims:
            index: Index = pt.at[dim.axis] if dim.axis is not None else 0
            offset = e.add(offset, e.mul(index, dim.stride))
            along = dim.axis is pt.lane and dim.axis is not None
            if along:
                lane = dim
            if pt.edge and dim.checked:
                position = e.add(dim.start, index)
                if along:  # unsigned: a negative position is a very large one
                    first = self._int32(position)
                    lanes = e.binary("add", e.splat(first), e.iota())
                    mask = e.binary("icmp ult", lanes, e.splat(self._int32(dim.length)), "i1")
                    if dim.wide:  # some lane may be inside
                        conditions.append(
                            e.compare("ult", e.add(position, e.lanes - 1), e.add(dim.length, e.lanes - 1))
                        )
                else:
                    conditions.append(e.compare("ult", position, dim.length))
        if lane is not None and pt.valid is not None:
            tail = Reg(lane_mask(e, pt.valid), "i1", True)
            mask = tail if mask is None else e.binary("and", mask, tail)
        condition = e.all(conditions)
        if condition is not None:
            uniform = Reg(condition, "i1")
            mask = uniform if mask is None else e.binary("and", mask, uniform)
        return e.element(tile.base, offset, tile.element), lane, mask

    def _near(self, start: Index) -> Index:
        """A start far outside every tensor, as one less far, with which address arithmetic does not overflow."""
        if isinstance(start, int):
            return max(-FAR, min(start, FAR))
        held = self.e.call("i64", "llvm.smin.i64", ("i64", start), ("i64", str(FAR)))
        return self.e.call("i64", "llvm.smax.i64", ("i64", held), ("i64", str(-FAR)))

    def _int32(self, index: Index) -> Reg:
        return Reg(str(index), "i32") if isinstance(index, int) else Reg(self.e.op(f"trunc i64 {index} to i32"), "i32")

    def read(self, op: Op, pt: Point) -> Reg:
        e, tile = self.e, self.tiles[op]
        pointer, lane, mask = self._place(tile, pt)
        size = BYTES[tile.element]
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

    def write(self, op: Op, pt: Point, value: Reg) -> None:
        e, tile = self.e, self.tiles[op]
        pointer, lane, mask = self._place(tile, pt)
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

    def read_scattered(self, op: Op, indices: list[Reg], valid: int | None) -> Reg:
        """A gather: every lane has a position of its own; those outside the tensor read zero."""
        e, tensor = self.e, op.attrs["tensor"]
        element = STORED[tensor.dtype.name]
        vector = any(r.vector for r in indices)
        offset, inside = Reg("0", "i64"), Reg("true", "i1")
        for n, index in enumerate(indices):
            wide = index if index.type == "i64" else e.convert("sext", index, "i64")
            length = Reg(str(self.lengths[tensor.index][n]), "i64")
            inside = e.binary("and", inside, e.binary("icmp ult", wide, length, "i1"))
            offset = e.binary("add", offset, e.binary("mul", wide, Reg(str(self.strides[tensor.index][n]), "i64")))
        base = self.pointer[tensor.index]
        if not vector:
            pointer = e.op(f"getelementptr {element}, ptr {base}, i64 {offset.text}")
            pointer = e.op(f"select i1 {inside.text}, ptr {pointer}, ptr @zero")
            return decode(e, tensor.dtype, Reg(e.load(pointer, element, BYTES[element]), element))
        lanes = e.vector_type("i64")
        mask = e.binary("and", e.splat(inside), Reg(lane_mask(e, valid), "i1", True))
        pointers = e.op(f"getelementptr {element}, ptr {base}, {lanes} {e.splat(offset).text}")
        return decode(e, tensor.dtype, Reg(gather_at(e, pointers, element, mask.text), element, True))
