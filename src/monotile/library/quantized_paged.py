"""`attention_paged` and `paged_append` on quantised pages: the plan of plain ones, and more arrays for the fields."""

from __future__ import annotations

from typing import Any

from ..kernels.paged_append import paged_append_quantized
from ..runtime import tensors
from ..runtime.arrays import check_one_library
from . import torch_calls
from .calls import LibraryFunction
from .formats import checked_codec
from .paged import NAMES, check_contents, check_new_tokens, check_one_dtype, check_places, plan
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
    (k, v), fields, codecs = read_quantized("attention_paged", q, k_pages, v_pages, sinks)
    scale, _, options = read_quantized_options(given)
    arrays = (q, k, v, page_table, lengths, sinks, q_offsets, *fields)
    options = (*options, return_lse, codecs, given["backend"], given["threads"])
    return _PAGED.call(arrays, tensors.layouts(arrays), options, scale)


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *, check: bool,
    **run: Any,
) -> None:  # fmt: skip
    """Quantise new tokens as their pages are, and store their fields. Nothing is written before all is checked."""
    for x in (k_pages, v_pages):
        if type(x) is Quantized:
            checked_codec(x)
    k, v = _fields(k_pages), _fields(v_pages)
    torch_calls.refuse_gradients("paged_append on Quantized pages", k_new, v_new, *k, *v)
    given = {"k_pages": k[0], "v_pages": v[0], "k_new": k_new, "v_new": v_new}
    check_one_library([*given.items(), ("page_table", page_table), ("lengths", lengths)])
    found = {name: tensors.read(name, x) for name, x in given.items()}
    shapes = {name: view.shape for name, view in found.items()}
    for name, x in (("k", k_pages), ("v", v_pages)):
        if type(x) is Quantized:
            shapes[f"{name}_pages"] = x.shape
        else:
            check_one_dtype({n: found[n] for n in (f"{name}_pages", f"{name}_new")})
    check_new_tokens(shapes)
    check_places(page_table, lengths, shapes["k_new"], shapes["k_pages"], check=check)
    new_k, new_v = (
        _fields(quantize_like(x, pages) if type(pages) is Quantized else x)
        for x, pages in ((k_new, k_pages), (v_new, v_pages))
    )
    paged_append_quantized(*k, *v, page_table, lengths, *new_k, *new_v, **run)


def _fields(x: Array) -> tuple[Array, Array | None, Array | None]:
    return (x.codes, x.scales, x.zeros) if type(x) is Quantized else (x, None, None)


_PAGED = LibraryFunction((*NAMES, *FIELDS, *ROTATIONS), QuantizedOptions, plan)
