# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Streamed dots: few rows with tiles that are used once, read from their tensors through elementwise ops."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import FLOATS, numpy_type, poisoned, random
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.target import host_for
from monotile.language import Const, Tensor, arange, cdiv, dot, float32, kernel, program_id, where, zeros


@kernel
def weighted(
    w: Tensor["R S"], x: Tensor["S N"], use: Tensor["S"], y: Tensor["_ N"],
    *, change: Const, R: Const, B: Const, C: Const,
):  # fmt: skip
    """y = w @ change(x), where unused rows of x may hold anything. Each program owns C columns."""
    cols = program_id(cdiv(x.shape[1], C)) * C + arange(C)
    total = zeros((R, C))
    for s in range(0, x.shape[0], B):
        rows = s + arange(B)
        total = total + dot(w[arange(R), rows], change(x[rows, cols], use[rows] != 0.0))
    y[arange(R), cols] = total


CHANGES = {
    "used": lambda x, used: where(used[:, None], x, 0.0).astype(float32),
    "scaled": lambda x, used: where(used[:, None], x.astype(float32) * 0.5 - 1.0, 0.0),
    "minus zero": lambda x, used: where(used[:, None], x.astype(float32), -0.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1, 40, 128), (1, 7, 33), (2, 16, 80), (4, 33, 128), (8, 20, 300), (5, 64, 16)])
def test_elementwise_ops_on_a_streamed_tile(backend: str, change: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    R, S, N = sizes
    rng = np.random.default_rng(S)
    w, x = random((R, S)), random((S, N), dtype)
    use = (rng.random(S) < 0.6).astype(np.float32)
    w[:, use == 0] = 0
    x[use == 0] = np.nan
    for B, C in ((16, 128), (8, 48)):
        y = poisoned((R, N))
        weighted(w, x, use, y, change=CHANGES[change], R=R, B=B, C=C, backend=backend)
        kept = np.where(use[:, None] != 0, x.astype(np.float64), 1.0)
        kept = kept * 0.5 - 1.0 if change == "scaled" else kept
        exact = w[:, use != 0].astype(np.float64) @ kept[use != 0]
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * S)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1, 64, 128), (4, 40, 96), (3, 32, 48), (8, 70, 512)])
def test_rows_and_tile_of_one_dtype(backend: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    """bfloat16 with bfloat16 uses pair products on processors that have them."""
    R, S, N = sizes
    w, x = random((R, S), dtype), random((S, N), dtype)
    x[3, 5], x[4, 6], w[:, 4] = np.nan, np.inf, 0
    use = np.ones(S, np.float32)
    for B, C in ((32, 128), (64, 48)):
        y = poisoned((R, N))
        weighted(w, x, use, y, change=lambda x, used: x, R=R, B=B, C=C, backend=backend)
        with np.errstate(invalid="ignore"):
            exact = w.astype(np.float64) @ x.astype(np.float64)
        assert np.isnan(y[:, 5]).all() and np.isnan(y[:, 6]).all()
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * S)


@kernel
def scores(q: Tensor["R D"], k: Tensor["N D"], y: Tensor["R N"], *, R: Const, D: Const, B: Const):
    """y = q @ k.T, B rows of k at a time: both are contiguous along the contraction."""
    for j in range(0, k.shape[0], B):
        rows = j + arange(B)
        y[arange(R), rows] = dot(q[arange(R), :], k[rows].T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1, 8, 64), (4, 50, 128), (4, 33, 80), (3, 20, 7), (8, 40, 512), (2, 17, 300)])
def test_operands_contiguous_along_the_contraction(backend: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    R, N, D = sizes
    q, k = random((R, D), dtype), random((N, D), dtype)
    for B in (16, 64):
        y = poisoned((R, N))
        scores(q, k, y, B=B, backend=backend)
        exact = q.astype(np.float64) @ k.astype(np.float64).T
        size = np.abs(q.astype(np.float64)) @ np.abs(k.astype(np.float64)).T
        assert np.all(np.abs(y - exact) <= 2e-6 * size + 1e-30), numpy_type(dtype)


@kernel
def product(a: Tensor["M K"], b: Tensor["K N"], y: Tensor["M N"], *, BM: Const, BN: Const, BK: Const):
    """y = a @ b in tiles that are reused."""
    i, j = program_id(cdiv(a.shape[0], BM), cdiv(b.shape[1], BN))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    total = zeros((BM, BN))
    for k in range(0, a.shape[1], BK):
        at = k + arange(BK)
        total = total + dot(a[rows, at], b[at, cols])
    y[rows, cols] = total


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("blocks", [(32, 64, 16), (64, 32, 144), (40, 48, 24), (8, 64, 31)])
def test_products_of_large_tiles(
    backend: str, dtype: str, transposed: tuple[bool, bool], blocks: tuple[int, int, int]
) -> None:
    """Row-major and transposed operands; bfloat16 uses pair products on processors that have them."""
    M, K, N = 70, 150, 90
    a = random((K, M), dtype).T if transposed[0] else random((M, K), dtype)
    b = random((N, K), dtype).T if transposed[1] else random((K, N), dtype)
    a[3, 7], b[9, 5] = np.nan, np.inf
    y = poisoned((M, N))
    product(a, b, y, BM=blocks[0], BN=blocks[1], BK=blocks[2], backend=backend)
    with np.errstate(invalid="ignore"):
        exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.isnan(y[3]).all() and not np.isfinite(y[:, 5]).any()
    finite = np.isfinite(exact)
    np.testing.assert_allclose(y[finite], exact[finite], rtol=1e-5, atol=1e-5 * K)


@kernel
def projected(q: Tensor["R D"], x: Tensor["N D"], y: Tensor["_ D"], *, R: Const, D: Const, B: Const = 16):
    """y = q @ x.T @ x: both dots read one tile."""
    rows, columns = arange(R) + program_id(1), arange(D)
    total = zeros((R, D))
    for s in range(0, x.shape[0], B):
        tile = x[s + arange(B), columns]
        total = total + dot(dot(q[rows, columns], tile.T).astype(float32), tile.astype(float32))
    y[rows, columns] = total


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tile_that_two_dots_read(backend: str, dtype: str) -> None:
    q, x, y = random((4, 40), dtype), random((50, 40), dtype), poisoned((4, 40))
    projected(q, x, y, R=4, D=40, backend=backend)
    exact = q.astype(np.float64) @ x.astype(np.float64).T @ x.astype(np.float64)
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-3)


def test_each_of_the_two_dots_streams_it() -> None:
    """Each has a load of its own, with lanes in the order of memory for one of them: nothing is gathered."""
    q, x, y = random((4, 40)), random((50, 40)), poisoned((4, 40))
    for unit in ("avx512", "avx2", "neon"):
        assert "gather" not in to_llvm(projected.ir(q, x, y, R=4, D=40), host_for(unit)).text
