"""y = silu(x @ gate) * (x @ up): two products that share their tiles of x, and the function between them."""

import sys

import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, sigmoid, zeros


@kernel
def swiglu(
    x: Tensor["M K"], gate: Tensor["K N"], up: Tensor["K N"], y: Tensor["M N"], *,
    BM: Const = 64, BN: Const = 64, BK: Const = 32,
):  # fmt: skip
    """Each program owns a BM x BN block of y."""
    j, i = program_id(cdiv(y.shape[1], BN), cdiv(y.shape[0], BM))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    g, u = zeros((BM, BN)), zeros((BM, BN))
    for k in range(0, x.shape[1], BK):
        inner = k + arange(BK)
        tile = x[rows, inner]
        g += dot(tile, gate[inner, cols])
        u += dot(tile, up[inner, cols])
    y[rows, cols] = g * sigmoid(g) * u


def largest_error(backend: str | None = None) -> float:
    rng = np.random.default_rng(0)
    x, gate, up = (rng.standard_normal(shape, dtype=np.float32) / 8 for shape in ((65, 100), (100, 130), (100, 130)))
    y = np.empty((65, 130), np.float32)
    swiglu(x, gate, up, y, backend=backend)
    g, u = (x.astype(np.float64) @ w for w in (gate, up))
    return float(np.abs(y - g / (1 + np.exp(-g)) * u).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
