"""Tensor descriptors: tiles that TMA copies to shared memory.

A descriptor knows a tensor's lengths, so elements outside read as zero without a mask, and padding is not read at all:
a row of 80 is copied as 80 elements, whatever its tile is padded to. It needs an address and strides that are multiples
of 16 bytes, a contiguous last dimension and no empty one. That is checked when a call is bound and launched; where it
does not hold, the same kernel without descriptors runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....dtypes import FP8, DType, bool_, int32, uint8
from ....ir import Kernel, Op, Tensor, Value, constant, starts
from .memory import Memory
from .padding import padded

MAX_DIMENSIONS = 5
MAX_ROWS = 256
ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor some loads of which go through a descriptor."""

    index: int
    bytes: int  # of an element
    dims: tuple[int, ...]  # words with its lengths
    strides: tuple[int, ...]  # words with its strides, but the last
    block: tuple[int, ...] = ()  # the shape that a copy has, where the host makes the descriptor
    parameter: str = ""  # the name of that descriptor in the module


def described(tensor_index: int, memory: Memory, block: tuple[int, ...] = (), parameter: str = "") -> DescribedTensor:
    """Return where a launch finds the lengths and strides of a tensor."""
    tensor = memory.kernel.tensors[tensor_index]
    first = memory.word_at[tensor.index] + 1
    dims = tuple(first + axis for axis in range(tensor.rank))
    strides = tuple(first + tensor.rank + axis for axis in range(tensor.rank - 1))
    return DescribedTensor(tensor.index, tensor.dtype.bytes, dims, strides, block, parameter)


def descriptor_name(tiles: str) -> str:
    """Name the descriptor of a tensor, or of some tiles of it."""
    return f"{tiles}_desc"


class Descriptors:
    """Finds the loads that use a descriptor and writes the lines that make descriptors on the GPU."""

    def __init__(self, kernel: Kernel, memory: Memory, uses: Mapping[Value, list[Op]], *, views: bool = False) -> None:
        """`views`: whoever reads a copy takes care of what it has past the end of a view."""
        self.kernel, self.memory, self.uses, self.views = kernel, memory, uses, views
        self.names: dict[tuple[int, tuple[int, ...]], str] = {}
        self.lines: list[str] = []
        self.described: dict[int, DescribedTensor] = {}

    def load(self, op: Op, starts: Sequence[str]) -> str | None:
        """Write a load through a descriptor; None where it cannot have one."""
        if "spread" in op.attrs or not self.feeds_dot(op):
            return None
        block = [padded(extent or 1) for extent in op.attrs["extents"]]
        name = self._descriptor(op, tuple(block))
        shape = [side for side, extent in zip(block, op.attrs["extents"], strict=True) if extent is not None]
        tile = f"{name}.load([{', '.join(starts)}])"
        return tile if len(shape) == len(block) else f"{self.memory.tl}.reshape({tile}, {shape})"

    def feeds_dot(self, op: Op) -> bool:
        """Return True if TMA can copy a load's tile and a dot reads it."""
        return self.can_copy(op) and self._multiplied(op.result)

    def can_copy(self, op: Op) -> bool:
        """Return True if TMA can copy a load's tile: rows of contiguous memory."""
        tensor, extents = op.attrs["tensor"], op.attrs["extents"]
        last = tensor.rank - 1
        if tensor.index in self.kernel.written or not 2 <= tensor.rank <= MAX_DIMENSIONS or tensor.unit != last:
            return False
        if "view" in op.attrs and not self._can_copy_view(op):
            return False
        if (
            any(v.dtype is not int32 for v in op.operands)
            or len(op.result.shape) != 2
            or extents[last] is None
            or 1 in op.result.shape
        ):
            return False
        if not all(padding_is_outside(op, axis) for axis, extent in enumerate(extents) if extent is not None):
            return False
        rows, width = (padded(side) for side in op.result.shape)
        return strides_are_even(tensor) and rows <= MAX_ROWS and width * tensor.dtype.bytes >= 2 * ALIGNMENT

    def _can_copy_view(self, op: Op) -> bool:
        """A descriptor ends with its tensor, a view before it: rows past it may be copied, nothing else."""
        axes, extents = op.attrs["view"], op.attrs["extents"]
        rows = [axis for axis, extent in enumerate(extents) if extent is not None][:-1]
        return self.views and list(axes) == rows and padded(extents[axes[0]]) == extents[axes[0]]

    def _multiplied(self, value: Value) -> bool:
        readers = self.uses.get(value, ())
        return any(
            op.kind == "dot" or (op.kind in ("trans", "where") and self._multiplied(op.result)) for op in readers
        )

    def _descriptor(self, op: Op, block: tuple[int, ...]) -> str:
        tensor, memory, tl = op.attrs["tensor"], self.memory, self.memory.tl
        key = tensor.index, block
        if key not in self.names:
            name = self.names[key] = memory.names.fresh(descriptor_name(tensor.name))
            axes = range(tensor.rank)
            lengths = ", ".join(str(memory.dim(tensor, axis)) for axis in axes)
            strides = ", ".join(f"{tl}.cast({memory.stride(tensor, axis)}, {tl}.int64)" for axis in axes[:-1])
            made = f"{memory.pointer(tensor)}, [{lengths}], [{strides}, 1], {list(block)}"
            self.lines.append(f"{name} = {tl}.make_tensor_descriptor({made})")
            self.described[tensor.index] = described(tensor.index, memory)
        return self.names[key]


def padding_is_outside(op: Op, axis: int) -> bool:
    """True if the padding of a tile is outside its tensor, where it is read as zero and not written: then the tile has
    the last of this dimension."""
    extent, start = op.attrs["extents"][axis], constant(starts(op)[axis])
    return padded(extent) == extent or (start is not None and op.attrs["tensor"].dims[axis] == start + extent)


def strides_are_even(tensor: Tensor) -> bool:
    """True if the strides that are known at compile time are those of a descriptor."""
    known = [stride for stride in tensor.strides[:-1] if stride is not None]
    return all(stride >= 0 and stride * tensor.dtype.bytes % ALIGNMENT == 0 for stride in known)


def can_describe(tensors: Sequence[DescribedTensor], words: Sequence[int]) -> bool:
    """Return True if descriptors can have the lengths and strides of a call."""
    for tensor in tensors:
        if any(words[at] < 1 for at in tensor.dims):
            return False
        least = 0 if tensor.block else 1  # the host can describe a tensor that is repeated along a dimension
        if any(words[at] < least or words[at] * tensor.bytes % ALIGNMENT for at in tensor.strides):
            return False
    return True


def pointer_dtype(dtype: DType) -> DType:
    """Return the element type of a pointer: fp8 is held as its bits."""
    return uint8 if dtype in FP8 else dtype


def copied_dtype(dtype: DType) -> DType:
    """Return the element type of a copy: TMA has no bool."""
    return uint8 if dtype is bool_ else pointer_dtype(dtype)


def swizzle_bytes(tensor: DescribedTensor) -> int:
    """Return the width of the swizzle in which a tile's rows lie in shared memory."""
    return min(128, tensor.block[-1] * tensor.bytes)


def shared_layout(tensor: DescribedTensor) -> Any:
    """Return the layout of a copied tile in shared memory: the one that wgmma reads."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_bytes(tensor), 8 * tensor.bytes, len(tensor.block))


class HostDescriptor:
    """A descriptor as Triton's launcher reads it."""

    __slots__ = ("address", "shape", "strides")
    padding = "zero"

    def __init__(self, address: int, tensor: DescribedTensor, words: Sequence[int]) -> None:
        self.address = address
        self.shape = [words[at] for at in tensor.dims]
        self.strides = [*[words[at] for at in tensor.strides], 1]

    @property
    def base(self) -> HostDescriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


def tensor_descriptor(tensor: DescribedTensor, words: Sequence[int], base: Any) -> Any:
    """Make a descriptor as Triton's compiler wants it. `base` has an address and a torch dtype."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    facts = HostDescriptor(0, tensor, words)
    return TensorDescriptor(base, facts.shape, facts.strides, list(tensor.block), shared_layout(tensor))
