"""The time model: which kind of rows, and how many splits of the keys, a call of attention shall have on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .choices import AttentionChoice, AttentionProblem, Choice, cdiv

MOST_WAVES = 4  # that a call is split into: beyond, a longer one has nothing to gain


@dataclass(frozen=True)
class RowKind:
    """A way to compute rows: how many a program takes, with which blocks and schedule, and what that costs. Times have
    any unit, one for all kinds of a machine."""

    rows: int  # of a program; of all consumers of a CTA
    choice: Choice  # BR, BK and the schedule
    block_time: float  # of a block of BK keys
    start: float  # of a program, beside its blocks

    @property
    def key_block(self) -> int:
        return self.choice.blocks["BK"] or 1


@dataclass(frozen=True)
class TimeModel:
    """The time of a call, by which kinds of rows and numbers of splits are compared.

    Programs run `slots` at a time, in waves. A call takes as long as its waves, but no less than reading its keys and
    values; a split call takes a merge more."""

    slots: int
    merge: float  # of a split call
    bytes_per_time: float  # that all programs together read from memory
    least: int = 1  # keys of a split
    most_waves: int = MOST_WAVES

    def choose(self, problem: AttentionProblem, kinds: Sequence[RowKind]) -> AttentionChoice:
        """The kind and splits with the least time; of those with the same, the first."""
        found = [self._best_splits(problem, kind) for kind in kinds]
        return min(found, key=lambda choice: choice.time)

    def _best_splits(self, problem: AttentionProblem, kind: RowKind) -> AttentionChoice:
        """Numbers of splits that fill whole waves are compared."""
        packed = problem.packs(kind.rows)
        groups, rows = self.grid(problem, packed=packed)
        programs = max(1, problem.batch * groups * cdiv(rows, kind.rows))
        blocks = max(1, cdiv(problem.visible_keys, kind.key_block))
        reading = problem.key_bytes / self.bytes_per_time + kind.start
        best, least_time = blocks, max(reading, self.unsplit(problem, kind, packed=packed))
        for waves in range(1, self.most_waves + 1):
            splits = min(waves * self.slots // programs, blocks * kind.key_block // max(1, self.least))
            if splits > 1:
                per_split = cdiv(blocks, splits)
                time = self._waves(programs * cdiv(blocks, per_split), per_split, kind)
                time = max(reading, time) + self.merge
                if time < least_time:
                    best, least_time = per_split, time
        chosen = kind.choice
        words = {**chosen.blocks, "packed": packed}
        return AttentionChoice(words, chosen.schedule, chosen.why, time=least_time).divided(problem, best)

    def grid(self, problem: AttentionProblem, *, packed: bool) -> tuple[int, int]:
        """Groups of rows, and rows of each."""
        return (problem.kv_heads, problem.rows) if packed else (problem.query_heads, problem.queries)

    def unsplit(self, problem: AttentionProblem, kind: RowKind, *, packed: bool) -> float:
        """The time of a call whose keys are not split."""
        groups, rows = self.grid(problem, packed=packed)
        programs = max(1, problem.batch * groups * cdiv(rows, kind.rows))
        return self._waves(programs, max(1, cdiv(problem.visible_keys, kind.key_block)), kind)

    def _waves(self, programs: int, blocks: int, kind: RowKind) -> float:
        return cdiv(programs, self.slots) * (blocks * kind.block_time + kind.start)
