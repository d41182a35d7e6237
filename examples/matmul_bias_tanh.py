"""c = tanh(a @ b + bias): the elementwise work is fused into the product."""

import numpy as np

from monotile.kernels.examples import matmul_bias_tanh

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((500, 300), (300, 700)))
    bias = rng.standard_normal(700).astype(np.float32)
    c = np.empty((500, 700), np.float32)
    matmul_bias_tanh(a, b, bias, c)
    print("largest error:", np.abs(c - np.tanh(a.astype(np.float64) @ b + bias)).max())
