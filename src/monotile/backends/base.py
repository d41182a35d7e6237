"""The contract of a backend, all of it.

A backend turns a specialised kernel into something that can be launched. It gets the IR as the front end made it, runs
the passes it wants (passes/pipeline.py) and hands back a `Program`. Backends never import one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ..ir import Kernel


class Program(ABC):
    """A compiled kernel."""

    @abstractmethod
    def bind(self, words: Sequence[int]) -> Any:
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
        `addresses` are those of the arrays' first elements, in the same order."""


class Backend(ABC):
    name: str

    @abstractmethod
    def why_not(self) -> str | None:
        """Why this backend cannot run here, with the cure; None when it can."""

    @abstractmethod
    def accepts(self, device: str) -> bool:
        """Whether arrays on this device can be used."""

    @abstractmethod
    def compile(self, kernel: Kernel) -> Program: ...

    @abstractmethod
    def stages(self, kernel: Kernel) -> dict[str, Callable[[], str]]:
        """The texts `monotile inspect` can show, by stage name."""
