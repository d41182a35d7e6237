"""The launches that a call of the library makes, without running or compiling them: what `monotile inspect` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..backends.choices import Choice
from ..ir import Kernel as KernelIR
from ..launch.captures import captures
from ..launch.kernel import Kernel
from ..runtime.tensors import View
from .calls import ArrayRef, CallBuilder
from .launches import SCALE
from .ops import FUNCTIONS


class DryLaunch(NamedTuple):
    """A launch that a call would make: the specialised kernel, and the choice of blocks and schedule."""

    kernel: Kernel
    form: KernelIR
    choice: Choice


class _Recorder(CallBuilder):
    """Lists launches where a call would compile them."""

    def __init__(self, inputs: Mapping[str, View], options: Any) -> None:
        super().__init__(inputs, captures(options).beside(inputs.values()), options.backend, options.threads)
        self.recorded: list[DryLaunch] = []

    def launch(self, kernel: Kernel, *args: Any, choice: Choice, threads: int | None, **consts: Any) -> None:
        views = [a.view if isinstance(a, ArrayRef) else 1.0 if a is SCALE else a for a in args]
        self.recorded.append(DryLaunch(kernel, kernel.ir(*views, **choice.blocks, **consts), choice))


class _DryBuilder(CallBuilder):
    """Checks a call and makes no launches."""

    def launch(self, kernel: Kernel, *args: Any, choice: Choice, threads: int | None, **consts: Any) -> None:
        """Leave it out."""


def check(function: str, inputs: Mapping[str, View | None], options: Any) -> None:
    """Raise the error that a call with arrays like `inputs` would raise; None stands for one that is left out."""
    captured = captures(options).beside(inputs.values())
    FUNCTIONS[function].plan(_DryBuilder(inputs, captured, options.backend, options.threads), options)


def launches(function: str, inputs: Mapping[str, View], options: Any) -> list[DryLaunch]:
    """Return the launches of a call of `function` with arrays like `inputs`, whose device may be a described one
    ("sm_90"); `options` are the function's named tuple of options."""
    recorder = _Recorder(inputs, options)
    FUNCTIONS[function].plan(recorder, options)
    return recorder.recorded
