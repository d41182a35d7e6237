"""Sources of keys: where the keys and values of a sequence come from. Attention asks a source for tiles and knows
nothing else of it; which source it is, is known at compile time."""

from typing import Any, NamedTuple

from monotile.language import arange, maximum, minimum


class Source(NamedTuple):
    """Keys and values of one sequence."""

    k: Any  # (batch, heads, positions, D): a tensor or a view; or pages (page, heads, positions of a page, D)
    v: Any
    count: Any  # keys of the sequence
    b: Any  # its batch
    table: Any = None  # of pages: (sequences, pages of a sequence)
    lengths: Any = None  # of pages: (sequences,)
    page: Any = None  # positions of a page
    row: Any = None  # of the table
    fields: Any = None  # CodeScales of quantised keys and values, whose codes are k and v


class CodeScales(NamedTuple):
    """Scales and zero points of quantised keys and values, (batch, heads, positions, groups)."""

    k_scales: Any
    k_zeros: Any
    v_scales: Any
    v_zeros: Any


def dense_or_paged(k, v, k_pages, v_pages, table, lengths, page, fields):
    """Keys of batches or pages; without values, they are the first columns of the keys. `of_batch` completes it. The
    fields of quantised pages are k and v: their positions are those of all pages, one page after the other."""
    keys = k if k_pages is None else k_pages
    values = v if v_pages is None else v_pages
    values = keys if values is None else values
    if table is None:
        return Source(keys, values, k.shape[2], None, fields=fields)
    return Source(keys, values, None, None, table, lengths, page, fields=fields)


def of_batch(source, b, row):
    """The source of one batch's keys, or of those in the pages of one row of the table. A length counts as far as the
    table goes."""
    if source.table is None:
        return source._replace(b=b)
    most = source.table.shape[1] * source.page
    return source._replace(b=b, row=row, count=minimum(maximum(source.lengths[row], 0), most))


def ragged(k, v, start, end, fields=None):
    """A sequence of those that lie one after the other in batch 0."""
    keys, values = k[:, :, start:end], v[:, :, start:end] if v is not None else None
    if fields is not None:
        k_scales, k_zeros, v_scales, v_zeros = fields
        k_scales, k_zeros = part_of(k_scales, start, end), part_of(k_zeros, start, end)
        fields = CodeScales(k_scales, k_zeros, part_of(v_scales, start, end), part_of(v_zeros, start, end))
    return Source(keys, keys if values is None else values, keys.shape[2], 0, fields=fields)


def part_of(field, start, end):
    """Some positions of a field, None for one that is left out."""
    return field[:, :, start:end] if field is not None else None


def keys_at(source, head, first, positions):
    """The keys at some positions, `first` and those behind it, (positions, D)."""
    if source.table is None:
        return source.k[source.b, head, positions]
    return paged_tile(source, source.k, head, first, positions, arange(source.k.shape[3]))


def values_at(source, head, first, positions, columns):
    """The values at some positions, `first` and those behind it, (positions, columns)."""
    if source.table is None:
        return source.v[source.b, head, positions, columns]
    return paged_tile(source, source.v, head, first, positions, columns)


def paged_tile(source, tensor, head, first, positions, columns):
    """Positions and columns of one head. A block that divides the page lies in one page; else each position is looked
    up, and those past the last key count as the last: their pages are never asked for."""
    page, count = tensor.shape[2], positions.shape[0]
    if page % count == 0:
        return tensor[source.table[source.row, first // page], head, first % page + arange(count), columns]
    places = minimum(positions, source.count - 1)
    pages = source.table[source.row, places // page]
    return tensor[pages[:, None], head, (places % page)[:, None], columns[None, :]]
