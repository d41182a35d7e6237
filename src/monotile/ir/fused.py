"""Fused multiply-add of float32 in NumPy, which has none."""

from __future__ import annotations

from typing import Any

import numpy as np


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once.

    In float64 the product is exact but the sum is rounded. Rounding it to odd instead of to even makes the second
    rounding, to float32, give what the exact sum would: where an inexact sum is even, take its odd neighbour on the
    side of the exact sum."""
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
