"""Rotary positions: each pair of columns is turned by an angle of its position, in place. Pairs are (i, i + D/2), as in
Llama, or interleaved, (2i, 2i + 1), as in GPT-J."""

import sys

import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id


@kernel
def rope(
    x: Tensor["H N D"], cos: Tensor["N half"], sin: Tensor["N half"], y: Tensor["H N D"],
    *, D: Const, interleaved: Const = False, B: Const = 32,
):  # fmt: skip
    """Each program owns B positions of a head. cos and sin have D/2 columns; x and y may be one array."""
    h, n = program_id(x.shape[0], cdiv(x.shape[1], B))
    rows, half = n * B + arange(B), arange(D // 2)
    first, second = (2 * half, 2 * half + 1) if interleaved else (half, D // 2 + half)
    a, b = x[h, rows, first], x[h, rows, second]
    c, s = cos[rows, half], sin[rows, half]
    y[h, rows, first] = a * c - b * s
    y[h, rows, second] = b * c + a * s


def largest_error(backend: str | None = None) -> float:
    H, N, D = 3, 77, 64
    x = np.random.default_rng(0).standard_normal((H, N, D), dtype=np.float32)
    angles = np.arange(N)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    found, errors = x.copy(), []
    rope(found, cos, sin, found, backend=backend)
    pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * angles)
    errors.append(np.abs(found - np.concatenate([pairs.real, pairs.imag], axis=-1)).max())
    rope(x, cos, sin, found, interleaved=True, backend=backend)
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    errors.append(np.abs(found - np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)).max())
    return float(max(errors))


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
