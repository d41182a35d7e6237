"""Shared memory of the Gluon modules that run in Python (gluon_in_python.py).

An allocation has a size, an alignment that follows from its swizzle, and for every byte a note of who wrote it: which
copy or store, as part of a tile of which layout. These are errors, because a GPU would read or write something else:

- a tile outside its allocation, or an allocation reinterpreted with another size or with a swizzle that needs a greater
  alignment;
- reading bytes that nothing wrote, or that were written as a tile of another layout (recycled memory);
- reading a copied tile before its barrier was waited for, or what another consumer stored;
- a dot or a copy that reads what its thread stored without a fence between;
- writing a tile that a dot or a copy to the tensor may still read, unless that changes nothing: consumers may each
  write the same to a tile that was copied for all of them, and read it then."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# `dots` and `copies` that run, phases of barriers that were `seen` to be complete, spans that were stored `unfenced`
this_thread = threading.local()
SWIZZLED_ROWS = 8  # that a swizzle permutes; with its width, the alignment it needs


class SharedMemoryError(AssertionError):
    """A tile that a GPU must not read or write so."""


class TileLayout(NamedTuple):
    swizzle: int  # bytes
    bits: int  # of an element
    rank: int

    @property
    def alignment(self) -> int:
        return SWIZZLED_ROWS * self.swizzle


class Written(NamedTuple):
    """Who wrote some bytes."""

    tile: tuple[int, int, int, int]  # swizzle, bits of an element, rows and width: how they lie
    thread: int
    barrier: Any = None  # of a copy
    phase: int = 0  # that the copy completes
    updated: frozenset[int] = frozenset()  # threads that wrote to a copied tile


class Allocation:
    """A block of shared memory."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], layout: TileLayout) -> None:
        self.size = math.prod(shape) * dtype.itemsize
        self.bytes = torch.full((self.size,), 0xFF, dtype=torch.uint8)  # NaN
        self.layout = layout
        self.written: dict[tuple[int, int], Written] = {}  # by first byte and end
        self.readers: list[tuple[int, int, Any]] = []  # first byte, end and the dot that reads them
        self.lock = threading.RLock()
        self.tile = SharedTile(self, self.bytes.view(dtype).view(*shape), layout)

    def write(self, span: tuple[int, int], note: Written) -> None:
        with self.lock:
            for low, high, dot in self.readers:
                if low < span[1] and span[0] < high:
                    raise SharedMemoryError(f"bytes {span} are written while {dot} may still read them")
            kept = {}
            for (low, high), before in self.written.items():
                if low >= span[1] or high <= span[0]:
                    kept[low, high] = before
                else:  # what is left of an older tile is none any more
                    kept |= {(low, span[0]): before._replace(tile=(0, 0, 0, 0))} if low < span[0] else {}
                    kept |= {(span[1], high): before._replace(tile=(0, 0, 0, 0))} if high > span[1] else {}
            kept[span] = note
            self.written = kept

    def update(self, tile: SharedTile, value: Any) -> bool:
        """Write to a tile that was copied; False for another one."""
        with self.lock:
            note = self.written.get(tile.span)
            if note is None or note.barrier is None or note.tile != tile.shape:
                return False
            self.check(tile.span, tile.shape, updating=True)
            new = value.to(tile.memory.dtype).contiguous()
            if not torch.equal(new.view(torch.uint8), tile.memory.contiguous().view(torch.uint8)):
                low, high = tile.span
                if any(first < high and low < end for first, end, _ in self.readers):
                    raise SharedMemoryError(f"bytes {tile.span} are changed while a dot may still read them")
                tile.memory.copy_(new)
            self.written[tile.span] = note._replace(updated=note.updated | {threading.get_ident()})
            return True

    def check(self, span: tuple[int, int], tile: tuple[int, int, int, int], *, updating: bool = False) -> None:
        """Check that a tile may be read by this thread."""
        with self.lock:
            note = self.written.get(span)
            if note is None:
                whole = [at for at in self.written if at[0] <= span[0] and span[1] <= at[1]]
                found = f"they were written as {whole}" if whole else "not all of them were written"
                raise SharedMemoryError(f"bytes {span} are read, but {found}")
            if note.tile != tile:
                raise SharedMemoryError(f"bytes {span} are read as a tile {tile}, but were written as {note.tile}")
            if note.barrier is not None and this_thread.seen.get(note.barrier, 0) <= note.phase:
                raise SharedMemoryError(f"bytes {span} are read before the barrier of their copy was waited for")
            if note.updated and threading.get_ident() not in note.updated and not updating:
                raise SharedMemoryError(f"bytes {span} are read by a consumer that did not write to them as others did")
            if note.barrier is None and note.thread != threading.get_ident():
                raise SharedMemoryError(f"bytes {span} are read by another consumer than the one that stored them")


class SharedTile:
    """A tile in an allocation, or several of them: a view."""

    def __init__(self, allocation: Allocation, memory: Any, layout: TileLayout, *, transposed: bool = False) -> None:
        self.allocation, self.memory, self.layout, self.transposed = allocation, memory, layout, transposed

    def index(self, n: Any) -> SharedTile:
        if not 0 <= int(n) < self.memory.shape[0]:
            raise SharedMemoryError(f"tile {int(n)} of {self.memory.shape[0]}")
        return SharedTile(self.allocation, self.memory[int(n)], self.layout)  # whose rank is that of one tile

    def reshape(self, shape: Sequence[int]) -> SharedTile:
        return SharedTile(self.allocation, self.memory.view(*shape), self.layout._replace(rank=len(shape)))

    def permute(self, axes: Sequence[int]) -> SharedTile:
        return SharedTile(self.allocation, self.memory.permute(*axes), self.layout, transposed=True)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: TileLayout) -> SharedTile:
        size = math.prod(shape) * dtype.itemsize
        if size != self.allocation.size:
            raise SharedMemoryError(f"{self.allocation.size} bytes are reinterpreted as {size}")
        if layout.alignment > self.allocation.layout.alignment:
            known = self.allocation.layout.alignment
            raise SharedMemoryError(f"memory aligned to {known} is reinterpreted as tiles that need {layout.alignment}")
        return SharedTile(self.allocation, self.allocation.bytes.view(dtype).view(*shape), layout)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end in the allocation: tiles have no gaps."""
        size = self.memory.element_size()
        first = self.memory.storage_offset() * size
        return first, first + self.memory.numel() * size

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How the bytes lie."""
        rows, width = self.memory.shape[-2:]
        if self.transposed:
            rows, width = width, rows
        return self.layout.swizzle, 8 * self.memory.element_size(), rows, width

    def read(self) -> Any:
        self.allocation.check(self.span, self.shape)
        return self.memory

    def write(self, value: Any, barrier: Any = None) -> None:
        phase = barrier.phase if barrier is not None else 0
        self.allocation.write(self.span, Written(self.shape, threading.get_ident(), barrier, phase))
        self.memory.copy_(value)

    def load(self, layout: Any) -> Any:
        self.allocation.check(self.span, self.shape, updating=True)
        return self.memory.clone()

    def check_fenced(self) -> None:
        """Check that nothing of the tile was stored by this thread since its last fence."""
        low, high = self.span
        for allocation, (first, end) in this_thread.unfenced:
            if allocation is self.allocation and first < high and low < end:
                raise SharedMemoryError(f"bytes {self.span} are read by the copy engine or a dot without a fence")

    def store(self, value: Any) -> None:
        this_thread.unfenced.append((self.allocation, self.span))
        if not self.allocation.update(self, value):
            self.write(value)

    def begin_reading(self, dot: Any) -> None:
        with self.allocation.lock:
            self.allocation.readers.append((*self.span, dot))

    def end_reading(self, dot: Any) -> None:
        with self.allocation.lock:
            self.allocation.readers.remove((*self.span, dot))
