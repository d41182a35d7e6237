# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Derivatives of functions as kernels use them: captured arrays, branches, other arguments, shapes, loops around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arrays import Array, poisoned, random, same
from monotile.language import (
    Const,
    Tensor,
    arange,
    dot,
    float32,
    full,
    grad,
    inf,
    int32,
    kernel,
    maximum,
    sqrt,
    tanh,
    value_and_grad,
    where,
    zeros,
)
from usable import TRITON, usable


@pytest.fixture(params=usable("interpreter", "cpu", "metal", *TRITON))
def backend(request: pytest.FixtureRequest) -> str:
    """Here Metal text is run, too."""
    name: str = request.param
    return name


@kernel
def with_scalar(x: Tensor["N"], y: Tensor["N"], d: Tensor["N"], k: int, *, f: Const, N: Const):
    y[:], d[:] = value_and_grad(f)(x[:], k)


@kernel
def scores(x: Tensor["M N"], y: Tensor["M N"], d: Tensor["M N"], *, mod: Const, M: Const, N: Const):
    """As attention calls a score_mod."""
    i, j = arange(M)[:, None], arange(N)[None, :]
    value, slope = value_and_grad(mod)(x[:, :], 1, 3, i, j)
    y[:, :], d[:, :] = value * 1.0, slope


TABLE = np.linspace(-1, 1, 7 * 9).astype(np.float32).reshape(7, 9)
INDEX = np.array([3, 0, 5, 2, 4, 1, 6, 8, 7], np.int32)
SLOPE = 0.125


def alibi(s, b, h, i, j):
    return s + SLOPE * (j - i)


def table_bias(s, b, h, i, j):
    return s * 0.5 + TABLE[i, INDEX[j]]


def table_factor(s, b, h, i, j):
    """A gather at an index that depends on the score has derivative zero."""
    return s * TABLE[i, j] + TABLE[0, (s * 2.0).astype(int32)]


def positions_only(s, b, h, i, j):
    return j - i


def hidden(s, b, h, i, j):
    return where((i + j) % 3 == 0, tanh(s), -inf)


def counted(s, b, h, i, j):
    """A bool beside a number is 0 or 1 in a function that is called for each element."""
    return (s * (i < j) + (i == j) * 0.5) * 3.0 - (j > 4) + (i + (j > 2)) / (2 - (i > 3))


def counted_slope(s, i, j):
    return 3.0 * (i < j) + 0.0 * s


SCORE_MODS: dict[str, tuple[Callable[..., Any], Callable[[Array, Array, Array], Array]]] = {
    "alibi": (alibi, lambda s, i, j: np.ones_like(s)),
    "table_bias": (table_bias, lambda s, i, j: np.full_like(s, 0.5)),
    "table_factor": (table_factor, lambda s, i, j: TABLE[i, j]),
    "positions_only": (positions_only, lambda s, i, j: np.zeros_like(s)),
    "counted": (counted, counted_slope),
    "hidden": (hidden, lambda s, i, j: np.where((i + j) % 3 == 0, 1 - np.tanh(s) ** 2, 0)),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod(name: str, backend: str) -> None:
    mod, slope = SCORE_MODS[name]
    x, y, d = random((7, 9)), poisoned((7, 9)), poisoned((7, 9))
    scores(x, y, d, mod=mod, backend=backend)
    i, j = np.arange(7)[:, None], np.arange(9)[None, :]
    np.testing.assert_allclose(d, slope(x, i, j), rtol=1e-6, atol=1e-6)
    if name == "counted":
        np.testing.assert_allclose(y, counted(x, 1, 3, i, j), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("k", "expected"), [(0, [0, 0, 0]), (1, [5.656854] * 3), (6, [0, 5.656854, 5.656854])])
def test_branch_at_run_time(k: int, expected: list[float], backend: str) -> None:
    """Where the branch taken does not depend on the argument, no later root makes NaN of its derivative."""
    x, y, d = np.array([0.5, 1.0, 2.0], np.float32), poisoned(3), poisoned(3)
    with_scalar(x, y, d, k, f=by_head, backend=backend)
    np.testing.assert_allclose(d, expected, rtol=1e-6)


def by_head(s, k):
    t = s * 2.0
    if k > 0:
        t = t * s
        if k > 5:
            t = maximum(t, 1.0)
    else:
        t = full(3, 0.0)
    return sqrt(t) * 4.0


@kernel
def captures(x: Tensor["N"], d: Tensor["N"], *, N: Const):
    """What a function captures is constant, even where it is the argument."""
    X = x[:]
    d[:] = grad(lambda s: s * X)(X)


def test_captured_values_are_constant(backend: str) -> None:
    x, d = random(11), poisoned(11)
    captures(x, d, backend=backend)
    same(d, x)


@kernel
def other_arguments(x: Tensor["N"], d: Tensor["N"], *, N: Const):
    def polynomial(s, a, b=1.0, *, c):
        return (a * s + b) * s + c

    d[:] = grad(polynomial)(x[:], 3.0, c=x[:]) + grad(polynomial)(x[:], 0.0, b=2.0, c=0.0)


def test_other_arguments_are_constant(backend: str) -> None:
    x, d = random(11), poisoned(11)
    other_arguments(x, d, backend=backend)
    np.testing.assert_allclose(d, 6 * x + 3, rtol=1e-5, atol=1e-5)


@kernel
def of_a_scalar(y: Tensor["M N"], d: Tensor["M N"], s: float, *, M: Const, N: Const):
    """A tile of which each element depends on the one number."""

    def f(t):
        rows = (t * (arange(M) + 1))[:, None]
        return (rows * (arange(N) + 2)[None, :] * t).T

    value, slope = value_and_grad(f)(s)
    y[:, :], d[:, :] = value.T, slope.T


def test_derivative_by_a_scalar(backend: str) -> None:
    y, d = poisoned((3, 5)), poisoned((3, 5))
    of_a_scalar(y, d, 1.5, backend=backend)
    outer = (np.arange(3) + 1)[:, None] * (np.arange(5) + 2)[None, :]
    np.testing.assert_allclose(y, outer * 1.5**2)
    np.testing.assert_allclose(d, outer * 3.0)


@kernel
def broadcasts(x: Tensor["N"], b: Tensor["M N"], y: Tensor["M N"], d: Tensor["M N"], *, M: Const, N: Const):
    y[:, :], d[:, :] = value_and_grad(lambda s: s * b[:, :] + s[None, :])(x[:])


def test_broadcast_argument(backend: str) -> None:
    x, b, y, d = random(9), random((4, 9), seed=1), poisoned((4, 9)), poisoned((4, 9))
    broadcasts(x, b, y, d, backend=backend)
    np.testing.assert_allclose(d, b + 1, rtol=1e-6)


@kernel
def of_narrow_tiles(x: Tensor["N"], d: Tensor["N"], *, N: Const):
    slope = grad(lambda s: s * s)(x[:])
    assert slope.dtype == float32
    d[:] = slope


def test_narrow_arguments_have_wide_derivatives(backend: str) -> None:
    x, d = random(20, "bfloat16"), poisoned(20)
    of_narrow_tiles(x, d, backend=backend)
    same(d, x.astype(np.float32) * 2)


@kernel
def inside_a_loop(x: Tensor["M N"], y: Tensor["N"], *, N: Const):
    total = zeros(N)
    for i in range(x.shape[0]):
        value, slope = value_and_grad(lambda s, i: tanh(s) * i)(x[i, :], i)
        total += value * slope
    y[:] = total


def test_in_a_loop(backend: str) -> None:
    x, y = random((6, 10)), poisoned(10)
    inside_a_loop(x, y, backend=backend)
    t, i = np.tanh(x.astype(np.float64)), np.arange(6)[:, None]
    np.testing.assert_allclose(y, (t * i * (1 - t * t) * i).sum(axis=0), rtol=1e-5, atol=1e-5)


@kernel
def beside_a_dot(x: Tensor["M K"], w: Tensor["K N"], y: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """A sum that does not depend on the argument is a constant."""

    def f(s):
        return s * dot(x[:, :], w[:, :]).sum(axis=1)[:, None]

    y[:, :] = grad(f)(dot(x[:, :], w[:, :]))


def test_sums_of_other_values(backend: str) -> None:
    x, w, y = random((4, 8)), random((8, 4), seed=1), poisoned((4, 4))
    beside_a_dot(x, w, y, backend=backend)
    expected = (x.astype(np.float64) @ w).sum(axis=1)[:, None]
    np.testing.assert_allclose(y, np.broadcast_to(expected, (4, 4)), rtol=1e-4, atol=1e-4)
