"""Block sizes and schedules of attention that were measured on an H200 (sm_90, 16-bit elements), by head size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..choices import Choice
from .schedule import Schedule

Table = tuple[tuple[int, Choice], ...]  # choices up to a head size

# Beyond 512 the output's columns are shared out to 8 warps. Values that lie in the keys leave room for two stages.
IN_KEYS = Choice({"BR": 64, "BK": 64}, Schedule(8, 2, consumers=1), "measured on an H200; values lie in the keys")
APART = Choice(
    {"BR": 64, "BK": 64}, Schedule(8, 1, consumers=1, edge_stages=1), "one stage of keys and values fits shared memory"
)
APART_WIDE = Choice({"BR": 64, "BK": 32}, Schedule(8, 1, consumers=1, edge_stages=1), "32 keys fit shared memory")
SHORT_PLAIN = Choice({"BR": 64, "BK": 64}, Schedule(4, 3), "measured on an H200, small CTAs for few keys")
SHORT_PAIRED = Choice(
    {"BR": 64, "BK": 64, "packed": False},
    Schedule(4, 2, consumers=1, registers=232, edge_stages=1, max_registers=128),
    "measured on an H200, two CTAs on a multiprocessor for few keys",
)
PERSISTENT_PAIR = Schedule(4, 3, consumers=2, registers=232, persistent=True, edge_stages=1)
SHORT_HALVED = Choice(
    {"BR": 64, "BK": 64, "packed": False},
    PERSISTENT_PAIR,
    "measured on an H200, persistent CTAs for few keys",
)


@cache
def forward_table(persistent: bool, narrow: bool = False, long: bool = False) -> Table:
    """`narrow`: two consumers at D 64; `long`: edges overlap at D 128."""
    why = "measured on an H200" + (", persistent CTAs for few keys or softcap" if persistent else "")
    wide_edges = 0 if persistent else 1  # less code: up to a tenth of a short call
    three = Schedule(4, 3, consumers=3, registers=160, persistent=True)
    return (
        (64, Choice({"BR": 64, "BK": 128}, PERSISTENT_PAIR if narrow else three, why)),
        (
            128,
            Choice(
                {"BR": 64, "BK": 128},
                Schedule(4, 2, consumers=2, registers=232, persistent=persistent, edge_stages=0 if long else 1),
                why,
            ),
        ),
        (
            192,
            Choice(
                {"BR": 64, "BK": 64},
                Schedule(4, 3, consumers=2, persistent=persistent, edge_stages=wide_edges),
                why,
            ),
        ),
        (256, Choice({"BR": 64, "BK": 64}, Schedule(4, 2, consumers=2, edge_stages=wide_edges), why)),
        (512, Choice({"BR": 64, "BK": 64}, Schedule(8, 1, consumers=1, edge_stages=wide_edges), why)),
    )


@cache
def zeroing_table(masked: bool, near: bool = False) -> Table:
    """For kernels that zero values in a copy of the tile, which takes shared memory. With a mask's tile three consumers
    of D 64 have too few registers. `near`: rows see few keys."""
    why = "measured on an H200, with shared memory for a copy of V in which hidden keys are zeroed"
    three, two = Schedule(4, 3, consumers=3, registers=152), Schedule(4, 3, consumers=2, registers=240)
    pair = Schedule(4, 2, consumers=2, registers=240 if masked else 232, edge_stages=1)
    halved = Choice({"BR": 64, "BK": 64}, PERSISTENT_PAIR, why)
    return (
        (64, Choice({"BR": 64, "BK": 128}, two if masked else three, why)),
        (128, halved if near else Choice({"BR": 64, "BK": 128}, pair, why)),
        (256, Choice({"BR": 64, "BK": 32}, Schedule(4, 2, consumers=2, registers=232), why)),
        (512, Choice({"BR": 64, "BK": 32}, Schedule(8, 1, consumers=1), why)),
        (576, Choice({"BR": 64, "BK": 32}, Schedule(8, 1, consumers=1), "fits shared memory")),
    )


@cache
def cache_table(stages: int) -> Table:
    """Large blocks for pages, in 2 stages, and codes, in 3: pages of 16, 64 and 256 positions are read at 0.91, 0.93
    and 0.97 of the rate of dense keys, where 64 keys in 3 stages have 0.77, 0.88 and 0.85."""
    schedule = Schedule(4, stages, edge_stages=1, triggers_dependents=True)
    why = "measured on an H200 at D 128"
    return (
        (128, Choice({"BK": 128}, schedule, why)),
        (256, Choice({"BK": 64}, schedule, why)),
        (512, Choice({"BK": 32}, schedule, why)),
    )


@cache
def decode_table(unsplit: bool, single: bool = False) -> Table:
    """Two warps are enough for a single row. Edges that are not pipelined make the code shorter, which counts where
    CTAs are short. They also take less shared memory, so that three CTAs fit a multiprocessor; many long ones are
    better taken two by two."""
    why = "measured on an H200" + (", keys unsplit since there are many heads" if unsplit else "")
    schedule = Schedule(4, 3, edge_stages=0 if unsplit else 1, triggers_dependents=True)
    narrow = replace(schedule, num_warps=2) if single else schedule
    return (
        (64, Choice({"BK": 64 if single else 128}, narrow, why)),
        (128, Choice({"BK": 64}, narrow, why)),
        (512, Choice({"BK": 32}, schedule, why)),
    )


def up_to(head_size: int, table: Table) -> Choice | None:
    return next((choice for most, choice in table if head_size <= most), None)
