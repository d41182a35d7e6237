"""Quantised keys and values of a call: their fields as arrays of it, and the rotations around the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import DType
from ..errors import MixedDTypes
from ..kernels.codecs import Codec
from ..runtime import tensors
from ..runtime.tensors import View
from . import aura, torch_calls
from .calls import ArrayRef, CallBuilder
from .quantized import Quantized

Array = Any
Codecs = tuple[Codec | None, Codec | None]  # of keys and of values; None: plain
FIELDS = ("k_scales", "k_zeros", "v_scales", "v_zeros")
STORED = {"integers": ("int8",), "nibbles": ("uint8",), "fp8": ("float8_e4m3fn", "float8_e5m2"), "aura": ("uint32",)}


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


def is_quantized(k: Array, v: Array) -> bool:
    return type(k) is Quantized or type(v) is Quantized


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
    if is_rotated(codecs[0]):
        q = rotated(q, codecs[0].size, back=False, like=q)
    return (q, k, v), (*k_fields, *v_fields), (codecs[0], codecs[1])


def is_rotated(codec: Codec | None) -> bool:
    return codec is not None and codec.kind == "aura"


def rotated(x: Array, size: int, *, back: bool, like: Array) -> Array:
    """Rows rotated, or rotated back, as an array of the type that `like` has. Sizes that differ are left to the checks
    of the call."""
    if not tensors.is_array(x) or tensors.is_mlx(x) or x.ndim < 1 or x.shape[-1] != size:
        return x
    matrix = aura.rotation(size) if back else aura.rotation(size).T
    if isinstance(x, np.ndarray):
        return (x.astype(np.float32) @ matrix).astype(like.dtype)
    torch = __import__("torch")
    return (x.float() @ torch.from_numpy(np.ascontiguousarray(matrix)).to(x.device)).to(like.dtype)


def rotated_back(found: Array, codecs: Codecs, q: Array) -> Array:
    """Attention's result, of which the output is rotated back where values were rotated."""
    values = codecs[1]
    if values is None or not is_rotated(values):
        return found
    out, *rest = found if isinstance(found, tuple) else (found,)
    out = rotated(out, values.size, back=True, like=q)
    return (out, *rest) if isinstance(found, tuple) else out


class StoredFields(NamedTuple):
    """The fields of quantised keys and values of a call: codes, scales and zeros, or None for plain ones."""

    keys: tuple[ArrayRef | None, ...] = (None, None, None)
    values: tuple[ArrayRef | None, ...] = (None, None, None)
    codecs: Codecs = (None, None)

    @property
    def constants(self) -> dict[str, Any]:
        """The codecs as constants of the kernel; none for a plain call."""
        pairs = zip(("k_codec", "v_codec"), self.codecs, strict=True)
        return {name: codec for name, codec in pairs if codec is not None}


def read_fields(builder: CallBuilder, codecs: Codecs, *, batched: bool) -> StoredFields:
    found = []
    for name, codec in zip("kv", codecs, strict=True):
        refs: list[ArrayRef | None] = [None, None, None]
        if codec is not None:
            refs = [builder.inputs.get(n) for n in (name, f"{name}_scales", f"{name}_zeros")]
            refs = [None if a is None else _batched(builder, a, batched) for a in refs]
            _check_types(name, codec, refs)
        found.append(tuple(refs))
    return StoredFields(found[0], found[1], codecs)


def as_numbers(array: ArrayRef, codec: Codec | None, dtype: DType) -> ArrayRef:
    """Codes as the numbers they stand for: an array that is checked and counted, but not read."""
    if codec is None:
        return array
    shape = (*array.shape[:-1], codec.size)
    return ArrayRef(array.place, View(dtype, shape, tensors.dense(shape), array.view.device))


def _batched(builder: CallBuilder, array: ArrayRef, batched: bool) -> ArrayRef:
    array = array if batched else array.reshaped(1, *array.shape)
    last = array.view.strides[-1] if array.shape else 1
    return array if array.shape[-1] <= 1 or 0 in array.shape or last == 1 else builder.contiguous(array)


def _check_types(name: str, codec: Codec, refs: Sequence[ArrayRef | None]) -> None:
    wanted = STORED[codec.kind], ("float32",), ("uint8",)
    for field, ref, names in zip(("codes", "scales", "zeros"), refs, wanted, strict=True):
        if ref is not None and ref.dtype.name not in names:
            expected = " or ".join(names)
            raise MixedDTypes(f"the {field} of {name!r} must be {expected}, found {ref.dtype}; make them with quantize")
