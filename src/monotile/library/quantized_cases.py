"""The registered functions `quantize` and `quantize_pages`: attention on quantised keys and values, dense or in pages,
against what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..kernels import reference, reference_caches
from . import entry
from .quantized import Quantized, quantize

Inputs = dict[str, Any]
Results = dict[str, Any]


def run(inputs: Inputs, **run: Any) -> Results:
    k, v, options = _quantized(inputs, "k", "v")
    out, lse = entry.attention(inputs["q"], k, v, return_lse=True, **options, **run)
    return {"out": out, "lse": lse}


def run_pages(inputs: Inputs, **run: Any) -> Results:
    k, v, options = _quantized(inputs, "k_pages", "v_pages")
    out, lse = entry.attention_paged(inputs["q"], k, v, return_lse=True, **options, **run)
    return {"out": out, "lse": lse}


def formula(compute: type, *, pages: bool = False) -> Callable[[Inputs], Results]:
    """Attention on what the fields stand for: exactly, in float64; or rounded to q's type, in float32."""
    names = ("k_pages", "v_pages") if pages else ("k", "v")
    computed = reference_caches.attention_paged if pages else reference.attention

    def attention(inputs: Inputs) -> Results:
        k, v, options = _quantized(inputs, *names)
        q = inputs["q"]
        dtype = "float32" if compute is np.float64 else q.dtype.name
        keys, values = (replace(x, dtype=dtype).dequantize() for x in (k, v))
        out, lse = computed(q, keys, values, **options, compute=compute)
        return {"out": out.astype(q.dtype) if compute is np.float32 else out, "lse": lse}

    return attention


def _quantized(inputs: Inputs, *names: str) -> tuple[Quantized, Quantized, Inputs]:
    """Keys and values, quantised unless they are, and the options of attention."""
    k, v = (
        x if isinstance(x, Quantized) else quantize(x, inputs["format"], group=inputs.get("group"))
        for x in (inputs[name] for name in names)
    )
    return k, v, {n: x for n, x in inputs.items() if n not in ("q", *names, "format", "group")}
