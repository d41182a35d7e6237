"""The gradients of attention by its keys and values, from the saved logsumexp of each row."""

from __future__ import annotations

from monotile.language import Const, Tensor, arange, cdiv, dot, exp, kernel, program_id, where, zeros


@kernel
def dk_dv(
    q: Tensor["B H M D"], k: Tensor["B H N D"], v: Tensor["B H N D"], do: Tensor["B H M D"], lse: Tensor["B H M"],
    delta: Tensor["B H M"], dk: Tensor["B H N D"], dv: Tensor["B H N D"], scale: float,
    *, D: Const, BM: Const = 16, BN: Const = 16,
):  # fmt: skip
    """Each program owns BN keys and runs over all queries. `delta` is the sum of do * o along each row."""
    b, h, i = program_id(k.shape[0], k.shape[1], cdiv(k.shape[2], BN))
    cols = i * BN + arange(BN)
    K, V = k[b, h, cols], v[b, h, cols]
    dK, dV = zeros((BN, D)), zeros((BN, D))
    for j in range(0, q.shape[2], BM):
        rows = j + arange(BM)
        Q, dO, inside = q[b, h, rows], do[b, h, rows], rows[None, :] < q.shape[2]
        P = where(inside, exp(dot(K, Q.T) * scale - lse[b, h, rows][None, :]), 0.0)  # weights, keys by queries
        dV += dot(P, dO)
        dS = P * (dot(V, dO.T) - delta[b, h, rows][None, :])
        dK += dot(dS, Q) * scale
    dk[b, h, cols], dv[b, h, cols] = dK, dV
