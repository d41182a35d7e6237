"""`attention_varlen` on quantised keys or values: the plan of plain ones, and more arrays for the fields."""

from __future__ import annotations

from typing import Any

from ..runtime import tensors
from .calls import LibraryFunction
from .quantized_inputs import FIELDS
from .quantized_ops import QuantizedOptions, read_quantized, read_quantized_options
from .rotations import ROTATIONS
from .varlen import VARLEN, check_offsets, refuse_block_mask

Array = Any


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, sinks: Array, return_lse: bool, check: bool,
    **given: Any,
) -> Any:  # fmt: skip
    """`attention_varlen` where keys or values are quantised: their codes are (Tk, Hkv, width)."""
    refuse_block_mask("attention_varlen", given["mask_mod"])
    if check:
        check_offsets(q, k, q_offsets, k_offsets)
    (k, v), fields, codecs = read_quantized("attention_varlen", q, k, v, sinks)
    scale, _, options = read_quantized_options(given)
    arrays = (q, k, v, q_offsets, k_offsets, sinks, *fields)
    options = (*options, return_lse, codecs, given["backend"], given["threads"])
    return _VARLEN.call(arrays, tensors.layouts(arrays), options, scale)


_VARLEN = LibraryFunction((*VARLEN.names, *FIELDS, *ROTATIONS), QuantizedOptions, VARLEN.plan)
