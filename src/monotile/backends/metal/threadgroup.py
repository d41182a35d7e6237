"""Threadgroup memory: one array of which every tile takes a part, and the barriers between its writes and reads."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DeviceLimit
from .writer import Writer

THREADGROUP_LIMIT = 32 << 10  # bytes
Spans = list[tuple[int, int]]  # byte ranges


@dataclass(frozen=True)
class ThreadgroupTile:
    """A tile in threadgroup memory: the pointer's name, its byte range, and the elements from one row to the next."""

    name: str
    start: int
    end: int
    stride: int


@dataclass(frozen=True)
class Accesses:
    """Byte ranges read and written since the last barrier."""

    reads: Spans
    writes: Spans

    def __add__(self, other: Accesses) -> Accesses:
        return Accesses(self.reads + other.reads, self.writes + other.writes)

    def copy(self) -> Accesses:
        return Accesses(list(self.reads), list(self.writes))


class ThreadgroupMemory:
    """A stack of tiles. A barrier is written before a read of bytes that were written since the last barrier, and
    before a write over bytes that were read or written since the last barrier."""

    def __init__(self, writer: Writer, kernel: str, simdgroups: int) -> None:
        self.writer, self.kernel = writer, kernel
        self.barrier_scope = "simdgroup" if simdgroups == 1 else "threadgroup"
        self.top = self.peak_bytes = 0  # the first free byte, and the most bytes in use at any time
        self.accesses = Accesses([], [])

    def barrier(self, flags: str = "mem_threadgroup") -> None:
        self.writer.line(f"{self.barrier_scope}_barrier(mem_flags::{flags});")
        if flags == "mem_threadgroup":
            self.accesses = Accesses([], [])

    def is_pending(self, tile: ThreadgroupTile) -> bool:
        """True if a write needs a barrier before it."""
        return _overlaps(self.accesses.reads, tile) or _overlaps(self.accesses.writes, tile)

    def before_write(self, tile: ThreadgroupTile) -> None:
        if self.is_pending(tile):
            self.barrier()
        self.note_write(tile)

    def note_write(self, tile: ThreadgroupTile) -> None:
        self.accesses.writes.append((tile.start, tile.end))

    def before_read(self, *tiles: ThreadgroupTile) -> None:
        """Write the barrier that a statement which reads these tiles needs."""
        if any(_overlaps(self.accesses.writes, tile) for tile in tiles):
            self.barrier()  # before any of the reads is recorded, which all happen after it
        for tile in tiles:
            self.note_read(tile)

    def note_read(self, tile: ThreadgroupTile) -> None:
        self.accesses.reads.append((tile.start, tile.end))

    def allocate(self, element: tuple[str, int], rows: int, stride: int, *, hint: str, purpose: str) -> ThreadgroupTile:
        """Allocate rows of `stride` elements, whose type and size in bytes are given."""
        kind, size = element
        start = self.top
        end = start + -(-rows * stride * size // 16) * 16
        if end > THREADGROUP_LIMIT:
            found = f"{self.kernel} needs {end} bytes of threadgroup memory for {purpose}, of {THREADGROUP_LIMIT}"
            raise DeviceLimit(f"{found}; use smaller blocks")
        self.peak_bytes, self.top = max(self.peak_bytes, end), end
        tile = ThreadgroupTile(self.writer.name(hint), start, end, stride)
        base = "scratch" if start == 0 else f"scratch + {start // 16}"
        self.writer.declare(f"threadgroup {kind} *{tile.name} = (threadgroup {kind} *)({base});")
        return tile

    def declaration(self) -> list[str]:
        """Return the line that declares the array, if anything was allocated."""
        return [f"threadgroup float4 scratch[{-(-self.peak_bytes // 16)}];"] if self.peak_bytes else []

    def save(self) -> tuple[int, Accesses]:
        return self.top, self.accesses.copy()

    def restore(self, state: tuple[int, Accesses]) -> None:
        self.top, self.accesses = state[0], state[1].copy()


def _overlaps(spans: Spans, tile: ThreadgroupTile) -> bool:
    return any(low < tile.end and tile.start < high for low, high in spans)
