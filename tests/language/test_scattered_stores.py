# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Stores to any positions: strided, masked, permuted; positions outside a tensor are not written."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import poisoned, random, same
from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, where


@kernel
def rotate(
    x: Tensor["M D"], cos: Tensor["M H"], sin: Tensor["M H"], y: Tensor["M D"], *, D: Const, H: Const, B: Const = 4
):
    """RoPE with even and odd columns as pairs."""
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    even, odd = 2 * arange(H), 2 * arange(H) + 1
    a, b, c, s = x[rows, even], x[rows, odd], cos[rows], sin[rows]
    y[rows, even], y[rows, odd] = a * c - b * s, a * s + b * c


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_strided(backend: str, dtype: str) -> None:
    x, y = random((7, 22), dtype), poisoned((7, 22), dtype)
    cos, sin = random((7, 11), seed=1), random((7, 11), seed=2)
    rotate(x, cos, sin, y, backend=backend)
    a, b = x[:, ::2].astype(np.float32), x[:, 1::2].astype(np.float32)
    same(y[:, ::2].copy(), (a * cos - b * sin).astype(y.dtype))
    same(y[:, 1::2].copy(), (a * sin + b * cos).astype(y.dtype))


@kernel
def masked(x: Tensor["M N"], y: Tensor["M N"], least: float, *, BM: Const = 4, BN: Const = 16):
    i, j = program_id(cdiv(x.shape[0], BM), cdiv(x.shape[1], BN))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    tile = x[rows, cols]
    y[where(tile > least, rows[:, None], -1), cols[None, :]] = tile


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool"])
def test_masked(backend: str, dtype: str) -> None:
    x, y = random((9, 37), dtype), poisoned((9, 37), dtype)
    expected = np.where(x.astype(np.float64) > 0.5, x, y)
    if dtype == "bool":
        x_, x = x, x.astype(np.uint8)
        y = y.astype(np.uint8)
        expected = np.where(x_, x, y)
    masked(x, y, 0.5, backend=backend)
    same(y, expected)


@kernel
def permuted(x: Tensor["N N"], order: Tensor["N"], y: Tensor["L N"], z: Tensor["N N"], w: Tensor["_"], *, N: Const):
    """Rows go where a tensor says, and columns around the diagonal."""
    at = arange(N)
    one = where(at[:, None] == at[None, :], 1.0, 0.0)
    y[order[:], at] = dot(x[:, :], one)
    z[at[:, None], (at[None, :] + at[:, None]) % N] = x[:, :] - x[:, :].max(axis=1)[:, None]
    part = w[2 : 2 + y.shape[0]]  # a view with an edge of its own
    part[order[:]] = x[:, :].max(axis=1)


@pytest.mark.parametrize("n", [1, 5, 17])
def test_permuted(backend: str, n: int) -> None:
    x, order = random((n, n)), np.random.default_rng(n).permutation(n + 2)[:n].astype(np.int64) - 1
    y, z, w = poisoned((n, n)), poisoned((n, n)), poisoned(n + 9)
    permuted(x, order, y, z, w, backend=backend)
    expected, inside = poisoned((n, n)), (order >= 0) & (order < n)
    expected[order[inside]] = x[inside]
    same(y, expected)
    rest = x - x.max(axis=1, keepdims=True)
    same(z, np.stack([np.roll(row, i) for i, row in enumerate(rest)]))
    tops = poisoned(n + 9)
    tops[2 + order[inside]] = x.max(axis=1)[inside]
    same(w, tops)


@kernel
def overwritten(y: Tensor["N"], z: Tensor["N"], *, B: Const = 32):
    """Later stores win, whichever thread writes them."""
    y[arange(B)] = 1.0
    y[3 + arange(B)] = 2.0
    for j in range(0, y.shape[0], B // 2):
        z[j + arange(B)] = float(j)


def test_later_stores_win(backend: str) -> None:
    y, z = np.zeros(50, np.float32), np.zeros(50, np.float32)
    overwritten(y, z, backend=backend)
    assert y.tolist() == [1.0] * 3 + [2.0] * 32 + [0.0] * 15
    assert z.tolist() == [0.0] * 16 + [16.0] * 16 + [32.0] * 16 + [48.0] * 2


@kernel
def interleaved(x: Tensor["M N"], y: Tensor["L K"], *, N: Const, B: Const, step: Const, offsets: Const, rows: Const):
    """Tiles side by side along the columns or the rows, some of them with gaps."""
    at, cols = program_id(cdiv(x.shape[0], B)) * B + arange(B), arange(N)
    for n, offset in enumerate(offsets):
        if rows:
            y[2 * at + offset, step * cols] = x[at] + n
        else:
            y[at, step * cols + offset] = x[at] + n


@pytest.mark.parametrize(
    ("step", "offsets", "rows"),
    [(2, (1, 0), False), (3, (0, 2, 1), False), (4, (3, 0), False), (2, (0, 3), False), (-2, (40, 41), False),
     (1, (5,), False), (4, (0, 1), True)],
)  # fmt: skip
def test_side_by_side(backend: str, step: int, offsets: tuple[int, ...], rows: bool) -> None:
    """Whole vectors, the last of a row, and columns that end inside a vector."""
    for columns, dtype in ((37, "float32"), (200, "int32")):
        x, y = (10 * random((8, 21))).astype(dtype), poisoned((18, columns), dtype)
        expected = y.copy()
        for n, offset in enumerate(offsets):
            for i, j in np.ndindex(x.shape):
                place = (2 * i + offset, step * j) if rows else (i, step * j + offset)
                if all(0 <= p < side for p, side in zip(place, y.shape, strict=True)):
                    expected[place] = x[i, j] + n
        interleaved(x, y, B=4, step=step, offsets=offsets, rows=rows, backend=backend)
        same(y, expected)
