# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Kernels that the metal backend once got wrong, found by tests/fuzz and reduced. Docstrings name the fault."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import poisoned, same
from language.test_regressions import whole
from monotile.language import Const, Tensor, arange, cumsum, dot, float32, kernel, minimum, zeros
from usable import usable


@kernel
def moves_in_dots(x: Tensor["N N"], w: Tensor["N N"], codes: Tensor["N N"], y: Tensor["8 N N"], *, N: Const):
    y[0, :, :] = dot(cumsum(x[:, :], axis=1), w[:, :])
    y[1, :, :] = dot(w[:, :], cumsum(x[:, :], axis=0))
    y[2, :, :] = dot(cumsum(x[:, :], axis=0).T + 1.0, cumsum(w[:, :], axis=1))
    y[3, :, :] = dot(x[:, :].reshape(N * N).reshape(N, N), w[:, :])
    y[4, :, :] = dot(cumsum(dot(x[:, :], w[:, :]), axis=1), w[:, :])
    y[5, :, :] = dot(x[codes[:, :], arange(N)[None, :]], w[:, :])
    y[6, :, :] = dot((x[:, :].argmax(axis=1)[:, None] + codes[:, :]).astype(float32), w[:, :])
    y[7, :, :] = dot((1.0, 2.0, -1.0, 3.0)[codes[:, :] % 4], w[:, :])


@pytest.mark.parametrize("side", [4, 16])
@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_operands_of_dots_that_are_no_expressions(backend: str, side: int) -> None:
    """metal: no text for a scan that is the left operand of a dot on matrices."""
    x, w, y = whole((side, side)), whole((side, side), 1), poisoned((8, side, side))
    codes = np.random.default_rng(2).integers(0, side, (side, side)).astype(np.int32)
    moves_in_dots(x, w, codes, y, backend=backend)
    left = [x.cumsum(1), w, x.cumsum(0).T + 1, x, (x @ w).cumsum(1), np.take_along_axis(x, codes, 0)]
    left += [x.argmax(1)[:, None] + codes, np.array([1, 2, -1, 3])[codes % 4]]
    right = [w, x.cumsum(0), w.cumsum(1), *[w] * 5]
    same(y, np.stack([a @ b for a, b in zip(left, right, strict=True)]).astype(np.float32))


@kernel
def carried_twice(y: Tensor["2 7 7"], n: int):
    q = zeros((7, 7), float32) + 2.0
    for _ in range(2):
        q = q + 1.0
    last, before = q, q
    for _ in range(n):
        last, before = minimum(last + last, 100.0), last
    y[0, :, :] = last
    y[1, :, :] = before


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_two_carried_values_that_begin_alike(backend: str) -> None:
    """metal: both continued in the registers of the loop before."""
    for n, last, before in ((0, 4, 4), (1, 8, 4), (3, 32, 16)):
        y = poisoned((2, 7, 7))
        carried_twice(y, n, backend=backend)
        same(y, np.full((2, 7, 7), [[[last]], [[before]]], np.float32))


@kernel
def carried_from_outside(x: Tensor["3"], y: Tensor["2"], n: int):
    total, s = 0.0, 1.0
    for i in range(n):
        if x[i] > 0.0:
            step = s + 1.0
        else:
            step = s
        inner = s
        for _ in range(2):
            inner = step
        s = s + inner
        total = 2.0
    y[0] = s
    y[1] = total


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_a_loop_that_carries_the_result_of_a_branch_before_it(backend: str) -> None:
    """metal: the branch was written to registers of the loop, which come later."""
    y = poisoned(2)
    carried_from_outside(np.array([1, -1, 1], np.float32), y, 3, backend=backend)
    same(y, np.array([13, 2], np.float32))


@kernel
def tall_product(x: Tensor["512 2"], w: Tensor["2 512"], y: Tensor["512 512"]):
    y[:, :] = dot(x[:, :], w[:, :])


@pytest.mark.parametrize("backend", usable("interpreter", "metal"))
def test_a_product_of_512_rows(backend: str) -> None:
    """metal: its threadgroup had 2048 threads."""
    x, w, y = whole((512, 2)), whole((2, 512), 1), poisoned((512, 512))
    tall_product(x, w, y, backend=backend)
    same(y, x @ w)


@kernel
def sums_of_both_axes(x: Tensor["7 7"], y: Tensor["7"], n: int):
    total, tile = sum(x[:, :], axis=0), x[:, :]
    for _ in range(n):
        tile = tile + 1.0
    for _ in range(2):
        total = total + max(tile, axis=1)
    y[:] = total


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_a_carried_sum_of_columns_meets_one_of_rows(backend: str) -> None:
    """metal: inside the loop the carried vector lay along rows, outside along columns."""
    x, y = whole((7, 7)), poisoned(7)
    sums_of_both_axes(x, y, 3, backend=backend)
    same(y, x.sum(axis=0) + 2 * (x + 3).max(axis=1))
