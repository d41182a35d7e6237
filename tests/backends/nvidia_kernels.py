# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Kernels and helpers for the tests of the nvidia backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from arrays import Array, poisoned, random
from monotile import ir
from monotile.language import (
    Const,
    Tensor,
    arange,
    blocks,
    cdiv,
    dot,
    exp2,
    full,
    inf,
    kernel,
    log2,
    maximum,
    minimum,
    program_id,
    where,
    zeros,
)  # fmt: skip

pytest.importorskip("triton", reason="the nvidia backend needs triton")
from monotile.backends.nvidia import backend as nvidia
from monotile.backends.nvidia import build
from monotile.backends.nvidia.schedule import Schedule, choose
from monotile.backends.nvidia.triton.module import TritonSource, render_triton

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
interpreted = pytest.mark.skipif(not build.interpreting(), reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(build.interpreting(), reason="Triton's interpreter does not compile")


class State(NamedTuple):
    m: Any
    l: Any
    acc: Any


def step(state: State, S: Any, V: Any) -> State:
    m = maximum(state.m, S.max(axis=1))
    shift = where(m == -inf, 0.0, m)
    alpha = exp2(state.m - shift)
    P = exp2(S - shift[:, None])
    return State(m, state.l * alpha + P.sum(axis=1), state.acc * alpha[:, None] + dot(P.astype(V.dtype), V))


@kernel
def forward(
    q: Tensor["B Hq Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], o: Tensor["B Hq Nq Dv"],
    lse: Tensor["B Hq Nq"], scale: float, *, D: Const, Dv: Const, BQ: Const, BK: Const, causal: Const,
):  # fmt: skip
    b, h, i = program_id(q.shape[0], q.shape[1], cdiv(q.shape[2], BQ))
    g = h // (q.shape[1] // k.shape[1])
    rows = i * BQ + arange(BQ)
    Nk, ahead = k.shape[2], k.shape[2] - q.shape[2]

    def visible(cols):
        seen = cols[None, :] < Nk
        return seen & (cols[None, :] <= rows[:, None] + ahead) if causal else seen

    Q = q[b, h, rows]
    state = State(full(BQ, -inf), zeros(BQ), zeros((BQ, Dv)))
    for j in blocks(Nk, BK, visible):
        cols = j + arange(BK)
        seen = visible(cols)
        S = where(seen, dot(Q, k[b, g, cols].T) * (scale * LOG2E), -inf)
        state = step(state, S, where(seen.max(axis=0)[:, None], v[b, g, cols], 0.0))
    o[b, h, rows] = state.acc * where(state.l == 0.0, 0.0, 1.0 / state.l)[:, None]
    lse[b, h, rows] = (state.m + log2(state.l)) * LN2


@kernel
def backward(
    q: Tensor["H Nq D"], k: Tensor["H Nk D"], v: Tensor["H Nk D"], do: Tensor["H Nq D"], lse: Tensor["H Nq"],
    delta: Tensor["H Nq"], dk: Tensor["H Nk D"], dv: Tensor["H Nk D"], scale: float, *, D: Const, BQ: Const, BK: Const,
):  # fmt: skip
    h, i = program_id(k.shape[0], cdiv(k.shape[1], BK))
    cols = i * BK + arange(BK)
    K, V = k[h, cols], v[h, cols]
    gk, gv = zeros((BK, D)), zeros((BK, D))
    for j in range(0, q.shape[1], BQ):
        rows = j + arange(BQ)
        Q, G = q[h, rows], do[h, rows]
        P = exp2((dot(Q, K.T) * scale - lse[h, rows][:, None]) * LOG2E)
        P = where(rows[:, None] < q.shape[1], P, 0.0)
        dS = P * (dot(G, V.T) - delta[h, rows][:, None])
        gk += dot(dS.astype(q.dtype).T, Q)
        gv += dot(P.astype(q.dtype).T, G)
    dk[h, cols] = gk * scale
    dv[h, cols] = gv


@kernel
def decode(
    q: Tensor["H G D"], k: Tensor["H Nk D"], v: Tensor["H Nk D"], o: Tensor["H S G D"], m: Tensor["H S G"],
    l: Tensor["H S G"], scale: float, *, G: Const, D: Const, BK: Const,
):  # fmt: skip
    h, s = program_id(k.shape[0], o.shape[1])
    per = cdiv(cdiv(k.shape[1], o.shape[1]), BK) * BK
    high = minimum(k.shape[1], s * per + per)
    Q = q[h]
    state = State(full(G, -inf), zeros(G), zeros((G, D)))
    for j in range(s * per, high, BK):
        cols = j + arange(BK)
        S = where(cols[None, :] < high, dot(Q, k[h, cols].T) * (scale * LOG2E), -inf)
        state = step(state, S, v[h, cols])
    o[h, s], m[h, s], l[h, s] = state.acc, state.m, state.l


@kernel
def scale_rows(x: Tensor["M N"], y: Tensor["M N"], *, B: Const = 8, N: Const):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows] * 2.0


@kernel
def twice(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows]
    y[rows] = y[rows] + x[rows]


@kernel
def fold(x: Tensor["M N"], y: Tensor["3 M"], *, M: Const, N: Const):
    """Folds of what is not zero in the padding."""
    tile = x[:, :] + 7.0
    y[0, :] = tile.sum(axis=1)
    y[1, :] = tile.max(axis=1)
    y[2, :] = (-tile).min(axis=1)


@kernel
def product(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """Operands whose padding is not zero, but for the casts."""
    c[:, :] = dot((a[:, :] + 1.0).astype(a.dtype), (b[:, :] + 1.0).astype(b.dtype))


@kernel
def seen_rows(
    x: Tensor["M D"], y: Tensor["N D"], seen: Tensor["M N"], out: Tensor["N D"],
    *, D: Const, BR: Const = 32, BK: Const = 32,
):  # fmt: skip
    """The sum of `(y @ x.T) @ x` over blocks of x, without rows of x that see nothing of a block of y."""
    cols = program_id(cdiv(y.shape[0], BK)) * BK + arange(BK)
    Y, total = y[cols], zeros((BK, D))
    for i in range(0, x.shape[0], BR):
        rows = i + arange(BR)
        X = where(seen[rows, cols].max(axis=1)[:, None], x[rows], 0.0)
        total = total + dot(dot(Y, X.T).astype(X.dtype), X)
    out[cols] = total


@kernel
def repeat_columns(x: Tensor["M W"], y: Tensor["M N"], *, M: Const, N: Const, W: Const, times: Const):
    rows, columns = arange(M), arange(N)
    y[rows, columns] = x[rows[:, None], (columns * 3 // (3 * times))[None, :]]


def attention_arrays(shape: tuple[int, int, int, int], D: int, dtype: str) -> tuple[Array, ...]:
    B, Hq, Hkv, N = shape
    q, k, v = random((B, Hq, N, D), dtype, 1), random((B, Hkv, N, D), dtype, 2), random((B, Hkv, N, D), dtype, 3)
    return q, k, v, poisoned((B, Hq, N, D), dtype), poisoned((B, Hq, N))


def lowered(call: ir.Kernel) -> ir.Kernel:
    return nvidia.BACKEND.lower(call)


def text(call: ir.Kernel, **options: Any) -> TritonSource:
    kernel_ir = lowered(call)
    return render_triton(kernel_ir, choose(kernel_ir), **options)


@kernel
def copy(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows]


def attention_oracle(q: Array, k: Array, v: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    S = q @ k.swapaxes(2, 3) * scale
    if causal:
        i, j = np.indices(S.shape[2:])
        S = np.where(j <= i + S.shape[3] - S.shape[2], S, -np.inf)
    lse = np.logaddexp.reduce(S, axis=3)
    return np.exp(S - lse[..., None]) @ v, lse


def compile_ahead(call: ir.Kernel, schedule: Schedule | None = None) -> Any:
    kernel_ir = nvidia.BACKEND.lower(call, peel=schedule is None or schedule.peel)
    schedule = schedule or choose(kernel_ir)
    return build.compile_ahead(kernel_ir, render_triton(kernel_ir, schedule), schedule)


@kernel
def through_table(
    q: Tensor["R D"], x: Tensor["K D"], table: Tensor["M"], o: Tensor["R N"], *, R: Const, D: Const, N: Const
):
    Q, acc = q[arange(R), arange(D)], zeros((R, N))
    for j in range(table.shape[0]):
        acc = acc + dot(Q, x[table[j] * N + arange(N), arange(D)].T)
    o[arange(R), arange(N)] = acc
