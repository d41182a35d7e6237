"""Tiles of numbers made of packed codes by assembly.

A number that depends on nothing but the bits of a code in memory is made of the byte it lies in: four bytes to a
register, a few instructions for all of them, where Triton takes each element apart. Nibbles are looked up by `prmt`, or
become the mantissa of a bfloat16 whose exponent is known, and one fma puts them in their place.

Where a dot contracts the columns, it reads neighbours together: Triton brings the codes to the layout of its operand,
and the assembly runs there. Where it contracts the rows, codes would come there byte by byte: such assembly is said to
have effects, which it has not, so that Triton leaves it in the layout in which the codes were loaded, in vectors, and
brings the numbers to the dot by `ldmatrix`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import FP8, bfloat16, float8_e4m3fn, int8, to_numpy
from ....ir import Kernel, Op, Value, spreads, walk
from ....ir.fields import Fields, as_table
from .padding import padded

LEAST_ROWS, LEAST_COLUMNS = 32, 64  # of a tile: what was run on an H200
NIBBLE, BYTE = 4, 8
BF16_CAPABLE, FP8_CAPABLE = 80, 89  # compute capabilities that convert or multiply these types
MAGIC, MAGIC_VALUE = "0x43434343", 128.0  # 0x43 above a byte below 128 is the bfloat16 128 + byte


@dataclass(frozen=True)
class Assembly:
    """Instructions for four bytes, `$in`, and their results, `$0` and so on."""

    lines: tuple[str, ...]
    registers: str  # declarations
    pairs: bool  # a byte is two numbers, in one register; else it is one
    results: int

    def call(self, codes: str, *, pure: bool) -> str:
        text = " ".join(self.lines).replace("$in", f"${self.results}")
        outputs = ",".join(["=r"] * self.results)
        kind = "tl.int32" if self.pairs else "tl.bfloat16"
        asm = f'"{{{{ {self.registers} {text} }}}}"'.replace("{{", "{").replace("}}", "}")
        return f'tl.inline_asm_elementwise({asm}, "{outputs},r", [{codes}], dtype={kind}, is_pure={pure}, pack=4)'


HALVES = (
    'tl.inline_asm_elementwise("mov.b32 {{$0, $1}}, $2;", "=h,=h,r", [{0}], dtype=(tl.bfloat16, tl.bfloat16), '
    "is_pure=True, pack=1)"
)
WHOLE = 'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [{0}], dtype=tl.bfloat16, is_pure={1}, pack=2)'


class Unpacking(NamedTuple):
    """The codes of a tile and how its numbers are made of them."""

    load: Op
    assembly: Assembly
    pure: bool = False  # Triton may move it


@dataclass(frozen=True)
class Unpackings:
    made: Mapping[Op, Unpacking]  # by the op whose result is the tile
    replaced: frozenset[Op]  # ops that nothing else needs


NOTHING = Unpackings({}, frozenset())


def unpackings(kernel: Kernel, uses: Mapping[Value, list[Op]], threads: int, capability: int) -> Unpackings:
    """Return the bfloat16 tiles to unpack by inline assembly in a CTA of `threads` threads."""
    made = {}
    for op in walk(kernel.body) if capability >= BF16_CAPABLE else ():
        if op.kind == "cast" and op.result.dtype is bfloat16 and _is_large(op.result, threads):
            found = _unpacking(op, capability)
            if found is not None:
                made[op] = found._replace(pure=_contracts_columns(op.result, uses))
    return Unpackings(made, frozenset(_replaced(made, uses)))


def _is_large(value: Value, threads: int) -> bool:
    """Each thread has four bytes at least."""
    shape = value.shape
    if len(shape) != 2 or any(padded(side) != side for side in shape):
        return False
    return shape[0] >= LEAST_ROWS and shape[1] >= LEAST_COLUMNS and shape[0] * shape[1] >= 2 * BYTE * threads


def _contracts_columns(value: Value, uses: Mapping[Value, list[Op]]) -> bool:
    """Return True if dots contract the columns of a tile, and nothing else reads it."""
    turned = uses.get(value, [])
    return all(
        op.kind == "trans" and all(dot.kind == "dot" and dot.operands[1] is op.result for dot in uses[op.result])
        for op in turned
    )


def _unpacking(cast: Op, capability: int) -> Unpacking | None:
    load = cast.operands[0].op
    if load is not None and load.kind == "load" and not any(spreads(load)):
        if load.result.dtype is int8:
            return Unpacking(load, SIGNED_BYTES)
        if load.result.dtype in FP8:
            e4m3 = load.result.dtype is float8_e4m3fn
            return None if e4m3 and capability < FP8_CAPABLE else Unpacking(load, FLOAT_BYTES[e4m3])
    table = as_table(cast.result)
    if table is None or table.fields is None or not _lie_in_order(table.fields, cast.result.shape[1]):
        return None
    assembly = nibbles(table.numbers)
    return None if assembly is None else Unpacking(table.load, assembly)


def _lie_in_order(fields: Fields, columns: int) -> bool:
    """Return True for nibbles that fill whole elements of memory, from the first on."""
    bits = fields.load.attrs["tensor"].dtype.bits
    side = spreads(fields.load)[-1]
    whole = side is not None and side.memory * bits == columns * NIBBLE
    return whole and fields[1:] == (0, NIBBLE, NIBBLE)


def _replaced(made: Mapping[Op, Unpacking], uses: Mapping[Value, list[Op]]) -> set[Op]:
    """Return the ops that nothing but the tiles' assembly stands for."""
    gone: set[Op] = set()
    waiting = [v for op in made for v in op.operands]
    while waiting:
        op = waiting.pop().op
        if op is None or op in gone or op in made or len(op.results) != 1:
            continue
        if all(reader in gone or reader in made for reader in uses.get(op.result, ())) and not op.blocks:
            gone.add(op)
            waiting += op.operands
    return gone


# ---- assembly --------------------------------------------------------------------------------------------------------

SIGNED_BYTES = Assembly(  # 128 + the lower seven bits, less 128, or 256 where the sign is set
    (
        f"prmt.b32 a, $in, {MAGIC}, 0x4140;", f"prmt.b32 b, $in, {MAGIC}, 0x4342;",
        "and.b32 c, a, 0x43804380;", "and.b32 d, b, 0x43804380;",
        "and.b32 a, a, 0x437f437f;", "and.b32 b, b, 0x437f437f;",
        "fma.rn.bf16x2 $0, c, m, a;", "fma.rn.bf16x2 $1, d, m, b;",
    ),
    ".reg .b32 a, b, c, d, m; mov.b32 m, 0xbf80bf80;", False, 2,
)  # fmt: skip
_SINGLE = (
    *(f"cvt.f32.f16 f{n}, h{n};" for n in range(4)), "cvt.rn.bf16x2.f32 $0, f1, f0;", "cvt.rn.bf16x2.f32 $1, f3, f2;"
)  # fmt: skip
FLOAT_BYTES = {
    True: Assembly(
        (
            "mov.b32 {e0, e1}, $in;", "cvt.rn.f16x2.e4m3x2 a, e0;", "cvt.rn.f16x2.e4m3x2 b, e1;",
            "mov.b32 {h0, h1}, a;", "mov.b32 {h2, h3}, b;", *_SINGLE,
        ),
        ".reg .b32 a, b; .reg .b16 e0, e1, h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3;", False, 2,
    ),
    False: Assembly(  # a float16 is e5m2 with more zeros behind it
        (
            "prmt.b32 a, $in, 0, 0x1404;", "prmt.b32 b, $in, 0, 0x3424;",
            "mov.b32 {h0, h1}, a;", "mov.b32 {h2, h3}, b;", *_SINGLE,
        ),
        ".reg .b32 a, b; .reg .b16 h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3;", False, 2,
    ),
}  # fmt: skip


def nibbles(numbers: tuple[int, ...]) -> Assembly | None:
    """Return the assembly for the bfloat16 numbers, as bits, that 16 codes stand for."""
    return _even_steps(numbers) or _odd_table(numbers) or _table(numbers)


def _even_steps(numbers: tuple[int, ...]) -> Assembly | None:
    """Numbers in even steps are one fma of the codes, where bfloat16 has its constants."""
    values = np.array(numbers, np.uint16).view(to_numpy(bfloat16)).astype(np.float64)
    first, step = values[0], values[1] - values[0]
    constants = np.array([step, first - MAGIC_VALUE * step])
    rounded = constants.astype(to_numpy(bfloat16))
    if not np.array_equal(values, first + step * np.arange(16)) or (rounded.astype(np.float64) != constants).any():
        return None
    factor, start = (f"{int(x) << 16 | int(x):#010x}" for x in rounded.view(np.uint16))
    lines = ["shr.u32 u, $in, 4;"]
    for n in range(4):
        lines += [f"prmt.b32 t, $in, u, 0x0{n + 4}0{n};", "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"]
        lines += [f"fma.rn.bf16x2 ${n}, t, s, o;"]
    return Assembly(tuple(lines), f".reg .b32 t, u, s, o; mov.b32 s, {factor}; mov.b32 o, {start};", True, 4)


def _odd_table(numbers: tuple[int, ...]) -> Assembly | None:
    """Where code 15 - c is minus the number of code c: the sizes of the upper 8 codes, and a sign."""
    upper = numbers[8:]
    if any(x >> 15 for x in upper) or any(numbers[7 - n] != (x | 0x8000) for n, x in enumerate(upper)):
        return None
    low, high = _bytes(upper)
    lines = ["not.b32 f, $in;", "and.b32 f, f, 0x88888888;", "shr.u32 g, f, 3;", "sub.u32 f, f, g;"]
    lines += ["xor.b32 i, $in, f;", "and.b32 i, i, 0x77777777;", "mov.b32 w, $in;"]
    for n in (0, 2):
        if n:
            lines += ["shr.u32 i, i, 16;", "shr.u32 w, w, 16;"]
        lines += [f"prmt.b32 l, {low[0]}, {low[1]}, i;", f"prmt.b32 h, {high[0]}, {high[1]}, i;"]
        lines += ["prmt.b32 s, 0x40404040, 0x40404040, w;", "mad.lo.u32 h, s, 2, h;", *_joined(n)]
    return Assembly(tuple(lines), ".reg .b32 f, g, i, w, l, h, s;", True, 4)


def _table(numbers: tuple[int, ...]) -> Assembly:
    """Any numbers: both halves of the table, and a mask of the codes above 7."""
    low, high = _bytes(numbers)
    lines = ["and.b32 i, $in, 0x77777777;", "and.b32 w, $in, 0x88888888;", "shr.u32 m, w, 3;", "or.b32 w, w, m;"]
    for n in (0, 2):
        if n:
            lines += ["shr.u32 i, i, 16;", "shr.u32 w, w, 16;"]
        lines += ["prmt.b32 m, 0x00008000, 0, w;"]
        for name, parts in (("l", low), ("h", high)):
            lines += [f"prmt.b32 {name}, {parts[0]}, {parts[1]}, i;", f"prmt.b32 u, {parts[2]}, {parts[3]}, i;"]
            lines += [f"lop3.b32 {name}, m, u, {name}, 0xca;"]
        lines += _joined(n)
    return Assembly(tuple(lines), ".reg .b32 i, w, m, l, h, u;", True, 4)


def _joined(n: int) -> list[str]:
    return [f"prmt.b32 ${n}, l, h, 0x5140;", f"prmt.b32 ${n + 1}, l, h, 0x7362;"]


def _bytes(numbers: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """The lower and the upper bytes of numbers, four to a register."""

    def registers(part: Any) -> list[str]:
        return [f"{word:#010x}" for word in part.astype(np.uint8).view(np.uint32)]

    words = np.array(numbers, np.uint16)
    return registers(words & 0xFF), registers(words >> 8)
