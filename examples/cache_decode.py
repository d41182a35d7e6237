"""One query per sequence and head over four kinds of caches: pages, int8, int4, sequences packed end to end."""

import sys
from typing import Any, NamedTuple

import numpy as np

from monotile.language import (
    Const,
    Tensor,
    arange,
    exp,
    float32,
    full,
    inf,
    int32,
    kernel,
    maximum,
    program_id,
    where,
    zeros,
)


class State(NamedTuple):
    """The softmax so far: greatest score, sum of weights, weighted sum of values."""

    top: Any
    total: Any
    out: Any


def empty(D):
    return State(full(1, -inf), zeros(1), zeros(D))


def step(state, scores, V):
    """Take a block of keys in; the scores of hidden ones are -inf, and their values 0."""
    top = maximum(state.top, scores.max(axis=0))
    shift = where(top == -inf, 0.0, top)
    weights, keep = exp(scores - shift), exp(state.top - shift)
    return State(top, state.total * keep + weights.sum(axis=0), state.out * keep + (weights[:, None] * V).sum(axis=0))


def finish(state):
    return where(state.total == 0.0, 0.0, state.out / state.total)


@kernel
def paged(
    q: Tensor["B Hq D"], k: Tensor["P page Hkv D"], v: Tensor["P page Hkv D"], table: Tensor["B T"],
    lengths: Tensor["B"], o: Tensor["B Hq D"], scale: float, *, D: Const, page: Const,
):  # fmt: skip
    """Keys and values lie in pages; `table` has the pages of each sequence."""
    b, h = program_id(q.shape[0], q.shape[1])
    g = h // (q.shape[1] // k.shape[2])
    Q, length, state = q[b, h] * scale, lengths[b], empty(D)
    for j in range(0, length, page):
        place = table[b, j // page]
        seen = j + arange(page) < length
        S = where(seen, (k[place, :, g] * Q[None, :]).sum(axis=1), -inf)
        state = step(state, S, where(seen[:, None], v[place, :, g], 0.0))
    o[b, h] = finish(state)


@kernel
def int8(
    q: Tensor["B H D"], k: Tensor["B H N D"], v: Tensor["B H N D"], k_scale: Tensor["B H N"], v_scale: Tensor["B H N"],
    o: Tensor["B H D"], scale: float, *, D: Const, BN: Const = 32,
):  # fmt: skip
    """Keys and values are int8 with a scale per row; rows past the end have scale 0 and read as 0."""
    b, h = program_id(q.shape[0], q.shape[1])
    Q, state = q[b, h] * scale, empty(D)
    for j in range(0, k.shape[2], BN):
        rows = j + arange(BN)
        S = (k[b, h, rows].astype(float32) * Q[None, :]).sum(axis=1) * k_scale[b, h, rows]
        S = where(rows < k.shape[2], S, -inf)
        state = step(state, S, v[b, h, rows].astype(float32) * v_scale[b, h, rows][:, None])
    o[b, h] = finish(state)


@kernel
def int4(
    q: Tensor["B H D"], k: Tensor["B H N half"], v: Tensor["B H N half"], k_scale: Tensor["B H N"],
    v_scale: Tensor["B H N"], o: Tensor["B H D"], scale: float, *, D: Const, half: Const, BN: Const = 32,
):  # fmt: skip
    """Two numbers from -8 to 7 in a byte: the low four bits are columns 0 to D / 2, the high ones the others."""
    b, h = program_id(q.shape[0], q.shape[1])
    low, high = q[b, h, 0:half] * scale, q[b, h, half:D] * scale
    left, right = empty(half), empty(half)
    for j in range(0, k.shape[2], BN):
        rows = j + arange(BN)
        K, V, unit = k[b, h, rows].astype(int32), v[b, h, rows].astype(int32), v_scale[b, h, rows][:, None]
        S = (((K & 15) - 8) * low[None, :]).sum(axis=1) + (((K >> 4) - 8) * high[None, :]).sum(axis=1)
        S = where(rows < k.shape[2], S * k_scale[b, h, rows], -inf)
        left, right = step(left, S, ((V & 15) - 8) * unit), step(right, S, ((V >> 4) - 8) * unit)
    o[b, h, 0:half], o[b, h, half:D] = finish(left), finish(right)


@kernel
def varlen(
    q: Tensor["B H D"], k: Tensor["T H D"], v: Tensor["T H D"], offsets: Tensor["_"], o: Tensor["B H D"], scale: float,
    *, D: Const, BN: Const = 32,
):  # fmt: skip
    """Sequences lie end to end: sequence b has the rows offsets[b] to offsets[b + 1]."""
    b, h = program_id(q.shape[0], q.shape[1])
    keys, values = k[offsets[b] : offsets[b + 1], h], v[offsets[b] : offsets[b + 1], h]
    Q, state = q[b, h] * scale, empty(D)
    for j in range(0, keys.shape[0], BN):
        rows = j + arange(BN)
        S = where(rows < keys.shape[0], (keys[rows] * Q[None, :]).sum(axis=1), -inf)
        state = step(state, S, values[rows])
    o[b, h] = finish(state)


Array = Any
SCALE, D, H, N = 0.25, 16, 4, 37
LENGTHS = 20, 8, 0  # of the sequences: the last has no key


def attended(q: Array, k: Array, v: Array) -> Array:
    """One query of each head over the keys (N, H, D), in float64."""
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k) * SCALE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30))
    return np.einsum("hn,nhd->hd", weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30), v)


def paged_error(rng: np.random.Generator, backend: str | None) -> float:
    q, o = rng.standard_normal((3, H, D), np.float32), np.empty((3, H, D), np.float32)
    k, v = (rng.standard_normal((9, 8, 2, D), np.float32) for _ in range(2))
    table, lengths = np.array([[3, 1, 7], [0, 8, 2], [5, 5, 5]], np.int32), np.array(LENGTHS, np.int32)
    v[7, 4:] = np.nan  # not in use
    paged(q, k, v, table, lengths, o, SCALE, backend=backend)
    caches = [
        [np.repeat(x[pages].reshape(24, 2, D)[:n], 2, 1) for x in (k, v)]
        for pages, n in zip(table, LENGTHS, strict=True)
    ]
    return max(np.abs(o[b] - attended(q[b], *caches[b])).max() for b in range(3))


def varlen_error(rng: np.random.Generator, backend: str | None) -> float:
    q, o = rng.standard_normal((3, H, D), np.float32), np.empty((3, H, D), np.float32)
    k, v = (rng.standard_normal((sum(LENGTHS), H, D), np.float32) for _ in range(2))
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int32)
    varlen(q, k, v, offsets, o, SCALE, backend=backend)
    spans = [slice(*offsets[b : b + 2]) for b in range(3)]
    return max(np.abs(o[b] - attended(q[b], k[spans[b]], v[spans[b]])).max() for b in range(3))


def quantised_error(rng: np.random.Generator, backend: str | None, bits: int) -> float:
    q, o = rng.standard_normal((2, H, D), np.float32), np.empty((2, H, D), np.float32)
    most = 2 ** (bits - 1)
    codes = rng.integers(-most, most, (2, 2, H, N, D)).astype(np.int8)  # of keys and of values
    scales = rng.uniform(0.1, 1.0, (2, 2, H, N)).astype(np.float32) / most
    if bits == 8:
        int8(q, *codes, *scales, o, SCALE, backend=backend)
    else:
        halves = (codes + 8).astype(np.uint8)
        packed = halves[..., : D // 2] | halves[..., D // 2 :] << 4
        int4(q, *packed, *scales, o, SCALE, backend=backend)
    k, v = (codes * scales[..., None]).swapaxes(2, 3)
    return max(np.abs(o[b] - attended(q[b], k[b], v[b])).max() for b in range(2))


def largest_error(backend: str | None = None) -> float:
    rng = np.random.default_rng(0)
    quantised = [quantised_error(rng, backend, bits) for bits in (8, 4)]
    return float(max(paged_error(rng, backend), varlen_error(rng, backend), *quantised))


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
