"""`attention` and `decode_partials` with quantised keys or values: the same plans and the same kernel, with
their fields as more arrays, and the rotations of aura before and after."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..runtime import tensors
from . import torch_calls
from .block_mask import unwrapped
from .calls import LibraryFunction
from .inputs import read_count, read_scoring
from .merging import Partials
from .ops import FUNCTIONS
from .quantized import Quantized
from .quantized_inputs import FIELDS, Codecs
from .rotations import ROTATIONS, matrices

Array = Any


class QuantizedOptions(NamedTuple):
    """The options of a call of `attention` on quantised keys or values, as given."""

    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool
    return_lse: Any
    codecs: Codecs
    backend: str | None
    threads: int | None
    values_in_keys: bool = False


class QuantizedPartialsOptions(NamedTuple):
    """The options of a call of `decode_partials` on quantised keys or values, as given."""

    splits: Any
    causal: Any
    window: Any
    softcap: Any
    score_mod: Any
    mask_mod: Any
    negative: bool
    codecs: Codecs
    backend: str | None
    threads: int | None


def attention(q: Array, k: Array, v: Array, *, mask: Array, sinks: Array, return_lse: bool, **given: Any) -> Any:
    """`attention` on quantised keys or values."""
    (k, v), fields, codecs = read_quantized("attention", q, k, v, mask, sinks)
    scale, blocks, options = read_quantized_options(given)
    arrays = (q, k, v, mask, sinks, *fields)
    options = (*options, return_lse, codecs, given["backend"], given["threads"])
    return _ATTENTION.call(arrays, tensors.layouts(arrays), options, scale, blocks)


def decode_partials(q: Array, k: Array, v: Array, *, mask: Array, splits: int | None, **given: Any) -> Partials:
    """`decode_partials` on quantised keys or values."""
    if splits is not None:
        splits = read_count("splits", splits)
    (k, v), fields, codecs = read_quantized("decode_partials", q, k, v, mask)
    scale, blocks, options = read_quantized_options(given)
    arrays = (q, k, v, mask, *fields)
    options = (splits, *options, codecs, given["backend"], given["threads"])
    found: Partials = _PARTIALS.call(arrays, tensors.layouts(arrays), options, scale, blocks)
    return found


def read_quantized_options(given: dict[str, Any]) -> tuple[float | None, Any, tuple[Any, ...]]:
    """Check options; return the scale, the maps of a block mask, and the options that both functions have."""
    causal, scale, window, softcap = (given[name] for name in ("causal", "scale", "window", "softcap"))
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    mask_mod, blocks = given["mask_mod"], None
    if mask_mod is not None:
        mask_mod, blocks = unwrapped(mask_mod)
    return scale, blocks, (causal, window, softcap, given["score_mod"], mask_mod, negative)


def read_quantized(
    function: str, q: Array, k: Array, v: Array, *others: Array | None
) -> tuple[tuple[Array, ...], tuple[Array, ...], Codecs]:
    """Return k and v as kernels take them, the other fields and the rotations in the order of FIELDS and ROTATIONS, and
    the codecs. Refuse gradients of all of them and of `others`."""
    fields, codecs = [], []
    for x in (k, v):
        quantized = type(x) is Quantized
        codecs.append(x.codec if quantized else None)
        fields.append((x.codes, x.scales, x.zeros) if quantized else (x, None, None))
    (k, *k_fields), (v, *v_fields) = fields
    if type(q) is not np.ndarray:  # beside which tensors are an error
        given = q, k, v, *k_fields, *v_fields, *others
        torch_calls.refuse_gradients(f"{function} on Quantized keys and values", *given)
    pair = codecs[0], codecs[1]
    return (k, v), (*k_fields, *v_fields, *matrices(q, pair)), pair


_ATTENTION = LibraryFunction(
    ("q", "k", "v", "mask", "sinks", *FIELDS, *ROTATIONS), QuantizedOptions, FUNCTIONS["attention"].plan
)
_PARTIALS = LibraryFunction(
    ("q", "k", "v", "mask", *FIELDS, *ROTATIONS), QuantizedPartialsOptions, FUNCTIONS["decode_partials"].plan
)
