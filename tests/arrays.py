"""Arrays for tests: random inputs, poisoned outputs, and exact comparison."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int32", "int64", "uint32", "int8", "uint8")
DTYPES = (*FLOATS, *INTS, "bool")


def numpy_type(name: str) -> np.dtype[Any]:
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def random(shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    """Values a mistake would show in: of both signs where the type has them, and without a pattern."""
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        return rng.standard_normal(shape).astype(np.float32).astype(numpy_type(dtype))
    if dtype == "bool":
        return rng.random(shape) < 0.5
    limits = np.iinfo(dtype)
    return rng.integers(max(limits.min, -1000), min(limits.max, 1000), shape, endpoint=True).astype(dtype)


def poisoned(shape: int | tuple[int, ...], dtype: str = "float32") -> Array:
    """An output before the call: what stays in it was not written."""
    kind = numpy_type(dtype)
    return np.full(shape, poison(dtype), kind)


def poison(dtype: str) -> Any:
    return np.nan if dtype in FLOATS else True if dtype == "bool" else 77


def same(found: Array, expected: Array) -> None:
    """Equal in type, shape and every element; NaN is NaN, and zeros have the same sign."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype in (np.dtype(np.float16), bfloat16):
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found)[found == 0], np.signbit(expected)[found == 0])


def within_ulps(found: Array, exact: Array, ulps: int = 4) -> None:
    """float32 results within so many units in the last place of float64 ones, specials included."""
    rounded = exact.astype(np.float32)
    special = ~np.isfinite(rounded)
    np.testing.assert_array_equal(found[special], rounded[special])
    step = np.spacing(np.abs(rounded[~special])).astype(np.float64)
    error = np.abs(found[~special].astype(np.float64) - exact[~special]) / step
    assert error.max(initial=0.0) <= ulps, f"{error.max()} ulp"
