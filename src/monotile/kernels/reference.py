"""The definition: every op in NumPy, by the formula. In float64 it is what results are held against; in float32 it
shows how far the plain formula itself is from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class Scores(NamedTuple):
    """Scores in natural units before anything is hidden, (B, H, Nq, Nk), and what they follow from."""

    q: Array
    k: Array  # repeated for every query head
    v: Array
    S: Array
    slope: Array | float  # derivative with respect to the scaled product
    seen: Array
    scale: float


def _scores(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    score_mod: Callable[..., Array] | None = None, mask_mod: Callable[..., Array] | None = None, compute: type,
) -> Scores:  # fmt: skip
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q, k, v = (x.astype(compute) for x in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    B, H, Nq, D = q.shape
    Nk = k.shape[2]
    seen = np.broadcast_to(visible(Nq, Nk, causal, window), (B, H, Nq, Nk))
    place = np.arange(B)[:, None, None, None], np.arange(H)[None, :, None, None]
    place += np.arange(Nq)[:, None], np.arange(Nk)[None, :]
    factor = compute(D**-0.5 if scale is None else scale)
    slope: Array | float = 1.0
    S = _product(compute)(q, k.swapaxes(2, 3)) * factor
    if score_mod is not None:
        slope = _difference_quotient(score_mod, S.astype(np.float64), place).astype(compute)
        S = score_mod(S, *place).astype(compute)
    if softcap is not None:
        capped = np.tanh(S / softcap)
        S, slope = capped * softcap, slope * (1 - capped * capped)
    if mask is not None and mask.dtype != bool:
        S = S + mask.astype(compute)
    if mask is not None:
        seen = seen & (mask if mask.dtype == bool else mask != -np.inf)
    if mask_mod is not None:
        seen = seen & mask_mod(*place)
    return Scores(q, k, v, S, slope, seen, factor)


def _product(compute: type) -> Callable[[Array, Array], Array]:
    return np.matmul if compute is np.float64 else term_by_term


def _difference_quotient(score_mod: Callable[..., Array], S: Array, place: tuple[Array, ...]) -> Array:
    """The derivative of a function in float64, to about ten digits."""
    h = 2.0**-20
    return np.asarray((score_mod(S + h, *place) - score_mod(S - h, *place)) / (2 * h))


def attention(
    q: Array, k: Array, v: Array, *, sinks: Array | None = None, compute: type = np.float64, **options: Any
) -> tuple[Array, Array]:
    """Output (B, Hq, Nq, Dv) and natural logsumexp (B, Hq, Nq)."""
    with np.errstate(all="ignore"):
        found = _scores(q, k, v, compute=compute, **options)
        S = np.where(found.seen, found.S, -np.inf)
        if sinks is not None:
            logits = np.broadcast_to(sinks.astype(compute)[None, :, None, None], (*S.shape[:3], 1))
            S = np.concatenate([S, logits], axis=3)
        top = S.max(axis=3, keepdims=True, initial=-np.inf)
        P = np.exp(S - np.where(np.isneginf(top), 0.0, top))
        total = P.sum(axis=3, keepdims=True)
        lse = (np.where(np.isneginf(top), -np.inf, top) + np.log(total))[..., 0]
        P = np.where(total == 0, 0.0, P / total)[..., : k.shape[2]]
        # A key that no row sees contributes nothing, whatever its memory holds.
        unseen = ~found.seen.any(axis=2)[..., None]
        return _product(compute)(P, np.where(unseen, 0.0, found.v)), lse


def attention_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, dlse: Array | None = None,
    mask_grad: bool = False, sinks: Array | None = None, compute: type = np.float64, **options: Any,
) -> dict[str, Array]:  # fmt: skip
    """The gradients of attention by name, from its output and logsumexp. docs/internals/backward.md has the formulas.
    Neither a key that no row sees nor a row that sees no key contributes anything, whatever their memory holds."""
    product = _product(compute)
    with np.errstate(all="ignore"):
        found = _scores(q, k, v, compute=compute, **options)
        seen, do, o, lse = found.seen, *(x.astype(compute) for x in (do, o, lse))
        delta = product((do * o)[..., None, :], np.ones((o.shape[-1], 1), compute))[..., 0, 0]
        if dlse is not None:
            delta = delta - dlse.astype(compute)
        shift = np.where(np.isneginf(lse), 0.0, lse)[..., None]
        P = np.where(seen, np.exp(found.S - shift), 0.0)
        dS = np.where(seen, P * (product(do, found.v.swapaxes(2, 3)) - delta[..., None]), 0.0)
        dX = np.where(seen, dS * found.slope, 0.0)
        keys = np.where(seen.any(axis=2)[..., None], found.k, 0.0)
        q_seen, do_seen = (np.where(seen.any(axis=3)[..., None], x, 0.0) for x in (found.q, do))
        dk, dv = product(dX.swapaxes(2, 3), q_seen) * found.scale, product(P.swapaxes(2, 3), do_seen)
        gradients = {"dq": product(dX, keys) * found.scale, "dk": _over_group(dk, k), "dv": _over_group(dv, v)}
        if sinks is not None:
            share = np.exp(sinks.astype(compute)[None, :, None] - shift[..., 0])
            gradients["dsinks"] = _summed_to(-share * delta, (1, len(sinks), 1)).reshape(-1)
        mask = options.get("mask")
        if mask_grad and mask is not None:
            gradients["dmask"] = _summed_to(dS, (1,) * (4 - mask.ndim) + mask.shape).reshape(mask.shape)
    return gradients


def _over_group(gradient: Array, like: Array) -> Array:
    """Sum the gradients of repeated heads, one after the other."""
    B, H, N, D = like.shape
    parts = gradient.reshape(B, H, -1, N, D) if like.size else np.zeros((B, H, 1, N, D), gradient.dtype)
    total = np.zeros((B, H, N, D), gradient.dtype)
    for n in range(parts.shape[2]):
        total = total + parts[:, :, n]
    return total


def _summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the dimensions that a shape has only once, one term after the other."""
    for axis, (side, wanted) in enumerate(zip(x.shape, shape, strict=True)):
        if side != wanted:
            x = (
                np.add.accumulate(x, axis=axis).take([-1], axis=axis)
                if side
                else np.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
            )
    return x


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
