"""Loads whose columns repeat elements of memory, as `codes[rows[:, None], (arange(n) // 8)[None, :]]` does.

Packed codes are read so. A large tile is a load of the elements that there are, which is one of vectors and can be
pipelined, and is doubled in registers until it is as wide. Others are loaded element by element.

Only large tiles: behind a join of 8-bit elements Triton 3.6 gives a thread 8 neighbours along the contracted side of
`mma.sync`, 32 for the four threads of a row, and computes wrong products where that side is 16."""

from __future__ import annotations

from ....ir import Op, spreads
from .padding import padded

LEAST_SIDE = 64  # of a tile; run on an H200 from there up


def doublings(load: Op) -> int | None:
    """Return how often the columns of a load are doubled; None for one that is not written so."""
    *others, side = spreads(load)
    shape = load.result.shape
    if side is None or any(others) or len(shape) != 2 or load.attrs["extents"][-1] is None:
        return None
    if min(shape) < LEAST_SIDE or padded(shape[1]) != shape[1] or side.offset or side.divisor % side.factor:
        return None
    times = side.divisor // side.factor
    return times.bit_length() - 1 if times & (times - 1) == 0 and shape[1] % times == 0 else None
