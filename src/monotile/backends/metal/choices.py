"""Block sizes and splits of the library's kernels on Apple GPUs: what threadgroup memory and registers hold, and how
many threadgroups run at once. Nothing here was measured; it follows from the sizes of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..choices import (
    ROW_BLOCKS,
    AttentionChoice,
    AttentionProblem,
    BackwardBlocks,
    BackwardChoice,
    Choice,
    Choices,
    cdiv,
    row_block,
)
from ..time_model import RowKind, TimeModel
from . import budget
from .distribution import MAX_ELEMENTS, SIMDGROUPS
from .matrix_dots import LONG
from .runner import cost_model
from .threadgroup import THREADGROUP_LIMIT

QUERY_BYTES, STAGE_BYTES = 18 << 10, 8 << 10  # of 32 KiB of threadgroup memory
GROUP_BYTES = budget.CORE_THREADGROUP_BYTES // 2  # of a threadgroup of four simdgroups: two share a core
CORES = 40  # of a large Mac
# A core has 208 KiB of registers: 12 simdgroups with all 128 registers of a lane. 16 simdgroups have 104 each, of which
# tiles take 80.
CORE_SIMDGROUPS = 12
SHARED_REGISTERS = 80
TILE_REGISTERS = 96  # of a lane; staging.py leaves the queries in registers up to this and the vectors along rows
REDUCTION_BYTES = 64  # of a row: its maximum and its sum in each of 4 or 8 simdgroups
COLUMN_REGISTERS = 116  # of a lane, with the vectors along rows
LANE_KEYS, LANE_SUMS, LANE_VECTORS = 64, 32, 6  # keys at a time in lanes, partial sums of a lane, vectors along rows
LANES, ROWS_APART = 32, 64  # of a simdgroup; rows of a block from which on they are distributed over simdgroups
SPLIT_KEYS = 128  # at least in a split
LAUNCH = 8192.0  # clocks of a merge: about 6 us, an assumption
WAVES = 8  # that a call is split into
REREAD = 1.0  # of the time: what reading the keys twice as often has to gain
BACKWARD_TILES = ((32, 32), (16, 32), (16, 16), (8, 16), (8, 8))  # rows and keys


@dataclass(frozen=True)
class ThreadgroupRows:
    """Rows of a program, its keys at a time, and the simdgroups of its threadgroup (see distribution.py)."""

    rows: int
    keys: int
    simdgroups: int
    why: str

    @property
    def of_a_core(self) -> int:
        """Threadgroups that share a core."""
        return max(1, CORE_SIMDGROUPS // self.simdgroups)

    def chosen(self, problem: AttentionProblem) -> AttentionChoice:
        """This block, and splits of the keys by the time model."""
        choice = Choice({"BR": self.rows, "BK": self.keys}, why=self.why)
        kind = RowKind(self.rows, choice, self.of_a_core * self.clocks(problem), self.of_a_core * self._start(problem))
        slots, merge = CORES * self.of_a_core, max(LAUNCH, 2 * kind.block_time)  # short calls are not split
        model = TimeModel(slots, merge=merge, bytes_per_time=math.inf, least=SPLIT_KEYS, most_waves=WAVES)
        return model.choose(problem, [kind])

    def clocks(self, problem: AttentionProblem) -> float:
        """Clocks of a core for a block of keys, by the unit that needs the most (docs/internals/metal_cost.md): every
        block of rows reads its keys from memory, which all cores share."""
        products = 2 * self.rows * self.keys * problem.head_size  # the last rows of a block are padding
        read = self.keys * _key_bytes(problem)
        width, size = problem.head_size, problem.dtype.bytes
        if self.simdgroups == 1:
            shared, shuffled = 0, 2 * self.rows * self.keys * LANES * 4
        elif self.rows < ROWS_APART:  # each simdgroup reads all queries and weights
            shared, shuffled = self.rows * size * (self.simdgroups * (width + self.keys) + self.keys), 0
        else:  # each simdgroup reads all keys and values
            shared, shuffled = 2 * self.keys * width * size * (1 + self.simdgroups), 0
        return max(
            products / cost_model.MULTIPLY_ADDS,
            self.rows * self.keys / cost_model.EXPONENTIALS,
            (read + shared) / cost_model.ON_CORE_BYTES,
            read / cost_model.MEMORY_BYTES,
            shuffled / cost_model.SHUFFLED_BYTES,
        )

    def _start(self, problem: AttentionProblem) -> float:
        """Clocks in which a threadgroup's queries and first keys arrive, and a softmax state in float32 is written and
        read again."""
        row = problem.head_size * (problem.dtype.bytes + 2 * 4)
        return (self.keys * _key_bytes(problem) + self.rows * row) / cost_model.MEMORY_BYTES


class MetalChoices(Choices):
    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """Few queries: the block with the least time by the model, where reading the keys more often has to pay. Many:
        as few blocks as possible. Where the caller splits the keys, rows are computed without matrices, however many
        there are."""
        if keys_per_split is not None:
            block = _in_lanes(row_block(problem.rows, _lane_rows(problem)))
            return AttentionChoice({"BR": block.rows, "BK": block.keys, "packed": True}, why=block.why)
        if problem.queries > ROWS_APART:
            return _fewest(problem).chosen(problem)
        together = [block for block in _blocks(problem, large=True) if problem.packs(block.rows)]
        apart = [block for block in _blocks(problem, large=True) if not problem.packs(block.rows)]
        return _cheapest(problem, _divisions(problem.rows, together) + _divisions(problem.queries, apart))

    def attention_backward(self, problem: AttentionProblem) -> BackwardChoice:
        """The largest tiles whose rows and keys fit threadgroup memory beside the tile of scores."""
        row_bytes = problem.head_size * problem.dtype.bytes
        fitting = (tile for tile in BACKWARD_TILES if sum(tile) * row_bytes <= QUERY_BYTES + STAGE_BYTES)
        rows, keys = next(fitting, BACKWARD_TILES[-1])
        blocks = BackwardBlocks({"BR": rows, "BK": keys}, why=f"{rows} rows and {keys} keys fit threadgroup memory")
        return BackwardChoice(blocks, blocks)


def _fewest(problem: AttentionProblem) -> ThreadgroupRows:
    """Divide the rows into as few blocks as possible, all alike, and as small as they then can be. Rows that are not
    packed are many blocks anyway: more threadgroups of fewer rows then run at once. Where they are too few to fill the
    cores, larger blocks are taken that have less padding; not where positions hide keys, of which they skip fewer."""

    def block_of(rows: int, *, large: bool) -> ThreadgroupRows:
        blocks = _blocks(problem, large=large)
        each = cdiv(rows, cdiv(rows, blocks[-1].rows))
        return next(block for block in blocks if each <= block.rows)

    packed = block_of(problem.rows, large=True)
    if problem.packs(packed.rows):
        return packed
    programs = problem.batch * problem.query_heads * cdiv(problem.queries, ROWS_APART)
    fills_cores = programs >= CORES * CORE_SIMDGROUPS // SIMDGROUPS
    sizes = (False,) if problem.has_positions or fills_cores else (False, True)
    blocks = [block_of(problem.queries, large=large) for large in sizes]
    return min(blocks, key=lambda block: cdiv(problem.queries, block.rows) * block.rows)


def _divisions(rows: int, blocks: Sequence[ThreadgroupRows]) -> list[ThreadgroupRows]:
    """For each number of blocks that the rows may be divided into, the smallest block that does: from few to many."""
    counts = dict.fromkeys(cdiv(rows, block.rows) for block in reversed(blocks))
    return [next(block for block in blocks if cdiv(rows, block.rows) == count) for count in counts]


def _cheapest(problem: AttentionProblem, blocks: Sequence[ThreadgroupRows]) -> AttentionChoice:
    """Reading the keys more often has to gain a few percent: it takes energy and the lines of a cache."""
    found = [block.chosen(problem) for block in blocks]

    def reads(choice: AttentionChoice) -> int:
        rows, groups = (problem.rows, 1) if choice.packed else (problem.queries, problem.group)
        return max(1, groups * cdiv(rows, choice.row_block))

    least = min(map(reads, found))
    return min(found, key=lambda choice: choice.time * (1 + REREAD * (reads(choice) / least - 1)))


def _key_bytes(problem: AttentionProblem) -> int:
    """Bytes of a key and its value. Values that lie in the keys come from a cache."""
    return (1 if problem.values_in_keys else 2) * problem.head_size * problem.dtype.bytes


def _blocks(problem: AttentionProblem, *, large: bool) -> list[ThreadgroupRows]:
    """The blocks that fit a threadgroup, from few rows to many."""
    lanes = [rows for rows in _lane_rows(problem) if rows == 1 or _lane_registers(problem, rows) <= budget.REGISTERS]
    found = [_in_lanes(rows) for rows in lanes]
    first = [8] if 8 * problem.head_size > MAX_ELEMENTS else []  # narrower heads of 8 rows are computed in lanes
    by_columns = [_by_columns(problem, rows) for rows in (*first, 16, 24, 32)]
    if large:
        by_columns += [_by_columns(problem, rows) for rows in (40, 48)]
    found += [block for block in by_columns if block is not None and block.rows > found[-1].rows]
    by_rows = [_by_rows(problem, rows, large=large) for rows in ((64, 80, 96, 112, 128) if large else (64,))]
    return found + [block for block in by_rows if block is not None]


def _lane_rows(problem: AttentionProblem) -> tuple[int, ...]:
    return tuple(rows for rows in ROW_BLOCKS if rows * problem.head_size <= MAX_ELEMENTS or rows == 1)


def _lane_registers(problem: AttentionProblem, rows: int) -> float:
    """Registers of a lane for queries and sums, scores and mask, partial sums and a row of keys."""
    width = next(n for n in (4, 2, 1) if n == 1 or (problem.head_size % n == 0 and 32 * n <= problem.head_size))
    row = cdiv(problem.head_size, 32 * width) * width
    tiles = rows * row * (1 + problem.dtype.bytes / 4) + rows * LANE_KEYS / 32 * (1 + _mask_registers(problem))
    return tiles + LANE_SUMS + row + LANE_VECTORS + budget.OTHERS


def _mask_registers(problem: AttentionProblem) -> float:
    """Registers for an element of the mask beside its score."""
    return 0 if problem.mask is None else max(problem.mask.bytes, 2) / 4


def _in_lanes(rows: int) -> ThreadgroupRows:
    """Few rows are held in registers, and keys and values pass through them."""
    return ThreadgroupRows(rows, LANE_KEYS, 1, "rows are held in the registers of one simdgroup")


def _by_columns(problem: AttentionProblem, rows: int) -> ThreadgroupRows | None:
    """Every simdgroup has all rows, its own keys of the scores and its own columns of the sums; None if the registers
    of a lane do not suffice. Queries that do not fit threadgroup memory are staged again for each block of keys, which
    is larger then."""
    elements, bytes_ = rows * problem.head_size, problem.dtype.bytes
    row_bytes = problem.head_size * bytes_
    few, staged = elements <= SIMDGROUPS * MAX_ELEMENTS, elements * bytes_ <= QUERY_BYTES + STAGE_BYTES
    simdgroups, keys = SIMDGROUPS if few else 2 * SIMDGROUPS, 64 if few or staged else 128
    if problem.values_in_keys:
        keys = next((shared for shared in (64, 32) if _shares_keys(problem, rows, shared)), keys)
    if simdgroups == SIMDGROUPS and staged:

        def needed(keys: int) -> int:
            """Bytes for queries, weights and exchanges between simdgroups."""
            return rows * (row_bytes + keys * bytes_ + REDUCTION_BYTES) + (64 if problem.mask else 0)

        keys = next((fitting for fitting in (keys, 32) if needed(fitting) <= GROUP_BYTES), 0)
        if not keys:
            return None
    score = rows * keys / (32 * simdgroups)
    sums = rows * (problem.value_size or problem.head_size) / (32 * simdgroups)
    # Maximum, sum and the like of a row, which all simdgroups hold; two of them beside the second sum of a long dot.
    vectors = max(6 * rows / 8, 2 * rows / 8 + (score if problem.head_size >= LONG else 0))
    registers = sums + score * (1 + _mask_registers(problem)) + vectors + rows / 8 * bytes_ / 2
    if registers > (COLUMN_REGISTERS if rows > 32 else budget.REGISTERS - budget.OTHERS):
        return None
    return ThreadgroupRows(rows, keys, simdgroups, f"{simdgroups} simdgroups hold the sums of {rows} rows by columns")


def _shares_keys(problem: AttentionProblem, rows: int, keys: int) -> bool:
    """True if threadgroup memory holds a tile of keys, which serves as the values, beside queries and weights."""
    wide, narrow = (size * problem.dtype.bytes + 16 for size in (problem.head_size, keys))
    return (rows + keys) * wide + rows * narrow <= THREADGROUP_LIMIT - REDUCTION_BYTES * rows


def _by_rows(problem: AttentionProblem, rows: int, *, large: bool) -> ThreadgroupRows | None:
    """Every simdgroup has 16 rows, and K and V are staged, 8 KiB of each; None if they do not fit. 64 rows of queries
    are staged too, up to 18 KiB. Where they are more, they are held in registers, if necessary those of twice as many
    simdgroups with 8 rows each."""
    row_bytes = problem.head_size * problem.dtype.bytes
    keys = next((keys for keys in (64, 32) if keys * row_bytes <= STAGE_BYTES), 16)
    why = f"{rows} rows of queries fit {QUERY_BYTES >> 10} KiB of threadgroup memory"
    if rows == 64 and 64 * row_bytes <= QUERY_BYTES and 64 * problem.head_size <= SIMDGROUPS * MAX_ELEMENTS:
        return ThreadgroupRows(rows, keys, SIMDGROUPS, why)

    def registers(rows: int) -> float:
        """Of a lane, for this many rows of queries, sums and scores in a simdgroup."""
        return rows * (row_bytes / 4 + problem.head_size + keys) / 32

    if not large or registers(8) > (TILE_REGISTERS if rows == 64 else SHARED_REGISTERS):
        return None
    each = 16 if registers(16) <= TILE_REGISTERS else 8
    simdgroups = rows // each
    lane = registers(each) + each / 32 * keys * _mask_registers(problem) + each / 2 + budget.OTHERS
    alone = simdgroups < 2 * SIMDGROUPS and 2 * simdgroups * 128 * lane > budget.CORE_REGISTER_BYTES
    if alone or lane > budget.REGISTERS:
        return None
    return ThreadgroupRows(rows, keys, simdgroups, f"{simdgroups} simdgroups hold {rows} rows of queries and sums")
