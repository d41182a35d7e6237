# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Shifts and bit operations on integers, unsigned integers, fp8 and lookup tables, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import Array, poisoned, same
from monotile.dtypes import BY_NAME, FP8, to_numpy
from monotile.errors import BadIndex
from monotile.language import (
    Const,
    Tensor,
    arange,
    cdiv,
    dot,
    float32,
    int64,
    kernel,
    maximum,
    minimum,
    program_id,
    where,
)

ROWS = 16


@kernel
def bit_operations(x: Tensor["N"], n: Tensor["N"], y: Tensor["K N"], *, B: Const = 32):
    cols = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    a, s = x[cols], n[cols]
    y[0, cols] = a & s
    y[1, cols] = a | s
    y[2, cols] = a ^ s
    y[3, cols] = ~a
    y[4, cols] = a << s
    y[5, cols] = a >> s
    y[6, cols] = (a << 3) ^ (a >> 7)
    y[7, cols] = a // s
    y[8, cols] = a % s
    y[9, cols] = maximum(a, s) - minimum(a, s)
    y[10, cols] = where(a < s, a * s, a - s)
    y[11, cols] = (a.astype(float32) * 3.0).astype(y.dtype)
    y[12, cols] = a.astype(int64).astype(y.dtype)
    y[13, cols] = abs(a) + (a >> 8).sum() + a.max()
    y[14, cols] = -a
    y[15, cols] = where((a < 0) ^ (s > 3), a, a.min())


def shifted(x: Array, n: Array, dtype: str) -> tuple[Array, Array]:
    """Both shifts by Python's integers: a count out of range moves every bit out."""
    info = np.iinfo(dtype)
    left, right = [], []
    for a, count in zip(x.tolist(), n.tolist(), strict=True):
        inside = 0 <= count < info.bits
        left.append((a << count) % 2**info.bits if inside else 0)
        right.append(a >> count if inside else -(a < 0))
    wrapped = np.array(left, np.uint64).astype(np.int64 if info.bits == 64 else np.uint32).astype(dtype)
    return wrapped, np.array(right, object).astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_bit_operations(backend: str, dtype: str) -> None:
    rng, info = np.random.default_rng(3), np.iinfo(dtype)
    x = rng.integers(info.min, info.max, 70, dtype=dtype, endpoint=True)
    n = rng.integers(-5 if info.min else 0, 70, 70).astype(dtype)
    n[:5], n[5:10], x[:7] = info.max, 0, info.min
    found, wanted = poisoned((ROWS, 70), dtype), poisoned((ROWS, 70), dtype)
    bit_operations(x, n, found, backend=backend)
    bit_operations(x, n, wanted, backend="interpreter")
    same(found, wanted)
    left, right = shifted(x, n, dtype)
    for row, expected in ((0, x & n), (1, x | n), (2, x ^ n), (3, ~x), (4, left), (5, right)):
        same(found[row], expected)


@kernel
def to_fp8(x: Tensor["N"], y: Tensor["N"], *, B: Const = 64):
    cols = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[cols] = x[cols].astype(y.dtype)


@kernel
def through_fp8(x: Tensor["N"], y: Tensor["N"], *, T: Const, B: Const = 64):
    cols = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[cols] = x[cols].astype(T).astype(float32)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_fp8_number_and_every_rounding(backend: str, dtype) -> None:  # type: ignore[no-untyped-def]
    """ml_dtypes says what a number rounds to: ties to even, and beyond the greatest NaN (e4m3fn) or infinity (e5m2)."""
    codes = np.arange(256, dtype=np.uint8).view(to_numpy(dtype))
    wide = np.zeros(256, np.float32)
    to_fp8(codes, wide, backend=backend)
    same(wide, codes.astype(np.float32))
    numbers = np.sort(wide[np.isfinite(wide)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    ends = np.float32([np.inf, -np.inf, np.nan, 1e30, -464.0, 465.0, 61439.0, 61440.0, 1e-45, -1e-40, -0.0])
    above, below = (np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf))
    x = np.concatenate([wide, middles, above, below, ends]).astype(np.float32)
    narrow, back = np.zeros(x.size, to_numpy(dtype)), np.zeros(x.size, np.float32)
    to_fp8(x, narrow, backend=backend)
    through_fp8(x, back, T=dtype, backend=backend)
    wanted = x.astype(to_numpy(dtype)).astype(np.float32)
    for found in (narrow.astype(np.float32), back):
        same(found, wanted)
        numbers = ~np.isnan(wanted)
        same(np.signbit(found)[numbers], np.signbit(wanted)[numbers])


@kernel
def fp8_products(a: Tensor["M K"], b: Tensor["K N"], y: Tensor["M N"], *, M: Const, K: Const, N: Const):
    y[:, :] = dot(a[:, :], b[:, :])


@pytest.mark.parametrize("other", ["float8_e5m2", "bfloat16"])
def test_dot_of_fp8(backend: str, other: str) -> None:
    rng = np.random.default_rng(5)
    a = rng.integers(-8, 8, (16, 32)).astype(to_numpy(BY_NAME["float8_e4m3fn"]))
    b = rng.integers(-4, 4, (32, 16)).astype(to_numpy(BY_NAME[other]))
    y = np.zeros((16, 16), np.float32)
    fp8_products(a, b, y, backend=backend)
    same(y, a.astype(np.float32) @ b.astype(np.float32))


LEVELS = (-1.5, -0.25, 0.5, 2.0)
TENS = tuple(range(0, 1000, 10))


@kernel
def looked_up(words: Tensor["N"], y: Tensor["N C"], *, B: Const = 16, C: Const = 16):
    """Sixteen codes of two bits in each word."""
    rows = program_id(cdiv(words.shape[0], B)) * B + arange(B)
    codes = words[rows][:, None] >> (arange(C) * 2)[None, :] & 3
    y[rows, arange(C)] = LEVELS[codes]


@kernel
def tens(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = TENS[x[rows]]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_outside_a_table_give_zero(backend: str, dtype: str) -> None:
    x = np.array([-1, 0, 1, 57, 99, 100, 128, 1 << 20, -(2**31), 2**31 - 1, 33], dtype)
    if dtype == "int64":
        x[2:4] = 2**32 + 1, -(2**40)
    y = np.zeros(x.size, np.int32)
    tens(x, y, backend=backend)
    same(y, np.where((x >= 0) & (x < 100), x * 10, 0).astype(np.int32))


def test_table_of_codes_in_words(backend: str) -> None:
    words = np.random.default_rng(6).integers(0, 2**32, 21, dtype=np.uint32)
    y = np.zeros((21, 16), np.float32)
    looked_up(words, y, backend=backend)
    same(y, np.float32(LEVELS)[(words[:, None] >> (np.arange(16, dtype=np.uint32) * 2)) & 3])


STEPS = np.array([0.5, -2.0, 8.0, 1e-3], np.float32)
STEPS.setflags(write=False)


@kernel
def stepped(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = STEPS[x[rows]] * STEPS[2]


def test_a_read_only_array_is_a_table(backend: str) -> None:
    x = np.array([3, 0, 1, 2, 4, -1, 2], np.int32)
    y = np.zeros(x.size, np.float32)
    stepped(x, y, backend=backend)
    same(y, np.where((x >= 0) & (x < 4), STEPS[x % 4], np.float32(0)) * np.float32(8))


def test_another_array_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros(3, np.int32), np.zeros(3, np.float32)
    stepped(x, y)
    assert (y == 4).all()
    other = STEPS * 2
    with pytest.raises(BadIndex, match=r"setflags\(write=False\)"):  # which could change behind the compiled kernel
        monkeypatch.setitem(globals(), "STEPS", other)
        stepped(x, y)
    seen = other[:]
    seen.setflags(write=False)
    with pytest.raises(BadIndex, match=r"setflags\(write=False\)"):
        monkeypatch.setitem(globals(), "STEPS", seen)
        stepped(x, y)
    other.setflags(write=False)
    stepped(x, y)
    assert (y == 16).all()
