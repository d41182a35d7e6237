"""What a program of attention owns: a block of rows of one sequence, and a part of its keys.

Sequences are batches of dense tensors, or lie one after the other along the positions of one batch, between offsets.
Then a sequence is a view of its tensors: positions count from its first token, and its end is the view's own."""

from typing import Any, NamedTuple

from monotile.language import arange, cdiv, int32, maximum, minimum, program_id, where

from . import key_sources
from .row_groups import row_block

OFFSETS_AT_ONCE = 128


def rows_and_split(q, source, queries, split_o, BR, packed):
    """This program's rows and its split. The last rows come first: under causality they see the most keys. Packed
    groups are counted by the keys, which tells the compiler that keys need no check."""
    R, groups = q.shape[2], (source.k if packed else q).shape[1]
    if split_o is None:
        b, group, n = program_id(q.shape[0], groups, cdiv(R, BR))
        s = None
    elif source.table is None:
        b, group, s, n = program_id(q.shape[0], groups, split_o.shape[3], cdiv(R, BR))
    else:  # pages hold the heads of a position together: they are read by neighbours
        b, s, group, n = program_id(q.shape[0], split_o.shape[3], groups, cdiv(R, BR))
    return row_block(b, group, cdiv(R, BR) - 1 - n, R, queries, BR, packed), s


def keys_of_split(s, Nk, first_block, blocks_per_split, BK):
    """First key and end of a split, which begins with a whole block."""
    if s is None:
        return 0, Nk
    first = minimum(maximum(first_block + s * blocks_per_split, 0), cdiv(Nk, BK))
    return first * BK, minimum((first + blocks_per_split) * BK, Nk)


class Ragged(NamedTuple):
    """The part of a program in a batch of sequences that lie one after the other: views of its sequence, and rows."""

    q: Any
    o: Any
    lse: Any
    source: Any
    own: Any  # RowBlock
    split: Any
    low: Any  # first key
    high: Any  # end of the keys


def ragged(q, k, v, o, lse, q_offsets, k_offsets, BR):
    """A block of rows of the sequence that owns it. Sequence s owns blocks from q_offsets[s] // BR + s on: as many as
    its rows need or one more, so that the number of all blocks follows from the number of rows."""
    sequences = q_offsets.shape[0] - 1
    h, slot = program_id(q.shape[1], q.shape[2] // BR + sequences)
    s = sequence_of(slot, q_offsets, sequences, BR)
    start, end = q_offsets[s], q_offsets[s + 1]
    queries, outputs = q[:, :, start:end], o[:, :, start:end]
    sums = lse[:, :, start:end] if lse is not None else None
    source = key_sources.ragged(k, v, k_offsets, s)
    Nq = queries.shape[2]
    count, n = cdiv(Nq, BR), slot - (start.astype(int32) // BR + s)
    index = where((n >= 0) & (n < count), maximum(count - 1 - n, 0), count)  # the last rows first; past them for none
    own = row_block(s, h, index, Nq, Nq, BR, False)
    return Ragged(queries, outputs, sums, source, own, None, 0, where(index < count, source.count, 0))


def sequence_of(slot, offsets, sequences, BR):
    """The last sequence whose blocks begin at `slot` or before it."""
    begun = 0
    for j in range(0, sequences, OFFSETS_AT_ONCE):
        places = j + arange(OFFSETS_AT_ONCE)
        first = offsets[places].astype(int32) // BR + places
        begun = begun + where((places < sequences) & (first <= slot), 1, 0).sum()
    return maximum(begun - 1, 0)
