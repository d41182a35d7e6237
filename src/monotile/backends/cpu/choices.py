"""Block sizes of the library's kernels on a CPU: what fits its caches."""

from __future__ import annotations

import math
import os
from functools import cache

from ..choices import KEYS_PER_SPLIT, AttentionChoice, AttentionProblem, Choice, Choices, cdiv
from ..time_model import RowKind, TimeModel
from .host import host
from .target import STREAMED_ROWS, host_for, target

# The least work for which another thread is woken: about twice the cost of waking it.
FLOPS_PER_THREAD = 2_000_000
BYTES_PER_THREAD = 256_000
STRIPS = (8, 4)  # rows of a mask read at a time: as many memory streams as a core follows
TILE_BYTES = 32768
MAX_SLOTS = 64  # processors beyond these get no splits of their own
# Of the time model, whose unit is one row with one key: what a key costs beside its rows, in panels and streamed; what
# a program costs beside its keys (for a row), and a merge. Measured on Zen 4, one thread, D 64.
PANEL_KEY, STREAMED_KEY, START, MERGE = 1.0, 3.0, 64.0, 16384.0

# The same for panels that AMX multiplies, whose rows cost a part of the others' and whose keys are packed. Measured on
# Emerald Rapids, where blocks of 256 keys are faster than those of 64 and 128 for head sizes from 64 to 512.
AMX_ROW, AMX_KEY, AMX_KEYS = 0.2, 6.0, 256


class CpuChoices(Choices):
    """The choices for this machine's vector unit, or for another."""

    def __init__(self, unit: str | None = None) -> None:
        self._unit = unit

    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """Few rows are streamed: keys pass through registers once. More rows are computed in panels of whole vectors,
        or streamed twice where that is faster."""
        if keys_per_split is not None or problem.rows <= STREAMED_ROWS:
            return _streamed(problem, keys_per_split)
        most, why = _rows_in_l2(problem)
        kinds = []
        for size in dict.fromkeys((problem.rows, problem.queries)):
            kinds += [_panel(problem, self._panel_rows(size, most), why, amx=self._has_amx())]
            kinds += [_streamed_twice(problem, size)] if size <= 2 * STREAMED_ROWS else []
        return TimeModel(cores(), merge=MERGE, bytes_per_time=math.inf, least=KEYS_PER_SPLIT).choose(problem, kinds)

    def _panel_rows(self, size: int, most: int) -> int:
        """Rows of a block in whole vectors: as many as fit, or all rows, or half of them. More than two blocks are as
        large as possible, so that new lengths need no new program."""
        blocks = cdiv(size, most)
        lanes = max(8, target(host() if self._unit is None else host_for(self._unit)).lanes)
        return most if blocks > 2 else min(most, cdiv(cdiv(size, blocks), lanes) * lanes)

    def _has_amx(self) -> bool:
        return target(host() if self._unit is None else host_for(self._unit)).amx

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """The map is read in strips; those of an additive mask seldom hide anything, and where positions hide nothing
        either, all keys are seen."""
        return problem.has_additive_mask and not problem.has_positions and not problem.mask_mod

    def merge(self, parts: int, rows: int, device: str, *, after_split: bool = False) -> Choice:
        return Choice({"BS": 16 if parts <= 32 else 64, "SPAN": None})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        strip = next((rows for rows in STRIPS if BQ % rows == 0), BQ)
        return Choice({"STRIP": strip, "SPAN": None}, why="strips are read in the order of memory")

    def threads(self, flops: int, bytes_: int) -> int:
        from .pool import default_threads

        return min(default_threads(), max(1, flops // FLOPS_PER_THREAD, bytes_ // BYTES_PER_THREAD))


def _panel(problem: AttentionProblem, rows: int, why: str, *, amx: bool) -> RowKind:
    """Blocks of keys in panels. AMX multiplies so fast that rescaling the accumulators once a block would show: it gets
    longer ones."""
    if amx and problem.dtype.name == "bfloat16":
        choice = Choice({"BR": rows, "BK": AMX_KEYS}, why=f"panels of {rows} rows, multiplied by AMX; {why}")
        return RowKind(rows, choice, AMX_KEYS * (rows * AMX_ROW + AMX_KEY), START * rows)
    keys = 64 if problem.head_size > 256 else 128
    choice = Choice({"BR": rows, "BK": keys}, why=f"panels of {rows} rows; {why}")
    return RowKind(rows, choice, keys * (rows + PANEL_KEY), START * rows)


def _streamed_twice(problem: AttentionProblem, size: int) -> RowKind:
    rows, run = cdiv(size, 2), _run(problem)
    choice = Choice({"BR": rows, "BK": run}, why=f"{size} rows stream keys twice, in runs of {run}")
    return RowKind(rows, choice, run * (rows + STREAMED_KEY), START * rows)


def _streamed(problem: AttentionProblem, keys_per_split: int | None) -> AttentionChoice:
    """Rows in blocks of one size; keys in long runs, where splits are whole numbers of them."""
    rows, run = cdiv(problem.rows, cdiv(problem.rows, STREAMED_ROWS)), _run(problem)
    short = next((b for b in (64, 32) if b * problem.head_size * problem.dtype.bytes <= TILE_BYTES), 16)
    if keys_per_split is not None and cdiv(keys_per_split, short) * short % run:
        run = short
    time = problem.batch * problem.kv_heads * problem.visible_keys * (rows + STREAMED_KEY) / cores()
    words = {"BR": rows, "BK": run, "packed": True}
    chosen = AttentionChoice(words, why=f"few rows stream keys in runs of {run}", time=time)
    return chosen if keys_per_split is not None else chosen.divided(problem, KEYS_PER_SPLIT // run)


def _run(problem: AttentionProblem) -> int:
    """Keys at a time: many, so that accumulators are rescaled seldom. 16-bit keys of size 129 to 256 are a tenth slower
    in runs twice as long (measured on Zen 4)."""
    return 64 if 128 < problem.head_size <= 256 and problem.dtype.bytes < 4 else 128


def _rows_in_l2(problem: AttentionProblem) -> tuple[int, str]:
    """The largest row block whose queries and accumulators fit in L2: each block of rows reads all of K and V."""
    for rows in (32, 64, 128):
        if 16 * rows * problem.head_size > l2_bytes():
            return rows, f"queries and accumulators of {rows} rows fill the L2 cache of {l2_bytes() >> 10} KiB"
    return 256, "queries and accumulators of 256 rows fit in L2"


@cache
def cores() -> int:
    """Processors of this machine, whichever a process or a call may use: results do not depend on those."""
    return min(os.cpu_count() or 1, MAX_SLOTS)


@cache
def l2_bytes() -> int:
    """Bytes of a core's L2 cache; where the system does not tell, what processors have at least."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as file:  # pathlib takes 5 ms to load
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 512 * 1024
