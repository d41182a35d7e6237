# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Infinities that a kernel makes itself, in every op that may meet one. On metal finite numbers stand for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arrays import poisoned, same
from monotile.language import (
    Const,
    Tensor,
    cos,
    cumsum,
    dot,
    erf,
    exp,
    exp2,
    fma,
    full,
    inf,
    kernel,
    log,
    log2,
    maximum,
    minimum,
    reciprocal,
    sigmoid,
    sin,
    sqrt,
    static_range,
    tanh,
    where,
)
from usable import usable

BACKENDS = usable("cpu", "metal")
X = np.array([1, 0, 3, 0, -2, np.nan, np.inf, -np.inf], np.float32)


@kernel
def apply(x: Tensor["N"], y: Tensor["P N"], *, functions: Const, P: Const, N: Const):
    for n in static_range(P):
        y[n, :] = functions[n](x[:])


def lowered(x: Any) -> Any:
    return where(x > 0.0, x, -inf)


def raised(x: Any) -> Any:
    return where(x > 0.0, x, inf)


def either(x: Any) -> Any:
    return where(x > 2.0, inf, where(x > 0.0, x, -inf))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "log / 2": lambda x: log(x) / 2.0,
    "log / -2": lambda x: log(x) / -2.0,
    "-inf / x": lambda x: lowered(x) / x,
    "x / inf": lambda x: x / raised(x),
    "inf / inf": lambda x: raised(x) / either(x),
    "2 / inf": lambda x: 2.0 / raised(x),
    "reciprocal": lambda x: reciprocal(either(x)),
    "-inf + x": lambda x: lowered(x) + x,
    "-inf - x": lambda x: lowered(x) - x,
    "x - inf": lambda x: x - either(x),
    "-inf + NaN": lambda x: log(x * 0.0) + x,
    "log(0) + exp(200)": lambda x: log(x * 0.0) + exp(x * 200.0),
    "inf - inf": lambda x: raised(x) - raised(x + 0.0),
    "inf * x": lambda x: either(x) * x,
    "inf * inf": lambda x: either(x) * lowered(x),
    "fma": lambda x: fma(either(x), 0.5, x),
    "fma of x": lambda x: fma(x, 2.0, lowered(x)),
    "abs": lambda x: abs(lowered(x)) * 2.0,
    "sqrt": lambda x: sqrt(raised(x)),
    "sqrt of -inf": lambda x: sqrt(lowered(x)),
    "log of inf": lambda x: log(raised(x)),
    "log2 of either": lambda x: log2(either(x)) + 1.0,
    "exp": lambda x: exp(either(x)),
    "exp of a root": lambda x: exp(sqrt(either(x))),
    "exp of a logarithm": lambda x: exp(log(raised(x))),
    "exp of a difference": lambda x: exp(lowered(x) - lowered(x + 0.0)),
    "exp2 of a quotient": lambda x: exp2(lowered(x) / 3.0),
    "sin": lambda x: sin(raised(x)),
    "cos": lambda x: cos(lowered(x)),
    "tanh": lambda x: tanh(either(x)),
    "sigmoid": lambda x: sigmoid(either(x)),
    "erf": lambda x: erf(either(x)),
    "maximum": lambda x: maximum(lowered(x), x),
    "minimum": lambda x: minimum(raised(x), x) / 2.0,
    "x < inf": lambda x: where(x < inf, 1.0, 2.0),
    "x < -inf": lambda x: where(x < -inf, 1.0, 2.0),
    "x <= inf": lambda x: where(x <= inf, 1.0, 2.0),
    "x <= -inf": lambda x: where(x <= -inf, 1.0, 2.0),
    "x >= inf": lambda x: where(x >= inf, 1.0, 2.0),
    "x > -inf": lambda x: where(lowered(x) > -inf, 1.0, 2.0),
    "x == y": lambda x: where(either(x) == x, 1.0, 2.0),
    "x <= y": lambda x: where(lowered(x) <= x, 1.0, 2.0),
    "x < y": lambda x: where(x < lowered(x), 1.0, 2.0),
    "x != y": lambda x: where(raised(x) != x, 1.0, 2.0),
    "sum": lambda x: x + either(x).sum(axis=0),
    "sum of -inf": lambda x: lowered(x).sum(axis=0) + x * 0.0,
    "max": lambda x: lowered(x).max(axis=0) / 2.0 + x,
    "argmax": lambda x: where(x < 2.0, -inf, -inf).argmax(axis=0).astype(x.dtype) + x,
    "cumsum": lambda x: cumsum(lowered(x), axis=0),
    "cumsum of either": lambda x: cumsum(either(x), axis=0),
    "reshape": lambda x: lowered(x).reshape(2, 4).reshape(8),
    "reshape / 2": lambda x: (either(x).reshape(2, 4) / 2.0).reshape(8),
    "lookup": lambda x: (0.0, -inf)[where(x > 0.0, 1, 0)],
    "lookup / 2": lambda x: (0.0, -inf, inf)[where(x > 0.0, 1, 2)] / 2.0 + x,
    "dot of few rows": lambda x: dot(lowered(x)[None, :], full((8, 8), 1.0)).reshape(8),
    "constants": lambda x: sin(full((8,), inf)) + log(full((8,), inf)) + x,
    "log of a constant": lambda x: log(full((8,), inf)) + x,
    "constant / x": lambda x: -inf / x,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", range(0, len(FUNCTIONS), 10))
def test_infinities_are_as_real_ones(backend: str, first: int) -> None:
    names = list(FUNCTIONS)[first : first + 10]
    functions = tuple(FUNCTIONS[name] for name in names)
    expected, y = poisoned((len(names), 8)), poisoned((len(names), 8))
    apply(X, expected, functions=functions, backend="interpreter")
    apply(X, y, functions=functions, backend=backend)
    for name, found, right in zip(names, y, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-7, err_msg=name)


@kernel
def in_dots(x: Tensor["N N"], w: Tensor["N N"], y: Tensor["4 N N"], *, N: Const):
    hidden = where(x[:, :] > 0.0, x[:, :], -inf)
    y[0, :, :] = dot(hidden, w[:, :])
    y[1, :, :] = dot(w[:, :], hidden)
    y[2, :, :] = cumsum(hidden, axis=1) / 2.0
    y[3, :, :] = dot(w[:, :], w[:, :]) + hidden


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", [4, 16])
def test_infinities_in_dots(backend: str, side: int) -> None:
    x, w = (np.random.default_rng(n).integers(-1, 5, (side, side)).astype(np.float32) for n in range(2))
    expected, y = poisoned((4, side, side)), poisoned((4, side, side))
    in_dots(x, w, expected, backend="interpreter")
    in_dots(x, w, y, backend=backend)
    same(y, expected)


@kernel
def carried(x: Tensor["N"], y: Tensor["3 N"], count: int, *, N: Const):
    least, most, total = full((N,), inf), full((N,), -inf), full((N,), 0.0)
    for n in range(count):
        least, most, total = x[:] + n, most / 2.0, log(total)
    y[0, :] = least
    y[1, :] = most
    y[2, :] = total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_infinities_that_a_loop_carries(backend: str, count: int) -> None:
    expected, y = poisoned((3, 8)), poisoned((3, 8))
    carried(X, expected, count, backend="interpreter")
    carried(X, y, count, backend=backend)
    same(y, expected)
