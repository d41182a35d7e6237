# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""`blocks` with `visible`: skipping hidden blocks changes no result, and hidden data never matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arrays import poisoned, random, same
from monotile.backends.interpreter import evaluate
from monotile.language import Const, Tensor, arange, blocks, cdiv, int32, kernel, program_id, where, zeros


@kernel
def masked_sum(x: Tensor["M N"], y: Tensor["M"], shift: int, *, visible: Const, BM: Const = 4, BN: Const = 8):
    """Row sums over the columns a row may see."""
    rows = program_id(cdiv(x.shape[0], BM)) * BM + arange(BM)
    seen = lambda cols: visible(rows[:, None], cols[None, :], shift)  # noqa: E731
    total = zeros(BM, int32)
    for j in blocks(x.shape[1], BN, seen):
        cols = j + arange(BN)
        total += where(seen(cols), x[rows, cols], 0).sum(axis=1)
    y[rows] = total


VISIBLE = {
    "causal": lambda i, j, shift: j <= i + shift,
    "window": lambda i, j, shift: (j <= i + shift) & (j > i + shift - 5),
    "from one on": lambda i, j, shift: j >= i + shift,
    "never": lambda i, j, shift: (j < 0) & (i < 0),
    "always": lambda i, j, shift: (j >= 0) | (i >= 0),
    "a constant": lambda i, j, shift: True,
}


def oracle(x: Any, visible: Any, shift: int) -> Any:
    i, j = np.indices(x.shape)
    return np.where(visible(i, j, shift), x, 0).sum(axis=1, dtype=np.int32)


@pytest.mark.parametrize("name", list(VISIBLE)[:-1])
@pytest.mark.parametrize("shift", [-20, -1, 0, 3, 40])
def test_visible(backend: str, name: str, shift: int) -> None:
    visible = VISIBLE[name]
    for shape in ((1, 1), (4, 8), (9, 33), (13, 0), (17, 17)):
        x = random(shape, "int32")
        expected = oracle(x, visible, shift)
        y = poisoned(shape[0], "int32")
        masked_sum(x, y, shift, visible=visible, backend=backend)
        same(y, expected)
        kernel_ir = masked_sum.ir(x, y, shift, visible=visible)
        for skip_hidden in (True, False):
            y = poisoned(shape[0], "int32")
            evaluate(kernel_ir, [x, y], [shift], skip_hidden=skip_hidden)
            same(y, expected)


@kernel
def padded(x: Tensor["N"], y: Tensor["1"], used: int, *, B: Const = 8):
    """A buffer of which only the first `used` elements are valid."""
    total = zeros(B)
    for j in blocks(x.shape[0], B, lambda cols: cols < used):
        cols = j + arange(B)
        total += where(cols < used, x[cols], 0.0)
    y[0] = total.sum(axis=0)


@pytest.mark.parametrize("used", [0, 1, 7, 8, 9, 24, 40])
def test_what_is_hidden_never_matters(backend: str, used: int) -> None:
    x, y = random(40, "int32").astype(np.float32), poisoned(1)
    total = x[:used].sum()
    x[used:] = np.nan
    padded(x, y, used, backend=backend)
    assert y[0] == total


@kernel
def by_memory(x: Tensor["N"], keep: Tensor["N"], y: Tensor["1"], *, B: Const = 4):
    """`visible` read from a tensor, with a branch and a nested loop in the body."""
    total = 0
    for j in blocks(x.shape[0], B, lambda cols: keep[cols]):
        for k in range(B):
            if keep[j + k]:
                total += x[j + k]
    y[0] = total


def test_visibility_from_memory(backend: str) -> None:
    x, keep = random(30, "int32"), np.zeros(30, bool)
    keep[[5, 13, 14, 29]] = True
    y = poisoned(1, "int32")
    by_memory(x, keep, y, backend=backend)
    assert y[0] == x[keep].sum()


@kernel
def visits(x: Tensor["N"], y: Tensor["1"], *, B: Const = 4):
    """Not a correct kernel: its result depends on how many iterations run."""
    n = 0
    for _ in blocks(x.shape[0], B, lambda cols: (cols > 5) & (cols < 11)):
        n += 1
    y[0] = n


def test_the_interpreter_skips_what_it_is_told_to() -> None:
    x, y = random(20), poisoned(1, "int32")
    kernel_ir = visits.ir(x, y)
    for skip_hidden, count in ((True, 2), (False, 5)):
        evaluate(kernel_ir, [x, y], [], skip_hidden=skip_hidden)
        assert y[0] == count
