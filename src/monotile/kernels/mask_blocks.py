"""The map of a mask: for each block of it, whether it hides everything, hides nothing, or neither."""

from monotile.language import (
    Const,
    Tensor,
    arange,
    bool_,
    cdiv,
    float32,
    inf,
    int32,
    kernel,
    maximum,
    minimum,
    program_id,
    where,
)

# What a map says of a block: nothing is seen (HIDDEN), or
HIDDEN = 0
MIXED = 1  # something is hidden or changed
UNCHANGED = 2  # all is seen as it is
DENSE = 3  # mixed, but each key is seen by some row; only a fine map tells


def counts(tile, axis):
    """How many elements of a bool tile are True along one axis."""
    return tile.astype(int32).sum(axis=axis)


def total(numbers):
    return numbers.sum(axis=0)


@kernel
def mask_blocks(
    mask: Tensor["B H Nq Nk"], kinds: Tensor["B H MQ MK"],
    *, BQ: Const, BK: Const, STRIP: Const, SPAN: Const = None, fine: Const = False,
):  # fmt: skip
    """Each program owns one row of blocks, or SPAN columns of it. 0 hidden, 1 mixed, 2 all visible (an additive mask:
    all zero). It reads STRIP rows at a time from end to end, in the order of memory; strips of a block that differ make
    it mixed. `fine` tells apart what is mixed: 3 where every key of the block is seen by some row. In strips it says so
    only where some strip hides nothing, which costs nothing to find out."""
    Nq, Nk = mask.shape[2], mask.shape[3]
    if SPAN is None:
        b, h, i = program_id(mask.shape[0], mask.shape[1], cdiv(Nq, BQ))
        low, high = 0, Nk
    else:
        b, h, i, c = program_id(mask.shape[0], mask.shape[1], cdiv(Nq, BQ), cdiv(Nk, SPAN))
        low, high = c * SPAN, minimum(c * SPAN + SPAN, Nk)
    height = minimum(BQ, Nq - i * BQ)
    first = 0 if fine and STRIP == BQ else 1  # the axis that is counted along first
    for r in range(0, height, STRIP):
        rows = i * BQ + r + arange(STRIP)
        for j in range(low, high, BK):
            area = minimum(STRIP, height - r) * minimum(BK, Nk - j)  # of the strip, inside the mask
            cols = j + arange(BK)
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
            mixed = MIXED
            if fine and STRIP < BQ:
                mixed = where(hidden == 0, DENSE, MIXED)
            elif fine:  # `seen` is by how many rows each key is seen
                mixed = where(((seen > 0) | ~(cols < Nk)).min(axis=0), DENSE, MIXED)
            kind = where(unchanged == area, UNCHANGED, where(hidden == area, HIDDEN, mixed)).astype(kinds.dtype)
            if STRIP < BQ:
                before = kinds[b, h, i, j // BK]
                together = where(maximum(kind, before) >= UNCHANGED, DENSE, MIXED) if fine else MIXED
                kind = where((r == 0) | (kind == before), kind, together).astype(kinds.dtype)
            kinds[b, h, i, j // BK] = kind
