"""The metal backend: passes, Metal source, and a launcher for each kind of array."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import ir
from ...errors import ArgumentShape
from ...passes import pipeline
from ...passes.grid import Grid
from ...runtime import tensors
from ..base import Backend, Emitted, Program
from . import on_mlx, on_mps
from .bindings import LaunchArguments, Launcher, emitted, number_buffers
from .bool_reductions import replace_bool_reductions
from .choices import MetalChoices
from .hidden_loads import skip_hidden_loads
from .infinities import bound_infinities
from .on_cpu import OnCpu
from .on_mlx import OnMlx
from .on_mps import OnMps
from .render import render
from .runner import build
from .runner.report import Report
from .source import MetalSource

# The ops that replace_bool_reductions builds take two rounds of cleaning.
PASSES = (replace_bool_reductions, skip_hidden_loads, *pipeline.CLEAN, bound_infinities, *pipeline.CLEAN)
OPTIONS = pipeline.PipelineOptions(peel_bounds=True, peel_all_bounds=True, after_peel=PASSES)
MOST_PROGRAMS = 2**31 - 1
# Where Metal source can run, cheapest to ask first, with the reason why it cannot run there.
RUNTIMES: dict[str, Callable[[], str | None]] = {
    "the runner, for arrays in this machine's memory": lambda: build.why_not(),
    "torch tensors on 'mps'": lambda: on_mps.why_not(),
    "MLX arrays": lambda: on_mlx.why_not(),
}


@dataclass(frozen=True)
class ShapeArguments:
    """The arguments of a launch that follow from lengths and strides."""

    words: Sequence[int]
    spans: tuple[tuple[int, int], ...]  # the elements each tensor covers, relative to its first element
    meta: np.ndarray[Any, Any]  # the contents of the buffer `meta`


class MetalProgram(Program):
    """A kernel as Metal source, with the launchers it has needed so far."""

    needs_arrays = True

    def __init__(self, kernel: ir.Kernel, order: str, bfloat: bool, fast_math: bool = False) -> None:
        self.kernel, self.order, self.fast_math = kernel, order, fast_math
        self.rendered: MetalSource = render(kernel, bfloat)
        self.number_buffers = number_buffers(kernel, self.rendered)
        self.grid = Grid(kernel)
        self.launchers: dict[str, Launcher] = {}

    def bind(self, words: Sequence[int], device: str = "cpu") -> ShapeArguments:
        shapes, strides, at = [], [], 1
        for tensor in self.kernel.tensors:
            shapes.append(words[at : at + tensor.rank])
            strides.append(words[at + tensor.rank : at + 2 * tensor.rank])
            at += 2 * tensor.rank + 1
        spans = tuple(map(_span, shapes, strides))
        meta = []
        for entry in self.rendered.meta:
            known = {"dim": shapes, "stride": strides}.get(entry.quantity)
            meta.append(-spans[entry.tensor][0] if known is None else known[entry.tensor][entry.axis])
        return ShapeArguments(words, spans, np.array(meta or [0], np.int64))

    def launch(
        self,
        bound: ShapeArguments,
        arrays: Sequence[Any],
        addresses: Sequence[int],
        scalars: Sequence[Any],
        threads: int | None,
    ) -> None:
        programs = self.grid.programs(bound.words, scalars)
        if programs > MOST_PROGRAMS:
            raise ArgumentShape(f"the grid has {programs} programs, of at most {MOST_PROGRAMS}; use larger blocks")
        if programs == 0:
            return
        values = dict(zip([name for name, _ in self.kernel.scalars], scalars, strict=True))
        meta, *others = self.number_buffers
        numbers = [(meta, bound.meta.tolist())]
        numbers += [(buffer, [values[entry["name"]] for entry in buffer.entries]) for buffer in others]
        launcher = self.launcher(tensors.device(arrays[0]) if arrays else "cpu")
        launcher.run(LaunchArguments(programs, arrays, addresses, bound.spans, numbers))

    def launcher(self, device: str) -> Launcher:
        kind = device.partition(":")[0]
        if kind not in self.launchers:
            self.launchers[kind] = self._launcher(kind)
        return self.launchers[kind]

    @property
    def report(self) -> Report | None:
        """The runner's report on the last launch in it."""
        runner = self.launchers.get("cpu")
        return runner.report if isinstance(runner, OnCpu) else None

    def _launcher(self, kind: str) -> Launcher:
        if kind == "mps":
            return OnMps(self.kernel, self.rendered)
        if kind == "mlx":
            return OnMlx(self.kernel, self.rendered)
        return OnCpu(self.kernel, self.rendered, self.order, self.fast_math)


def _span(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return the range of offsets that a tensor's elements have."""
    if 0 in shape:
        return 0, 0
    ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends) + 1


@dataclass(frozen=True)
class MetalBackend(Backend):
    """`order` is the order in which the runner runs threads; results do not depend on it. Without `bfloat` the source
    is for Metal before 3.1, which has no such type. `fast_math` is how the runner compiles it."""

    order: str = "ascending"
    bfloat: bool = True
    fast_math: bool = False
    name = "metal"
    choices = MetalChoices()

    def why_not(self) -> str | None:
        """Return None if any runtime is available; a launch that needs another one says why that is not."""
        reasons = []
        for why_not in RUNTIMES.values():
            reason = why_not()
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)

    def accepts(self, device: str) -> bool:
        return device.partition(":")[0] in ("cpu", "mps", "mlx")

    def compile(self, kernel: ir.Kernel) -> Program:
        return MetalProgram(self.lower(kernel), self.order, self.bfloat, self.fast_math)

    def lower(self, kernel: ir.Kernel) -> ir.Kernel:
        kernel = ir.copy(kernel)
        pipeline.run(kernel, OPTIONS)
        return kernel

    def stages(
        self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None
    ) -> dict[str, Callable[[], str]]:
        return {
            "ir": lambda: ir.show(kernel),
            "passes": lambda: pipeline.after_each(kernel, OPTIONS),
            "metal": lambda: render(self.lower(kernel), self.bfloat).source,
        }

    def emit(self, kernel: ir.Kernel, schedule: Any = None, device: str | None = None) -> Emitted:
        lowered = self.lower(kernel)
        return emitted(lowered, render(lowered, self.bfloat))


def _has_bfloat() -> bool:
    """True unless this is a Mac before macOS 14, which brought Metal 3.1."""
    version = platform.mac_ver()[0].partition(".")[0]
    return not version.isdigit() or int(version) >= 14


BACKEND = MetalBackend(bfloat=_has_bfloat())
