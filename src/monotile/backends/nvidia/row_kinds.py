"""Kinds of rows on NVIDIA GPUs: how many rows a CTA takes, and the times by which the model compares them.

Times are microseconds of 128 keys, measured on an H200 at D 128; those of other head sizes follow from the throughput
of their prefill. On other GPUs the same numbers only weigh kinds against each other."""

from __future__ import annotations

from dataclasses import replace

from ..choices import AttentionChoice, AttentionProblem, Choice, cdiv
from ..time_model import RowKind, TimeModel
from .device import gpu
from .schedule import Schedule

# By the consumers of a CTA, which have 64 rows each. At D 128 three of them have registers for blocks of 64 keys only.
BLOCK_TIME = {1: 1.10, 2: 1.55, 3: 2.15}
BLOCK_TIME_HALVED = 2.74
START_TIME = {1: 4.0, 2: 9.0, 3: 9.0}  # each consumer has code of its own, the likely cause
DEPTHS = ((64, 0.65), (128, 1.0), (256, 2.4), (576, 4.6))  # the time of a block up to a head size, relative to D 128
PLAIN_BLOCK_TIME, PLAIN_ROW_TIME, PLAIN_START = 0.6, 0.02, 3.0  # of plain Triton: a block of 128 keys, and a row of it
ROWS = (16, 32, 64, 128)  # of a program with matrix units in plain Triton
MERGE_TIME = 4.0  # with its launch
BYTES_PER_US = 4.3e6
MIN_SPLIT = 256  # keys


def model(problem: AttentionProblem) -> TimeModel:
    return TimeModel(gpu(problem.device).multiprocessors, MERGE_TIME, BYTES_PER_US, MIN_SPLIT)


def few_rows_time(problem: AttentionProblem, chosen: AttentionChoice) -> float:
    """The time of a choice for few rows, by the same model: 16 rows of `mma`, of which some are padding."""
    blocks = chosen.blocks_per_split or max(1, cdiv(problem.visible_keys, chosen.key_block))
    programs = problem.batch * problem.kv_heads * cdiv(problem.rows, chosen.row_block) * max(1, chosen.splits)
    block_time = (PLAIN_BLOCK_TIME + PLAIN_ROW_TIME * ROWS[0]) * _depth(problem) * chosen.key_block / 128
    waves = cdiv(programs, gpu(problem.device).multiprocessors) * (blocks * block_time + PLAIN_START)
    reading = problem.key_bytes / BYTES_PER_US + PLAIN_START
    return max(waves, reading) + (MERGE_TIME if chosen.splits else 0)


def kinds(problem: AttentionProblem, found: Choice) -> list[RowKind]:
    """The kinds of rows for a problem whose blocks and schedule for many rows are `found`."""
    rows, keys, schedule = found.blocks["BR"] or 0, found.blocks["BK"] or 0, found.schedule
    depth = _depth(problem)
    if schedule is None or not schedule.consumers:
        fitting = [size for size in ROWS if size <= rows] or [rows]
        return [
            RowKind(
                size, Choice({"BR": size, "BK": keys}, schedule, found.why),
                (PLAIN_BLOCK_TIME + PLAIN_ROW_TIME * size) * depth * keys / 128, PLAIN_START,
            )
            for size in fitting
        ]  # fmt: skip
    every = [(schedule, keys)]
    every += [(replace(schedule, consumers=n), keys) for n in range(1, schedule.consumers)]
    if _three_fit(problem, schedule):
        every.append((Schedule(4, 3, consumers=3, registers=160), 64))
    return [_consumers(found, scheduled, block, depth) for scheduled, block in every]


def _depth(problem: AttentionProblem) -> float:
    """The time of a block relative to that of D 128."""
    return next(factor for most, factor in DEPTHS if problem.head_size <= most)


def _three_fit(problem: AttentionProblem, schedule: Schedule) -> bool:
    """Three consumers have registers for accumulators of D 128, with blocks of 64 keys."""
    return 64 < problem.head_size <= 128 and schedule.consumers == 2 and not problem.zeroes_values


def _consumers(found: Choice, schedule: Schedule, keys: int, depth: float) -> RowKind:
    rows, consumers = found.blocks["BR"] or 0, schedule.consumers
    halved = consumers == 3 and keys == 64
    time = (BLOCK_TIME_HALVED if halved else BLOCK_TIME[consumers]) * depth * keys / 128
    choice = Choice({"BR": rows, "BK": keys}, schedule, found.why)
    return RowKind(rows * consumers, choice, time, START_TIME[consumers])
