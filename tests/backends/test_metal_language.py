# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""A few tests of the language as Metal source, in every order of threads, in safe and in fast math. All of them run
with `python tests/language_on_metal.py`, with and without --fast-math."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from arrays import poisoned
from backends.metal_orders import forget
from language import test_control, test_reductions, test_regressions
from language_on_metal import run_in_every_order
from monotile import metal
from monotile.backends.metal import backend as metal_backend
from monotile.backends.metal import on_cpu
from monotile.language import Const, Tensor, kernel
from monotile.launch.kernel import Kernel

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
SAMPLE = [
    (test_control.test_a_branch_inside_a_loop_carries, True),
    (test_regressions.test_old_value_moves_on_past_a_branch, True),
    (test_reductions.test_two_reductions_of_nothing_but_nan, False),  # fast math takes NaN away
]


def kernels(module: str) -> list[Kernel]:
    return [value for value in vars(sys.modules[module]).values() if isinstance(value, Kernel)]


def choose(fast_math: bool, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the kernels of a module anew, for a runner that takes every order."""
    forget(*kernels(module))
    monkeypatch.setattr(metal_backend, "BACKEND", metal_backend.MetalBackend(fast_math=fast_math))
    monkeypatch.setattr(on_cpu, "runner", SimpleNamespace(run=run_in_every_order))


@pytest.fixture(autouse=True)
def forget_afterwards() -> Iterator[None]:
    yield
    forget(*(k for test, _ in SAMPLE for k in kernels(test.__module__)))


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize(("test", "in_fast_math"), SAMPLE)
def test_language(
    test: Callable[[str], None], in_fast_math: bool, fast_math: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_fast_math or not fast_math:
        choose(fast_math, test.__module__, monkeypatch)
        test("metal")


@kernel
def extremes(x: Tensor["N M"], high: Tensor["N"], low: Tensor["N"], *, N: Const, M: Const):
    high[:] = x[:, :].max(axis=1)
    low[:] = x[:, :].min(axis=1)


@pytest.mark.parametrize("columns", [1, 33])
def test_extremes_of_infinities(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A maximum of nothing but -inf or NaN is -inf, and one of the largest number is finite."""
    largest = np.finfo(np.float32).max
    rows = [-np.inf, np.inf, np.nan, largest, -largest, 3.0]
    x = np.repeat(np.array(rows, np.float32)[:, None], columns, axis=1)
    choose(False, __name__, monkeypatch)
    high, low = poisoned(6), poisoned(6)
    extremes(x, high, low, backend="metal")
    near = np.nextafter(
        largest, np.float32(0)
    )  # a number as large as the one that stands for an infinity moves a digit
    np.testing.assert_array_equal(high, np.array([-np.inf, np.inf, -np.inf, largest, -near, 3], np.float32))
    np.testing.assert_array_equal(low, np.array([-np.inf, np.inf, np.inf, near, -largest, 3], np.float32))
