"""Visibility: which keys a query sees, for a tile of scores and for whole blocks of a mask.

A key is visible to a query by position (causal, window), by the mask and by mask_mod together. A key that no row sees
must not reach a sum, not even as 0 * NaN: `visible_keys` says which values may be read at all."""

from typing import Any, NamedTuple

from monotile.language import arange, bool_, elementwise, float32, inf, int32, minimum, where

# Block cases, as a block map holds them: by mask and mask_mod, nothing of a block is visible (HIDDEN), or
HIDDEN = 0
PARTIAL = 1  # something is hidden or biased
FULL = 2  # everything is visible and nothing is biased
COVERED = 3  # PARTIAL, and every key is visible to some row: of the block, or without positions of the row group
# What a mask_mod tells before keys are read, where there is no map: the case of each block, or where visible ones lie.
CASES, RANGE = "cases", "range"


class Place(NamedTuple):
    """The scores that a tile holds. It may reach past the last row and past the last key."""

    b: Any
    h: Any  # query head: a scalar, or (rows, 1)
    i: Any  # (rows, 1) positions of queries
    keys: Any  # (columns,) positions of keys
    Nq: Any
    Nk: Any
    inside: Any  # (rows, 1) True for rows that exist
    ends: bool  # keys past the last one are hidden; not needed where nothing of such a key is kept


def place_of(own, keys, Nk, packed, ends=True):
    """The scores of a program's rows with some keys."""
    head = own.head[:, None] if packed else own.head
    return Place(own.b, head, own.queries[:, None], keys, own.Nq, Nk, own.rows[:, None] < own.count, ends)


def is_additive(mask):
    """True for a mask that is added to the scores, False for none and for a bool mask."""
    return mask is not None and mask.dtype != bool_


def has_positions(options) -> bool:
    """True if causality or a window hides keys by position."""
    return not (options.causal is options.left is options.right is None)


def by_position(options, at):
    """Visibility by position alone, (rows, columns). The compiler decides it for whole blocks of keys."""
    i, j, shift = at.i, at.keys[None, :], at.Nk - at.Nq
    seen = j < at.Nk if at.ends else True
    if options.causal == "lower_right":
        seen = seen & (j <= i + shift)
    if options.causal == "upper_left":
        seen = seen & (j <= i) & (j < at.Nq)  # from Nq on only rows past the last one would see
    if options.left is not None:
        seen = seen & (j >= i + (shift - options.left))
    if options.right is not None:
        seen = seen & (j <= i + (shift + options.right))
    return seen


def visible(options, at, mask, case):
    """Visibility of each key to each row: by position, mask (an additive one hides with -inf) and mask_mod, which hide
    nothing in a FULL block."""
    seen = by_position(options, at)
    if mask is not None:
        seen = seen & (mask.astype(float32) != -inf if is_additive(mask) else mask)
    if options.mask_mod is not None and case != FULL:
        seen = seen & elementwise(options.mask_mod)(at.b, at.h, at.i, at.keys[None, :])
    return seen


def block_case(options, block_map, own, at, j, BK, by_mod):
    """The case of the block from key j on: by its map, or found by the mask_mod; None where neither is asked for."""
    if block_map is not None:
        return block_map[own.b, own.group, own.index, j // BK]
    return case_by_mod(options, at(j + arange(BK))) if by_mod == CASES else None


def case_by_mod(options, at):
    """The case of a block by mask_mod and positions, before keys or values are read. PARTIAL where it reaches past the
    last key. Rows past the last one are shown what that one is."""
    i = minimum(at.i, at.Nq - 1)
    shown = elementwise(options.mask_mod)(at.b, at.h, i, at.keys[None, :]) & by_position(options, at)
    count = shown.astype(int32).sum(axis=0).sum(axis=0)  # along the rows first: a vector of keys is counted at once
    return where(count == 0, HIDDEN, where(count == i.shape[0] * at.keys.shape[0], FULL, PARTIAL))


def visible_keys(options, at, mask, seen, case, hides):
    """Keys that some row sees, (columns,). Where a mask or a mask_mod `hides` keys, a key that no row of this block
    sees may be hidden from all others, too; else it suffices that any query of the head sees it by position."""
    if case == PARTIAL:
        return _seen_by_some_row(at, mask, seen)
    if hides and has_positions(options):
        # Each key is shown to some row; a key in reach of all rows is in reach of that one.
        return _seen_by_some_row(at, mask, seen) | by_position(options, at).min(axis=0)
    return _seen_by_some_query(options, at)


def _seen_by_some_row(at, mask, seen):
    """A bool mask reads as False in rows past the last one; elsewhere these rows must be left out."""
    only_real = mask is not None and mask.dtype == bool_
    return (seen if only_real else seen & at.inside).max(axis=0)


def _seen_by_some_query(options, at):
    """Keys that some query of the head sees by position. Memory of other keys may hold anything."""
    j, shift = at.keys, at.Nk - at.Nq
    seen = j < at.Nk
    if options.causal == "upper_left":
        seen = seen & (j < at.Nq)
    if options.left is not None:
        seen = seen & (j >= shift - options.left)
        if options.causal == "upper_left":  # a window that begins after a query's own position holds nothing
            seen = seen & (shift <= options.left)
    return seen


def by_block_case(step, state, cols, case, hides, covered):
    """Apply `step(state, cols, case)` compiled for the case of this block. A hidden block changes nothing. `case` is
    None without a block map: a block is then PARTIAL where a mask or a mask_mod `hides` keys."""
    if case is None:
        return step(state, cols, PARTIAL if hides else FULL)
    if case == PARTIAL:
        state = step(state, cols, PARTIAL)
    elif case == FULL:
        state = step(state, cols, FULL)
    elif covered and case == COVERED:
        state = step(state, cols, COVERED)
    return state
