"""Small complete kernels: what `examples/` runs, the tests check on every backend and the benchmark times.

Block sizes are constants of the call: pass others. The products' were within 4 % of the fastest of nine choices for
1024 x 1024 x 1024 float32 on one thread of an x86 processor with AVX-512, and leave 16 programs for more threads. The
row kernels' suit rows of any length; a long row is faster as one block (BC = its length), a short one slower in a
wide block.
"""

from monotile.language import (
    Const,
    Tensor,
    arange,
    cdiv,
    dot,
    exp2,
    float32,
    full,
    inf,
    kernel,
    maximum,
    program_id,
    sqrt,
    tanh,
    where,
    zeros,
)

LOG2E = 1.4426950408889634  # 2 to the (x LOG2E) is e to the x, and costs less


@kernel
def copy(x: Tensor["R C"], y: Tensor["R C"], *, BR: Const = 4, BC: Const = 512):
    """y = x. Each program owns a BR x BC block."""
    i, j = program_id(cdiv(x.shape[0], BR), cdiv(x.shape[1], BC))
    rows, cols = i * BR + arange(BR), j * BC + arange(BC)
    y[rows, cols] = x[rows, cols]


@kernel
def matmul(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, BM: Const = 256, BN: Const = 256, BK: Const = 128):
    """c = a @ b. Each program owns a BM x BN block of c."""
    j, i = program_id(cdiv(c.shape[1], BN), cdiv(c.shape[0], BM))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    acc = zeros((BM, BN))
    for k in range(0, a.shape[1], BK):
        inner = k + arange(BK)
        acc += dot(a[rows, inner], b[inner, cols])
    c[rows, cols] = acc


@kernel
def matmul_bias_tanh(
    a: Tensor["M K"], b: Tensor["K N"], bias: Tensor["N"], c: Tensor["M N"],
    *, BM: Const = 256, BN: Const = 256, BK: Const = 128,
):  # fmt: skip
    """c = tanh(a @ b + bias), the elementwise work fused into the product. Each program owns a BM x BN block of c."""
    j, i = program_id(cdiv(c.shape[1], BN), cdiv(c.shape[0], BM))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    acc = zeros((BM, BN))
    for k in range(0, a.shape[1], BK):
        inner = k + arange(BK)
        acc += dot(a[rows, inner], b[inner, cols])
    c[rows, cols] = tanh(acc + bias[cols][None, :])


@kernel
def row_softmax(x: Tensor["R C"], y: Tensor["R C"], *, BR: Const = 4, BC: Const = 512):
    """y = softmax(x) along rows. Each program owns BR rows: one pass finds maximum and sum, a second one writes."""
    rows = program_id(cdiv(x.shape[0], BR)) * BR + arange(BR)
    m, total = full(BR, -inf), zeros(BR)
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        X = where(cols[None, :] < x.shape[1], x[rows, cols], -inf)
        new = maximum(m, X.max(axis=1))
        shift = where(new == -inf, 0.0, new)
        total = total * exp2((m - shift) * LOG2E) + exp2((X - shift[:, None]) * LOG2E).sum(axis=1)
        m = new
    scale = 1.0 / total
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        y[rows, cols] = exp2((x[rows, cols] - m[:, None]) * LOG2E) * scale[:, None]


@kernel
def rms_norm(x: Tensor["R C"], w: Tensor["C"], y: Tensor["R C"], eps: float, *, BR: Const = 4, BC: Const = 512):
    """y = x / rms(x) * w along rows. Each program owns BR rows: one pass sums the squares, a second one scales."""
    rows = program_id(cdiv(x.shape[0], BR)) * BR + arange(BR)
    squares = zeros(BR)
    for j in range(0, x.shape[1], BC):
        X = x[rows, j + arange(BC)].astype(float32)
        squares += (X * X).sum(axis=1)
    scale = 1.0 / sqrt(squares / float(x.shape[1]) + eps)
    for j in range(0, x.shape[1], BC):
        cols = j + arange(BC)
        y[rows, cols] = x[rows, cols] * scale[:, None] * w[cols][None, :]
