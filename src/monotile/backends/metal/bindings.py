"""The buffers of a launch of Metal source: the tensors, then lengths and strides, then scalars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...dtypes import DType, float32, int64
from ...errors import DeviceLimit
from ...ir import Kernel, Tensor
from .. import manifest
from ..base import Emitted
from .dialect import TYPES
from .preamble import MetaEntry
from .source import MetalSource

MOST_BUFFERS = 31  # of a Metal function
MOST_BYTES = 4096  # that can be bound without a buffer object
MEANINGS = {"offset": "offset", "dim": "length", "stride": "stride"}


@dataclass(frozen=True)
class NumberBuffer:
    """Numbers that are bound together as one buffer; `entries` says what each of them is."""

    index: int
    name: str
    dtype: DType
    entries: tuple[manifest.Entry, ...]


@dataclass(frozen=True)
class LaunchArguments:
    """One launch: the arrays, with the address of each first element and the elements they span around it, and the
    contents of each number buffer."""

    programs: int
    arrays: Sequence[Any]
    addresses: Sequence[int]
    spans: Sequence[tuple[int, int]]
    numbers: Sequence[tuple[NumberBuffer, Sequence[int | float]]]


class Launcher(ABC):
    """A kernel for one kind of array: made once, run for every launch."""

    def __init__(self, kernel: Kernel, rendered: MetalSource) -> None:
        self.kernel, self.rendered = kernel, rendered

    @abstractmethod
    def run(self, launch: LaunchArguments) -> None: ...


def number_buffers(kernel: Kernel, rendered: MetalSource) -> tuple[NumberBuffer, ...]:
    """Return the buffers after those of the tensors, in order."""
    meta = [_entry(kernel.tensors[entry.tensor], entry) for entry in rendered.meta]
    contents = (
        ("meta", int64, meta or [{"meaning": "nothing"}]),
        ("integers", int64, [manifest.scalar(n) for n in rendered.integers]),
        ("floats", float32, [manifest.scalar(n) for n in rendered.floats]),
    )
    used = [(name, dtype, tuple(entries)) for name, dtype, entries in contents if entries]
    first = len(kernel.tensors)
    found = tuple(NumberBuffer(first + n, *content) for n, content in enumerate(used))
    if first + len(found) > MOST_BUFFERS or any(len(w.entries) * w.dtype.bytes > MOST_BYTES for w in found):
        cure = "pass fewer tensors, or several as parts of one"
        raise DeviceLimit(f"{kernel.name} has {first} tensors; Metal takes {MOST_BUFFERS} buffers in all: {cure}")
    return found


def _entry(tensor: Tensor, entry: MetaEntry) -> manifest.Entry:
    return manifest.word(MEANINGS[entry.quantity], tensor, None if entry.quantity == "offset" else entry.axis)


def emitted(kernel: Kernel, rendered: MetalSource) -> Emitted:
    """Return the source, and everything that a launch of it has to be given."""
    symbols = manifest.Symbols(kernel)
    buffers: list[manifest.Entry] = []
    for tensor in kernel.tensors:
        entry = manifest.tensor_entry(kernel, tensor, symbols)
        buffers.append({"index": tensor.index, **entry, "metal_type": TYPES[tensor.dtype.name]})
    for group in number_buffers(kernel, rendered):
        entry = {"name": group.name, "role": "words", "dtype": group.dtype.name, "words": list(group.entries)}
        buffers.append({"index": group.index, **entry, "metal_type": TYPES[group.dtype.name]})
    file = f"{rendered.name}.metal"
    entry = {
        "name": rendered.name,
        "file": file,
        "constants": manifest.constants(kernel),
        "buffers": buffers,
        "grid": [manifest.programs(kernel, symbols), "1", "1"],
        "threads": [rendered.threads, 1, 1],
        "math_modes": ["safe", "relaxed", "fast"],
        "language_version": "3.1" if "bfloat" in rendered.source else "2.3",
        "threadgroup_memory_bytes": -(-rendered.threadgroup_bytes // 16) * 16,
        "registers_per_thread": rendered.budget.registers,
        "threadgroups_per_core": rendered.budget.threadgroups_per_core,
    }
    return Emitted({file: rendered.source.encode()}, entry)
