# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Loops, branches, carried variables, helpers, named tuples and compile-time control flow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from arrays import poisoned, random, same
from monotile.language import (
    Const,
    Tensor,
    arange,
    blocks,
    cdiv,
    float32,
    full,
    int32,
    kernel,
    maximum,
    program_id,
    static_range,
    where,
    zeros,
)

# ---- loops -----------------------------------------------------------------------------------------------------------


@kernel
def trace(y: Tensor["_"], low: int, high: int, *, step: Const):
    """Store every value of the loop variable."""
    n = 0
    for i in range(low, high, step):
        y[n] = i
        n += 1
    y[n] = -1


@pytest.mark.parametrize("step", [1, 3, 16])
def test_range(backend: str, step: int) -> None:
    for low, high in ((0, 10), (0, 0), (5, 2), (-7, 8), (3, 4), (0, 48), (0, 49)):
        y, visited = poisoned(60, "int32"), list(range(low, high, step))
        trace(y, low, high, step=step, backend=backend)
        assert y[: len(visited) + 1].tolist() == [*visited, -1]
        assert (y[len(visited) + 1 :] == 77).all()


@kernel
def total(x: Tensor["M N"], y: Tensor["M"], *, BM: Const = 4, BN: Const = 8):
    """Nested loops with a carried tile; the inner loop starts from the outer loop's value."""
    i = program_id(cdiv(x.shape[0], BM)) * BM
    for r in range(BM):
        row = zeros(BN, int32)
        for j in blocks(x.shape[1], BN):
            row += x[i + r, j + arange(BN)]
        y[i + r] = row.sum(axis=0)


@pytest.mark.parametrize("shape", [(1, 1), (4, 8), (5, 9), (3, 0), (9, 31)])
def test_nested_loops(backend: str, shape: tuple[int, int]) -> None:
    x, y = random(shape, "int32"), poisoned(shape[0], "int32")
    total(x, y, backend=backend)
    same(y, x.sum(axis=1, dtype=np.int32))


@kernel
def fibonacci(y: Tensor["_"], count: int):
    """Carried values are swapped, and the bounds of the inner loop depend on the outer one."""
    a, b = 0, 1
    for n in range(count):
        y[n] = a
        for _ in range(n, n + 1):
            a, b = b, a + b


def test_carried_values_trade_places(backend: str) -> None:
    y = poisoned(10, "int32")
    fibonacci(y, 10, backend=backend)
    assert y.tolist() == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]


class State(NamedTuple):
    high: Any
    parts: Any


def start(n: int) -> State:
    return State(full(n, -1000, int32), (zeros(n, int32), zeros(n)))


def step(state: State, x: Any, *, weight: float = 1.0) -> State:
    count, mass = state.parts
    state = state._replace(high=maximum(state.high, x))
    return State(state.high, (count + 1, mass + x.astype(float32) * weight))


@kernel
def running(x: Tensor["M N"], y: Tensor["3 N"], *, N: Const):
    state = start(N)
    for i in range(x.shape[0]):
        state = step(state, x[i, :], weight=2.0)
    y[0, :] = state.high.astype(float32)
    y[1, :] = state[1][0].astype(float32)
    y[2, :] = state.parts[1]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_named_tuples_are_carried(backend: str, rows: int) -> None:
    x, y = random((rows, 6), "int32"), poisoned((3, 6))
    running(x, y, backend=backend)
    high = x.max(axis=0, initial=-1000)
    same(y, np.stack([high, np.full(6, rows), x.sum(axis=0) * 2]).astype(np.float32))


# ---- branches --------------------------------------------------------------------------------------------------------


@kernel
def classify(x: Tensor["N"], y: Tensor["N"]):
    i = program_id(x.shape[0])
    v = x[i]
    sign = 0
    if v > 0:
        sign = 1
        if v > 100:
            sign = 2
    elif v < 0:
        sign = -1
    y[i] = sign


def test_runtime_branches(backend: str) -> None:
    x, y = random(40, "int32"), poisoned(40, "int32")
    x[0] = 0
    classify(x, y, backend=backend)
    same(y, (np.sign(x) + (x > 100)).astype(np.int32))


@kernel
def only_some(x: Tensor["N"], y: Tensor["N"], limit: int, *, B: Const = 4):
    """A branch without an else, with a store and a carried tile in it."""
    i = program_id(cdiv(x.shape[0], B)) * B
    rows = i + arange(B)
    tile = x[rows]
    if i < limit and not (3 < i < 5):
        tile = tile + 1.0
        y[rows] = tile
    if i == 4 or i > 100:
        y[rows] = -tile


def test_branches_with_stores(backend: str) -> None:
    x, y = random(17), poisoned(17)
    only_some(x, y, 10, backend=backend)
    expected = poisoned(17)
    expected[0:4], expected[4:8], expected[8:12] = x[0:4] + 1, -x[4:8], x[8:12] + 1
    same(y, expected)


@kernel
def branch_in_loop(x: Tensor["N"], y: Tensor["2"]):
    even, odd = 0, 0
    for i in range(x.shape[0]):
        if i % 2 == 0:
            even += x[i]
        else:
            odd += x[i]
    y[0] = even
    y[1] = odd


def test_a_branch_inside_a_loop_carries(backend: str) -> None:
    for n in (0, 1, 2, 9):
        x, y = random(n, "int32"), poisoned(2, "int32")
        branch_in_loop(x, y, backend=backend)
        assert y.tolist() == [x[::2].sum(), x[1::2].sum()]


@kernel
def loop_in_branch(x: Tensor["N"], y: Tensor["1"], flag: bool):
    result = 0
    if flag:
        for i in range(x.shape[0]):
            result += x[i]
    else:
        result = 5
    y[0] = result


def test_a_loop_inside_a_branch(backend: str) -> None:
    x = random(9, "int32")
    for flag in (True, False):
        y = poisoned(1, "int32")
        loop_in_branch(x, y, flag, backend=backend)
        assert y[0] == (x.sum() if flag else 5)


@kernel
def choose(y: Tensor["N"], a: int, b: int, *, f: Const, N: Const):
    y[:] = f(a, b)


def test_expressions_of_conditions(backend: str) -> None:
    cases = (
        (lambda a, b: 1 if a < b else 2, lambda a, b: 1 if a < b else 2),
        (lambda a, b: 1 if 0 < a <= b else 2, lambda a, b: 1 if 0 < a <= b else 2),
        (lambda a, b: 1 if (a < b and b < 5) or a == 9 else 2, lambda a, b: 1 if (a < b and b < 5) or a == 9 else 2),
        (lambda a, b: where(not a < b, 3, 4), lambda a, b: 3 if not a < b else 4),
        (lambda a, b: 1 if a else 2, lambda a, b: 1 if a else 2),
        (lambda a, b: min(a, b, 3) + max(a, b), lambda a, b: min(a, b, 3) + max(a, b)),
        (lambda a, b: cdiv(a, b) + a // b - a % b, lambda a, b: -(-a // b) + a // b - a % b),
    )
    for f, oracle in cases:
        for a, b in ((1, 2), (2, 1), (0, 7), (9, 9), (-5, 3)):
            y = poisoned(2, "int32")
            choose(y, a, b, f=f, backend=backend)
            assert y.tolist() == [oracle(a, b)] * 2


# ---- known when compiled ---------------------------------------------------------------------------------------------


@kernel
def unrolled(x: Tensor["N"], y: Tensor["N"], *, powers: Const, scale: Const = None, N: Const):
    acc = zeros(N)
    for n in static_range(3):
        acc += x[:] * float(n + 1)
    for power, weight in powers:
        term = full(N, weight)
        for _ in static_range(power):
            term *= x[:]
        acc += term
    if scale is not None:
        acc *= scale
    else:
        undefined_here = acc + 1.0
        acc = undefined_here
    y[:] = acc


def test_static_loops_and_branches(backend: str) -> None:
    x = np.arange(-3, 4, dtype=np.float32)
    for scale in (None, 0.5):
        y = poisoned(7)
        unrolled(x, y, powers=((2, 1.0), (0, 4.0), (1, -1.0)), scale=scale, backend=backend)
        base = 6 * x + x * x + 4 - x
        same(y, base + 1 if scale is None else base * np.float32(0.5))


def twice(f: Any, x: Any) -> Any:
    return f(f(x))


def poly(x: Any, /, a: float, b: float = 2.0, *, c: float = 0.5) -> Any:
    """A docstring, defaults and keywords in a helper."""

    def inner(t: Any) -> Any:
        return t * a

    if c == 0.5:
        return inner(x) + b
    return inner(x) - b * c


@kernel
def with_helpers(x: Tensor["N"], y: Tensor["N"], *, shift: Const, N: Const):
    local = 3.0
    y[:] = twice(lambda t: t + local, x[:]) + poly(x[:], 2.0) + poly(x[:], *(1.0,), b=4.0, c=0.25) + shift(x[:])


def test_helpers_and_lambdas(backend: str) -> None:
    x, y, offset = random(8), poisoned(8), 7.0
    with_helpers(x, y, shift=lambda t: t * 0.0 + offset, backend=backend)
    np.testing.assert_allclose(y, (x + 6) + (2 * x + 2) + (x - 1) + 7, rtol=1e-6, atol=1e-5)


@kernel
def no_grid(y: Tensor["N"], *, N: Const):
    y[:] = 4.0


def test_a_kernel_without_program_id_is_one_program(backend: str) -> None:
    y = poisoned(5)
    no_grid(y, backend=backend)
    same(y, np.full(5, 4.0, np.float32))


@kernel
def grid(y: Tensor["A B C"]):
    a, b, c = program_id(*y.shape)
    y[a, b, c] = (a * 100 + b) * 100 + c


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (0, 3, 5), (2, 0, 1), (7, 1, 2)])
def test_grid_of_three(backend: str, shape: tuple[int, int, int]) -> None:
    y = poisoned(shape, "int32")
    grid(y, backend=backend)
    a, b, c = np.indices(shape)
    same(y, ((a * 100 + b) * 100 + c).astype(np.int32))


@kernel
def constant(y: Tensor["N"], *, value: Const, N: Const):
    y[:] = value


def test_constants_are_told_apart(backend: str) -> None:
    """Each constant is compiled separately, even if Python calls two of them equal."""
    for value in (0.0, 1.0, -0.0, -1.0, 0, 1, -1, 0.5):
        y = poisoned(3)
        constant(y, value=value, backend=backend)
        same(y, np.full(3, value, np.float32))
