"""The gradients of attention on sequences that lie one after the other: the public function and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..runtime import tensors
from . import torch_calls
from .backward import BackwardCall, BackwardOptions, Gradients, RowGradients, check_bools, check_rows
from .calls import CallBuilder, Finish, LibraryFunction
from .inputs import read_options, read_scoring, unit_last
from .varlen import as_batch, check_offsets, read_sequences, usual_problem

Array = Any


def attention_varlen_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, q_offsets: Array, k_offsets: Array, *,
    dlse: Array | None = None, causal: bool | str = False, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    deterministic: bool = True, check: bool = False, backend: str | None = None, threads: int | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients of `attention_varlen` with these arguments, where it returned `o` and `lse`.

    torch tensors that require grad need no call of it: `attention_varlen` is differentiable there. The gradients
    themselves have none: call it under `torch.no_grad()`, or in the backward of a `torch.autograd.Function`.

    Args:
        do: gradient of the output (Tq, Hq, Dv).
        q: queries (Tq, Hq, D).
        k: keys (Tk, Hkv, D).
        v: values (Tk, Hkv, Dv).
        o: output of the forward call.
        lse: its logsumexp (Hq, Tq), from `return_lse=True`.
        q_offsets: int32 or int64 (B + 1,), from 0 to Tq.
        k_offsets: int32 or int64 (B + 1,), from 0 to Tk.
        dlse: gradient of the logsumexp; 0 if left out.
        deterministic: as in `attention_backward`.
        causal, scale, window, softcap, sinks, score_mod, mask_mod, check, backend, threads: as in `attention_varlen`.

    Returns:
        `Gradients` dq, dk, dv and dsinks, which is None where there are no sinks; dmask is None.

    Example:
        >>> q, offsets = np.ones((7, 8, 64), np.float32), np.array([0, 3, 7], np.int32)
        >>> o, lse = monotile.attention_varlen(q, q, q, offsets, offsets, return_lse=True)
        >>> monotile.attention_varlen_backward(np.ones_like(o), q, q, q, o, lse, offsets, offsets).dq.shape
        (7, 8, 64)
    """
    check_bools(deterministic=deterministic)
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    arrays = q, k, v, do, o, lse, q_offsets, k_offsets, dlse, sinks
    if torch_calls.is_tensor(q):
        torch_calls.refuse_gradients("attention_varlen_backward", *arrays)
    layouts = tensors.layouts(arrays)
    if check:
        check_offsets(q, k, q_offsets, k_offsets)
    options = causal, window, softcap, score_mod, mask_mod, negative, False, backend, threads
    found: Gradients = VARLEN_BACKWARD.call(arrays, layouts, options, scale)
    return found


def _plan(builder: CallBuilder, given: BackwardOptions) -> Finish:
    options = read_options(given)
    inputs, offsets = read_sequences(builder)
    Tq, Hq, _ = builder.input("q").shape
    check_rows(builder, (Tq, Hq, inputs.v.shape[3]), (Hq, Tq), inputs.dtype)
    do, o = (as_batch(unit_last(builder, builder.input(name))) for name in ("do", "o"))
    sums = {n: builder.input(n).reshaped(1, Hq, Tq) for n in ("lse", "dlse") if n in builder.inputs}
    rows = RowGradients(do, o, sums["lse"], sums.get("dlse"))
    dq, dk, dv = (as_batch(builder.result(builder.input(name).shape, inputs.dtype)) for name in "qkv")
    sequences = offsets[0].shape[0] - 1
    # One kernel has a program for each sequence and KV head: the longest sequence alone must keep the machine busy.
    problem = replace(usual_problem(inputs, options, sequences), batch=1)
    threads = builder.threads_for(5 * inputs.flops // (2 * max(1, sequences)), 2 * inputs.bytes)
    by_mod = builder.choices.by_mod(problem, None)
    call = BackwardCall(builder, inputs, options, rows, threads, offsets, by_mod=by_mod)
    call.add_gradients(dq, dk, dv, builder.choices.attention_backward(problem))
    with_sinks = inputs.sinks is not None
    return lambda found: Gradients(found[0], found[1], found[2], found[3] if with_sinks else None, None)


_NAMES = ("q", "k", "v", "do", "o", "lse", "q_offsets", "k_offsets", "dlse", "sinks")
VARLEN_BACKWARD = LibraryFunction(_NAMES, BackwardOptions, _plan)
