"""y = (x - mean(x)) / std(x) * w + b along the last axis, for rows of any length."""

import sys

import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id, sqrt, where, zeros


@kernel
def layer_norm(
    x: Tensor["M N"], w: Tensor["N"], b: Tensor["N"], y: Tensor["M N"], eps: float, *, BR: Const = 4, BC: Const = 256
):
    """Each program owns BR rows and reads them three times: for the mean, the variance and the result."""
    rows = program_id(cdiv(x.shape[0], BR)) * BR + arange(BR)
    mean, variance = zeros(BR), zeros(BR)
    for j in range(0, x.shape[1], BC):
        mean += x[rows, j + arange(BC)].sum(axis=1) / float(x.shape[1])
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        distance = where((cols < x.shape[1])[None, :], x[rows, cols] - mean[:, None], 0.0)
        variance += (distance * distance).sum(axis=1) / float(x.shape[1])
    scale = 1.0 / sqrt(variance + eps)
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        y[rows, cols] = (x[rows, cols] - mean[:, None]) * scale[:, None] * w[cols][None, :] + b[cols][None, :]


def largest_error(backend: str | None = None) -> float:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((37, 1000), 1000, 1000))
    y = np.empty_like(x)
    layer_norm(x, w, b, y, 1e-6, backend=backend)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-6) * w + b
    return float(np.abs(y - exact).max())


if __name__ == "__main__":
    print("largest error:", largest_error(*sys.argv[1:]))
