"""The start of a kernel: pointers, lengths and strides of its tensors, each bound to a name if the text uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...ir import Kernel, Tensor
from .dialect import MetalDialect
from .names import tensor_names
from .writer import Writer


class MetaEntry(NamedTuple):
    """One number of the array `meta`: a tensor's "offset", or its "dim" or "stride" along an axis."""

    tensor: int
    quantity: str
    axis: int


@dataclass(frozen=True)
class Binding:
    """A definition `prefix meta[index] suffix` that gives an entry of `meta` a name."""

    name: str
    prefix: str
    suffix: str
    entry: MetaEntry


@dataclass(frozen=True)
class TensorNames:
    pointer: str
    lengths: tuple[str, ...]
    strides: tuple[int | str, ...]  # numbers where they are known at compile time


class Preamble:
    """Names of every tensor's pointer, lengths and strides. Asking for one records that the text uses it."""

    def __init__(self, kernel: Kernel, dialect: MetalDialect, writer: Writer) -> None:
        self.kernel, self.dialect, self.writer = kernel, dialect, writer
        self.used: set[str] = set()
        self._bindings: list[Binding] = []
        self._lengths: dict[str, str] = {}  # a length that several tensors share is bound once
        self.names = tensor_names(kernel)
        writer.scopes[0] |= {*self.names.values(), *(f"{name}_p" for name in self.names.values())}
        self._tensors = {tensor.index: self._bind(tensor) for tensor in kernel.tensors}

    def pointer(self, tensor: Tensor) -> str:
        return self._use(self._tensors[tensor.index].pointer)

    def length(self, tensor: Tensor, axis: int) -> str:
        return self._use(self._tensors[tensor.index].lengths[axis])

    def stride(self, tensor: Tensor, axis: int) -> str:
        """Return the stride as a 64-bit number."""
        stride = self._tensors[tensor.index].strides[axis]
        return self._use(stride) if isinstance(stride, str) else f"{stride}L" if stride != 1 else "1"

    def tile_stride(self, tensor: Tensor, axis: int) -> str:
        """Return the stride for offsets inside a tile, where a constant one needs no more than 32 bits."""
        stride = self._tensors[tensor.index].strides[axis]
        return self._use(stride) if isinstance(stride, str) else str(stride)

    def offset(self, tensor: Tensor, axis: int, position: str) -> str:
        """Return the contribution of a position to an element's offset, in 64 bits: a tensor may be large."""
        if position == "0":
            return ""
        stride = self.stride(tensor, axis)
        return f"long({position})" if stride == "1" else f"{factor(position)} * {stride}"

    def tile_offset(self, tensor: Tensor, axis: int, position: str) -> str:
        """Return the contribution of a position inside a tile to an element's offset."""
        if position == "0":
            return ""
        stride = self.tile_stride(tensor, axis)
        return position if stride == "1" else f"{factor(position)} * {stride}"

    def pointer_type(self, tensor: Tensor) -> str:
        constness = "" if tensor.index in self.kernel.written else "const "
        return f"device {constness}{self.dialect.memory_type(tensor.dtype)} *"

    def definitions(self) -> tuple[list[str], tuple[MetaEntry, ...]]:
        """Return the definitions of the names in use, and the contents of `meta` in order."""
        bindings = [binding for binding in self._bindings if binding.name in self.used]
        lines = [f"{binding.prefix}meta[{n}]{binding.suffix}" for n, binding in enumerate(bindings)]
        return lines, tuple(binding.entry for binding in bindings)

    def _use(self, name: str) -> str:
        self.used.add(name)
        return name

    def _bind(self, tensor: Tensor) -> TensorNames:
        name = self.names[tensor.index]
        prefix = f"{self.pointer_type(tensor)}{name} = {name}_p + "
        self._bindings.append(Binding(name, prefix, ";", MetaEntry(tensor.index, "offset", 0)))
        lengths: list[str] = []
        strides: list[int | str] = []
        for axis, length in enumerate(tensor.dims):
            lengths.append(str(length) if isinstance(length, int) else self._length(tensor, axis, length))
            stride = tensor.strides[axis] if tensor.strides else None
            if stride is not None:
                strides.append(stride)
                continue
            stride_name = self.writer.name(f"{name}_s{axis}")
            strides.append(stride_name)
            entry = MetaEntry(tensor.index, "stride", axis)
            self._bindings.append(Binding(stride_name, f"const long {stride_name} = ", ";", entry))
        return TensorNames(name, tuple(lengths), tuple(strides))

    def _length(self, tensor: Tensor, axis: int, length: str) -> str:
        if length not in self._lengths:
            name = self.writer.name(length if length.isidentifier() else f"{self.names[tensor.index]}_n{axis}")
            self._lengths[length] = name
            entry = MetaEntry(tensor.index, "dim", axis)
            self._bindings.append(Binding(name, f"const int {name} = int(", ");", entry))
        return self._lengths[length]


def factor(text: str) -> str:
    """Return a text that can be multiplied: in parentheses unless it is a name or a number."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"
