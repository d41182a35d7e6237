"""Dots that are added to memory, beside dots that contract other axes of the same tiles."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import random
from monotile import ir
from monotile.backends.cpu.axes import Axes
from monotile.backends.cpu.compiler import OPTIONS
from monotile.backends.cpu.layout import Layout
from monotile.backends.cpu.target import UNITS
from monotile.language import Const, Tensor, arange, blocks, dot, kernel, program_id, where, zeros
from monotile.passes import pipeline


@kernel
def both_ways(
    a: Tensor["H M D"], b: Tensor["H N D"], by_columns: Tensor["H N D"], by_rows: Tensor["H M D"],
    *, D: Const, BM: Const, BN: Const, causal: Const = False,
):  # fmt: skip
    """S = a b^T, of which the part below the diagonal counts if causal; S^T a is summed in registers, S b in memory."""
    h = program_id(a.shape[0])

    def block_of_columns(cols):  # type: ignore[no-untyped-def]
        def seen(rows):  # type: ignore[no-untyped-def]
            inside = (rows[:, None] < a.shape[1]) & (cols[None, :] < b.shape[1])
            return inside & (cols[None, :] <= rows[:, None]) if causal else inside

        B, total = b[h, cols], zeros((BN, D))
        for i in blocks(a.shape[1], BM, seen):
            rows = i + arange(BM)
            A = a[h, rows]
            S = where(seen(rows), dot(A, B.T), 0.0).astype(a.dtype)
            total += dot(S.T, A)
            by_rows[h, rows] += dot(S, B)
        by_columns[h, cols] = total

    for j in range(0, b.shape[1], BN):
        block_of_columns(j + arange(BN))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [1, 5, 40])
@pytest.mark.parametrize("tile", [(16, 16), (24, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_in_registers_and_in_memory(backend: str, dtype: str, tile: tuple[int, int], D: int, causal: bool) -> None:
    a, b = random((2, 70, D), dtype, 1), random((2, 90, D), dtype, 2)
    by_columns, by_rows = np.full((2, 90, D), np.nan, np.float32), random((2, 70, D), "float32", 3)
    before = by_rows.copy()
    both_ways(a, b, by_columns, by_rows, BM=tile[0], BN=tile[1], causal=causal, backend=backend)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    S = wide_a @ wide_b.swapaxes(1, 2)
    S = (np.tril(S) if causal else S).astype(np.float32).astype(a.dtype).astype(np.float64)
    scale = 1e-5 if dtype == "float32" else 2e-2  # a product on the edge may be rounded the other way
    np.testing.assert_allclose(by_columns, S.swapaxes(1, 2) @ wide_a, atol=20 * scale)
    np.testing.assert_allclose(by_rows - before, S @ wide_b, atol=20 * scale)


@pytest.mark.parametrize(("D", "sums"), [(16, 1), (40, 1), (1, 0)])
def test_columns_are_the_panel_axis(D: int, sums: int) -> None:
    """A single column has no lanes of its own."""
    a, b = random((2, 70, D)), random((2, 90, D))
    made = ir.copy(both_ways.ir(a, b, b.copy(), a.copy(), BM=32, BN=64))
    pipeline.run(made, OPTIONS)
    layout = Layout(made, Axes(made), UNITS["avx512"])
    assert bool(layout.panel_sums) == bool(sums)
    assert sums == 0 or (layout.panel_axis is not None and layout.panel_axis.extent == 64)
