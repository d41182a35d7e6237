"""Rows of the attention library: decode, prefill, masks, windows, sinks, merge, mask_blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .. import dtypes
from ..kernels import reference
from ..library import ops, registry
from . import peers
from .limits import arithmetic, last_level_cache
from .rows import Array, Row, Sample, TimedCall

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (64, 80, 96, 128, 256, 512)
POOL = (1 << 20) + 7  # not a multiple of any row length, so that the rows of an array differ
NUMPY_KEYS = 2048  # NumPy is timed up to this many keys
HIDDEN_BLOCK = 256  # block size of the mask that hides nine blocks of ten
SINK_MEAN = 4.0


@dataclass(frozen=True)
class AttentionShape:
    """One call of attention: heads, queries, keys, head size, dtype; `extra` is a key of EXTRAS or empty."""

    heads: tuple[int, int]
    Nq: int
    Nk: int
    D: int
    dtype: str
    causal: bool = False
    extra: str = ""

    @property
    def name(self) -> str:
        kind = "decode" if self.Nq == 1 else "prefill"
        words = ["attention", kind, f"{self.heads[0]}/{self.heads[1]}", f"D{self.D}", f"N{self.Nk}", self.dtype]
        return " ".join([*words, *(["causal"] if self.causal else []), *([self.extra] if self.extra else [])])

    @property
    def tags(self) -> dict[str, Any]:
        kind = "decode" if self.Nq == 1 else "prefill"
        grouped = self.heads[0] != self.heads[1]
        return {
            "op": kind, "D": self.D, "N": self.Nk, "dtype": self.dtype, "causal": self.causal, "grouped": grouped,
            "extra": self.extra,
        }  # fmt: skip


# ---- inputs ----------------------------------------------------------------------------------------------------------


@cache
def _pool(dtype: str) -> Array:
    numbers = np.random.default_rng(7).standard_normal(POOL, dtype=np.float32)
    return numbers.astype(dtypes.to_numpy(dtypes.BY_NAME[dtype]))


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    """Return normal numbers copied from a pool at a random offset: as fast as a copy."""
    return np.resize(np.roll(_pool(dtype), int(rng.integers(POOL))), shape)


def _bool_mask(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    """Hide three positions of ten, in every block."""
    return {"mask": rng.random((1, 1, s.Nq, s.Nk), dtype=np.float32) < 0.7}


def _additive_mask(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    return {"mask": _normal(rng, "float32", 1, 1, s.Nq, s.Nk)}


def _hidden_mask(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    """Leave one block of ten visible, the diagonal ones among them, so that every row sees some key."""
    side = s.Nk // HIDDEN_BLOCK
    blocks = np.eye(side, dtype=bool)
    others = rng.permutation(np.flatnonzero(~blocks))[: max(0, side * side // 10 - side)]
    blocks.flat[others] = True
    return {"mask": np.kron(blocks, np.ones((HIDDEN_BLOCK, HIDDEN_BLOCK), bool))[None, None]}


def _window(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    return {"window": (s.Nk // 8, 0)}


def _sinks(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    return {"sinks": (SINK_MEAN + rng.standard_normal(s.heads[0])).astype(np.float32)}


EXTRAS: dict[str, Callable[[np.random.Generator, AttentionShape], dict[str, Any]]] = {
    "bool mask": _bool_mask,
    "additive mask": _additive_mask,
    "nine blocks of ten hidden": _hidden_mask,
    "window": _window,
    "sinks": _sinks,
}


# ---- attention -------------------------------------------------------------------------------------------------------


def make(s: AttentionShape, rng: np.random.Generator, threads: int) -> TimedCall:
    Hq, Hkv = s.heads
    q, k, v = (_normal(rng, s.dtype, 1, h, n, s.D) for h, n in ((Hq, s.Nq), (Hkv, s.Nk), (Hkv, s.Nk)))
    options: dict[str, Any] = {"causal": s.causal} | (EXTRAS[s.extra](rng, s) if s.extra else {})
    call = TimedCall(
        lambda: ops.attention(q, k, v, **options, threads=threads),
        sample=sample(q, k, v, options),
        torch=peers.attention_variants(q, k, v, options),
    )
    products = 4.0 * Hq * s.Nq * s.Nk * s.D * (0.5 if s.causal else 1.0)
    if s.Nq == 1:
        call.work = {"read": float(k.nbytes + v.nbytes), arithmetic(s.dtype): products}
        call.note = "K and V fit the last-level cache" if call.work["read"] <= last_level_cache() else ""
    elif not s.extra:
        call.work = {"flop": products}
    if s.dtype == "float32" and s.Nk <= NUMPY_KEYS and not s.causal and not s.extra:
        call.peers["NumPy"] = lambda: numpy_attention(q, k, v)
    if s.extra == "nine blocks of ten hidden":
        call.peers["no mask"] = lambda: ops.attention(q, k, v, threads=threads)
    return call


def sample(q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> Sample:
    """Return the reference for three rows of the first and the last head."""
    (_, Hq, Nq, _), (_, Hkv, Nk, _) = q.shape, k.shape
    heads, rows = sorted({0, Hq - 1}), sorted({0, Nq // 3, Nq - 1})
    seen = reference.visible(Nq, Nk, options.get("causal", False), options.get("window"), rows)
    mask, sinks = options.get("mask"), options.get("sinks")
    if mask is None:
        mask = seen[None, None]
    else:
        part = mask[:, :, rows]
        mask = seen & part if mask.dtype == bool else np.where(seen, part, np.float32(-np.inf))

    def formula(h: int, compute: type) -> Array:
        g = h // (Hq // Hkv)
        extra = {} if sinks is None else {"sinks": sinks[h : h + 1]}
        parts = q[:, h : h + 1, rows], k[:, g : g + 1], v[:, g : g + 1]
        out, _ = reference.attention(*parts, mask=mask, compute=compute, **extra)
        return np.asarray(out[0, 0])

    exact = np.stack([formula(h, np.float64) for h in heads])
    naive = np.stack([formula(h, np.float32) for h in heads]).astype(q.dtype)
    return Sample(lambda out: out[0][heads][:, rows], exact, naive)


def numpy_attention(q: Array, k: Array, v: Array) -> Array:
    """Compute the formula with BLAS. The heads of a group become rows, so that keys are read once."""
    B, Hq, Nq, D = q.shape
    Hkv = k.shape[1]
    S = np.matmul(q.reshape(B, Hkv, -1, D) * np.float32(D**-0.5), k.swapaxes(2, 3))
    np.subtract(S, S.max(axis=3, keepdims=True), out=S)
    np.exp(S, out=S)
    total = S.sum(axis=3, keepdims=True)
    return np.asarray((np.matmul(S, v) / total).reshape(B, Hq, Nq, -1))


# ---- merge and mask_blocks -------------------------------------------------------------------------------------------


def merge(rows: int, parts: int, D: int, rng: np.random.Generator, threads: int) -> TimedCall:
    """Merge the partials of a split call of attention. NumPy does the weighted sum as a matrix product."""
    o = _normal(rng, "float32", 1, rows, 1, parts, D)
    m, l = 4 * _normal(rng, "float32", 1, rows, 1, parts), 1 + 500 * rng.random((1, rows, 1, parts), dtype=np.float32)

    def numpy() -> Array:
        w = np.exp(m - m.max(axis=-1, keepdims=True))
        return np.asarray(np.matmul(w[..., None, :], o)[..., 0, :] / (w * l).sum(axis=-1, keepdims=True))

    formula = [reference.merge(o, m, l, kind)[0] for kind in (np.float64, np.float32)]
    run = lambda: ops.merge(o, m, l, threads=threads)[0]  # noqa: E731
    call = TimedCall(run, sample=Sample(lambda out: out, *formula), peers={"NumPy": numpy})
    call.work = {"read": float(o.nbytes + m.nbytes + l.nbytes)}
    call.note = "all parts fit the last-level cache" if call.work["read"] <= last_level_cache() else ""
    return call


def mask_blocks(heads: int, N: int, kind: str, rng: np.random.Generator, threads: int) -> TimedCall:
    """Map a mask whose blocks must all be read in full. NumPy's reductions over rows run along memory."""
    bq, bk = 128, 128
    mask = np.ones((1, heads, N, N), bool) if kind == "bool" else np.zeros((1, heads, N, N), np.float32)
    mask[:, :, : N // 2 + 3, : N // 3] = False if kind == "bool" else -np.inf

    def numpy() -> Array:
        some, every = (mask, mask) if kind == "bool" else (mask != -np.inf, mask == 0)
        some, every = (x.reshape(1, heads, N // bq, bq, N // bk, bk) for x in (some, every))
        found = some.any(axis=3).any(axis=-1).astype(np.uint8)
        return np.asarray(found + every.all(axis=3).all(axis=-1))

    exact = reference.mask_blocks(mask, bq, bk)
    run = lambda: ops.mask_blocks(mask, bq, bk, threads=threads)  # noqa: E731
    call = TimedCall(run, sample=Sample(lambda out: out, exact, exact), peers={"NumPy": numpy})
    call.work = {"read": float(mask.nbytes)}
    return call


# ---- the rows --------------------------------------------------------------------------------------------------------


def _shapes() -> Iterator[AttentionShape]:
    for D in SIZES:
        for N in (128, 1024, 2048, 16384, 65536):
            yield from (AttentionShape((16, 2) if D == 512 else (32, 8), 1, N, D, dtype) for dtype in DTYPES)
    for D in SIZES:
        for N in (1024, 4096):
            for dtype in DTYPES:
                yield from (AttentionShape((8, 8), N, N, D, dtype, causal) for causal in (False, True))
    for dtype in ("float32", "bfloat16"):
        yield from (AttentionShape((32, 8), 2048, 2048, 128, dtype, causal) for causal in (False, True))
        yield from (AttentionShape((8, 8), 2048, 2048, 128, dtype, extra=e) for e in ("bool mask", "additive mask"))
        yield from (AttentionShape((8, 8), 4096, 4096, 128, dtype, True, e) for e in ("window", "sinks"))
        yield AttentionShape((8, 8), 4096, 4096, 128, dtype, extra="nine blocks of ten hidden")
    yield AttentionShape((8, 8), 1024, 1024, 128, "float32", extra="bool mask")  # small enough for a quick run
    yield from (_registered(case) for case in registry.BENCHMARKS if case.op == "attention")


def _registered(case: registry.Case) -> AttentionShape:
    """Return the shape of a registry case. A window with no key after the query is a causal one."""
    s = case.sizes
    window = "window" in case.options
    extra = "window" if window else " ".join(case.made)
    return AttentionShape((s.Hq, s.Hkv), s.Nq, s.Nk, s.D, case.dtype, window or "causal" in case.options, extra)


QUICK = {
    "attention decode 32/8 D64 N1024 float32",
    "attention decode 32/8 D128 N16384 float32",
    "attention decode 32/8 D128 N16384 float16",
    "attention decode 32/8 D128 N16384 bfloat16",
    "attention prefill 8/8 D64 N1024 float32 causal",
    "attention prefill 8/8 D128 N1024 float32",
    "attention prefill 8/8 D128 N1024 bfloat16 causal",
    "attention prefill 8/8 D128 N1024 float32 bool mask",
    "merge 1024 parts of 32 rows D128",
    "mask_blocks 8 x 4096 x 4096 bool",
}


def _row(s: AttentionShape) -> Row:
    return Row(s.name, lambda rng, threads: make(s, rng, threads), quick=s.name in QUICK, tags=s.tags)


def _merge_row(rows: int) -> Row:
    name = f"merge 1024 parts of {rows} rows D128"
    return Row(name, lambda r, t: merge(rows, 1024, 128, r, t), quick=name in QUICK, tags={"op": "merge"})


def _mask_row(heads: int, kind: str) -> Row:
    name = f"mask_blocks {heads} x 4096 x 4096 {kind}"
    return Row(name, lambda r, t: mask_blocks(heads, 4096, kind, r, t), quick=name in QUICK, tags={"op": "mask_blocks"})


ROWS = (
    *(_row(s) for s in dict.fromkeys(_shapes())),  # some shapes are listed twice
    *(_merge_row(rows) for rows in (32, 256)),
    _mask_row(8, "bool"),
    _mask_row(2, "float32"),
)
