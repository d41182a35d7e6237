"""Launch Metal source on arrays in this machine's memory: in the runner, which checks every access."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...dtypes import to_numpy
from ...errors import InternalError, RaceBetweenPrograms
from ...ir import MEMORY, WRITES, Kernel, Op, Tensor, walk
from ..races import CURE, STORE_CURE
from .bindings import LaunchArguments, Launcher
from .names import comment
from .runner import launch as runner
from .runner.report import Finding, Report
from .source import MetalSource


class OnCpu(Launcher):
    def __init__(self, kernel: Kernel, rendered: MetalSource, order: str, fast_math: bool = False) -> None:
        super().__init__(kernel, rendered)
        self.order, self.fast_math = order, fast_math
        self.report: Report | None = None  # of the last launch

    def run(self, launch: LaunchArguments) -> None:
        buffers: dict[int | str, Any] = {}
        for tensor, address, (low, high) in zip(self.kernel.tensors, launch.addresses, launch.spans, strict=True):
            dtype = to_numpy(tensor.dtype)
            size = (high - low) * dtype.itemsize
            empty: np.ndarray[Any, Any] = np.empty(0, dtype)
            memory = (ctypes.c_uint8 * size).from_address(address + low * dtype.itemsize)
            buffers[tensor.index] = np.ctypeslib.as_array(memory).view(dtype) if size else empty
        for group, numbers in launch.numbers:
            buffers[group.index] = np.array(numbers, to_numpy(group.dtype))
        name, threads = self.rendered.name, self.rendered.threads
        # Registers have addresses here: loops over them need not be unrolled, and compile faster.
        report = runner.run(
            self.rendered.rolled_source, name, buffers, launch.programs, threads, order=self.order,
            fast_math=self.fast_math,
        )  # fmt: skip
        self.report = report
        if not report.clean:
            raise self._race(report) or InternalError(f"the Metal text of {name} did something wrong:\n{report}")

    def _race(self, report: Report) -> RaceBetweenPrograms | None:
        """Return the error for accesses of the author's that nothing orders: by two programs, or by one scattered store
        that has a position twice. Anything else that was found is a fault of the text."""
        errors = [self._race_error(finding) for finding in report.findings]
        return None if None in errors else errors[0]

    def _race_error(self, finding: Finding) -> RaceBetweenPrograms | None:
        race = finding.race
        if race is None or race.buffer >= len(self.kernel.tensors):
            return None
        tensor = self.kernel.tensors[race.buffer]
        if race.between_groups:
            op = self._access_at(finding.line, tensor, WRITES if race.write else MEMORY - WRITES)
            did, before = "writes" if race.write else "reads", "wrote" if race.other_write else "read"
            found = f"program {race.group[0]} {did} an element of {tensor.name} that another program {before}"
            cure = CURE
        else:
            op = self._access_at(finding.line, tensor, WRITES)
            if op is None or op.kind != "scatter" or finding.line != finding.other_line:
                return None
            found, cure = f"one store writes twice to an element of {tensor.name}", STORE_CURE
        found += ": which comes first is not known"
        return RaceBetweenPrograms(found, f'{cure}; backend="interpreter" names the element', op.loc if op else None)

    def _access_at(self, line: int, tensor: Tensor, kinds: frozenset[str]) -> Op | None:
        """Return the access that a line of the text makes: the author's line stands before it, as a comment."""
        ops = [op for op in walk(self.kernel.body) if op.kind in kinds and op.attrs["tensor"] is tensor]
        lines = self.rendered.rolled_source.split("\n")[:line]
        said = next((text.strip() for text in reversed(lines) if text.strip().startswith("//")), None)
        ops = [op for op in ops if op.loc is not None and comment(op.loc.text) == said] or ops
        return ops[0] if len({(op.kind, op.loc) for op in ops}) == 1 else None
