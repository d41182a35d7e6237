"""The part of its keys that a program reads, where it looks before what is visible: by a block map or a mask_mod."""

from monotile.language import arange, blocks, cdiv, maximum, minimum, where

from .visibility import HIDDEN, RANGE, by_position, case_by_mod


def part_to_read(options, block_map, own, at, s, split_o, Nk, low, high, BK, glance, by_mod):
    """First key and end of what a program reads of the keys from `low` to `high`, where it looks before."""
    if glance:
        low, high = part_of_visible(block_map, own, s, split_o, Nk, BK, glance)
    if by_mod == RANGE:
        low, high = visible_range(options, at, low, high, BK)
    return low, high


def part_of_visible(block_map, own, s, split_o, Nk, BK, glance):
    """First key and end of split s, or of all where keys are not split, of the blocks between the first and the last
    that some row sees."""
    first, end, blocks = cdiv(Nk, BK), 0, cdiv(Nk, BK)
    for j in range(0, blocks, glance):
        places = j + arange(glance)
        shown = (block_map[own.b, own.group, own.index, places] != HIDDEN) & (places < blocks)
        first = minimum(first, where(shown, places, blocks).min(axis=0))
        end = maximum(end, where(shown, places + 1, 0).max(axis=0))
    each = maximum(end - first, 0) if split_o is None else cdiv(maximum(end - first, 0), split_o.shape[3])
    low = maximum(first if split_o is None else first + s * each, 0)
    return low * BK, minimum(minimum(low + each, end) * BK, Nk)


def visible_range(options, at, low, high, BK):
    """First key and end of the blocks from `low` to `high` between the first and the last that the mask_mod shows to
    some row. What lies between them is read, in a loop without branches."""
    first, end = high, minimum(low, high)
    for j in blocks(high, BK, lambda cols: by_position(options, at(cols)), start=low):
        shown = case_by_mod(options, at(j + arange(BK))) != HIDDEN
        first = minimum(first, where(shown, j, high))
        end = where(shown, minimum(j + BK, high), end)
    return first, end
