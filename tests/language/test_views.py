# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Views: `t[start : end]` with run-time ends is a tensor with an edge of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, float32, kernel, program_id, zeros
from usable import WITH_METAL, usable

ON_ALL = pytest.mark.parametrize("backend", usable(*WITH_METAL))


@kernel
def doubled(
    x: Tensor["T H D"], ends: Tensor["E"], y: Tensor["T H D"], *, D: Const, BT: Const
):  # fmt: skip
    """Twice each sequence of x, in tiles that reach past its end."""
    s, h, n = program_id(ends.shape[0] - 1, x.shape[1], cdiv(x.shape[0], BT))
    start, end = ends[s], ends[s + 1]
    part, out = x[start:end], y[start:end]
    if n * BT < part.shape[0]:
        rows = n * BT + arange(BT)
        out[rows, h] = part[rows, h] * 2.0


@kernel
def products(
    x: Tensor["T D"], y: Tensor["T D"], ends: Tensor["E"], z: Tensor["S D D"], *, D: Const, BT: Const
):  # fmt: skip
    """x^T y of each sequence, in a loop over its blocks."""
    s = program_id(ends.shape[0] - 1)
    a, b = x[ends[s] : ends[s + 1]], y[ends[s] : ends[s + 1]]
    total = zeros((D, D))
    for j in blocks(a.shape[0], BT):
        rows = j + arange(BT)
        total = total + dot(a[rows].astype(float32).T, b[rows].astype(float32))
    z[s] = total


@kernel
def nested(x: Tensor["T H"], y: Tensor["N"], start: int, end: int, *, B: Const):
    """A view of a view of one column, read by a range and by scattered positions, past both of its ends."""
    i = program_id(1)
    column = x[start:end, 1]
    inner = column[1 + i :]
    places = (arange(B) * 3) % B - 1
    y[0:B] = inner[arange(B) - 1] + 100 * inner[places]


def sequences(*lengths: int) -> np.ndarray[Any, Any]:
    return np.cumsum([0, *lengths]).astype(np.int32)


@pytest.mark.parametrize("ends", [sequences(5, 0, 16, 3), sequences(24), np.array([3, 9, 9, 20], np.int64)])
@ON_ALL
def test_stores_do_not_reach_the_next_sequence(backend: str, ends: np.ndarray[Any, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((24, 2, 4)).astype(np.float32)
    y = np.full_like(x, 7.0)
    doubled(x, ends, y, D=4, BT=8, backend=backend)
    expected = np.full_like(x, 7.0)
    for low, high in pairwise(ends):
        expected[low:high] = 2 * x[low:high]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("ends", [[-5, 3, 99, 2**31 - 1], [20, 4, -(2**31), 24], [30, 40, -1, -2]])
@ON_ALL
def test_a_view_stays_inside_its_tensor(backend: str, ends: list[int]) -> None:
    x = np.ones((3, 24, 2, 4), np.float32)[1]
    y = np.zeros((3, 24, 2, 4), np.float32)
    doubled(x, np.array(ends, np.int32), y[1], D=4, BT=8, backend=backend)
    expected = np.zeros_like(x)
    for low, high in pairwise(ends):
        low, high = (min(max(n, 0), 24) for n in (low, high))
        expected[low:high] = 2
    np.testing.assert_array_equal(y[1], expected)
    assert not y[0].any() and not y[2].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@ON_ALL
def test_loads_past_the_end_are_zero(backend: str, dtype: str) -> None:
    ends = sequences(5, 0, 40, 16)
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-4, 4, (64, 16)).astype(dtype) for _ in range(2))
    x[61:], y[61:] = np.nan, np.nan
    z = np.full((4, 16, 16), np.nan, np.float32)
    products(x, y, ends, z, D=16, BT=16, backend=backend)
    for s, (low, high) in enumerate(pairwise(ends)):
        np.testing.assert_array_equal(z[s], x[low:high].astype(np.float32).T @ y[low:high].astype(np.float32))


@ON_ALL
def test_a_view_of_a_view(backend: str) -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    y = np.zeros(8, np.float32)
    nested(x, y, 4, 9, B=8, backend=backend)
    inner = x[4:9, 1][1:]

    def at(places: Any) -> Any:
        return np.array([inner[p] if 0 <= p < len(inner) else 0 for p in places])

    places = np.arange(8) * 3 % 8 - 1
    np.testing.assert_array_equal(y, at(np.arange(8) - 1) + 100 * at(places))
