"""Visibility: which keys a query sees, for a tile of scores and for whole blocks of a mask.

A key is visible to a query by position (causal, window), by the mask and by mask_mod together. A key that no row sees
must not reach a sum, not even as 0 * NaN: `visible_keys` says which values may be read at all."""

from typing import Any, NamedTuple

from monotile.language import bool_, float32, inf

# Block cases, as a block map holds them: in a block of the mask nothing is visible (HIDDEN), or
HIDDEN = 0
PARTIAL = 1  # something is hidden or biased
FULL = 2  # everything is visible and nothing is biased
COVERED = 3  # PARTIAL, and every key is visible to some row


class Place(NamedTuple):
    """The scores that a tile holds. It may reach past the last row and past the last key."""

    b: Any
    h: Any  # query head: a scalar, or (rows, 1)
    i: Any  # (rows, 1) positions of queries
    keys: Any  # (columns,) positions of keys
    Nq: Any
    Nk: Any
    inside: Any  # (rows, 1) True for rows that exist


def place_of(own, keys, Nk, packed):
    """The scores of a program's rows with some keys."""
    head = own.head[:, None] if packed else own.head
    return Place(own.b, head, own.queries[:, None], keys, own.Nq, Nk, inside=own.rows[:, None] < own.count)


def is_additive(mask):
    """True for a mask that is added to the scores, False for none and for a bool mask."""
    return mask is not None and mask.dtype != bool_


def has_positions(options) -> bool:
    """True if causality or a window hides keys by position."""
    return not (options.causal is options.left is options.right is None)


def by_position(options, at):
    """Visibility by position alone, (rows, columns). The compiler decides it for whole blocks of keys."""
    i, j, shift = at.i, at.keys[None, :], at.Nk - at.Nq
    seen = j < at.Nk
    if options.causal == "lower_right":
        seen = seen & (j <= i + shift)
    if options.causal == "upper_left":
        seen = seen & (j <= i) & (j < at.Nq)  # from Nq on only rows past the last one would see
    if options.left is not None:
        seen = seen & (j >= i + (shift - options.left))
    if options.right is not None:
        seen = seen & (j <= i + (shift + options.right))
    return seen


def visible(options, at, mask):
    """Visibility of each key to each row: by position, mask (an additive one hides with -inf) and mask_mod."""
    seen = by_position(options, at)
    if mask is not None:
        seen = seen & (mask.astype(float32) != -inf if is_additive(mask) else mask)
    if options.mask_mod is not None:
        seen = seen & options.mask_mod(at.b, at.h, at.i, at.keys[None, :])
    return seen


def visible_keys(options, at, mask, seen, case):
    """Keys that some row sees, (columns,). In a full block these are the keys that any query of the head may see."""
    if case == PARTIAL or options.mask_mod is not None:
        return _seen_by_some_row(options, at, mask, seen)
    if case == COVERED and has_positions(options):
        # The mask shows each key to some row; a key in reach of all rows is in reach of that one.
        return _seen_by_some_row(options, at, mask, seen) | by_position(options, at).min(axis=0)
    return _seen_by_some_query(options, at)


def _seen_by_some_row(options, at, mask, seen):
    """A bool mask reads as False in rows past the last one; elsewhere these rows must be left out."""
    only_real = (mask is None or mask.dtype == bool_) and options.mask_mod is None
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


def visible_rows(options, at, mask, seen, case):
    """Rows that see some key of the tile, (rows, 1); without a mask, those that see some key of their head by position.
    `seen` leaves out rows past the last one."""
    if case != FULL or options.mask_mod is not None:
        return seen.max(axis=1)[:, None]
    return _sees_some_key(options, at)


def _sees_some_key(options, at):
    """Rows that exist and see some key by position, (rows, 1)."""
    i, shift = at.i, at.Nk - at.Nq
    sees = at.inside
    if options.causal == "lower_right":
        sees = sees & (i + shift >= 0)
    if options.left is not None:
        sees = sees & (i + (shift - options.left) < at.Nk)
        if options.causal == "upper_left":
            sees = sees & (shift <= options.left)
    if options.right is not None:
        sees = sees & (i + (shift + options.right) >= 0)
    return sees


def by_block_case(step, state, cols, mask, case, covered):
    """Apply `step(state, cols, case)` compiled for the case of this block. `case` is None without a block map; a hidden
    block changes nothing. The map of a mask_mod alone has no other case than FULL: the mask_mod is applied anyway."""
    if case is None:
        return step(state, cols, FULL if mask is None else PARTIAL)
    if mask is None:
        if case != HIDDEN:
            state = step(state, cols, FULL)
    elif case == PARTIAL:
        state = step(state, cols, PARTIAL)
    elif case == FULL:
        state = step(state, cols, FULL)
    elif covered and case == COVERED:
        state = step(state, cols, COVERED)
    return state
