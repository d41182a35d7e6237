"""The block map of a mask: for each block, whether the mask hides all of it, part of it, or nothing."""

from monotile.language import (
    Const,
    Tensor,
    arange,
    bool_,
    cdiv,
    elementwise,
    float32,
    inf,
    int32,
    kernel,
    maximum,
    minimum,
    program_id,
    where,
)

from .row_groups import row_block
from .visibility import COVERED, FULL, HIDDEN, PARTIAL, place_of

CASES_AT_ONCE = 32  # of a column of a block map


def counts(tile, axis):
    """Count the True elements of a bool tile along one axis."""
    return tile.astype(int32).sum(axis=axis)


def total(numbers):
    return numbers.sum(axis=0)


@kernel
def mask_blocks(
    mask: Tensor["B H Nq Nk"], block_map: Tensor["B H MQ MK"],
    *, BQ: Const, BK: Const, STRIP: Const, SPAN: Const = None, covered: Const = False,
):  # fmt: skip
    """Each program owns one row of blocks, or SPAN columns of it. A block is FULL if all of it is visible (an additive
    mask: zero). It reads STRIP rows at a time from end to end, in the order of memory; strips of a block that differ
    make it PARTIAL. `covered` tells COVERED blocks from PARTIAL ones: those in which every key is visible to some row.
    In strips a block counts as COVERED only if some strip hides nothing, which costs nothing to find out."""
    Nq, Nk = mask.shape[2], mask.shape[3]
    if SPAN is None:
        b, h, i = program_id(mask.shape[0], mask.shape[1], cdiv(Nq, BQ))
        low, high = 0, Nk
    else:
        b, h, i, c = program_id(mask.shape[0], mask.shape[1], cdiv(Nq, BQ), cdiv(Nk, SPAN))
        low, high = c * SPAN, minimum(c * SPAN + SPAN, Nk)
    height = minimum(BQ, Nq - i * BQ)
    first = 0 if covered and STRIP == BQ else 1  # the axis that is summed first

    def classify(r, j):
        area = minimum(STRIP, height - r) * minimum(BK, Nk - j)  # of the strip, inside the mask
        rows, cols = i * BQ + r + arange(STRIP), j + arange(BK)
        M = mask[b, h, rows, cols]
        if mask.dtype == bool_:
            seen = counts(M, first)
            unchanged = total(seen)
            hidden = area - unchanged
        else:
            M = M.astype(float32)
            unchanged = total(counts(M == 0.0, first)) - (STRIP * BK - area)  # outside the mask reads as zero
            unseen = counts(-inf == M, first)
            hidden = total(unseen)
            seen = height - unseen
        partial = PARTIAL
        if covered and STRIP < BQ:
            partial = where(hidden == 0, COVERED, PARTIAL)
        elif covered:  # `seen` counts the rows that see each key
            partial = where(((seen > 0) | ~(cols < Nk)).min(axis=0), COVERED, PARTIAL)
        return where(unchanged == area, FULL, where(hidden == area, HIDDEN, partial)).astype(block_map.dtype)

    if STRIP == BQ and SPAN == BK:  # a program has one block
        block_map[b, h, i, c] = classify(0, low)
    else:
        for r in range(0, height, STRIP):
            for j in range(low, high, BK):
                case = classify(r, j)
                if STRIP < BQ:
                    before = block_map[b, h, i, j // BK]
                    together = where(maximum(case, before) >= FULL, COVERED, PARTIAL) if covered else PARTIAL
                    case = where((r == 0) | (case == before), case, together).astype(block_map.dtype)
                block_map[b, h, i, j // BK] = case


@kernel
def mod_blocks(
    block_map: Tensor["B H MR MK"], rows: int, queries: int, keys: int,
    *, mask_mod: Const, BR: Const, BK: Const, SPAN: Const, packed: Const,
):  # fmt: skip
    """The block map of a mask_mod, for blocks of BR of the `rows` rows of a row group: HIDDEN, PARTIAL or FULL. Each
    program owns SPAN columns of blocks. Sides B and H of 1 stand for all batches and heads."""
    B, H, MR, MK = block_map.shape
    b, h, i, c = program_id(B, H, MR, cdiv(MK, SPAN))
    own = row_block(b, h, i, rows, queries, BR, packed)
    height = minimum(BR, rows - i * BR)
    for n in range(c * SPAN, minimum(c * SPAN + SPAN, MK)):
        at = place_of(own, n * BK + arange(BK), keys, packed)
        seen = elementwise(mask_mod)(at.b, at.h, at.i, at.keys[None, :]) & at.inside & (at.keys[None, :] < keys)
        visible = total(counts(seen, 1))
        area = height * minimum(BK, keys - n * BK)
        case = where(visible == area, FULL, where(visible == 0, HIDDEN, PARTIAL))
        block_map[b, h, i, n] = case.astype(block_map.dtype)


@kernel
def cover_blocks(
    block_map: Tensor["B H MR MK"], rows: int, queries: int, keys: int,
    *, mask_mod: Const, BR: Const, BK: Const, packed: Const,
):  # fmt: skip
    """Make PARTIAL blocks of a mask_mod's map COVERED where every key is visible to some row of the row group. Each
    program owns a column of blocks, and looks at the rows of PARTIAL ones where no block of the column is FULL."""
    B, H, MR, MK = block_map.shape
    b, h, n = program_id(B, H, MK)
    cols = n * BK + arange(BK)
    seen = where(cols < keys, 0, 1)
    for first in range(0, MR, CASES_AT_ONCE):
        cases = block_map[b, h, first + arange(CASES_AT_ONCE), n].astype(int32)
        if (cases == FULL).max(axis=0):
            seen = maximum(seen, 1)
        elif (cases == PARTIAL).max(axis=0):
            for i in range(first, minimum(first + CASES_AT_ONCE, MR)):
                if block_map[b, h, i, n].astype(int32) == PARTIAL:
                    at = place_of(row_block(b, h, i, rows, queries, BR, packed), cols, keys, packed)
                    shown = elementwise(mask_mod)(at.b, at.h, at.i, at.keys[None, :]) & at.inside
                    seen = maximum(seen, where(shown, 1, 0).max(axis=0))
    case = where(seen.min(axis=0) > 0, COVERED, PARTIAL)
    for first in range(0, MR, CASES_AT_ONCE):
        places = first + arange(CASES_AT_ONCE)
        cases = block_map[b, h, places, n].astype(int32)
        block_map[b, h, places, n] = where(cases == PARTIAL, case, cases).astype(block_map.dtype)


@kernel
def joint_blocks(
    of_mask: Tensor["B H MR MK"], of_mod: Tensor["B H MR MK"], block_map: Tensor["B H MR MK"], *, SPAN: Const
):  # fmt: skip
    """The block map of a mask and a mask_mod together: FULL where both are, HIDDEN where one is. A mask without a map
    may hide anything. Each program owns SPAN columns."""
    B, H, MR, MK = block_map.shape
    b, h, i, c = program_id(B, H, MR, cdiv(MK, SPAN))
    cols = c * SPAN + arange(SPAN)
    shown = of_mask[b, h, i, cols].astype(int32) if of_mask is not None else PARTIAL
    block_map[b, h, i, cols] = minimum(shown, of_mod[b, h, i, cols].astype(int32)).astype(block_map.dtype)


@kernel
def mod_arguments(seen: Tensor["Q K"], b: int, h: int, *, mask_mod: Const):
    """A tile of what a mask_mod shows, from which the library reads whether it depends on batch and head."""
    rows, cols = arange(8)[:, None], arange(8)[None, :]
    seen[arange(8), arange(8)] = elementwise(mask_mod)(b, h, rows, cols) & (rows < 8) & (cols < 8)
