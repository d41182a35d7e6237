"""Attention of sequences that lie one after the other: `flash_attn_varlen_func` and its packed forms."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ArgumentShape
from ..library import torch_calls
from ..library.entry import attention_paged, attention_varlen
from ..library.readable import check_tensors, has_contents
from ..library.torch_calls import with_clear_errors
from .cache import as_int32, check_block_table
from .dense import check_packed, check_rank
from .options import (
    Wanted,
    Window,
    refuse_dropout,
    score_options,
    visible_options,
)


@with_clear_errors
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
    optional = {"alibi_slopes": alibi_slopes, "block_table": block_table}
    check_tensors(optional, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_rank("q", q, 3)
    rows = PackedRanges.of(q, cu_seqlens_q, cu_seqlens_k)
    wanted = Wanted(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is None:
        o, lse = _packed(q, k, v, rows, wanted)
    else:
        o, lse = _in_pages(q, k, v, rows, wanted, block_table)
    return (o, lse, None) if return_attn_probs else o


class PackedRanges(NamedTuple):
    """Where packed sequences begin and end."""

    ends_q: Tensor  # (sequences + 1,)
    ends_k: Tensor  # (sequences + 1,)

    @property
    def keys(self) -> Tensor:
        """How many each sequence has."""
        return self.ends_k.diff()

    def score_options(self, wanted: Wanted, heads: int) -> dict[str, Any]:
        first = None if wanted.alibi_slopes is None else self.keys - self.ends_q.diff()
        return score_options(wanted, len(self.ends_q) - 1, heads, first)

    @classmethod
    def of(cls, q: Tensor, ends_q: Tensor, ends_k: Tensor) -> PackedRanges:
        for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
            if ends.dim() != 1 or ends.shape != ends_q.shape or len(ends) < 1 or ends.is_floating_point():
                raise ArgumentShape(
                    f"{name!r} is (sequences + 1,) whole numbers, the same length for queries and keys; found "
                    f"{tuple(ends.shape)} {ends.dtype} beside {tuple(ends_q.shape)}"
                )
        ends_q, ends_k = ends_q.long(), ends_k.long()
        if q.device.type == "cpu" and has_contents(ends_q) and int(ends_q[-1]) != q.shape[0]:
            raise ArgumentShape(f"cu_seqlens_q ends at {int(ends_q[-1])}, but q has {q.shape[0]} rows")
        return cls(ends_q, ends_k)


def _packed(q: Tensor, k: Tensor, v: Tensor, rows: PackedRanges, wanted: Wanted) -> tuple[Tensor, Tensor]:
    check_rank("k", k, 3)
    check_rank("v", v, 3)
    found: tuple[Tensor, Tensor] = attention_varlen(
        q, k, v, rows.ends_q, rows.ends_k, return_lse=True, **visible_options(wanted),
        **rows.score_options(wanted, q.shape[1]),
    )  # fmt: skip
    return found


def _in_pages(
    q: Tensor, k: Tensor, v: Tensor, rows: PackedRanges, wanted: Wanted, block_table: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    torch_calls.refuse_gradients("flash_attn_varlen_func with a block_table", q, k, v)
    check_block_table(block_table, len(rows.ends_q) - 1)
    found: tuple[Tensor, Tensor] = attention_paged(
        q, k, v, as_int32(block_table), as_int32(rows.keys), q_offsets=rows.ends_q, return_lse=True,
        **visible_options(wanted), **rows.score_options(wanted, q.shape[1]),
    )  # fmt: skip
    return found


@with_clear_errors
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of keys and values in one tensor (sum of lengths, 2, Hkv, D)."""
    check_tensors(kv=kv)
    check_packed("kv", kv, 4, 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@with_clear_errors
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of queries, keys and values in one tensor (sum of lengths, 3, H, D)."""
    check_tensors(qkv=qkv)
    check_packed("qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
