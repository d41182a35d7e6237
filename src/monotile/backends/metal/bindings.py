"""What a launch of Metal text binds to each buffer index: the tensors, then lengths and strides, then scalars."""

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
from .source import MetalSource

MOST_BUFFERS = 31  # of a Metal function
MOST_BYTES = 4096  # that can be bound without a buffer
MEANINGS = {"offset": "offset", "dim": "length", "stride": "stride"}


@dataclass(frozen=True)
class Words:
    """Numbers that are bound together. `entries` says what each of them is."""

    index: int
    name: str
    dtype: DType
    entries: tuple[manifest.Entry, ...]


@dataclass(frozen=True)
class Launch:
    """One launch: arrays with the address of their first elements and the elements they span around it, and the numbers
    of each group of words."""

    programs: int
    arrays: Sequence[Any]
    addresses: Sequence[int]
    spans: Sequence[tuple[int, int]]
    words: Sequence[tuple[Words, Sequence[int | float]]]


class Launcher(ABC):
    """A kernel on one kind of array: made once, run for every launch."""

    def __init__(self, kernel: Kernel, rendered: MetalSource) -> None:
        self.kernel, self.rendered = kernel, rendered

    @abstractmethod
    def run(self, launch: Launch) -> None: ...


def words(kernel: Kernel, rendered: MetalSource) -> tuple[Words, ...]:
    """The buffers after those of the tensors, in order."""
    lengths = [_entry(kernel.tensors[t], what, axis) for t, what, axis in rendered.meta]
    groups = (
        ("meta", int64, lengths or [{"meaning": "nothing"}]),
        ("integers", int64, [manifest.scalar(n) for n in rendered.integers]),
        ("floats", float32, [manifest.scalar(n) for n in rendered.floats]),
    )
    there = [(name, dtype, tuple(entries)) for name, dtype, entries in groups if entries]
    first = len(kernel.tensors)
    found = tuple(Words(first + n, *group) for n, group in enumerate(there))
    if first + len(found) > MOST_BUFFERS or any(len(w.entries) * w.dtype.bytes > MOST_BYTES for w in found):
        cure = "pass fewer tensors, or several as parts of one"
        raise DeviceLimit(f"{kernel.name} has {first} tensors; Metal takes {MOST_BUFFERS} buffers in all: {cure}")
    return found


def _entry(tensor: Tensor, what: str, axis: int) -> manifest.Entry:
    return manifest.word(MEANINGS[what], tensor, None if what == "offset" else axis)


def emitted(kernel: Kernel, rendered: MetalSource) -> Emitted:
    """The text, and everything that a launch of it has to be given."""
    symbols = manifest.Symbols(kernel)
    buffers: list[manifest.Entry] = []
    for tensor in kernel.tensors:
        entry = manifest.tensor_entry(kernel, tensor, symbols)
        buffers.append({"index": tensor.index, **entry, "metal_type": TYPES[tensor.dtype.name]})
    for group in words(kernel, rendered):
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
        "threadgroup_memory_bytes": -(-rendered.threadgroup_bytes // 16) * 16,
    }
    return Emitted({file: rendered.source.encode()}, entry)
