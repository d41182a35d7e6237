"""y = softmax(x) along the last axis."""

import numpy as np

from monotile.kernels.examples import row_softmax

if __name__ == "__main__":
    x = np.random.default_rng(0).standard_normal((100, 1000)).astype(np.float32)
    y = np.empty_like(x)
    row_softmax(x, y)
    wide = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    print("largest error:", np.abs(y - wide / wide.sum(axis=1, keepdims=True)).max())
