"""What a program of attention owns where the lengths of sequences are in memory.

Sequences lie one after the other along the positions of one batch, between offsets, or have their keys in pages. What
lies between offsets is a view of its tensors: positions count from the first token, and its end is the view's own.
Queries between offsets may have their keys in pages."""

from typing import Any, NamedTuple

from monotile.language import cdiv, int32, maximum, minimum, program_id, where

from . import key_sources, programs
from .balance import FIRST_BLOCK, FIRST_SLOT, PER_SPLIT, SPLITS, slot_sequence
from .programs import Part
from .row_groups import row_block
from .spans import count_of_spans, numbered, sequence_at, sequence_ends


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
    source = keys_of(keys, s if q_offsets is None else 0, s, *sequence_ends(keys.k_offsets, s, keys.k))
    if q_offsets is not None:
        start, end = sequence_ends(q_offsets, s, q)
        heads, q = q.shape[1] // slot_o.shape[0], q[:, :, start:end]
        queries, count = q.shape[2], q.shape[2] * heads
        last = where(s < plan.shape[1] - 1, source.count, 0)  # rows behind the last sequence see nothing
    else:
        count, last = q.shape[2], source.count
    own = row_block(s, group, place // splits, count, queries, BR, packed)
    low = low + place % splits * per_split
    high = where(own.index * BR < own.count, minimum(low + per_split, last), 0)
    return Part(q, None, None, source, own, slot, low, high)


def slot_rows(plan, own, BR, m, l, o):
    """The parts of a slot's state that are for rows which exist."""
    if plan is None:
        return m, l, o
    count = own.count - own.index * BR
    return m[:, :count], l[:, :count], o[:, :count]


def keys_of(keys, b, s, start, end):
    """The keys of sequence s, in batch b of the tensors: in pages, or of all sequences those from `start` to `end`."""
    if keys.k_offsets is None:
        return key_sources.of_batch(key_sources.dense_or_paged(*keys[:6], keys.page, keys.fields), b, s)
    return key_sources.ragged(keys.k, keys.v, start, end, keys.fields)


def ragged(q, keys, o, lse, q_offsets, BR):
    """A block of rows of the sequence that owns it, with all keys."""
    own, of, sees = ragged_rows(q, q_offsets, keys.k, keys.k_offsets, BR, keys.spans, keys.together)
    sums = lse[:, :, of.start : of.end] if lse is not None else None
    source = keys_of(keys, 0, of.number, of.other_start, of.other_end)
    high = where(sees, source.count, 0)
    return Part(q[:, :, of.start : of.end], o[:, :, of.start : of.end], sums, source, own, None, 0, high)


def ragged_rows(q, offsets, k, k_offsets, BR, spans, together):
    """This program's rows, the last of a sequence first, the sequence, and whether the rows see anything. Rows of a
    block that its sequence does not have lie past the sequence."""
    block = ragged_block(q, offsets, k, k_offsets, BR, spans, together)
    of = block.sequence
    span = where(block.span < block.count, block.count - 1 - block.span, block.count)
    Nq = q[:, :, of.start : of.end].shape[2]
    own = row_block(of.number, block.head, span * together + block.place, Nq, Nq, BR, False)
    return own, of, block.used & (own.index * BR < Nq)


class RaggedBlock(NamedTuple):
    """A program's block of positions of a sequence."""

    head: Any
    sequence: Any  # Sequence
    span: Any  # of its sequence, in which the block lies; `count` for one that the sequence does not have
    place: Any  # of the block in the span
    count: Any  # spans of the sequence
    used: Any  # False for a block of a span that the sequence does not have, and for those behind the last sequence


def ragged_block(x, offsets, other, other_offsets, size, spans=None, together=1, whole=False):
    """The block of `size` positions of x (1, heads, positions, ...) that a program owns: one of the `together` blocks
    of a span (spans.py). Or the first block of a sequence, of which it owns the `whole`."""
    length = size * together
    if whole:
        s, h = program_id(offsets.shape[0], x.shape[1])
        of, place = numbered(s, x, offsets, other, other_offsets), 0
        span = of.start.astype(int32) // length + s
    else:
        h, n = program_id(x.shape[1], count_of_spans(x.shape[2], offsets.shape[0] - 1, length) * together)
        span, place = n // together, n % together
        of = sequence_at(span, spans, x, offsets, other, other_offsets, length)
    index = span - (of.start.astype(int32) // length + of.number)
    count = cdiv(x[:, :, of.start : of.end].shape[2], length)
    there = (index >= 0) & (index < count)
    used = there & (of.number < offsets.shape[0] - 1)
    return RaggedBlock(h, of, where(there, index, count), place, count, used)
