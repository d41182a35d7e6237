"""Tiles and schedules of the backward pass on NVIDIA GPUs: measured on an H200, elsewhere the largest that fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..choices import AttentionProblem, BackwardBlocks, BackwardChoice
from .device import MEASURED, MMA_SYNC, gpu
from .gluon import support
from .schedule import Schedule
from .triton.descriptors import ALIGNMENT

SUMS = 32768  # elements of a program's sums in registers
GLUON, GLUON_HIDING = 512, 256  # head size up to which its Gluon modules fit; with hidden keys
# Rows or keys that a program takes at a time, and those it owns. Products whose rows are taken and owned alternate in
# the kernel that owns keys: Hopper's matrix units take 64 rows of both or of neither, else Triton keeps every operand
# twice.
ROWS = ((64, 128), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
KEYS = ((64, 128), (64, 64), (32, 32), (16, 32), (16, 16))
# With mma.sync operands are in registers, too: of 128 keys, or of 128 rows with block cases, the assembler keeps 32
# registers and spills 6 to 8 KB (compiled for sm_80 and sm_120 at D 64 and 128; of 64 it spills 600 bytes at most).
ROWS_MMA_SYNC = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
KEYS_MMA_SYNC = ((32, 64), (32, 32), (16, 32), (16, 16))
FLOAT32 = ((64, 32, 32), (256, 16, 32), (1024, 16, 16))


def choose_backward(problem: AttentionProblem) -> BackwardChoice:
    """What was measured; else the largest tiles that fit: a program that owns keys has two sums, one that owns
    queries has one."""
    size = max(problem.head_size, problem.value_size)
    measured = problem.dtype.bytes == 2 and gpu(problem.device).architecture == MEASURED
    aligned = all(side * problem.dtype.bytes % ALIGNMENT == 0 for side in (problem.head_size, problem.value_size))
    able = measured and support.version_supported() and problem.source != "paged" and aligned
    hides = problem.mask is not None or problem.mask_mod
    if able and size <= (GLUON_HIDING if hides else GLUON):
        chosen = next(choice for most, choice in measured_table() if size <= most)
        return chosen if problem.source == "dense" else _in_spans(chosen)
    mma_sync = gpu(problem.device).architecture in MMA_SYNC
    for_rows = ROWS_MMA_SYNC if mma_sync and problem.has_block_map else ROWS
    for_keys = KEYS_MMA_SYNC if mma_sync else KEYS
    keys, owned_rows = _tile(problem, for_rows, 1)
    rows, owned_keys = _tile(problem, for_keys, 2)
    why = "fit shared memory and registers; nothing was measured"
    return BackwardChoice(
        BackwardBlocks({"BR": owned_rows, "BK": keys}, why=f"{owned_rows} rows by {keys} keys {why}"),
        BackwardBlocks({"BR": rows, "BK": owned_keys}, why=f"{rows} rows by {owned_keys} keys {why}"),
    )


def _in_spans(choice: BackwardChoice) -> BackwardChoice:
    """The consumers of a CTA own the blocks of one span of a ragged sequence."""

    def together(blocks: BackwardBlocks) -> BackwardBlocks:
        return replace(blocks, blocks={**blocks.blocks, "together": blocks.schedule.consumers})

    assert choice.rows is not None
    return replace(choice, rows=together(choice.rows), keys=together(choice.keys))


def _tile(problem: AttentionProblem, tiles: tuple[tuple[int, int], ...], sums: int) -> tuple[int, int]:
    """Rows or keys that a program of the backward pass takes at a time, and those it owns. Shared memory has two tiles
    of each, and the tile of scores twice, as operands of products; registers have the sums. Of less than 64 rows, a
    program with two sums keeps what it takes twice, in two layouts."""
    size, bytes_ = 1 << (max(16, problem.head_size) - 1).bit_length(), problem.dtype.bytes
    if bytes_ == 4:  # operands lie in registers, too
        return next((taken, owned) for most, taken, owned in FLOAT32 if size <= most)
    for taken, owned in tiles:
        copies = 2 if sums == 2 and taken < 64 else 1
        shared = 2 * bytes_ * ((copies * taken + owned) * size + taken * owned)
        if sums * owned * size <= SUMS and shared <= gpu(problem.device).shared_bytes:
            return taken, owned
    return tiles[-1]


@cache
def measured_table() -> tuple[tuple[int, BackwardChoice], ...]:
    """Sums of keys and values take twice the registers of those of queries. From 8 warps on, a warp has half of a row,
    and beyond 256 columns only one of the two sums fits."""
    two, three = Schedule(4, 2, consumers=2), Schedule(4, 2, consumers=3, registers=160)
    wide = Schedule(8, 2, consumers=1)

    def blocks(rows: int, keys: int, schedule: Schedule) -> BackwardBlocks:
        return BackwardBlocks({"BR": rows, "BK": keys}, schedule, "measured on an H200")

    return (
        (64, BackwardChoice(blocks(64, 64, three), blocks(64, 64, two))),
        (128, BackwardChoice(blocks(64, 64, two), blocks(64, 64, two))),
        (256, BackwardChoice(blocks(64, 32, two), blocks(64, 64, wide))),
        (GLUON, BackwardChoice(blocks(64, 32, wide), blocks(32, 64, wide), apart=True)),
    )
