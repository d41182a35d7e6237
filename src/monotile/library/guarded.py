"""Arrays between poisoned neighbours: for checks that a kernel reads and writes nothing outside its arrays.

Every byte around an array, between its rows where it is a strided view, and of a result before it is computed, is 0xFF:
NaN in every floating type. An element that is read from there shows as a wrong result, one that is written there is
found by comparing bytes."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..runtime import arrays, tensors

Array = np.ndarray[Any, Any]
POISON = 0xFF
GUARD = 8192  # bytes on each side; a multiple of every alignment


@dataclass(frozen=True)
class Placement:
    """How an array lies in memory: the order of its axes from the slowest, the spread of each (2: every second place is
    unused), elements that each row has more than it shows, axes along which it is repeated, and where it begins."""

    order: tuple[int, ...] = ()  # empty: as they are
    spread: tuple[int, ...] = ()  # of each axis; empty: 1
    padding: int = 0
    repeated: tuple[int, ...] = ()
    offset: int = 0  # elements

    def __str__(self) -> str:
        words = [f"axes in order {self.order}"] if self.order else []
        words += [f"spread {self.spread}"] if self.spread else []
        words += [f"rows {self.padding} longer"] if self.padding else []
        words += [f"repeated along {self.repeated}"] if self.repeated else []
        words += [f"from element {self.offset}"] if self.offset else []
        return ", ".join(words) or "dense"

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides in elements."""
        order = self.order or tuple(range(len(shape)))
        spread = self.spread or (1,) * len(shape)
        found, step = [0] * len(shape), 1
        for n, axis in enumerate(reversed(order)):
            if axis in self.repeated:
                continue
            found[axis] = step * spread[axis]
            step *= max(1, shape[axis]) * spread[axis]
            if n == 0:
                step += self.padding
        return tuple(found)


@dataclass
class GuardedArray:
    """An array in the middle of a poisoned block, on this machine and on the device that a backend uses."""

    name: str
    host: Array  # the view, in this machine's memory
    block: Array  # its whole block, as bytes
    given: Any = None  # the view on the device
    whole: Any = None  # the block on the device

    @classmethod
    def make(cls, name: str, values: Array, layout: Placement, *, on_gpu: bool) -> GuardedArray:
        """Copy values into a block of this layout; along repeated axes the first value counts."""
        shape, strides = values.shape, layout.strides(values.shape)
        size = values.dtype.itemsize
        last = sum(max(0, length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        start = GUARD // size + layout.offset
        block = np.full(2 * GUARD + (last + 1 + layout.offset + layout.padding) * size, POISON, np.uint8)
        host = np.ndarray(shape, values.dtype, block.data, start * size, tuple(s * size for s in strides))
        chosen = tuple(slice(0, 1) if axis in layout.repeated else slice(None) for axis in range(len(shape)))
        host[chosen] = values[chosen]
        found = cls(name, host, block, host, block)
        if on_gpu:
            found._move(start, strides)
        else:
            found.block = block.copy()
        return found

    def _move(self, start: int, strides: tuple[int, ...]) -> None:
        import torch

        self.whole = torch.from_numpy(self.block).cuda()
        size = self.host.dtype.itemsize
        flat = self.whole[: self.block.size // size * size].view(getattr(torch, self.host.dtype.name))
        self.given = torch.as_strided(flat, self.host.shape, strides, start)

    def changed(self) -> bool:
        """True if a byte of the array or around it is not what it was."""
        return not np.array_equal(_bytes(self.whole), self.block)


@dataclass
class GuardedResults:
    """The results and temporaries of a call, each in a poisoned block of its own."""

    blocks: list[tuple[Any, int]] = field(default_factory=list)  # with the bytes of the array

    def written_outside(self) -> bool:
        """True if a byte around a result or temporary was written."""
        found = [(_bytes(block), size) for block, size in self.blocks]
        return any((b[:GUARD] != POISON).any() or (b[GUARD + size :] != POISON).any() for b, size in found)


@contextlib.contextmanager
def guarded_results() -> Iterator[GuardedResults]:
    """Let the library allocate results and temporaries in poisoned blocks."""
    found = GuardedResults()

    def numpy_allocate(self: Any, template: Any) -> tuple[Any, int]:
        shape, dtype = template
        size = math.prod(shape) * np.dtype(dtype).itemsize
        block = np.full(2 * GUARD + size, POISON, np.uint8)
        found.blocks.append((block, size))
        array = block[GUARD : GUARD + size].view(dtype).reshape(shape)
        return array, tensors.address(array)

    def torch_allocate(self: Any, template: Any) -> tuple[Any, int]:
        size = template.numel() * template.element_size()
        block = self.torch.full((2 * GUARD + size,), POISON, dtype=self.torch.uint8, device=template.device)
        found.blocks.append((block, size))
        tensor = block[GUARD : GUARD + size].view(template.dtype).reshape(template.shape)
        return tensor, tensor.data_ptr()

    before = arrays.Numpy.allocate, arrays.Torch.allocate
    arrays.Numpy.allocate, arrays.Torch.allocate = numpy_allocate, torch_allocate  # type: ignore[method-assign]
    try:
        yield found
    finally:
        arrays.Numpy.allocate, arrays.Torch.allocate = before  # type: ignore[method-assign]


def with_captured(function: types.FunctionType, captured: Sequence[Any]) -> types.FunctionType:
    """The function with other arrays in place of those it captures, in order."""
    rest = iter(captured)
    cells = [c.cell_contents for c in function.__closure__ or ()]
    moved = tuple(types.CellType(next(rest) if isinstance(c, np.ndarray) else c) for c in cells)
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, moved)


def _bytes(block: Any) -> Array:
    return block if isinstance(block, np.ndarray) else block.cpu().numpy()
