"""`attention_paged` and `paged_append` on quantised pages: the plan of plain ones, and more arrays for the fields."""

from __future__ import annotations

from typing import Any

from ..kernels.paged_append import paged_append as paged_append_kernel
from ..runtime import tensors
from ..runtime.arrays import check_one_library
from . import torch_calls
from .calls import LibraryFunction
from .paged import NAMES, check_contents, check_new_tokens, check_places, plan
from .quantized import Quantized, quantize_like
from .quantized_inputs import FIELDS
from .quantized_ops import QuantizedOptions, read_quantized, read_quantized_options
from .rotations import ROTATIONS
from .varlen import refuse_block_mask

Array = Any


def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, *, sinks: Array,
    q_offsets: Array | None, return_lse: bool, check: bool, **given: Any,
) -> Any:  # fmt: skip
    """`attention_paged` where keys or values are quantised: their codes are (P, page, Hkv, width)."""
    refuse_block_mask("attention_paged", given["mask_mod"])
    if check:
        check_contents(q, page_table, lengths, q_offsets, k_pages.shape)
    (k, v), fields, codecs = read_quantized("attention_paged", q, k_pages, v_pages)
    scale, _, options = read_quantized_options(given)
    arrays = (q, k, v, page_table, lengths, sinks, q_offsets, *fields)
    options = (*options, return_lse, codecs, given["backend"], given["threads"])
    return _PAGED.call(arrays, tensors.layouts(arrays), options, scale)


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *, check: bool,
    **run: Any,
) -> None:  # fmt: skip
    """Quantise new tokens as their pages are, and store their fields."""
    torch_calls.refuse_gradients("paged_append", k_new, v_new)
    codes = [("k_pages", _fields(k_pages)[0]), ("v_pages", _fields(v_pages)[0]), ("k_new", k_new), ("v_new", v_new)]
    check_one_library([*codes, ("page_table", page_table), ("lengths", lengths)])
    stored: list[list[tuple[Array, Array]]] = []  # fields of pages and of new tokens
    new_shapes = {name: tensors.read(name, x).shape for name, x in (("k_new", k_new), ("v_new", v_new))}
    check_new_tokens({"k_pages": k_pages.shape, "v_pages": v_pages.shape, **new_shapes})
    for pages, tokens in ((k_pages, k_new), (v_pages, v_new)):
        new = quantize_like(tokens, pages) if type(pages) is Quantized else tokens
        stored.append(list(zip(_fields(pages), _fields(new), strict=True)))
    check_places(page_table, lengths, tuple(k_new.shape), k_pages.shape, check=check)
    keys, values = sorted(stored, key=len, reverse=True)  # to the kernel, both are tokens of pages
    for n, (pages, tokens) in enumerate(keys):
        other, tokens_there = values[n] if n < len(values) else (None, None)
        paged_append_kernel(pages, other, page_table, lengths, tokens, tokens_there, **run)


def _fields(x: Array) -> list[Array]:
    return [x] if type(x) is not Quantized else [f for f in (x.codes, x.scales, x.zeros) if f is not None]


_PAGED = LibraryFunction((*NAMES, *FIELDS, *ROTATIONS), QuantizedOptions, plan)
