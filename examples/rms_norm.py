"""y = x / rms(x) * w along the last axis, in the tile language."""

from monotile.language import Const, Tensor, arange, cdiv, float32, kernel, program_id, sqrt, zeros


@kernel
def rms_norm(x: Tensor["R C"], w: Tensor["C"], y: Tensor["R C"], eps: float, *, BR: Const = 4, BC: Const = 512):
    """Each program owns BR rows: one pass sums the squares, a second one scales."""
    rows = program_id(cdiv(x.shape[0], BR)) * BR + arange(BR)
    squares = zeros(BR)
    for j in range(0, x.shape[1], BC):
        X = x[rows, j + arange(BC)].astype(float32)
        squares += (X * X).sum(axis=1)
    scale = 1.0 / sqrt(squares / float(x.shape[1]) + eps)
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        y[rows, cols] = x[rows, cols] * scale[:, None] * w[cols][None, :]
