"""y = softmax(x) along the last axis, in the tile language."""

from monotile.language import Const, Tensor, arange, cdiv, exp, full, inf, kernel, maximum, program_id, where, zeros


@kernel
def row_softmax(x: Tensor["R C"], y: Tensor["R C"], *, BR: Const = 4, BC: Const = 512):
    """Each program owns BR rows: one pass finds their maximum and sum, a second one writes."""
    rows = program_id(cdiv(x.shape[0], BR)) * BR + arange(BR)
    m, total = full(BR, -inf), zeros(BR)
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        X = where(cols[None, :] < x.shape[1], x[rows, cols], -inf)
        new = maximum(m, X.max(axis=1))
        shift = where(new == -inf, 0.0, new)
        total = total * exp(m - shift) + exp(X - shift[:, None]).sum(axis=1)
        m = new
    scale = 1.0 / total
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        y[rows, cols] = exp(x[rows, cols] - m[:, None]) * scale[:, None]
