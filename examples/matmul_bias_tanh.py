"""c = tanh(a @ b + bias), in the tile language: the elementwise work is fused into the product."""

from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id, tanh, zeros


@kernel
def matmul_bias_tanh(
    a: Tensor["M K"], b: Tensor["K N"], bias: Tensor["N"], c: Tensor["M N"],
    *, BM: Const = 128, BN: Const = 128, BK: Const = 64,
):  # fmt: skip
    """Each program owns a BM x BN block of c."""
    j, i = program_id(cdiv(c.shape[1], BN), cdiv(c.shape[0], BM))
    rows, cols = i * BM + arange(BM), j * BN + arange(BN)
    acc = zeros((BM, BN))
    for k in range(0, a.shape[1], BK):
        inner = k + arange(BK)
        acc += dot(a[rows, inner], b[inner, cols])
    c[rows, cols] = tanh(acc + bias[cols][None, :])
