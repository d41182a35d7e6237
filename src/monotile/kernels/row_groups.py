"""Row groups: the query rows that read the same keys, and the block of them that a program owns.

Packed, a group is all rows of a KV head: those of its query heads, one head after the other. Otherwise it is the rows
of one query head."""

from typing import Any, NamedTuple

from monotile.language import arange, maximum


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
    rows = index * BR + arange(BR)
    if not packed:
        return RowBlock(b, group, index, rows, count, group, rows, count)
    Nq = maximum(queries, 1)  # which tells the compiler that positions are below it
    return RowBlock(b, group, index, rows, count, group * (count // Nq) + rows // Nq, rows % Nq, Nq)
