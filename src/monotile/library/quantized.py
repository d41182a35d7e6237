"""`quantize`: arrays in 8 bits and fewer, with the fields that the attention kernel reads in place.

Arithmetic here is NumPy's, in float32; that of torch tensors is torch's (quantized_torch.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import BY_NAME, to_numpy
from ..errors import ArgumentKind, ArgumentRank, BadOption, MixedDTypes
from ..kernels.codecs import Codec
from ..runtime import tensors
from . import aura
from .formats import (
    AURA,
    FINITE,
    FP8,
    check_field,
    check_format,
    check_kinds,
    check_rows,
    check_size,
    checked_codec,
    codec_without_levels,
    dtype_name,
    named_fields,
    read_group,
    width,
)
from .readable import check_readable
from .torch_calls import is_tensor, is_traced, refuse_gradients

Array = Any
Numbers = npt.NDArray[Any]
DETACH_FIELDS = "call it under torch.no_grad(), or make the fields of detached tensors"


@dataclass(frozen=True, eq=False)
class Quantized:
    """An array (..., N, D) in a format of few bits; docs/guide/quantize.md says what its fields hold."""

    format: str
    codes: Array  # (..., N, width)
    scales: Array  # (..., N, D / group), float32; for aura the norm of each row
    zeros: Array | None  # (..., N, D / group), uint8; of int4_zero_point alone
    size: int  # D
    dtype: str  # of the array it was made from

    @property
    def shape(self) -> tuple[int, ...]:
        check_size(self.size)
        check_field("codes", self.codes)
        return (*self.codes.shape[:-1], self.size)

    @property
    def codec(self) -> Codec:
        """The compile-time description that kernels get, after a check of the fields' types and shapes."""
        return checked_codec(self)

    def fields(self) -> dict[str, Array]:
        """The arrays by name."""
        return named_fields(self)

    def with_fields(self, fields: dict[str, Array]) -> Quantized:
        """The same numbers in other arrays."""
        return replace(self, **fields)

    def dequantize(self) -> Array:
        """The numbers that the fields stand for, as an array of the type they were made from."""
        fields = self.fields()
        refuse_gradients("dequantize", *fields.values(), cure=DETACH_FIELDS)
        if all(is_traced(field) for field in fields.values()):
            from . import quantize_operators

            check_kinds(self)
            plain = codec_without_levels(self.format, self.size, self.size // check_rows(self))
            return quantize_operators.decode(self.codes, self.scales, self.zeros, plain, self.dtype)
        check_readable(**fields)
        found = self.codec
        if is_jax(self.codes):
            host = {name: as_numpy(name, field) for name, field in fields.items()}
            return like_jax(self.with_fields(host).dequantize())
        if is_tensor(self.codes):
            from . import quantized_torch

            return quantized_torch.decode(self.codes, self.scales, self.zeros, found, self.dtype)
        codes, spread = _numpy_array(self.codes), np.repeat(self.scales, found.group, axis=-1)
        if found.kind == "aura":
            values = np.asarray(found.levels, np.float32)[aura.unpack(codes, self.size, found.bits)] * spread
            return _rounded(values @ aura.rotation(self.size), self.dtype)
        if found.kind == "nibbles":
            zeros = 8 if self.zeros is None else np.repeat(self.zeros.astype(np.int32), found.group, axis=-1)
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
            codes = codes[..., : self.size]
            codes = codes.astype(np.int32) - zeros
        return (codes.astype(np.float32) * spread).astype(to_numpy(BY_NAME[self.dtype]))


def quantize(x: Array, format: str, *, group: int | None = None, check: bool = False) -> Quantized:
    """Quantise keys or values, each row by itself; `attention` and `decode_partials` read the result in place.

    Args:
        x: (..., N, D), of NumPy, torch or JAX.
        format: "int8", "int4", "int4_zero_point", an fp8 or an aura format: docs/guide/quantize.md lists them.
        group: how many numbers of a row share a scale; by default the whole row.
        check: make numbers that are not finite an error.

    Returns:
        A `Quantized` of the shape of x.

    Example:
        >>> k = np.ones((1, 2, 9, 64), np.float32)
        >>> monotile.quantize(k, "int8").shape
        (1, 2, 9, 64)
    """
    check_format(format)
    refuse_gradients("quantize", x, cure="pass x.detach()")
    if is_jax(x):
        found = quantize(as_numpy("x", x), format, group=group, check=check)
        return found.with_fields({name: like_jax(field) for name, field in found.fields().items()})
    traced = is_traced(x)
    dtype, shape = (dtype_name(x), x.shape) if traced else _read(x)
    if dtype not in FINITE:
        raise MixedDTypes(f"quantize takes float32, float16 or bfloat16, found {dtype}; cast it")
    if len(shape) < 2 or shape[-1] < 1:
        raise ArgumentRank(f"quantize takes an array (..., N, D) with D from 1 up, found shape {tuple(shape)}")
    size = shape[-1]
    group = size if group is None else read_group(group, size, format)
    if traced:
        from . import quantize_operators

        if check:
            raise BadOption("check=True reads x, which has no contents in a trace; leave it out there")
        fields = quantize_operators.encode(x, format, group, AURA.get(format), FINITE[dtype], width(format, size))
        return Quantized(format, *fields, size, dtype)
    if is_tensor(x):
        from . import quantized_torch

        if check and not quantized_torch.is_finite(x):
            raise _not_finite()
        fields = quantized_torch.encode(x, format, group, AURA.get(format), FINITE[dtype])
        if format in AURA and (check or x.device.type == "cpu") and not quantized_torch.has_norms(x, fields[1]):
            raise aura.no_norm()
        return Quantized(format, *fields, size, dtype)
    numbers = _numpy_array(x).astype(np.float32)
    if check and not np.isfinite(numbers).all():
        raise _not_finite()
    with np.errstate(all="ignore"):
        fields = _encode(numbers, format, group, FINITE[dtype])
        if format in AURA and not (np.isfinite(fields[1]) | ~np.isfinite(numbers).all(-1, keepdims=True)).all():
            raise aura.no_norm()
    return Quantized(format, *fields, size, dtype)


def is_jax(x: Array) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def as_numpy(name: str, x: Array) -> Numbers:
    """An array of JAX's as one of NumPy's."""
    if isinstance(x, sys.modules["jax"].core.Tracer):
        raise ArgumentKind(f"{name!r} is traced by JAX; call quantize and dequantize outside of jit, grad and vmap")
    return np.asarray(x)


def like_jax(x: Numbers) -> Array:
    return sys.modules["jax"].numpy.asarray(x)


def _read(x: Array) -> tuple[str, tuple[int, ...]]:
    view = tensors.read("x", x)
    return view.dtype.name, view.shape


def _not_finite() -> BadOption:
    return BadOption("x holds NaN or infinity, which no format has; replace them before quantize")


def quantize_like(x: Array, other: Quantized) -> Quantized:
    """Quantise in the format and the groups of another array."""
    found = other.codec
    return quantize(x, other.format, group=None if other.format in AURA else found.group)


def is_quantized(*arrays: Array) -> bool:
    return any(type(array) is Quantized for array in arrays)


def _limit(largest: float, factors: Any) -> Numbers:
    """The scales whose products with factors, rounded, are still finite."""
    found: Numbers = (largest * (1 - 2.0**-22) / np.asarray(factors, np.float64)).astype(np.float32)
    return found


def _encode(x: Numbers, format: str, group: int, largest: float) -> tuple[Numbers, Numbers, Numbers | None]:
    if format in AURA:
        return *_encode_aura(x, AURA[format]), None
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    if format == "int4_zero_point":
        low, high = np.minimum(parts.min(-1), 0.0), np.maximum(parts.max(-1), 0.0)
        spread = (high - low) / np.float32(15.0)
        scales = _nonzero(np.where(np.isinf(spread), high / np.float32(15.0) - low / np.float32(15.0), spread))
        zeros = _whole(-low / scales, 0, 15, np.uint8)
        scales = _bounded(scales, _limit(largest, np.maximum(zeros, 15 - zeros)))
        codes = _whole(np.rint(parts / scales[..., None]) + zeros[..., None], 0, 15, np.uint8)
        return _in_pairs(codes.reshape(x.shape)), scales, zeros
    top = np.abs(parts).max(-1)
    if format in FP8:
        dtype, most = FP8[format]
        scales = _bounded(_nonzero(top / np.float32(most)), _limit(largest, most))
        codes = np.clip(parts / scales[..., None], -most, most).astype(to_numpy(dtype))
        return codes.reshape(x.shape), scales, None
    most = 127 if format == "int8" else 7
    scales = _bounded(_nonzero(top / np.float32(most)), _limit(largest, most))
    codes = _whole(parts / scales[..., None], -most, most, np.int8).reshape(x.shape)
    return (codes if format == "int8" else _in_pairs((codes + 8).astype(np.uint8))), scales, None


def _encode_aura(x: Numbers, bits: int) -> tuple[Numbers, Numbers]:
    size = x.shape[-1]
    norms = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True)).astype(np.float32)
    unit = (x / _nonzero(norms)) @ aura.rotation(size).T
    table = np.asarray(aura.levels(size, bits), np.float32)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, unit).astype(np.uint8)
    return aura.pack(codes, bits), norms


def _nonzero(scales: Numbers) -> Numbers:
    """Scales, and 1 for groups of zeros."""
    found: Numbers = np.where(scales == 0.0, np.float32(1.0), scales).astype(np.float32)
    return found


def _rounded(x: Numbers, dtype: str) -> Numbers:
    """Numbers in a type; finite ones beyond its largest become that one."""
    most = FINITE[dtype]
    return np.where(np.isfinite(x), np.clip(x, -most, most), x).astype(to_numpy(BY_NAME[dtype]))


def _bounded(scales: Numbers, limit: Any) -> Numbers:
    """Scales up to a limit; those of rows that are not finite stay as they are."""
    found: Numbers = np.where(np.isfinite(scales), np.minimum(scales, limit), scales)
    return found


def _whole(x: Numbers, low: int, high: int, dtype: Any) -> Numbers:
    found: Numbers = np.clip(np.nan_to_num(np.rint(x)), low, high).astype(dtype)
    return found


def _in_pairs(codes: Numbers) -> Numbers:
    """Two codes in a byte, the one of the even column in the lower half."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    found: Numbers = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return found


def _numpy_array(array: Array) -> Numbers:
    if not isinstance(array, np.ndarray):
        raise ArgumentKind(f"quantize takes NumPy arrays and torch tensors, found {type(array).__name__}; convert it")
    return array
