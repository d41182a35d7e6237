"""Merging softmax states, and normalised parts, of different keys: the public functions and their plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..backends.choices import Choice
from ..dtypes import float32
from ..errors import MixedDTypes
from ..kernels.merge import merge as merge_kernel
from ..kernels.merge import merge_lse as merge_lse_kernel
from ..runtime import arrays, tensors
from . import torch_calls
from .calls import ArrayRef, CallBuilder, Finish, LibraryFunction
from .parts import check_parts, read_dtype, stack_parts

Array = Any


class Partials(NamedTuple):
    """Softmax states of S splits of the keys: o (B, Hq, Nq, S, Dv) unnormalised, m and l (B, Hq, Nq, S), float32."""

    o: Array
    m: Array
    l: Array


class MergeOptions(NamedTuple):
    dtype: Any
    backend: str | None
    threads: int | None


def merge(
    o: Array, m: Array, l: Array, *, dtype: Any = float32, backend: str | None = None, threads: int | None = None
) -> tuple[Array, Array]:
    """Merge S softmax states: o (..., S, Dv), m and l (..., S), float32. Gives output (..., Dv) and natural lse
    (...)."""
    torch_calls.refuse_gradients("merge", o, m, l)
    out, lse = MERGE.call((o, m, l), tensors.layouts((o, m, l)), (dtype, backend, threads))
    return out, lse


def _plan_merge(builder: CallBuilder, given: MergeOptions) -> Finish:
    state = Partials(builder.input("o"), builder.input("m"), builder.input("l"))
    o = state.o
    if o.dtype is not float32:
        raise MixedDTypes(f"'o' must be float32, found {o.dtype}: narrower partials overflow")
    check_parts(o, {"m": state.m, "l": state.l})
    out = builder.result((*o.shape[:-2], o.shape[-1]), read_dtype(given.dtype))
    lse = builder.result(o.shape[:-2], float32)
    add_merge(
        builder, state, None, out, lse, builder.choices.merge(o.shape[-2], math.prod(o.shape[:-2]), builder.device)
    )
    return tuple


def add_merge(
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
    parts = [*outs, *lses] if isinstance(outs, list | tuple) and isinstance(lses, list | tuple) else [outs, lses]
    torch_calls.refuse_gradients("merge_lse", *parts)
    first = outs[0] if isinstance(outs, list | tuple) and outs else outs
    lib = arrays.library("outs", first)
    outs, lses = (
        stack_parts(lib, name, a, axis) if isinstance(a, list | tuple) else lib.adopt(name, a)
        for name, a, axis in (("outs", outs, -2), ("lses", lses, -1))
    )
    out, total = MERGE_LSE.call((outs, lses), tensors.layouts((outs, lses)), (backend, threads))
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


MERGE = LibraryFunction(("o", "m", "l"), MergeOptions, _plan_merge)
MERGE_LSE = LibraryFunction(("outs", "lses"), MergeLseOptions, _plan_merge_lse)
