# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Tiles whose rows are looked up, wherever they lie: streamed by few rows, copied for many; rows outside are zero."""

from __future__ import annotations

import re

import numpy as np
import pytest

from arrays import FLOATS, numpy_type, poisoned, random
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.target import UNITS, host_for
from monotile.language import Const, Tensor, arange, cdiv, dot, exp, float32, kernel, minimum, program_id, zeros


@kernel
def weighted(
    q: Tensor["M D"], k: Tensor["P H T D"], v: Tensor["P H T D"], table: Tensor["S"], y: Tensor["M D"],
    *, D: Const, R: Const, B: Const, head: Const,
):  # fmt: skip
    """y = exp(q @ k.T) @ v over keys in pages of T positions, that the table names. Each program owns R rows."""
    rows = program_id(cdiv(q.shape[0], R)) * R + arange(R)
    T, total = k.shape[2], zeros((R, D))
    count = table.shape[0] * T
    for j in range(0, count, B):
        at = j + arange(B)
        known = minimum(at, count - 1)
        page, place = table[known // T][:, None], (known % T)[:, None]
        scores = dot(q[rows, :], k[page, head, place, arange(D)[None, :]].T)
        weights = exp(scores) * (at < count)[None, :].astype(float32)
        total = total + dot(weights.astype(q.dtype), v[page, head, place, arange(D)[None, :]])
    y[rows, :] = total


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, table: np.ndarray, head: int) -> np.ndarray:
    inside = (table >= 0) & (table < len(k))
    K, V = (
        np.where(inside[:, None, None], x[np.where(inside, table, 0), head].astype(np.float64), 0.0) for x in (k, v)
    )
    D = q.shape[1]
    weights = np.exp(q.astype(np.float64) @ K.reshape(-1, D).T)
    return weights.astype(numpy_type(str(q.dtype))).astype(np.float64) @ V.reshape(-1, D)


SIZES = [
    (1, 1, 64, 16),
    (4, 3, 80, 32),
    (5, 7, 33, 16),
    (8, 1, 128, 48),
    (12, 5, 64, 24),
    (40, 3, 64, 32),
    (3, 2, 7, 8),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES)
def test_keys_in_pages_that_are_looked_up(backend: str, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    """Entries of the table may repeat, and name pages that do not exist, whose rows are zero."""
    M, T, D, B = sizes
    rng = np.random.default_rng(T)
    table = rng.integers(0, 9, 21).astype(np.int32)
    table[[2, 5, 20]] = -1, 9, 2**31 - 1
    q = (random((M, D)) * 0.1).astype(numpy_type(dtype))
    k, v = (random((9, 2, T, D), dtype) for _ in range(2))
    for pages in ((k, v), (k, k)):  # values may be the keys
        y = poisoned((M, D))
        weighted(q, *pages, table, y, D=D, R=min(M, 16), B=B, head=1, backend=backend)
        exact = expected(q, *pages, table, 1)
        allowed = 1e-5 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(y, exact, rtol=10 * allowed, atol=allowed * np.abs(exact).max())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rows", [4, 32])
def test_no_element_is_gathered_by_itself(unit: str, rows: int) -> None:
    """Rows are whole vectors of memory: only entries of the table and addresses are gathered."""
    q, pages, table = random((64, 64)), random((9, 2, 3, 64)), np.zeros(21, np.int32)
    made = weighted.ir(q, pages, pages, table, poisoned((64, 64)), D=64, R=rows, B=32, head=1)
    text = to_llvm(made, host_for(unit)).text
    assert "ptrtoint" in text
    assert not re.search(r"call <\d+ x float> @llvm.masked.gather", text)
