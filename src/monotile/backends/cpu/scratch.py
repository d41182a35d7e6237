"""Scratch buffers: where a kernel stores its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...dtypes import bfloat16
from .axes import Axis
from .emit import Emitter, Index, Reg
from .point import Point
from .storage import Interval, assign
from .vectors import BYTES, decode, encode, gather, lane_mask, scatter

ROUND_TWO = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"  # two vectors of float32 to one of bfloat16


@dataclass(eq=False)
class Buffer:
    """Scratch for one value: [panel][row][lane] or [row][lane], the lanes padded to whole vectors. Elements are those
    of registers, i8 for a bool and i16 for a bfloat16 that stays one."""

    name: str
    element: str
    strides: dict[Axis, Index]
    lane: Axis | None
    size: int
    panel_stride: int = 0
    pairs: Axis | None = None  # the axis of which two neighbours share a word; their bfloat16s are the elements
    padded_rows: int = 0  # of the axis of pairs
    pointer: str = ""  # where the contents are instead, for a tile that may be read in place
    first_use: int = -1
    last_use: int = -1


class Scratch:
    """Buffers and their live ranges; offsets are assigned when the whole kernel has been emitted."""

    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter
        self.buffers: list[Buffer] = []
        self.clock = 0
        self._first_of_pair: dict[tuple[Buffer, Index], tuple[str, Reg]] = {}  # written next, with the second

    def new(
        self, element: str, strides: Mapping[Axis, Index], lane: Axis | None, count: int, panel_stride: int = 0
    ) -> Buffer:
        buffer = Buffer(self.e.fresh("b"), element, dict(strides), lane, count * BYTES[element], panel_stride)
        self.buffers.append(buffer)
        return buffer

    def new_pairs(self, lane: Axis, axis: Axis, width: int, steps: int, panels: int = 1) -> Buffer:
        """Allocate panels of `width` lanes of words that hold two neighbours along an axis, for whole `steps` of it."""
        rows = -(-axis.extent // steps) * steps
        size = rows * width
        buffer = self.new("i16", {lane: 2, axis: width}, lane, panels * size, 0 if panels == 1 else size)
        buffer.pairs, buffer.padded_rows = axis, rows
        return buffer

    def touch(self, buffer: Buffer) -> None:
        if buffer.first_use < 0:
            buffer.first_use = self.clock
        buffer.last_use = max(buffer.last_use, self.clock)

    def end_loop(self, began: int) -> None:
        """Extend live ranges at the end of a loop. A buffer that was live when the loop began stays live until it ends:
        the next iteration may read it. A buffer filled panel by panel is live from the beginning: what earlier panels
        hold must survive the iterations of later ones."""
        for buffer in self.buffers:
            if 0 <= buffer.first_use < began <= buffer.last_use:
                buffer.last_use = self.clock
            if buffer.panel_stride and buffer.first_use > began:
                buffer.first_use, buffer.last_use = began, max(buffer.last_use, self.clock)

    def finish(self) -> int:
        """Assign the offsets and return the bytes a program needs."""
        used = [b for b in self.buffers if b.first_use >= 0]
        offsets, total = assign([Interval(b.size, b.first_use, b.last_use) for b in used])
        for buffer, offset in zip(used, offsets, strict=True):
            self.e.entry.append(f"  {buffer.name} = getelementptr i8, ptr %scratch, i64 {offset}")
        return total

    # ---- access ------------------------------------------------------------------------------------------------------

    def address(self, buffer: Buffer, at: dict[Axis, Index], panel: tuple[Index, Index] | None) -> str:
        self.touch(buffer)
        e = self.e
        offset: Index = 0
        for axis, stride in buffer.strides.items():
            if panel is not None and axis is buffer.lane:
                offset = e.add(
                    offset, e.add(e.mul(panel[0], buffer.panel_stride), e.mul(stride, e.mul(panel[1], e.lanes)))
                )
            else:
                offset = e.add(offset, e.mul(at[axis], stride))
        return e.element(buffer.pointer or buffer.name, offset, buffer.element)

    def read(self, buffer: Buffer, pt: Point) -> Reg:
        e = self.e
        assert pt.lane is buffer.lane or len(buffer.strides) < 2 or not buffer.panel_stride, "lanes across panels"
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
        if buffer.pairs is not None:
            self._write_pair(buffer, pt, value)
            return
        pointer = self.address(buffer, pt.at, pt.panel if pt.lane is buffer.lane else None)
        if pt.lane is not None and pt.lane in buffer.strides:
            value = e.splat(value)
        if buffer.element == "i8":
            value = e.convert("zext", value, "i8")
        elif buffer.element == "i16":
            value = encode(e, bfloat16, value)
        kind = e.vector_type(buffer.element) if value.vector else buffer.element
        if value.vector and buffer.lane is not pt.lane:
            assert pt.lane is not None
            scatter(e, value.text, pointer, buffer.strides[pt.lane], buffer.element, lane_mask(e, pt.valid))
        else:
            e.store(value.text, pointer, kind, BYTES[buffer.element])

    def _write_pair(self, buffer: Buffer, pt: Point, value: Reg) -> None:
        """Round to bfloat16 and write the second number of a pair together with the first, which comes just before it.
        What is below 2^-126 becomes zero, as in the products that read it."""
        e = self.e
        assert pt.panel is not None
        key, value = (buffer, pt.panel[1]), e.splat(value)
        if key not in self._first_of_pair:
            self._first_of_pair[key] = self.address(buffer, pt.at, pt.panel), value
            return
        pointer, first = self._first_of_pair.pop(key)
        numbers, halves = f"<{2 * e.lanes} x bfloat>", e.vector_type("float")
        text = e.call(numbers, ROUND_TWO, (halves, value.text), (halves, first.text))  # the first is the lower half
        picks = ", ".join(f"i32 {i // 2 + e.lanes * (i % 2)}" for i in range(2 * e.lanes))
        text = e.op(f"shufflevector {numbers} {text}, {numbers} poison, <{2 * e.lanes} x i32> <{picks}>")
        e.store(text, pointer, numbers, 4)

    def end_pairs(self, buffer: Buffer, pt: Point) -> None:
        """Complete the last pair with zero, and write zeros to the rows behind it."""
        e, axis = self.e, buffer.pairs
        assert axis is not None and pt.panel is not None
        if (buffer, pt.panel[1]) in self._first_of_pair:
            self._write_pair(buffer, pt, e.number(0.0, "float"))
        for row in range(axis.extent + axis.extent % 2, buffer.padded_rows, 2):
            pointer = self.address(buffer, pt.at | {axis: row}, pt.panel)
            e.store("zeroinitializer", pointer, e.vector_type("i32"), 4)

    def _decode(self, raw: Reg) -> Reg:
        if raw.type == "i16":
            return decode(self.e, bfloat16, raw)
        return self.e.convert("trunc", raw, "i1") if raw.type == "i8" else raw
