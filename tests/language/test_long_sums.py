"""Sums of many floats round no more on narrow vectors than on wide ones, and no bit depends on what is skipped."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import Array
from monotile.backends.cpu import target
from monotile.kernels import softmax
from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, kernel, program_id

EPS = 2.0**-24
every_unit = pytest.mark.parametrize("unit", target.runnable())
with_length = pytest.mark.parametrize("length", [1000, 4096, 50001, 65536])


@kernel
def row_sums(x: Tensor["R C"], y, *, R: Const, C: Const):  # type: ignore[no-untyped-def]
    rows = program_id(1) * R + arange(R)
    y[rows] = x[rows, arange(C)].sum(axis=1)


@kernel
def column_sums(x: Tensor["C R"], y, *, R: Const, C: Const):  # type: ignore[no-untyped-def]
    rows = program_id(1) * R + arange(R)
    y[rows] = x[arange(C), rows].sum(axis=0)


@kernel
def whole_sum(x: Tensor["R C"], y, *, R: Const, C: Const):  # type: ignore[no-untyped-def]
    y[program_id(1)] = x[arange(R), arange(C)].sum(axis=1).sum(axis=0)


@kernel
def product(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, N: Const, K: Const):
    rows = program_id(1) * M + arange(M)
    c[rows, arange(N)] = dot(a[rows, arange(K)], b[arange(K), arange(N)])


def error(found: Array, exact: Array) -> float:
    """Largest relative error, in units of half an ulp."""
    return float(np.abs(found - exact).max() / np.abs(exact).max() / EPS)


def positive(*shape: int) -> Array:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


@every_unit
@with_length
def test_sums_of_rows_and_columns(unit: str, length: int) -> None:
    """Of positive numbers, whose sum grows: one chain of 65536 is off by 150."""
    x, y = positive(5, length), np.empty(5, np.float32)
    exact = x.astype(np.float64).sum(axis=1)
    row_sums(x, y, R=5, C=length, backend=f"cpu:{unit}")
    assert error(y, exact) < 4
    column_sums(np.ascontiguousarray(x.T), y, R=5, C=length, backend=f"cpu:{unit}")
    assert error(y, exact) < 4


@every_unit
@pytest.mark.parametrize("shape", [(1000, 1000), (4, 60000), (60000, 4), (8192, 17)], ids=str)
def test_a_sum_of_a_whole_tile(unit: str, shape: tuple[int, int]) -> None:
    x, y = positive(*shape), np.empty(1, np.float32)
    whole_sum(x, y, R=shape[0], C=shape[1], backend=f"cpu:{unit}")
    assert error(y, x.astype(np.float64).sum(keepdims=True)[0]) < 4


@every_unit
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_long_contractions(unit: str, rows: int) -> None:
    """Streamed inner and outer products, and panels."""
    a, b, c = positive(rows, 20003), positive(20003, 32), np.empty((rows, 32), np.float32)
    exact = a.astype(np.float64) @ b
    for operand in (b, np.asfortranarray(b)):
        product(a, operand, c, M=rows, N=32, K=20003, backend=f"cpu:{unit}")
        assert error(c, exact) < 8


@kernel
def later_keys(q: Tensor["N D"], k: Tensor["M D"], v: Tensor["M D"], o: Tensor["N D"], *, D: Const, BR: Const):
    """Attention to the keys from a row's own position minus 30 on; keys in blocks of 256."""
    rows = program_id(cdiv(q.shape[0], BR)) * BR + arange(BR)
    Q = q[rows]

    def seen(cols):  # type: ignore[no-untyped-def]
        return cols[None, :] + 30 >= rows[:, None]

    state = softmax.empty(BR, D)
    for j in blocks(k.shape[0], 256, seen):
        cols = j + arange(256)
        state = softmax.step(state, dot(Q, k[cols].T), v[cols], seen(cols), cols < k.shape[0], 0.3)
    o[rows], _ = softmax.finish(state)


@every_unit
def test_skipped_rows_change_no_bit_of_a_long_sum(unit: str) -> None:
    """A block of keys that some rows do not see is summed in the same order as one that all of them see."""
    q, k, v = (np.random.default_rng(n).standard_normal((512, 32), np.float32) for n in range(3))
    scores = np.where(
        np.arange(512)[None, :] + 30 >= np.arange(512)[:, None], 0.3 * q.astype(np.float64) @ k.T, -np.inf
    )
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = weights @ v / weights.sum(axis=1, keepdims=True)
    results = []
    for rows in (13, 16, 32, 48, 64, 128):
        o = np.full((512, 32), np.nan, np.float32)
        later_keys(q, k, v, o, D=32, BR=rows, backend=f"cpu:{unit}")
        assert np.abs(o - exact).max() < 1e-5
        results.append(o)
    assert all(np.array_equal(results[0], other) for other in results[1:])
