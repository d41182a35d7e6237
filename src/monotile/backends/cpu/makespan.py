"""The time of programs of unequal length: rows of causal attention see the more keys the later they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..choices import AttentionProblem, cdiv
from ..time_model import RowKind, TimeModel

_ROUNDS = 32  # programs of a thread from which on their sum is the time, within a few percent
_BLOCKS = 32  # that are looked at, of as many as there may be


class _Seen(NamedTuple):
    """The keys that a row sees by its position."""

    first: int
    end: int


class CpuTimeModel(TimeModel):
    """The time model of a CPU, whose threads take programs one by one, the longest first."""

    def unsplit(self, problem: AttentionProblem, kind: RowKind, *, packed: bool) -> float:
        groups, rows = self.grid(problem, packed=packed)
        alike = max(1, cdiv(cdiv(rows, kind.rows), _BLOCKS))  # neighbours that count as one, as long as the middle one
        blocks = range(alike // 2 * kind.rows, max(1, rows), alike * kind.rows)
        times = [self._block(problem, kind, first, min(first + kind.rows, rows), packed=packed) for first in blocks]
        return makespan(sorted(times, reverse=True), problem.batch * groups * alike, self.slots)

    def _block(self, problem: AttentionProblem, kind: RowKind, first: int, end: int, *, packed: bool) -> float:
        """Time of the program with rows `first` to `end`: half the keys of a block on the diagonal are skipped."""
        if packed or not problem.has_positions:
            return kind.start + kind.block_time * cdiv(problem.visible_keys, kind.key_block)
        seen = [_seen(problem, first), _seen(problem, end - 1)]
        keys = sum(max(0, row.end - row.first) for row in seen) / 2
        return kind.start + kind.block_time * keys / kind.key_block * (end - first) / kind.rows


def makespan(times: Sequence[float], copies: int, slots: int) -> float:
    """Return the least time in which `slots` threads can run programs, `copies` of each of some times, the longest
    given first. No thread can do better than the average; and of the first k * slots + 1 programs some thread runs
    k + 1, which take at least as long as the shortest of them."""
    programs = len(times) * copies
    least = max(times[0], sum(times) * copies / slots)
    for k in range(1, min(_ROUNDS, (programs - 1) // slots) + 1):
        least = max(least, sum(times[(k * slots - n) // copies] for n in range(k + 1)))
    return least


def _seen(problem: AttentionProblem, row: int) -> _Seen:
    shift, first, end = problem.keys - problem.queries, 0, problem.keys
    if problem.causal == "upper_left":
        end = min(end, row + 1)
    elif problem.causal is not None:
        end = min(end, row + shift + 1)
    if problem.right is not None:
        end = min(end, row + shift + problem.right + 1)
    if problem.left is not None:
        first = max(0, row + shift - problem.left)
    return _Seen(first, end)
