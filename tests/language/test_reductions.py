# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""sum, max and min along an axis, and dot."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import FLOATS, INTS, Array, numpy_type, poisoned, random, same
from monotile.language import (
    Const,
    Tensor,
    arange,
    argmax,
    argmin,
    cdiv,
    dot,
    float32,
    full,
    inf,
    int32,
    kernel,
    max,
    maximum,
    min,
    minimum,
    program_id,
    sum,
    zeros,
)


@kernel
def fold(x: Tensor["M N"], y: Tensor["_"], *, f: Const, M: Const, N: Const):
    """One program: a reduction of all of x."""
    r = f(x[:, :])
    y[0 : r.shape[0]] = r


@kernel
def reduce_all(x: Tensor["N"], y: Tensor["1"], *, f: Const, N: Const):
    y[0] = f(x[:])


@kernel
def running_extremes(x: Tensor["M N"], y: Tensor["M"], z: Tensor["M"], w: Tensor["M"], *, M: Const, B: Const):
    """Maxima and minima of blocks of columns and of all columns; the last also with a value that may be NaN."""
    rows = arange(M)
    most, least, other = full(M, -inf), full(M, inf), x[rows, 0]
    for j in range(0, x.shape[1], B):
        X = x[rows, j + arange(B)]
        most, least, other = maximum(most, X.max(axis=1)), minimum(least, X.min(axis=1)), maximum(other, X.max(axis=1))
    y[rows], z[rows], w[rows] = most, least, other


@kernel
def extremes_of_two(x: Tensor["M N"], z: Tensor["M N"], y: Tensor["M"], w: Tensor["M"], *, M: Const, N: Const):
    y[:] = maximum(x[:, :].max(axis=1), z[:, :].max(axis=1))
    w[:] = minimum(x[:, :].min(axis=1), z[:, :].min(axis=1))


SHAPES = ((1, 1), (1, 7), (7, 1), (5, 3), (16, 16), (17, 33), (2, 61))


def computed(dtype: str) -> str:
    return {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}.get(dtype, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes(backend: str, dtype: str, axis: int) -> None:
    over_rows = axis == 0
    highest = (lambda x: x.max(axis=0)) if over_rows else (lambda x: max(x, axis=1))
    lowest = (lambda x: min(x, axis=0)) if over_rows else (lambda x: x.min(axis=-1))
    for shape in SHAPES:
        x = random(shape, dtype)
        for f, oracle in ((highest, np.max), (lowest, np.min)):
            y = poisoned(shape[1 - axis], computed(dtype))
            fold(x, y, f=f, backend=backend)
            same(y, oracle(x.astype(computed(dtype)), axis=axis))


def test_running_extremes_of_nothing_but_nan(backend: str) -> None:
    """A maximum or minimum of nothing but NaN is the identity, whatever it is combined with."""
    x = random((16, 48))
    x[1, :16], x[2], x[3, 16:], x[4, 0], x[5, 1:] = np.nan, np.nan, np.nan, np.nan, np.nan
    y, z, w = poisoned(16), poisoned(16), poisoned(16)
    running_extremes(x, y, z, w, B=16, backend=backend)
    known = np.where(np.isnan(x), -np.inf, x)
    same(y, known.max(axis=1))
    same(z, np.where(np.isnan(x), np.inf, x).min(axis=1))
    same(w, known.max(axis=1))


def test_two_reductions_of_nothing_but_nan(backend: str) -> None:
    """Neither reduction may be assumed NaN-free because of the other."""
    x = np.full((16, 16), np.nan, np.float32)
    z = x.copy()
    x[2, 3], z[1, 2] = 3.0, 4.0
    y, w = poisoned(16), poisoned(16)
    extremes_of_two(x, z, y, w, backend=backend)
    most, least = np.full(16, -np.inf, np.float32), np.full(16, np.inf, np.float32)
    most[1:3] = least[1:3] = 4.0, 3.0
    same(y, most)
    same(w, least)


def test_extremes_ignore_nan(backend: str) -> None:
    x = random((6, 9))
    x[0, 3], x[2], x[4, :8] = np.nan, np.nan, -np.inf
    high, low = poisoned(6), poisoned(6)
    fold(x, high, f=lambda x: x.max(axis=1), backend=backend)
    fold(x, low, f=lambda x: x.min(axis=1), backend=backend)
    same(high, np.fmax.reduce(x, axis=1, initial=-np.inf))
    same(low, np.fmin.reduce(x, axis=1, initial=np.inf))
    assert high[2] == -np.inf and low[2] == np.inf


def test_bool_max_is_any_and_min_is_all(backend: str) -> None:
    x = np.array([[0, 0, 0], [0, 1, 0], [1, 1, 1]], bool)
    y, z = poisoned(3, "bool"), poisoned(3, "bool")
    fold(x, y, f=lambda x: x.max(axis=1), backend=backend)
    fold(x, z, f=lambda x: x.min(axis=1), backend=backend)
    same(y, x.any(axis=1))
    same(z, x.all(axis=1))


@kernel
def reduce_both(x: Tensor["R C"], y: Tensor["1"], *, f: Const, M: Const, N: Const):
    y[0] = f(x[arange(M), arange(N)])


@pytest.mark.parametrize("size", [(3, 64), (8, 128), (5, 192), (4, 70), (1, 64), (70, 3)])
def test_truths_are_counted(backend: str, size: tuple[int, int]) -> None:
    """A row of bytes is wider than a row of floats; the tile may end inside the tensor or beyond it."""
    for cut in (0, 1):
        x = np.random.default_rng(5).random((size[0] - cut + 1, size[1] - cut + 1)) < 0.4
        M, N = size
        seen = np.zeros(size, bool)
        part = x[:M, :N]
        seen[: part.shape[0], : part.shape[1]] = part
        for axis in (0, 1):
            y = poisoned(size[1 - axis], "int32")
            reduce_counts(x, y, axis=axis, M=M, N=N, backend=backend)
            same(y, seen.sum(axis=axis).astype(np.int32))
            for f, oracle in ((lambda t: t.max(axis=axis), np.any), (lambda t: t.min(axis=axis), np.all)):  # noqa: B023
                z = poisoned(size[1 - axis], "bool")
                reduce_part(x, z, f=f, M=M, N=N, backend=backend)
                same(z, oracle(seen, axis=axis))
        total = poisoned(1, "int32")
        reduce_both(x, total, f=lambda t: t.astype(int32).sum(axis=1).sum(axis=0), M=M, N=N, backend=backend)
        assert total[0] == seen.sum()


@kernel
def reduce_counts(x: Tensor["R C"], y: Tensor["_"], *, axis: Const, M: Const, N: Const):
    r = x[arange(M), arange(N)].astype(int32).sum(axis=axis)
    y[arange(r.shape[0])] = r


@kernel
def reduce_part(x: Tensor["R C"], y: Tensor["_"], *, f: Const, M: Const, N: Const):
    r = f(x[arange(M), arange(N)])
    y[arange(r.shape[0])] = r


@pytest.mark.parametrize("size", [(1, 1), (5, 40), (8, 33), (33, 8), (2, 128)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_reductions_of_every_element(backend: str, size: tuple[int, int], dtype: str) -> None:
    x = random(size, dtype)
    for axis in (0, 1):
        for f, oracle in (
            (lambda t: t.max(axis=axis).max(axis=0), np.max),  # noqa: B023
            (lambda t: t.min(axis=axis).max(axis=0), lambda a: a.min(axis=axis).max()),  # noqa: B023
        ):
            y = poisoned(1, dtype)
            reduce_both(x, y, f=f, M=size[0], N=size[1], backend=backend)
            same(y, np.asarray([oracle(x)], dtype))
        y = poisoned(1, dtype)
        reduce_both(x, y, f=lambda t: t.sum(axis=axis).sum(axis=0), M=size[0], N=size[1], backend=backend)  # noqa: B023
        exact = x.astype(np.float64).sum() if dtype == "float32" else x.sum(dtype=np.int32)
        np.testing.assert_allclose(y[0], exact, rtol=1e-5, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("dtype", INTS)
def test_integer_sums_are_exact_and_wrap(backend: str, dtype: str) -> None:
    x = random((9, 33), dtype)
    if dtype in ("int32", "int64"):
        x[0] = np.iinfo(dtype).max
    y = poisoned(9, computed(dtype))
    fold(x, y, f=lambda x: sum(x, axis=1), backend=backend)
    same(y, x.sum(axis=1, dtype=computed(dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float_sums_are_in_float32(backend: str, dtype: str, shape: tuple[int, int]) -> None:
    """Any order of summation is allowed: the error is at most one rounding per addition."""
    x = random(shape, dtype)
    for axis, f in ((0, lambda x: x.sum(axis=0)), (1, lambda x: x.sum(axis=1))):
        y = poisoned(shape[1 - axis])
        fold(x, y, f=f, backend=backend)
        wide = x.astype(np.float64)
        bound = shape[axis] * 2.0**-24 * np.abs(wide).sum(axis=axis)
        assert (np.abs(y - wide.sum(axis=axis)) <= bound).all()


def test_reducing_a_row_gives_a_scalar(backend: str) -> None:
    x, y = random(37, "int32"), poisoned(1, "int32")
    for f, oracle in (
        (lambda x: x.max(axis=0), np.max),
        (lambda x: sum(x), np.sum),
        (lambda x: min(x, axis=0), np.min),
    ):
        y[:] = 77
        reduce_all(x, y, f=f, backend=backend)
        assert y[0] == oracle(x)


def test_sums_of_infinities(backend: str) -> None:
    x = random((4, 5))
    x[0, 1], x[1, 2], x[1, 3], x[2, 0] = np.inf, np.inf, -np.inf, np.nan
    y = poisoned(4)
    fold(x, y, f=lambda x: x.sum(axis=1), backend=backend)
    assert y[0] == np.inf and np.isnan(y[1]) and np.isnan(y[2]) and np.isfinite(y[3])


# ---- dot -------------------------------------------------------------------------------------------------------------


@kernel
def product(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, BM: Const, BN: Const, BK: Const):
    i, j = program_id(cdiv(a.shape[0], BM), cdiv(b.shape[1], BN))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    acc = zeros((BM, BN))
    for k in range(0, a.shape[1], BK):
        acc += dot(a[rows, k + arange(BK)], b[k + arange(BK), cols])
    c[rows, cols] = acc


@kernel
def product_transposed(a: Tensor["M K"], b: Tensor["N K"], c: Tensor["M N"], *, M: Const, N: Const, K: Const):
    c[:, :] = dot(a[:, :], b[:, :].T)


def check_product(c: Array, a: Array, b: Array) -> None:
    """Each element within one rounding per multiply-add of the float64 product."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    bound = (a.shape[1] + 1) * 2.0**-24 * (np.abs(wide_a) @ np.abs(wide_b))
    assert (np.abs(c - wide_a @ wide_b) <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 8, 8), (9, 17, 33), (31, 2, 5), (16, 16, 1), (1, 64, 40)])
def test_dot(backend: str, dtype: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b, c = random((m, k), dtype, 1), random((k, n), dtype, 2), poisoned((m, n))
    product(a, b, c, BM=8, BN=16, BK=16, backend=backend)
    check_product(c, a, b)


def test_dot_of_mixed_types(backend: str) -> None:
    a, b, c = random((5, 6), "float16", 1), random((6, 7), "bfloat16", 2), poisoned((5, 7))
    product(a, b, c, BM=8, BN=8, BK=8, backend=backend)
    check_product(c, a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_transposed(backend: str, dtype: str) -> None:
    a, b, c = random((5, 12), dtype, 1), random((7, 12), dtype, 2), poisoned((5, 7))
    product_transposed(a, b, c, backend=backend)
    check_product(c, a, b.T)


def test_dot_is_exact_on_whole_numbers(backend: str) -> None:
    a, b = random((20, 30), "int8", 1).astype(np.float32), random((30, 10), "int8", 2).astype(np.float32)
    c = poisoned((20, 10))
    product(a, b, c, BM=8, BN=8, BK=8, backend=backend)
    same(c, a @ b)


def test_dot_does_not_round_its_narrow_products(backend: str) -> None:
    """256 products of 1 + 2^-7: in float16 or bfloat16 the sum would be wrong in the second digit."""
    a = np.full((1, 256), 1 + 2.0**-7, np.float32).astype(numpy_type("bfloat16"))
    c = poisoned((1, 1))
    product(a, a.T.copy(), c, BM=1, BN=1, BK=64, backend=backend)
    same(c, np.full((1, 1), 256 * (1 + 2.0**-7) ** 2, np.float32))


@kernel
def weighted(p: Tensor["M K"], v: Tensor["K N"], o: Tensor["M N"], *, M: Const, N: Const, K: Const):
    """The second dot of attention: a computed left operand, cast to the type of the right one."""
    o[:, :] = dot((p[:, :] * 2.0).astype(v.dtype), v[:, :]).astype(o.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_of_a_computed_operand(backend: str, dtype: str) -> None:
    p, v, o = random((6, 8), seed=1), random((8, 5), dtype, 2), poisoned((6, 5))
    weighted(p, v, o, backend=backend)
    check_product(o, (p * 2).astype(numpy_type(dtype)), v)


def test_dtype_of_a_tile() -> None:
    """dot returns float32 for every operand type."""

    def typed(x):
        assert dot(x, x.T).dtype is float32
        return x.max(axis=1)

    x, y = random((4, 4), "float16"), poisoned(4)
    fold(x, y, f=typed, backend="interpreter")
    same(y, x.astype(np.float32).max(axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8", "bool"])
def test_positions_of_extremes(backend: str, dtype: str) -> None:
    """The first of equal ones; NaN is ignored, and a row with nothing above -inf (below inf) gives 0."""
    x = random((9, 33), dtype)
    x[3] = x[3, 5]
    x[4, 7], x[4, 20] = x[4].max(), x[4].max()
    if dtype == "float32":
        x[5], x[6, ::2], x[7] = np.nan, np.nan, -np.inf
    cases = ((argmax, np.argmax, -np.inf), (argmin, np.argmin, np.inf))
    for f, oracle, last in cases:
        for axis in (0, 1):
            y = poisoned(x.shape[1 - axis], "int32")
            fold(x, y, f=lambda x, f=f, axis=axis: f(x, axis), backend=backend)
            hidden = np.where(np.isnan(x), last, x) if dtype == "float32" else x
            same(y, oracle(hidden, axis=axis).astype(np.int32))
    y = poisoned(1, "int32")
    reduce_all(x[0], y, f=lambda x: x.argmax(), backend=backend)
    same(y, np.array([x[0].argmax()], np.int32))


@pytest.mark.parametrize(("a_type", "b_type"), [("int8", "int8"), ("uint8", "int8")])
def test_dot_of_bytes_sums_in_int32(backend: str, a_type: str, b_type: str) -> None:
    """Exact for rows too long for the sums of float32, too."""
    for m, k, n in ((5, 33, 7), (3, 1100, 4)):
        a, b = random((m, k), a_type, 1), random((k, n), b_type, 2)
        a[0], b[:, 0] = np.iinfo(a_type).max, np.iinfo(b_type).min
        y = poisoned((m, n), "int32")
        byte_product(a, b, y, backend=backend)
        same(y, a.astype(np.int32) @ b.astype(np.int32))


@kernel
def byte_product(a: Tensor["M K"], b: Tensor["K N"], y: Tensor["M N"], *, M: Const, K: Const, N: Const):
    y[:, :] = dot(a[:, :], b[:, :])
