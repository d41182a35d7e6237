"""What a program of attention owns: a block of rows of one sequence, and a part of its keys.

Sequences are batches of dense tensors here; sequences.py has those whose lengths are in memory."""

from typing import Any, NamedTuple

from monotile.language import cdiv, maximum, minimum, program_id

from . import key_sources
from .row_groups import row_block


def rows_and_split(q, source, queries, split_o, BR, packed):
    """This program's rows and its split. The last rows come first: under causality they see the most keys. Packed
    groups are counted by the keys, which tells the compiler that keys need no check."""
    R, groups = q.shape[2], (source.k if packed else q).shape[1]
    if split_o is None:
        b, group, n = program_id(q.shape[0], groups, cdiv(R, BR))
        s = None
    else:
        b, group, s, n = program_id(q.shape[0], groups, split_o.shape[3], cdiv(R, BR))
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


class KeyTensors(NamedTuple):
    """The tensors that keys and values come from; those of other sources are None."""

    k: Any
    v: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    lengths: Any
    k_offsets: Any
    page: Any  # positions of a page
    spans: Any  # of ragged sequences (spans.py), and the programs that share one
    together: Any
    fields: Any  # of quantised keys and values: key_sources.CodeScales


class Part(NamedTuple):
    """What a program owns, and the tensors of its sequence."""

    q: Any
    o: Any
    lse: Any
    source: Any
    own: Any  # RowBlock
    split: Any  # or slot
    low: Any  # first key
    high: Any  # end of the keys


def dense(q, keys, o, lse, split_o, queries, first_block, blocks_per_split, BR, BK, packed):
    """A block of rows of a batch, with all keys or a split of them."""
    source = key_sources.dense_or_paged(*keys[:6], keys.page, keys.fields)
    own, s = rows_and_split(q, source, queries, split_o, BR, packed)
    source = key_sources.of_batch(source, own.b, own.b)
    return Part(q, o, lse, source, own, s, *keys_of_split(s, source.count, first_block, blocks_per_split, BK))
