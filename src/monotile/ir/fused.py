"""The fused multiply-add of float32 numbers in NumPy, which has none."""

from __future__ import annotations

from typing import Any

import numpy as np


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once. In float64 the product is exact and the sum is not: where it was rounded to an even
    number, the odd one beside it, on the side of the exact sum, rounds to the float32 that the exact sum does."""
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        added = total - product
        rest = (product - (total - added)) + (c - added)
        even = (np.asarray(total).view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(rest > 0.0, np.inf, -np.inf))
        inexact = np.isfinite(total) & (rest != 0.0) & even
        return np.where(inexact, odd, total).astype(np.float32)[()]
