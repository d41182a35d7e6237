"""Codecs: how a tile of stored fields becomes a tile of numbers. A codec is a compile-time constant of the attention
kernel; keys and values have one each, and None is plain numbers.

A number is its code times a scale that it shares with its group. If a row is one group, its scale stays outside: keys
multiply their products by it, values their weights."""

from typing import Any, NamedTuple

from monotile.language import arange, dot, float16, float32, int32, minimum, where

from .key_sources import keys_at, values_at


class Codec(NamedTuple):
    """A format of numbers for rows of one size."""

    kind: str  # integers, nibbles, fp8 or aura
    size: int  # numbers of a row
    group: int  # numbers that share a scale
    bits: int = 8
    zeros: bool = False  # a code of its group is the zero point
    levels: Any = ()  # of aura: the numbers that codes stand for


def products(codec, Q, source, g, first, cols):
    """Queries times the keys at `cols`, `first` and those behind it."""
    if codec is None:
        return dot(Q, keys_at(source, g, first, cols).T)
    rows, of = places(source, source.k, first, cols), source.fields
    K, factor = tile(codec, source.k, of.k_scales, of.k_zeros, source.b, g, rows, Q.dtype, factors=True)
    return dot(Q, K.T) if factor is None else dot(Q, K.T) * factor[None, :]


def values(codec, dtype, source, g, first, cols, Dv):
    """The values at `cols`, and the factor of each that its weight is to be multiplied by, or None."""
    if codec is None:
        return values_at(source, g, first, cols, arange(Dv)), None
    factors = dtype != float16  # in which weights times scales may be too small to be numbers
    rows, of = places(source, source.v, first, cols), source.fields
    return tile(codec, source.v, of.v_scales, of.v_zeros, source.b, g, rows, dtype, factors)


def places(source, stored, first, positions):
    """Where the fields of quantised keys at some positions are, `first` and those behind it. `stored` are their
    codes."""
    if source.table is None:
        return positions
    page, count = source.page, positions.shape[0]
    if page % count == 0:
        return page_start(source, stored, first // page) + first % page + arange(count)
    known = minimum(positions, source.count - 1)
    return page_start(source, stored, known // page) + known % page


def page_start(source, stored, n):
    """Where page n of the sequence begins among the positions of all pages. An entry of the table that is no page
    counts as -1, before the first position: its product with the page could wrap to another page."""
    entry = source.table[source.row, n]
    return where((entry >= 0) & (entry < stored.shape[2] // source.page), entry, -1) * source.page


def tile(codec, stored, scales, zeros, b, g, cols, dtype, factors):
    """The numbers of some rows, and the factor of each row that they lack, or None. Without `factors` there is none."""
    columns = arange(codec.size)
    numbers = codes(codec, stored, b, g, cols, columns)
    if codec.group == codec.size:
        if codec.zeros:
            numbers = numbers - zeros[b, g, cols, arange(1)].astype(int32)
        if factors:
            return numbers.astype(dtype), scales[b, g, cols, 0]
        return (numbers.astype(float32) * scales[b, g, cols, arange(1)]).astype(dtype), None
    rows, groups = cols[:, None], (columns // codec.group)[None, :]
    if codec.zeros:
        numbers = numbers - zeros[b, g, rows, groups].astype(int32)
    return (numbers.astype(float32) * scales[b, g, rows, groups]).astype(dtype), None


def codes(codec, stored, b, g, cols, columns):
    """Codes as numbers, of which a row's or group's scale makes its own."""
    if codec.kind == "integers" or codec.kind == "fp8":
        return stored[b, g, cols, columns]
    if codec.kind == "nibbles":  # the even columns are the lower ones
        pairs = stored[b, g, cols[:, None], (columns // 2)[None, :]]
        nibbles = (pairs >> (columns % 2 * 4)[None, :]) & 15
        return nibbles if codec.zeros else nibbles - 8
    return codec.levels[words(codec, stored, b, g, cols, columns)]


def words(codec, stored, b, g, cols, columns):
    """Codes packed into words of 32 bits, from the lowest bit up; where 32 is no multiple, some lie in two words."""
    first = columns * codec.bits
    last, shift = first + (codec.bits - 1), (first % 32)[None, :]
    found = stored[b, g, cols[:, None], (first // 32)[None, :]] >> shift
    if 32 % codec.bits:
        found = found | (stored[b, g, cols[:, None], (last // 32)[None, :]] << (32 - shift))
    return (found & (2**codec.bits - 1)).astype(int32)
