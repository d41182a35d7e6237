"""Row groups: the query rows that read the same keys, and the block of them that a program owns.

Packed, a group is all rows of a KV head: those of its query heads, one head after the other. Otherwise it is the rows
of one query head."""

from typing import Any, NamedTuple

from monotile.language import arange, maximum, minimum


class RowBlock(NamedTuple):
    """The rows of a program."""

    b: Any
    group: Any
    index: Any  # of this block among those of its group
    rows: Any  # (BR,) of the group; the last may lie past its end
    count: Any  # rows of the group
    head: Any  # query head: a scalar, or (BR,) where rows are packed
    queries: Any  # (BR,) positions among the queries
    Nq: Any


def row_block(b, group, index, count, queries, BR, packed):
    """Block `index` of BR rows, of a group of `count` rows; packed, `queries` of each query head."""
    return block_of(b, group, index, index * BR + arange(BR), count, queries, packed)


def block_of(b, group, index, rows, count, queries, packed):
    """The same with these rows."""
    if not packed:
        return RowBlock(b, group, index, rows, count, group, rows, count)
    Nq = maximum(queries, 1)  # which tells the compiler that positions are below it
    return RowBlock(b, group, index, rows, count, group * (count // Nq) + rows // Nq, rows % Nq, Nq)


def with_last_repeated(own, packed):
    """The block with the last row of the group in place of those past it."""
    rows = maximum(minimum(own.rows, own.count - 1), 0)
    return block_of(own.b, own.group, own.index, rows, own.count, own.Nq, packed)
