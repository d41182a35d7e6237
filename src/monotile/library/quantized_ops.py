"""`attention` and `decode_partials` with quantised keys or values: the same plans and the same kernel, with
their fields as more arrays, and the rotations of aura before and after."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..runtime import tensors
from . import aura, torch_calls
from .block_mask import unwrapped
from .calls import LibraryFunction
from .inputs import check_count, read_scoring
from .merging import Partials
from .ops import FUNCTIONS
from .quantized import Quantized
from .quantized_inputs import FIELDS, Codecs, is_rotated

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
    (turned, k, v), fields, codecs = read_quantized("attention", q, k, v)
    scale, blocks, options = read_quantized_options(given)
    arrays = (turned, k, v, mask, sinks, *fields)
    options = (*options, return_lse, codecs, given["backend"], given["threads"])
    found = _ATTENTION.call(arrays, tensors.layouts(arrays), options, scale, blocks)
    out, *rest = found if return_lse else (found,)
    out = rotated(out, codecs[1], back=True, like=q)
    return (out, *rest) if return_lse else out


def decode_partials(q: Array, k: Array, v: Array, *, mask: Array, splits: int | None, **given: Any) -> Partials:
    """`decode_partials` on quantised keys or values."""
    if splits is not None:
        check_count("splits", splits)
    (turned, k, v), fields, codecs = read_quantized("decode_partials", q, k, v)
    scale, blocks, options = read_quantized_options(given)
    arrays = (turned, k, v, mask, *fields)
    options = (splits, *options, codecs, given["backend"], given["threads"])
    found: Partials = _PARTIALS.call(arrays, tensors.layouts(arrays), options, scale, blocks)
    return Partials(rotated(found.o, codecs[1], back=True, like=found.o), found.m, found.l)


def read_quantized_options(given: dict[str, Any]) -> tuple[float | None, Any, tuple[Any, ...]]:
    """Check options; return the scale, the maps of a block mask, and the options that both functions have."""
    causal, scale, window, softcap = (given[name] for name in ("causal", "scale", "window", "softcap"))
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    mask_mod, blocks = given["mask_mod"], None
    if mask_mod is not None:
        mask_mod, blocks = unwrapped(mask_mod)
    return scale, blocks, (causal, window, softcap, given["score_mod"], mask_mod, negative)


def read_quantized(function: str, q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], tuple[Array, ...], Codecs]:
    """Return q, k and v as kernels take them, the other fields in the order of FIELDS, and the codecs. Queries are
    rotated as aura's keys are."""
    fields, codecs = [], []
    for x in (k, v):
        quantized = type(x) is Quantized
        codecs.append(x.codec if quantized else None)
        fields.append((x.codes, x.scales, x.zeros) if quantized else (x, None, None))
    (k, *k_fields), (v, *v_fields) = fields
    torch_calls.refuse_gradients(f"{function} on Quantized keys and values", q, k, v)
    return (rotated(q, codecs[0], back=False, like=q), k, v), (*k_fields, *v_fields), (codecs[0], codecs[1])


def rotated(x: Array, codec: Any, *, back: bool, like: Array) -> Array:
    """Rows rotated, or rotated back, as aura does, in the type that `like` has. Rows of another size are left to the
    checks of the call."""
    if not is_rotated(codec) or not tensors.is_array(x) or tensors.is_mlx(x) or not x.ndim or x.shape[-1] != codec.size:
        return x
    if isinstance(x, np.ndarray):
        return (x.astype(np.float32) @ _rotation(codec.size, back)).astype(like.dtype)
    return (x.float() @ _rotation_on(codec.size, back, x.device)).to(like.dtype)


def _rotation(size: int, back: bool) -> Any:
    return aura.rotation(size) if back else aura.rotation(size).T


@cache
def _rotation_on(size: int, back: bool, device: Any) -> Any:
    """The matrix as a tensor, copied to its device once: a copy in every call would wait for the GPU, and could not be
    captured in a graph."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(_rotation(size, back))).to(device)


_ATTENTION = LibraryFunction(("q", "k", "v", "mask", "sinks", *FIELDS), QuantizedOptions, FUNCTIONS["attention"].plan)
_PARTIALS = LibraryFunction(
    ("q", "k", "v", "mask", *FIELDS), QuantizedPartialsOptions, FUNCTIONS["decode_partials"].plan
)
