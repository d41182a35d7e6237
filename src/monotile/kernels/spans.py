"""Spans: which sequence the programs of a ragged call belong to.

Sequences lie one after the other, between offsets in memory. Each is cut into spans of one number of positions, and
every program owns a block of positions in one of them. Sequence s has spans from offsets[s] // size + s on: as many as
its positions need or one more, so that the number of all spans follows from the number of positions. A program can look
for its sequence among the offsets, or `sequence_spans` does that before the launch: then what a program reads is the
same for all programs of a span, as the compiler can see."""

from typing import Any, NamedTuple

from monotile.language import Const, Tensor, arange, int32, kernel, maximum, minimum, program_id, where

AT_ONCE = 128  # offsets that a program looks at
SPANS = 32  # of a program that writes the table
SEQUENCE, START, END, OTHER_START, OTHER_END = range(5)  # rows of the table
FIELDS = 5


class Sequence(NamedTuple):
    """A sequence, and where it lies along its own positions and along those of the other side (keys of queries)."""

    number: Any  # that of all sequences: positions behind the last sequence
    start: Any
    end: Any
    other_start: Any
    other_end: Any


@kernel
def sequence_spans(
    spans: Tensor["F U"], offsets: Tensor["E"], other_offsets: Tensor["E"], total: int, other_total: int, *, size: Const
):
    """Write the sequence of every span of `size` positions. `total`: positions of all sequences."""
    n = program_id((spans.shape[1] + (SPANS - 1)) // SPANS)
    own, begun = n * SPANS + arange(SPANS), 0 * arange(SPANS)
    for j in range(0, offsets.shape[0], AT_ONCE):
        places = j + arange(AT_ONCE)
        first = offsets[places].astype(int32) // size + places
        started = (places < offsets.shape[0])[None, :] & (first[None, :] <= own[:, None])
        begun = begun + where(started, 1, 0).sum(axis=1)
    s = maximum(begun - 1, 0)
    spans[SEQUENCE, own] = s
    spans[START, own], spans[END, own] = ends(offsets, s, total)
    spans[OTHER_START, own], spans[OTHER_END, own] = ends(other_offsets, s, other_total)


def ends(offsets, s, total):
    """Where sequences begin and end; what is behind the last counts as one more."""
    last = offsets.shape[0] - 1
    start, end = offsets[s], where(s < last, offsets[minimum(s + 1, last)], total)
    return minimum(maximum(start, 0), total).astype(int32), minimum(maximum(end, 0), total).astype(int32)


def count_of_spans(positions: Any, sequences: Any, size: Any) -> Any:
    """Spans of all sequences, and of the positions behind the last."""
    return positions // size + sequences + 1


def sequence_at(span, spans, x, offsets, other, other_offsets, size):
    """The sequence of a span along the positions of x (1, heads, positions, ...): from the table, or by a search."""
    if spans is not None:
        start, end = spans[START, span], spans[END, span]
        return Sequence(spans[SEQUENCE, span], start, end, spans[OTHER_START, span], spans[OTHER_END, span])
    begun = 0
    for j in range(0, offsets.shape[0], AT_ONCE):
        places = j + arange(AT_ONCE)
        first = offsets[places].astype(int32) // size + places
        begun = begun + where((places < offsets.shape[0]) & (first <= span), 1, 0).sum()
    return numbered(maximum(begun - 1, 0), x, offsets, other, other_offsets)


def numbered(s, x, offsets, other, other_offsets):
    """Sequence s."""
    return Sequence(s, *sequence_ends(offsets, s, x), *sequence_ends(other_offsets, s, other))


def sequence_ends(offsets, s, x):
    """Where sequence s of x (1, heads, positions, ...) begins and ends; what is behind the last counts as one more.
    None where there are no offsets."""
    if offsets is None:
        return None, None
    last = offsets.shape[0] - 1
    return offsets[s], where(s < last, offsets[minimum(s + 1, last)], x.shape[2])
