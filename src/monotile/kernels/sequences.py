"""What a program of attention owns where the lengths of sequences are in memory.

Sequences lie one after the other along the positions of one batch, between offsets, or have their keys in pages. A
sequence between offsets is a view of its tensors: positions count from its first token, and its end is the view's
own."""

from typing import Any, NamedTuple

from monotile.language import arange, cdiv, int32, maximum, minimum, program_id, where

from . import key_sources, programs
from .balance import FIRST_BLOCK, FIRST_SLOT, PER_SPLIT, SPLITS, slot_sequence
from .programs import Part
from .row_groups import row_block

OFFSETS_AT_ONCE = 128


def part_of_program(
    q, keys, o, lse, split_o, slot_o, plan, q_offsets, queries, first_block, blocks_per_split, BR, BK, packed
):  # fmt: skip
    """The part of a program, whatever its sequences are."""
    if plan is not None:
        return planned(q, keys, q_offsets, slot_o, plan, queries, BR, BK, packed)
    if q_offsets is not None:
        return ragged(q, keys, o, lse, q_offsets, BR)
    return programs.dense(q, keys, o, lse, split_o, queries, first_block, blocks_per_split, BR, BK, packed)


def planned(q, keys, q_offsets, slot_o, plan, queries, BR, BK, packed):
    """A block of rows of a sequence and a split of its keys, by the plan of balanced splits. Heads of a position lie
    together in memory: neighbours read them."""
    slot, group = program_id(slot_o.shape[2], slot_o.shape[0])
    s = slot_sequence(slot, plan)
    splits, place = maximum(plan[SPLITS, s], 1), slot - plan[FIRST_SLOT, s]
    low, per_split = plan[FIRST_BLOCK, s] * BK, plan[PER_SPLIT, s] * BK
    if q_offsets is not None:
        start, end = key_sources.sequence_ends(q_offsets, s, q)
        heads = q.shape[1] // slot_o.shape[0]
        q, source = q[:, :, start:end], key_sources.ragged(keys.k, keys.v, keys.k_offsets, s)
        queries, count = q.shape[2], q.shape[2] * heads
        last = where(s < plan.shape[1] - 1, source.count, 0)  # rows behind the last sequence see nothing
    else:
        source = key_sources.of_batch(key_sources.dense_or_paged(*keys[:6], keys.page), s)
        count, last = q.shape[2], source.count
    own = row_block(s, group, place // splits, count, queries, BR, packed)
    low = low + place % splits * per_split
    high = where(own.index * BR < own.count, minimum(low + per_split, last), 0)
    return Part(q, None, None, source, own, slot, low, high)


def ragged(q, keys, o, lse, q_offsets, BR):
    """A block of rows of the sequence that owns it, with all keys."""
    own, start, end, sees = ragged_rows(q, q_offsets, BR)
    sums = lse[:, :, start:end] if lse is not None else None
    source = key_sources.ragged(keys.k, keys.v, keys.k_offsets, own.b)
    high = where(sees, source.count, 0)
    return Part(q[:, :, start:end], o[:, :, start:end], sums, source, own, None, 0, high)


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
