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


def dense_rows(q, BR):
    """This program's rows of a query head; the last come first."""
    b, h, n = program_id(q.shape[0], q.shape[1], cdiv(q.shape[2], BR))
    return row_block(b, h, cdiv(q.shape[2], BR) - 1 - n, q.shape[2], q.shape[2], BR, False)


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
    """A block of rows of the sequence that owns it, with all keys."""
    own, start, end, sees = ragged_rows(q, q_offsets, BR)
    sums = lse[:, :, start:end] if lse is not None else None
    source = key_sources.ragged(k, v, k_offsets, own.b)
    high = where(sees, source.count, 0)
    return Ragged(q[:, :, start:end], o[:, :, start:end], sums, source, own, None, 0, high)


def ragged_rows(q, offsets, BR):
    """This program's rows, the last of a sequence first, the positions between which the sequence lies, and whether
    the rows see anything. Rows of a block that its sequence does not have lie past the sequence."""
    block = ragged_block(q, offsets, BR)
    index = where(block.index < block.count, block.count - 1 - block.index, block.count)
    Nq = q[:, :, block.start : block.end].shape[2]
    own = row_block(block.sequence, block.head, index, Nq, Nq, BR, False)
    return own, block.start, block.end, block.used


class RaggedBlock(NamedTuple):
    """A program's block of positions of a sequence."""

    head: Any
    sequence: Any
    index: Any  # of the block in its sequence; `count` for a block that the sequence does not have
    count: Any  # blocks of the sequence
    start: Any  # of the sequence, in the whole batch
    end: Any
    used: Any  # False for a block that the sequence does not have, and for those behind the last sequence


def ragged_block(x, offsets, size, whole=False):
    """The block of `size` positions of x (1, heads, positions, ...) that a program owns; or the first block of a
    sequence, of which it owns the `whole`. Sequence s owns blocks from offsets[s] // size + s on: as many as its
    positions need or one more, so that the number of all blocks follows from the number of positions. Positions behind
    the last sequence count as one more sequence, of which nothing is seen."""
    if whole:
        s, h = program_id(offsets.shape[0], x.shape[1])
        slot = offsets[s].astype(int32) // size + s
    else:
        h, slot = program_id(x.shape[1], x.shape[2] // size + offsets.shape[0])
        s = sequence_of(slot, offsets, size)
    start, end = key_sources.sequence_ends(offsets, s, x)
    index, count = slot - (start.astype(int32) // size + s), cdiv(x[:, :, start:end].shape[2], size)
    there = (index >= 0) & (index < count)
    used = there & (s < offsets.shape[0] - 1)
    return RaggedBlock(h, s, where(there, index, count), count, start, end, used)


def sequence_of(slot, offsets, size):
    """The last sequence whose blocks begin at `slot` or before it."""
    begun = 0
    for j in range(0, offsets.shape[0], OFFSETS_AT_ONCE):
        places = j + arange(OFFSETS_AT_ONCE)
        first = offsets[places].astype(int32) // size + places
        begun = begun + where((places < offsets.shape[0]) & (first <= slot), 1, 0).sum()
    return maximum(begun - 1, 0)
