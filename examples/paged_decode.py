"""One new token against keys in pages: key j of batch b is at j % PAGE in page table[b, j // PAGE]."""

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
def paged_decode(
    q: Tensor["B H D"], k: Tensor["P PAGE Hkv D"], v: Tensor["P PAGE Hkv D"], table: Tensor["B T"],
    lengths: Tensor["B"], o: Tensor["B H D"], scale: float, *, PAGE: Const, D: Const, G: Const,
):  # fmt: skip
    """Each program owns the G query heads of a KV head, in one batch."""
    b, h = program_id(q.shape[0], k.shape[2])
    heads = h * G + arange(G)
    queries = q[b, heads, :] * scale
    state = Softmax(full(G, -inf), zeros(G), zeros((G, D)))
    for j in range(0, lengths[b], PAGE):
        page = table[b, j // PAGE]
        scores = dot(queries, k[page, arange(PAGE), h, :].T)
        scores = where((j + arange(PAGE) < lengths[b])[None, :], scores, -inf)
        state = step(state, scores, v[page, arange(PAGE), h, :])
    o[b, heads, :] = state.out / state.total[:, None]


def largest_error(backend: str | None = None) -> float:
    rng, G, D = np.random.default_rng(0), 4, 32
    q = rng.standard_normal((2, 2 * G, D), dtype=np.float32)
    k, v = (rng.standard_normal((7, 16, 2, D), dtype=np.float32) for _ in range(2))
    table, lengths = np.array([[6, 0, 3], [1, 5, 2]], np.int32), np.array([40, 17], np.int32)
    o = np.empty_like(q)
    paged_decode(q, k, v, table, lengths, o, D**-0.5, G=G, backend=backend)
    exact = np.empty(q.shape)
    for b, n in enumerate(lengths):
        keys, values = (np.concatenate(pages[table[b]])[:n].repeat(G, axis=1).astype(np.float64) for pages in (k, v))
        p = np.exp(np.einsum("hd,nhd->hn", q[b], keys) * D**-0.5)
        exact[b] = np.einsum("hn,nhd->hd", p / p.sum(axis=1, keepdims=True), values)
    return float(np.abs(o - exact).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
