"""Choices: block sizes and schedules of the library's kernels on one backend. They decide how fast a call is, never
what it computes, but for rounding.

A row's result depends on the block of keys (`BK`) and on where splits begin, so these follow from the head size, the
number of keys and the device alone, never from how many rows or threads there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dtypes import DType, bool_

KEYS_PER_SPLIT = 512  # measured on CPUs: outweighs a part's output, small enough to share among cores
ROW_BLOCKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class AttentionProblem:
    """The facts of a call that block sizes and schedules are chosen by."""

    device: str  # "cpu", "cuda:0", "mps", or an architecture such as "sm_90"
    dtype: DType
    batch: int
    query_heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int  # the larger of D and Dv
    causal: str | None = None
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    mask: DType | None = None
    mask_mod: bool = False

    @property
    def rows(self) -> int:
        """Query rows that read one KV head."""
        return self.query_heads // max(1, self.kv_heads) * self.queries

    @property
    def has_positions(self) -> bool:
        """True if causality or a window hides keys by position."""
        return any(option is not None for option in (self.causal, self.left, self.right))

    @property
    def has_additive_mask(self) -> bool:
        return self.mask is not None and self.mask is not bool_

    @property
    def zeroes_values(self) -> bool:
        """True if a block may hold keys that no row sees, whose values are zeroed in a copy of the tile."""
        hidden_at_the_start = self.left is not None or self.causal == "upper_left"
        return hidden_at_the_start or self.mask is not None or self.mask_mod


@dataclass(frozen=True)
class Choice:
    """Block sizes by the name of the kernel's constant, the backend's schedule (None: its own rule), and why."""

    blocks: Mapping[str, int | None]
    schedule: Any = None
    why: str = field(default="", compare=False)


class Choices:
    """The interface, with the answers of a backend that has no preference."""

    def forward(self, problem: AttentionProblem) -> Choice:
        """BQ and BK of the attention kernel."""
        rows = next((rows for rows in (32, 64, 128) if problem.queries <= rows), 128)
        return Choice({"BQ": rows, "BK": 64 if problem.head_size > 256 else 128})

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """True if the block map of a mask shall tell COVERED blocks from PARTIAL ones."""
        return False

    def decode(self, problem: AttentionProblem, per_split: int) -> Choice:
        """BR and BK of the decode kernel for splits of `per_split` keys."""
        return Choice({"BR": row_block(problem.rows), "BK": 128 if per_split % 128 == 0 else 64})

    def keys_per_split(self, problem: AttentionProblem) -> int:
        return KEYS_PER_SPLIT

    def merge(self, parts: int, device: str, *, after_decode: bool = False) -> Choice:
        """BS (parts of a row taken at once) and SPAN (columns of a row in one program) of a merge. Results depend on
        BS, which follows from the number of parts alone."""
        return Choice({"BS": 64, "SPAN": None})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        """STRIP (rows read at a time) and SPAN (columns in one program) of the block map of a mask."""
        return Choice({"STRIP": BQ, "SPAN": None})

    def threads(self, flops: int, bytes_: int) -> int | None:
        """How many threads some work is worth; None where the backend has none. Results never depend on it."""
        return None


def row_block(rows: int, sizes: tuple[int, ...] = ROW_BLOCKS) -> int:
    """The smallest block that holds all rows, else the largest."""
    return next((size for size in sizes if rows <= size), sizes[-1])
