"""Bit fields: integer tiles whose elements are runs of bits of a row in memory, and functions of them as tables.

Codes of a few bits that lie one after the other in bytes or words are taken apart by shifts and masks. Where each bit
comes from is followed here, column by column, so that a backend may take the fields apart its own way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..dtypes import FP8, bfloat16, float32, to_numpy
from .ops import Op, Value, constant
from .periods import known_row
from .spreads import spreads

WORD = 32
MAX_WIDTH = 8
Bits = list[int | None]  # of a number, from the lowest up: the bit of the row that it is, or None for a zero


class Fields(NamedTuple):
    """A tile whose column c is the `width` bits from `first + c * step` on of the slice's row that a load reads."""

    load: Op
    first: int
    step: int
    width: int


def bit_fields(value: Value) -> Fields | None:
    """Return the fields of a row that a tile's columns are, if they are equally far apart."""
    loads: set[Op] = set()
    rows = _bits(value, loads)
    if rows is None or len(loads) < 1 or len(rows) < 2:
        return None
    found = [[bit for bit in bits if bit is not None] for bits in rows]
    width, (load, *others) = len(found[0]), loads
    if not 1 <= width <= MAX_WIDTH or any(_place(load) != _place(other) for other in others):
        return None
    first, step = found[0][0], (found[1] or [0])[0] - found[0][0]
    for c, bits in enumerate(rows):
        start = first + c * step
        if bits[:width] != list(range(start, start + width)) or any(b is not None for b in bits[width:]):
            return None
    return Fields(load, first, step, width) if step > 0 else None


def _place(load: Op) -> tuple[object, ...]:
    """Return what two loads of one slice's rows share."""
    return load.attrs["tensor"], load.operands, load.attrs.get("view")


def _bits(value: Value, loads: set[Op]) -> list[Bits] | None:
    """Return the bits of each column of a tile; None where they are not bits of memory."""
    op = value.op
    if op is None or not value.dtype.is_int or value.dtype.bits > WORD or not value.shape:
        return None
    if op.kind == "load":
        return _loaded_bits(op, loads)
    if op.kind == "cast":
        return _bits(op.operands[0], loads)
    if op.kind in ("shr", "shl"):
        rows, counts = _bits(op.operands[0], loads), known_row(op.operands[1])
        if rows is None or counts is None or min(counts) < 0:
            return None
        counts = counts * len(rows) if len(counts) == 1 else counts
        if op.kind == "shr" and not value.dtype.is_unsigned and any(bits[-1] is not None for bits in rows):
            return None  # the sign would move in
        return [_shifted(bits, n if op.kind == "shr" else -n) for bits, n in zip(rows, counts, strict=True)]
    if op.kind == "bitand":
        rows, mask = _bits(op.operands[0], loads), constant(op.operands[1])
        if rows is None or mask is None:
            return None
        return [[bit if int(mask) >> n & 1 else None for n, bit in enumerate(bits)] for bits in rows]
    if op.kind == "bitor":
        left, right = (_bits(v, loads) for v in op.operands)
        if left is None or right is None or any(_overlap(a, b) for a, b in zip(left, right, strict=True)):
            return None
        return [[b if a is None else a for a, b in zip(x, y, strict=True)] for x, y in zip(left, right, strict=True)]
    return None


def _loaded_bits(load: Op, loads: set[Op]) -> list[Bits] | None:
    """Return the bits of a load of unsigned numbers, contiguous in the tensor's last dimension."""
    tensor, side = load.attrs["tensor"], spreads(load)[-1]
    last = tensor.rank - 1
    if not tensor.dtype.is_unsigned or tensor.unit != last or load.attrs["extents"][last] is None:
        return None
    if load.attrs["checked"][last] or last in load.attrs.get("view", ()):
        return None
    loads.add(load)
    size, zeros = tensor.dtype.bits, [None] * (WORD - tensor.dtype.bits)
    places = (c if side is None else side.at(c) for c in range(load.result.shape[-1]))
    return [[*range(size * at, size * (at + 1)), *zeros] for at in places]


def _shifted(bits: Bits, count: int) -> Bits:
    """Shift to the right; to the left by a negative count."""
    return [bits[n + count] if 0 <= n + count < WORD else None for n in range(WORD)]


def _overlap(a: Bits, b: Bits) -> bool:
    return any(x is not None and y is not None for x, y in zip(a, b, strict=True))


class Table(NamedTuple):
    """A tile of bfloat16 numbers that is a function of codes: the load of the codes, the fields that they are (None if
    each has a byte of its own), and the bits of the number for each code."""

    load: Op
    fields: Fields | None
    numbers: tuple[int, ...]


def as_table(value: Value) -> Table | None:
    """Return a tile of bfloat16, or of float32 that holds such numbers, as a function of bit fields or of the bytes of
    an fp8 tensor."""
    if value.dtype not in (bfloat16, float32):
        return None
    chain: list[Op] = []
    while (op := value.op) is not None:
        if op.kind == "load" and value.dtype in FP8 and "spread" not in op.attrs:
            return _table(op, None, chain, np.arange(256, dtype=np.uint8).view(to_numpy(value.dtype)))
        fields = bit_fields(value)
        if fields is not None:
            return _table(fields.load, fields, chain, np.arange(2**fields.width))
        moved = op.kind in ("sub", "add") and value.dtype.is_int and constant(op.operands[1]) is not None
        if not moved and op.kind not in ("cast", "lookup"):
            return None
        chain.append(op)
        value = op.operands[0]
    return None


def _table(load: Op, fields: Fields | None, chain: list[Op], x: Any) -> Table | None:
    """Apply ops, the last one first, to all codes; None if bfloat16 does not have the numbers."""
    for op in reversed(chain):
        if op.kind == "lookup":
            table = np.asarray(op.attrs["table"], to_numpy(op.result.dtype))
            inside = (x >= 0) & (x < len(table))
            x = np.where(inside, table[np.where(inside, x, 0)], table.dtype.type(0))
        elif op.kind == "cast":
            x = x.astype(to_numpy(op.result.dtype))
        else:
            x = x + (1 if op.kind == "add" else -1) * int(constant(op.operands[1]) or 0)
    numbers = x.astype(to_numpy(bfloat16))
    if not np.array_equal(numbers.astype(np.float32), x.astype(np.float32), equal_nan=True):
        return None
    return Table(load, fields, tuple(numbers.view(np.uint16).tolist()))
