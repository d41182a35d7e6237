"""Run Metal kernels on the CPU, on Linux or macOS, and be told what they do wrong. No Apple hardware is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .backends.metal.runner.report import Counters, Finding, KernelFault, LaunchError, NoCompiler, Report, ShaderError

__all__ = [
    "ORDERS",
    "Counters",
    "Finding",
    "KernelFault",
    "LaunchError",
    "NoCompiler",
    "Report",
    "ShaderError",
    "poisoned",
    "run",
    "why_not",
]

ORDERS = ("ascending", "descending", "shuffled")


def run(
    source: str,
    kernel: str,
    buffers: Mapping[int | str, Any],
    grid: int | Sequence[int],
    threads: int | Sequence[int],
    *,
    order: str = "ascending",
    check_races: bool = True,
    constants: Mapping[int, bool | int | float] | None = None,
    threadgroup_memory: Mapping[int | str, int] | None = None,
    seed: int = 0,
) -> Report:
    """Runs `kernel` of the Metal text `source`: `grid` threadgroups of `threads` threads.

    `buffers` maps a buffer's index or its parameter's name to a contiguous NumPy array, a NumPy scalar or bytes; arrays
    that the kernel may write are written in place. `threadgroup_memory` gives the size in bytes of each `threadgroup`
    parameter, `constants` the value of each function constant by its index (0 when not given). `order` is the order in
    which threads run between barriers, one of `ORDERS`; `seed` picks the shuffled one.

    Nothing is raised for what the kernel does: the report has it. A shader that does not compile raises `ShaderError`,
    a launch that makes no sense `LaunchError`, and a machine without a compiler `NoCompiler`.
    """
    from .backends.metal.runner import launch

    return launch.run(
        source,
        kernel,
        buffers,
        grid,
        threads,
        order=order,
        check_races=check_races,
        constants=constants,
        threadgroup_memory=threadgroup_memory,
        seed=seed,
    )


def poisoned(shape: int | Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An output that shows what was never written: every byte is 255, a NaN in every floating type."""
    array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 255
    return array


def why_not() -> str | None:
    """Why kernels cannot be run here, with the cure; None when they can."""
    from .backends.metal.runner import build

    return build.why_not()
