"""List every row of the benchmark and select those of a run."""

from __future__ import annotations

from . import attention, caches, extend, gradients, rows
from .rows import Row

ROWS: tuple[Row, ...] = (*rows.ROWS, *attention.ROWS, *extend.ROWS, *gradients.ROWS, *caches.ROWS)


def matches(name: str, only: str) -> bool:
    """Match each word of the filter with the beginning of some word of the name: `float16` does not match bfloat16."""
    words = name.lower().split()
    return all(any(word.startswith(wanted) for word in words) for wanted in only.lower().split())


def select(threads: int, only: str, quick: bool) -> list[Row]:
    """Return the rows that the filter matches; without a filter all of them, or the quick ones."""
    rows = [row for row in ROWS if threads == 1 or row.multithreaded]
    return [row for row in rows if (matches(row.name, only) if only else row.quick or not quick)]
