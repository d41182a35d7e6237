"""Block maps of a call: which blocks of scores a mask or a mask_mod hides, so that attention skips them."""

from __future__ import annotations

from collections.abc import Sequence

from ..backends.choices import MOD_ROWS, AttentionChoice, AttentionProblem, BackwardBlocks
from ..dtypes import uint8
from ..kernels.mask_blocks import mask_blocks as mask_blocks_kernel
from ..kernels.mask_blocks import mod_blocks as mod_blocks_kernel
from ..kernels.scores import Options
from .calls import ArrayRef, CallBuilder
from .inputs import AttentionInputs


def add_block_map(
    builder: CallBuilder, inputs: AttentionInputs, options: Options, choice: AttentionChoice | BackwardBlocks,
    threads: int | None,
) -> tuple[ArrayRef | None, bool]:  # fmt: skip
    """Add the launches that make the block map of a call. Return the map as attention reads it, None where nothing
    hides blocks, and True if it tells COVERED blocks from PARTIAL ones."""
    problem = inputs.problem(options)
    B, Hq, Nq, _ = inputs.out_shape
    H = problem.kv_heads if choice.packed else Hq
    rows = Hq * Nq // max(1, H)
    whole = map_shape((B, H, rows, problem.keys), choice.row_block, choice.key_block)
    if 0 in whole:
        return None, False
    found, covered = None, False
    if inputs.mask is not None:
        found, covered = _map_of_mask(builder, inputs.mask, problem, choice, threads)
    if options.mask_mod is None or problem.rows > MOD_ROWS:
        return (None if found is None else found.broadcast(whole)), covered
    refine = inputs.mask is not None
    if refine and found is None:  # a mask without a map: its blocks are PARTIAL
        return None, False
    map_ = builder.temporary(whole, uint8)
    args = found.broadcast(whole) if found is not None else None, map_, rows, Nq, problem.keys
    tall = _power_of_two(rows) if rows <= choice.row_block else choice.row_block  # no row of the map is padding
    consts = {"mask_mod": options.mask_mod, "BR": tall, "BK": choice.key_block, "packed": choice.packed}
    builder.launch(
        mod_blocks_kernel, *args, choice=builder.choices.mod_blocks(builder.device), threads=threads, **consts
    )
    return map_, covered


def _map_of_mask(
    builder: CallBuilder, mask: ArrayRef, problem: AttentionProblem, choice: AttentionChoice | BackwardBlocks,
    threads: int | None,
) -> tuple[ArrayRef | None, bool]:  # fmt: skip
    """The block map of the mask as given, with sides of 1 where it broadcasts. Packed rows have one row of blocks for
    all rows of a group; a mask whose heads do not lie evenly has no map, and is read everywhere."""
    if not choice.packed:
        covered = builder.choices.marks_covered(problem)
        return add_mask_blocks(builder, mask, choice.row_block, choice.key_block, threads, covered=covered), covered
    if mask.shape[1] > 1:
        batch, heads, queries, keys = mask.shape
        view = mask.view.reshaped((batch, problem.kv_heads, heads // problem.kv_heads * queries, keys))
        if view is None:
            return None, False
        mask = ArrayRef(mask.place, view)
    rows = _power_of_two(mask.shape[2])
    return add_mask_blocks(builder, mask, rows, choice.key_block, threads, covered=False), False


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def add_mask_blocks(
    builder: CallBuilder, mask: ArrayRef, BQ: int, BK: int, threads: int | None, *, covered: bool,
    block_map: ArrayRef | None = None,
) -> ArrayRef:  # fmt: skip
    """Add the block map of a mask, in an array of its own if none is given."""
    if block_map is None:
        block_map = builder.temporary(map_shape(mask.shape, BQ, BK), uint8)
    choice = builder.choices.mask_blocks(BQ, BK, builder.device)
    blocks = {"BQ": BQ, "BK": BK, "covered": covered}
    builder.launch(mask_blocks_kernel, mask, block_map, choice=choice, threads=threads, **blocks)
    return block_map


def map_shape(scores: Sequence[int], BQ: int, BK: int) -> tuple[int, ...]:
    return *scores[:2], -(-scores[2] // BQ), -(-scores[3] // BK)
