# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Kernels that were once miscompiled, found by tests/fuzz and reduced. Docstrings name the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from arrays import numpy_type, poisoned, random, same
from monotile.backends.cpu.target import runnable
from monotile.language import (
    Const,
    Tensor,
    arange,
    blocks,
    cdiv,
    dot,
    float16,
    float32,
    full,
    inf,
    int32,
    int64,
    kernel,
    maximum,
    minimum,
    program_id,
    static_range,
    where,
    zeros,
)
from usable import ONE_UNIT, usable


def whole(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[Any]:
    """Small integers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-4, 4, shape, endpoint=True).astype(np.float32)


# ---- reductions ------------------------------------------------------------------------------------------------------


@kernel
def reduce_at_edge(x: Tensor["N"], y: Tensor["2"], start: int, *, B: Const):
    total = x[start + arange(B)].sum(axis=0)
    y[0] = total
    y[1] = total + 1.0


@pytest.mark.parametrize("side", [1, 5, 16, 33, 64])
def test_reduction_to_a_scalar_where_the_tensor_ends(backend: str, side: int) -> None:
    """The scalar was computed in one of two copies of the loop nest and read after both."""
    x = whole((40,))
    for start in (-3, 0, 20, 50):
        y = poisoned(2)
        reduce_at_edge(x, y, start, B=side, backend=backend)
        inside = x[max(start, 0) : max(start + side, 0)].sum(dtype=np.float32)
        same(y, np.array([inside, inside + 1], np.float32))


@kernel
def reduce_of_one(x: Tensor["N"], y: Tensor["N"], *, B: Const = 1):
    """The reduction of a single element, used as a number, a position and a factor."""
    first = x[1 + arange(B)].max(axis=0)
    at = x[0 : 0 + B].sum(axis=0).astype(int32)
    y[at] = first
    y[at + 1 + arange(2)] = x[arange(2)] * first


def test_reduction_of_one_element(backend: str) -> None:
    x, y = np.array([2, 3, 4, 5, 6], np.float32), poisoned(5)
    reduce_of_one(x, y, backend=backend)
    same(y, np.array([np.nan, np.nan, 3, 6, 9], np.float32))


@kernel
def both_reductions(x: Tensor["N N"], y: Tensor["N"], z: Tensor["N N"], *, N: Const):
    tile = x[:, :]
    y[:] = tile.sum(axis=0) + tile.max(axis=1)
    z[:, :] = tile + tile.sum(axis=0)[:, None] - tile.min(axis=1)[None, :]


@pytest.mark.parametrize("side", [2, 5, 16, 33])
def test_both_reductions_of_a_square_meet(backend: str, side: int) -> None:
    """Rows and columns of one tile were unified into one axis."""
    x, y, z = whole((side, side)), poisoned(side), poisoned((side, side))
    both_reductions(x, y, z, backend=backend)
    same(y, x.sum(axis=0) + x.max(axis=1))
    same(z, x + x.sum(axis=0)[:, None] - x.min(axis=1)[None, :])


@kernel
def carried_reductions(x: Tensor["N N"], y: Tensor["N"], *, N: Const):
    tile = x[:, :]
    total = tile.sum(axis=0)
    for _ in range(3):
        total = tile.sum(axis=1) - total
    y[:] = total


def test_both_reductions_of_a_square_in_one_variable(backend: str) -> None:
    x, y = whole((17, 17)), poisoned(17)
    carried_reductions(x, y, backend=backend)
    rows, columns = x.sum(axis=1), x.sum(axis=0)
    same(y, rows - (rows - (rows - columns)))


@kernel
def reduce_before_store(x: Tensor["N"], y: Tensor["2"], *, N: Const):
    tile = x[:]
    x[:] = tile + 1.0
    y[0] = tile.sum(axis=0)
    y[1] = (tile * 2.0).max(axis=0)


def test_reduction_of_a_tile_whose_tensor_has_changed(backend: str) -> None:
    """A reduction's own copy of its load was placed after a store to the tensor."""
    x, y = np.arange(1, 20, dtype=np.float32), poisoned(2)
    reduce_before_store(x, y, backend=backend)
    same(y, np.array([190, 38], np.float32))
    same(x, np.arange(2, 21, dtype=np.float32))


@kernel
def columns_of_a_panel(
    shown: Tensor["M N"], a: Tensor["M K"], b: Tensor["N K"], sums: Tensor["M K"], totals: Tensor["N K"],
    *, B: Const, N: Const, K: Const,
):  # fmt: skip
    cols, tile, total = arange(N), b[:, :], zeros((N, K))
    for i in range(0, a.shape[0], B):
        rows = i + arange(B)
        seen = shown[rows, cols] & (rows[:, None] < a.shape[0])
        x = where(seen, dot(a[rows], tile.T), 0.0)
        total = total + dot(x.T, a[rows])
        sums[rows] += dot(x, where(seen.max(axis=0)[:, None], tile, 0.0))
    totals[:, :] = total


@pytest.mark.parametrize("columns", [16, 64, 80])
def test_bool_reduction_over_the_rows_of_a_panel(backend: str, columns: int) -> None:
    """A reduction of bools counted the panels of its columns in vectors of bytes; panels have vectors of float32."""
    a, b, shown = whole((32, 40)), whole((columns, 40), 1), np.zeros((32, columns), np.bool_)
    shown[3] = np.arange(columns) % 3 == 1
    shown[20] = np.arange(columns) % 5 == 1
    sums, totals = np.zeros((32, 40), np.float32), poisoned((columns, 40))
    columns_of_a_panel(shown, a, b, sums, totals, B=16, backend=backend)
    x = np.where(shown, a @ b.T, 0)
    same(totals, x.T @ a)
    same(sums, x @ b)


# ---- dots ------------------------------------------------------------------------------------------------------------


@kernel
def broadcast_dot(x: Tensor["K N"], y: Tensor["N N"], *, K: Const, N: Const):
    tile = x[:, :]
    row = tile[:, :].sum(axis=0)[None, :]
    y[:, :] = dot(row, row.T) + dot(tile.T, tile)


def test_dot_of_one_element_is_added_to_a_larger_one(backend: str) -> None:
    """In x + dot(...) the accumulator may start from x only if the dot has the shape of the sum."""
    x, y = whole((3, 7)), poisoned((7, 7))
    broadcast_dot(x, y, backend=backend)
    row = x.sum(axis=0)
    same(y, (row @ row) + x.T @ x)


@kernel
def symmetric(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    product = dot(x[:, :], x[:, :])
    y[:, :] = where(product != product.T, 1.0, 0.0)


@pytest.mark.parametrize("side", [5, 15, 32])
def test_dot_meets_its_transpose(backend: str, side: int) -> None:
    """Element (column, row) of the product was read when only (row, column) had been computed."""
    x, y = whole((side, side)), poisoned((side, side))
    symmetric(x, y, backend=backend)
    product = x @ x
    same(y, (product != product.T).astype(np.float32))


@kernel
def narrow_product(x: Tensor["M K"], y: Tensor["K 1"], z: Tensor["M"], *, M: Const, K: Const):
    product = dot(x[:, :], y[:, :]).max(axis=1)
    z[:] = product[:, None].astype(float16).astype(float32).sum(axis=1)


@pytest.mark.parametrize("side", [5, 16, 40])
def test_product_with_one_column(backend: str, side: int) -> None:
    """A value that varies only along the lanes was computed before the product it depends on."""
    x, y, z = whole((side, 9)), whole((9, 1), 1), poisoned(side)
    narrow_product(x, y, z, backend=backend)
    same(z, (x @ y)[:, 0])


@kernel
def panels(x: Tensor["M N"], *, B: Const = 48):
    tile = x[1 + arange(B), arange(B)]
    x[arange(B), arange(B)] = dot(tile.astype(float32), full((B, B), 1.0)).astype(float16)


def test_panels_outlive_those_after_them(backend: str) -> None:
    """The storage of a packed panel was reused for the next panel while still read."""
    x = np.asfortranarray(whole((35, 49)).astype(np.float16))
    tile = np.zeros((48, 48), np.float32)
    tile[:34] = x[1:, :48]
    expected = x.copy()
    expected[:, :48] = tile.sum(axis=1)[:35, None]
    panels(x, backend=backend)
    np.testing.assert_array_equal(x, expected)


# ---- what a loop carries ---------------------------------------------------------------------------------------------


@kernel
def fibonacci(y: Tensor["2 N"], iterations: int, *, N: Const):
    a, b = full(N, 1.0), zeros(N)
    for _ in range(iterations):
        a, b = a + b, a
    y[0, :] = a
    y[1, :] = b


def test_old_value_moves_on(backend: str) -> None:
    """The sum overwrote `a` before `b` had read it."""
    y = poisoned((2, 20))
    fibonacci(y, 7, backend=backend)
    same(y, np.repeat(np.array([[21], [13]], np.float32), 20, axis=1))


@kernel
def transposing(x: Tensor["N N"], y: Tensor["N N"], *, product: Const, N: Const):
    tile = x[:, :]
    for _ in range(2):
        tile = dot(tile, x[:, :]) if product else tile.T - tile * 2.0
    y[:, :] = tile


@pytest.mark.parametrize("side", [3, 16, 33])
def test_update_that_reads_other_elements(backend: str, side: int) -> None:
    """The new tile overwrote the old one while other elements of that were still to be read."""
    x, y = whole((side, side)), poisoned((side, side))
    transposing(x, y, product=False, backend=backend)
    once = x.T - x * 2
    same(y, once.T - once * 2)
    transposing(x, y, product=True, backend=backend)
    same(y, x @ x @ x)


@kernel
def branching(y: Tensor["2 N"], iterations: int, *, N: Const):
    a, b = full(N, 1.0), zeros(N)
    for i in range(iterations):
        if i % 2 == 0:
            new = a + b
        else:
            new = a - b
        a, b = new, a
    y[0, :] = a
    y[1, :] = b


def test_old_value_moves_on_past_a_branch(backend: str) -> None:
    """A result of the branch overwrote `a` before `b` had read it."""
    y = poisoned((2, 20))
    branching(y, 5, backend=backend)
    a, b = 1, 0
    for i in range(5):
        a, b = (a + b if i % 2 == 0 else a - b), a
    same(y, np.repeat(np.array([[a], [b]], np.float32), 20, axis=1))


@kernel
def restarted(y: Tensor["M N"], *, N: Const):
    first = zeros(N)
    for _ in range(3):
        first += 1.0
    for i in range(y.shape[0]):
        tile = first
        for _ in range(i + 1):
            tile = tile * 2.0
        y[i, :] = tile


def test_inner_loop_starts_anew(backend: str) -> None:
    """The inner loop updated the initial value in place, which the next outer iteration needs."""
    y = poisoned((4, 20))
    restarted(y, backend=backend)
    same(y, np.repeat(np.array([[6], [12], [24], [48]], np.float32), 20, axis=1))


# ---- stores ----------------------------------------------------------------------------------------------------------


@kernel
def first_part(x: Tensor["N"], y: Tensor["M"], start: int, *, B: Const):
    y[start + arange(B)] = x[arange(B)].astype(y.dtype)


@pytest.mark.parametrize("side", [1, 5, 9, 17, 33])
@pytest.mark.parametrize(
    "source, dtype",
    [
        ("int32", "int8"), ("int32", "uint8"), ("int32", "bool"), ("int64", "int32"),
        ("float32", "bfloat16"), ("float32", "float16"),
    ],
)  # fmt: skip
def test_last_vector_has_one_element(backend: str, side: int, source: str, dtype: str) -> None:
    """LLVM turned a masked store of one narrow element into a store of four bytes."""
    x = np.arange(1, 65).astype(source)
    for start in (0, 40 - side, 39):
        y = poisoned(40, dtype)
        expected = y.copy()
        expected[start : start + side] = x[: min(side, 40 - start)].astype(numpy_type(dtype))
        first_part(x, y, start, B=side, backend=backend)
        np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


# ---- numbers near the ends of their type -----------------------------------------------------------------------------


@kernel
def far(x: Tensor["N"], y: Tensor["N"], z: Tensor["N"], start: int64, *, B: Const = 20):
    y[arange(B)] = x[start + arange(B)]
    z[start + arange(B)] = x[arange(B)]


@pytest.mark.parametrize("start", [2**32, 2**32 + 5, -(2**32) + 3, 2**40, 2**63 - 1, 2**63 - 10, -(2**63)])
def test_positions_beyond_int32(backend: str, start: int) -> None:
    """Bounds were checked in int32: a position off by 2^32 counted as in bounds."""
    x, y, z = whole((49,)) + 9, poisoned(49), poisoned(49)
    far(x, y, z, start, backend=backend)
    assert (y[:20] == 0).all() and np.isnan(z).all()


@kernel
def limited(x: Tensor["N"], y: Tensor["1"], limit: int, window: int, *, hide: Const, B: Const = 16):
    visible = lambda at: (at <= limit) & (at > 0 - window)  # noqa: E731
    total = zeros(B)
    for j in blocks(x.shape[0], B, visible if hide else lambda at: at >= 0):
        at = j + arange(B)
        total += where(visible(at), x[at], 0.0)
    y[0] = total.sum(axis=0)


@pytest.mark.parametrize("hide", [False, True])
def test_limits_as_great_as_can_be(backend: str, hide: bool) -> None:
    """Bounds on a loop's counter wrapped: blocks were skipped, or counted as in bounds."""
    x, y, most = np.ones(100, np.float32), poisoned(1), 2**31 - 1
    limits = ((most, most), (most, 5), (50, most), (most - 3, most - 3), (-most - 1, most), (most, -most))
    for limit, window in limits:
        limited(x, y, limit, window, hide=hide, backend=backend)
        assert y[0] == sum(n <= limit and n > -window for n in range(100))


@kernel
def wrapped_product(big: Tensor["M N"], x: Tensor["K"], y: Tensor["8"]):
    total = zeros(8)
    for j in range(0, 8, 8):
        at = j + arange(8)
        total += where(at < x.shape[0], x[big.shape[0] * big.shape[1] + at], 0.0)
    y[:] = total


def test_product_of_lengths_wraps(backend: str) -> None:
    """A product of lengths, which may wrap, was assumed nonnegative."""
    big, x, y = np.broadcast_to(np.zeros(1, np.float32), (46341, 46341)), np.ones(1000, np.float32), poisoned(8)
    wrapped_product(big, x, y, backend=backend)
    assert (y == 0).all()


@kernel
def successor(y: Tensor["2"], n: int):
    y[0] = where(n + 1 < n, 1.0, 0.0)
    y[1] = where(n <= n - 1, 1.0, 0.0)


def test_comparisons_of_wrapped_numbers(backend: str) -> None:
    y = poisoned(2)
    for n, expected in ((2**31 - 1, [1, 0]), (-(2**31), [0, 1]), (5, [0, 0])):
        successor(y, n, backend=backend)
        assert y.tolist() == expected


@kernel
def shifted_maxima(q: Tensor["R D"], k: Tensor["N D"], y: Tensor["R"], *, D: Const, BR: Const, BK: Const = 16):
    rows = program_id(cdiv(q.shape[0], BR)) * BR + arange(BR)
    shift = rows[:, None].astype(float32)  # the same in every iteration
    top = full(BR, -inf)
    for j in range(0, k.shape[0], BK):
        top = maximum(top, (dot(q[rows], k[j + arange(BK)].T) + shift).max(axis=1))
    y[rows] = top


@pytest.mark.parametrize("BR", [32, 64, 128])
def test_float_positions_outside_a_loop(backend: str, BR: int) -> None:
    """cpu: every panel of rows but the first read the floats of the first panel's positions."""
    q, k, y = whole((100, 16)), whole((48, 16), 1), poisoned(100)
    shifted_maxima(q, k, y, BR=BR, backend=backend)
    same(y, (q @ k.T).max(axis=1) + np.arange(100, dtype=np.float32))


@kernel
def shared_operands(x: Tensor["N N"], y: Tensor["N N"], *, N: Const):
    ones = full((N, N), 1.0)
    above = maximum(ones, x[:, :])
    y[:, :] = dot(full((N, N), 1.0), ones)
    x[:, :] = dot(above.T, ones)


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_operand_computed_from_another(backend: str) -> None:
    """metal: no barrier behind a tile in threadgroup memory that was computed from another such tile."""
    x, y = random((31, 31)), poisoned((31, 31))
    expected = np.maximum(x, 1).sum(axis=0, dtype=np.float64)
    shared_operands(x, y, backend=backend)
    np.testing.assert_allclose(x, np.tile(expected[:, None], 31), rtol=1e-6)
    assert (y == 31).all()


@kernel
def stored_twice(x: Tensor["N N"], y: Tensor["N"], *, N: Const):
    y[:] = arange(N).astype(float32)
    y[:] = x[:, :].sum(axis=1)


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_two_stores_to_one_place(backend: str) -> None:
    """metal: the two tiles are in different lanes, and nothing ordered their stores."""
    x, y = whole((65, 65)), poisoned(65)
    stored_twice(x, y, backend=backend)
    same(y, x.sum(axis=1))


@kernel
def metal_faults(
    x: Tensor["N N"], wide: Tensor["N W"], short: Tensor["H W"], y: Tensor["7 N"], z: Tensor["H H"], w: Tensor["H H"],
    t: Tensor["N"], flag: bool, *, N: Const, W: Const, H: Const,
):  # fmt: skip
    column = dot(x[:, :], wide[:, 0:1])  # of which other simdgroups hold nothing
    y[0, :] = dot(column, full((1, N), 1.0)).sum(axis=0)
    first, rest = dot(wide[:, :], wide[:, :].T), wide[:, 0:1]  # the first column of a tile in threadgroup memory
    y[1, :] = dot(minimum(first, 9.0), maximum(rest, -2.0)).sum(axis=1)
    y[2, :] = dot(x[0:1, :], x[:, 0:1]).min(axis=0)  # a NaN alone
    tops = short[:, :].max(axis=1)
    product = dot(short[:, :], short[:, :].T)
    z[:, :] = product + tops[None, :]  # an addend from other lanes
    w[:, :] = dot(short[:, :] + tops[:, None], short[:, :].T)  # a left operand from other lanes
    once = where(flag, 1.0, t[:])  # read after another value has taken the registers of t
    twice = where(flag, maximum(t[:], 1.0), 1.0)
    for _ in range(y.shape[0] - 6):
        once = once + twice
    t[:] = once
    for n in static_range(3, 7):
        y[n, :] = once


@pytest.mark.parametrize("backend", usable("interpreter", "cpu", "metal"))
def test_faults_of_metal(backend: str) -> None:
    x, wide, short, t = whole((64, 64)), whole((64, 32), 1), whole((5, 32), 2), whole((64,), 3)
    y, z, w, before = poisoned((7, 64)), poisoned((5, 5)), poisoned((5, 5)), t.copy()
    metal_faults(x, wide, short, y, z, w, t, False, backend=backend)
    column, first, tops = x @ wide[:, :1], np.minimum(wide @ wide.T, 9), short.max(axis=1)
    same(y[0], np.tile(column.sum(), 64))
    same(y[1], (first @ np.maximum(wide[:, :1], -2))[:, 0])
    same(y[2], np.tile(x[0] @ x[:, 0], 64))
    same(z, short @ short.T + tops)
    same(w, (short + tops[:, None]) @ short.T)
    same(t, before + 1)
    x[:] = np.nan
    metal_faults(x, wide, short, y, z, w, t, False, backend=backend)
    assert (y[2] == np.inf).all()


@kernel
def sums_of_dots(x: Tensor["N N"], w: Tensor["N N"], t: Tensor["N"], y: Tensor["N N"], *, N: Const, FORM: Const):
    a, b = x[:, :], w[:, :]
    if FORM == 0:
        y[:, :] = dot(a, b) + 1.0 + dot(b, a)
    elif FORM == 1:
        y[:, :] = dot(a, b) + t[:][None, :] + dot(b, a) + 2.0 + dot(a, a)
    elif FORM == 2:
        y[:, :] = dot(a, b) - (1.0 + dot(b, a))
    else:
        s = zeros((N, N), float32)
        for _ in range(2):
            s = dot(a, b) + s + dot(b, a) + 3.0
        y[:, :] = s


@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("side", [4, 33])
def test_sums_of_a_dot_in_the_sum_of_another(backend: str, side: int, form: int) -> None:
    """cpu: in `x + dot(...)`, an x that was such a sum itself was computed without its dot."""
    x, w, t, y = whole((side, side)), whole((side, side), 1), whole((side,), 2), poisoned((side, side))
    sums_of_dots(x, w, t, y, FORM=form, backend=backend)
    p, q = x @ w, w @ x
    same(y, (p + 1 + q, p + t + q + 2 + x @ x, p - (1 + q), 2 * (p + q + 3))[form])


@kernel
def half_vectors(x: Tensor["R 16"]):
    s = zeros((8, 4), float32)
    for j in blocks(16, 4, lambda columns: columns < 1):
        columns = j + arange(4)
        s += where((columns < 1)[None, :], x[0 + arange(8), columns].astype(float32), 0.0)
    x[0 + arange(8), 0 + arange(4)] = minimum(maximum(s, -50.0), 50.0).astype(int64)


def test_int64_in_half_a_vector(backend: str) -> None:
    """cpu with AVX2: an assertion in LLVM ended the process."""
    x = np.random.default_rng(0).integers(-9, 9, (11, 20))[:, :16]
    right = x.copy()
    right[:8, :4] = np.where(np.arange(4) < 1, x[:8, :4], 0)
    half_vectors(x, backend=backend)
    same(x, right)


@kernel
def narrow_sums(x: Tensor["M N"], y: Tensor["M N"], *, axis: Const, M: Const, N: Const):
    y[:, :] = x[:, :].cumsum(axis=axis)


@kernel
def narrow_loops(x: Tensor["M N"], y: Tensor["M N"], *, M: Const, N: Const):
    t = x[:, :]
    for _ in range(3):
        t = t * 3 + t.sum(axis=0)[None, :]
    y[:, :] = t


@pytest.mark.parametrize("N", [1, 2, 4, 5, 9, 11])
def test_int64_in_part_of_a_vector(backend: str, N: int) -> None:
    """cpu with AVX2: the same assertion, for masks whose upper half is known to be empty. Other vector units alone."""
    x = np.random.default_rng(0).integers(-(2**40), 2**40, (2, N))
    for unit in ("", ":avx2") if backend == "cpu" and not ONE_UNIT and "avx2" in runnable() else ("",):
        for axis in (0, 1):
            y = np.zeros_like(x)
            narrow_sums(x, y, axis=axis, backend=backend + unit)
            same(y, x.cumsum(axis=axis))
        y, t = np.zeros_like(x), x
        narrow_loops(x, y, backend=backend + unit)
        for _ in range(3):
            t = t * 3 + t.sum(axis=0)[None]
        same(y, t)
