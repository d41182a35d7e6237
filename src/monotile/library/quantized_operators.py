"""Calls with Quantized keys and values as torch operators, for traces (torch.compile, export, fake and meta tensors),
as trace_operators.py has plain ones. The fields are arguments; the rest of a `Quantized` are words and numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.choices import KEYS_PER_SPLIT
from . import quantized_ops, quantized_paged, quantized_varlen
from .formats import check_kinds
from .merging import Partials
from .quantized import Quantized
from .torch_calls import refuse_gradients
from .torch_operator import scoring_options
from .trace_operators import PARTS, RUN, SCORING, define, paged_results, refuse_check, scoring_of

FIELDS = "Tensor {0}, Tensor? {0}_scales, Tensor? {0}_zeros, str {0}_format, int {0}_size, str {0}_dtype"
STORED = f"{FIELDS.format('k')}, {FIELDS.format('v')}"
WRITTEN = "Tensor({1}!) {0}, Tensor({2}!)? {0}_scales, Tensor({3}!)? {0}_zeros, str {0}_format, int {0}_size"
PLAIN = ""  # the format of what is not quantised


class StoredPair(NamedTuple):
    """Keys and values as arguments of an operator."""

    k: Tensor
    k_scales: Tensor | None
    k_zeros: Tensor | None
    k_format: str
    k_size: int
    k_dtype: str
    v: Tensor
    v_scales: Tensor | None
    v_zeros: Tensor | None
    v_format: str
    v_size: int
    v_dtype: str

    @classmethod
    def of(cls, k: Any, v: Any) -> StoredPair:
        return cls(*_fields(k), *_fields(v))

    @property
    def pair(self) -> tuple[Any, Any]:
        """Keys and values as functions of the library take them."""
        return _stored(*self[:6]), _stored(*self[6:])

    def refuse_gradients(self, function: str, *others: Tensor | None) -> None:
        """Raise an error where a field or one of the other tensors of a call requires grad."""
        fields = self.k, self.k_scales, self.k_zeros, self.v, self.v_scales, self.v_zeros
        refuse_gradients(f"{function} on Quantized keys and values", *others, *fields)

    @property
    def value_size(self) -> int:
        return self.v_size if self.v_format else self.v.shape[-1]


def _fields(x: Any) -> tuple[Any, ...]:
    if type(x) is Quantized:
        check_kinds(x)
        return x.codes, x.scales, x.zeros, x.format, x.size, x.dtype
    return x, None, None, PLAIN, 0, ""


def _stored(codes: Any, scales: Any, zeros: Any, format: Any, size: Any, dtype: Any) -> Any:
    return Quantized(format, codes, scales, zeros, size, dtype) if format else codes


STORED_ARGUMENTS = len(StoredPair._fields)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Any, v: Any, *, mask: Tensor | None, sinks: Tensor | None, return_lse: bool, **scoring: Any
) -> Any:
    stored = StoredPair.of(k, v)
    stored.refuse_gradients("attention", q, mask, sinks)
    options, held = scoring_of(**scoring)
    o, lse = torch.ops.monotile.attention_quantized(q, *stored, mask, sinks, *options)
    del held
    return (o, lse) if return_lse else o


def _attention(q: Tensor, *args: Any) -> Any:
    k, v = StoredPair(*args[:STORED_ARGUMENTS]).pair
    mask, sinks, *options = args[STORED_ARGUMENTS:]
    return quantized_ops.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, **scoring_options(*options))


def _attention_shapes(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    stored = StoredPair(*args[:STORED_ARGUMENTS])
    rows = *torch.broadcast_shapes(q.shape[:-3], stored.k.shape[:-3], stored.v.shape[:-3]), *q.shape[-3:-1]
    return q.new_empty((*rows, stored.value_size)), q.new_empty(rows, dtype=torch.float32)


def decode_partials(q: Tensor, k: Any, v: Any, *, splits: int | None, mask: Tensor | None, **scoring: Any) -> Partials:
    stored = StoredPair.of(k, v)
    stored.refuse_gradients("decode_partials", q, mask)
    options, held = scoring_of(**scoring)
    found = torch.ops.monotile.decode_partials_quantized(q, *stored, mask, splits, *options)
    del held
    return Partials(*found)


def _partials(q: Tensor, *args: Any) -> tuple[Any, ...]:
    k, v = StoredPair(*args[:STORED_ARGUMENTS]).pair
    mask, splits, *options = args[STORED_ARGUMENTS:]
    return tuple(quantized_ops.decode_partials(q, k, v, mask=mask, splits=splits, **scoring_options(*options)))


def _partials_shapes(q: Tensor, *args: Any) -> tuple[Any, ...]:
    stored, splits = StoredPair(*args[:STORED_ARGUMENTS]), args[STORED_ARGUMENTS + 1]
    if splits is None:
        splits = torch.sym_max(1, (stored.k.shape[-2] + KEYS_PER_SPLIT - 1) // KEYS_PER_SPLIT)
    lead = torch.broadcast_shapes(q.shape[:-3], stored.k.shape[:-3], stored.v.shape[:-3])
    rows = *lead, *q.shape[-3:-1], splits
    shapes = (*rows, stored.value_size), rows, rows
    return tuple(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


def attention_varlen(
    q: Tensor, k: Any, v: Any, q_offsets: Tensor, k_offsets: Tensor, *, sinks: Tensor | None, return_lse: bool,
    check: bool, **scoring: Any,
) -> Any:  # fmt: skip
    refuse_check(check)
    stored = StoredPair.of(k, v)
    stored.refuse_gradients("attention_varlen", q, sinks)
    options, held = scoring_of(**scoring)
    o, lse = torch.ops.monotile.attention_varlen_quantized(q, *stored, q_offsets, k_offsets, sinks, *options)
    del held
    return (o, lse) if return_lse else o


def _varlen(q: Tensor, *args: Any) -> Any:
    k, v = StoredPair(*args[:STORED_ARGUMENTS]).pair
    q_offsets, k_offsets, sinks, *options = args[STORED_ARGUMENTS:]
    given = {"sinks": sinks, "return_lse": True, "check": False, **scoring_options(*options)}
    return quantized_varlen.attention_varlen(q, k, v, q_offsets, k_offsets, **given)


def _varlen_shapes(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    size, (T, H, _) = StoredPair(*args[:STORED_ARGUMENTS]).value_size, q.shape
    return q.new_empty((T, H, size)), q.new_empty((H, T), dtype=torch.float32)


# ---- pages -----------------------------------------------------------------------------------------------------------


def attention_paged(
    q: Tensor, k_pages: Any, v_pages: Any, page_table: Tensor, lengths: Tensor, *, sinks: Tensor | None,
    q_offsets: Tensor | None, return_lse: bool, check: bool, **scoring: Any,
) -> Any:  # fmt: skip
    refuse_check(check)
    stored = StoredPair.of(k_pages, v_pages)
    stored.refuse_gradients("attention_paged", q, sinks)
    options, held = scoring_of(**scoring)
    places = page_table, lengths, sinks, q_offsets
    o, lse = torch.ops.monotile.attention_paged_quantized(q, *stored, *places, *options)
    del held
    return (o, lse) if return_lse else o


def _paged(q: Tensor, *args: Any) -> Any:
    k, v = StoredPair(*args[:STORED_ARGUMENTS]).pair
    table, lengths, sinks, q_offsets, *options = args[STORED_ARGUMENTS:]
    given = {"sinks": sinks, "q_offsets": q_offsets, "return_lse": True, "check": False, **scoring_options(*options)}
    return quantized_paged.attention_paged(q, k, v, table, lengths, **given)


def _paged_shapes(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return paged_results(q, StoredPair(*args[:STORED_ARGUMENTS]).value_size, args[STORED_ARGUMENTS + 3])


def paged_append(
    k_pages: Any, v_pages: Any, page_table: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor, *, check: bool,
    backend: str | None, threads: int | None,
) -> None:  # fmt: skip
    refuse_check(check)
    stored = StoredPair.of(k_pages, v_pages)
    stored.refuse_gradients("paged_append", k_new, v_new)
    written = *stored[:5], *stored[6:11]
    torch.ops.monotile.paged_append_quantized(*written, page_table, lengths, k_new, v_new, backend, threads)


def _append(*args: Any) -> None:
    k, v = (_stored(*[*args[n : n + 5], "float32"]) for n in (0, 5))
    *arrays, backend, threads = args[10:]
    quantized_paged.paged_append(k, v, *arrays, check=False, backend=backend, threads=threads)


def _nothing(*args: Any) -> None:
    """An operator without results."""


PAIR = "(Tensor, Tensor)"
PLACES = "Tensor page_table, Tensor lengths"
define(
    f"attention_quantized(Tensor q, {STORED}, Tensor? mask, Tensor? sinks, {SCORING}) -> {PAIR}",
    _attention,
    _attention_shapes,
)
define(
    f"decode_partials_quantized(Tensor q, {STORED}, Tensor? mask, int? splits, {SCORING}) -> {PARTS}",
    _partials,
    _partials_shapes,
)
define(
    f"attention_varlen_quantized(Tensor q, {STORED}, Tensor q_offsets, Tensor k_offsets, Tensor? sinks, {SCORING})"
    f" -> {PAIR}",
    _varlen,
    _varlen_shapes,
)
define(
    f"attention_paged_quantized(Tensor q, {STORED}, {PLACES}, Tensor? sinks, Tensor? q_offsets, {SCORING}) -> {PAIR}",
    _paged,
    _paged_shapes,
)
define(
    f"paged_append_quantized({WRITTEN.format('k', *'abc')}, {WRITTEN.format('v', *'def')}, {PLACES},"
    f" Tensor k_new, Tensor v_new, {RUN}) -> ()",
    _append,
    _nothing,
)
