"""`attention` and `attention_varlen` as users call them: operators of torch's where tensors need more than
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import dtypes
from . import merging, ops, quantized_ops, quantized_paged, quantized_varlen, readable, torch_calls
from .quantized import is_quantized

Array = Any


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: ops.MaskMod | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Return softmax(q k^T * scale) v, without a buffer of all scores.

    Arrays of NumPy, torch, MLX or JAX, in float32, float16 or bfloat16; the result is of the same kind and dtype.
    Differentiable where torch tensors require grad. A row that sees no key is 0. Leading dimensions (...), usually one
    for the batch, broadcast to each other.

    Args:
        q: queries (..., Hq, Nq, D).
        k: keys (..., Hkv, Nk, D); Hkv divides Hq. Or what `quantize` made of them.
        v: values (..., Hkv, Nk, Dv), likewise.
        causal: True or "lower_right": query i sees keys up to i + Nk - Nq; "upper_left": up to i.
        scale: factor of the scores; 1 / sqrt(D) if left out.
        mask: broadcastable to (..., Hq, Nq, Nk); bool (True: visible) or numbers that are added.
        window: (left, right), how many keys before and after its own a query sees; None or -1 is no bound.
        softcap: c, for scores c * tanh(score / c).
        sinks: (Hq,), scores of one more key per head that has no value.
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> score, compiled into the kernel.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool, or what `block_mask` made of one.
        return_lse: also return the logsumexp of the scores, float32 (..., Hq, Nq).
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (..., Hq, Nq, Dv), or a tuple of it and the logsumexp.

    Example:
        >>> q = np.ones((1, 8, 5, 64), np.float32)
        >>> k = v = np.ones((1, 2, 9, 64), np.float32)
        >>> monotile.attention(q, k, v, causal=True).shape
        (1, 8, 5, 64)
    """
    run: Callable[..., Any] = ops.attention
    if is_quantized(k, v):
        q, k, v = readable.in_autocast("attention on Quantized keys and values", q=q, k=k, v=v)
        run = _chosen("attention", ops, quantized_ops, q, k, v)
    elif torch_calls.is_tensor(q) and not torch_calls.is_plain(q, k, v, mask, sinks):
        torch_calls.refuse_tangents("attention", q, k, v, mask, sinks)
        readable.check_before_autocast(q=q, k=k, v=v)
        q, k, v = torch_calls.in_autocast(q, k, v)
        if torch_calls.needs_operator(q, k, v, mask, sinks):
            torch_calls.check_operator_arguments(q=q, k=k, v=v, mask=mask, sinks=sinks)
            from . import torch_operator

            run = torch_operator.attention
    return run(
        q, k, v, causal=causal, scale=scale, mask=mask, window=window, softcap=softcap, sinks=sinks,
        score_mod=score_mod, mask_mod=mask_mod, return_lse=return_lse, backend=backend, threads=threads,
    )  # fmt: skip


def attention_by_position(
    q: Array, k: Array, v: Array, *, mask: Array = None, sinks: Array = None, **options: Any
) -> Any:
    """`attention` of torch tensors whose output is (..., Nq, Hq, Dv), as layers of models go on with it: contiguous
    where kernels can write it so."""
    if torch_calls.is_plain(q, k, v, mask, sinks):
        return ops.attention(q, k, v, mask=mask, sinks=sinks, by_position=True, **options)
    return attention(q, k, v, mask=mask, sinks=sinks, **options).transpose(-3, -2)


def attention_varlen(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool | str = False,
    scale: float | None = None, window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, return_lse: bool = False,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Return the attention of each of B sequences as if it were alone.

    Sequences lie one after the other: sequence s has rows q_offsets[s] to q_offsets[s + 1] and keys k_offsets[s] to
    k_offsets[s + 1]. Differentiable where torch tensors require grad.

    Args:
        q: queries (Tq, Hq, D).
        k: keys (Tk, Hkv, D), or what `quantize` made of them.
        v: values (Tk, Hkv, Dv), likewise.
        q_offsets: int32 or int64 (B + 1,), from 0 to Tq.
        k_offsets: int32 or int64 (B + 1,), from 0 to Tk.
        causal: True or "lower_right": query i sees keys up to i + Nk - Nq; "upper_left": up to i.
        scale: factor of the scores; 1 / sqrt(D) if left out.
        window: (left, right), how many keys before and after its own a query sees; None or -1 is no bound.
        softcap: c, for scores c * tanh(score / c).
        sinks: (Hq,), scores of one more key per head that has no value.
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> score; positions within the sequence.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool, likewise.
        return_lse: also return the logsumexp of the scores, float32 (Hq, Tq).
        check: check the contents of the offsets, which waits for a GPU.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (Tq, Hq, Dv), or a tuple of it and the logsumexp.

    Example:
        >>> q, offsets = np.ones((7, 8, 64), np.float32), np.array([0, 3, 7], np.int32)
        >>> monotile.attention_varlen(q, q, q, offsets, offsets, causal=True).shape
        (7, 8, 64)
    """
    run: Callable[..., Any] = ops.attention_varlen
    if is_quantized(k, v):
        q, k, v = readable.in_autocast("attention_varlen on Quantized keys and values", q=q, k=k, v=v)
        run = _chosen("attention_varlen", ops, quantized_varlen, q, k, v)
    elif torch_calls.is_tensor(q) and not torch_calls.is_plain(q, k, v, None, sinks):
        torch_calls.refuse_tangents("attention_varlen", q, k, v, sinks)
        readable.check_before_autocast(q=q, k=k, v=v)
        q, k, v = torch_calls.in_autocast(q, k, v)
        if torch_calls.needs_operator(q, k, v, sinks):
            torch_calls.check_operator_arguments(q=q, k=k, v=v, q_offsets=q_offsets, k_offsets=k_offsets, sinks=sinks)
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
    """Return the softmax state of each of `splits` runs of keys; `merge` makes attention of them.

    For one or a few queries against long caches, whose runs may lie on several devices.

    Args:
        q: queries (..., Hq, Nq, D).
        k: keys (..., Hkv, Nk, D), or what `quantize` made of them.
        v: values (..., Hkv, Nk, Dv), likewise.
        splits: number of runs; `recommended_splits` if left out.
        causal: True or "lower_right": query i sees keys up to i + Nk - Nq; "upper_left": up to i.
        scale: factor of the scores; 1 / sqrt(D) if left out.
        mask: broadcastable to (..., Hq, Nq, Nk); bool (True: visible) or numbers that are added.
        window: (left, right), how many keys before and after its own a query sees; None or -1 is no bound.
        softcap: c, for scores c * tanh(score / c).
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> score, compiled into the kernel.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool, or what `block_mask` made of one.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        `Partials` o (B, Hq, Nq, S, Dv), m and l (B, Hq, Nq, S), float32.

    Example:
        >>> q, k = np.ones((1, 8, 1, 64), np.float32), np.ones((1, 2, 4096, 64), np.float32)
        >>> parts = monotile.decode_partials(q, k, k, splits=4)
        >>> monotile.merge(*parts)[0].shape
        (1, 8, 1, 64)
    """
    q, k, v = readable.in_autocast("decode_partials", q=q, k=k, v=v)
    run = _chosen("decode_partials", ops, quantized_ops, q, k, v, mask)
    states: ops.Partials = run(
        q, k, v, splits=splits, causal=causal, scale=scale, mask=mask, window=window, softcap=softcap,
        score_mod=score_mod, mask_mod=mask_mod, backend=backend, threads=threads,
    )  # fmt: skip
    return states


def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, *, q_offsets: Array | None = None,
    causal: bool | str = True, scale: float | None = None, window: ops.Window = None, softcap: float | None = None,
    sinks: Array | None = None, score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None, return_lse: bool = False, check: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Return the attention of queries on keys and values that lie in pages.

    Key j of batch b is at j % page in page page_table[b, j // page], for j below lengths[b]. With q_offsets the
    queries of all batches, any number of each, lie one after the other.

    Args:
        q: queries (B, Hq, Nq, D), the last Nq positions of each sequence; with q_offsets (Tq, Hq, D).
        k_pages: keys (P, page, Hkv, D), or what `quantize` made of them.
        v_pages: values (P, page, Hkv, Dv), likewise.
        page_table: int32 (B, pages of the longest sequence).
        lengths: int32 (B,), keys of each sequence.
        q_offsets: int32 or int64 (B + 1,), from 0 to Tq: rows q_offsets[b] to q_offsets[b + 1] are those of batch b.
        causal: True or "lower_right": query i sees keys up to i + Nk - Nq; "upper_left": up to i.
        scale: factor of the scores; 1 / sqrt(D) if left out.
        window: (left, right), how many keys before and after its own a query sees; None or -1 is no bound.
        softcap: c, for scores c * tanh(score / c).
        sinks: (Hq,), scores of one more key per head that has no value.
        score_mod: a Python function (score, b, h, q_idx, kv_idx) -> score.
        mask_mod: a Python function (b, h, q_idx, kv_idx) -> bool.
        return_lse: also return the logsumexp of the scores, float32 (B, Hq, Nq); with q_offsets (Hq, Tq).
        check: check the contents of table, lengths and offsets, which waits for a GPU.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (B, Hq, Nq, Dv), with q_offsets (Tq, Hq, Dv), or a tuple of it and the logsumexp.

    Example:
        >>> q, pages = np.ones((1, 8, 1, 64), np.float32), np.ones((4, 16, 2, 64), np.float32)
        >>> table, lengths = np.array([[2, 0]], np.int32), np.array([20], np.int32)
        >>> monotile.attention_paged(q, pages, pages, table, lengths).shape
        (1, 8, 1, 64)
    """
    q, k_pages, v_pages = readable.in_autocast("attention_paged", q=q, k_pages=k_pages, v_pages=v_pages)
    run = _chosen("attention_paged", ops, quantized_paged, q, k_pages, v_pages, page_table, lengths, q_offsets)
    return run(
        q, k_pages, v_pages, page_table, lengths, q_offsets=q_offsets, causal=causal, scale=scale, window=window,
        softcap=softcap, sinks=sinks, score_mod=score_mod, mask_mod=mask_mod, return_lse=return_lse, check=check,
        backend=backend, threads=threads,
    )  # fmt: skip


def paged_append(
    k_pages: Array, v_pages: Array, page_table: Array, lengths: Array, k_new: Array, v_new: Array, *,
    check: bool = False, backend: str | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    """Store new tokens in pages, in place: token i of batch b at position lengths[b] + i of its sequence.

    Args:
        k_pages: keys (P, page, Hkv, D), written; new tokens are quantised as their pages are.
        v_pages: values (P, page, Hkv, Dv), written.
        page_table: int32 (B, pages of the longest sequence), with pages for the new tokens.
        lengths: int32 (B,), those before the call; they stay as they are.
        k_new: (B, Hkv, N, D).
        v_new: (B, Hkv, N, Dv).
        check: check the contents of table and lengths, which waits for a GPU.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Example:
        >>> pages, table = np.zeros((4, 16, 2, 64), np.float32), np.array([[2, 0]], np.int32)
        >>> new = np.ones((1, 2, 1, 64), np.float32)
        >>> monotile.paged_append(pages, pages.copy(), table, np.array([5], np.int32), new, new)
        >>> bool((pages[2, 5] == 1).all())
        True
    """
    run = _chosen("paged_append", ops, quantized_paged, k_new, k_pages, v_pages, page_table, lengths)
    run(k_pages, v_pages, page_table, lengths, k_new, v_new, check=check, backend=backend, threads=threads)


def merge(
    o: Array, m: Array, l: Array, *, dtype: Any = dtypes.float32, backend: str | None = None, threads: int | None = None
) -> tuple[Array, Array]:
    """Merge S softmax states, as `decode_partials` returns them, to attention's output.

    Args:
        o: unnormalised outputs (..., S, Dv), float32.
        m: row maxima (..., S), float32.
        l: row sums (..., S), float32.
        dtype: of the output.
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (..., Dv) and the logsumexp (...), which is natural and float32.

    Example:
        >>> o, m, l = np.ones((3, 4, 64), np.float32), np.zeros((3, 4), np.float32), np.ones((3, 4), np.float32)
        >>> monotile.merge(o, m, l)[0].shape
        (3, 64)
    """
    run = _chosen("merge", merging, merging, o, m, l)
    found: tuple[Array, Array] = run(o, m, l, dtype=dtype, backend=backend, threads=threads)
    return found


def merge_lse(
    outs: Array | Sequence[Array],
    lses: Array | Sequence[Array],
    *,
    backend: str | None = None,
    threads: int | None = None,
) -> tuple[Array, Array]:
    """Merge normalised parts: outputs of attention over disjoint runs of keys, by their logsumexps.

    Args:
        outs: outputs (..., S, Dv), or a sequence of S arrays (..., Dv).
        lses: natural logsumexps (..., S), or a sequence of S arrays (...).
        backend: "cpu", "nvidia", "metal" or "interpreter"; chosen by the arrays if left out.
        threads: of the cpu backend; by default every processor the process may use.

    Returns:
        The output (..., Dv) and the logsumexp (...).

    Example:
        >>> outs, lses = np.ones((3, 2, 64), np.float32), np.zeros((3, 2), np.float32)
        >>> monotile.merge_lse(outs, lses)[0].shape
        (3, 64)
    """
    parts = [part for a in (outs, lses) for part in (a if isinstance(a, list | tuple) else [a])]
    run = _chosen("merge_lse", merging, merging, *parts) if parts else merging.merge_lse
    found: tuple[Array, Array] = run(outs, lses, backend=backend, threads=threads)
    return found


def _chosen(function: str, plain: Any, quantized: Any, first: Array, *others: Array) -> Callable[..., Any]:
    """Return the function of the module that takes these arrays: one of torch's operators in a trace."""
    module = quantized if is_quantized(*others) else plain
    if torch_calls.is_traced(first, *others):
        from . import quantized_operators, trace_operators

        torch_calls.refuse_gradients(function, first, *others)
        module = trace_operators if module is plain else quantized_operators
    found: Callable[..., Any] = getattr(module, function)
    return found
