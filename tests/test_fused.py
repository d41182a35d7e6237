"""The fused multiply-add in NumPy, against fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from monotile.ir.fused import fma

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> np.float32:
    """Round a fraction to the nearest float32, ties to even."""
    near = np.float32(float(exact))
    with np.errstate(over="ignore"):
        around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    finite = [x for x in around if np.isfinite(x)]
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))


@settings(max_examples=500, deadline=None)
@given(FLOATS, FLOATS, FLOATS)
def test_any_numbers(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    found = fma(a, b, c)
    if abs(exact) < Fraction(3 * 10**38):
        assert found == rounded(exact)


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1), st.integers(-60, 60), st.integers(0, 1))
def test_halves_in_float64(a: int, b: int, exponent: int, sign: int) -> None:
    """Sums whose rounding to float64 falls on or next to the midpoint of two float32 numbers."""
    c = (1 - 2 * sign) * 2.0**exponent
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert fma(float(a), float(b), c) == rounded(exact)


def test_a_sum_that_rounding_twice_gets_wrong() -> None:
    """1 + 2^-24 is the midpoint of two float32 numbers; a little more, which float64 cannot represent, rounds up."""
    a, b, c = np.float32(2.0**-24 + 2.0**-47), np.float32(1.0), np.float32(1.0)
    assert fma(a, b, c) == np.float32(1.0 + 2.0**-23)
    tiny = np.float32(2.0**-60)
    half = np.float32(2.0**-12) * np.float32(2.0**-12)
    assert np.float32(np.float64(half) + 1.0 + np.float64(tiny)) == 1.0  # as NumPy has it
    assert fma(np.float32(2.0**-12 + 2.0**-30), np.float32(2.0**-12), np.float32(1.0)) == np.float32(1.0 + 2.0**-23)


def test_arrays_and_what_is_not_a_number() -> None:
    a = np.array([np.inf, 0.0, 1.0, np.nan], np.float32)
    b = np.array([0.0, -0.0, np.inf, 1.0], np.float32)
    c = np.array([1.0, 0.0, -np.inf, 1.0], np.float32)
    found = fma(a, b, c)
    assert found.dtype == np.float32 and found.shape == (4,)
    assert np.isnan(found[[0, 2, 3]]).all() and found[1] == 0.0
