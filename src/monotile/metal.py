"""Run Metal kernels on the CPU, on Linux or macOS, and report their mistakes. No Apple hardware is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .backends.metal.runner import launch
from .backends.metal.runner.build import why_not
from .backends.metal.runner.folder import ChainResult, run_chain
from .backends.metal.runner.launch import run
from .backends.metal.runner.report import Counters, Finding, KernelFault, LaunchError, NoCompiler, Report, ShaderError

__all__ = [
    "ORDERS",
    "ChainResult",
    "Counters",
    "Finding",
    "KernelFault",
    "LaunchError",
    "NoCompiler",
    "Report",
    "ShaderError",
    "poisoned",
    "run",
    "run_chain",
    "why_not",
]

ORDERS = tuple(launch.ORDERS)


def poisoned(shape: int | Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an output that shows which elements were not written: every byte is 255, NaN in every floating type."""
    array: np.ndarray[Any, Any] = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 255
    return array
