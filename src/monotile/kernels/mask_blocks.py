"""The map of a mask: for each block of it, whether it hides everything, hides nothing, or neither."""

from monotile.language import Const, Tensor, arange, bool_, cdiv, float32, inf, kernel, program_id, where


@kernel
def mask_blocks(mask: Tensor["B H Nq Nk"], kinds: Tensor["B H MQ MK"], *, BQ: Const, BK: Const):
    """Each program owns one row of blocks. 0 hidden, 1 mixed, 2 all visible (an additive mask: all zero)."""
    b, h, i = program_id(mask.shape[0], mask.shape[1], cdiv(mask.shape[2], BQ))
    rows = i * BQ + arange(BQ)
    for j in range(0, mask.shape[3], BK):
        cols = j + arange(BK)
        there = (rows[:, None] < mask.shape[2]) & (cols[None, :] < mask.shape[3])
        M = mask[b, h, rows, cols]
        if mask.dtype == bool_:
            some, every = (M & there).max(axis=1).max(axis=0), (M | ~there).min(axis=1).min(axis=0)
        else:
            M = M.astype(float32)
            some = ((-inf != M) & there).max(axis=1).max(axis=0)
            every = ((M == 0.0) | ~there).min(axis=1).min(axis=0)
        kinds[b, h, i, j // BK] = where(every, 2, where(some, 1, 0)).astype(kinds.dtype)
