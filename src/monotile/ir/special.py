"""Functions that NumPy lacks, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def erf(x: Any) -> Any:
    """Return the error function."""
    return _erf(np.asarray(x, np.float64))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)), written so that nothing overflows."""
    x = np.asarray(x, np.float64)
    power = np.exp(-np.abs(x))
    return np.where(x < 0.0, power, 1.0) / (1.0 + power)
