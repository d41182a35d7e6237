"""Attention of sequences of different lengths that lie one after the other: the public function and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..dtypes import float32, int32, int64
from ..errors import ArgumentRank, ArgumentShape, BadOffsets, MixedDTypes
from ..kernels.attention import NOT_QUANTIZED
from ..kernels.attention import attention as attention_kernel
from ..runtime import tensors
from . import torch_calls
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

Array = Any
NOT_PAGED = (None,) * 4


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Array | None = None, score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, return_lse: bool = False, check: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Return the attention of each of B sequences as if it were alone.

    Sequences lie one after the other: sequence s has rows q_offsets[s] to q_offsets[s + 1] and keys k_offsets[s] to
    k_offsets[s + 1].

    Args:
        q: queries (Tq, Hq, D).
        k: keys (Tk, Hkv, D).
        v: values (Tk, Hkv, Dv).
        q_offsets: int32 or int64 (B + 1,), from 0 to Tq.
        k_offsets: int32 or int64 (B + 1,), from 0 to Tk.
        causal: True or "lower_right": query i sees keys up to i + Nk - Nq; "upper_left": up to i.
        scale: factor of the scores; 1 / sqrt(D) if left out.
        window: (left, right), how many keys before and after its own a query sees; None or -1 is no bound.
        softcap: c, for scores c * tanh(score / c).
        sinks: (Hq,), scores of one more key per head that has no value.
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> score; positions within the sequence.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool, likewise.
        return_lse: also return the logsumexp of the scores, float32 (Hq, Tq).
        check: check the contents of the offsets, which waits for a GPU.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (Tq, Hq, Dv), or a tuple of it and the logsumexp.

    Example:
        >>> q, offsets = np.ones((7, 8, 64), np.float32), np.array([0, 3, 7], np.int32)
        >>> monotile.attention_varlen(q, q, q, offsets, offsets, causal=True).shape
        (7, 8, 64)
    """
    torch_calls.refuse_gradients("attention_varlen", q, k, v, sinks)
    if torch_calls.is_tensor(q):
        q, k, v = torch_calls.in_autocast(q, k, v)
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    arrays = q, k, v, q_offsets, k_offsets, sinks
    layouts = _, addresses = tensors.layouts(arrays)
    if check:
        for name, offsets, array in (("q_offsets", q_offsets, q), ("k_offsets", k_offsets, k)):
            check_offsets(name, contents(offsets), array.shape[0])
    in_keys = addresses[1] == addresses[2] and tensors.is_leading_part(v, k)
    options = causal, window, softcap, score_mod, mask_mod, negative, in_keys, return_lse, backend, threads
    return VARLEN.call(arrays, layouts, options, scale)


def _plan(builder: CallBuilder, given: AttentionOptions) -> Finish:
    options = read_options(given)
    q, k, v = (unit_last(builder, a) for a in _read_packed(builder))
    offsets = builder.input("q_offsets"), builder.input("k_offsets")
    sequences = _read_offsets(*offsets)
    dtype, sinks = one_dtype({"q": q, "k": k, "v": v}), builder.inputs.get("sinks")
    q, k, v = (_batch_of(a) for a in (q, k, v))
    inside = AttentionInputs(q, k, v, None, sinks, dtype, batched=True, values_in_keys=given.values_in_keys)
    check_shapes(inside.q.shape, inside.k.shape, inside.v.shape)
    (_, Hq, Tq, D), Dv = inside.q.shape, inside.v.shape[3]
    if sinks is not None:
        check_sinks(sinks, Hq)
    one_device(builder.inputs)
    builder.scale = float(D**-0.5)
    out = builder.result((Tq, Hq, Dv), dtype)
    lse = builder.result((Hq, Tq), float32) if given.return_lse else None
    if Tq and sequences == 0:
        raise ArgumentShape(f"{Tq} rows of q and no sequence: offsets have a length of 1; give B + 1 offsets")
    if 0 not in out.shape:
        problem = inside.problem(options)
        lengths = (_rounded(-(-length // sequences)) for length in (Tq, inside.k.shape[2]))
        queries, keys = lengths
        problem = replace(problem, source="ragged", batch=sequences, kv_heads=Hq, queries=queries, keys=keys)
        choice = builder.choices.attention(problem).unpacked()
        threads = builder.threads_for(inside.flops // sequences, inside.bytes)
        values = None if given.values_in_keys and not builder.copies else inside.v
        sums = None if lse is None else lse.reshaped(1, Hq, Tq)
        args = inside.q, inside.k, values, None, None, sinks, _batch_of(out), sums, None, None, None, *offsets
        scalars = SCALE, Tq, 0, 0
        builder.launch(
            attention_kernel,
            *args,
            *NOT_PAGED,
            *NOT_QUANTIZED,
            *scalars,
            choice=choice,
            threads=threads,
            options=options,
        )
    return tuple if given.return_lse else itemgetter(0)


def _batch_of(array: ArrayRef) -> ArrayRef:
    """Rows (T, H, D) as one batch (1, H, T, D)."""
    T, H, D = array.shape
    return array.reshaped(1, T, H, D).permuted(0, 2, 1, 3)


def _rounded(length: int) -> int:
    """The next power of two, so that new lengths seldom need a new program."""
    return 1 << max(0, length - 1).bit_length()


def _read_packed(builder: CallBuilder) -> list[ArrayRef]:
    found = [builder.input(name) for name in "qkv"]
    for name, array in zip("qkv", found, strict=True):
        if len(array.shape) != 3:
            takes = "attention_varlen takes (positions of all sequences, heads, head size)"
            raise ArgumentRank(f"{name!r} has shape {array.shape}; {takes}")
    return found


def _read_offsets(q_offsets: ArrayRef, k_offsets: ArrayRef) -> int:
    """Check what can be known of offsets without their contents, and return the number of sequences."""
    for name, array in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if array.dtype not in (int32, int64):
            raise MixedDTypes(f"{name!r} must be int32 or int64, found {array.dtype}; cast it")
        if len(array.shape) != 1 or not array.shape[0]:
            raise ArgumentShape(f"{name!r} must have shape (B + 1,) for B sequences, found {array.shape}")
    if q_offsets.shape != k_offsets.shape:
        found = f"q_offsets {q_offsets.shape} and k_offsets {k_offsets.shape}"
        raise ArgumentShape(f"{found} must have one length, B + 1 for B sequences")
    return q_offsets.shape[0] - 1


def contents(array: Array) -> np.ndarray[Any, Any]:
    """An array's contents in this machine's memory."""
    return np.asarray(array.detach().cpu() if torch_calls.is_tensor(array) else array)


def check_offsets(name: str, offsets: np.ndarray[Any, Any], length: int) -> None:
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
