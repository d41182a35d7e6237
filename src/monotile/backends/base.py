"""The contract of a backend.

A backend compiles a specialised kernel: it gets the IR from the front end, runs its passes (passes/pipeline.py) and
returns a `Program`. Backends never import one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ..errors import UnknownBackend
from ..ir import Kernel
from .choices import Choices


@dataclass(frozen=True)
class Emitted:
    """A kernel for programs that do not use monotile: files by name, and its manifest entry."""

    files: Mapping[str, bytes]
    entry: dict[str, Any]


def picker(at: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks these items of a sequence, as fast as Python can."""
    if len(at) > 1:
        return itemgetter(*at)
    return lambda items: [items[n] for n in at]


class Program(ABC):
    """A compiled kernel."""

    needs_arrays = False  # True if a launch reads the array objects; otherwise addresses are enough

    @abstractmethod
    def bind(self, words: Sequence[int], device: str = "cpu") -> Any:
        """Prepare launches with given lengths and strides. `words` are for each tensor 0 (in place of its address), its
        lengths and its strides in elements; then 0 for every scalar. The result is passed to every such `launch`."""

    @abstractmethod
    def launch(
        self,
        bound: Any,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        scalars: Sequence[Any],
        threads: int | None,
    ) -> None:
        """Run every program of the grid and return when the outputs are written (on a GPU: enqueued). `addresses` are
        those of the arrays' first elements. Lengths and strides are the bound ones, not those of the array objects."""


class Backend(ABC):
    name: str
    choices: Choices = Choices()  # block sizes and schedules of the library's kernels
    schedules: type | None = None  # what a caller may pass: how a kernel runs, not what it computes

    @abstractmethod
    def why_not(self) -> str | None:
        """Return why this backend cannot run here, with the cure, or None if it can."""

    @abstractmethod
    def accepts(self, device: str) -> bool:
        """True if arrays on this device can be used."""

    @abstractmethod
    def compile(self, kernel: Kernel) -> Program: ...

    def identity(self) -> str | None:
        """Identify everything that compiled code depends on besides the kernel; None if nothing is cached on disk."""
        return None

    def key(self, kernel: Kernel, schedule: Any = None) -> str:
        """Cache key of a kernel's program on disk, for backends with an identity."""
        raise NotImplementedError

    def cached(self, key: str, kernel: Kernel, schedule: Any = None) -> Program | None:
        """Return the cached program of a kernel, of which only the parameters need to be known."""
        return None

    def compile_as(self, kernel: Kernel, schedule: Any) -> Program:
        """Compile with a schedule of type `schedules`."""
        raise NotImplementedError

    @abstractmethod
    def stages(self, kernel: Kernel, schedule: Any = None, device: str | None = None) -> dict[str, Callable[[], str]]:
        """Return the texts `monotile inspect` can show, by stage name: those of the program that a launch with this
        schedule (None: the backend's rule) would run on this device, an architecture such as "sm_90"."""

    def explain(self, kernel: Kernel, schedule: Any = None, device: str | None = None) -> list[str]:
        """Say in a few lines how a launch with this schedule would run on this device, and why."""
        return [f"path: backend {self.name!r} compiles every kernel in one way; it has no schedules to choose from"]

    def emit(self, kernel: Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        """Return what `monotile emit` writes. A backend that makes no text or code has nothing to write."""
        raise UnknownBackend(f"backend {self.name!r} makes nothing that could be written to a file")
