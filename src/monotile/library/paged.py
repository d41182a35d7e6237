"""Attention on keys and values in pages, as model servers keep them, and appending to them: the public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..backends.choices import AttentionChoice, AttentionProblem, cdiv
from ..dtypes import float32, int32
from ..errors import ArgumentRank, ArgumentShape, BadPages, MixedDTypes, OverlappingOutput
from ..ir.ops import MAX_LENGTH
from ..kernels.attention import attention as attention_kernel
from ..kernels.paged_append import paged_append as paged_append_kernel
from ..kernels.scores import Options
from ..runtime import tensors
from ..runtime.arrays import check_one_library
from ..runtime.tensors import View
from . import torch_calls
from .balancing import NOT_BALANCED, Balanced, Lengths, add_balance, add_merge_slots, is_balanced
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
from .quantized_inputs import Codecs, as_numbers, codecs_of, read_paged_fields
from .rotations import before_rotation, rotate_back, rotated_queries
from .varlen import as_batch, check_offsets_array, check_rising, contents, refuse_block_mask, usual_length

Array = Any


def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, *, q_offsets: Array | None = None,
    causal: bool | str = True, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None, sinks: Array | None = None, score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, return_lse: bool = False, check: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """`monotile.attention_paged` on pages that are not quantised."""
    torch_calls.refuse_gradients("attention_paged", q, k_pages, v_pages, sinks)
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    refuse_block_mask("attention_paged", mask_mod)
    arrays = q, k_pages, v_pages, page_table, lengths, sinks, q_offsets
    layouts = _, addresses = tensors.layouts(arrays)
    if check:
        check_contents(q, page_table, lengths, q_offsets, k_pages.shape)
    in_keys = addresses[1] == addresses[2] and tensors.is_leading_part(v_pages, k_pages)
    options = causal, window, softcap, score_mod, mask_mod, negative, in_keys, return_lse, backend, threads
    return PAGED.call(arrays, layouts, options, scale)


class Places(NamedTuple):
    """Where the sequences of a call are."""

    table: ArrayRef
    lengths: ArrayRef
    q_offsets: ArrayRef | None  # of queries that lie one after the other

    @property
    def sequences(self) -> int:
        return self.table.shape[0]


def plan(builder: CallBuilder, given: Any) -> Finish:
    options, codecs = read_options(given), codecs_of(given)
    inputs, places = _read(builder, codecs, values_in_keys=given.values_in_keys)
    B, Hq, Nq, Dv = inputs.out_shape
    packed = places.q_offsets is not None
    out = builder.result((Nq, Hq, Dv) if packed else inputs.out_shape, inputs.dtype)
    lse = builder.result((Hq, Nq) if packed else (B, Hq, Nq), float32) if given.return_lse else None
    if 0 not in out.shape:
        rows = as_batch(out) if packed else out
        found = before_rotation(builder, rows, codecs[1])
        _add(builder, inputs, places, (found, None if lse is None else lse.reshaped(B, Hq, Nq)), options)
        rotate_back(builder, found, rows, codecs[1])
    return tuple if given.return_lse else itemgetter(0)


def _read(builder: CallBuilder, codecs: Codecs, *, values_in_keys: bool) -> tuple[AttentionInputs, Places]:
    """Check the arrays of a call. Queries that lie one after the other become one batch."""
    q, sinks = builder.input("q"), builder.inputs.get("sinks")
    k, v = (
        _read_pages(as_numbers(builder.input(name), codec, q.dtype), name)
        for name, codec in zip(("k_pages", "v_pages"), codecs, strict=True)
    )
    places = Places(builder.input("page_table"), builder.input("lengths"), builder.inputs.get("q_offsets"))
    q = _read_queries(builder, places.q_offsets)
    _check_table(places, q.shape[0], k.shape)
    dtype = one_dtype({"q": q, "k_pages": k, "v_pages": v})
    check_shapes(q.shape, (q.shape[0], *k.shape[1:]), (q.shape[0], *v.shape[1:]))
    if k.shape[0] != v.shape[0]:
        raise ArgumentShape(f"k_pages has {k.shape[0]} pages and v_pages has {v.shape[0]}; they must be equal")
    if sinks is not None:
        check_sinks(sinks, q.shape[1])
    one_device(builder.inputs)
    builder.scale = float(q.shape[3] ** -0.5)
    stored = read_paged_fields(builder, codecs, q.shape[0])
    q = rotated_queries(builder, q, codecs[0])
    return AttentionInputs(q, k, v, None, sinks, dtype, True, values_in_keys, stored), places


def _read_queries(builder: CallBuilder, q_offsets: ArrayRef | None) -> ArrayRef:
    """Queries (B, H, N, D); those with offsets as one batch."""
    q = builder.input("q")
    if q_offsets is None:
        if len(q.shape) != 4:
            takes = "attention_paged takes (batch, heads, length, head size)"
            raise ArgumentRank(f"'q' has shape {q.shape}; {takes}, or the rows of all sequences with their q_offsets")
        return unit_last(builder, q)
    check_offsets_array("q_offsets", q_offsets)
    if len(q.shape) != 3:
        takes = "with q_offsets attention_paged takes (positions of all sequences, heads, head size)"
        raise ArgumentRank(f"'q' has shape {q.shape}; {takes}")
    if q.shape[0] and q_offsets.shape[0] == 1:
        raise ArgumentShape(f"{q.shape[0]} rows of q and no sequence: q_offsets has a length of 1; give B + 1 offsets")
    return as_batch(unit_last(builder, q))


def _add(
    builder: CallBuilder, inputs: AttentionInputs, places: Places, target: tuple[ArrayRef, ArrayRef | None],
    options: Options,
) -> None:  # fmt: skip
    """Add the attention kernel, which writes the output and its logsumexp, or softmax states that are then merged."""
    (_, Hq, Nq, _), (table, lengths, q_offsets), page = inputs.q.shape, places, inputs.k.shape[2]
    capacity, B = table.shape[1] * page, places.sequences
    problem = replace(inputs.problem(options), batch=B, keys=capacity, source="paged")
    if q_offsets is not None:
        problem = replace(problem, queries=usual_length(inputs.q, B))
    choice, balanced = _choose(builder, problem, page), None
    if is_balanced(builder, problem, choice, ragged_rows=q_offsets is not None):
        of = Lengths(Nq, capacity, _row_blocks(problem, choice, places, Nq), q_offsets, lengths=lengths)
        balanced = add_balance(builder, of, problem, choice, options)
    elif q_offsets is not None:
        choice = _choose(builder, replace(problem, kv_heads=Hq), page).unpacked()
    _add_attention(builder, inputs, places, choice, balanced or target, problem=problem, options=options)
    if balanced is not None:
        add_merge_slots(builder, balanced, q_offsets, inputs.sinks, target, choice)


def _row_blocks(problem: AttentionProblem, choice: AttentionChoice, places: Places, queries: int) -> int:
    """Blocks of rows of a row group in all sequences, at most."""
    rows = queries * (problem.group if choice.packed else 1)
    if places.q_offsets is None:
        return places.sequences * cdiv(rows, choice.row_block)
    return rows // choice.row_block + places.sequences + 1


def _choose(builder: CallBuilder, problem: AttentionProblem, page: int) -> AttentionChoice:
    """Return the blocks for pages; whether keys are split is that of dense ones."""
    choice = builder.choices.attention(problem)
    block = builder.choices.page_block(page, choice, quantized=problem.quantized)
    return replace(choice, blocks={**choice.blocks, "BK": block}, first_block=0, blocks_per_split=0)


def _add_attention(
    builder: CallBuilder, inputs: AttentionInputs, places: Places, choice: AttentionChoice,
    target: Balanced | tuple[ArrayRef, ArrayRef | None], *, problem: AttentionProblem, options: Options,
) -> None:  # fmt: skip
    """Add the attention kernel, which writes softmax states of splits or the output and its logsumexp."""
    B, Hq, Nq, Dv = inputs.out_shape
    H = inputs.k.shape[1] if choice.packed else Hq

    def grouped(array: ArrayRef | None) -> ArrayRef | None:
        if array is None or places.q_offsets is not None:
            return array
        return builder.reshaped(array, B, H, Hq * Nq // H, *array.shape[3:])

    slots: tuple[ArrayRef | None, ...] = NOT_BALANCED
    outputs: tuple[ArrayRef | None, ...] = (None, None, None)
    if isinstance(target, Balanced):
        slots = target.arguments
    else:
        outputs = inputs.sinks, *map(grouped, target)
    keys, values, *fields = inputs.stored.arguments(inputs.k, None if inputs.values_in_keys else inputs.v)
    offsets = places.q_offsets, None, None
    args = grouped(inputs.q), None, None, None, None, *outputs, *(None,) * 3, *offsets, keys, values, *places[:2]
    consts = {} if inputs.stored.is_plain else {"T": inputs.k.shape[2], **inputs.stored.constants}
    consts |= {"options": options, "by_mod": builder.choices.by_mod(problem, choice)}
    work = 2 * B * Hq * Nq * problem.keys * (inputs.q.shape[3] + Dv)
    read = places.sequences * problem.keys * inputs.k.shape[1] * (inputs.q.shape[3] + Dv) * inputs.dtype.bytes
    threads = builder.threads_for(work, read)
    builder.launch(attention_kernel, *args, *slots, *fields, SCALE, Nq, 0, 0, choice=choice, threads=threads, **consts)


def _read_pages(array: ArrayRef, name: str) -> ArrayRef:
    """Pages (P, page, Hkv, D) with heads before positions. They are read in place: a copy would be one of all pages."""
    if len(array.shape) != 4:
        raise ArgumentRank(
            f"{name!r} has shape {array.shape}; pages are (pages, positions of a page, heads, head size)"
        )
    if array.shape[1] < 1:
        raise ArgumentShape(f"{name!r} has shape {array.shape}; a page has at least one position")
    if array.shape[3] > 1 and 0 not in array.shape and array.view.strides[3] != 1:
        raise ArgumentShape(
            f"the last stride of {name!r} is {array.view.strides[3]}; pages need 1 there: copy them once"
        )
    return array.permuted(0, 2, 1, 3)


def _check_table(places: Places, batch: int, pages: tuple[int, ...]) -> None:
    table, lengths, q_offsets = places
    batch = batch if q_offsets is None else q_offsets.shape[0] - 1
    of = f"a batch of B = {batch}" if q_offsets is None else f"B = {batch} sequences of q_offsets"
    for name, array, shape in (("page_table", table, "(B, most)"), ("lengths", lengths, "(B,)")):
        if array.dtype is not int32:
            raise MixedDTypes(f"{name!r} must be int32, found {array.dtype}; cast it")
        if len(array.shape) != shape.count(",") + (name == "page_table") or array.shape[:1] != (batch,):
            raise ArgumentShape(f"{name!r} must have shape {shape} for {of}, found {array.shape}")
    if table.shape[1] * pages[2] > MAX_LENGTH:
        found = f"the table holds {table.shape[1]} pages of {pages[2]} positions for a sequence"
        raise ArgumentShape(f"{found}; at most {MAX_LENGTH} positions are supported: pass fewer columns")


def check_contents(q: Array, table: Array, lengths: Array, q_offsets: Array | None, pages: tuple[int, ...]) -> None:
    """Raise BadPages or BadOffsets for contents that are wrong."""
    check_pages(contents("page_table", table), contents("lengths", lengths), pages)
    if q_offsets is not None:
        check_rising("q_offsets", contents("q_offsets", q_offsets), q.shape[0])


def check_pages(
    table: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], pages: tuple[int, ...], *, new: int = 0
) -> None:
    """Raise BadPages unless lengths, and `new` more tokens of each sequence, fit the table, and every entry in use is
    a page."""
    if table.ndim != 2 or lengths.shape != table.shape[:1] or len(pages) != 4 or not pages[1]:
        return  # which the plan will say
    capacity, ends = table.shape[1] * pages[1], lengths.astype(np.int64) + new
    for b in np.flatnonzero((lengths < 0) | (ends > capacity)):
        more = f", with the new tokens (N = {new}) {ends[b]}" if new and lengths[b] >= 0 else ""
        holds = f"the table holds {table.shape[1]} pages of {pages[1]} positions: 0 to {capacity}"
        raise BadPages(f"lengths[{b}] is {lengths[b]}{more}; {holds}")
    used = np.arange(table.shape[1]) * pages[1] < ends[:, None]
    for b, n in np.argwhere(used & ((table < 0) | (table >= pages[0]))):
        raise BadPages(f"page_table[{b}, {n}] is {table[b, n]}; there are {pages[0]} pages: 0 to {pages[0] - 1}")


# ---- appending -------------------------------------------------------------------------------------------------------


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    """`monotile.paged_append` on pages that are not quantised."""
    torch_calls.refuse_gradients("paged_append", k_pages, v_pages, k_new, v_new)
    views = {"k_pages": k_pages, "v_pages": v_pages, "k_new": k_new, "v_new": v_new}
    check_one_library([*views.items(), ("page_table", page_table), ("lengths", lengths)])
    found = {name: tensors.read(name, array) for name, array in views.items()}
    check_one_dtype(found)
    check_new_tokens({name: view.shape for name, view in found.items()})
    check_places(page_table, lengths, found["k_new"].shape, found["k_pages"].shape, check=check)
    if tensors.same_view(k_pages, v_pages) and 0 not in found["k_pages"].shape:
        raise OverlappingOutput("'k_pages' and 'v_pages' are one array, and both are written; pass separate arrays")
    arrays = k_pages, v_pages, page_table, lengths, k_new, v_new
    paged_append_kernel(*arrays, backend=backend, threads=threads)


def check_one_dtype(found: Mapping[str, View]) -> None:
    """Raise an error unless pages and new tokens have one element type."""
    if len({view.dtype for view in found.values()}) > 1:
        listing = ", ".join(f"{name} {view.dtype}" for name, view in found.items())
        raise MixedDTypes(f"pages and what is appended must have one element type, found {listing}; cast it")


def check_new_tokens(shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise an error unless new tokens are (B, Hkv, N, D) for pages (P, page, Hkv, D)."""
    for name in ("k", "v"):
        pages, found = tuple(shapes[f"{name}_pages"]), tuple(shapes[f"{name}_new"])
        if len(pages) != 4:
            raise ArgumentRank(f"'{name}_pages' is (pages, positions of a page, heads, head size), found {pages}")
        if len(found) != 4 or (found[1], found[3]) != pages[2:]:
            raise ArgumentShape(f"'{name}_new' must be (B, {pages[2]}, N, {pages[3]}) for these pages, found {found}")


def check_places(
    page_table: Array, lengths: Array, new: tuple[int, ...], pages: tuple[int, ...], *, check: bool
) -> None:
    """Raise an error for a table or lengths of a wrong type; with `check` also where a new token has no place."""
    for name, array in (("page_table", page_table), ("lengths", lengths)):
        if tensors.read(name, array).dtype is not int32:
            raise MixedDTypes(f"{name!r} must be int32, found {tensors.read(name, array).dtype}; cast it")
    if check:
        check_pages(contents("page_table", page_table), contents("lengths", lengths), pages, new=new[2])


NAMES = ("q", "k_pages", "v_pages", "page_table", "lengths", "sinks", "q_offsets")
PAGED = LibraryFunction(NAMES, AttentionOptions, plan)
