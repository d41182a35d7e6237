"""Block sizes and splits of the library's kernels on Apple GPUs: what threadgroup memory and registers hold, and how
many threadgroups run at once. Nothing here was measured; it follows from the sizes of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from ..choices import ROW_BLOCKS, AttentionChoice, AttentionProblem, Choices, SplitModel, row_block
from .distribution import FEW_ROWS, MAX_ELEMENTS, SIMDGROUPS
from .staging import REGISTERS

QUERY_BYTES, STAGE_BYTES = 18 << 10, 8 << 10  # of 32 KiB of threadgroup memory
CORES = 40  # of a large Mac
# A core has 208 KiB of registers: 12 simdgroups with all 128 registers of a lane. 16 simdgroups have 104 each, of which
# tiles take 80.
CORE_SIMDGROUPS = 12
SHARED_REGISTERS = 80
SPLIT_KEYS = 128  # at least in a split
# Blocks of keys that a threadgroup could have read while it starts and its first block arrives, and while `merge` does.
START, LAUNCH = 1.0, 2.0


@dataclass(frozen=True)
class ThreadgroupRows:
    """Rows of a program, its keys at a time, and the simdgroups of its threadgroup (see distribution.py)."""

    rows: int
    keys: int
    simdgroups: int
    why: str

    def blocks_per_split(self, problem: AttentionProblem, programs: int) -> int | None:
        """The blocks of keys in a split, or None if no split pays. A split writes its softmax state in float32 and
        `merge` reads it, on all cores: in units of the bytes of a block of keys and values."""
        blocks = -(-problem.visible_keys // self.keys)
        state = 2 * self.rows / (self.keys * problem.dtype.bytes)
        slots = CORES * max(1, CORE_SIMDGROUPS // self.simdgroups)
        merge, least = max(state * programs / slots, 1 / 16), max(1, SPLIT_KEYS // self.keys)
        model = SplitModel(slots=slots, start=START + state, merge=merge, least=least)
        found = model.blocks_per_split(programs, blocks)
        whole = SplitModel(slots=slots, start=START, merge=0, least=1).time(programs, blocks, max(1, blocks))
        return found if found is not None and model.time(programs, blocks, found) + LAUNCH < whole else None


class MetalChoices(Choices):
    def attention(self, problem: AttentionProblem, splits: int | None = None) -> AttentionChoice:
        """The rows of a group are one block where a threadgroup can hold them: its keys are then read once. A fixed
        number of splits fixes how a row is computed: without matrices, however many rows there are."""
        if splits is not None:
            block, packed = _lane_block(problem, row_block(problem.rows, _lane_rows(problem))), True
        else:
            block, packed = _block(problem, problem.rows, packed=True), True
            if problem.rows > FEW_ROWS and not problem.packs(block.rows):
                block, packed = _block(problem, problem.queries, packed=False), False
        chosen = AttentionChoice({"BR": block.rows, "BK": block.keys, "packed": packed}, why=block.why)
        groups, size = (problem.kv_heads, problem.rows) if packed else (problem.query_heads, problem.queries)
        programs = problem.batch * groups * -(-size // block.rows)
        return chosen.divided(problem, splits, block.blocks_per_split(problem, programs))


def _block(problem: AttentionProblem, rows: int, *, packed: bool) -> ThreadgroupRows:
    """The smallest block that holds the rows, else the largest that there is."""
    if rows <= _lane_rows(problem)[-1]:
        return _lane_block(problem, row_block(rows, _lane_rows(problem)))
    if rows > 32:
        wide = _row_distributed(problem, rows, packed=packed)
        if wide is not None:
            return wide
    size = row_block(rows, (FEW_ROWS, 16, 32))
    few = size * problem.head_size <= SIMDGROUPS * MAX_ELEMENTS
    # Queries that do not fit threadgroup memory are staged again for each block of keys, which is larger then.
    staged = size * problem.head_size * problem.dtype.bytes <= QUERY_BYTES + STAGE_BYTES
    simdgroups = SIMDGROUPS if few else 2 * SIMDGROUPS
    why = f"{simdgroups} simdgroups hold the sums of {size} rows, each for its own columns"
    return ThreadgroupRows(size, 64 if few or staged else 128, simdgroups, why)


def _lane_rows(problem: AttentionProblem) -> tuple[int, ...]:
    return tuple(rows for rows in ROW_BLOCKS if rows * problem.head_size <= MAX_ELEMENTS or rows == 1)


def _lane_block(problem: AttentionProblem, rows: int) -> ThreadgroupRows:
    return ThreadgroupRows(rows, 64, 1, "rows are held in registers, and keys and values pass through them")


def _row_distributed(problem: AttentionProblem, rows: int, *, packed: bool) -> ThreadgroupRows | None:
    """64 or 128 rows that simdgroups share out, with K and V staged, 8 KiB of each; None if they do not fit. Queries
    are staged too, up to 18 KiB. Where they are more, packed rows are distributed over twice as many simdgroups, which
    hold their queries in registers; a call with many blocks of rows anyway takes fewer rows."""
    row_bytes = problem.head_size * problem.dtype.bytes
    keys = next((keys for keys in (64, 32) if keys * row_bytes <= STAGE_BYTES), 16)

    def registers(rows: int) -> float:
        """Of a lane, for this many rows of queries, sums and scores in a simdgroup."""
        return rows * (row_bytes / 4 + problem.head_size + keys) / 32

    if packed and rows > 64 and registers(8) <= SHARED_REGISTERS:
        simdgroups = 8 if registers(16) <= REGISTERS else 16
        return ThreadgroupRows(128, keys, simdgroups, f"{simdgroups} simdgroups hold 128 rows of queries and sums")
    if 64 * row_bytes <= QUERY_BYTES and 64 * problem.head_size <= SIMDGROUPS * MAX_ELEMENTS:
        return ThreadgroupRows(
            64, keys, SIMDGROUPS, f"64 rows of queries fit {QUERY_BYTES >> 10} KiB of threadgroup memory"
        )
    if packed and registers(8) <= REGISTERS:
        simdgroups = SIMDGROUPS if registers(16) <= REGISTERS else 2 * SIMDGROUPS
        return ThreadgroupRows(64, keys, simdgroups, f"{simdgroups} simdgroups hold 64 rows of queries and sums")
    return None
