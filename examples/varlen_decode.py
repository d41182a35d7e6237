"""One new token of each sequence against its own keys, which lie one sequence after the other."""

import sys
from typing import NamedTuple

import numpy as np

from monotile.language import Const, Tensor, arange, dot, exp, full, inf, kernel, maximum, program_id, where, zeros


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
def varlen_decode(
    q: Tensor["B H D"], k: Tensor["T Hkv D"], v: Tensor["T Hkv D"], offsets: Tensor["_"], o: Tensor["B H D"],
    scale: float, *, D: Const, G: Const, BK: Const = 32,
):  # fmt: skip
    """Each program owns the G query heads of a KV head, in one sequence: keys offsets[b] to offsets[b + 1]."""
    b, h = program_id(q.shape[0], k.shape[1])
    heads = h * G + arange(G)
    keys, values = k[offsets[b] : offsets[b + 1], h], v[offsets[b] : offsets[b + 1], h]
    state = Softmax(full(G, -inf), zeros(G), zeros((G, D)))
    for j in range(0, keys.shape[0], BK):
        rows = j + arange(BK)
        scores = dot(q[b, heads, :] * scale, keys[rows, :].T)
        state = step(state, where((rows < keys.shape[0])[None, :], scores, -inf), values[rows, :])
    o[b, heads, :] = state.out / state.total[:, None]


def largest_error(backend: str | None = None) -> float:
    rng, G, D, offsets = np.random.default_rng(0), 4, 32, np.array([0, 5, 70, 71], np.int32)
    q = rng.standard_normal((3, 2 * G, D), dtype=np.float32)
    k, v = (rng.standard_normal((71, 2, D), dtype=np.float32) for _ in range(2))
    o = np.empty_like(q)
    varlen_decode(q, k, v, offsets, o, D**-0.5, G=G, backend=backend)
    exact = np.empty(q.shape)
    for b in range(3):
        keys, values = (x[offsets[b] : offsets[b + 1]].repeat(G, axis=1).astype(np.float64) for x in (k, v))
        p = np.exp(np.einsum("hd,nhd->hn", q[b], keys) * D**-0.5)
        exact[b] = np.einsum("hn,nhd->hd", p / p.sum(axis=1, keepdims=True), values)
    return float(np.abs(o - exact).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
