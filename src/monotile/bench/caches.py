"""Rows of caches as servers keep them, ragged, paged and quantised, beside attention on dense arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..library import entry, ops
from ..library.quantized import Quantized, quantize
from .attention import normal, sample
from .limits import last_level_cache
from .rows import Array, Row, Sample, TimedCall

DENSE = "dense"  # the peer: attention on dense arrays of the row's dtype
FORMATS = ("int8", "fp8_e4m3", "int4", "aura4")
PAGES = (16, 64)
QUICK_KEYS = 4096


@dataclass(frozen=True)
class CacheShape:
    """One call on a cache: `form` is a format of quantize, a page size or a number of sequences."""

    kind: str  # quantised, paged or varlen
    form: str | int
    heads: tuple[int, int]
    N: int
    D: int
    dtype: str

    @property
    def name(self) -> str:
        form = {"quantised": f"{self.form}", "paged": f"page{self.form}", "varlen": f"{self.form}x{self.N}"}[self.kind]
        what = "causal" if self.kind == "varlen" else "decode"
        words = ["caches", self.kind, form, what, f"{self.heads[0]}/{self.heads[1]}", f"D{self.D}"]
        return " ".join([*words, *([] if self.kind == "varlen" else [f"N{self.N}"]), self.dtype])

    @property
    def tags(self) -> dict[str, Any]:
        return {"op": f"{self.kind} cache", "form": self.form, "D": self.D, "N": self.N, "dtype": self.dtype}


def make(s: CacheShape, rng: np.random.Generator, threads: int) -> TimedCall:
    return {"quantised": _quantised, "paged": _paged, "varlen": _varlen}[s.kind](s, rng, threads)


def _arrays(s: CacheShape, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    Hq, Hkv = s.heads
    q, k, v = (normal(rng, s.dtype, 1, h, n, s.D) for h, n in ((Hq, 1), (Hkv, s.N), (Hkv, s.N)))
    return q, k, v


def _quantised(s: CacheShape, rng: np.random.Generator, threads: int) -> TimedCall:
    q, k, v = _arrays(s, rng)
    K, V = (quantize(x, str(s.form)) for x in (k, v))
    exact, naive = (_on_numbers(q, (K, V), dtype) for dtype in ("float32", s.dtype))
    call = TimedCall(
        lambda: entry.attention(q, K, V, threads=threads),
        sample=Sample(exact.take, exact.exact, naive.naive),
        peers={DENSE: lambda: ops.attention(q, k, v, threads=threads)},
    )
    call.work = {"read": float(sum(x.codes.nbytes + x.scales.nbytes for x in (K, V)))}
    call.note = "codes fit the last-level cache" if call.work["read"] <= last_level_cache() else ""
    return call


def _on_numbers(q: Array, fields: tuple[Quantized, Quantized], dtype: str) -> Sample:
    """Return the reference on what quantised fields stand for, rounded to a type."""
    k, v = (replace(x, dtype=dtype).dequantize() for x in fields)
    return sample(q, k, v, {})


def _paged(s: CacheShape, rng: np.random.Generator, threads: int) -> TimedCall:
    """Time pages in a random order. The peer has keys as pages do, the heads of a position together."""
    q, k, v = _arrays(s, rng)
    page, count = int(s.form), s.N // int(s.form)
    table = rng.permutation(count).astype(np.int32)
    by_position = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (k, v)]
    pages = [np.empty((count, page, *x.shape[1:]), x.dtype) for x in by_position]
    for stored, x in zip(pages, by_position, strict=True):
        stored[table] = x.reshape(stored.shape)
    K, V = (x[None].swapaxes(1, 2) for x in by_position)
    lengths = np.array([s.N], np.int32)
    return TimedCall(
        lambda: ops.attention_paged(q, pages[0], pages[1], table[None], lengths, threads=threads),
        sample=sample(q, k, v, {}),
        peers={DENSE: lambda: ops.attention(q, K, V, threads=threads)},
        work={"read": float(k.nbytes + v.nbytes)},
    )


def _varlen(s: CacheShape, rng: np.random.Generator, threads: int) -> TimedCall:
    """Time sequences of one length. The peer has them as batches, in the same memory."""
    count = int(s.form)
    q, k, v = (normal(rng, s.dtype, count * s.N, h, s.D) for h in (s.heads[0], s.heads[1], s.heads[1]))
    Q, K, V = (x.reshape(count, s.N, *x.shape[1:]).swapaxes(1, 2) for x in (q, k, v))
    offsets = np.arange(count + 1, dtype=np.int32) * s.N
    checked = sample(Q[:1], K[:1], V[:1], {"causal": True})
    return TimedCall(
        lambda: ops.attention_varlen(q, k, v, offsets, offsets, causal=True, threads=threads),
        sample=Sample(lambda out: checked.take(_first(out, s.N)), checked.exact, checked.naive),
        peers={DENSE: lambda: ops.attention(Q, K, V, causal=True, threads=threads)},
    )


def _first(out: Array, length: int) -> Array:
    """The first sequence as a batch, from an output of rows or of batches."""
    return out[:length].swapaxes(0, 1)[None] if out.ndim == 3 else out[:1]


def _shapes() -> Iterator[CacheShape]:
    for heads in ((32, 8), (8, 8)):
        yield from (CacheShape("quantised", form, heads, 32768, 128, "bfloat16") for form in FORMATS)
    for dtype in ("float32", "bfloat16"):
        yield from (CacheShape("paged", page, (32, 8), 32768, 128, dtype) for page in PAGES)
        yield CacheShape("varlen", 4, (8, 8), 512, 64, dtype)
        yield CacheShape("varlen", 8, (8, 2), 1024, 128, dtype)
    yield CacheShape("quantised", "int4", (32, 8), QUICK_KEYS, 128, "bfloat16")


def _row(s: CacheShape) -> Row:
    return Row(s.name, lambda rng, threads: make(s, rng, threads), quick=s.N == QUICK_KEYS, tags=s.tags)


ROWS = tuple(map(_row, _shapes()))
