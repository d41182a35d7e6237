# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""cumsum and reshape: elements that come from other positions of a tile."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import poisoned, random, same
from monotile import errors
from monotile.language import Const, Tensor, arange, cumsum, dot, int32, kernel, reshape

SHAPES = ((1, 1), (1, 7), (5, 3), (16, 16), (4, 33))


@kernel
def apply(x: Tensor["M N"], y: Tensor["P Q"], *, f: Const, M: Const, N: Const, P: Const, Q: Const):
    y[:, :] = f(x[:, :])


@kernel
def along_vectors(x: Tensor["N"], y: Tensor["N"], *, N: Const):
    """The mean of what came so far, then in other shapes and back."""
    mean = cumsum(x[:], 0) / (arange(N) + 1)
    y[:] = mean.reshape(N, 1).T.reshape(N) * 2.0


@kernel
def histogram(x: Tensor["M N"], w: Tensor["N N"], y: Tensor["M N"], *, M: Const, N: Const):
    """Between a dot, a loop and a reduction."""
    total = dot(x[:, :], w[:, :])
    for _ in range(2):
        total = total.cumsum(axis=1) - total.max(axis=1)[:, None]
    y[:, :] = total


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "int64"])
def test_cumsum(backend: str, dtype: str) -> None:
    wide = "int32" if dtype == "uint8" else dtype
    for shape in SHAPES:
        x = (np.round(random(shape, dtype) * 4) + 0).astype(dtype)  # sums of whole numbers are exact; no -0.0
        for axis in (0, 1):
            y = poisoned(shape, wide)
            apply(x, y, f=lambda x, axis=axis: cumsum(x, axis), backend=backend)
            same(y, np.cumsum(x, axis=axis, dtype=wide))


def test_nan_reaches_what_follows_it(backend: str) -> None:
    x, y = np.ones((3, 20), np.float32), poisoned((3, 20))
    x[1, 7], x[2, 3] = np.nan, np.inf
    apply(x, y, f=lambda x: cumsum(x, -1), backend=backend)
    same(y, np.cumsum(x, axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "bool"])
def test_reshape(backend: str, dtype: str) -> None:
    x = random((6, 10), dtype)
    for sides in ((10, 6), (4, 15), (1, 60), (60, 1), (30, 2)):
        y = poisoned(sides, dtype)
        apply(x, y, f=lambda x, sides=sides: x.reshape(60).reshape(*sides), backend=backend)
        same(y, x.reshape(sides))
        y = poisoned(sides, dtype)
        apply(x, y, f=lambda x, sides=sides: reshape(x, (-1, sides[1])), backend=backend)
        same(y, x.reshape(sides))
    x, y = random((8, 16), dtype), poisoned((32, 4), dtype)
    apply(x, y, f=lambda x: x.T.reshape(32, 4), backend=backend)
    same(y, x.T.reshape(32, 4))


def test_among_other_ops(backend: str) -> None:
    x, y = np.round(random(37) * 8), poisoned(37)
    along_vectors(x, y, backend=backend)
    same(y, np.cumsum(x) / np.arange(1, 38, dtype=np.float32) * 2)
    a, w, z = np.round(random((9, 17)) * 2), np.round(random((17, 17)) * 2), poisoned((9, 17))
    histogram(a, w, z, backend=backend)
    total = a @ w
    for _ in range(2):
        total = np.cumsum(total, axis=1) - total.max(axis=1, keepdims=True)
    same(z, total)


def test_sides_that_do_not_fit() -> None:
    x, y = random((4, 4)), poisoned((4, 4))
    for f in (lambda x: x.reshape(3, 5), lambda x: x.reshape(-1, -1), lambda x: x.reshape(-1, 5)):
        with pytest.raises(errors.ShapeMismatch, match="16 elements does not have the shape"):
            apply(x, y, f=f, backend="interpreter")
    with pytest.raises(errors.BadAxis):
        apply(x, y, f=lambda x: cumsum(x.astype(int32), 2), backend="interpreter")
