"""Balanced splits: work of like size for all programs, whatever the lengths of sequences.

Lengths are in memory, and the grid of a launch must be known before. `balance` divides the visible keys of each
sequence into splits of one size, chosen so that all splits fit a number of slots that the host knows; attention runs a
program for each slot, and `merge_slots` combines the states of a row. docs/internals/rows_and_splits.md has the bound.
"""

from typing import Any, NamedTuple

from monotile.language import Const, Tensor, arange, float32, int32, kernel, maximum, minimum, program_id, where

SEQUENCES = 64  # taken at once
# Rows of a plan, each of which has a number for each sequence.
FIRST_SLOT, FIRST_BLOCK, SPLITS, PER_SPLIT = 0, 1, 2, 3
MARGIN = 1.00001  # of a quotient in float32


@kernel
def balance(
    plan: Tensor["F S"], q_offsets: Tensor["S"], k_offsets: Tensor["S"], lengths: Tensor["B"],
    heads: int, queries: int, keys: int, wanted: int, least: int, *, options: Const, BR: Const, BK: Const,
):  # fmt: skip
    """One program plans all sequences: the first slot, the first block of keys and the splits of each, and the blocks
    of a split. Rows and keys of a sequence follow from offsets into `queries` and `keys` positions. Without offsets it
    has `queries` queries, and as many keys as `lengths` says, `keys` at most. A group has rows of `heads` query heads.
    Work in blocks of rows times blocks of keys is divided into about `wanted` parts, each of `least` blocks or more."""
    only = program_id(1)
    work = 0.0
    for first in range(only, plan.shape[1], SEQUENCES):
        of = sequences_at(first, plan, q_offsets, k_offsets, lengths, heads, queries, keys, options, BR, BK)
        work = work + (of.row_blocks.astype(float32) * of.key_blocks.astype(float32)).sum()
    per_split = maximum((work * (MARGIN / wanted)).astype(int32) + 1, least)
    slots = 0
    for first in range(only, plan.shape[1], SEQUENCES):
        of = sequences_at(first, plan, q_offsets, k_offsets, lengths, heads, queries, keys, options, BR, BK)
        splits = maximum(blocks_of(of.key_blocks, per_split), 1)
        used, span = of.row_blocks * splits, first + arange(SEQUENCES)
        plan[FIRST_SLOT, span], plan[FIRST_BLOCK, span] = slots + used.cumsum(axis=0) - used, of.first_block
        plan[SPLITS, span], plan[PER_SPLIT, span] = splits, per_split + 0 * splits
        slots = slots + used.sum()


class Sequences(NamedTuple):
    """Some sequences, each with its blocks of rows and of visible keys."""

    row_blocks: Any
    first_block: Any  # of the visible keys
    key_blocks: Any


def sequences_at(first, plan, q_offsets, k_offsets, lengths, heads, queries, keys, options, BR, BK):
    """The sequences from `first` on; none past the last."""
    places = first + arange(SEQUENCES)
    last = plan.shape[1] - 1
    Nq = length_at(q_offsets, places, queries) if q_offsets is not None else queries
    Nk = length_at(k_offsets, places, keys) if lengths is None else minimum(maximum(lengths[places], 0), keys)
    if q_offsets is not None:
        Nk = where(places < last, Nk, 0)  # nothing is behind the last sequence
    low, end = 0 * Nk, Nk
    if options.left is not None:
        low = maximum(Nk - Nq - options.left, 0)
    if options.causal == "upper_left":
        end = minimum(end, Nq)
    row_blocks = where(places <= last, blocks_of(Nq * heads, BR), 0)
    return Sequences(row_blocks, low // BK, maximum(blocks_of(end, BK) - low // BK, 0))


def blocks_of(count, size):
    return (count + (size - 1)) // size


def length_at(offsets, places, total):
    """Positions between an offset and the next, of `total`; behind the last offset lies the rest."""
    last = offsets.shape[0] - 1
    start = minimum(maximum(offsets[places], 0), total).astype(int32)
    end = minimum(maximum(offsets[minimum(places + 1, last)], 0), total).astype(int32)
    return maximum(where(places < last, end, total) - start, 0)


def slot_sequence(slot, plan):
    """The last sequence whose slots begin at `slot` or before it."""
    begun = 0
    for j in range(0, plan.shape[1], SEQUENCES):
        places = j + arange(SEQUENCES)
        begun = begun + where((places < plan.shape[1]) & (plan[FIRST_SLOT, places] <= slot), 1, 0).sum()
    return maximum(begun - 1, 0)
