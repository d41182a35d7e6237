"""Codes of a few bits that share a word: taken apart by shifts and masks, on loads that repeat elements of memory."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import poisoned
from monotile import ir
from monotile.dtypes import to_numpy
from monotile.ir.fields import as_table, bit_fields
from monotile.language import (
    Const,
    Tensor,
    arange,
    bfloat16,
    cdiv,
    dot,
    float8_e4m3fn,
    int32,
    kernel,
    program_id,
    where,
)
from monotile.library import aura
from monotile.passes import pipeline
from monotile.passes.spread import spread

LEVELS = tuple(np.linspace(-2, 2, 8).tolist())


@kernel
def unpack(
    words: Tensor["N W"], scales: Tensor["N G"], y: Tensor["N C"], z: Tensor["N C"],
    *, bits: Const, W: Const, G: Const, C: Const, B: Const = 8,
):  # fmt: skip
    """y is the codes, z the scale that the group of each shares, where it is not 0."""
    rows, columns = program_id(cdiv(words.shape[0], B)) * B + arange(B), arange(C)
    first = columns * bits
    shift = (first % 32)[None, :]
    found = words[rows[:, None], (first // 32)[None, :]] >> shift
    if 32 % bits:
        found = found | (words[rows[:, None], ((first + bits - 1) // 32)[None, :]] << (32 - shift))
    found = found & (2**bits - 1)
    y[rows, columns] = found.astype(int32)
    z[rows, columns] = where(found != 0, scales[rows[:, None], (columns // (C // G))[None, :]], 0.0)


@pytest.mark.parametrize(("bits", "C"), [(2, 48), (3, 80), (4, 33), (6, 32), (8, 40)])
def test_codes_are_taken_apart(backend: str, bits: int, C: int) -> None:
    rng, groups = np.random.default_rng(bits), 1 if C % 2 else C // 4
    codes, scales = rng.integers(0, 2**bits, (11, C)).astype(np.uint8), rng.random((11, groups)).astype(np.float32)
    words = aura.pack(codes, bits)
    y, z = np.full((11, C), -1, np.int32), poisoned((11, C))
    unpack(words, scales, y, z, bits=bits, C=C, backend=backend)
    assert np.array_equal(y, codes) and np.array_equal(z, np.repeat(scales, C // groups, axis=1) * (codes > 0))


def test_other_vector_units() -> None:
    """8 and 4 lanes, of which 3 bits each begin anywhere in a word."""
    codes = np.random.default_rng(0).integers(0, 8, (5, 96)).astype(np.uint8)
    y, z = np.zeros((5, 96), np.int32), np.zeros((5, 96), np.float32)
    for unit in ("avx2", "baseline"):
        unpack(aura.pack(codes, 3), np.ones((5, 48), np.float32), y, z, bits=3, C=96, backend=f"cpu:{unit}")
        assert np.array_equal(y, codes) and np.array_equal(z, codes > 0)


@kernel
def numbers(words: Tensor["N W"], y: Tensor["N C"], *, levels: Const, W: Const, C: Const):
    columns = arange(C)
    first = columns * 3
    shift = (first % 32)[None, :]
    found = words[arange(4)[:, None], (first // 32)[None, :]] >> shift
    found = found | (words[arange(4)[:, None], ((first + 2) // 32)[None, :]] << (32 - shift))
    y[arange(4), columns] = levels[(found & 7).astype(int32)].astype(bfloat16)


def test_bits_are_followed_to_memory() -> None:
    """No gather is left, a code is a run of bits of its row, and the number is a table of it."""
    y = np.zeros((4, 64), to_numpy(bfloat16))
    made = numbers.ir(np.zeros((4, 6), np.uint32), y, levels=LEVELS, C=64)
    pipeline.run(made, pipeline.PipelineOptions(early=(spread,)))
    ops = list(ir.walk(made.body))
    assert not [op for op in ops if op.kind == "gather"] and sum("spread" in op.attrs for op in ops) == 2
    fields = [found for op in ops if op.kind == "bitand" and (found := bit_fields(op.result)) is not None]
    assert [(f.first, f.step, f.width) for f in fields] == [(0, 3, 3)]
    table = next(as_table(op.result) for op in ops if op.kind == "cast" and op.result.dtype is bfloat16)
    assert table is not None and len(table.numbers) == 8 and table.numbers[7] == 0x4000


def numbers_of(codes, rows, columns, levels, bits):
    """The numbers that codes in words stand for; fp8 numbers if there are no bits."""
    if bits == 0:
        return codes[rows, columns]
    first = columns * bits
    shift = (first % 32)[None, :]
    found = codes[rows[:, None], (first // 32)[None, :]] >> shift
    if 32 % bits:
        found = found | (codes[rows[:, None], ((first + bits - 1) // 32)[None, :]] << (32 - shift))
    return levels[(found & (2**bits - 1)).astype(int32)]


@kernel
def coded_dots(
    a: Tensor["R N"], codes: Tensor["N W"], keys: Tensor["R N"], values: Tensor["R C"],
    *, levels: Const, bits: Const, N: Const, R: Const, W: Const, C: Const, dtype: Const,
):  # fmt: skip
    """Rows times the transpose of a tile of codes, and other rows times the tile itself."""
    rows, columns = arange(N), arange(C)
    first = numbers_of(codes, rows, columns, levels, bits)
    second = numbers_of(codes, rows, columns, levels, bits)
    keys[arange(R), rows] = dot(a[arange(R), columns].astype(dtype), first.astype(dtype).T)
    values[arange(R), columns] = dot(a[arange(R), rows].astype(dtype), second.astype(dtype))


STREAMED = [(4, 1, 128), (4, 2, 64), (4, 4, 128), (4, 8, 72), (4, 4, 40), (2, 4, 64), (3, 4, 64), (3, 1, 128),
            (6, 4, 64), (8, 4, 64), (0, 1, 64),
            (0, 4, 128), (0, 3, 72), (0, 4, 40)]  # fmt: skip


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("bits", "R", "C"), STREAMED)
def test_dots_stream_codes(backend: str, bits: int, R: int, C: int, rounded: bool) -> None:
    """Of tables and of fp8 (no bits), several vectors at a time where a register holds them. Sums are exact. Levels
    that bfloat16 does not have are rounded to it."""
    rng, N, dtype = np.random.default_rng(bits + R), 128, bfloat16
    levels = np.arange(2**bits) * (1 + rounded / 512) - 7
    if bits == 0:
        codes = rng.integers(0, 128, (N, C)).astype(np.uint8)
        codes[codes == 0x7F] = 0
        codes = codes.view(to_numpy(float8_e4m3fn))
        numbers = codes.astype(np.float64)
    else:
        drawn = rng.integers(0, 2**bits, (N, C)).astype(np.uint8)
        codes, numbers = aura.pack(drawn, bits), levels.astype(to_numpy(dtype)).astype(np.float64)[drawn]
    a = rng.integers(-4, 5, (R, N)).astype(np.float32)
    keys, values = poisoned((R, N)), poisoned((R, C))
    coded_dots(
        a, codes, keys, values, levels=tuple(levels.tolist()), bits=bits, N=N, R=R, C=C, dtype=dtype, backend=backend
    )
    assert np.array_equal(keys, a[:, :C] @ numbers.T) and np.array_equal(values, a @ numbers)


def test_a_streamed_nan_stays_one() -> None:
    codes = np.zeros((128, 64), np.uint8)
    codes[3, 9], codes[5, 20], codes[7, 33] = 0x7F, 0xFF, 0xFE
    a, keys, values = np.ones((4, 128), np.float32), poisoned((4, 128)), poisoned((4, 64))
    coded_dots(
        a, codes.view(to_numpy(float8_e4m3fn)), keys, values, levels=(), bits=0, N=128, R=4, C=64, dtype=bfloat16,
        backend="cpu",
    )  # fmt: skip
    assert np.array_equal(np.flatnonzero(np.isnan(keys[0])), [3, 5]) and keys[0, 7] == -448.0
    assert np.array_equal(np.flatnonzero(np.isnan(values[0])), [9, 20]) and values[0, 33] == -448.0
