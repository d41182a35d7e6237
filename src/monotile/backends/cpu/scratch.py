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
    pointer: str = ""  # where the contents are instead, for a tile that may be read in place
    first_use: int = -1
    last_use: int = -1


class Scratch:
    """Buffers and their live ranges; offsets are assigned when the whole kernel has been emitted."""

    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter
        self.buffers: list[Buffer] = []
        self.clock = 0

    def new(
        self, element: str, strides: Mapping[Axis, Index], lane: Axis | None, count: int, panel_stride: int = 0
    ) -> Buffer:
        buffer = Buffer(self.e.fresh("b"), element, dict(strides), lane, count * BYTES[element], panel_stride)
        self.buffers.append(buffer)
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

    def address(self, buffer: Buffer, at: dict[Axis, Index], panel: tuple[Index, int] | None) -> str:
        self.touch(buffer)
        e = self.e
        offset: Index = 0
        for axis, stride in buffer.strides.items():
            if panel is not None and axis is buffer.lane:
                offset = e.add(offset, e.add(e.mul(panel[0], buffer.panel_stride), panel[1] * e.lanes))
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

    def _decode(self, raw: Reg) -> Reg:
        if raw.type == "i16":
            return decode(self.e, bfloat16, raw)
        return self.e.convert("trunc", raw, "i1") if raw.type == "i8" else raw
