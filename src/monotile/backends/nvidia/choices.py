"""How the library's kernels run on NVIDIA GPUs: the block sizes and the schedule of a call.

On sm_90 both were measured (measured.py, backward_choices.py). On other architectures, and for dtypes without a row,
blocks follow from what fits shared memory and the schedule from the backend's own rule. What `monotile tune` measured
on this machine's GPU comes before both."""

from __future__ import annotations

from dataclasses import replace

from ..choices import ROW_BLOCKS, AttentionChoice, AttentionProblem, BackwardChoice, Choice, Choices, row_block
from . import row_kinds, tuning
from .backward_choices import choose_backward
from .device import MEASURED, MMA_SYNC, gpu
from .gluon import support
from .measured import (
    APART,
    APART_WIDE,
    IN_KEYS,
    SHORT_HALVED,
    SHORT_PAIRED,
    SHORT_PLAIN,
    cache_table,
    decode_table,
    forward_table,
    up_to,
    zeroing_table,
)
from .schedule import Schedule
from .sides import pieces
from .triton.padding import padded

# (BR, BK) up to a head size: what fits registers without thousands of bytes spilled, and Hopper's shared memory. Tiles
# are powers of two, so that beyond 512 they are as large as for 1024. float32 has its operands in registers, too, and
# so have the matrix units of GPUs before Hopper and of sm_120 (mma.sync).
BLOCKS = ((128, 128, 128), (256, 128, 64), (512, 64, 64), (576, 32, 32))
BLOCKS_FLOAT32 = ((64, 64, 64), (128, 32, 32), (256, 32, 16), (576, 16, 16))
BLOCKS_MMA_SYNC = ((128, 128, 64), (256, 64, 64), (512, 32, 32), (576, 16, 32))
LEAST_BLOCK = 16
SHARED_MARGIN = 4096  # barriers, reductions, conversions of vectors
STAGED_BLOCK = 32  # keys: blocks are made smaller down to here to have two stages of them
# Up to this many keys the start and end of a CTA count for more than a slightly slower loop, and CTAs are persistent:
# by head size, without causality and with it. At D 64 they always are; at D 256 they are slower or no faster. With
# softcap, which is bound by special functions, they are faster at any length.
SHORT = ((128, 4096, 8192), (512, 1024, 8192))
LONG = 16384  # keys from which on edges of D 128 that overlap are 1 to 3 % faster
BALANCED_WAVES = 4  # of programs, where lengths of sequences are not known
PRODUCED_KEYS = 2048  # of a decode CTA, from which on a producer warp outweighs its start
MIN_SPLIT = 128  # keys of a split: fewer do not outweigh its output
LONG_SPLIT = 512  # keys of a split: with this many, two CTAs on a multiprocessor beat one with twice the keys
TWO_FIT = 16384  # bytes of a tile of keys: up to here, two decode CTAs fit a multiprocessor
TILE_BYTES = 32768  # of a decode tile of keys, which fits shared memory beside its values
MAPPED_CTAS = 1  # CTAs to a multiprocessor of few rows with a block map, which divide what it shows
LEAST_ROWS = 2  # of 16 bits: one row would be multiplied without matrix units, which takes up to twice as long
MAPPED_REGISTERS = 168  # of their threads: three fit a multiprocessor, where block cases would take registers for two
GLANCE = 256  # blocks of a map that a program looks at at once, to find those of its split
MERGE_SPAN = 32  # columns of a row in one program of a merge: GPUs need many programs
MERGE_TILE = 2048  # elements that one warp merges at a time
MERGED_ALONE = 128  # up to this many rows, a row is shared out by columns
MASK_COLUMNS, MASK_FEW_ROWS = 1024, 16  # columns of a mask in one program of its block map, but for few rows
# At D 64 two consumers with persistent tiles are faster than three up to this many keys.
SHORT_NARROW = 2048
NEAR = 1024  # keys of a window up to which persistent CTAs with blocks half as long are faster
# Head size, and keys up to which small CTAs in plain Triton are faster than large ones.
SHORT_KEYS = ((64, 1024), (128, 512))
# Where there are CTAs for two waves, of head sizes above 64: below PAIRED_BELOW keys two CTAs on a multiprocessor, of
# which one starts while the other computes; then, up to HALVED keys or with causality HALVED_CAUSAL, persistent ones
# whose blocks are half as long, which wait less for the first.
PAIRED_BELOW, HALVED, HALVED_CAUSAL = 512, 512, 1024


class NvidiaChoices(Choices):
    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        """Few rows have all query heads of a KV head in one small block; others have blocks by the model of times."""
        fixed, few = keys_per_split is not None, None
        if fixed or self._is_few(problem):
            few = self._split_few(problem, fixed)
            if fixed or not (self._prefers_matrix_units(problem, few) or self._has_a_choice(problem)):
                return few
        if (short := self._short(problem)) is not None:
            return AttentionChoice(short.blocks, short.schedule, short.why)
        chosen = row_kinds.model(problem).choose(problem, row_kinds.kinds(problem, self.row_blocks(problem)))
        if few is not None and self._has_a_choice(problem) and few.time <= chosen.time:
            return few
        schedule = chosen.schedule
        if problem.source == "ragged" and schedule is not None:
            return self._in_spans(problem, chosen)
        if chosen.splits and schedule is not None:
            chosen = replace(
                chosen, schedule=replace(schedule, persistent=False, edge_stages=1, triggers_dependents=True)
            )
        return chosen

    def _in_spans(self, problem: AttentionProblem, chosen: AttentionChoice) -> AttentionChoice:
        """Let the consumers of a CTA own the blocks of one span of a ragged sequence. Rows of splits, which a plan
        places, are computed in plain Triton."""
        if chosen.splits:
            plain = row_kinds.kinds(problem, Choice(_fitting(problem).blocks, why="a plan places the rows"))
            return row_kinds.model(problem).choose(problem, plain)
        schedule = replace(chosen.schedule, persistent=False)
        return replace(chosen, blocks={**chosen.blocks, "together": schedule.consumers}, schedule=schedule)

    def _is_few(self, problem: AttentionProblem) -> bool:
        """True for few rows; where nothing was measured, also for few queries of each head."""
        unknown = gpu(problem.device).architecture != MEASURED
        return problem.rows <= ROW_BLOCKS[-1] or (unknown and problem.queries <= ROW_BLOCKS[-1])

    def _has_a_choice(self, problem: AttentionProblem) -> bool:
        """True where few queries of large groups are compared with larger blocks, which read the keys less often. Where
        all was measured few rows are few of a group, too."""
        plain = problem.source == "dense" and not problem.quantized and not problem.has_block_map
        return plain and problem.rows > ROW_BLOCKS[-1]

    def _prefers_matrix_units(self, problem: AttentionProblem, few: AttentionChoice) -> bool:
        """True where a producer warp is worth rows that are mostly padding: where heads alone make two waves, and with
        a block map, which plain Triton cannot fetch ahead, where they fill half of the multiprocessors (measured on an
        H200: 27 us instead of 48 for 16 batches of 8 KV heads, 22 instead of 18 for one)."""
        target, heads = gpu(problem.device), problem.batch * problem.kv_heads
        able = (
            problem.source == "dense"
            and problem.dtype.bytes == 2
            and target.architecture == MEASURED
            and support.version_supported()
        )
        if problem.has_block_map:
            return able and 2 * heads >= target.multiprocessors
        long = problem.visible_keys >= PRODUCED_KEYS
        return able and heads >= 2 * target.multiprocessors and not few.splits and long

    def row_blocks(self, problem: AttentionProblem) -> Choice:
        """BR, BK and the schedule for matrix units."""
        size, dtype, target = problem.head_size, problem.dtype, gpu(problem.device)
        if (tuned := self._tuned(problem)) is not None:
            return tuned
        fitting = _fitting(problem)
        if problem.source == "paged":
            return Choice(fitting.blocks, why=f"{problem.source} keys are read without descriptors: {fitting.why}")
        if target.architecture != MEASURED:
            return Choice(fitting.blocks, why=f"no schedule was measured on {target.name}: {fitting.why}")
        if dtype.bytes != 2:
            return Choice(fitting.blocks, why=f"no schedule was measured for {dtype}: {fitting.why}")
        if not support.version_supported():
            return Choice(fitting.blocks, why=f"no schedule was measured with this Triton: {fitting.why}")
        full, causal = next((full, causal) for most, full, causal in (*SHORT, (size, 0, 0)) if size <= most)
        short = problem.keys <= (full if problem.causal is None else causal)
        if self._is_short(problem):
            return SHORT_PLAIN
        if problem.zeroes_values:
            table = zeroing_table(problem.has_block_map, self._is_near(problem))
        else:
            narrow = problem.keys <= SHORT_NARROW
            persistent = short or problem.softcap is not None
            table = forward_table(persistent=persistent, narrow=narrow, long=problem.keys >= LONG)
            apart = APART if problem.value_size <= 512 else APART_WIDE
            table += ((576, IN_KEYS if problem.values_in_keys else apart),)
        return up_to(size, table) or Choice(fitting.blocks, why=f"no row for head size {size}: {fitting.why}")

    def _is_near(self, problem: AttentionProblem) -> bool:
        """True if every row sees few keys, by a window."""
        right = 0 if problem.causal is not None else problem.right
        bounded = problem.left is not None and right is not None and not problem.has_block_map
        return bounded and (problem.left or 0) + (right or 0) < NEAR

    def _is_short(self, problem: AttentionProblem) -> bool:
        """True where several small CTAs on a multiprocessor, of which one starts while others compute, beat one with a
        producer warp."""
        whole = len(pieces(problem.head_size)) == 1  # sides in pieces are slower there
        if problem.zeroes_values or problem.source != "dense" or 2 * problem.queries < problem.keys or not whole:
            return False
        return problem.keys <= next((keys for most, keys in SHORT_KEYS if problem.head_size <= most), 0)

    def _short(self, problem: AttentionProblem) -> Choice | None:
        """The choice for few keys where there are many CTAs; else None, and the model of times decides."""
        target = gpu(problem.device)
        able = target.architecture == MEASURED and problem.dtype.bytes == 2 and support.version_supported()
        plain = problem.source == "dense" and not problem.zeroes_values and 2 * problem.queries >= problem.keys
        if not able or not plain or not 64 < problem.head_size <= 128 or self._tuned(problem) is not None:
            return None
        ctas = problem.batch * problem.kv_heads * problem.group * -(-problem.queries // 128)
        if ctas < 2 * target.multiprocessors or problem.keys > (HALVED if problem.causal is None else HALVED_CAUSAL):
            return None
        return SHORT_PAIRED if problem.keys < PAIRED_BELOW else SHORT_HALVED

    def _tuned(self, problem: AttentionProblem) -> Choice | None:
        """What `monotile tune` measured: without zeroed copies of V."""
        if problem.zeroes_values or problem.source != "dense":
            return None
        return tuning.lookup("attention", problem.head_size, problem.dtype.name, problem.device)

    def _split_few(self, problem: AttentionProblem, fixed: bool) -> AttentionChoice:
        length = split_length(problem, self.few_rows(problem, unsplit=True).blocks["BK"] or 0)
        single = problem.rows == 1 and not fixed  # with fixed splits a row is computed alike whatever the others
        found = self.few_rows(problem, unsplit=not fixed and length >= problem.visible_keys, single=single)
        rows = max(row_block(problem.rows), LEAST_ROWS if problem.dtype.bytes == 2 else 1)
        blocks = {"BR": rows, "BK": found.blocks["BK"], "packed": True}
        schedule, why = found.schedule, found.why
        if problem.has_block_map and schedule is not None:
            schedule = replace(schedule, waits_for_previous=True, max_registers=MAPPED_REGISTERS)
            why = "few rows with a block map: derived, not measured"
        chosen = AttentionChoice(blocks, schedule, why)
        if fixed:
            return chosen
        chosen = chosen.divided(problem, -(-length // chosen.key_block))
        chosen = replace(chosen, time=row_kinds.few_rows_time(problem, chosen))
        return replace(chosen, blocks={**blocks, "glance": GLANCE}) if problem.has_block_map else chosen

    def few_rows(self, problem: AttentionProblem, *, unsplit: bool, single: bool = False) -> Choice:
        """BK and the schedule for few rows."""
        size, dtype = problem.head_size, problem.dtype
        tuned = tuning.lookup("decode", size, dtype.name, problem.device)
        if tuned is not None:
            return tuned
        keys = next((b for b in (64, 32) if b * size * dtype.bytes <= TILE_BYTES), 16)
        target = gpu(problem.device)
        fitting = Choice({"BK": keys}, why=f"{keys} keys fit {TILE_BYTES >> 10} KiB; no schedule was measured")
        if target.architecture != MEASURED or dtype.bytes != 2:
            return fitting
        if problem.source == "paged" or problem.quantized:
            return up_to(size, cache_table(2 if problem.source == "paged" else 3)) or fitting
        return up_to(size, decode_table(unsplit, single)) or fitting

    def page_block(self, page: int, dense: AttentionChoice, *, quantized: bool = False) -> int:
        """Blocks as of dense keys: rows of several pages are copied to shared memory as those of one are. Codes are
        unpacked where they lie one after the other."""
        return super().page_block(page, dense) if quantized else dense.key_block

    def balance(self, problem: AttentionProblem) -> tuple[int, int]:
        """Derived, not measured: four waves, so that the last one is short."""
        return BALANCED_WAVES * gpu(problem.device).multiprocessors, MIN_SPLIT

    def attention_backward(self, problem: AttentionProblem) -> BackwardChoice:
        return choose_backward(problem)

    def marks_covered(self, problem: AttentionProblem) -> bool:
        """The map reads whole blocks of the mask anyway."""
        return problem.mask is not None and not problem.mask_mod

    def covers(self, problem: AttentionProblem) -> bool:
        """Values need no copy in which hidden ones are zeroed then, and iterations overlap. Where positions hide keys,
        too, the map alone does not tell that some row sees a key."""
        return problem.mask is None and not problem.has_positions and not self._is_few(problem)

    def by_mod(self, problem: AttentionProblem, choice: Choice | None) -> str | None:
        """Iterations with a branch neither overlap nor are fetched ahead, whatever the function hides: plain Triton
        goes from the first visible block to the last. A producer warp, which does not know the function, fetches all
        blocks. Derived, not measured."""
        plain = choice is not None and (choice.schedule is None or not choice.schedule.consumers)
        return "range" if plain and super().by_mod(problem, choice) is not None else None

    def merge(self, parts: int, rows: int, device: str, *, after_split: bool = False) -> Choice:
        """All parts at once where that is possible: a second iteration waits for memory once more. Few rows are shared
        out by columns, to keep every multiprocessor busy; of many, a warp takes the columns its registers hold."""
        block = next((block for block in (16, 32, 64) if parts <= block), 128)
        few = rows <= MERGED_ALONE
        blocks = {"BS": block, "SPAN": MERGE_SPAN if few else MERGE_TILE // block}
        if gpu(device).architecture != MEASURED:
            return Choice(blocks)
        why = "it starts before the launch whose parts it reads has ended, and waits for it" if after_split else ""
        return Choice(blocks, Schedule(4 if few else 1, waits_for_previous=after_split), why)

    def rotation(self, rows: int) -> Choice:
        """Few columns to a program: GPUs need many programs."""
        return Choice({**super().rotation(rows).blocks, "SPAN": MERGE_SPAN})

    def mask_blocks(self, BQ: int, BK: int, device: str) -> Choice:
        """Without a limit the edges, which seldom run, take all registers, and only two CTAs fit a multiprocessor. Few
        rows have one block in a program: others would wait for memory one after the other."""
        few = BQ <= MASK_FEW_ROWS
        limited = Schedule(1 if few else 4, max_registers=128, triggers_dependents=few)
        columns = max(1, MASK_COLUMNS // BK) * BK if not few else BK
        known = gpu(device).architecture == MEASURED
        return Choice({"STRIP": BQ, "SPAN": columns}, limited if known else None, "whole blocks are read")

    def mod_blocks(self, rows: int, device: str) -> Choice:
        few = rows <= MASK_FEW_ROWS and gpu(device).architecture == MEASURED
        schedule = Schedule(1, triggers_dependents=True) if few else None
        return Choice({"SPAN": 1}, schedule, "a program for each block")


def split_length(problem: AttentionProblem, block: int) -> int:
    """Return the keys of a split, in whole blocks, such that every multiprocessor has a CTA; two CTAs where two fit and
    have enough to do. Where a block map hides keys, visible ones may lie in few splits: these are short."""
    heads = max(1, problem.batch * problem.kv_heads)
    two_fit = block * problem.head_size * (1 if problem.quantized else problem.dtype.bytes) <= TWO_FIT
    for together in (MAPPED_CTAS,) if problem.has_block_map else (2, 1) if two_fit else (1,):
        splits = max(1, round(together * gpu(problem.device).multiprocessors / heads))
        per_split = _round_up(_round_up(problem.visible_keys, splits) // splits, block)
        if per_split >= LONG_SPLIT:
            break
    return max(per_split, _round_up(MIN_SPLIT, block))


def _fitting(problem: AttentionProblem) -> Choice:
    """Products of float32 are written out, and with a mask once for each block case: the assembler then keeps 32
    registers and spills thousands of bytes, unless blocks are those of larger heads."""
    size, dtype, target = problem.head_size, problem.dtype, gpu(problem.device)
    large = problem.mask is not None and dtype.bytes == 4 and 128 < size <= 256
    mma_sync = target.architecture in MMA_SYNC
    table = BLOCKS_FLOAT32 if dtype.bytes == 4 else BLOCKS_MMA_SYNC if mma_sync else BLOCKS
    rows, keys = next((rows, keys) for most, rows, keys in table if (512 if large else size) <= most)
    while mma_sync and keys > STAGED_BLOCK and shared_bytes(problem, rows, keys, 2) > target.shared_bytes:
        keys //= 2
    while shared_bytes(problem, rows, keys) > target.shared_bytes and max(rows, keys) > LEAST_BLOCK:
        rows, keys = (rows, keys // 2) if keys > LEAST_BLOCK else (rows // 2, keys)
    kib = target.shared_bytes >> 10
    return Choice({"BR": rows, "BK": keys}, why=f"blocks of {rows} x {keys} for head size {size} fit {kib} KiB")


def shared_bytes(problem: AttentionProblem, rows: int, keys: int, stages: int = 1) -> int:
    """Return the shared memory of a plain module, at most: queries, and keys and values for every stage. With one stage
    keys and values share memory; where operands are in registers, queries give theirs up to the stages. Weights or a
    mask take some where they change their layout."""
    size = problem.dtype.bytes
    depth, width = sum(padded(piece.side) for piece in pieces(problem.head_size)), padded(problem.head_size)
    queries = rows * depth
    resident = 0 if gpu(problem.device).architecture in MMA_SYNC else queries
    staged = stages * keys * (depth + width) + resident if stages > 1 else 0
    scratch = 4 if size == 4 or problem.has_additive_mask else 1 if problem.mask is not None else 0
    return size * max(queries + keys * max(depth, width), staged) + rows * keys * scratch + SHARED_MARGIN


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
