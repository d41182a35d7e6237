"""Transposing a square of registers."""

from __future__ import annotations

from .emit import Emitter


def transpose(e: Emitter, rows: list[str]) -> list[str]:
    """Vectors of floats become the columns of the square they form; missing rows count as zero.

    Inside every 128 bits pairs of elements and then pairs of pairs are interleaved, which is one instruction each;
    whole 128-bit parts are exchanged last."""
    width = e.lanes
    x = rows + ["zeroinitializer"] * (width - len(rows))
    parts = width // 4

    def interleave(a: str, b: str, high: bool, size: int) -> str:
        picks = []
        for part in range(parts):
            base = 4 * part
            if size == 1:
                first = base + (2 if high else 0)
                picks += [first, width + first, first + 1, width + first + 1]
            else:
                first = base + (2 if high else 0)
                picks += [first, first + 1, width + first, width + first + 1]
        return e.shuffle(a, b, "float", picks)

    quads: list[list[str]] = []  # quads[g][c]: in each part p the elements 4p + c of rows 4g .. 4g + 3
    for g in range(0, width, 4):
        low0, high0 = interleave(x[g], x[g + 1], False, 1), interleave(x[g], x[g + 1], True, 1)
        low1, high1 = interleave(x[g + 2], x[g + 3], False, 1), interleave(x[g + 2], x[g + 3], True, 1)
        quads.append(
            [
                interleave(low0, low1, False, 2),
                interleave(low0, low1, True, 2),
                interleave(high0, high1, False, 2),
                interleave(high0, high1, True, 2),
            ]
        )
    columns = [""] * width
    for c in range(4):
        for part, column in enumerate(exchange(e, [q[c] for q in quads], 4)):
            columns[4 * part + c] = column
    return columns


def exchange(e: Emitter, vectors: list[str], size: int) -> list[str]:
    """Transposes a square whose elements are parts of `size` lanes of the vectors."""
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
