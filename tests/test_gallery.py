"""The kernels of examples/gallery against NumPy in float64, on shapes that do not fit their blocks."""

from __future__ import annotations

import numpy as np
from gallery import decode, gradients, layers

from arrays import Array, poisoned, random


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def attended(q: Array, k: Array, v: Array, scale: float) -> Array:
    """One query of each head over the keys (N, D) of that head."""
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def test_layer_norm(backend: str) -> None:
    x, w, b, y = random((7, 40)), random(40, seed=1), random(40, seed=2), poisoned((7, 40))
    layers.layer_norm(x, w, b, y, 1e-5, backend=backend)
    wide = x.astype(np.float64)
    rest = wide - wide.mean(axis=1, keepdims=True)
    close(y, rest / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5) * w + b)


def test_rope_in_place(backend: str) -> None:
    angles = random((21, 6)) * 9
    c, s = np.cos(angles), np.sin(angles)
    for interleaved in (False, True):
        x = random((2, 3, 21, 12))
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :6], x[..., 6:])
        pairs = first * c - second * s, second * c + first * s
        expected = np.stack(pairs, -1).reshape(x.shape) if interleaved else np.concatenate(pairs, -1)
        layers.rope(x, c, s, x, interleaved=interleaved, backend=backend)
        close(x, expected)


def test_swiglu(backend: str) -> None:
    gate, up, y = random((9, 70)) * 30, random((9, 70), seed=1), poisoned((9, 70))
    layers.swiglu(gate, up, y, backend=backend)
    close(y, gate / (1 + np.exp(-gate.astype(np.float64))) * up)


def test_paged_decode(backend: str) -> None:
    q, k, v = random((3, 4, 16)), random((9, 8, 2, 16), seed=1), random((9, 8, 2, 16), seed=2)
    table, lengths = np.array([[3, 1, 7], [0, 8, 2], [5, 5, 5]], np.int32), np.array([20, 8, 0], np.int32)
    o = poisoned((3, 4, 16))
    v[7, 4:] = np.nan  # not in use
    decode.paged(q, k, v, table, lengths, o, 0.25, backend=backend)
    for b, length in enumerate(lengths[:2]):
        keys, values = (np.repeat(x[table[b]].reshape(24, 2, 16)[:length], 2, 1).swapaxes(0, 1) for x in (k, v))
        close(o[b], attended(q[b], keys, values, 0.25))
    assert (o[2] == 0).all()


def test_decode_of_int8_and_int4(backend: str) -> None:
    q, scales = random((2, 3, 16)), np.abs(random((2, 2, 3, 37), seed=3)) / 50
    k, v = random((2, 3, 37, 16), "int8", 1), random((2, 3, 37, 16), "int8", 2)
    o = poisoned((2, 3, 16))
    decode.int8(q, k, v, *scales, o, 0.25, backend=backend)
    for b in range(2):
        close(o[b], attended(q[b], k[b] * scales[0, b][..., None], v[b] * scales[1, b][..., None], 0.25))
    k, v = k % 16, v % 16  # from 0 to 15, which stand for -8 to 7
    packed = [(x[..., :8] | (x[..., 8:] << 4)).astype(np.uint8) for x in (k, v)]
    o = poisoned((2, 3, 16))
    decode.int4(q, *packed, *scales, o, 0.25, backend=backend)
    for b in range(2):
        keys, values = ((x[b].astype(int) - 8) * scales[n, b][..., None] for n, x in enumerate((k, v)))
        close(o[b], attended(q[b], keys, values, 0.25))


def test_varlen_decode(backend: str) -> None:
    q, k, v = random((3, 2, 16)), random((60, 2, 16), seed=1), random((60, 2, 16), seed=2)
    offsets, o = np.array([0, 35, 35, 60], np.int32), poisoned((3, 2, 16))
    decode.varlen(q, k, v, offsets, o, 0.25, backend=backend)
    for b in (0, 2):
        keys, values = (x[offsets[b] : offsets[b + 1]].swapaxes(0, 1) for x in (k, v))
        close(o[b], attended(q[b], keys, values, 0.25))
    assert (o[1] == 0).all()


def test_gradients_of_keys_and_values(backend: str) -> None:
    q, do = random((1, 2, 19, 8)), random((1, 2, 19, 8), seed=3)
    k, v = random((1, 2, 21, 8), seed=1), random((1, 2, 21, 8), seed=2)
    scores = np.einsum("bhmd,bhnd->bhmn", q.astype(np.float64), k) * 0.3
    lse = np.log(np.exp(scores).sum(axis=-1))
    weights = np.exp(scores - lse[..., None])
    delta = (do * (weights @ v)).sum(axis=-1)
    dk, dv = poisoned(k.shape), poisoned(v.shape)
    single = [x.astype(np.float32) for x in (lse, delta)]
    gradients.dk_dv(q, k, v, do, *single, dk, dv, 0.3, backend=backend)
    ds = weights * (do @ v.swapaxes(-1, -2) - delta[..., None])
    close(dv, weights.swapaxes(-1, -2) @ do)
    close(dk, ds.swapaxes(-1, -2) @ q * 0.3)
