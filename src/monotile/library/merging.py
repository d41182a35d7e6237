"""Merging softmax states, and normalised parts, of different keys: the public functions and their plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import dtypes
from ..backends.choices import Choice
from ..dtypes import BY_NAME, FLOATS, DType, float32
from ..errors import ArgumentRank, ArgumentShape, BadOption, HeadSize, MixedDTypes
from ..kernels.merge import merge as merge_kernel
from ..kernels.merge import merge_lse as merge_lse_kernel
from ..runtime import arrays, tensors
from ..runtime.arrays import Library
from . import torch_calls
from .calls import ArrayRef, CallBuilder, Finish, LibraryFunction
from .inputs import MAX_HEAD_SIZE, one_device

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
    """`monotile.merge` of arrays that have contents."""
    torch_calls.refuse_gradients("merge", o, m, l)
    out, lse = MERGE.call((o, m, l), tensors.layouts((o, m, l)), (dtype, backend, threads))
    return out, lse


def _plan_merge(builder: CallBuilder, given: MergeOptions) -> Finish:
    state = Partials(builder.input("o"), builder.input("m"), builder.input("l"))
    o = state.o
    if o.dtype is not float32:
        raise MixedDTypes(f"'o' must be float32, found {o.dtype}: narrower partials overflow")
    _check_parts(o, {"m": state.m, "l": state.l})
    out = builder.result((*o.shape[:-2], o.shape[-1]), read_dtype(given.dtype))
    lse = builder.result(o.shape[:-2], float32)
    add_merge(
        builder, state, None, out, lse, builder.choices.merge(o.shape[-2], math.prod(o.shape[:-2]), builder.device)
    )
    return tuple


def new_partials(new: Callable[..., ArrayRef], out_shape: tuple[int, int, int, int], splits: int) -> Partials:
    """Arrays for the softmax states of an output's rows."""
    *rows, Dv = out_shape
    shape = *rows, splits
    return Partials(new((*shape, Dv), float32), new(shape, float32), new(shape, float32))


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
    """`monotile.merge_lse` of arrays that have contents."""
    given = (("outs", outs), ("lses", lses))
    parts = [(name, part) for name, a in given for part in (a if isinstance(a, list | tuple) else [a])]
    torch_calls.refuse_gradients("merge_lse", *[part for _, part in parts])
    first = outs[0] if isinstance(outs, list | tuple) and outs else outs
    lib = arrays.library("outs", first, backend)
    arrays.check_one_library(parts)
    outs, lses = (
        _stack_parts(lib, name, a, axis) if isinstance(a, list | tuple) else lib.adopt(name, a)
        for name, a, axis in (("outs", outs, -2), ("lses", lses, -1))
    )
    out, total = MERGE_LSE.call((outs, lses), tensors.layouts((outs, lses)), (backend, threads))
    found: tuple[Array, Array] = arrays.given_back(lib, (out, total), [part for _, part in parts])
    return found


def _plan_merge_lse(builder: CallBuilder, given: MergeLseOptions) -> Finish:
    outs, lses = builder.input("outs"), builder.input("lses")
    _check_parts(outs, {"lses": lses})
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


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_parts(o: ArrayRef, others: Mapping[str, ArrayRef]) -> None:
    """Parts to be merged: o (..., S, Dv) and its companions (..., S)."""
    if len(o.shape) < 2:
        raise ArgumentRank(f"parts have shape (..., S, Dv), found {o.shape}")
    if not 1 <= o.shape[-1] <= MAX_HEAD_SIZE:
        raise HeadSize(f"the head size is {o.shape[-1]}; it must be from 1 to {MAX_HEAD_SIZE}")
    if o.dtype not in FLOATS:
        raise MixedDTypes(f"parts are float32, float16 or bfloat16, found {o.dtype}; cast them")
    for name, array in others.items():
        if array.shape != o.shape[:-1]:
            raise ArgumentShape(f"{name!r} has shape {array.shape}; parts {o.shape} need {o.shape[:-1]}")
        if array.dtype is not float32:
            raise MixedDTypes(
                f"{name!r} must be float32, found {array.dtype}: narrower maxima and sums lose the result"
            )
    one_device({"parts": o, **others})


def _stack_parts(lib: Library, name: str, parts: Any, axis: int) -> Any:
    """One array of a sequence of parts that are alike."""
    parts = [lib.adopt(name, part) for part in parts]
    views = [tensors.read(name, part) for part in parts]
    kinds = {(view.shape, view.dtype, view.device) for view in views}
    if len(kinds) != 1 or len(views[0].shape) < -1 - axis:
        listing = ", ".join(sorted(f"{shape} {dtype}" for shape, dtype, _ in kinds)) or "none"
        raise ArgumentShape(f"{name!r} must be parts of one shape, element type and device, found {listing}")
    return lib.stack(parts, axis)


def read_dtype(dtype: Any) -> DType:
    """An element type as monotile, NumPy or torch names it."""
    if isinstance(dtype, DType):
        found: DType | None = dtype
    else:
        name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else None
        found = BY_NAME.get(name) if name in BY_NAME else _numpy_dtype(dtype)
    if found not in FLOATS:
        raise BadOption(f"dtype must be float32, float16 or bfloat16, found {dtype!r}")
    assert found is not None
    return found


def _numpy_dtype(dtype: Any) -> DType | None:
    import numpy as np

    try:
        return dtypes.from_numpy(np.dtype(dtype))
    except (TypeError, ValueError):
        return None


MERGE = LibraryFunction(("o", "m", "l"), MergeOptions, _plan_merge)
MERGE_LSE = LibraryFunction(("outs", "lses"), MergeLseOptions, _plan_merge_lse)
