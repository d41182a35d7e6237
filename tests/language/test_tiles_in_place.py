"""Tiles that a dot reads in place, if memory holds them as a copy in scratch would: strides change no bit."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import poisoned, random
from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, zeros


@kernel
def similarities(
    x: Tensor["N D"], w: Tensor["K D"], y: Tensor["N D"], *, D: Const, B: Const, C: Const
):  # y = (x w^T) w
    """Each program owns B rows of x and reads C rows of w at a time, in two dots."""
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    X = x[rows]
    total = zeros((B, D))
    for k in range(0, w.shape[0], C):
        W = w[k + arange(C)]
        total = total + dot(dot(X, W.T), W)
    y[rows] = total


def _apart(w: np.ndarray, step: int) -> np.ndarray:
    """Return the same numbers in rows that are `step` elements apart, with NaN between them."""
    wide = np.full((w.shape[0], step), np.nan, np.float32)
    wide[:, : w.shape[1]] = w
    return wide[:, : w.shape[1]]


@pytest.mark.parametrize("sizes", [(40, 64, 64), (33, 50, 64), (64, 96, 80), (35, 40, 72), (32, 64, 256)])
def test_strides_of_a_tile_change_no_bit(backend: str, sizes: tuple[int, int, int]) -> None:
    N, K, D = sizes
    x, w = random((N, D)), random((K, D))
    results = []
    for given in (w, _apart(w, D + 16), _apart(w, -(-D // 16) * 16), np.ascontiguousarray(w[::-1])[::-1]):
        y = poisoned((N, D))
        similarities(x, given, y, B=32, C=32, backend=backend)
        results.append(y)
    exact = (x.astype(np.float64) @ w.T.astype(np.float64)) @ w.astype(np.float64)
    np.testing.assert_allclose(results[0], exact, rtol=1e-4, atol=1e-3 * np.abs(exact).max())
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)
