# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""`blocks` with `visible`: skipping hidden blocks changes no result, and hidden data never matters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arrays import poisoned, random, same
from monotile.backends.interpreter import evaluate
from monotile.language import Const, Tensor, arange, blocks, cdiv, int32, kernel, maximum, program_id, where, zeros
from monotile.passes import pipeline


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


# ---- a start ---------------------------------------------------------------------------------------------------------


@kernel
def sum_from(
    x: Tensor["M N"], y: Tensor["M"], shift: int, start: int, end: int,
    *, visible: Const, BM: Const = 4, BN: Const = 8,
):  # fmt: skip
    """Row sums over the columns from `start` to before `end` that a row may see."""
    rows = program_id(cdiv(x.shape[0], BM)) * BM + arange(BM)
    seen = lambda cols: visible(rows[:, None], cols[None, :], shift) & (cols[None, :] < end)  # noqa: E731
    total = zeros(BM, int32)
    for j in blocks(end, BN, seen, start=start):
        cols = j + arange(BN)
        total += where(seen(cols), x[rows, cols], 0).sum(axis=1)
    y[rows] = total


@pytest.mark.parametrize("name", list(VISIBLE)[:-1])
@pytest.mark.parametrize(("start", "end"), [(0, 33), (8, 33), (3, 20), (16, 16), (20, 4), (40, 33), (-5, 33)])
def test_blocks_from_a_start(backend: str, name: str, start: int, end: int) -> None:
    """Whatever is visible: not before the start, in steps from it, and nothing if the start is past the end."""
    visible, x = VISIBLE[name], random((13, 33), "int32")
    columns = np.arange(33)
    for shift in (-20, 0, 3, 40):
        expected = oracle(np.where((columns >= start) & (columns < end), x, 0), visible, shift)
        y = poisoned(13, "int32")
        sum_from(x, y, shift, start, end, visible=visible, backend=backend)
        same(y, expected)


@kernel
def visits_from(x: Tensor["N"], y: Tensor["1"], start: int, *, B: Const = 4):
    """Not a correct kernel: its result depends on how many iterations run."""
    n = 0
    for _ in blocks(x.shape[0], B, lambda cols: (cols > 5) & (cols < 11), start=start):
        n += 1
    y[0] = n


@pytest.mark.parametrize(("start", "count"), [(0, 2), (2, 2), (3, 2), (7, 1), (10, 1), (11, 0), (30, 0), (-6, 2)])
def test_hidden_blocks_are_counted_from_the_start(start: int, count: int) -> None:
    """The interpreter decides it by the predicate, the passes by arithmetic on the loop's bounds."""
    x, y = random(20), poisoned(1, "int32")
    kernel_ir = visits_from.ir(x, y, start)
    evaluate(kernel_ir, [x, y], [start])
    assert y[0] == count
    pipeline.run(kernel_ir, pipeline.PipelineOptions())
    evaluate(kernel_ir, [x, y], [start])
    assert y[0] == count


# ---- positions that are remainders -----------------------------------------------------------------------------------


@kernel
def packed_sum(
    x: Tensor["R N"], y: Tensor["R"], shift: int, n: int, *, visible: Const, known: Const, BM: Const = 4, BN: Const = 8
):
    """Row sums over the columns that a row sees by its position, a remainder; of a divisor that is known to be positive
    if `known`."""
    rows = program_id(cdiv(x.shape[0], BM)) * BM + arange(BM)
    position = rows % (maximum(n, 1) if known else n)
    seen = lambda cols: visible(position[:, None], cols[None, :], shift)  # noqa: E731
    total = zeros(BM, int32)
    for j in blocks(x.shape[1], BN, seen):
        cols = j + arange(BN)
        total += where(seen(cols), x[rows, cols], 0).sum(axis=1)
    y[rows] = total


@kernel
def packed_range(x: Tensor["R N"], y: Tensor["R"], shift: int, n: int, *, visible: Const, BM: Const = 4, BN: Const = 8):
    """The same without a promise: the comparison stands in a `where` alone."""
    rows = program_id(cdiv(x.shape[0], BM)) * BM + arange(BM)
    position = rows % maximum(n, 1)
    total = zeros(BM, int32)
    for j in range(0, x.shape[1], BN):
        cols = j + arange(BN)
        total += where(visible(position[:, None], cols[None, :], shift), x[rows, cols], 0).sum(axis=1)
    y[rows] = total


POSITIONS = {
    **{name: VISIBLE[name] for name in ("causal", "window", "from one on")},
    "twice": lambda i, j, shift: (j <= 2 * i + shift) & (j >= shift - i),
    "another": lambda i, j, shift: (j < 3 * (i - shift)) & (i + j < 21),
}


def packed_oracle(x: Any, visible: Any, shift: int, n: int) -> Any:
    i, j = np.indices(x.shape)
    return np.where(visible(i % n, j, shift), x, 0).sum(axis=1, dtype=np.int32)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("n", [1, 3, 4, 7, 18, 100])
def test_visible_by_remainders(backend: str, name: str, n: int) -> None:
    """Blocks of rows that hold several whole periods, a part of one, and the seam between two."""
    visible, x = POSITIONS[name], random((18, 41), "int32")
    for shift in (-7, 0, 30):
        expected = packed_oracle(x, visible, shift, n)
        for known in (True, False):
            y = poisoned(18, "int32")
            packed_sum(x, y, shift, n, visible=visible, known=known, backend=backend)
            same(y, expected)
        y = poisoned(18, "int32")
        packed_range(x, y, shift, n, visible=visible, backend=backend)
        same(y, expected)


@pytest.mark.parametrize("n", [-1, -3, -100])
def test_visible_by_remainders_of_a_negative_number(backend: str, n: int) -> None:
    """They lie between it and 0; nothing is known of them."""
    x = random((18, 41), "int32")
    for visible in POSITIONS.values():
        for shift in (0, 30):
            y = poisoned(18, "int32")
            packed_sum(x, y, shift, n, visible=visible, known=False, backend=backend)
            same(y, packed_oracle(x, visible, shift, n))


@kernel
def packed_visits(x: Tensor["R N"], y: Tensor["P"], shift: int, n: int, *, visible: Const, BM: Const = 4):
    """Not a correct kernel: its result depends on how many iterations run."""
    p = program_id(cdiv(x.shape[0], BM))
    position = (p * BM + arange(BM)) % maximum(n, 1)
    count = 0
    for _ in blocks(x.shape[1], 8, lambda cols: visible(position[:, None], cols[None, :], shift)):
        count += 1
    y[p] = count


@pytest.mark.parametrize("name", ["causal", "window", "from one on"])
@pytest.mark.parametrize("n", [1, 3, 4, 11, 40])
def test_blocks_hidden_from_every_remainder_are_skipped(name: str, n: int) -> None:
    """The passes know of a remainder that it is below n: blocks that no position below n sees are skipped."""
    visible, x, y = POSITIONS[name], random((12, 100)), poisoned(3, "int32")
    for shift in (0, 9, 30):
        i, j = np.indices((n, 104))
        seen = visible(i, j, shift).any(axis=0).reshape(13, 8).any(axis=1)
        kernel_ir = packed_visits.ir(x, y, shift, n, visible=visible)
        pipeline.run(kernel_ir, pipeline.PipelineOptions())
        evaluate(kernel_ir, [x, y], [shift, n])
        assert y.tolist() == [seen.sum()] * 3
