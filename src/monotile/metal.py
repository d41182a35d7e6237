"""Run Metal kernels on the CPU, on Linux or macOS, and be told what they do wrong. No Apple hardware is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .backends.metal.runner import launch
from .backends.metal.runner.build import why_not
from .backends.metal.runner.launch import run
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

ORDERS = tuple(launch.ORDERS)


def poisoned(shape: int | Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An output that shows what was never written: every byte is 255, a NaN in every floating type."""
    array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 255
    return array
