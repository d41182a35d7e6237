# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""astype between every pair of types, and the roundings at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import DTYPES, FLOATS, INTS, Array, bfloat16, numpy_type, poisoned, random, same
from monotile.dtypes import BY_NAME
from monotile.language import Const, Tensor, arange, cdiv, float32, int32, kernel, program_id


@kernel
def cast(x: Tensor["N"], y: Tensor["N"], *, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows].astype(y.dtype)


@kernel
def through(x: Tensor["N"], y: Tensor["N"], *, first: Const, second: Const, B: Const = 16):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows].astype(first).astype(second).astype(y.dtype)


@kernel
def shorthand(x: Tensor["N"], a: Tensor["N"], b: Tensor["N"], c: Tensor["N"], *, N: Const):
    a[:] = float(x[:])
    b[:] = int(x[:])
    c[:] = bool(x[:])


def run(backend: str, x: Array, dtype: str) -> Array:
    y = poisoned(x.shape, dtype)
    cast(x, y, backend=backend)
    return y


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_small_whole_numbers_cast_exactly(backend: str, source: str, target: str) -> None:
    """Values that both types represent (0 and 1 for bool) are unchanged by a cast."""
    numbers = np.arange(2 if "bool" in (source, target) else 100)
    x = np.tile(numbers, 2)[:150].astype(numpy_type(source))
    same(run(backend, x, target), x.astype(numpy_type(target)))


@pytest.mark.parametrize("source", ["float32", "int32", "float16"])
def test_cast_to_bool_is_not_zero(backend: str, source: str) -> None:
    x = random(19, source)
    x[::4] = 0
    same(run(backend, x, "bool"), x != 0)


def test_nan_is_true(backend: str) -> None:
    x = np.array([np.nan, 0.0, -0.0, 1e-45, np.inf], np.float32)
    same(run(backend, x, "bool"), np.array([True, False, False, True, True]))


def float32_edges() -> Array:
    """Halfway cases, the largest and smallest numbers of the narrow types and their neighbours, and random bits."""
    bits = np.arange(0, 2**16, 7, dtype=np.uint32) << 16
    halves = np.concatenate([bits, bits | 0x8000, bits | 0x7FFF, bits | 0x8001])
    f16 = np.array([65504, 65519.996, 65520, 65536, 5.9604645e-08, 2.9802322e-08, 2.98023242e-08, 6.1e-5], np.float32)
    specials = np.array([0.0, np.inf, np.nan, 3.4028235e38, 3.3895314e38, 3.3961776e38, 1e-45], np.float32)
    noise = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32)
    edges = np.concatenate([halves.view(np.float32), f16, -f16, specials, -specials, noise.view(np.float32)])
    near = 1 + np.arange(4096, dtype=np.float32) / 8192  # ties of both narrow types
    return np.concatenate([edges, near.astype(np.float32)])


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_narrowing_rounds_to_nearest_even(backend: str, target: str) -> None:
    x = float32_edges()
    y = poisoned(x.shape, target)
    cast(x, y, B=256, backend=backend)
    with np.errstate(all="ignore"):
        same_numbers(y, x.astype(numpy_type(target)))


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_widening_is_exact(backend: str, source: str) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(numpy_type(source))
    y = poisoned(x.shape)
    cast(x, y, B=512, backend=backend)
    same_numbers(y, x.astype(np.float32))


def same_numbers(found: Array, expected: Array) -> None:
    """Compare, ignoring the payload and sign of NaNs, which are unspecified."""
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(found[real].view(np.uint32), expected[real].view(np.uint32))


@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", FLOATS)
def test_float_to_int_truncates_and_saturates(backend: str, source: str, target: str) -> None:
    numbers = [0.0, -0.0, 0.99, -0.99, 1.5, -1.5, 2.5, 126.9, 127.0, 128.0, -128.0, -128.9, -129.0, 255.0, 255.9, 256.0]
    large = [2.0**30, 2.0**31, -(2.0**31), 2.0**32, 2.0**62, 2.0**63, -(2.0**63), 1e30, -1e30, np.inf, -np.inf, np.nan]
    with np.errstate(over="ignore"):
        x = np.array(numbers + large, np.float32).astype(numpy_type(source))
    limits = np.iinfo(target)
    expected = [
        0 if np.isnan(v) else limits.max if v == np.inf else limits.min if v == -np.inf else int(v)
        for v in map(float, x)
    ]
    clipped = [min(max(v, int(limits.min)), int(limits.max)) for v in expected]
    same(run(backend, x, target), np.array(clipped, target))


@pytest.mark.parametrize("target", INTS)
@pytest.mark.parametrize("source", INTS)
def test_int_to_int_keeps_the_low_bits(backend: str, source: str, target: str) -> None:
    limits = np.iinfo(source)
    x = np.concatenate([random(40, source), np.array([limits.min, limits.max, limits.max // 2 + 1], source)])
    same(run(backend, x, target), x.astype(target))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", INTS)
def test_int_to_float_rounds(backend: str, source: str, target: str) -> None:
    """To float32 correctly rounded; to a narrow float through float32."""
    limits = np.iinfo(source)
    spread = np.random.default_rng(1).integers(limits.min, limits.max, 200, dtype=source, endpoint=True)
    x = np.concatenate([spread, np.array([limits.min, limits.max], source)])
    with np.errstate(over="ignore"):
        same(run(backend, x, target), x.astype(np.float32).astype(numpy_type(target)))


def test_bool_to_number(backend: str) -> None:
    x = random(12, "bool")
    for target in (*FLOATS, *INTS):
        same(run(backend, x, target), x.astype(numpy_type(target)))


def test_a_cast_in_the_middle_really_rounds(backend: str) -> None:
    x, y = random(100), poisoned(100)
    through(x, y, first=BY_NAME["bfloat16"], second=float32, backend=backend)
    same(y, x.astype(bfloat16).astype(np.float32))
    z = poisoned(100, "float32")
    through(x * 1000, z, first=int32, second=BY_NAME["int8"], backend=backend)
    same(z, (x * 1000).astype(np.int32).astype(np.int8).astype(np.float32))


def test_python_types_as_casts(backend: str) -> None:
    x = np.array([-2.7, 0.0, 3.9], np.float32)
    a, b, c = poisoned(3), poisoned(3, "int32"), poisoned(3, "bool")
    shorthand(x, a, b, c, backend=backend)
    same(a, x)
    same(b, np.array([-2, 0, 3], np.int32))
    same(c, np.array([True, False, True]))
