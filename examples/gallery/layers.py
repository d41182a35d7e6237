# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Layers around attention: layer norm, rotary embeddings in place, SwiGLU."""

from __future__ import annotations

from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id, sigmoid, sqrt


@kernel
def layer_norm(
    x: Tensor["M D"], w: Tensor["D"], b: Tensor["D"], y: Tensor["M D"], eps: float, *, D: Const, B: Const = 4
):
    """Each program owns B rows."""
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    X = x[rows]
    rest = X - X.sum(axis=1)[:, None] / D
    y[rows] = rest / sqrt((rest**2).sum(axis=1)[:, None] / D + eps) * w[:] + b[:]


@kernel
def rope(
    x: Tensor["B H N D"], c: Tensor["N half"], s: Tensor["N half"], y: Tensor["B H N D"],
    *, D: Const, half: Const, interleaved: Const = False, BN: Const = 16,
):  # fmt: skip
    """Rotate pairs of columns, (j, j + D / 2) or (2 j, 2 j + 1). x and y may be one array."""
    b, h, i = program_id(x.shape[0], x.shape[1], cdiv(x.shape[2], BN))
    rows = i * BN + arange(BN)
    first, second = arange(half), half + arange(half)
    if interleaved:
        first, second = 2 * arange(half), 2 * arange(half) + 1
    X, Y, C, S = x[b, h, rows, first], x[b, h, rows, second], c[rows], s[rows]
    y[b, h, rows, first] = X * C - Y * S
    y[b, h, rows, second] = Y * C + X * S


@kernel
def swiglu(gate: Tensor["M N"], up: Tensor["M N"], y: Tensor["M N"], *, BM: Const = 4, BN: Const = 64):
    i, j = program_id(cdiv(gate.shape[0], BM), cdiv(gate.shape[1], BN))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    G = gate[rows, cols]
    y[rows, cols] = G * sigmoid(G) * up[rows, cols]
