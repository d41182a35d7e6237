"""Rotary positions: each pair (x[i], x[i + D/2]) is turned by an angle of its position, as in Llama."""

import sys

import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id


@kernel
def rope(
    x: Tensor["H N D"], cos: Tensor["N half"], sin: Tensor["N half"], y: Tensor["H N D"], *, D: Const, B: Const = 32
):
    """Each program owns B positions of a head. cos and sin have D/2 columns."""
    h, n = program_id(x.shape[0], cdiv(x.shape[1], B))
    rows, half = n * B + arange(B), arange(D // 2)
    a, b = x[h, rows, half], x[h, rows, D // 2 + half]
    c, s = cos[rows, half], sin[rows, half]
    y[h, rows, half] = a * c - b * s
    y[h, rows, D // 2 + half] = b * c + a * s


def largest_error(backend: str | None = None) -> float:
    H, N, D = 3, 77, 64
    x = np.random.default_rng(0).standard_normal((H, N, D), dtype=np.float32)
    angles = np.arange(N)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    y = np.empty_like(x)
    rope(x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), y, backend=backend)
    pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * angles)
    return float(np.abs(y - np.concatenate([pairs.real, pairs.imag], axis=-1)).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
