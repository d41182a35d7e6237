"""Rows of the attention library: decode, prefill, masks, windows, sinks, merge, mask_blocks.

extend.py has the rows with fewer queries than keys, and large groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .. import dtypes
from ..kernels import reference
from ..library import ops, registry
from . import peers
from .limits import arithmetic, last_level_cache
from .rows import Array, Row, Sample, TimedCall, kind_of_call

DTYPES = ("float32", "float16", "bfloat16")
SIZES = (64, 80, 96, 128, 256, 512)
POOL = (1 << 20) + 7  # not a multiple of any row length, so that the rows of an array differ
NUMPY_KEYS = 2048  # NumPy is timed up to this many keys,
NUMPY_SCORES = 1 << 22  # or up to this many scores, which it writes to memory
HIDDEN_BLOCK = 256  # block size of the mask that hides nine blocks of ten
SINK_MEAN = 4.0
VISIBLE = 512  # keys that a call of few queries sees in the rows "512 visible"


@dataclass(frozen=True)
class AttentionShape:
    """One call of attention: heads, queries, keys, head size, dtype; `extra` is a key of EXTRAS or empty.

    `Dv` is given where v is a view of the first columns of k, as in MLA.
    """

    heads: tuple[int, int]
    Nq: int
    Nk: int
    D: int
    dtype: str
    causal: bool = False
    extra: str = ""
    Dv: int | None = None

    @property
    def kind(self) -> str:
        return kind_of_call(self.heads, self.Nq, self.Nk)

    @property
    def name(self) -> str:
        queries = [f"Nq{self.Nq}"] if self.kind == "extend" else []
        words = ["attention", self.kind, f"{self.heads[0]}/{self.heads[1]}", *queries, f"D{self.D}"]
        words += [*([f"Dv{self.Dv}"] if self.Dv else []), f"N{self.Nk}", self.dtype, *(["MLA"] if self.Dv else [])]
        return " ".join([*words, *(["causal"] if self.causal else []), *([self.extra] if self.extra else [])])

    @property
    def tags(self) -> dict[str, Any]:
        grouped = self.heads[0] != self.heads[1]
        return {
            "op": self.kind, "D": self.D, "N": self.Nk, "dtype": self.dtype, "causal": self.causal, "grouped": grouped,
            "extra": self.extra, "Nq": self.Nq, "MLA": self.Dv is not None,
        }  # fmt: skip


# ---- inputs ----------------------------------------------------------------------------------------------------------


@cache
def _pool(dtype: str) -> Array:
    numbers = np.random.default_rng(7).standard_normal(POOL, dtype=np.float32)
    return numbers.astype(dtypes.to_numpy(dtypes.BY_NAME[dtype]))


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    """Return normal numbers copied from a pool at a random offset: as fast as a copy."""
    return np.resize(np.roll(_pool(dtype), int(rng.integers(POOL))), shape)


def _bool_mask(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    """Hide three positions of ten, in every block."""
    return {"mask": rng.random((1, 1, s.Nq, s.Nk), dtype=np.float32) < 0.7}


def _additive_mask(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    return {"mask": normal(rng, "float32", 1, 1, s.Nq, s.Nk)}


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


def _near_keys(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    return {"window": (VISIBLE - 1, 0)}


def _padded_bool(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    """Hide the unused part of a cache that is padded to its capacity."""
    return {"mask": np.broadcast_to(np.arange(s.Nk) < VISIBLE, (1, 1, s.Nq, s.Nk)).copy()}


def _padded_additive(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    mask = np.where(_padded_bool(rng, s)["mask"], np.float32(0), np.float32(-np.inf))
    return {"mask": mask.astype(np.float32)}


def _padded_mod(rng: np.random.Generator, s: AttentionShape) -> dict[str, Any]:
    lengths = np.array([VISIBLE], np.int32)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]}


EXTRAS: dict[str, Callable[[np.random.Generator, AttentionShape], dict[str, Any]]] = {
    "bool mask": _bool_mask,
    "additive mask": _additive_mask,
    "nine blocks of ten hidden": _hidden_mask,
    "window": _window,
    "sinks": _sinks,
    f"{VISIBLE} visible by window": _near_keys,
    f"{VISIBLE} visible by bool mask": _padded_bool,
    f"{VISIBLE} visible by additive mask": _padded_additive,
    f"{VISIBLE} visible by mask_mod": _padded_mod,
}
FEW_VISIBLE = tuple(extra for extra in EXTRAS if "visible" in extra)


# ---- attention -------------------------------------------------------------------------------------------------------


def make(s: AttentionShape, rng: np.random.Generator, threads: int) -> TimedCall:
    Hq, Hkv = s.heads
    q, k = (normal(rng, s.dtype, 1, h, n, s.D) for h, n in ((Hq, s.Nq), (Hkv, s.Nk)))
    v = k[..., : s.Dv] if s.Dv else normal(rng, s.dtype, *k.shape)
    options: dict[str, Any] = {"causal": s.causal} | (EXTRAS[s.extra](rng, s) if s.extra else {})
    call = TimedCall(
        lambda: ops.attention(q, k, v, **options, threads=threads),
        sample=sample(q, k, v, options),
        torch=peers.attention_variants(q, k, v, options),
    )
    products = 2.0 * Hq * s.Nq * s.Nk * (s.D + v.shape[3]) * (0.5 if s.causal else 1.0)
    if s.kind == "prefill" and not s.extra:
        call.work = {"flop": products}
    elif not s.extra:
        call.work = {"read": float(k.nbytes + (0 if s.Dv else v.nbytes)), arithmetic(s.dtype): products}
        call.note = "K and V fit the last-level cache" if call.work["read"] <= last_level_cache() else ""
    few = s.Nk <= NUMPY_KEYS or Hq * s.Nq * s.Nk <= NUMPY_SCORES
    if s.dtype == "float32" and few and not s.causal and not s.extra:
        call.peers["NumPy"] = lambda: numpy_attention(q, k, v)
    if s.extra == "nine blocks of ten hidden":
        call.peers["no mask"] = lambda: ops.attention(q, k, v, threads=threads)
    if s.extra in FEW_VISIBLE:
        call.peers["slice"] = _on_slice(q, k, v, options, threads)
    return call


def _on_slice(q: Array, k: Array, v: Array, options: Mapping[str, Any], threads: int) -> Callable[[], Array]:
    """Return the call on a slice of the keys that holds all visible ones. Several queries still need their window."""
    Nq, window = q.shape[2], options.get("window")
    visible = slice(-(VISIBLE + Nq - 1), None) if window else slice(VISIBLE)
    K, V = k[:, :, visible], v[:, :, visible]
    return lambda: ops.attention(q, K, V, window=window if Nq > 1 else None, threads=threads)


def sample(q: Array, k: Array, v: Array, options: Mapping[str, Any], rows: Sequence[int] = ()) -> Sample:
    """Return the reference for some rows of the first and the last head: those given, or else three."""
    (_, Hq, Nq, _), (_, Hkv, _, _) = q.shape, k.shape
    heads, rows = sorted({0, Hq - 1}), sorted(rows or {0, Nq // 3, Nq - 1})
    mask, sinks = peers.combined_mask(Nq, k.shape[2], options, rows), options.get("sinks")

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
    o = normal(rng, "float32", 1, rows, 1, parts, D)
    m, l = 4 * normal(rng, "float32", 1, rows, 1, parts), 1 + 500 * rng.random((1, rows, 1, parts), dtype=np.float32)

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
    "attention extend 32/8 Nq16 D128 N8192 float32",
    "attention decode 32/8 D128 N16384 float32 512 visible by window",
    "merge 1024 parts of 32 rows D128",
    "mask_blocks 8 x 4096 x 4096 bool",
}


def row(s: AttentionShape) -> Row:
    return Row(s.name, lambda rng, threads: make(s, rng, threads), quick=s.name in QUICK, tags=s.tags)


def _merge_row(rows: int) -> Row:
    name = f"merge 1024 parts of {rows} rows D128"
    return Row(name, lambda r, t: merge(rows, 1024, 128, r, t), quick=name in QUICK, tags={"op": "merge"})


def _mask_row(heads: int, kind: str) -> Row:
    name = f"mask_blocks {heads} x 4096 x 4096 {kind}"
    return Row(name, lambda r, t: mask_blocks(heads, 4096, kind, r, t), quick=name in QUICK, tags={"op": "mask_blocks"})


ROWS = (
    *(row(s) for s in dict.fromkeys(_shapes())),  # some shapes are listed twice
    *(_merge_row(rows) for rows in (32, 256)),
    _mask_row(8, "bool"),
    _mask_row(2, "float32"),
)
