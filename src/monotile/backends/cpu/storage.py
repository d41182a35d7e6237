"""Storage reuse: buffers that are never live together share memory."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64


@dataclass
class Interval:
    """`size` bytes that are live from time `first` to time `last`, both included."""

    size: int
    first: int
    last: int


def assign(intervals: list[Interval]) -> tuple[list[int], int]:
    """Return an offset for each interval, such that those live together do not overlap, and the total size."""
    offsets = [0] * len(intervals)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(intervals)), key=lambda n: -intervals[n].size):
        it = intervals[i]
        busy = sorted(
            (offsets[j], offsets[j] + _rounded(intervals[j].size))
            for j in placed
            if intervals[j].first <= it.last and it.first <= intervals[j].last
        )
        offset = 0
        for low, high in busy:
            if offset + _rounded(it.size) <= low:
                break
            offset = max(offset, high)
        offsets[i] = offset
        placed.append(i)
        total = max(total, offset + _rounded(it.size))
    return offsets, total


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
