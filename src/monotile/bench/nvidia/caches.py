"""Rows of caches as servers keep them on a GPU: ragged, paged and quantised, beside attention on dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...library import entry, ops
from ...library.quantized import Quantized, quantize
from ..caches import FORMATS, PAGES
from ..rows import Array, Sample
from . import exact
from .rows import Inputs, Tensor

MIXED = (100, 100_000)  # lengths of sequences from the shortest to the longest, in equal ratios


@dataclass(frozen=True)
class GpuCache:
    """One call on a cache of `count` sequences: `form` is a format of quantize or a page size; None for ragged ones."""

    kind: str  # quantised, paged, varlen; mixed: of different lengths, ragged or in pages
    form: str | int | None
    count: int
    heads: tuple[int, int]
    N: int  # keys of a sequence, or of the longest
    D: int
    dtype: str = "bfloat16"
    quick: bool = False

    @property
    def name(self) -> str:
        form = f"page{self.form}" if isinstance(self.form, int) else self.form or "ragged"
        what = "causal" if self.kind == "varlen" else "decode"
        words = ["caches", self.kind, form, what, f"B{self.count}", f"{self.heads[0]}/{self.heads[1]}", f"D{self.D}"]
        return " ".join([*words, f"N{self.N}", self.dtype])

    @property
    def tags(self) -> dict[str, Any]:
        return {
            "op": f"{self.kind} cache", "form": self.form, "B": self.count, "D": self.D, "N": self.N,
            "dtype": self.dtype, "causal": self.kind == "varlen", "extra": "",
        }  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        """Keys of each sequence."""
        if self.kind != "mixed":
            return [self.N] * self.count
        least = MIXED[0] * self.N / MIXED[1]
        return [round(least * (self.N / least) ** (n / (self.count - 1))) for n in range(self.count)]


@dataclass
class CacheCall:
    """What is timed, the dense call beside it, and the work of both."""

    run: Callable[[], Any]
    sample: Sample
    dense: Callable[[], Any] | None = None
    bytes: float = 0.0
    flops: float = 0.0


def make(s: GpuCache, device: str) -> CacheCall:
    import torch

    generator = torch.Generator(device).manual_seed(s.N + s.D)

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, device=device, dtype=getattr(torch, s.dtype))

    return {"quantised": _quantised, "paged": _paged, "varlen": _varlen, "mixed": _mixed}[s.kind](s, normal)


def _quantised(s: GpuCache, normal: Callable[..., Tensor]) -> CacheCall:
    q, k, v = (normal(s.count, h, n, s.D) for h, n in zip((s.heads[0], *[s.heads[1]] * 2), (1, s.N, s.N), strict=True))
    K, V = (quantize(x, str(s.form)) for x in (k, v))
    found, naive = (
        exact.sample(Inputs(q, _numbers(K, dtype), _numbers(V, dtype), {})) for dtype in ("float32", s.dtype)
    )
    return CacheCall(
        partial(entry.attention, q, K, V, backend="nvidia"),
        Sample(found.take, found.exact, naive.naive),
        partial(ops.attention, q, k, v, backend="nvidia"),
        float(sum(x.codes.nbytes + x.scales.nbytes for x in (K, V))),
    )


def _numbers(x: Quantized, dtype: str) -> Tensor:
    """The numbers that quantised fields stand for, rounded to a type."""
    return replace(x, dtype=dtype).dequantize()


def _paged(s: GpuCache, normal: Callable[..., Tensor]) -> CacheCall:
    """Pages in a random order, against the same keys as dense tensors."""
    q, k, v = (normal(s.count, h, n, s.D) for h, n in zip((s.heads[0], *[s.heads[1]] * 2), (1, s.N, s.N), strict=True))
    (K, V), table, lengths = _in_pages(s, [[x[n] for n in range(s.count)] for x in (k, v)])
    return CacheCall(
        partial(ops.attention_paged, q, K, V, table, lengths, backend="nvidia"),
        exact.sample(Inputs(q, k, v, {})),
        partial(ops.attention, q, k, v, backend="nvidia"),
        float(k.nbytes + v.nbytes),
    )


def _in_pages(s: GpuCache, arrays: list[list[Tensor]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return keys and values (Hkv, N, D) of each sequence in pages, their table and the lengths."""
    import torch

    page, device = int(s.form or 0), arrays[0][0].device
    counts = [-(-n // page) for n in s.lengths]
    order = torch.from_numpy(np.random.default_rng(s.N).permutation(sum(counts))).to(device)
    stored = [torch.zeros(len(order), page, s.heads[1], s.D, device=device, dtype=a[0].dtype) for a in arrays]
    table = torch.zeros(s.count, max(counts), device=device, dtype=torch.int32)
    first = 0
    for n, (count, length) in enumerate(zip(counts, s.lengths, strict=True)):
        places = order[first : first + count]
        table[n, :count], first = places.int(), first + count
        for pages, sequences in zip(stored, arrays, strict=True):
            padded = torch.zeros(count * page, *pages.shape[2:], device=device, dtype=pages.dtype)
            padded[:length] = sequences[n].transpose(0, 1)
            pages[places] = padded.reshape(count, *pages.shape[1:])
    return stored, table, torch.tensor(s.lengths, device=device, dtype=torch.int32)


def _offsets(lengths: list[int], device: Any) -> Tensor:
    import torch

    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), device=device, dtype=torch.int32)


def _varlen(s: GpuCache, normal: Callable[..., Tensor]) -> CacheCall:
    """Sequences of one length, against batches of dense tensors."""
    q, k, v = (normal(s.count, h, s.N, s.D) for h in (s.heads[0], *[s.heads[1]] * 2))
    Q, K, V = (x.transpose(1, 2).reshape(s.count * s.N, x.shape[1], s.D).contiguous() for x in (q, k, v))
    offsets, whole = _offsets(s.lengths, q.device), exact.sample(Inputs(q, k, v, {"causal": True}))

    def take(out: Tensor) -> Array:
        return whole.take(out.reshape(s.count, s.N, *out.shape[1:]).transpose(1, 2))

    return CacheCall(
        partial(ops.attention_varlen, Q, K, V, offsets, offsets, causal=True, backend="nvidia"),
        Sample(take, whole.exact, whole.naive),
        partial(ops.attention, q, k, v, causal=True, backend="nvidia"),
        flops=2.0 * s.count * s.heads[0] * s.N**2 * s.D,
    )


def _mixed(s: GpuCache, normal: Callable[..., Tensor]) -> CacheCall:
    """One query of each of many sequences of very different lengths. The first and the last are checked."""
    lengths = s.lengths
    q, (k, v) = normal(s.count, *s.heads[:1], 1, s.D), (normal(sum(lengths), s.heads[1], s.D) for _ in range(2))
    parts = [[part.transpose(0, 1) for part in x.split(lengths)] for x in (k, v)]
    ends = {n: exact.sample(Inputs(q[n : n + 1], parts[0][n][None], parts[1][n][None], {})) for n in (0, s.count - 1)}

    def take(out: Tensor) -> Array:  # (B, Hq, 1, D), or (B, Hq, D) of ragged sequences
        batches = out.reshape(q.shape)
        return np.concatenate([found.take(batches[n : n + 1]) for n, found in ends.items()])

    exact_rows, naive_rows = (np.concatenate([getattr(x, part) for x in ends.values()]) for part in ("exact", "naive"))
    checked, read = Sample(take, exact_rows, naive_rows), float(k.nbytes + v.nbytes)
    if s.form is None:
        q_offsets, k_offsets = _offsets([1] * s.count, q.device), _offsets(lengths, q.device)
        ragged = partial(ops.attention_varlen, q[:, :, 0], k, v, q_offsets, k_offsets, backend="nvidia")
        return CacheCall(ragged, checked, bytes=read)
    (K, V), table, keys = _in_pages(s, parts)
    return CacheCall(partial(ops.attention_paged, q, K, V, table, keys, backend="nvidia"), checked, bytes=read)


def _shapes() -> Iterator[GpuCache]:
    for count, heads in ((1, (32, 8)), (1, (8, 8)), (8, (32, 8))):
        yield from (GpuCache("quantised", form, count, heads, 32768, 128) for form in FORMATS)
    yield from (GpuCache("paged", page, 16, (32, 8), 16384, 128) for page in PAGES)
    yield from (GpuCache("mixed", form, 128, (32, 8), MIXED[1], 128) for form in (None, 64))
    yield from (GpuCache("varlen", None, 8, heads, 4096, 128) for heads in ((16, 16), (32, 8)))
    yield GpuCache("varlen", None, 4, (16, 16), 8192, 64)


ROWS = tuple(_shapes())
