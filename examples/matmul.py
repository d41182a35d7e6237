"""c = a @ b. The kernel is in monotile/kernels/examples.py: ten lines."""

import numpy as np

from monotile.kernels.examples import matmul

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((500, 300), (300, 700)))
    c = np.empty((500, 700), np.float32)
    matmul(a, b, c)
    print("largest error:", np.abs(c - a.astype(np.float64) @ b).max())
