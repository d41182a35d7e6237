"""The assembly that makes numbers of packed codes, run in Python: every code, at every place of a register."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from monotile.backends.nvidia.triton import unpacking
from monotile.library import aura, formats

Registers = dict[str, int]
BYTES = np.arange(256, dtype=np.uint8)


def prmt(a: int, b: int, selector: int) -> int:
    source = [(b << 32 | a) >> 8 * n & 0xFF for n in range(8)]
    chosen = [(source[s & 7], s & 8) for s in (selector >> 4 * n & 15 for n in range(4))]
    return sum((0xFF * (byte >> 7) if sign else byte) << 8 * n for n, (byte, sign) in enumerate(chosen))


def fma_bf16(a: int, b: int, c: int) -> int:
    found = 0
    for shift in (0, 16):
        x, y, z = (bf16(np.array([v >> shift & 0xFFFF])).astype(np.float64)[0] for v in (a, b, c))
        found |= int(np.array([x * y + z]).astype(ml_dtypes.bfloat16).view(np.uint16)[0]) << shift
    return found


def bf16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


OPS = {
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma_bf16,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
    "sub.u32": lambda a, b: a - b & 0xFFFFFFFF,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "lop3.b32": lambda a, b, c, table: {0xCA: (a & b) | (~a & c), 0xEA: (a & b) | c}[table],
    "mov.b32": lambda a: a,
}


def run(assembly: unpacking.Assembly, word: int) -> list[int]:
    """Return the 16-bit numbers that four bytes become."""
    held: Registers = {"$in": word}
    text = re.sub(r"\.reg[^;]*;", "", assembly.registers) + " ".join(assembly.lines)
    for line in filter(None, map(str.strip, text.split(";"))):
        name, operands = line.split(" ", 1)
        target, *sources = [s.strip() for s in operands.split(",")]
        held[target] = OPS[name](*(held[s] if s in held else int(s, 0) for s in sources))
    return [held[f"${n}"] >> shift & 0xFFFF for n in range(assembly.results) for shift in (0, 16)]


def check(assembly: unpacking.Assembly, wanted: np.ndarray) -> None:
    """`wanted`: the numbers of each byte."""
    for place in range(4):
        found = [run(assembly, int(byte) << 8 * place | 0x5A5A5A5A & ~(0xFF << 8 * place)) for byte in BYTES]
        count = len(found[0]) // 4
        np.testing.assert_array_equal(bf16(np.array(found))[:, place * count : (place + 1) * count], wanted)


def nibbles_of(numbers: np.ndarray) -> np.ndarray:
    return np.stack([numbers[BYTES & 15], numbers[BYTES >> 4]], axis=1)


def test_signed_bytes() -> None:
    check(unpacking.SIGNED_BYTES, BYTES.view(np.int8)[:, None].astype(ml_dtypes.bfloat16))


TABLES = {
    "steps": np.arange(16) - 8.0,
    "steps of a half": np.arange(16) / 2,
    "odd": np.array(aura.levels(128, 4)),
    "any": np.concatenate([np.array(aura.levels(64, 4))[3:], [-1.0, 7.0, 0.5]]),
}


@pytest.mark.parametrize("name", TABLES)
def test_nibbles(name: str) -> None:
    numbers = TABLES[name].astype(ml_dtypes.bfloat16)
    assembly = unpacking.nibbles(tuple(numbers.view(np.uint16).tolist()))
    assert ("fma" in assembly.lines[3], "mad" in " ".join(assembly.lines)) == (name[0] == "s", name == "odd")
    check(assembly, nibbles_of(numbers))


def test_levels_are_odd_numbers_of_bfloat16() -> None:
    """What the assembly of aura's levels relies on."""
    for size in (64, 80, 128, 256):
        levels = np.array(formats.codec("aura4", size, size).levels)
        assert (levels == -levels[::-1]).all() and (levels.astype(ml_dtypes.bfloat16) == levels).all()
