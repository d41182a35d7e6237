# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Rounding to whole numbers, true division of integers and powers, against NumPy on every backend."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from arrays import poisoned, same
from monotile.language import Const, Tensor, arange, cdiv, ceil, floor, grad, int32, kernel, program_id, trunc
from monotile.language import round as nearest
from usable import TRITON, usable

POINTS = np.array(
    [0.0, -0.0, 0.3, -0.3, 0.5, -0.5, 0.49999997, 1.5, 2.5, -1.5, -2.5, 7.0, -7.0, 1e-45, np.inf, -np.inf, np.nan,
     4194303.5, -4194303.5, 8388607.5, -8388607.5, 8388609.0, 2.0**31, -(2.0**31), 3e9, -3e38],
    np.float32,
)  # fmt: skip
ROUNDINGS = {
    "floor": (floor, np.floor),
    "ceil": (ceil, np.ceil),
    "round": (nearest, np.rint),
    "trunc": (trunc, np.trunc),
}


@pytest.fixture(params=usable("interpreter", "cpu", "metal", *TRITON))
def backend(request: pytest.FixtureRequest) -> str:
    """Here Metal text is run, too."""
    name: str = request.param
    return name


@kernel
def apply(x: Tensor["N"], y: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = f(x[rows])


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding(backend: str, name: str) -> None:
    """Infinities and NaN stay, and so does the sign of zero."""
    f, oracle = ROUNDINGS[name]
    y = poisoned(POINTS.shape)
    apply(POINTS, y, f=f, backend=backend)
    same(y, oracle(POINTS))
    assert (np.signbit(y) == np.signbit(oracle(POINTS))).all()


@pytest.mark.parametrize("dtype", ["float16", "int32", "uint8"])
def test_rounding_of_other_types(backend: str, dtype: str) -> None:
    x = np.array([0, 1, 2.5, 3.5, 7.75], np.float32).astype(dtype)
    wide = "float32" if dtype == "float16" else "int32"
    for f, oracle in ROUNDINGS.values():
        y = poisoned(5, wide)
        apply(x, y, f=f, backend=backend)
        same(y, oracle(x.astype(np.float32)).astype(wide))


def test_derivatives_of_rounding_are_zero(backend: str) -> None:
    """At whole numbers, where infinite and at NaN, too: the derivative of floor(x) * x is floor(x)."""
    for f in (floor, ceil, nearest, trunc):
        y, whole = poisoned(POINTS.shape), poisoned(POINTS.shape)
        apply(POINTS, y, f=lambda x, f=f: grad(f)(x), backend=backend)
        assert (y == 0).all()
        apply(POINTS, y, f=lambda x, f=f: grad(lambda v: f(v) * v)(x), backend=backend)
        apply(POINTS, whole, f=f, backend=backend)
        same(y, whole)


def test_rounding_of_constants(backend: str) -> None:
    """Of compile-time numbers the words give ints, as in Python."""
    y = poisoned(1)
    apply(
        np.zeros(1, np.float32), y, f=lambda x: x + floor(-2.5) + ceil(0.5) + nearest(3.5) + floor(7), backend=backend
    )
    assert y[0] == -3 + 1 + 4 + 7
    apply(np.zeros(1, np.float32), y, f=lambda x: x + arange(floor(4.2)).max(), backend=backend)
    assert y[0] == 3
    apply(np.full(1, 2.5, np.float32), y, f=lambda x: round(x), backend=backend)
    assert y[0] == 2


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_functions_of_libraries(library: str) -> None:
    module: Any = pytest.importorskip(library)
    for name, (_, oracle) in ROUNDINGS.items():
        function, y = getattr(module, name), poisoned(POINTS.shape)
        apply(POINTS, y, f=lambda x, function=function: function(x), backend="cpu")
        same(y, oracle(POINTS))
    y = poisoned(POINTS.shape)
    apply(POINTS, y, f=lambda x: module.where(x > 0, module.full_like(x, 2.0), module.zeros_like(x)), backend="cpu")
    same(y, np.where(POINTS > 0, np.float32(2), np.float32(0)))
    assert library in sys.modules


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint32"])
def test_quotients_of_integers_are_floats(backend: str, dtype: str) -> None:
    x = np.array([0, 1, 3, 7, 100, 127], dtype)
    for f, oracle in (
        (lambda x: x / 8, lambda x: x / np.float32(8)),
        (lambda x: 5 / (x + 1), lambda x: np.float32(5) / (x + np.float32(1))),
        (lambda x: (x - 3) / (x + 2).astype(int32), lambda x: (x - np.float32(3)) / (x + np.float32(2))),
    ):
        signed = x[3:] if dtype == "uint32" else x  # below 3 the difference wraps
        y = poisoned(signed.shape)
        apply(signed, y, f=f, backend=backend)
        same(y, oracle(signed.astype(np.float32)))


def test_powers(backend: str) -> None:
    x, y = np.array([0.25, 1.0, 4.0, 9.0], np.float32), poisoned(4)
    apply(x, y, f=lambda x: x**-0.5, backend=backend)
    same(y, np.float32(1) / np.sqrt(x))
    apply(x, y, f=lambda x: 2.0**x, backend=backend)
    np.testing.assert_allclose(y, 2.0**x, rtol=1e-6)
