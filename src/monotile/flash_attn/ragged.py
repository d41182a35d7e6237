"""Attention of sequences that lie one after the other: `flash_attn_varlen_func` and its packed forms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentShape
from ..library.entry import attention
from .cache import attend, gathered_pages
from .dense import check_packed, check_rank
from .options import Wanted, Window, interval_mod, intervals, refuse_dropout, score_options


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of each sequence to its own keys: q (sum of lengths, H, D), k and v (sum of lengths, Hkv, D), where
    sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1]. In each the last query stands at the last key. With
    `return_attn_probs` also the logsumexp (H, sum of lengths), and None for the weights. With `block_table` (sequences,
    pages) k and v are pages (pages, page size, Hkv, D)."""
    refuse_dropout(dropout_p)
    check_rank("q", q, 3)
    rows = Rows.of(q, cu_seqlens_q, cu_seqlens_k)
    wanted = Wanted(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is None:
        o, lse = _packed(q, k, v, rows, wanted)
    else:
        o, lse = _in_pages(q, k, v, rows, wanted, block_table)
    return (o, lse, None) if return_attn_probs else o


class Rows(NamedTuple):
    """Where each row of packed queries belongs."""

    sequence: Tensor  # (queries,)
    local: Tensor  # (queries,), its place in the sequence
    starts: Tensor  # (sequences,), of keys
    queries: Tensor  # (sequences,)
    keys: Tensor  # (sequences,)

    @classmethod
    def of(cls, q: Tensor, ends_q: Tensor, ends_k: Tensor) -> Rows:
        for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
            if ends.dim() != 1 or ends.shape != ends_q.shape or len(ends) < 1 or ends.is_floating_point():
                raise ArgumentShape(
                    f"{name!r} is (sequences + 1,) whole numbers, the same length for queries and keys; found "
                    f"{tuple(ends.shape)} {ends.dtype} beside {tuple(ends_q.shape)}"
                )
        ends_q, ends_k = ends_q.long(), ends_k.long()
        if q.device.type == "cpu" and int(ends_q[-1]) != q.shape[0]:
            raise ArgumentShape(f"cu_seqlens_q ends at {int(ends_q[-1])}, but q has {q.shape[0]} rows")
        places = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(ends_q[1:].contiguous(), places, right=True)
        return cls(sequence, places - ends_q[sequence], ends_k[:-1], ends_q.diff(), ends_k.diff())


def _packed(q: Tensor, k: Tensor, v: Tensor, rows: Rows, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """One call for all sequences: each query sees an interval of the packed keys."""
    check_rank("k", k, 3)
    check_rank("v", v, 3)
    at = rows.sequence
    start, stop = rows.starts[at], (rows.starts + rows.keys)[at]
    diagonal = start + rows.local + (rows.keys - rows.queries)[at]
    first, last = intervals(diagonal[None], start[None], stop[None], wanted)
    o, lse = attention(
        *[t.transpose(0, 1)[None] for t in (q, k, v)], mask_mod=interval_mod(first, last), return_lse=True,
        **score_options(wanted, q.shape[1], diagonal[None], at),
    )  # fmt: skip
    return o[0].transpose(0, 1), lse[0]


def _in_pages(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, wanted: Wanted, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Sequences side by side, padded to the longest, against keys in pages."""
    longest = int(rows.queries.max()) if len(rows.queries) else 0
    wide = q.new_zeros((len(rows.queries), longest, *q.shape[1:]))
    wide[rows.sequence, rows.local] = q
    k, v = gathered_pages(k, block_table), gathered_pages(v, block_table)
    places = torch.arange(longest, device=q.device)
    diagonal = (rows.keys - rows.queries)[:, None] + places
    o, lse = attend(wide, k, v, diagonal, (torch.zeros_like(rows.keys), rows.keys), wanted)
    return o[rows.sequence, rows.local], lse.transpose(1, 2)[rows.sequence, rows.local].transpose(0, 1)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of keys and values in one tensor (sum of lengths, 2, Hkv, D)."""
    check_packed("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of queries, keys and values in one tensor (sum of lengths, 3, H, D)."""
    check_packed("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
