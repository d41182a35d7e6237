"""Run library calls as Metal source in every order of threads, and collect what the runner counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from monotile import backends, metal
from monotile.backends.metal import backend as metal_backend
from monotile.backends.metal import on_cpu
from monotile.backends.metal.runner import launch
from monotile.cli import catalogue
from monotile.launch.kernel import Kernel
from monotile.library import ops

Array = np.ndarray[Any, Any]


def forget(*others: Kernel) -> None:
    """Drop the programs compiled for another order or other block sizes, of the library and of other kernels."""
    backends.get.cache_clear()
    for kernel in (*catalogue.kernels().values(), *others):
        kernel._programs.clear()
        kernel._templates.clear()
        kernel._plans.clear()
    for op in ops.FUNCTIONS.values():
        op.calls.clear()


def in_every_order(
    call: Callable[[], dict[str, Array]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    fast_math: bool = False,
    orders: Sequence[str] = metal.ORDERS,
) -> dict[str, Array]:
    """The results of a call, which is compiled once and must give the same bits in every order."""
    forget()
    monkeypatch.setattr(metal_backend, "BACKEND", metal_backend.MetalBackend(fast_math=fast_math))
    found = []
    for order in orders:
        monkeypatch.setattr(on_cpu, "runner", SimpleNamespace(run=partial(_run_in, order)))
        found.append(call())
    for name, first in found[0].items():
        for other in found[1:]:
            np.testing.assert_array_equal(first.view(np.uint8), other[name].view(np.uint8))
    return found[0]


def _run_in(chosen: str, *args: Any, **options: Any) -> metal.Report:
    return launch.run(*args, **{**options, "order": chosen})


def collect_reports(monkeypatch: pytest.MonkeyPatch) -> list[metal.Report]:
    """A list to which every launch in the runner adds its report."""
    found: list[metal.Report] = []

    def run(*args: Any, **options: Any) -> metal.Report:
        found.append(launch.run(*args, **options))
        return found[-1]

    monkeypatch.setattr(on_cpu, "runner", SimpleNamespace(run=run))
    return found
