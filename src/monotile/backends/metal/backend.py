"""The metal backend: passes, Metal text, and on machines without an Apple GPU the runner."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import ir
from ...dtypes import to_numpy
from ...errors import ArgumentShape, InternalError
from ...passes import pipeline
from ...passes.grid import Grid
from ..base import Backend, Program
from .render import Rendered, render
from .runner import build, launch
from .runner.report import Report

OPTIONS = pipeline.Options(peel_bounds=True)
MOST_PROGRAMS = 2**31 - 1


class MetalProgram(Program):
    """A kernel as Metal text, run on the CPU."""

    def __init__(self, kernel: ir.Kernel, order: str) -> None:
        self.kernel, self.order = kernel, order
        self.rendered: Rendered = render(kernel)
        self.grid = Grid(kernel)
        self.report: Report | None = None  # of the last launch

    def bind(self, words: Sequence[int]) -> Bound:
        shapes, strides, at = [], [], 1
        for tensor in self.kernel.tensors:
            shapes.append(words[at : at + tensor.rank])
            strides.append(words[at + tensor.rank : at + 2 * tensor.rank])
            at += 2 * tensor.rank + 1
        spans = tuple(map(_span, shapes, strides))
        meta = []
        for index, what, n in self.rendered.longs:
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
        buffers: dict[int | str, Any] = {}
        for tensor, address, (low, high) in zip(self.kernel.tensors, addresses, bound.spans, strict=True):
            dtype = to_numpy(tensor.dtype)
            size = (high - low) * dtype.itemsize
            empty: np.ndarray[Any, Any] = np.empty(0, dtype)
            memory = (ctypes.c_uint8 * size).from_address(address + low * dtype.itemsize)
            buffers[tensor.index] = np.ctypeslib.as_array(memory).view(dtype) if size else empty
        rendered, count = self.rendered, len(self.kernel.tensors)
        values = dict(zip([name for name, _ in self.kernel.scalars], scalars, strict=True))
        buffers[count] = bound.meta
        if rendered.integers:
            buffers[count + 1] = np.array([values[name] for name in rendered.integers], np.int64)
        if rendered.floats:
            buffers[count + 2] = np.array([values[name] for name in rendered.floats], np.float32)
        report = launch.run(rendered.source, rendered.name, buffers, programs, rendered.threads, order=self.order)
        self.report = report
        if not report.clean:
            raise InternalError(f"the Metal text of {rendered.name} did something wrong:\n{report}")


@dataclass(frozen=True)
class Bound:
    words: Sequence[int]
    spans: tuple[tuple[int, int], ...]  # elements each tensor covers, from its first element
    meta: np.ndarray[Any, Any]


def _span(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + 1


@dataclass(frozen=True)
class MetalBackend(Backend):
    """`order` is the one in which the runner runs threads; results do not depend on it."""

    order: str = "ascending"
    name = "metal"

    def why_not(self) -> str | None:
        return build.why_not()

    def accepts(self, device: str) -> bool:
        return device == "cpu"

    def compile(self, kernel: ir.Kernel) -> Program:
        return MetalProgram(self.lower(kernel), self.order)

    def lower(self, kernel: ir.Kernel, watch: Callable[[str, ir.Kernel], None] | None = None) -> ir.Kernel:
        kernel = ir.copy(kernel)
        pipeline.run(kernel, OPTIONS, watch)
        return kernel

    def stages(self, kernel: ir.Kernel) -> dict[str, Callable[[], str]]:
        def passes() -> str:
            texts = [f"# frontend\n{ir.show(kernel)}"]
            self.lower(kernel, lambda name, k: texts.append(f"# {name}\n{ir.show(k)}"))
            return "\n".join(texts)

        return {"ir": lambda: ir.show(kernel), "passes": passes, "metal": lambda: render(self.lower(kernel)).source}


BACKEND = MetalBackend()
