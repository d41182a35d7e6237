"""Gradients of attention's keys and values, from the logsumexp of the forward pass: no score is kept."""

import sys

import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, dot, exp, kernel, program_id, where, zeros


@kernel
def dkdv(
    q: Tensor["H N D"], k: Tensor["H M D"], v: Tensor["H M D"], do: Tensor["H N D"], lse: Tensor["H N"],
    delta: Tensor["H N"], dk: Tensor["H M D"], dv: Tensor["H M D"], scale: float, *, D: Const, B: Const = 32,
):  # fmt: skip
    """Each program owns B keys of a head and passes over all queries. delta is the row sum of o * do."""
    h, j = program_id(k.shape[0], cdiv(k.shape[1], B))
    cols = j * B + arange(B)
    keys, values = k[h, cols, :], v[h, cols, :]
    key_grad, value_grad = zeros((B, D)), zeros((B, D))
    for i in range(0, q.shape[1], B):
        rows = i + arange(B)
        queries, grad = q[h, rows, :], do[h, rows, :]
        inside = (rows < q.shape[1])[:, None] & (cols < k.shape[1])[None, :]
        p = where(inside, exp(dot(queries, keys.T) * scale - lse[h, rows][:, None]), 0.0)
        ds = p * (dot(grad, values.T) - delta[h, rows][:, None]) * scale
        value_grad += dot(p.T, grad)
        key_grad += dot(ds.T, queries)
    dk[h, cols, :], dv[h, cols, :] = key_grad, value_grad


def largest_error(backend: str | None = None) -> float:
    rng, scale = np.random.default_rng(0), 32**-0.5
    q, k, v, do = (rng.standard_normal((2, n, 32), dtype=np.float32) for n in (70, 45, 45, 70))
    Q, K, V, dO = (x.astype(np.float64) for x in (q, k, v, do))
    S = Q @ K.swapaxes(1, 2) * scale
    lse = np.log(np.exp(S).sum(axis=2))
    P = np.exp(S - lse[..., None])
    delta = ((P @ V) * dO).sum(axis=2)
    dk, dv = np.empty_like(k), np.empty_like(v)
    dkdv(q, k, v, do, lse.astype(np.float32), delta.astype(np.float32), dk, dv, scale, backend=backend)
    dS = P * (dO @ V.swapaxes(1, 2) - delta[..., None]) * scale
    return float(max(np.abs(dk - dS.swapaxes(1, 2) @ Q).max(), np.abs(dv - P.swapaxes(1, 2) @ dO).max()))


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
