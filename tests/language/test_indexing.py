# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Loads, stores and gathers: positions, slices, tiles of positions, edges and strides."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import DTYPES, Array, numpy_type, poison, poisoned, random, same
from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id, where

SIZES = (1, 2, 7, 8, 9, 13, 16, 17, 31)


def window(x: Array, start: int, count: int) -> Array:
    """Reference of a load of consecutive positions: zeros outside."""
    out = np.zeros(count, x.dtype)
    for n in range(count):
        if 0 <= start + n < len(x):
            out[n] = x[start + n]
    return out


@kernel
def copy(x: Tensor["N"], y: Tensor["N"], *, B: Const = 8):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy(backend: str, dtype: str) -> None:
    for n in SIZES:
        x, y = random(n, dtype), poisoned(n, dtype)
        copy(x, y, backend=backend)
        same(y, x)


def test_copy_keeps_the_bits(backend: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, 3.4028235e38], np.float32)
    y = poisoned(7)
    copy(x, y, backend=backend)
    same(y, x)


def test_empty_tensors_run_nothing(backend: str) -> None:
    x, y = np.zeros(0, np.float32), np.zeros(0, np.float32)
    copy(x, y, backend=backend)


@kernel
def shifted(x: Tensor["_"], y: Tensor["N"], start: int, *, N: Const):
    """One program: y is the window of x that begins at `start`."""
    y[:] = x[start + arange(N)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_loads_outside_are_zero(backend: str, dtype: str) -> None:
    for n in (0, 1, 5, 8, 11):
        x = random(n, dtype)
        for start in (-9, -8, -3, 0, 2, n - 1, n, n + 1, n + 50, -(2**31) + 100, 2**31 - 2**16):
            y = poisoned(8, dtype)
            shifted(x, y, start, backend=backend)
            same(y, window(x, start, 8))


@kernel
def clipped(x: Tensor["N"], y: Tensor["_"], start: int, *, N: Const):
    y[start + arange(N)] = x[:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stores_outside_write_nothing(backend: str, dtype: str) -> None:
    x = random(8, dtype)
    for n in (1, 5, 8, 11):
        for start in (-9, -8, -3, 0, 2, n - 1, n, n + 50):
            guarded = poisoned(n + 32, dtype)
            y = guarded[16 : 16 + n]
            clipped(x, y, start, backend=backend)
            expected = np.full(n, poison(dtype), numpy_type(dtype))
            for k in range(8):
                if 0 <= start + k < n:
                    expected[start + k] = x[k]
            same(y, expected)
            same(guarded[:16], poisoned(16, dtype))
            same(guarded[16 + n :], poisoned(16, dtype))


@kernel
def windows(x: Tensor["M N"], y: Tensor["8 4"], i: int, j: int):
    y[0:8, 0:4] = x[i + arange(8), j + arange(4)]


@kernel
def scatter(x: Tensor["8 4"], y: Tensor["M N"], i: int, j: int):
    y[i + arange(8), j + arange(4)] = x[:, :]


STARTS = [(0, 0), (-3, 1), (1, -2), (-8, 0), (0, -4), (-2, -2), (4, 3), (100, 0), (0, 100)]


@pytest.mark.parametrize("start", STARTS)
def test_windows_in_two_dimensions(backend: str, start: tuple[int, int]) -> None:
    i, j = start
    for shape in ((1, 1), (5, 3), (8, 4), (9, 5), (20, 10)):
        x, y = random(shape), poisoned((8, 4))
        windows(x, y, i, j, backend=backend)
        framed = np.zeros((shape[0] + 216, shape[1] + 216), np.float32)
        framed[108 : 108 + shape[0], 108 : 108 + shape[1]] = x
        same(y, framed[108 + i :, 108 + j :][:8, :4])
        z, tile = poisoned(shape), random((8, 4), seed=3)
        scatter(tile, z, i, j, backend=backend)
        framed = poisoned((shape[0] + 216, shape[1] + 216))
        framed[108 + i : 116 + i, 108 + j : 112 + j] = tile
        same(z, framed[108 : 108 + shape[0], 108 : 108 + shape[1]])


# ---- ways to write a subscript ---------------------------------------------------------------------------------------


@kernel
def pick(x: Tensor["M N"], y: Tensor["P Q"], i: int, *, f: Const, P: Const, Q: Const):
    y[:, :] = f(x, i)


def test_subscripts(backend: str) -> None:
    x = random((9, 6))
    cases = (
        (lambda x, i: x[i : i + 4, 1:4], x[2:6, 1:4]),
        (lambda x, i: x[i + arange(4), 1 + arange(3)], x[2:6, 1:4]),
        (lambda x, i: x[(i + arange(4))[:, None], (1 + arange(3))[None, :]], x[2:6, 1:4]),
        (lambda x, i: x[(1 + arange(3))[None, :] + i, arange(4)[:, None]], x[3:6, 0:4].T),
        (lambda x, i: x[i, 0:3][None, :], np.repeat(x[2:3, 0:3], 4, 0)),
        (lambda x, i: x[1:5, i][:, None], np.repeat(x[1:5, 2:3], 3, 1)),
        (lambda x, i: x[i, i], np.full((4, 3), x[2, 2])),
        (lambda x, i: x[arange(4) * 2, arange(3) * i], x[0:8:2, 0:6:2]),
        (lambda x, i: x[8 - arange(4), 5 - arange(3)], x[8:4:-1, 5:2:-1]),
        (lambda x, i: x[i : i + 4, ..., 0:3], x[2:6, 0:3]),
    )
    for f, expected in cases:
        y = poisoned((4, 3))
        pick(x, y, 2, f=f, backend=backend)
        same(y, expected)


@kernel
def whole_rows(x: Tensor["B M D"], y: Tensor["B M D"], *, D: Const, R: Const = 4):
    """Trailing dimensions that are not indexed are taken whole; here D is a compile-time length."""
    b, i = program_id(x.shape[0], cdiv(x.shape[1], R))
    rows = i * R + arange(R)
    y[b, rows] = x[b, rows] * 2.0


@kernel
def dotted(x: Tensor["M D"], y: Tensor["M D"], *, D: Const):
    i = program_id(x.shape[0])
    y[i, ...] = x[i, ...]


def test_whole_dimensions(backend: str) -> None:
    for shape in ((1, 1, 1), (3, 7, 5), (2, 4, 16)):
        x, y = random(shape), poisoned(shape)
        whole_rows(x, y, backend=backend)
        same(y, x * 2)
    x, y = random((5, 3)), poisoned((5, 3))
    dotted(x, y, backend=backend)
    same(y, x)


@kernel
def positions(x: Tensor["N"], y: Tensor["N"]):
    """One program per element: scalar loads and stores."""
    i = program_id(x.shape[0])
    y[i] = x[i - 1] + x[i + 1]


def test_scalar_positions(backend: str) -> None:
    """A position outside reads as zero; negative ones do not count from the end."""
    x, y = random(6, "int32"), poisoned(6, "int32")
    positions(x, y, backend=backend)
    framed = np.concatenate([[0], x, [0]])
    same(y, (framed[:-2] + framed[2:]).astype(np.int32))


@kernel
def scalar_store(y: Tensor["N"], at: int):
    y[at] = 5


def test_scalar_stores_outside_write_nothing(backend: str) -> None:
    for at in (-1, 0, 3, 4, 99):
        y = poisoned(4, "int32")
        scalar_store(y, at, backend=backend)
        expected = poisoned(4, "int32")
        if 0 <= at < 4:
            expected[at] = 5
        same(y, expected)


# ---- gather ----------------------------------------------------------------------------------------------------------


@kernel
def take(x: Tensor["_"], index: Tensor["N"], y: Tensor["N"], *, B: Const = 8):
    rows = program_id(cdiv(y.shape[0], B)) * B + arange(B)
    y[rows] = x[index[rows]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(backend: str, dtype: str) -> None:
    x, index = random(11, dtype), np.array([0, 10, -1, 11, 5, 5, 2**31 - 1, -(2**31), 3], np.int32)
    y = poisoned(9, dtype)
    take(x, index, y, backend=backend)
    inside = (index >= 0) & (index < 11)
    same(y, np.where(inside, x[np.where(inside, index, 0)], np.zeros((), x.dtype)))


@pytest.mark.parametrize("kind", ["int64", "int8", "uint8"])
def test_gather_by_other_integers(backend: str, kind: str) -> None:
    x, index, y = random(11), np.array([0, 10, 3, 11, 100, 7], kind), poisoned(6)
    take(x, index, y, backend=backend)
    same(y, np.append(x, np.zeros(200, np.float32))[index])


def test_gather_beyond_32_bits(backend: str) -> None:
    x, index, y = random(4), np.array([2**32 + 1, -(2**40), 1], np.int64), poisoned(3)
    take(x, index, y, backend=backend)
    same(y, np.array([0, 0, x[1]], np.float32))


def test_gather_from_nothing(backend: str) -> None:
    x, index, y = np.zeros(0, np.float32), np.zeros(3, np.int32), poisoned(3)
    take(x, index, y, backend=backend)
    same(y, np.zeros(3, np.float32))


@kernel
def take_rows(x: Tensor["M N"], index: Tensor["P"], y: Tensor["P Q"], *, P: Const, Q: Const, f: Const):
    y[:, :] = f(x, index[:], arange(Q))


def test_gather_rows_and_columns(backend: str) -> None:
    """Tiles of positions of rank 1 index orthogonally; of rank 2, element by element."""
    x, index = random((7, 5)), np.array([6, 0, 3, 3], np.int32)
    clipped = np.minimum(index, 4)
    cases = (
        (lambda x, rows, cols: x[rows, cols], x[index][:, :3]),
        (lambda x, rows, cols: x[rows, 1:4], x[index][:, 1:4]),
        (lambda x, rows, cols: x[cols, where(rows < 4, rows, 4)].T, x[:3][:, clipped].T),
        (lambda x, rows, cols: x[rows[:, None], cols[None, :]], x[index][:, :3]),
        (lambda x, rows, cols: x[rows[:, None] - cols, cols[None, :]], x[index[:, None] - np.arange(3), np.arange(3)]),
    )
    for number, (f, expected) in enumerate(cases):
        y = poisoned((4, 3))
        take_rows(x, index, y, f=f, backend=backend)
        if number == 4:
            outside = index[:, None] - np.arange(3) < 0
            expected = np.where(outside, np.float32(0), expected)
        same(y, expected)


@kernel
def take_runs(x: Tensor["M N"], index: Tensor["P"], y: Tensor["P Q"], start: int, *, P: Const, Q: Const, step: Const):
    y[:, :] = x[index[:], start + step * arange(Q)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_gather_runs_of_rows(backend: str, dtype: str) -> None:
    """Gathered rows, and in each consecutive columns that may begin or end outside it, or count down."""
    x, index = random((7, 40), dtype), np.array([6, 0, -1, 3, 7, 3], np.int32)
    for start in (-60, -35, -3, 0, 5, 20, 39, 40, 2**31 - 2**16, -(2**31)):
        for step in (1, 2, -1):
            y = poisoned((6, 35), dtype)
            take_runs(x, index, y, start, step=step, backend=backend)
            cols = start + step * np.arange(35)
            inside = ((index >= 0) & (index < 7))[:, None] & (cols >= 0) & (cols < 40)
            found = x[np.clip(index, 0, 6)][:, np.clip(cols, 0, 39)]
            same(y, np.where(inside, found, np.zeros((), x.dtype)))


# ---- strides ---------------------------------------------------------------------------------------------------------


@kernel
def copy2(x: Tensor["M N"], y: Tensor["M N"], *, BM: Const = 4, BN: Const = 8):
    i, j = program_id(cdiv(x.shape[0], BM), cdiv(x.shape[1], BN))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    y[rows, cols] = x[rows, cols]


VIEWS = {
    "dense": lambda a: a,
    "transposed": lambda a: a.T,
    "rows reversed": lambda a: a[::-1],
    "columns reversed": lambda a: a[:, ::-1],
    "every second column": lambda a: a[:, ::2],
    "every third row": lambda a: a[::3],
    "part": lambda a: a[1:-1, 2:-1],
    "both reversed and transposed": lambda a: a[::-1, ::-1].T,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize("name", VIEWS)
def test_strides(backend: str, name: str, dtype: str) -> None:
    view = VIEWS[name]
    for shape in ((9, 17), (4, 8), (3, 4)):
        x = view(random(shape, dtype))
        y = poisoned(x.shape, dtype)
        copy2(x, y, backend=backend)
        same(y, x.copy())
        whole = poisoned(shape, dtype)
        expected = whole.copy()
        view(expected)[:] = x
        copy2(x.copy(), view(whole), backend=backend)
        same(whole, expected)


def test_repeated_rows(backend: str) -> None:
    """A broadcast input has a stride of 0."""
    x, y = np.broadcast_to(random(5), (6, 5)), poisoned((6, 5))
    copy2(x, y, backend=backend)
    same(y, x.copy())


# ---- updates ---------------------------------------------------------------------------------------------------------


@kernel
def update(x: Tensor["N"], y: Tensor["N"], *, B: Const = 8):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] += x[rows]
    y[rows] *= 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8"])
def test_augmented_assignment_to_a_tensor(backend: str, dtype: str) -> None:
    """A load after a store in one program sees the stored value, rounded to the tensor's type."""
    x, y = random(19, dtype, 1), random(19, dtype, 2)
    wide = "float32" if dtype == "float16" else "int32" if dtype == "int8" else dtype
    first = (x.astype(wide) + y.astype(wide)).astype(dtype)
    expected = (first.astype(wide) * np.array(2, wide)).astype(dtype)
    update(x, y, backend=backend)
    same(y, expected)
