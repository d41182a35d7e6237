"""Who needs which keys, and what is computed with them: everything about a call that follows from positions alone.

Each span of a rank's queries sees one span of positions of the keys (`Sight.keys`): causality, windows and packed
documents bound it. Only keys in some span of the receiver are sent. The scores of a span of queries with keys at hand
are one call of attention (a `ScorePiece`), in which causality and windows are aligned with the last query and the last
key, so that no piece needs an offset and all pieces share their programs."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import BadOption
from .layouts import Rows, RowSpan, joined, part


class Sight(NamedTuple):
    """Which keys a query sees by position."""

    length: int
    causal: bool = False
    left: int | None = None  # keys before a query that it sees, None for all
    right: int | None = None
    documents: tuple[int, ...] | None = None  # first positions of packed documents, and the end of the last

    @property
    def windowed(self) -> bool:
        return self.left is not None or (self.right is not None and not self.causal)

    def keys(self, queries: RowSpan) -> RowSpan:
        """The span of keys that some query of a span sees."""
        if not queries.length:
            return RowSpan(queries.start, queries.start)
        start, stop = 0, queries.stop if self.causal else self.length
        if self.left is not None:
            start = max(start, queries.start - self.left)
        if self.right is not None:
            stop = min(stop, queries.stop + self.right)
        if self.documents is not None:
            start = max(start, self.documents[bisect_right(self.documents, queries.start) - 1])
            stop = min(stop, self.documents[bisect_right(self.documents, queries.stop - 1)])
        return RowSpan(start, stop)


class ScorePiece(NamedTuple):
    """Rows of the queries at hand with rows of the keys at hand, and the options of position of that call."""

    queries: RowSpan
    keys: RowSpan
    causal: bool = False
    window: tuple[int | None, int | None] | None = None


class RankSchedule:
    """The parts of one rank's call."""

    def __init__(self, sight: Sight, ranks: int, rank: int, layout: str) -> None:
        self.sight, self.ranks, self.rank, self.layout = sight, ranks, rank, layout
        self.own = part(sight.length, ranks, rank, layout)

    @cached_property
    def needed(self) -> Rows:
        """The positions of all keys that this rank's queries see."""
        return joined([self.sight.keys(span) for span in self.own.spans])

    def received(self, source: int) -> Rows:
        """The positions that a rank sends to this one."""
        return part(self.sight.length, self.ranks, source, self.layout).within(self.needed)

    def sent(self, target: int) -> Rows:
        return schedule(self.sight, self.ranks, target, self.layout).received(self.rank)

    def pieces(self, rows: Rows) -> list[ScorePiece]:
        """The calls of attention with keys at hand, whose positions are `rows`."""
        found: list[ScorePiece] = []
        for span in self.own.spans:
            visible = self.sight.keys(span)
            keys = rows.find(visible)
            if not keys.length or not span.length:
                continue
            piece = ScorePiece(self.own.find(span), keys, *self._options(span, visible, rows))
            last = found[-1] if found else None
            if last is not None and last[1:] == piece[1:] == (keys, False, None):
                found[-1] = last._replace(queries=RowSpan(last.queries.start, piece.queries.stop))
            else:
                found.append(piece)
        return found

    def _options(
        self, queries: RowSpan, keys: RowSpan, rows: Rows
    ) -> tuple[bool, tuple[int | None, int | None] | None]:
        """Causality where it hides some of the keys at hand, and the window. Both count from the last query and the
        last key, which is the last that the last query sees; with a window all keys of the span are at hand."""
        causal = self.sight.causal and rows.find(RowSpan(queries.start, keys.stop)).length > 0
        if not self.sight.windowed:
            return causal, None
        left, right, beyond = self.sight.left, self.sight.right, keys.stop - queries.stop
        bounded = right is not None and not self.sight.causal
        return causal, (
            None if left is None else left + beyond,
            right - beyond if bounded and right is not None else None,
        )

    def pairs(self) -> int:
        """Scores that this rank computes, without those that causality and windows hide."""
        return sum(self._pairs(span) for span in self.own.spans)

    def _pairs(self, span: RowSpan) -> int:
        sight = self.sight
        if sight.windowed or sight.documents is not None:
            return sum(sight.keys(RowSpan(i, i + 1)).length for i in range(*span))
        if sight.causal:
            return span.length * (span.start + span.stop + 1) // 2
        return span.length * sight.length


@lru_cache(4096)
def schedule(sight: Sight, ranks: int, rank: int, layout: str) -> RankSchedule:
    return RankSchedule(sight, ranks, rank, layout)


def read_documents(documents: Any, length: int) -> tuple[int, ...] | None:
    """First positions of packed documents with the end of the last, from 0 to the length."""
    if documents is None:
        return None
    found = tuple(int(n) for n in documents)
    ascending = all(a < b for a, b in pairwise(found))
    if len(found) < 2 or found[0] != 0 or found[-1] != length or not ascending:
        shown = f"{found[:3]} ... {found[-1:]}" if len(found) > 6 else found
        raise BadOption(f"documents are ascending positions from 0 to the length {length}, found {shown}")
    return found
