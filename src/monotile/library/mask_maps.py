"""`mask_blocks`: the block map of a mask, for users."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

from ..dtypes import uint8
from ..runtime import tensors
from .block_maps import add_mask_blocks, map_shape
from .calls import CallBuilder, Finish, LibraryFunction
from .inputs import read_count
from .masks import read_mask

Array = Any


class MaskBlocksOptions(NamedTuple):
    """The options of a call of `mask_blocks`, as given."""

    block_q: Any
    block_k: Any
    backend: str | None
    threads: int | None


def mask_blocks(
    mask: Array, block_q: int, block_k: int, *, backend: str | None = None, threads: int | None = None
) -> Array:
    """Return which blocks of a mask are hidden, partial or full.

    Args:
        mask: (..., Nq, Nk), bool (True: visible) or additive numbers.
        block_q: rows of a block.
        block_k: columns of a block.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        uint8 (..., ceil(Nq / block_q), ceil(Nk / block_k)): 0 hidden, 1 partial, 2 full (an additive mask: all zero).

    Example:
        >>> monotile.mask_blocks(np.tri(4, dtype=bool), 2, 2).tolist()
        [[1, 0], [2, 1]]
    """
    block_q, block_k = read_count("block_q", block_q), read_count("block_k", block_k)
    return MASK_BLOCKS.call((mask,), tensors.layouts((mask,)), (block_q, block_k, backend, threads))


def _plan(builder: CallBuilder, given: MaskBlocksOptions) -> Finish:
    mask, lead = read_mask(builder.input("mask"))
    shape = map_shape(mask.shape, given.block_q, given.block_k)
    block_map = builder.result((*lead, *shape[2:]), uint8)
    if 0 not in shape:
        sizes, found = (given.block_q, given.block_k), block_map.reshaped(*shape)
        add_mask_blocks(builder, mask, *sizes, given.threads, covered=False, block_map=found)
    return itemgetter(0)


MASK_BLOCKS = LibraryFunction(("mask",), MaskBlocksOptions, _plan)
