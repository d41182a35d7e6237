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
    minimum,
    program_id,
    where,
)


def count(tile, axis):
    """How many elements of a bool tile are True, first along one axis: rows of bytes are best added up, rows of floats
    each by itself."""
    return tile.astype(int32).sum(axis=axis).sum(axis=0)


@kernel
def mask_blocks(mask: Tensor["B H Nq Nk"], kinds: Tensor["B H MQ MK"], *, BQ: Const, BK: Const):
    """Each program owns one row of blocks. 0 hidden, 1 mixed, 2 all visible (an additive mask: all zero)."""
    Nq, Nk = mask.shape[2], mask.shape[3]
    b, h, i = program_id(mask.shape[0], mask.shape[1], cdiv(Nq, BQ))
    rows = i * BQ + arange(BQ)
    for j in range(0, Nk, BK):
        area = minimum(BQ, Nq - i * BQ) * minimum(BK, Nk - j)  # of the block, inside the mask
        M = mask[b, h, rows, j + arange(BK)]
        if mask.dtype == bool_:
            unchanged = count(M, 0)
            hidden = area - unchanged
        else:
            M = M.astype(float32)
            unchanged = count(M == 0.0, 1) - (BQ * BK - area)  # outside the mask reads as zero
            hidden = count(-inf == M, 1)
        kinds[b, h, i, j // BK] = where(unchanged == area, 2, where(hidden == area, 0, 1)).astype(kinds.dtype)
