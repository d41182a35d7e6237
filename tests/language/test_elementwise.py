# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Operators and elementwise words, in every type, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import DTYPES, FLOATS, INTS, numpy_type, poisoned, random, same, within_ulps
from monotile import errors
from monotile.ir import special
from monotile.language import (
    Const,
    Tensor,
    abs,
    arange,
    cdiv,
    cos,
    erf,
    exp,
    exp2,
    float32,
    fma,
    full,
    int32,
    int64,
    kernel,
    log,
    log2,
    maximum,
    minimum,
    program_id,
    reciprocal,
    sigmoid,
    sin,
    sqrt,
    tanh,
    uint8,
    where,
    zeros,
)

SIZES = (1, 7, 16, 17, 31)


@kernel
def apply1(x: Tensor["N"], y: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = f(x[rows])


@kernel
def apply2(a: Tensor["N"], b: Tensor["N"], y: Tensor["N"], *, f: Const, B: Const = 16):
    rows = program_id(cdiv(a.shape[0], B)) * B + arange(B)
    y[rows] = f(a[rows], b[rows])


@kernel
def fused(a: Tensor["N"], b: Tensor["N"], c: Tensor["N"], y: Tensor["N"], *, B: Const = 16):
    rows = program_id(cdiv(a.shape[0], B)) * B + arange(B)
    y[rows] = fma(a[rows], b[rows], c[rows])


@kernel
def unfused(a: Tensor["N"], b: Tensor["N"], y: Tensor["N"], *, B: Const = 16):
    """Zero unless the two products are rounded differently."""
    rows = program_id(cdiv(a.shape[0], B)) * B + arange(B)
    product = a[rows] * b[rows]
    y[rows] = a[rows] * b[rows] - where(product > 0.0, product, -abs(product))


def computed(dtype: str) -> str:
    return {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}.get(dtype, dtype)


ARITHMETIC = {
    "add": (lambda a, b: a + b, np.add),
    "sub": (lambda a, b: a - b, np.subtract),
    "mul": (lambda a, b: a * b, np.multiply),
    "maximum": (maximum, np.fmax),
    "minimum": (minimum, np.fmin),
    "max of two": (lambda a, b: max(a, b), np.fmax),
    "min of two": (lambda a, b: min(a, b), np.fmin),
}
COMPARE = {
    "lt": (lambda a, b: a < b, np.less),
    "le": (lambda a, b: a <= b, np.less_equal),
    "gt": (lambda a, b: a > b, np.greater),
    "ge": (lambda a, b: a >= b, np.greater_equal),
    "eq": (lambda a, b: a == b, np.equal),
    "ne": (lambda a, b: a != b, np.not_equal),
}


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(backend: str, name: str, dtype: str) -> None:
    f, oracle = ARITHMETIC[name]
    wide = computed(dtype)
    for n in SIZES:
        a, b, y = random(n, dtype, 1), random(n, dtype, 2), poisoned(n, wide)
        apply2(a, b, y, f=f, backend=backend)
        same(y, oracle(a.astype(wide), b.astype(wide)))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
@pytest.mark.parametrize("name", COMPARE)
def test_compare(backend: str, name: str, dtype: str) -> None:
    f, oracle = COMPARE[name]
    a, b, y = random(37, dtype, 1), random(37, dtype, 2), poisoned(37, "bool")
    b[::3] = a[::3]
    apply2(a, b, y, f=f, backend=backend)
    same(y, oracle(a, b))


@pytest.mark.parametrize("name", COMPARE)
def test_compare_with_nan(backend: str, name: str) -> None:
    f, oracle = COMPARE[name]
    specials = np.array([np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0], np.float32)
    a, b = (m.ravel().copy() for m in np.meshgrid(specials, specials))
    y = poisoned(a.shape, "bool")
    apply2(a, b, y, f=f, backend=backend)
    same(y, oracle(a, b))


@pytest.mark.parametrize("dtype", FLOATS)
def test_division_is_correctly_rounded(backend: str, dtype: str) -> None:
    a, b, y = random(33, dtype, 1), random(33, dtype, 2), poisoned(33)
    b[3] = 0
    apply2(a, b, y, f=lambda a, b: a / b, backend=backend)
    with np.errstate(all="ignore"):
        same(y, a.astype(np.float32) / b.astype(np.float32))


@pytest.mark.parametrize("dtype", INTS)
def test_integer_division_rounds_down(backend: str, dtype: str) -> None:
    """The quotient is floored and the remainder has the divisor's sign; dividing by 0 gives 0."""
    values = np.array([-7, -6, -1, 0, 1, 6, 7, 127], np.int64).astype(dtype)
    a, b = (m.ravel().copy() for m in np.meshgrid(values, values))
    wide = computed(dtype)
    with np.errstate(all="ignore"):
        for f, oracle in ((lambda a, b: a // b, np.floor_divide), (lambda a, b: a % b, np.remainder)):
            y = poisoned(a.shape, wide)
            apply2(a, b, y, f=f, backend=backend)
            same(y, oracle(a.astype(wide), b.astype(wide)))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_wrap(backend: str, dtype: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a, b = np.array([high, low, low, low], dtype), np.array([1, 1, -1, high], dtype)
    cases = (
        (lambda a, b: a + b, np.add),
        (lambda a, b: a - b, np.subtract),
        (lambda a, b: a * b, np.multiply),
        (lambda a, b: a // b, np.floor_divide),
        (lambda a, b: a % b, np.remainder),
        (lambda a, b: -a, lambda a, b: -a),
        (lambda a, b: abs(a), lambda a, b: np.abs(a)),
    )
    with np.errstate(all="ignore"):
        for f, oracle in cases:
            y = poisoned(4, dtype)
            apply2(a, b, y, f=f, backend=backend)
            same(y, oracle(a, b))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
def test_negation_and_absolute_value(backend: str, dtype: str) -> None:
    wide = computed(dtype)
    for f, oracle in ((lambda x: -x, np.negative), (abs, np.abs), (lambda x: +x, np.positive)):
        x, y = random(21, dtype), poisoned(21, wide)
        apply1(x, y, f=f, backend=backend)
        same(y, oracle(x.astype(wide)))


def test_signs_of_zero_and_subnormals_survive(backend: str) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, np.inf, -np.inf, np.nan], np.float32)
    for f, oracle in ((lambda x: -x, np.negative), (abs, np.abs), (lambda x: x * 0.5, lambda x: x * np.float32(0.5))):
        y = poisoned(8)
        apply1(x, y, f=f, backend=backend)
        same(y, oracle(x))


def test_maximum_ignores_nan(backend: str) -> None:
    a = np.array([np.nan, 1, np.nan, -np.inf, np.inf], np.float32)
    b = np.array([2, np.nan, np.nan, np.nan, -np.inf], np.float32)
    for f, oracle in ((maximum, np.fmax), (minimum, np.fmin)):
        y = poisoned(5)
        apply2(a, b, y, f=f, backend=backend)
        same(y, oracle(a, b))


def test_bool_operators(backend: str) -> None:
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    cases = (
        (lambda a, b: a & b, a & b),
        (lambda a, b: a | b, a | b),
        (lambda a, b: ~a, ~a),
        (lambda a, b: a == b, a == b),
        (lambda a, b: a != b, a != b),
    )
    for f, expected in cases:
        y = poisoned(4, "bool")
        apply2(a, b, y, f=f, backend=backend)
        same(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_picks(backend: str, dtype: str) -> None:
    wide = computed(dtype)
    a, b, y = random(29, dtype, 1), random(29, dtype, 2), poisoned(29, wide)
    apply2(a, b, y, f=lambda a, b: where(a != b, a, b), backend=backend)
    same(y, np.where(a != b, a, b).astype(wide))


def test_where_hides_what_it_does_not_pick(backend: str) -> None:
    a, b, y = np.array([np.nan, 1, np.inf], np.float32), np.array([1, np.nan, -np.inf], np.float32), poisoned(3)
    apply2(a, b, y, f=lambda a, b: where(a == a, a, 0.0) + where(b == b, b, 0.0), backend=backend)
    same(y, np.array([1, 1, np.nan], np.float32))


TRANSCENDENTAL = {
    "exp": (exp, np.exp, (-90.0, 88.0)),
    "exp2": (exp2, np.exp2, (-130.0, 127.5)),
    "log": (log, np.log, (1e-3, 1e6)),
    "log2": (log2, np.log2, (1e-3, 1e6)),
    "tanh": (tanh, np.tanh, (-10.0, 10.0)),
    "sigmoid": (sigmoid, special.sigmoid, (-87.0, 20.0)),
    "erf": (erf, special.erf, (-4.5, 4.5)),
    "sin": (sin, np.sin, (-1e6, 1e6)),
    "cos": (cos, np.cos, (-30.0, 30.0)),
}


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendental(backend: str, name: str) -> None:
    """Within 4 units in the last place of float32."""
    f, oracle, (low, high) = TRANSCENDENTAL[name]
    x = np.linspace(low, high, 4099, dtype=np.float32)
    x, y = x[np.abs(oracle(x.astype(np.float64))) > 1.2e-38], None
    y = poisoned(x.shape)
    apply1(x, y, f=f, B=512, backend=backend)
    within_ulps(y, oracle(x.astype(np.float64)))


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendental_at_specials(backend: str, name: str) -> None:
    f, oracle, _ = TRANSCENDENTAL[name]
    x = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e4, -1e4, -1.0, 3.4e38, -7.7e28, 1e-30], np.float32)
    y = poisoned(x.shape)
    apply1(x, y, f=f, backend=backend)
    with np.errstate(all="ignore"):
        within_ulps(y, oracle(x.astype(np.float64)))


def test_tanh_from_the_smallest_number_to_one(backend: str) -> None:
    """Relative accuracy near zero, the sign of a zero, and exactly one at the end."""
    x = (2.0 ** np.linspace(-149.0, 127.0, 4099)).astype(np.float32)
    x = np.concatenate([x, np.linspace(7.0, 10.0, 1025, dtype=np.float32), np.array([0.0, 3e38], np.float32)])
    x = np.concatenate([x, -x])
    y = poisoned(x.shape)
    apply1(x, y, f=tanh, B=512, backend=backend)
    within_ulps(y, np.tanh(x.astype(np.float64)))
    assert (np.signbit(y) == np.signbit(x)).all()
    assert (np.abs(y[np.abs(x) >= 10.0]) == 1.0).all()


POWERS = {
    0: lambda x: x**0,
    1: lambda x: x**1,
    3: lambda x: x**3,
    13: lambda x: x**13.0,
    -2: lambda x: x**-2,
    0.5: lambda x: abs(x) ** 0.5,
}


def test_powers(backend: str) -> None:
    x = np.concatenate([random(50), np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    for exponent, f in POWERS.items():
        y = poisoned(x.shape)
        apply1(x, y, f=f, backend=backend)
        with np.errstate(all="ignore"):
            within_ulps(y, (np.abs(x) if exponent == 0.5 else x).astype(np.float64) ** exponent, 8)
    whole, cubes = random(20, "int8"), poisoned(20, "int32")
    apply1(whole, cubes, f=POWERS[3], backend=backend)
    same(cubes, whole.astype(np.int32) ** 3)


def test_powers_that_are_not_small_whole_constants() -> None:
    x, y = random(4), poisoned(4)
    for f in (lambda x: x**0.3, lambda x: x**65, lambda x: x**x, lambda x: 3.0**x):
        with pytest.raises(errors.UnsupportedPython, match="exp2"):
            apply1(x, y, f=f, backend="interpreter")
    with pytest.raises(errors.UndefinedForDType, match="int32"):
        apply1(random(4, "int32"), y, f=POWERS[-2], backend="interpreter")


def test_reciprocal(backend: str) -> None:
    """Within 2 units in the last place over the whole range; 0 is accepted for a subnormal result."""
    x = (2.0 ** np.linspace(-126.0, 126.0, 4099)).astype(np.float32)
    x = np.concatenate([x, np.linspace(1.0, 4.0, 4096, dtype=np.float32), np.array([0.0, np.inf], np.float32)])
    x = np.concatenate([x, -x, np.array([np.nan], np.float32)])
    y = poisoned(x.shape)
    apply1(x, y, f=reciprocal, B=512, backend=backend)
    with np.errstate(divide="ignore"):
        within_ulps(y, 1.0 / x.astype(np.float64), 2)
    great, small = np.array([2.0**127, -3e38], np.float32), poisoned(2)
    apply1(great, small, f=reciprocal, backend=backend)
    assert (np.abs(small - 1.0 / great) <= 2.0**-126).all()


def test_fma_is_rounded_once(backend: str) -> None:
    a, b, y = random(4096, seed=1), random(4096, seed=2), poisoned(4096)
    c = -(a * b)  # what is left is what rounding takes off a product
    c[::3] = random(4096, seed=3)[::3]
    a[:4], b[:4], c[:4] = (np.inf, 0.0, 3e38, np.nan), (0.0, -0.0, 3e38, 1.0), (1.0, 0.0, -np.inf, 1.0)
    fused(a, b, c, y, B=512, backend=backend)
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        same(y, exact.astype(np.float32))
        assert (y[4:][c[4:] == -(a * b)[4:]] != 0.0).any()


def test_fma_of_narrow_floats_and_of_numbers(backend: str) -> None:
    a, b, y = random(33, "bfloat16", 1), random(33, "float16", 2), poisoned(33)
    apply2(a, b, y, f=lambda a, b: fma(a, b, 0.5), backend=backend)
    same(y, (a.astype(np.float64) * b.astype(np.float64) + 0.5).astype(np.float32))
    apply1(a, y, f=lambda a: a * fma(2.0, 3, -1), backend=backend)
    same(y, a.astype(np.float32) * np.float32(5.0))


def test_fma_is_for_floats(backend: str) -> None:
    a, y = random(4, "int32"), poisoned(4)
    with pytest.raises(errors.UndefinedForDType, match=r"'fma' is not defined for int32"):
        apply1(a, y, f=lambda a: fma(a, 2.0, 1.0), backend=backend)


def test_fma_of_constants_that_fail(backend: str) -> None:
    a, y = random(4), poisoned(4)
    with pytest.raises(errors.ConstantFailed):
        apply1(a, y, f=lambda a: a * fma(10**400, 1.0, 1.0), backend=backend)


def test_nothing_else_is_fused(backend: str) -> None:
    a, b, y = random(4096, seed=1), random(4096, seed=2), poisoned(4096)
    unfused(a, b, y, B=512, backend=backend)
    assert (y == 0.0).all()


def test_sqrt_is_correctly_rounded(backend: str) -> None:
    x = np.concatenate([np.abs(random(50)), np.array([0.0, -0.0, np.inf, np.nan, -1.0, 1e-45], np.float32)])
    y = poisoned(x.shape)
    apply1(x, y, f=sqrt, backend=backend)
    with np.errstate(all="ignore"):
        same(y, np.sqrt(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_narrow_results_are_rounded_once(backend: str, dtype: str) -> None:
    """Arithmetic on narrow floats happens in float32; only the store rounds."""
    a, b, y = random(64, dtype, 1), random(64, dtype, 2), poisoned(64, dtype)
    apply2(a, b, y, f=lambda a, b: (a + b) + 1e-3, backend=backend)
    wide = (a.astype(np.float32) + b.astype(np.float32)) + np.float32(1e-3)
    same(y, wide.astype(numpy_type(dtype)))


def test_numbers_take_the_type_they_meet(backend: str) -> None:
    x = random(9, "float16")
    y = poisoned(9)
    apply1(x, y, f=lambda x: 2 * x - 1, backend=backend)
    same(y, 2 * x.astype(np.float32) - 1)
    z, w = random(9, "int64"), poisoned(9, "int64")
    apply1(z, w, f=lambda x: x * 3_000_000, backend=backend)
    same(w, z * 3_000_000)


@kernel
def outer(a: Tensor["M"], b: Tensor["N"], y: Tensor["M N"], *, f: Const, M: Const, N: Const):
    y[:, :] = f(a[:], b[:])


def test_broadcasting(backend: str) -> None:
    a, b = random(5, seed=1), random(3, seed=2)
    cases = (
        (lambda a, b: a[:, None] + b[None, :], a[:, None] + b),
        (lambda a, b: a[:, None] + b, a[:, None] + b),
        (lambda a, b: b * zeros((5, 3)) + 1.0, np.ones((5, 3), np.float32)),
        (lambda a, b: (b[None, :] * a[:, None]).T.T, a[:, None] * b),
        (lambda a, b: a[:, None] - full((1, 3), 2.0), np.repeat(a[:, None] - np.float32(2), 3, 1)),
        (lambda a, b: where(a[:, None] > 0.0, b, -1.0), np.where(a[:, None] > 0, b, np.float32(-1))),
    )
    for f, expected in cases:
        y = poisoned((5, 3))
        outer(a, b, y, f=f, backend=backend)
        same(y, expected)


def test_stores_broadcast(backend: str) -> None:
    a, b = random(5, seed=1), random(3, seed=2)
    cases = (
        (lambda a, b: b, np.repeat(b[None], 5, 0)),
        (lambda a, b: a[:, None], np.repeat(a[:, None], 3, 1)),
        (lambda a, b: 3, np.full((5, 3), 3, np.float32)),
        (lambda a, b: -0.0, np.full((5, 3), -0.0, np.float32)),
    )
    for f, expected in cases:
        y = poisoned((5, 3))
        outer(a, b, y, f=f, backend=backend)
        same(y, expected)


@kernel
def fill(y: Tensor["M N"], *, value: Const, kind: Const, M: Const, N: Const):
    y[:, :] = full((M, N), value, kind)


def test_full(backend: str) -> None:
    for value, kind, name in (
        (1.5, float32, "float32"),
        (7, int32, "int32"),
        (2**40, int64, "int64"),
        (200, uint8, "uint8"),
    ):
        y = poisoned((4, 3), name)
        fill(y, value=value, kind=kind, backend=backend)
        same(y, np.full((4, 3), value, numpy_type(name)))


@kernel
def scalars(x: Tensor["N"], y: Tensor["N"], z: Tensor["N"], f: float, i: int, wide: int64, flag: bool, *, N: Const):
    y[:] = x[:] * f + float(i) + where(flag, 1.0, 0.0)
    z[:] = full(N, wide + i)


def test_scalar_parameters(backend: str) -> None:
    x = random(6)
    for flag in (True, False):
        y, z = poisoned(6), poisoned(6, "int64")
        scalars(x, y, z, 0.0, 3, 2**40, flag, backend=backend)
        same(y, np.full(6, 3 + flag, np.float32))
        same(z, np.full(6, 2**40 + 3))


def test_integers_meet_floats_in_float32(backend: str) -> None:
    a, b = random(9, "float32"), random(9, "int32")
    wide = b.astype(np.float32)
    cases = [
        (lambda a, b: a + b, a + wide),
        (lambda a, b: (b * 0.5) * a, (wide * np.float32(0.5)) * a),
        (lambda a, b: where(a < b, a, b), np.where(a < wide, a, wide)),
    ]
    for f, expected in cases:
        y = poisoned(9)
        apply2(a, b, y, f=f, backend=backend)
        same(y, expected)


def test_kinds_do_not_mix() -> None:
    a, b, y = random(4, "float32"), random(4, "int32"), poisoned(4)
    with pytest.raises(errors.DTypeMismatch):
        apply2(a, b < 2, y, f=lambda a, b: a + b, backend="interpreter")
    with pytest.raises(errors.DTypeMismatch):
        apply1(b, y, f=lambda x: x, backend="interpreter")
    assert np.isnan(y).all()
