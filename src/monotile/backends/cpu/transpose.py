"""Transpose a square of registers, and sum the lanes of its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .emit import Emitter


def transpose(e: Emitter, rows: list[str]) -> list[str]:
    """Transpose a square of float vectors; missing rows count as zero.

    Elements and then pairs of elements are interleaved inside every 128 bits, which is one instruction each; whole
    128-bit parts are exchanged last."""
    width = e.lanes
    x = rows + ["zeroinitializer"] * (width - len(rows))
    quads: list[list[str]] = []  # quads[g][c]: in each part p the elements 4p + c of rows 4g .. 4g + 3
    for g in range(0, width, 4):
        low0, high0 = _interleave(e, x[g], x[g + 1], False, 1), _interleave(e, x[g], x[g + 1], True, 1)
        low1, high1 = _interleave(e, x[g + 2], x[g + 3], False, 1), _interleave(e, x[g + 2], x[g + 3], True, 1)
        quads.append(
            [
                _interleave(e, low0, low1, False, 2),
                _interleave(e, low0, low1, True, 2),
                _interleave(e, high0, high1, False, 2),
                _interleave(e, high0, high1, True, 2),
            ]
        )
    columns = [""] * width
    for c in range(4):
        for part, column in enumerate(exchange(e, [q[c] for q in quads], 4)):
            columns[4 * part + c] = column
    return columns


def lane_sums(e: Emitter, rows: list[str]) -> str:
    """Return a vector of the sums of each row's lanes, for as many rows as lanes. Rows are added by twos in the order
    of `transpose`: inside every 128 bits first, whole 128-bit parts last. Each sum has the same order."""

    def fold(a: str, b: str, pick: Callable[[str, str, bool], str]) -> str:
        return e.op(f"fadd {e.vector_type('float')} {pick(a, b, False)}, {pick(a, b, True)}")

    for size in (1, 2):
        pick = partial(_interleave, e, size=size)
        rows = [fold(a, b, pick) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    held = e.lanes // 4  # parts that a vector has of each four rows
    while len(rows) > 1:
        pick = partial(_halves, e, held=held)
        rows = [fold(a, b, pick) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        held //= 2
    return rows[0]


def _interleave(e: Emitter, a: str, b: str, high: bool, size: int) -> str:
    """Interleave elements, or pairs of them, of the low or the high half of every 128 bits of two vectors."""
    picks = []
    for first in range(2 * high, e.lanes, 4):
        pair = [first, first + 1], [e.lanes + first, e.lanes + first + 1]
        picks += [pair[0][0], pair[1][0], pair[0][1], pair[1][1]] if size == 1 else [*pair[0], *pair[1]]
    return e.shuffle(a, b, "float", picks)


def _halves(e: Emitter, a: str, b: str, high: bool, held: int) -> str:
    """Take the first or the last half of every `held` 128-bit parts of two vectors, one vector after the other."""
    half = 2 * held
    picks = [v + g + half * high + i for v in (0, e.lanes) for g in range(0, e.lanes, 2 * half) for i in range(half)]
    return e.shuffle(a, b, "float", picks)


def exchange(e: Emitter, vectors: list[str], size: int) -> list[str]:
    """Transpose a square whose elements are parts of `size` lanes of the vectors."""
    count = len(vectors)
    vectors = list(vectors)
    half = 1
    while half < count:
        for i in range(count):
            if i & half == 0:
                vectors[i], vectors[i | half] = _swap(e, vectors[i], vectors[i | half], half, count, size)
        half *= 2
    return vectors


def _swap(e: Emitter, a: str, b: str, half: int, count: int, size: int) -> tuple[str, str]:
    def picks(odd: bool) -> list[int]:
        out = []
        for part in range(count):
            source = (part & ~half) | (half if odd else 0)
            other = size * count if part & half else 0
            out += [other + size * source + i for i in range(size)]
        return out

    return e.shuffle(a, b, "float", picks(False)), e.shuffle(a, b, "float", picks(True))
