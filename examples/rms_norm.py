"""y = x / rms(x) * w along the last axis."""

import numpy as np

from monotile.kernels.examples import rms_norm

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((100, 1000)).astype(np.float32), rng.standard_normal(1000).astype(np.float32)
    y = np.empty_like(x)
    rms_norm(x, w, y, 1e-6)
    wide = x.astype(np.float64)
    print("largest error:", np.abs(y - wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * w).max())
