"""The public functions: attention and its parts. Checks and views here, all arithmetic in kernels/.

Each function has a `_plan` beside it, which checks a call and lists its launches. A plan is cached for calls alike
(calls.py), so that nothing in it may depend on addresses or contents. Block sizes and schedules are the backend's
choices (backends/*/choices.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..backends.choices import KEYS_PER_SPLIT, AttentionChoice, Choice
from ..dtypes import float32, uint8
from ..errors import BadOption, MixedDTypes
from ..kernels.attention import attention as attention_kernel
from ..kernels.merge import merge as merge_kernel
from ..kernels.merge import merge_lse as merge_lse_kernel
from ..kernels.scores import Options
from ..launch.signature import check_threads
from ..runtime import arrays, tensors
from .block_maps import add_block_map, add_mask_blocks, map_shape
from .calls import SCALE, ArrayRef, CallBuilder, Finish, LibraryFunction
from .inputs import (
    AttentionInputs,
    check_count,
    check_parts,
    read_dtype,
    read_inputs,
    read_mask,
    read_options,
    read_scale,
    stack_parts,
)

Array = Any
Window = tuple[int | None, int | None] | None

_first: Finish = itemgetter(0)


class Partials(NamedTuple):
    """Softmax states of S splits of the keys: o (B, Hq, Nq, S, Dv) unnormalised, m and l (B, Hq, Nq, S), float32."""

    o: Array
    m: Array
    l: Array


# ---- attention -------------------------------------------------------------------------------------------------------


class AttentionOptions(NamedTuple):
    """The options of a call of `attention`, as given."""

    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool  # the scale is negative
    values_in_keys: bool  # v is the first columns of k, as in MLA: the same memory
    return_lse: Any
    backend: str | None
    threads: int | None


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """softmax(q k^T * scale) v, for q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). See
    docs/guide/attention.md."""
    scale = scale if scale is None else read_scale(scale)
    negative = scale is not None and scale < 0.0
    in_keys = _values_in_keys(k, v)
    options = AttentionOptions(
        causal, window, softcap, score_mod, mask_mod, negative, in_keys, return_lse, backend, threads
    )
    return _ATTENTION((q, k, v, mask, sinks), options, scale)


def _values_in_keys(k: Array, v: Array) -> bool:
    """True if v is a view of the first columns of k. Arrays of one shape are compared by identity alone, which costs
    nothing: they are what calls have, and hardly ever one memory."""
    if v is k:
        return tensors.is_leading_part(v, k)
    sizes = [shape[-1] for a in (k, v) if isinstance(shape := getattr(a, "shape", None), tuple) and shape]
    return len(sizes) == 2 and sizes[0] > sizes[1] and tensors.is_leading_part(v, k)


def _plan_attention(builder: CallBuilder, given: AttentionOptions) -> Finish:
    options = read_options(given)
    inputs = read_inputs(builder, values_in_keys=given.values_in_keys)
    threads = builder.threads_for(inputs.flops, inputs.bytes)
    out = inputs.result(builder, inputs.out_shape, inputs.dtype)
    lse = inputs.result(builder, inputs.out_shape[:3], float32) if given.return_lse else None
    if 0 not in inputs.out_shape:
        problem = inputs.problem(options)
        choice = builder.choices.attention(problem)
        state = _partials(builder.temporary, inputs, choice.splits) if choice.splits else None
        _add_attention(builder, inputs, options, choice, state or (out, lse), threads)
        if state is not None:
            rows = math.prod(inputs.out_shape[:3])
            merging = builder.choices.merge(choice.splits, rows, builder.device, after_split=True)
            _add_merge(builder, state, inputs.sinks, out, lse, merging)
    return tuple if given.return_lse else _first


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
    block_map, covered = add_block_map(builder, inputs, options, choice, threads)
    mask = inputs.broadcast_mask()
    values = inputs.v if not inputs.values_in_keys else None
    args = grouped(inputs.q), inputs.k, values, mask, block_map, None if split else inputs.sinks, *outputs, *state
    scalars = SCALE, Nq, choice.first_block, choice.blocks_per_split
    builder.launch(attention_kernel, *args, *scalars, choice=choice, threads=threads, options=options, covered=covered)


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
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    backend: str | None = None, threads: int | None = None,
) -> Partials:  # fmt: skip
    """The softmax state of each of `splits` runs of keys; `merge` makes attention of them. See
    docs/guide/decode_partials.md."""
    scale = scale if scale is None else read_scale(scale)
    negative = scale is not None and scale < 0.0
    options = PartialsOptions(splits, causal, window, softcap, score_mod, mask_mod, negative, backend, threads)
    found: Partials = _PARTIALS((q, k, v, mask), options, scale)
    return found


def _plan_partials(builder: CallBuilder, given: PartialsOptions) -> Finish:
    options = read_options(given)
    inputs = read_inputs(builder)
    splits, keys = given.splits, inputs.k.shape[2]
    if splits is None:
        splits, keys_per_split = recommended_splits(keys, inputs.out_shape[2], "cpu"), KEYS_PER_SPLIT
    else:
        check_count("splits", splits)
        keys_per_split = _cdiv(keys, splits)
    state = _partials(lambda shape, dtype: inputs.result(builder, shape, dtype), inputs, splits)
    if 0 not in inputs.out_shape:
        threads = builder.threads_for(inputs.flops, inputs.bytes)
        choice = builder.choices.attention(inputs.problem(options), keys_per_split)
        choice = choice.in_splits(splits, keys_per_split)
        _add_attention(builder, inputs, options, choice, state, threads)
    return Partials._make


def _partials(new: Callable[..., ArrayRef], inputs: AttentionInputs, splits: int) -> Partials:
    B, Hq, Nq, Dv = inputs.out_shape
    shape = B, Hq, Nq, splits
    return Partials(new((*shape, Dv), float32), new(shape, float32), new(shape, float32))


def recommended_splits(n_kv: int, n_simds: int, device: str = "cpu") -> int:
    """Into how many parts to cut `n_kv` keys read by `n_simds` rows (query heads of a group times query length).

    `m5_max` is the curve of MLX and MetalTile for that chip. `cpu` was measured: parts of 512 keys."""
    for name, value in (("n_kv", n_kv), ("n_simds", n_simds)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadOption(f"{name} must be a whole number from 0 up, found {value!r}")
    if device == "cpu":
        return max(1, _cdiv(n_kv, KEYS_PER_SPLIT))
    if device == "m5_max":
        if n_kv <= 1024 or n_simds <= 4:
            return 64
        return next((s for n, s in ((8192, 128), (32768, 256), (65536, 512)) if n_kv <= n), 1024)
    raise BadOption(
        f"no split curve is known for device {device!r}; known are 'cpu' and 'm5_max': pass splits yourself"
    )


# ---- merging ---------------------------------------------------------------------------------------------------------


class MergeOptions(NamedTuple):
    dtype: Any
    backend: str | None
    threads: int | None


def merge(
    o: Array, m: Array, l: Array, *, dtype: Any = float32, backend: str | None = None, threads: int | None = None
) -> tuple[Array, Array]:
    """Merge S softmax states: o (..., S, Dv), m and l (..., S), float32. Gives output (..., Dv) and natural lse
    (...)."""
    out, lse = _MERGE((o, m, l), MergeOptions(dtype, backend, threads))
    return out, lse


def _plan_merge(builder: CallBuilder, given: MergeOptions) -> Finish:
    state = Partials(builder.input("o"), builder.input("m"), builder.input("l"))
    o = state.o
    if o.dtype is not float32:
        raise MixedDTypes(f"'o' must be float32, found {o.dtype}: narrower partials overflow")
    check_parts(o, {"m": state.m, "l": state.l})
    out = builder.result((*o.shape[:-2], o.shape[-1]), read_dtype(given.dtype))
    lse = builder.result(o.shape[:-2], float32)
    _add_merge(
        builder, state, None, out, lse, builder.choices.merge(o.shape[-2], math.prod(o.shape[:-2]), builder.device)
    )
    return tuple


def _add_merge(
    builder: CallBuilder, state: Partials, sinks: ArrayRef | None, out: ArrayRef, lse: ArrayRef | None, choice: Choice
) -> None:
    *lead, S, Dv = state.o.shape
    rows = math.prod(lead)
    if rows == 0:
        return
    threads = builder.threads_for(0, 4 * rows * S * Dv)
    flat = (builder.reshaped(array, rows, *array.shape[len(lead) :]) for array in state)
    queries = lead[-1] if lead else 1
    args = *flat, sinks, out.reshaped(rows, Dv), None if lse is None else lse.reshaped(rows), queries
    builder.launch(merge_kernel, *args, choice=choice, threads=threads)


class MergeLseOptions(NamedTuple):
    backend: str | None
    threads: int | None


def merge_lse(
    outs: Array | Sequence[Array],
    lses: Array | Sequence[Array],
    *,
    backend: str | None = None,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Merge normalised parts: outputs (..., S, Dv) with their natural lse (..., S), or sequences of S arrays (..., Dv)
    and (...)."""
    first = outs[0] if isinstance(outs, list | tuple) and outs else outs
    lib = arrays.library("outs", first)
    outs, lses = (
        stack_parts(lib, name, a, axis) if isinstance(a, list | tuple) else lib.adopt(name, a)
        for name, a, axis in (("outs", outs, -2), ("lses", lses, -1))
    )
    out, total = _MERGE_LSE((outs, lses), MergeLseOptions(backend, threads))
    return lib.give_back(out), lib.give_back(total)


def _plan_merge_lse(builder: CallBuilder, given: MergeLseOptions) -> Finish:
    outs, lses = builder.input("outs"), builder.input("lses")
    check_parts(outs, {"lses": lses})
    *lead, S, Dv = outs.shape
    rows = math.prod(lead)
    out, total = builder.result((*lead, Dv), outs.dtype), builder.result(tuple(lead), float32)
    if rows:
        threads = builder.threads_for(0, outs.dtype.bytes * rows * S * Dv)
        flat = builder.reshaped(outs, rows, S, Dv), builder.reshaped(lses, rows, S)
        choice = builder.choices.merge(S, rows, builder.device)
        results = out.reshaped(rows, Dv), total.reshaped(rows)
        builder.launch(merge_lse_kernel, *flat, *results, choice=choice, threads=threads)
    return tuple


# ---- masks -----------------------------------------------------------------------------------------------------------


class MaskBlocksOptions(NamedTuple):
    block_q: Any
    block_k: Any
    backend: str | None
    threads: int | None


def mask_blocks(
    mask: Array, block_q: int, block_k: int, *, backend: str | None = None, threads: int | None = None
) -> Array:
    """uint8 (..., ceil(Nq / block_q), ceil(Nk / block_k)): 0 hidden, 1 partial, 2 full (an additive mask: all zero)."""
    return _MASK_BLOCKS((mask,), MaskBlocksOptions(block_q, block_k, backend, threads))


def _plan_mask_blocks(builder: CallBuilder, given: MaskBlocksOptions) -> Finish:
    for name, block in (("block_q", given.block_q), ("block_k", given.block_k)):
        check_count(name, block)
    if given.threads is not None:
        check_threads(given.threads)
    mask, lead = read_mask(builder.input("mask"))
    shape = map_shape(mask.shape, given.block_q, given.block_k)
    block_map = builder.result((*lead, *shape[2:]), uint8)
    if 0 not in shape:
        sizes, found = (given.block_q, given.block_k), block_map.reshaped(*shape)
        add_mask_blocks(builder, mask, *sizes, given.threads, covered=False, block_map=found)
    return _first


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


_ATTENTION = LibraryFunction(("q", "k", "v", "mask", "sinks"), _plan_attention)
_PARTIALS = LibraryFunction(("q", "k", "v", "mask"), _plan_partials)
_MERGE = LibraryFunction(("o", "m", "l"), _plan_merge)
_MERGE_LSE = LibraryFunction(("outs", "lses"), _plan_merge_lse)
_MASK_BLOCKS = LibraryFunction(("mask",), _plan_mask_blocks)
FUNCTIONS = {
    "attention": _ATTENTION,
    "decode_partials": _PARTIALS,
    "merge": _MERGE,
    "merge_lse": _MERGE_LSE,
    "mask_blocks": _MASK_BLOCKS,
}
