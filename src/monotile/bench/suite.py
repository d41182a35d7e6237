"""Every row of the benchmark, and which of them a run asks for."""

from __future__ import annotations

from . import attention, rows
from .rows import Row

ROWS: tuple[Row, ...] = (*rows.ROWS, *attention.ROWS)


def matches(name: str, only: str) -> bool:
    """Whether each word of the filter begins a word of the name: `float16` does not find bfloat16."""
    words = name.lower().split()
    return all(any(word.startswith(wanted) for word in words) for wanted in only.lower().split())


def select(threads: int, only: str, quick: bool) -> list[Row]:
    """A quick run takes a small choice of rows, unless a filter names others."""
    able = [row for row in ROWS if threads == 1 or row.every_processor]
    return [row for row in able if (matches(row.name, only) if only else row.quick or not quick)]
