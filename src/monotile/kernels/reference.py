"""The definition: every op in NumPy, by the formula. In float64 it is what results are held against; in float32 it
shows how far the plain formula itself is from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def visible(
    Nq: int, Nk: int, causal: bool | str = False, window: tuple[int | None, int | None] | None = None,
    rows: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """(Nq, Nk): which keys a query may see by position; or that for some of the queries."""
    i, j = np.asarray(range(Nq) if rows is None else rows)[:, None], np.arange(Nk)[None, :]
    seen = np.ones((len(i), Nk), bool)
    if causal in (True, "lower_right"):
        seen &= j <= i + Nk - Nq
    elif causal == "upper_left":
        seen &= j <= i
    left, right = window or (None, None)
    if left is not None:
        seen &= j >= i + Nk - Nq - left
    if right is not None:
        seen &= j <= i + Nk - Nq + right
    return seen


def term_by_term(a: Array, b: Array) -> Array:
    """a @ b, summed one term after the other. A BLAS sums in blocks, in each shape in others, which is no measure for
    small arrays; for large ones it has to do."""
    shape = (*a.shape[:-1], b.shape[-1])
    if a.shape[-1] * math.prod(shape) > 2**31:
        return np.asarray(a @ b)
    total = np.zeros(shape, a.dtype)
    for n in range(a.shape[-1]):
        total += a[..., n, None] * b[..., n, None, :]
    return total


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Array] | None = None, mask_mod: Callable[..., Array] | None = None,
    compute: type = np.float64,
) -> tuple[Array, Array]:  # fmt: skip
    """Output (B, Hq, Nq, Dv) and natural logsumexp (B, Hq, Nq)."""
    product = np.matmul if compute is np.float64 else term_by_term
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q, k, v = (x.astype(compute) for x in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    B, H, Nq, D = q.shape
    Nk = k.shape[2]
    seen = np.broadcast_to(visible(Nq, Nk, causal, window), (B, H, Nq, Nk))
    b, h = np.arange(B)[:, None, None, None], np.arange(H)[None, :, None, None]
    i, j = np.arange(Nq)[:, None], np.arange(Nk)[None, :]
    with np.errstate(all="ignore"):
        S = product(q, k.swapaxes(2, 3)) * compute(D**-0.5 if scale is None else scale)
        if score_mod is not None:
            S = score_mod(S, b, h, i, j).astype(compute)
        if softcap is not None:
            S = np.tanh(S / softcap) * softcap
        if mask is not None and mask.dtype != bool:
            S = S + mask.astype(compute)
        if mask is not None:
            seen = seen & (mask if mask.dtype == bool else mask != -np.inf)
        if mask_mod is not None:
            seen = seen & mask_mod(b, h, i, j)
        S = np.where(seen, S, -np.inf)
        if sinks is not None:
            S = np.concatenate([S, np.broadcast_to(sinks.astype(compute)[None, :, None, None], (B, H, Nq, 1))], axis=3)
        top = S.max(axis=3, keepdims=True, initial=-np.inf)
        P = np.exp(S - np.where(np.isneginf(top), 0.0, top))
        total = P.sum(axis=3, keepdims=True)
        lse = (np.where(np.isneginf(top), -np.inf, top) + np.log(total))[..., 0]
        P = np.where(total == 0, 0.0, P / total)[..., :Nk]
        # A key that no row sees contributes nothing, whatever its memory holds.
        unseen = ~seen.any(axis=2)[..., None]
        return product(P, np.where(unseen, 0.0, v)), lse


def merge(o: Array, m: Array, l: Array, compute: type = np.float64) -> tuple[Array, Array]:
    """Output (..., Dv) and natural logsumexp (...) of S parts. A part with l == 0 has seen no key."""
    there = l != 0
    m, l = np.where(there, m, -np.inf).astype(compute), np.where(there, l, 0).astype(compute)
    o = np.where(there[..., None], o, 0).astype(compute)
    top = m.max(axis=-1, initial=-np.inf)
    with np.errstate(all="ignore"):
        w = np.exp(m - np.where(np.isneginf(top), 0, top)[..., None])
        total = (w * l).sum(axis=-1)
        out = (w[..., None] * o).sum(axis=-2) / np.where(total == 0, 1, total)[..., None]
        return out, top + np.log(total)


def mask_blocks(mask: Array, block_q: int, block_k: int) -> Array:
    """0 hidden, 1 mixed, 2 all visible (an additive mask: all zero)."""
    some, every = (mask, mask) if mask.dtype == bool else (mask != -np.inf, mask == 0)
    *lead, Nq, Nk = mask.shape
    kinds = np.empty((*lead, -(-Nq // block_q), -(-Nk // block_k)), np.uint8)
    for i, j in np.ndindex(kinds.shape[-2:]):
        block = (..., slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k))
        kinds[..., i, j] = np.where(every[block].all((-2, -1)), 2, some[block].any((-2, -1)))
    return kinds
