"""One new token against keys and values in 4 bits: a byte holds column i in its low half, i + D/2 in its high half."""

import sys
from typing import NamedTuple

import numpy as np

from monotile.language import (
    Const,
    Tensor,
    arange,
    dot,
    exp,
    float32,
    full,
    inf,
    kernel,
    maximum,
    program_id,
    where,
    zeros,
)


class Softmax(NamedTuple):
    top: object
    total: object
    low: object
    high: object


def halves(codes, scales):
    """Return the columns of both halves as numbers: code 8 is 0."""
    low, high = (codes & 15).astype(float32) - 8.0, (codes >> 4).astype(float32) - 8.0
    return low * scales[:, None], high * scales[:, None]


@kernel
def int4_decode(
    q: Tensor["H D"],
    k: Tensor["Hkv N HALF"],
    k_scale: Tensor["Hkv N"],
    v: Tensor["Hkv N HALF"],
    v_scale: Tensor["Hkv N"],
    o: Tensor["H D"],
    scale: float,
    *,
    D: Const,
    HALF: Const,
    G: Const,
    BK: Const = 32,
):
    """Each program owns the G query heads of a KV head."""
    h = program_id(k.shape[0])
    heads, half = h * G + arange(G), arange(HALF)
    q_low, q_high = q[heads, half] * scale, q[heads, HALF + half] * scale
    state = Softmax(full(G, -inf), zeros(G), zeros((G, HALF)), zeros((G, HALF)))
    for j in range(0, k.shape[1], BK):
        rows = j + arange(BK)
        k_low, k_high = halves(k[h, rows, :], k_scale[h, rows])
        v_low, v_high = halves(v[h, rows, :], v_scale[h, rows])
        scores = where((rows < k.shape[1])[None, :], dot(q_low, k_low.T) + dot(q_high, k_high.T), -inf)
        top = maximum(state.top, scores.max(axis=1))
        old, p = exp(state.top - top), exp(scores - top[:, None])
        low, high = state.low * old[:, None] + dot(p, v_low), state.high * old[:, None] + dot(p, v_high)
        state = Softmax(top, state.total * old + p.sum(axis=1), low, high)
    o[heads, half] = state.low / state.total[:, None]
    o[heads, HALF + half] = state.high / state.total[:, None]


def quantized(x):
    scale, half = np.abs(x).max(axis=-1) / 7, x.shape[-1] // 2
    codes = (np.round(x / scale[..., None]) + 8).astype(np.uint8)
    return codes[..., :half] | codes[..., half:] << 4, scale.astype(np.float32), (codes - 8.0) * scale[..., None]


def largest_error(backend: str | None = None) -> float:
    rng, G, D, N = np.random.default_rng(0), 4, 32, 100
    q = rng.standard_normal((2 * G, D), dtype=np.float32)
    (k, k_scale, keys), (v, v_scale, values) = (quantized(rng.standard_normal((2, N, D))) for _ in range(2))
    o = np.empty_like(q)
    int4_decode(q, k, k_scale, v, v_scale, o, D**-0.5, G=G, backend=backend)
    p = np.exp(np.einsum("hd,hnd->hn", q, keys.repeat(G, axis=0)) * D**-0.5)
    p /= p.sum(axis=1, keepdims=True)
    return float(np.abs(o - np.einsum("hn,hnd->hd", p, values.repeat(G, axis=0))).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
