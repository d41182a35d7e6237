"""The metal backend: passes, Metal text, and a launcher for each kind of array."""

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
from .bindings import Launch, Launcher, emitted, words
from .choices import MetalChoices
from .narrow import narrow
from .on_cpu import OnCpu
from .on_mlx import OnMlx
from .on_mps import OnMps
from .quantify import quantify
from .render import render
from .runner import build
from .runner.report import Report
from .source import MetalSource

# What `quantify` leaves takes two rounds of cleaning.
OPTIONS = pipeline.PipelineOptions(
    peel_bounds=True, peel_all_bounds=True, after_peel=(quantify, narrow, *pipeline.CLEAN)
)
MOST_PROGRAMS = 2**31 - 1
# Ways to run Metal text, the one that costs least to ask for first.
WAYS: dict[str, Callable[[], str | None]] = {
    "the runner, for arrays in this machine's memory": lambda: build.why_not(),
    "torch tensors on 'mps'": lambda: on_mps.why_not(),
    "MLX arrays": lambda: on_mlx.why_not(),
}


@dataclass(frozen=True)
class Bound:
    words: Sequence[int]
    spans: tuple[tuple[int, int], ...]  # elements each tensor covers, from its first element
    meta: np.ndarray[Any, Any]


class MetalProgram(Program):
    """A kernel as Metal text, with the launchers it has needed so far."""

    needs_arrays = True

    def __init__(self, kernel: ir.Kernel, order: str, bfloat: bool) -> None:
        self.kernel, self.order = kernel, order
        self.rendered: MetalSource = render(kernel, bfloat)
        self.words = words(kernel, self.rendered)
        self.grid = Grid(kernel)
        self.launchers: dict[str, Launcher] = {}

    def bind(self, words: Sequence[int], device: str = "cpu") -> Bound:
        shapes, strides, at = [], [], 1
        for tensor in self.kernel.tensors:
            shapes.append(words[at : at + tensor.rank])
            strides.append(words[at + tensor.rank : at + 2 * tensor.rank])
            at += 2 * tensor.rank + 1
        spans = tuple(map(_span, shapes, strides))
        meta = []
        for index, what, n in self.rendered.meta:
            known = {"dim": shapes, "stride": strides}.get(what)
            meta.append(-spans[index][0] if known is None else known[index][n])
        return Bound(words, spans, np.array(meta or [0], np.int64))

    def launch(
        self, bound: Bound, arrays: Sequence[Any], addresses: Sequence[int], scalars: Sequence[Any], threads: int | None
    ) -> None:
        programs = self.grid.programs(bound.words, scalars)
        if programs > MOST_PROGRAMS:
            raise ArgumentShape(f"the grid has {programs} programs, of at most {MOST_PROGRAMS}; use larger blocks")
        if programs == 0:
            return
        given = dict(zip([name for name, _ in self.kernel.scalars], scalars, strict=True))
        numbers = [
            bound.meta.tolist(),
            *([given[entry["name"]] for entry in group.entries] for group in self.words[1:]),
        ]
        launcher = self.launcher(tensors.device(arrays[0]) if arrays else "cpu")
        launcher.run(Launch(programs, arrays, addresses, bound.spans, list(zip(self.words, numbers, strict=True))))

    def launcher(self, device: str) -> Launcher:
        kind = device.partition(":")[0]
        if kind not in self.launchers:
            self.launchers[kind] = self._launcher(kind)
        return self.launchers[kind]

    @property
    def report(self) -> Report | None:
        """The runner's, of the last launch in it."""
        runner = self.launchers.get("cpu")
        return runner.report if isinstance(runner, OnCpu) else None

    def _launcher(self, kind: str) -> Launcher:
        if kind == "mps":
            return OnMps(self.kernel, self.rendered)
        if kind == "mlx":
            return OnMlx(self.kernel, self.rendered)
        return OnCpu(self.kernel, self.rendered, self.order)


def _span(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + 1


@dataclass(frozen=True)
class MetalBackend(Backend):
    """`order` is the one in which the runner runs threads; results do not depend on it. Without `bfloat` the text is
    for Metal before 3.1, which has no such type."""

    order: str = "ascending"
    bfloat: bool = True
    name = "metal"
    choices = MetalChoices()

    def why_not(self) -> str | None:
        """One way is enough. A launch that needs another one says why it is not there."""
        reasons = []
        for why_not in WAYS.values():
            reason = why_not()
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)

    def accepts(self, device: str) -> bool:
        return device.partition(":")[0] in ("cpu", "mps", "mlx")

    def compile(self, kernel: ir.Kernel) -> Program:
        return MetalProgram(self.lower(kernel), self.order, self.bfloat)

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
    """Metal 3.1 came with macOS 14; elsewhere the text is for those who have it."""
    version = platform.mac_ver()[0].partition(".")[0]
    return not version.isdigit() or int(version) >= 14


BACKEND = MetalBackend(bfloat=_has_bfloat())
