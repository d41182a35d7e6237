"""Attention of sequences of different lengths that lie one after the other: the public function and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..backends.choices import AttentionProblem
from ..dtypes import float32, int32, int64
from ..errors import ArgumentRank, ArgumentShape, BadOffsets, BadOption, MixedDTypes
from ..kernels.attention import attention as attention_kernel
from ..kernels.scores import Options
from ..runtime import tensors
from . import torch_calls
from .balancing import NOT_BALANCED, Lengths, add_balance, add_merge_slots, is_balanced
from .block_mask import BlockMask
from .calls import ArrayRef, CallBuilder, Finish, LibraryFunction
from .inputs import (
    AttentionInputs,
    AttentionOptions,
    check_shapes,
    check_sinks,
    one_device,
    one_dtype,
    read_options,
    read_scoring,
    unit_last,
)
from .launches import SCALE
from .quantized_inputs import PLAIN, Codecs, as_numbers, codecs_of, read_fields
from .ragged_spans import add_spans
from .rotations import before_rotation, rotate_back, rotated_queries

Array = Any
NOT_PAGED = (None,) * 4
FEW = 8  # queries, whose number decides how they are computed


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Array | None = None, score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, return_lse: bool = False, check: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Attention of each of B sequences as if it were alone, for q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv):
    sequence s has rows q_offsets[s] to q_offsets[s + 1] and keys k_offsets[s] to k_offsets[s + 1]. See
    docs/guide/caches.md."""
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    refuse_block_mask("attention_varlen", mask_mod)
    arrays = q, k, v, q_offsets, k_offsets, sinks
    layouts = _, addresses = tensors.layouts(arrays)
    if check:
        check_offsets(q, k, q_offsets, k_offsets)
    in_keys = addresses[1] == addresses[2] and tensors.is_leading_part(v, k)
    options = causal, window, softcap, score_mod, mask_mod, negative, in_keys, return_lse, backend, threads
    return VARLEN.call(arrays, layouts, options, scale)


def _plan(builder: CallBuilder, given: Any) -> Finish:
    options, codecs = read_options(given), codecs_of(given)
    inputs, offsets = read_sequences(builder, values_in_keys=given.values_in_keys, codecs=codecs)
    (_, Hq, Tq, _), Dv = inputs.q.shape, inputs.v.shape[3]
    out = builder.result((Tq, Hq, Dv), inputs.dtype)
    lse = builder.result((Hq, Tq), float32) if given.return_lse else None
    if 0 not in out.shape:
        rows = as_batch(out)
        found = before_rotation(builder, rows, codecs[1])
        _add(builder, inputs, offsets, (found, None if lse is None else lse.reshaped(1, Hq, Tq)), options)
        rotate_back(builder, found, rows, codecs[1])
    return tuple if given.return_lse else itemgetter(0)


def _add(
    builder: CallBuilder, inputs: AttentionInputs, offsets: tuple[ArrayRef, ArrayRef],
    target: tuple[ArrayRef, ArrayRef | None], options: Options,
) -> None:  # fmt: skip
    """Add the attention kernel, which writes the output and its logsumexp, or softmax states that are then merged."""
    (_, Hq, Tq, _), sequences = inputs.q.shape, offsets[0].shape[0] - 1
    problem = usual_problem(inputs, options, sequences)
    choice = builder.choices.attention(problem)
    threads = builder.threads_for(inputs.flops // sequences, inputs.bytes)
    balanced = None
    if is_balanced(builder, problem, choice, ragged_rows=True):
        heads = problem.group if choice.packed else 1
        lengths = Lengths(Tq, inputs.k.shape[2], heads * Tq // choice.row_block + sequences + 1, *offsets)
        balanced = add_balance(builder, lengths, problem, choice, options)
    else:
        choice = builder.choices.attention(replace(problem, kv_heads=Hq)).unpacked()
    outputs = (inputs.sinks, *target) if balanced is None else (None, None, None)
    spans = None if balanced is not None else add_spans(builder, choice, "BR", (Tq, inputs.k.shape[2]), offsets)
    values = None if inputs.values_in_keys and not builder.copies else inputs.v
    keys, values, *fields = inputs.stored.arguments(inputs.k, values)
    args: tuple[Any, ...] = inputs.q, keys, values, None, None, *outputs, None, None, None, *offsets, spans
    slots = balanced.arguments if balanced is not None else NOT_BALANCED
    args = *args, *NOT_PAGED, *slots, *fields, SCALE, Tq, 0, 0
    consts = {"options": options, "by_mod": builder.choices.by_mod(problem, choice), **inputs.stored.constants}
    builder.launch(attention_kernel, *args, choice=choice, threads=threads, **consts)
    if balanced is not None:
        add_merge_slots(builder, balanced, offsets[0], inputs.sinks, target, choice)


def read_sequences(
    builder: CallBuilder, *, values_in_keys: bool = False, codecs: Codecs = PLAIN
) -> tuple[AttentionInputs, tuple[ArrayRef, ArrayRef]]:
    """Check the arrays of a call and return them as one batch (1, H, T, D), and the offsets of queries and of keys."""
    q, k, v = _read_packed(builder, codecs)
    offsets = builder.input("q_offsets"), builder.input("k_offsets")
    sequences = _read_offsets(*offsets)
    dtype, sinks = one_dtype({"q": q, "k": k, "v": v}), builder.inputs.get("sinks")
    q, k, v = (as_batch(a) for a in (q, k, v))
    check_shapes(q.shape, k.shape, v.shape)
    if sinks is not None:
        check_sinks(sinks, q.shape[1])
    one_device(builder.inputs)
    builder.scale = float(q.shape[3] ** -0.5)
    if q.shape[2] and sequences == 0:
        raise ArgumentShape(f"{q.shape[2]} rows of q and no sequence: offsets have a length of 1; give B + 1 offsets")
    stored = read_fields(builder, codecs, as_batch)
    q = rotated_queries(builder, q, codecs[0])
    return AttentionInputs(q, k, v, None, sinks, dtype, True, values_in_keys, stored), offsets


def usual_problem(inputs: AttentionInputs, options: Options, sequences: int) -> AttentionProblem:
    """The facts of a call whose sequences all have the average length, by which blocks are chosen."""
    queries, keys = (usual_length(x, sequences) for x in (inputs.q, inputs.k))
    problem = inputs.problem(options)
    return replace(problem, source="ragged", batch=sequences, queries=queries, keys=keys)


def as_batch(array: ArrayRef) -> ArrayRef:
    """Rows (T, H, D) as one batch (1, H, T, D)."""
    T, H, D = array.shape
    return array.reshaped(1, T, H, D).permuted(0, 2, 1, 3)


def usual_length(rows: ArrayRef, sequences: int) -> int:
    """The average length of sequences that lie in a batch (1, H, T, D). All but few are rounded to the next power of
    two, so that new lengths seldom need a new program."""
    length = -(-rows.shape[2] // max(1, sequences))
    return length if length <= FEW else 1 << (length - 1).bit_length()


def _read_packed(builder: CallBuilder, codecs: Codecs) -> list[ArrayRef]:
    dtype = builder.input("q").dtype
    stored = zip("qkv", (None, *codecs), strict=True)
    found = [as_numbers(builder.input(name), codec, dtype) for name, codec in stored]
    for name, array in zip("qkv", found, strict=True):
        if len(array.shape) != 3:
            takes = "attention_varlen takes (positions of all sequences, heads, head size)"
            raise ArgumentRank(f"{name!r} has shape {array.shape}; {takes}")
    plain = (True, *(codec is None for codec in codecs))
    return [unit_last(builder, array) if own else array for array, own in zip(found, plain, strict=True)]


def _read_offsets(q_offsets: ArrayRef, k_offsets: ArrayRef) -> int:
    """Check what can be known of offsets without their contents, and return the number of sequences."""
    for name, array in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        check_offsets_array(name, array)
    if q_offsets.shape != k_offsets.shape:
        found = f"q_offsets {q_offsets.shape} and k_offsets {k_offsets.shape}"
        raise ArgumentShape(f"{found} must have one length, B + 1 for B sequences")
    return q_offsets.shape[0] - 1


def check_offsets_array(name: str, offsets: ArrayRef) -> None:
    """Raise an error for offsets of a wrong type or rank."""
    if offsets.dtype not in (int32, int64):
        raise MixedDTypes(f"{name!r} must be int32 or int64, found {offsets.dtype}; cast it")
    if len(offsets.shape) != 1 or not offsets.shape[0]:
        raise ArgumentShape(f"{name!r} must have shape (B + 1,) for B sequences, found {offsets.shape}")


def refuse_block_mask(function: str, mask_mod: Any) -> None:
    """Raise an error for a block mask: its maps are those of one number of queries and keys."""
    if isinstance(mask_mod, BlockMask):
        found = f"mask_mod is a block mask for {mask_mod.Nq} queries and {mask_mod.Nk} keys"
        cure = "pass its function, mask_mod=blocks.mask_mod, which gets positions within the sequence"
        raise BadOption(f"{found}; sequences of {function} have lengths of their own: {cure}")


def contents(name: str, array: Array) -> np.ndarray[Any, Any]:
    """An array's contents in this machine's memory."""
    if torch_calls.is_tensor(array):
        tensors.read(name, array)
    return np.asarray(array.detach().cpu() if torch_calls.is_tensor(array) else array)


def check_offsets(q: Array, k: Array, q_offsets: Array, k_offsets: Array) -> None:
    """Raise BadOffsets unless both offsets rise from 0 to the lengths of their arrays."""
    for name, offsets, array in (("q_offsets", q_offsets, q), ("k_offsets", k_offsets, k)):
        check_rising(name, contents(name, offsets), array.shape[0])


def check_rising(name: str, offsets: np.ndarray[Any, Any], length: int) -> None:
    """Raise BadOffsets unless offsets rise from 0 to a length."""
    if offsets.ndim != 1 or not len(offsets):
        return  # which the plan will say
    falls = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)
    if offsets[0] != 0 or offsets[-1] != length:
        found = f"{name!r} goes from {offsets[0]} to {offsets[-1]}"
        raise BadOffsets(f"{found}; offsets go from 0 to the number of rows, {length}")
    if len(falls):
        at = int(falls[0])
        found = f"{name!r} falls from {offsets[at]} to {offsets[at + 1]} at position {at + 1}"
        raise BadOffsets(f"{found}; offsets never fall: an empty sequence repeats the one before")


VARLEN = LibraryFunction(("q", "k", "v", "q_offsets", "k_offsets", "sinks"), AttentionOptions, _plan)
