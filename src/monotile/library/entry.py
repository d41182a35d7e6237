"""`attention` and `attention_varlen` as users call them: operators of torch's where tensors need more than
arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import ops, quantized_ops, quantized_paged, torch_calls
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


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = False,
    scale: float | None = None, window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, return_lse: bool = False,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Attention of each of B sequences as if it were alone, for q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv):
    sequence s has rows q_offsets[s] to q_offsets[s + 1] and keys k_offsets[s] to k_offsets[s + 1]. Differentiable where
    torch tensors require grad. See docs/guide/caches.md."""
    run: Callable[..., Any] = ops.attention_varlen
    if torch_calls.is_tensor(q) and not torch_calls.is_plain(q, k, v, None, sinks):
        q, k, v = torch_calls.in_autocast(q, k, v)
        if torch_calls.needs_operator(q, k, v, sinks):
            from . import varlen_operator

            run = varlen_operator.attention_varlen
    return run(
        q, k, v, q_offsets, k_offsets, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks,
        score_mod=score_mod, mask_mod=mask_mod, return_lse=return_lse, check=check, backend=backend, threads=threads,
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


def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, *, causal: bool | str = True,
    scale: float | None = None, window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, return_lse: bool = False,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Attention of q (B, Hq, Nq, D) on keys (P, page, Hkv, D) and values (P, page, Hkv, Dv) in pages, plain or
    quantised: key j of batch b is at j % page in page page_table[b, j // page], for j below lengths[b]. See
    docs/guide/caches.md."""
    run = quantized_paged.attention_paged if is_quantized(k_pages, v_pages) else ops.attention_paged
    return run(
        q, k_pages, v_pages, page_table, lengths, causal=causal, scale=scale, window=window, softcap=softcap,
        sinks=sinks, score_mod=score_mod, mask_mod=mask_mod, return_lse=return_lse, check=check, backend=backend,
        threads=threads,
    )  # fmt: skip


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    """Store N new tokens, k_new (B, Hkv, N, D) and v_new (B, Hkv, N, Dv), in place, quantised as their pages are: token
    i of batch b is at position lengths[b] + i of its sequence. `lengths` are those before the call, and stay as they
    are. See docs/guide/caches.md."""
    run = quantized_paged.paged_append if is_quantized(k_pages, v_pages) else ops.paged_append
    run(k_pages, v_pages, page_table, lengths, k_new, v_new, check=check, backend=backend, threads=threads)
