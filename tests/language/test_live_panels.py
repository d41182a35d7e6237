"""Panels of rows that no tensor has are not computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from arrays import random
from monotile import ir
from monotile.backends.cpu.axes import Axes
from monotile.backends.cpu.compiler import OPTIONS
from monotile.backends.cpu.layout import Layout
from monotile.backends.cpu.live_panels import stored_ranges
from monotile.backends.cpu.target import UNITS
from monotile.kernels import reference_caches
from monotile.kernels.examples import matmul
from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, zeros
from monotile.passes import pipeline


def ranges(made: ir.Kernel) -> list[Any]:
    made = ir.copy(made)
    pipeline.run(made, OPTIONS)
    axes = Axes(made)
    return stored_ranges(made, axes, Layout(made, axes, UNITS["avx512"]).panel_axis)


@kernel
def two_ends(
    a: Tensor["M K"], b: Tensor["K N"], short: Tensor["S N"], long: Tensor["L N"], ends: Tensor["E F"],
    *, BM: Const = 64, BN: Const = 64, K: Const,
):  # fmt: skip
    """a b in tensors of different lengths, of which a part is a view."""
    j, i = program_id(cdiv(b.shape[1], BN), cdiv(a.shape[0], BM))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    part = long[: ends[0, 0]]
    product = zeros((BM, BN)) + dot(a[rows, arange(K)], b[arange(K), cols])
    short[rows, cols] = product
    part[rows, cols] = 2.0 * product


@kernel
def row_sums(a: Tensor["M K"], b: Tensor["K N"], total: Tensor["T N"], c: Tensor["C N"], *, K: Const):
    """The sums of all rows of a b, of which some are stored."""
    rows, cols = arange(64), arange(64)
    product = dot(a[rows, arange(K)], b[arange(K), cols])
    total[0, cols] = product.sum(axis=0)
    c[rows, cols] = product


def test_ranges_of_stores() -> None:
    a, b, c = random((70, 20)), random((20, 90)), random((70, 90))
    assert len(ranges(matmul.ir(a, b, c))) == 1
    ends = np.array([[30]], np.int32)
    assert len(ranges(two_ends.ir(a, b, c[:5].copy(), c, ends))) in (0, 2)  # none where columns are the panel axis


def test_every_length_of_what_is_stored(backend: str) -> None:
    """A panel is computed for as long as one of the two takes it."""
    a, b = random((150, 20)), random((20, 90), seed=1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for short, long, end in ((0, 150, 150), (150, 0, 0), (1, 150, 33), (70, 20, 200), (150, 150, 0), (64, 65, 64)):
        first, second = np.full((short, 90), np.nan, np.float32), np.full((long, 90), 7.0, np.float32)
        two_ends(a, b, first, second, np.array([[end]], np.int32), backend=backend)
        kept = min(end, long)
        np.testing.assert_allclose(first, exact[:short], atol=1e-5)
        np.testing.assert_allclose(second[:kept], 2 * exact[:kept], atol=2e-5)
        assert (second[kept:] == 7.0).all()


def test_rows_that_are_summed_are_computed(backend: str) -> None:
    a, b = random((64, 20)), random((20, 64), seed=1)
    total, c = np.full((1, 64), np.nan, np.float32), np.full((3, 64), np.nan, np.float32)
    row_sums(a, b, total, c, backend=backend)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(total[0], exact.sum(axis=0), atol=1e-4)
    np.testing.assert_allclose(c, exact[:3], atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 300), (1, 1, 1, 200), (300, 1), (0, 17, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_queries_beside_chunks(backend: str, lengths: tuple[int, ...], dtype: str) -> None:
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    keys = np.cumsum([0, *(n + 40 for n in lengths)]).astype(np.int32)
    q = random((int(offsets[-1]), 4, 24), dtype, 1)
    k, v = (random((int(keys[-1]), 2, 24), dtype, seed) for seed in (2, 3))
    found, lse = monotile.attention_varlen(q, k, v, offsets, keys, causal=True, return_lse=True, backend=backend)
    exact, sums = reference_caches.attention_varlen(
        *(x.astype(np.float64) for x in (q, k, v)), offsets, keys, causal=True
    )
    scale = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found.astype(np.float64), exact, atol=scale)
    np.testing.assert_allclose(lse, sums, atol=1e-4)
