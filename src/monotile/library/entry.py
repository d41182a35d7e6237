"""`attention` as users call it: on torch tensors that need more than arithmetic, it is an operator of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import ops, quantized_ops, torch_calls
from .quantized import is_quantized

Array = Any


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: ops.MaskMod | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """softmax(q k^T * scale) v, for q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv): NumPy arrays, torch
    tensors, MLX arrays. Differentiable where torch tensors require grad. See docs/guide/attention.md."""
    run: Callable[..., Any] = ops.attention
    if is_quantized(k, v):
        run = quantized_ops.attention
    elif torch_calls.is_tensor(q) and not torch_calls.is_plain(q, k, v, mask, sinks):
        q, k, v = torch_calls.in_autocast(q, k, v)
        if torch_calls.needs_operator(q, k, v, mask, sinks):
            from . import torch_operator

            run = torch_operator.attention
    return run(
        q, k, v, causal=causal, scale=scale, mask=mask, window=window, softcap=softcap, sinks=sinks,
        score_mod=score_mod, mask_mod=mask_mod, return_lse=return_lse, backend=backend, threads=threads,
    )  # fmt: skip


def decode_partials(
    q: Array, k: Array, v: Array, *, splits: int | None = None, causal: bool | str = False, scale: float | None = None,
    mask: Array | None = None, window: ops.Window = None, softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: ops.MaskMod | None = None,
    backend: str | None = None, threads: int | None = None,
) -> ops.Partials:  # fmt: skip
    """The softmax state of each of `splits` runs of keys; `merge` makes attention of them. See
    docs/guide/decode_partials.md."""
    run = quantized_ops.decode_partials if is_quantized(k, v) else ops.decode_partials
    return run(
        q, k, v, splits=splits, causal=causal, scale=scale, mask=mask, window=window, softcap=softcap,
        score_mod=score_mod, mask_mod=mask_mod, backend=backend, threads=threads,
    )  # fmt: skip
