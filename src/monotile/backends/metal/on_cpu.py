"""Launch Metal source on arrays in this machine's memory: in the runner, which checks every access."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...dtypes import to_numpy
from ...errors import InternalError
from ...ir import Kernel
from .bindings import LaunchArguments, Launcher
from .runner import launch as runner
from .runner.report import Report
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
            raise InternalError(f"the Metal text of {name} did something wrong:\n{report}")
