"""`quantize` and `dequantize` as torch operators, for traces (torch.compile, export, fake and meta tensors)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.codecs import Codec
from . import aura, quantized_torch
from .trace_operators import PARTS, define

CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
HAS_ZEROS = "int4_zero_point"


def encode(
    x: Tensor, format: str, group: int, bits: int | None, largest: float, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantized_torch.encode` in a trace; `width` are the codes of a row, as stored."""
    codes, scales, zeros = torch.ops.monotile.quantize(x.detach(), format, group, bits, largest, width)
    return codes, scales, zeros if format == HAS_ZEROS else None


def _encode(x: Tensor, format: str, group: int, bits: int | None, largest: float, width: int) -> tuple[Tensor, ...]:
    codes, scales, zeros = quantized_torch.encode(x, format, group, bits, largest)
    if bits is not None and x.device.type == "cpu" and not quantized_torch.has_norms(x, scales):
        raise aura.no_norm()
    return codes, scales, x.new_empty(0, dtype=torch.uint8) if zeros is None else zeros


def _encode_shapes(
    x: Tensor, format: str, group: int, bits: int | None, largest: float, width: int
) -> tuple[Tensor, ...]:
    rows, groups = x.shape[:-1], (*x.shape[:-1], x.shape[-1] // group)
    codes = torch.uint32 if bits is not None else CODES.get(format, torch.uint8)
    zeros = x.new_empty(groups if format == HAS_ZEROS else 0, dtype=torch.uint8)
    return x.new_empty((*rows, width), dtype=codes), x.new_empty(groups, dtype=torch.float32), zeros


def decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, codec: Codec, dtype: str) -> Tensor:
    """`quantized_torch.decode` in a trace."""
    facts = codec.kind, codec.size, codec.group, codec.bits
    found: Tensor = torch.ops.monotile.dequantize(codes, scales, zeros, *facts, dtype)
    return found


def _decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, *facts: Any) -> Tensor:
    kind, size, group, bits, dtype = facts
    levels = aura.levels(size, bits) if kind == "aura" else ()
    return quantized_torch.decode(
        codes, scales, zeros, Codec(kind, size, group, bits, zeros is not None, levels), dtype
    )


def _decode_shapes(codes: Tensor, scales: Tensor, zeros: Tensor | None, *facts: Any) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], facts[1]), dtype=getattr(torch, facts[4]))


define(
    f"quantize(Tensor x, str format, int group, int? bits, float largest, int width) -> {PARTS}",
    _encode,
    _encode_shapes,
)
define(
    "dequantize(Tensor codes, Tensor scales, Tensor? zeros, str kind, int size, int group, int bits, str dtype)"
    " -> Tensor",
    _decode,
    _decode_shapes,
)
