"""Tensor descriptors: tiles that the GPU's copy engine (TMA) brings to shared memory.

A descriptor knows a tensor's lengths, so what lies outside reads as zero without a mask, and padding is not read at
all: a row of 80 is brought as 80 elements, whatever its tile is padded to. It needs an origin and strides that are
multiples of 16 bytes, a contiguous last dimension and no empty one. That is looked at when a call is bound and
launched; where it does not hold, the same kernel without descriptors runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....dtypes import DType, bool_, int32, uint8
from ....ir import Kernel, Op, Value, constant
from .memory import Memory
from .padding import padded

MOST_DIMENSIONS = 5
MOST_ROWS = 256
ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Described:
    """A tensor some loads of which go through a descriptor."""

    index: int
    bytes: int  # of an element
    dims: tuple[int, ...]  # words with its lengths
    strides: tuple[int, ...]  # words with its strides, but the last
    sides: tuple[int, ...] = ()  # of the tile, where the host makes the descriptor


class Descriptors:
    """Which loads use a descriptor, and the lines that make them."""

    def __init__(self, kernel: Kernel, memory: Memory, uses: Mapping[Value, list[Op]]) -> None:
        self.kernel, self.memory, self.uses = kernel, memory, uses
        self.names: dict[tuple[int, tuple[int, ...]], str] = {}
        self.lines: list[str] = []
        self.described: dict[int, Described] = {}

    def load(self, op: Op, starts: Sequence[str]) -> str | None:
        """The text of a load by descriptor, or None where there is none for it."""
        if not self.fits(op):
            return None
        sides = [padded(extent or 1) for extent in op.attrs["extents"]]
        name = self._descriptor(op, tuple(sides))
        shape = [side for side, extent in zip(sides, op.attrs["extents"], strict=True) if extent is not None]
        tile = f"{name}.load([{', '.join(starts)}])"
        return tile if len(shape) == len(sides) else f"tl.reshape({tile}, {shape})"

    def fits(self, op: Op) -> bool:
        """A tile that a product reads, and that a descriptor brings."""
        return self.brings(op) and self._multiplied(op.result)

    def brings(self, op: Op) -> bool:
        """A tile of rows of contiguous memory."""
        tensor, extents = op.attrs["tensor"], op.attrs["extents"]
        last = tensor.rank - 1
        if tensor.index in self.kernel.written or not 2 <= tensor.rank <= MOST_DIMENSIONS or tensor.unit != last:
            return False
        if (
            any(v.dtype is not int32 for v in op.operands)
            or len(op.result.shape) != 2
            or extents[last] is None
            or 1 in op.result.shape
        ):
            return False
        if not all(self._padding_is_outside(op, axis) for axis, extent in enumerate(extents) if extent is not None):
            return False
        rows, width = (padded(side) for side in op.result.shape)
        known = [s for s in tensor.strides[:-1] if s is not None]
        even = all(s >= 0 and s * tensor.dtype.bytes % ALIGNMENT == 0 for s in known)
        return even and rows <= MOST_ROWS and width * tensor.dtype.bytes >= 2 * ALIGNMENT

    @staticmethod
    def _padding_is_outside(op: Op, axis: int) -> bool:
        """Padding must be zero, which here means outside the tensor: then the tile has all of this dimension."""
        extent = op.attrs["extents"][axis]
        return padded(extent) == extent or (
            op.attrs["tensor"].dims[axis] == extent and constant(op.operands[axis]) == 0
        )

    def _multiplied(self, value: Value) -> bool:
        readers = self.uses.get(value, ())
        return any(
            op.kind == "dot" or (op.kind in ("trans", "where") and self._multiplied(op.result)) for op in readers
        )

    def _descriptor(self, op: Op, sides: tuple[int, ...]) -> str:
        tensor, memory = op.attrs["tensor"], self.memory
        key = tensor.index, sides
        if key not in self.names:
            name = self.names[key] = memory.names.fresh(f"{tensor.name}_tiles")
            axes = range(tensor.rank)
            lengths = ", ".join(str(memory.dim(tensor, axis)) for axis in axes)
            strides = ", ".join(f"tl.cast({memory.stride(tensor, axis)}, tl.int64)" for axis in axes[:-1])
            made = f"{memory.pointer(tensor)}, [{lengths}], [{strides}, 1], {list(sides)}"
            self.lines.append(f"{name} = tl.make_tensor_descriptor({made})")
            first = memory.word_at[tensor.index] + 1
            dims = tuple(first + axis for axis in axes)
            self.described[tensor.index] = Described(
                tensor.index, tensor.dtype.bytes, dims, tuple(first + tensor.rank + axis for axis in axes[:-1])
            )
        return self.names[key]


def apply(described: Sequence[Described], words: Sequence[int]) -> bool:
    """Whether the lengths and strides of a call are such as descriptors need."""
    for tensor in described:
        if any(words[at] < 1 for at in tensor.dims):
            return False
        least = 0 if tensor.sides else 1  # the host can describe a tensor that is repeated along a dimension
        if any(words[at] < least or words[at] * tensor.bytes % ALIGNMENT for at in tensor.strides):
            return False
    return True


def copied(dtype: DType) -> DType:
    """As what elements are copied: the copy engine knows no bool."""
    return uint8 if dtype is bool_ else dtype


def shared_layout(tile: Described) -> Any:
    """How a tile that the host describes lies in shared memory: as the matrix units read it."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_bytes(tile), 8 * tile.bytes, len(tile.sides))


def swizzle_bytes(tile: Described) -> int:
    """Return the width of the swizzle in which a tile's rows lie in shared memory."""
    return min(128, tile.sides[-1] * tile.bytes)


class Brief:
    """As much of a descriptor as Triton's launcher looks at, and what it passes for it (launcher.py)."""

    __slots__ = ("address", "shape", "strides", "words")
    padding = "zero"

    def __init__(self, address: int, tile: Described, words: Sequence[int]) -> None:
        self.address = address
        self.shape = [words[at] for at in tile.dims]
        self.strides = [*[words[at] for at in tile.strides], 1]
        self.words: list[Any] = []

    @property
    def base(self) -> Brief:
        return self

    def data_ptr(self) -> int:
        return self.address


def whole(tile: Described, words: Sequence[int], base: Any) -> Any:
    """A descriptor as Triton's compiler wants it. `base` has an address and a torch dtype."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    brief = Brief(0, tile, words)
    return TensorDescriptor(base, brief.shape, brief.strides, list(tile.sides), shared_layout(tile))
