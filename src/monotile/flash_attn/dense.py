"""Attention of sequences of one length: `flash_attn_func` and its packed forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentRank
from ..library.entry import attention, attention_by_position
from ..library.readable import check_tensors
from ..library.torch_calls import with_clear_errors
from .options import Wanted, Window, refuse_dropout, score_options, visible_options


@with_clear_errors
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Nq, H, D) to k and v (B, Nk, Hkv, D); the result is (B, Nq, H, Dv). The last query stands at
    the last key. With `return_attn_probs` also the logsumexp (B, H, Nq), and None for the weights, which FlashAttention
    gives with dropout alone. Every result is deterministic."""
    refuse_dropout(dropout_p)
    check_tensors({"alibi_slopes": alibi_slopes}, q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, 4)
    wanted = Wanted(softmax_scale, causal, window_size, softcap, alibi_slopes)
    queries, keys = q.shape[1], k.shape[1]
    first = None if alibi_slopes is None else torch.full((1,), keys - queries, device=q.device)
    options = {**visible_options(wanted), **score_options(wanted, q.shape[0], q.shape[2], first)}
    parts = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not return_attn_probs:
        return attention_by_position(*parts, **options).contiguous()
    o, lse = attention(*parts, return_lse=True, **options)
    return o.transpose(1, 2).contiguous(), lse, None


@with_clear_errors
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of keys and values in one tensor (B, Nk, 2, Hkv, D)."""
    check_tensors(kv=kv)
    check_packed("kv", kv, 5, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@with_clear_errors
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of queries, keys and values in one tensor (B, N, 3, H, D)."""
    check_tensors(qkv=qkv)
    check_packed("qkv", qkv, 5, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def check_rank(name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        layout = {4: "(batch, length, heads, head size)", 3: "(length of all, heads, head size)"}[rank]
        raise ArgumentRank(f"{name!r} is {layout}, found {tuple(tensor.shape)}")


def check_packed(name: str, tensor: Tensor, rank: int, parts: int) -> None:
    if tensor.dim() != rank or tensor.shape[-3] != parts:
        lead = "batch, length" if rank == 5 else "length of all"
        raise ArgumentRank(f"{name!r} is ({lead}, {parts}, heads, head size), found {tuple(tensor.shape)}")
