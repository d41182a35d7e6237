"""The public functions: attention and its parts. Checks and views here, all arithmetic in kernels/.

Each function has a `_plan` beside it, which checks a call and lists its launches. A plan is cached for calls alike
(calls.py), so that nothing in it may depend on addresses or contents. Block sizes and schedules are the backend's
choices (backends/*/choices.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ..backends.choices import KEYS_PER_SPLIT, AttentionChoice, cdiv
from ..dtypes import float32
from ..kernels.attention import DENSE
from ..kernels.attention import attention as attention_kernel
from ..kernels.scores import Options
from ..runtime import tensors
from . import torch_calls
from .backward import ATTENTION_BACKWARD, Gradients, attention_backward
from .block_maps import add_block_map, with_even_heads
from .block_mask import BlockMask, block_mask, unwrapped
from .calls import ArrayRef, CallBuilder, Finish, LibraryFunction
from .growth import Growth
from .inputs import (
    AttentionInputs,
    AttentionOptions,
    on_one_diagonal,
    read_count,
    read_inputs,
    read_options,
    read_scoring,
)
from .launches import SCALE
from .mask_maps import MASK_BLOCKS, mask_blocks
from .merging import MERGE, MERGE_LSE, Partials, add_merge, merge, merge_lse, new_partials
from .paged import PAGED, attention_paged, paged_append
from .quantized_inputs import codecs_of
from .rotations import before_rotation, rotate_back
from .splits import recommended_splits
from .varlen import VARLEN, attention_varlen
from .varlen_backward import VARLEN_BACKWARD, attention_varlen_backward

__all__ = [
    "FUNCTIONS",
    "BlockMask",
    "Gradients",
    "Partials",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_backward",
    "block_mask",
    "decode_partials",
    "mask_blocks",
    "merge",
    "merge_lse",
    "paged_append",
    "recommended_splits",
]
Array = Any
Window = tuple[int | None, int | None] | None
MaskMod = Callable[..., Any] | BlockMask

_first: Finish = itemgetter(0)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: MaskMod | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None, by_position: bool = False,
) -> Any:  # fmt: skip
    """softmax(q k^T * scale) v, for q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). See
    docs/guide/attention.md. `by_position`: the output is (B, Nq, Hq, Dv)."""
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    arrays = (q, k, v) if mask is None is sinks else (q, k, v, mask, sinks)
    layouts = _, addresses = tensors.layouts(arrays)
    in_keys = addresses[1] == addresses[2] and tensors.is_leading_part(v, k)
    blocks = None
    if mask_mod is not None:
        mask_mod, blocks = unwrapped(mask_mod)
    options = causal, window, softcap, score_mod, mask_mod, negative, in_keys, return_lse, backend, threads
    function = _ATTENTION_BY_POSITION if by_position else _ATTENTION
    return function.call(arrays, layouts, options, scale, blocks)


def _plan_attention(builder: CallBuilder, given: Any, *, by_position: bool = False) -> Finish:
    options = read_options(given)
    codecs = codecs_of(given)
    inputs = read_inputs(builder, values_in_keys=given.values_in_keys, codecs=codecs)
    options = on_one_diagonal(options, inputs)
    threads = builder.threads_for(inputs.flops, inputs.bytes)
    problem = inputs.problem(options)
    choice = None if 0 in inputs.out_shape else builder.choices.attention(problem)
    direct = by_position and _is_written_by_position(inputs, choice)
    out = inputs.output_by_position(builder) if direct else inputs.result(builder, inputs.out_shape, inputs.dtype)
    lse = inputs.result(builder, inputs.out_shape[:3], float32) if given.return_lse else None
    if choice is not None:
        state = new_partials(builder.temporary, inputs.out_shape, choice.splits) if choice.splits else None
        found = before_rotation(builder, out, codecs[1])
        _add_attention(builder, inputs, options, choice, state or (found, lse), threads)
        if state is not None:
            rows = math.prod(inputs.out_shape[:3])
            merging = builder.choices.merge(choice.splits, rows, builder.device, after_split=True)
            add_merge(builder, state, inputs.sinks, found, lse, merging)
        rotate_back(builder, found, out, codecs[1])
        if inputs.are_as_given(builder) and given.causal != "upper_left":
            builder.growth = Growth(problem, choice, *inputs.work_per_key)
    if by_position and not direct:
        return _first_by_position
    return tuple if given.return_lse else _first


def _is_written_by_position(inputs: AttentionInputs, choice: AttentionChoice | None) -> bool:
    """True if kernels can write the output as (B, Nq, Hq, Dv): several queries of packed heads, or merged parts, are
    rows of one dimension to them."""
    _, Hq, Nq, _ = inputs.out_shape
    return choice is None or Nq == 1 or not (choice.splits or (choice.packed and Hq > inputs.k.shape[1]))


def _first_by_position(results: list[Array]) -> Array:
    return results[0].swapaxes(-3, -2)


def _add_attention(
    builder: CallBuilder, inputs: AttentionInputs, options: Options, choice: AttentionChoice,
    target: Partials | tuple[ArrayRef, ArrayRef | None], threads: int | None,
) -> None:  # fmt: skip
    """Add the attention kernel, which writes softmax states of splits or the output and its logsumexp. Packed, it sees
    the rows of a group's query heads as rows of their KV head."""
    B, Hq, Nq, _ = inputs.out_shape
    H = inputs.k.shape[1] if choice.packed else Hq
    R = Hq * Nq // H

    def grouped(array: ArrayRef | None) -> ArrayRef | None:
        return None if array is None else builder.reshaped(array, B, H, R, *array.shape[3:])

    split = isinstance(target, Partials)
    state: tuple[ArrayRef | None, ...] = tuple(map(grouped, target)) if split else (None, None, None)
    outputs: tuple[ArrayRef | None, ...] = (None, None) if split else tuple(map(grouped, target))
    inputs = with_even_heads(builder, inputs, choice)
    block_map, covered = add_block_map(builder, inputs, options, choice, threads)
    mask = inputs.broadcast_mask()
    keys, values, *fields = inputs.stored.arguments(inputs.k, inputs.v if not inputs.values_in_keys else None)
    sinks = None if split else inputs.sinks
    args = grouped(inputs.q), keys, values, mask, block_map, sinks, *outputs, *state, *DENSE[:11], *fields
    scalars = SCALE, Nq, choice.first_block, choice.blocks_per_split
    consts = {"options": options, "covered": covered, **inputs.stored.constants}
    consts |= {"glance": 0} if block_map is None else {}
    builder.launch(attention_kernel, *args, *scalars, choice=choice, threads=threads, **consts)


# ---- split decode ----------------------------------------------------------------------------------------------------


class PartialsOptions(NamedTuple):
    """The options of a call of `decode_partials`, as given."""

    splits: Any
    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool  # the scale is negative
    backend: str | None
    threads: int | None


def decode_partials(
    q: Array, k: Array, v: Array, *, splits: int | None = None, causal: bool | str = False, scale: float | None = None,
    mask: Array | None = None, window: Window = None, softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: MaskMod | None = None,
    backend: str | None = None, threads: int | None = None,
) -> Partials:  # fmt: skip
    """The softmax state of each of `splits` runs of keys; `merge` makes attention of them. See
    docs/guide/decode_partials.md."""
    torch_calls.refuse_gradients("decode_partials", q, k, v, mask)
    if splits is not None:
        splits = read_count("splits", splits)
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    arrays = (q, k, v) if mask is None else (q, k, v, mask)
    blocks = None
    if mask_mod is not None:
        mask_mod, blocks = unwrapped(mask_mod)
    options = splits, causal, window, softcap, score_mod, mask_mod, negative, backend, threads
    found: Partials = _PARTIALS.call(arrays, tensors.layouts(arrays), options, scale, blocks)
    return found


def _plan_partials(builder: CallBuilder, given: Any) -> Finish:
    options = read_options(given)
    codecs = codecs_of(given)
    inputs = read_inputs(builder, codecs=codecs)
    options = on_one_diagonal(options, inputs)
    splits, keys = given.splits, inputs.k.shape[2]
    if splits is None:
        splits, keys_per_split = recommended_splits(keys, inputs.out_shape[2], "cpu"), KEYS_PER_SPLIT
    else:
        keys_per_split = cdiv(keys, splits)
    state = new_partials(partial(inputs.result, builder), inputs.out_shape, splits)
    if 0 not in inputs.out_shape:
        threads = builder.threads_for(inputs.flops, inputs.bytes)
        choice = builder.choices.attention(inputs.problem(options), keys_per_split)
        choice = choice.in_splits(splits, keys_per_split)
        found = state._replace(o=before_rotation(builder, state.o, codecs[1]))
        _add_attention(builder, inputs, options, choice, found, threads)
        rotate_back(builder, found.o, state.o, codecs[1])
    return Partials._make


_ATTENTION = LibraryFunction(("q", "k", "v", "mask", "sinks"), AttentionOptions, _plan_attention)
_ATTENTION_BY_POSITION = LibraryFunction(_ATTENTION.names, AttentionOptions, partial(_plan_attention, by_position=True))
_PARTIALS = LibraryFunction(("q", "k", "v", "mask"), PartialsOptions, _plan_partials)
FUNCTIONS = {
    "attention": _ATTENTION,
    "attention_backward": ATTENTION_BACKWARD,
    "attention_paged": PAGED,
    "attention_varlen": VARLEN,
    "attention_varlen_backward": VARLEN_BACKWARD,
    "decode_partials": _PARTIALS,
    "merge": MERGE,
    "merge_lse": MERGE_LSE,
    "mask_blocks": MASK_BLOCKS,
}
