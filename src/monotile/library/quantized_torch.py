"""`quantize` and `dequantize` of torch tensors, by torch's own operations: a tensor on a device stays there.

Imported only where a tensor is at hand. The fields have the bits that NumPy's arithmetic gives, but for aura's codes of
coordinates halfway between two levels: there the order of a sum decides."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from . import aura

Tensor = Any
FP8 = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}


def encode(
    x: Tensor, format: str, group: int, bits: int | None, largest: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and zeros of a tensor (..., N, D), whose dtype holds numbers up to `largest`; `bits` are
    those of an aura format."""
    x = x.detach().float()
    if bits is not None:
        return *_encode_aura(x, bits), None
    parts = x.unflatten(-1, (x.shape[-1] // group, group))
    if format == "int4_zero_point":
        low, high = parts.amin(-1).clamp(max=0.0), parts.amax(-1).clamp(min=0.0)
        spread = _over(high - low, 15.0)
        scales = _nonzero(torch.where(spread.isinf(), _over(high, 15.0) - _over(low, 15.0), spread))
        zeros = _whole(-low / scales, 0, 15)
        scales = _bounded(scales, _limit(largest, torch.maximum(zeros, 15 - zeros)))
        codes = _whole((parts / scales[..., None]).round() + zeros[..., None], 0, 15).flatten(-2)
        return _in_pairs(codes.to(torch.uint8)), scales, zeros.to(torch.uint8)
    top = parts.abs().amax(-1)
    if format in FP8:
        dtype, most = FP8[format]
        scales = _bounded(_nonzero(_over(top, most)), _limit(largest, torch.full_like(top, most)))
        return (parts / scales[..., None]).clamp(-most, most).to(dtype).flatten(-2), scales, None
    limit = 127 if format == "int8" else 7
    scales = _bounded(_nonzero(_over(top, limit)), _limit(largest, torch.full_like(top, limit)))
    codes = _whole(parts / scales[..., None], -limit, limit).flatten(-2)
    return (codes.to(torch.int8) if format == "int8" else _in_pairs((codes + 8).to(torch.uint8))), scales, None


def is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def has_norms(x: Tensor, norms: Tensor) -> bool:
    """True if every row of finite numbers has a finite norm."""
    return bool((norms.isfinite() | ~x.isfinite().all(-1, keepdim=True)).all())


def decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, codec: Any, dtype: str) -> Tensor:
    """Return the numbers that codes stand for."""
    spread = scales.repeat_interleave(codec.group, -1)
    if codec.kind == "aura":
        table = torch.tensor(codec.levels, device=codes.device)
        numbers = table[_unpack(codes, codec.size, codec.bits)] * spread
        numbers = numbers @ torch.from_numpy(aura.rotation(codec.size)).to(codes.device)
        most = torch.finfo(getattr(torch, dtype)).max
        numbers = torch.where(numbers.isfinite(), numbers.clamp(-most, most), numbers)
    else:
        if codec.kind == "nibbles":
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., : codec.size].float()
            codes = codes - (8.0 if zeros is None else zeros.repeat_interleave(codec.group, -1).float())
        numbers = codes.float() * spread
    return numbers.to(getattr(torch, dtype))


def _encode_aura(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    norms = x.double().square().sum(-1, keepdim=True).sqrt().float()
    unit = (x / _nonzero(norms)) @ torch.from_numpy(aura.rotation(size).T.copy()).to(x.device)
    table = torch.tensor(aura.levels(size, bits), device=x.device)
    return _pack(torch.searchsorted((table[1:] + table[:-1]) / 2, unit.contiguous()), bits), norms


def _period(bits: int) -> tuple[int, int]:
    """Return after how many codes, and words, a code begins with a word again."""
    return 32 // gcd(bits, 32), bits // gcd(bits, 32)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into little-endian words of 32 bits."""
    (count, words), size = _period(bits), codes.shape[-1]
    codes = torch.nn.functional.pad(codes.int(), (0, -size % count)).unflatten(-1, (-1, count))
    found = torch.zeros(*codes.shape[:-1], words, dtype=torch.int32, device=codes.device)
    for c in range(count):
        word, shift = divmod(c * bits, 32)
        found[..., word] |= codes[..., c] << shift
        if shift + bits > 32:
            found[..., word + 1] |= codes[..., c] >> (32 - shift)
    return found.flatten(-2)[..., : -(-size * bits // 32)].contiguous().view(torch.uint32)


def _unpack(words: Tensor, size: int, bits: int) -> Tensor:
    count, each = _period(bits)
    words = words.view(torch.int32)
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % each)).unflatten(-1, (-1, each))
    found = []
    for c in range(count):
        word, shift = divmod(c * bits, 32)
        code = words[..., word] >> shift
        if shift + bits > 32:
            code = (code & (2 ** (32 - shift) - 1)) | (words[..., word + 1] << (32 - shift))
        found.append(code & (2**bits - 1))
    return torch.stack(found, dim=-1).flatten(-2)[..., :size]


def _over(x: Tensor, number: float) -> Tensor:
    """Divide by a number as NumPy does: on a GPU torch multiplies by the reciprocal of a bare one."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0.0, 1.0, scales)


def _limit(largest: float, factors: Tensor) -> Tensor:
    """The scales whose products with factors, rounded, are still finite."""
    return (largest * (1 - 2.0**-22) / factors.double()).float()


def _bounded(scales: Tensor, limit: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), torch.minimum(scales, limit), scales)


def _whole(x: Tensor, low: int, high: int) -> Tensor:
    return x.round().nan_to_num().clamp(low, high)


def _in_pairs(codes: Tensor) -> Tensor:
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4
