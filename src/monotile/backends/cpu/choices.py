"""Block sizes of the library's kernels on a CPU: what fits its caches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from ..choices import KEYS_PER_SPLIT, AttentionChoice, AttentionProblem, BackwardChoice, Choice, Choices, cdiv
from ..time_model import RowKind
from .backward_choices import choose_backward
from .makespan import CpuTimeModel
from .processors import FewThreads, all_processors, default_threads, l2_bytes, physical_cores
from .row_costs import RowCosts, row_costs
from .target import STREAMED_ROWS, Target, processor, target

# The least work of a thread.
FLOPS_PER_THREAD = 2_000_000
BYTES_PER_THREAD = 256_000
SMALL_WORK = 4  # times that: a second thread saves less than waking it takes, 15 to 30 us in a virtual machine
STRIPS = (8, 4)  # rows of a mask read at a time: as many memory streams as a core follows
TILE_BYTES = 32768
HEADS_OF_A_CORE = 2  # that keep it busy, whichever keys a block map shows
PARTS_OF_A_CORE = 32  # into which ragged or paged keys are divided
MAX_SLOTS = 64  # cores beyond these get no splits of their own
# Of the time model, in units of one row with one key (row_costs.py): what a program costs beside its keys (for a row),
# and a merge. Measured on Zen 4, one thread, D 64.
START, MERGE = 64.0, 16384.0
LEAST_PANEL = 32  # rows
USUAL_KEYS = 32768  # of a call with few queries, which are split where they should be
HALVED = 1.03  # what half the rows must gain: keys are read twice as often, and another program may have to be compiled

# The same for panels that AMX multiplies, whose rows cost a part of the others' and whose keys are packed. Measured on
# Emerald Rapids, where blocks of 256 keys are faster than those of 64 and 128 for head sizes from 64 to 512.
AMX_ROW, AMX_KEY, AMX_KEYS = 0.2, 6.0, 256


class CpuChoices(Choices):
    """The choices for this process's vector unit, or for another."""

    def __init__(self, unit: str | None = None) -> None:
        self._unit = unit

    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """Few rows are streamed: keys pass through registers once. More rows are computed in panels of whole vectors,
        or streamed twice where that is faster."""
        costs = row_costs(processor(self._unit).cpu, problem.dtype)
        if keys_per_split is not None or problem.rows <= costs.most_streamed:
            return _streamed(problem, keys_per_split, costs)
        most, why = _rows_in_l2(problem)
        panels, streamed, amx = [], [], self._target().amx
        for size in dict.fromkeys((problem.rows, problem.queries)):
            largest = _panel_rows(size, most, self._lanes)
            panels += [_panel(problem, largest, why, costs, amx=amx)]
            panels += [_panel(problem, rows, why, costs, amx=amx, halved=n) for n, rows in self._smaller(largest)]
            streamed += [_streamed_twice(problem, size, costs)] if size <= 2 * STREAMED_ROWS else []
        model = CpuTimeModel(cores(), merge=MERGE, bytes_per_time=math.inf, least=KEYS_PER_SPLIT)
        kinds = [*panels, *streamed]
        if len({kind.rows <= STREAMED_ROWS for kind in kinds}) > 1:
            # Panels and streams add in different orders. Neither the number of keys nor positions choose between them:
            # a row's bits are the same whichever keys are hidden behind the visible ones.
            usual = model.choose(replace(problem, keys=USUAL_KEYS, causal=None, left=None, right=None), kinds)
            few = usual.row_block <= STREAMED_ROWS
            kinds = [kind for kind in kinds if (kind.rows <= STREAMED_ROWS) == few]
        chosen = model.choose(problem, kinds)
        if chosen.splits or chosen.row_block <= STREAMED_ROWS or default_threads() >= cores():
            return chosen
        # Which rows are in a block changes no bit, so it may depend on the cores that this process has.
        return replace(model, slots=default_threads(), merge=math.inf).choose(problem, kinds)

    def keys_of_a_choice(self, problem: AttentionProblem, choice: AttentionChoice) -> int:
        """Streamed rows that see all keys: these count in runs."""
        return 1 if choice.row_block > STREAMED_ROWS or problem.has_positions else choice.key_block

    def page_block(self, page: int, dense: AttentionChoice, *, quantized: bool = False) -> int:
        """Blocks as of dense keys: rows of several pages are read by a table of their addresses. Codes are unpacked
        where they lie one after the other. Streamed rows with few registers would read the table for every piece of a
        row: there blocks in one page are up to a sixth faster (AVX2 on Zen 5, pages of 64)."""
        in_pages = quantized or (dense.row_block <= STREAMED_ROWS and self._target().registers < 32)
        return super().page_block(page, dense) if in_pages else dense.key_block

    def balance(self, problem: AttentionProblem) -> tuple[int, int]:
        return PARTS_OF_A_CORE * cores(), KEYS_PER_SPLIT

    def attention_backward(self, problem: AttentionProblem) -> BackwardChoice:
        """Whole panels: a kernel has its code once more for a part of a panel."""
        panel = self._target().lanes * self._target().vectors
        return choose_backward(problem, lambda size, most: _panel_rows(size, most, panel), cores(), l2_bytes())

    def _smaller(self, rows: int) -> list[tuple[int, int]]:
        """Blocks of fewer rows, which share a call with few heads out among many cores: how often the largest block is
        halved, and the rows."""
        halves = {cdiv(cdiv(rows, 2**n), self._lanes) * self._lanes: n for n in (3, 2, 1)}
        return [(n, half) for half, n in sorted(halves.items(), reverse=True) if LEAST_PANEL <= half < rows]

    @property
    def _lanes(self) -> int:
        return max(8, self._target().lanes)

    def _target(self) -> Target:
        return target(processor(self._unit))

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """The map is read in strips; those of an additive mask seldom hide anything, and where positions hide nothing
        either, all keys are seen."""
        return problem.has_additive_mask and not problem.has_positions and not problem.mask_mod

    def merge(self, parts: int, rows: int, device: str, *, after_split: bool = False) -> Choice:
        return Choice({"BS": 16 if parts <= 32 else 64, "SPAN": None})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        strip = next((rows for rows in STRIPS if BQ % rows == 0), BQ)
        return Choice({"STRIP": strip, "SPAN": None}, why="strips are read in the order of memory")

    def threads(self, flops: int, bytes_: int) -> int | None:
        """As many as have enough to do; None for the default, which may have changed when the call is repeated."""
        worth = max(1, flops // FLOPS_PER_THREAD, bytes_ // BYTES_PER_THREAD)
        if 1 < worth <= SMALL_WORK:
            return FewThreads(worth)
        return None if 1 < worth >= default_threads() else worth


def _panel_rows(size: int, most: int, lanes: int) -> int:
    """Rows of a block in whole vectors: as many as fit, or all rows, or half of them. More than two blocks are as large
    as possible, so that new lengths need no new program."""
    blocks = cdiv(size, most)
    return most if blocks > 2 else min(most, cdiv(cdiv(size, blocks), lanes) * lanes)


def _panel(problem: AttentionProblem, rows: int, why: str, costs: RowCosts, *, amx: bool, halved: int = 0) -> RowKind:
    """Blocks of keys in panels. AMX multiplies so fast that rescaling the accumulators once a block would show: it gets
    longer ones."""
    if halved:
        why = "larger blocks would leave cores idle"
    if amx and problem.dtype.name == "bfloat16":
        choice = Choice({"BR": rows, "BK": AMX_KEYS}, why=f"panels of {rows} rows, multiplied by AMX; {why}")
        return RowKind(rows, choice, AMX_KEYS * (rows * AMX_ROW + AMX_KEY) * HALVED**halved, START * rows)
    keys = 64 if problem.head_size > 256 else 128
    choice = Choice({"BR": rows, "BK": keys}, why=f"panels of {rows} rows; {why}")
    return RowKind(rows, choice, keys * (rows + costs.panel_key) * HALVED**halved, START * rows)


def _streamed_twice(problem: AttentionProblem, size: int, costs: RowCosts) -> RowKind:
    rows, run = cdiv(size, 2), _run(problem, costs)
    choice = Choice({"BR": rows, "BK": run}, why=f"{size} rows stream keys twice, in runs of {run}")
    return RowKind(rows, choice, run * costs.streamed(rows), START * rows)


def _streamed(problem: AttentionProblem, keys_per_split: int | None, costs: RowCosts) -> AttentionChoice:
    """Rows in blocks of one size; keys in long runs, where splits are whole numbers of them."""
    rows, run = cdiv(problem.rows, cdiv(problem.rows, STREAMED_ROWS)), _run(problem, costs)
    short = next((b for b in (64, 32) if b * problem.head_size * problem.dtype.bytes <= TILE_BYTES), 16)
    if keys_per_split is not None and cdiv(keys_per_split, short) * short % run:
        run = short
    time = problem.batch * problem.kv_heads * problem.visible_keys * costs.streamed(rows) / cores()
    words = {"BR": rows, "BK": run, "packed": True}
    chosen = AttentionChoice(words, why=f"few rows stream keys in runs of {run}", time=time)
    if keys_per_split is not None:
        return chosen
    divided = chosen.divided(problem, KEYS_PER_SPLIT // run)
    if not divided.splits:
        return chosen
    if problem.has_block_map and problem.kv_heads >= HEADS_OF_A_CORE * cores():
        return chosen  # what the map shows may lie in few splits: the others would be programs for nothing
    low, end = problem.visible_range
    return chosen.divided(problem, cdiv(cdiv(end, run) - low // run, divided.splits))  # of like sizes


def _run(problem: AttentionProblem, costs: RowCosts) -> int:
    """Keys at a time: many, so that accumulators are rescaled seldom. 16-bit keys of size 129 to 256 are a tenth slower
    in runs twice as long (measured on Zen 4)."""
    if costs.long_runs is not None:
        return 128 if problem.head_size <= costs.long_runs else 64
    return 64 if 128 < problem.head_size <= 256 and problem.dtype.bytes < 4 else 128


def _rows_in_l2(problem: AttentionProblem) -> tuple[int, str]:
    """The largest row block whose queries and accumulators fit in L2: each block of rows reads all of K and V."""
    for rows in (32, 64, 128):
        if 16 * rows * problem.head_size > l2_bytes():
            return rows, f"queries and accumulators of {rows} rows fill the L2 cache of {l2_bytes() >> 10} KiB"
    return 256, "queries and accumulators of 256 rows fit in L2"


@cache
def cores() -> int:
    """Cores of this machine, whichever a process or a call may use: results do not depend on those."""
    return min(physical_cores(all_processors()), MAX_SLOTS)
