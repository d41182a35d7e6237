"""One new token against keys and values in int8, with a scale for each row."""

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
    out: object


def step(state, scores, values):
    """Add a block of scores and values to a running softmax."""
    top = maximum(state.top, scores.max(axis=1))
    old, weights = exp(state.top - top), exp(scores - top[:, None])
    return Softmax(top, state.total * old + weights.sum(axis=1), state.out * old[:, None] + dot(weights, values))


@kernel
def int8_decode(
    q: Tensor["H D"],
    k: Tensor["Hkv N D"],
    k_scale: Tensor["Hkv N"],
    v: Tensor["Hkv N D"],
    v_scale: Tensor["Hkv N"],
    o: Tensor["H D"],
    scale: float,
    *,
    D: Const,
    G: Const,
    BK: Const = 32,
):
    """Each program owns the G query heads of a KV head."""
    h = program_id(k.shape[0])
    heads = h * G + arange(G)
    state = Softmax(full(G, -inf), zeros(G), zeros((G, D)))
    for j in range(0, k.shape[1], BK):
        rows = j + arange(BK)
        scores = dot(q[heads, :] * scale, k[h, rows, :].astype(float32).T) * k_scale[h, rows][None, :]
        values = v[h, rows, :].astype(float32) * v_scale[h, rows][:, None]
        state = step(state, where((rows < k.shape[1])[None, :], scores, -inf), values)
    o[heads, :] = state.out / state.total[:, None]


def quantized(x):
    scale = np.abs(x).max(axis=-1) / 127
    return np.round(x / scale[..., None]).astype(np.int8), scale.astype(np.float32)


def largest_error(backend: str | None = None) -> float:
    rng, G, D, N = np.random.default_rng(0), 4, 32, 100
    q = rng.standard_normal((2 * G, D), dtype=np.float32)
    (k, k_scale), (v, v_scale) = (quantized(rng.standard_normal((2, N, D))) for _ in range(2))
    o = np.empty_like(q)
    int8_decode(q, k, k_scale, v, v_scale, o, D**-0.5, G=G, backend=backend)
    keys, values = ((x * s[..., None].astype(np.float64)).repeat(G, axis=0) for x, s in ((k, k_scale), (v, v_scale)))
    p = np.exp(np.einsum("hd,hnd->hn", q, keys) * D**-0.5)
    return float(np.abs(o - np.einsum("hn,hnd->hd", p / p.sum(axis=1, keepdims=True), values)).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
