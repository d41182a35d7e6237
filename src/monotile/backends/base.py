"""The contract of a backend, all of it.

A backend turns a specialised kernel into something that can be launched. It gets the IR as the front end made it, runs
the passes it wants (passes/pipeline.py) and hands back a `Program`. Backends never import one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnknownBackend
from ..ir import Kernel
from .choices import Choices


@dataclass(frozen=True)
class Emitted:
    """A kernel for programs that know nothing of monotile: files by name, and what its manifest says of it."""

    files: Mapping[str, bytes]
    entry: dict[str, Any]


class Program(ABC):
    """A compiled kernel."""

    needs_arrays = False  # whether a launch looks at the arrays themselves; where not, they may be left out

    @abstractmethod
    def bind(self, words: Sequence[int], device: str = "cpu") -> Any:
        """Prepares a launch for given lengths and strides: per tensor 0 (for its address), its lengths, its strides in
        elements; then 0 for every scalar. What it returns is kept and passed to every `launch` with these lengths."""

    @abstractmethod
    def launch(
        self,
        bound: Any,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        scalars: Sequence[Any],
        threads: int | None,
    ) -> None:
        """Runs every program of the grid and returns when the outputs are written (or, on a GPU, enqueued).
        `addresses` are those of the arrays' first elements, in the same order. An array begins at its address; its
        lengths and strides are those that were bound, whatever it says itself."""


class Backend(ABC):
    name: str
    choices: Choices = Choices()  # block sizes and schedules of the library's kernels
    schedules: type | None = None  # what a caller may give it: how a kernel is run, never what it computes

    @abstractmethod
    def why_not(self) -> str | None:
        """Why this backend cannot run here, with the cure; None when it can."""

    @abstractmethod
    def accepts(self, device: str) -> bool:
        """Whether arrays on this device can be used."""

    @abstractmethod
    def compile(self, kernel: Kernel) -> Program: ...

    def identity(self) -> str | None:
        """Names all that compiled code depends on besides the kernel; None if nothing is kept on disk."""
        return None

    def key(self, kernel: Kernel) -> str:
        """Under which a kernel's program is kept on disk, by a backend that has an identity."""
        raise NotImplementedError

    def cached(self, key: str, kernel: Kernel) -> Program | None:
        """The program kept under this key, of a kernel of which only parameters need to be known."""
        return None

    def compile_as(self, kernel: Kernel, schedule: Any) -> Program:
        """The same by a schedule of the caller's, of type `schedules`."""
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
