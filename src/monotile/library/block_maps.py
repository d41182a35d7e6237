"""Block maps of a call: which blocks of scores a mask or a mask_mod hides, so that attention skips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..backends.choices import AttentionChoice, AttentionProblem, BackwardBlocks, Choice
from ..dtypes import bool_, uint8
from ..ir import Value, walk
from ..kernels.mask_blocks import cover_blocks as cover_blocks_kernel
from ..kernels.mask_blocks import joint_blocks as joint_blocks_kernel
from ..kernels.mask_blocks import mask_blocks as mask_blocks_kernel
from ..kernels.mask_blocks import mod_arguments as mod_arguments_kernel
from ..kernels.mask_blocks import mod_blocks as mod_blocks_kernel
from ..kernels.scores import Options
from ..runtime.tensors import View
from .calls import ArrayRef, CallBuilder
from .inputs import AttentionInputs

JOINT_COLUMNS = 128  # of a map in one program


def add_block_map(
    builder: CallBuilder, inputs: AttentionInputs, options: Options, choice: AttentionChoice | BackwardBlocks,
    threads: int | None,
) -> tuple[ArrayRef | None, bool]:  # fmt: skip
    """Add the launches that make the block map of a call. Return the map as attention reads it, None where there is
    none, and True if it tells COVERED blocks from PARTIAL ones. A mask_mod has one wherever keys are more than a block:
    it is evaluated for the map at most as often as attention would evaluate it without."""
    if inputs.mask is None and options.mask_mod is None:
        return None, False
    problem = inputs.problem(options)
    B, Hq, Nq, _ = inputs.out_shape
    H = problem.kv_heads if choice.packed else Hq
    whole = map_shape((B, H, Hq * Nq // max(1, H), problem.keys), choice.row_block, choice.key_block)
    worth = inputs.mask is not None or (options.mask_mod is not None and whole[3] > 1)
    if 0 in whole or not worth:
        return None, False
    of_mask, covered, of_mod = None, False, None
    if inputs.mask is not None:
        of_mask, covered = _map_of_mask(builder, inputs.mask, problem, choice, threads)
        of_mask = None if of_mask is None else of_mask.broadcast(whole)
    if options.mask_mod is None:
        return of_mask, covered
    covered = isinstance(choice, AttentionChoice) and builder.choices.covers(problem)
    of_mod = _map_of_mod(builder, options.mask_mod, problem, choice, threads, covered=covered).broadcast(whole)
    if inputs.mask is None:
        return of_mod, covered
    joint = builder.temporary(whole, uint8)
    builder.launch(joint_blocks_kernel, of_mask, of_mod, joint, choice=Choice({"SPAN": JOINT_COLUMNS}), threads=threads)
    return joint, False


def _map_of_mod(
    builder: CallBuilder, mask_mod: Callable[..., Any], problem: AttentionProblem,
    choice: AttentionChoice | BackwardBlocks, threads: int | None, *, covered: bool,
) -> ArrayRef:  # fmt: skip
    """The block map of a mask_mod, kept for later calls, with sides of 1 for batches and heads it does not depend on.
    Where one block has all rows of a group, and heads do not matter, the queries of one head stand for all rows."""
    by_batch, by_head = depends_on(mask_mod)
    packed, heads, rows = choice.packed, problem.query_heads, problem.queries
    if packed:
        heads, rows = problem.kv_heads, problem.rows
        if rows <= choice.row_block and not by_head:
            packed, rows = False, problem.queries
    tall = _power_of_two(rows) if rows <= choice.row_block else choice.row_block  # no row of the map is padding
    lead = problem.batch if by_batch else 1, heads if by_head else 1
    sizes = rows, problem.queries, problem.keys
    key = *sizes, tall, choice.key_block, packed, covered
    block_map = builder.kept(map_shape((*lead, rows, problem.keys), tall, choice.key_block), uint8, key)
    consts = {"mask_mod": mask_mod, "BR": tall, "BK": choice.key_block, "packed": packed}
    chosen = builder.choices.mod_blocks(tall, builder.device)
    builder.launch(mod_blocks_kernel, block_map, *sizes, choice=chosen, threads=threads, **consts)
    if covered:
        builder.launch(cover_blocks_kernel, block_map, *sizes, choice=Choice({}), threads=threads, **consts)
    return block_map


def depends_on(mask_mod: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether what a mask_mod shows depends on the batch, and whether on the head."""
    tile = View(bool_, (8, 8), (8, 1), "cpu")
    kernel = mod_arguments_kernel.ir_with_arguments(tile, 0, 0, mask_mod=mask_mod)
    wanted: set[Value] = set()
    for op in reversed(kernel.body.ops):
        if op.kind == "store" or wanted.intersection(op.results):
            wanted.update(op.operands)
            wanted.update(v for block in op.blocks for inner in walk(block) for v in inner.operands)
    names = {op.attrs["name"] for op in kernel.body.ops if op.kind == "param" and op.result in wanted}
    return "b" in names, "h" in names


def _map_of_mask(
    builder: CallBuilder, mask: ArrayRef, problem: AttentionProblem, choice: AttentionChoice | BackwardBlocks,
    threads: int | None,
) -> tuple[ArrayRef | None, bool]:  # fmt: skip
    """The block map of the mask as given, with sides of 1 where it broadcasts. Packed rows have one row of blocks for
    all rows of a group; a mask whose heads do not lie evenly then has no map, and is read everywhere."""
    mask = _without_repetition(mask)
    if not choice.packed:
        covered = builder.choices.marks_covered(problem)
        return add_mask_blocks(builder, mask, choice.row_block, choice.key_block, threads, covered=covered), covered
    if mask.shape[1] > 1:
        view = mask.view.reshaped(_packed_shape(mask, problem.kv_heads))
        if view is None:
            return None, False
        mask = ArrayRef(mask.place, view)
    rows = _power_of_two(mask.shape[2])
    return add_mask_blocks(builder, mask, rows, choice.key_block, threads, covered=False), False


def with_even_heads(builder: CallBuilder, inputs: AttentionInputs, choice: AttentionChoice) -> AttentionInputs:
    """Return the inputs with a copy of a mask that packed rows could have no block map of, because its heads do not lie
    evenly. A mask larger than the keys and values that it may hide is left as it is."""
    mask = inputs.mask
    if mask is None or not choice.packed or 0 in mask.shape:
        return inputs
    own = _without_repetition(mask)
    if own.shape[1] == 1 or own.view.reshaped(_packed_shape(own, inputs.k.shape[1])) is not None:
        return inputs
    if math.prod(mask.shape) * mask.dtype.bytes > inputs.bytes:
        return inputs
    return replace(inputs, mask=builder.contiguous(mask))


def _packed_shape(mask: ArrayRef, kv_heads: int) -> tuple[int, ...]:
    batch, heads, queries, keys = mask.shape
    return batch, kv_heads, heads // kv_heads * queries, keys


def _without_repetition(mask: ArrayRef) -> ArrayRef:
    """The mask with sides of 1 where the caller has expanded it: along batches, heads or queries with a stride of 0."""
    dtype, shape, strides, device = mask.view
    sides = *[1 if s == 0 else n for n, s in zip(shape[:3], strides[:3], strict=True)], shape[3]
    return ArrayRef(mask.place, View(dtype, sides, strides, device))


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
