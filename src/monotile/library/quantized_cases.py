"""The registered function `quantize`: attention on quantised keys and values, against what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..kernels import reference
from . import entry
from .quantized import Quantized, quantize

Inputs = dict[str, Any]
Results = dict[str, Any]


def run(inputs: Inputs, **run: Any) -> Results:
    k, v, options = _quantized(inputs)
    out, lse = entry.attention(inputs["q"], k, v, return_lse=True, **options, **run)
    return {"out": out, "lse": lse}


def formula(compute: type) -> Callable[[Inputs], Results]:
    """Attention on what the fields stand for: exactly, in float64; or rounded to q's type, in float32."""

    def attention(inputs: Inputs) -> Results:
        k, v, options = _quantized(inputs)
        q = inputs["q"]
        dtype = "float32" if compute is np.float64 else q.dtype.name
        keys, values = (replace(x, dtype=dtype).dequantize() for x in (k, v))
        out, lse = reference.attention(q, keys, values, **options, compute=compute)
        return {"out": out.astype(q.dtype) if compute is np.float32 else out, "lse": lse}

    return attention


def _quantized(inputs: Inputs) -> tuple[Quantized, Quantized, Inputs]:
    """Keys and values, quantised unless they are, and the options of attention."""
    k, v = (
        x if isinstance(x, Quantized) else quantize(x, inputs["format"], group=inputs.get("group"))
        for x in (inputs["k"], inputs["v"])
    )
    return k, v, {n: x for n, x in inputs.items() if n not in ("q", "k", "v", "format", "group")}
