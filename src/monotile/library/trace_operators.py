"""Functions that have no gradient as torch operators, for traces (torch.compile, export, fake and meta tensors):
`attention_paged`, `paged_append`, `decode_partials`, `merge` and `merge_lse`. Outside of a trace they are not used.
quantized_operators.py has those of calls with Quantized keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends.choices import KEYS_PER_SPLIT
from ..errors import BadOption
from . import merging, ops, paged
from .inputs import read_window
from .merging import Partials
from .mod_table import arrays_of, number_of
from .torch_calls import refuse_gradients
from .torch_operator import LIBRARY, OPTIONS, READING, scoring_options

Pair = tuple[Any, Any]
SCORING = OPTIONS + READING["_reading"]
RUN = "str? backend, int? threads"
PAGED = "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor lengths, Tensor? sinks, Tensor? q_offsets"
APPENDED = "Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, Tensor lengths, Tensor k_new, Tensor v_new"
PARTS = "(Tensor, Tensor, Tensor)"


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define an operator: what it computes, and the shapes of its results."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monotile::{name}", shapes, lib=LIBRARY)


def refuse_check(check: bool) -> None:
    if check:
        raise BadOption("check=True reads table and lengths, which have no contents in a trace; leave it out there")


def scoring_of(causal: Any, window: Any, scale: Any, softcap: Any, score_mod: Any, mask_mod: Any, **run: Any) -> Any:
    """The values of OPTIONS, and what the table of functions holds until the operator has their number."""
    left, right = (None, None) if window is None else read_window(window)
    number, held = number_of(score_mod, mask_mod)
    read = arrays_of(score_mod, mask_mod)
    return (str(causal), left, right, scale, softcap, number, run["backend"], run["threads"], read), held


# ---- pages -----------------------------------------------------------------------------------------------------------


def attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *, sinks: Tensor | None,
    q_offsets: Tensor | None, return_lse: bool, check: bool, **scoring: Any,
) -> Any:  # fmt: skip
    refuse_check(check)
    refuse_gradients("attention_paged", sinks)
    options, held = scoring_of(**scoring)
    arrays = q, k_pages, v_pages, page_table, lengths, sinks, q_offsets
    o, lse = torch.ops.monotile.attention_paged(*arrays, *options)
    del held
    return (o, lse) if return_lse else o


def _paged(*args: Any) -> tuple[Tensor, Tensor]:
    *arrays, sinks, q_offsets = args[:7]
    options = {**scoring_options(*args[7:]), "sinks": sinks, "q_offsets": q_offsets, "return_lse": True}
    found: tuple[Tensor, Tensor] = paged.attention_paged(*arrays, **options)
    return found


def _paged_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    (q, _, v_pages), q_offsets = args[:3], args[6]
    return paged_results(q, v_pages.shape[3], q_offsets)


def paged_results(q: Tensor, size: int, q_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of `attention_paged`, with values of this size."""
    sums = q.shape[:3] if q_offsets is None else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], size)), q.new_empty(sums, dtype=torch.float32)


def paged_append(*arrays: Tensor, check: bool, backend: str | None, threads: int | None) -> None:
    refuse_check(check)
    torch.ops.monotile.paged_append(*arrays, backend, threads)


def _append(*args: Any) -> None:
    paged.paged_append(*args[:6], backend=args[6], threads=args[7])


def _nothing(*args: Any) -> None:
    """An operator without results."""


# ---- softmax states --------------------------------------------------------------------------------------------------


def decode_partials(
    q: Tensor, k: Tensor, v: Tensor, *, splits: int | None, mask: Tensor | None, **scoring: Any
) -> Partials:
    options, held = scoring_of(**scoring)
    found = torch.ops.monotile.decode_partials(q, k, v, mask, splits, *options)
    del held
    return Partials(*found)


def _partials(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, splits: int | None, *args: Any) -> tuple[Any, ...]:
    return tuple(ops.decode_partials(q, k, v, mask=mask, splits=splits, **scoring_options(*args)))


def _partials_shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, splits: int | None, *args: Any
) -> tuple[Any, ...]:
    if splits is None:
        splits = torch.sym_max(1, (k.shape[-2] + KEYS_PER_SPLIT - 1) // KEYS_PER_SPLIT)
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    rows = *lead, *q.shape[-3:-1], splits
    shapes = (*rows, v.shape[-1]), rows, rows
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def merge(o: Tensor, m: Tensor, l: Tensor, *, dtype: Any, backend: str | None, threads: int | None) -> Pair:
    out, lse = torch.ops.monotile.merge(o, m, l, merging.read_dtype(dtype).name, backend, threads)
    return out, lse


def _merge(o: Tensor, m: Tensor, l: Tensor, dtype: str, backend: str | None, threads: int | None) -> Any:
    return merging.merge(o, m, l, dtype=dtype, backend=backend, threads=threads)


def _merge_shapes(o: Tensor, m: Tensor, l: Tensor, dtype: str, *args: Any) -> Any:
    out = o.new_empty((*o.shape[:-2], o.shape[-1]), dtype=getattr(torch, dtype))
    return out, o.new_empty(o.shape[:-2], dtype=torch.float32)


def merge_lse(outs: Any, lses: Any, *, backend: str | None, threads: int | None) -> Pair:
    outs = torch.stack(tuple(outs), -2) if isinstance(outs, list | tuple) else outs
    lses = torch.stack(tuple(lses), -1) if isinstance(lses, list | tuple) else lses
    out, lse = torch.ops.monotile.merge_lse(outs, lses, backend, threads)
    return out, lse


def _merge_lse(outs: Tensor, lses: Tensor, backend: str | None, threads: int | None) -> Any:
    return merging.merge_lse(outs, lses, backend=backend, threads=threads)


def _merge_lse_shapes(outs: Tensor, lses: Tensor, *args: Any) -> Any:
    return _merge_shapes(outs, lses, lses, str(outs.dtype).removeprefix("torch."))


define(f"attention_paged({PAGED}, {SCORING}) -> (Tensor, Tensor)", _paged, _paged_shapes)
define(f"paged_append({APPENDED}, {RUN}) -> ()", _append, _nothing)
define(
    f"decode_partials(Tensor q, Tensor k, Tensor v, Tensor? mask, int? splits, {SCORING}) -> {PARTS}",
    _partials,
    _partials_shapes,
)
define(f"merge(Tensor o, Tensor m, Tensor l, str dtype, {RUN}) -> (Tensor, Tensor)", _merge, _merge_shapes)
define(f"merge_lse(Tensor outs, Tensor lses, {RUN}) -> (Tensor, Tensor)", _merge_lse, _merge_lse_shapes)
