"""Attention to a cache of keys and values, to which new ones are appended first: `flash_attn_with_kvcache`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentShape, BadOption, MixedDTypes
from ..library import torch_calls
from ..library.entry import attention, attention_paged, paged_append
from ..library.mod_table import mod_of_arrays
from ..library.readable import check_tensors, has_contents
from ..library.torch_calls import with_clear_errors
from .dense import check_rank, flash_attn_func
from .options import Wanted, Window, interval_mod, intervals, score_options, starts_mod, visible_options

INT32 = torch.iinfo(torch.int32)


@with_clear_errors
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (B, Nq, H, D) to a cache (caches, length, Hkv, D), or with `block_table` (B, pages) to pages
    (pages, page size, Hkv, D). New k and v (B, new, Hkv, D) are first written behind the `cache_seqlens` keys that are
    there, and rotated with q by rotary_cos and rotary_sin (positions, rotary size / 2), in pairs of neighbours or of
    halves. What would lie outside the cache or in a page that is none is not stored, as by `paged_append`. Keys before
    `cache_leftpad` are hidden. The number of splits is monotile's choice."""
    optional = {
        "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_seqlens": cache_seqlens if isinstance(cache_seqlens, Tensor) else None, "cache_leftpad": cache_leftpad,
        "block_table": block_table, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    check_tensors(optional, q=q, k_cache=k_cache, v_cache=v_cache)
    torch_calls.refuse_gradients("flash_attn_with_kvcache", q, k_cache, v_cache, k, v)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, tensor, 4)
    wanted = Wanted(softmax_scale, causal, window_size, softcap, alibi_slopes)
    where = CacheRows(q, k_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    if any(t is not None for t in (k, v, rotary_cos, rotary_sin)):
        q = where.append(q, (k_cache, v_cache), (k, v), (rotary_cos, rotary_sin, rotary_interleaved), wanted)
    new = 0 if k is None else k.shape[1]
    # A trace knows no lengths by which blocks are skipped: each row of the cache is a page then, which skips them.
    of_own_length = cache_leftpad is not None or isinstance(where.lengths, Tensor)
    rows_are_pages = of_own_length and not has_contents(q)
    if block_table is not None or cache_batch_idx is not None or rows_are_pages:
        found = attend_pages(q, (k_cache, v_cache), where.pages(), where.length_of_each() + new, wanted, cache_leftpad)
    elif isinstance(where.lengths, int) and cache_leftpad is None:
        end = where.lengths + new
        found = flash_attn_func(
            q, k_cache[:, :end], v_cache[:, :end], 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes,
            False, True,
        )[:2]  # fmt: skip
    else:
        found = attend(q, (k_cache, v_cache), (where.left_of_each(), where.length_of_each() + new), wanted)
    return found if return_softmax_lse else found[0]


def attend(
    q: Tensor, cache: tuple[Tensor, Tensor], spans: tuple[Tensor, Tensor], wanted: Wanted
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Nq, H, D) to keys spans[0][b] <= j < spans[1][b] of a cache (B, Nk, Hkv, D). Its shape is that
    of every call, whatever the lengths are; a block map tells which blocks are skipped."""
    diagonal = _diagonal(q, spans[1])
    first, last = intervals(diagonal, spans[0][:, None], spans[1][:, None], wanted)
    o, lse = attention(
        *[t.transpose(1, 2) for t in (q, *cache)], mask_mod=interval_mod(first, last), return_lse=True,
        **score_options(wanted, q.shape[0], q.shape[2], spans[1] - q.shape[1]),
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), lse


def attend_pages(
    q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, ends: Tensor, wanted: Wanted, left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Nq, H, D), the last of `ends[b]` tokens, to pages (pages, page size, Hkv, D)."""
    mask_mod = None if left is None else mod_of_arrays(starts_mod, as_int32(left))
    first = None if wanted.alibi_slopes is None else ends - q.shape[1]
    o, lse = attention_paged(
        q.transpose(1, 2), pages[0], pages[1], as_int32(table), as_int32(ends), mask_mod=mask_mod, return_lse=True,
        **visible_options(wanted), **score_options(wanted, q.shape[0], q.shape[2], first),
    )  # fmt: skip
    return o.transpose(1, 2).contiguous(), lse


def as_int32(x: Tensor) -> Tensor:
    """Whole numbers as int32; larger ones become the largest, which no cache has a place for."""
    return x if x.dtype == torch.int32 else x.long().clamp(INT32.min, INT32.max).int()


def _diagonal(q: Tensor, ends: Tensor) -> Tensor:
    """The key (B, Nq) that each query stands at, the last one at the last key."""
    return ends[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)


class CacheRows:
    """Which rows of a cache belong to each sequence of a batch, and how many of them are filled."""

    def __init__(
        self, q: Tensor, cache: Tensor, lengths: int | Tensor | None, batch_idx: Tensor | None, left: Tensor | None,
        block_table: Tensor | None,
    ) -> None:  # fmt: skip
        self.batch, self.device = q.shape[0], q.device
        self.batch_idx, self.left, self.block_table = batch_idx, left, block_table
        if block_table is not None and (left is not None or batch_idx is not None):
            raise BadOption("block_table is given with cache_leftpad or cache_batch_idx; a block table names its pages")
        if block_table is not None:
            check_block_table(block_table, self.batch)
        self.page = cache.shape[1]
        self.capacity = self.page * (1 if block_table is None else block_table.shape[1])
        self.given = lengths is not None
        self.lengths: int | Tensor = self.capacity if lengths is None else self._read(lengths)
        given = {"cache_seqlens": lengths, "cache_batch_idx": batch_idx, "cache_leftpad": left}
        for name, tensor in given.items():
            if isinstance(tensor, Tensor) and (tensor.shape != (self.batch,) or not is_whole(tensor)):
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ArgumentShape(f"{name!r} is ({self.batch},) whole numbers, one per sequence; found {found}")
        if batch_idx is None is block_table and cache.shape[0] != self.batch:
            raise ArgumentShape(f"q has a batch of {self.batch}, the cache of {cache.shape[0]}; pass cache_batch_idx")

    def _read(self, lengths: Any) -> int | Tensor:
        if isinstance(lengths, Tensor):
            return lengths
        try:
            length = operator.index(lengths)
        except TypeError:
            found = type(lengths).__name__
            raise BadOption(f"cache_seqlens is a whole number or a tensor of them, found {found}") from None
        if not 0 <= length <= self.capacity:
            raise BadOption(f"cache_seqlens is {length}; the cache holds 0 to {self.capacity} keys of a sequence")
        return length

    def length_of_each(self) -> Tensor:
        if isinstance(self.lengths, Tensor):
            return self.lengths.long()
        return torch.full((self.batch,), self.lengths, device=self.device)

    def left_of_each(self) -> Tensor:
        if self.left is None:
            return torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        return self.left.long()

    def pages(self) -> Tensor:
        """The table of pages; a row of the cache is one page."""
        if self.block_table is not None:
            return self.block_table
        rows = torch.arange(self.batch, device=self.device) if self.batch_idx is None else self.batch_idx
        return rows[:, None]

    def append(
        self, q: Tensor, caches: tuple[Tensor, Tensor], new: tuple[Tensor | None, Tensor | None],
        rotary: tuple[Tensor | None, Tensor | None, bool], wanted: Wanted,
    ) -> Tensor:  # fmt: skip
        """Write new keys and values into the caches and return q, rotated as the new keys are."""
        k, v = new
        cos, sin, interleaved = rotary
        if k is None or v is None or not self.given:
            raise BadOption("k, v and cache_seqlens are given together: new keys and values, and where they go")
        if (cos is None) != (sin is None):
            raise BadOption("rotary_cos and rotary_sin are given together: pass both, or none for no rotation")
        start = self.length_of_each()
        self._check_new(caches, (k, v), start)
        if cos is not None and sin is not None:
            if len(cos) < self.capacity:
                found = f"{len(cos)} positions, the cache {self.capacity} keys of a sequence"
                raise ArgumentShape(f"rotary_cos and rotary_sin have {found}; they have at least as many positions")
            origin = start[:, None] - self.left_of_each()[:, None]
            at, steps = (torch.arange(t.shape[1], device=self.device) for t in (k, q))
            moving = wanted.sides != (None, None)
            k = rotate(k, cos, sin, origin + at, interleaved=interleaved)
            q = rotate(q, cos, sin, origin + steps * moving, interleaved=interleaved)
        tokens = [_apart(t, caches).transpose(1, 2) for t in (k, v)]
        paged_append(*caches, as_int32(self.pages()), as_int32(start), *tokens)
        return q

    def _check_new(self, caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], start: Tensor) -> None:
        """Raise an error for new keys or values that do not fit the caches."""
        for name, tensor, cache in zip("kv", new, caches, strict=True):
            wanted = self.batch, new[0].shape[1] if new[0].dim() == 4 else "new", *cache.shape[2:]
            if tuple(tensor.shape) != wanted:
                found = f"found {tuple(tensor.shape)}"
                raise ArgumentShape(f"{name!r} is (batch, new, heads, head size) = {wanted} for this cache; {found}")
            if tensor.dtype != cache.dtype:
                raise MixedDTypes(f"{name!r} has dtype {tensor.dtype} and its cache {cache.dtype}; cast it")
        count, most = new[0].shape[1], self.lengths
        if isinstance(most, Tensor):  # on a GPU it is not read: that would wait
            most = int(start.max()) if self.device.type == "cpu" and has_contents(start) and self.batch else 0
        if most + count > self.capacity:
            found = f"{most} keys are there, {count} are new"
            raise ArgumentShape(f"the cache has room for {self.capacity} keys of a sequence; {found}")


def _apart(tensor: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
    """The tensor, copied if it lies in the storage of a cache that is written, which a trace cannot tell."""
    if not has_contents(tensor):
        return tensor.clone()
    storage = tensor.untyped_storage().data_ptr()
    return tensor.clone() if any(storage == cache.untyped_storage().data_ptr() for cache in caches) else tensor


def check_block_table(block_table: Tensor, sequences: int) -> None:
    if block_table.dim() != 2 or len(block_table) != sequences:
        raise ArgumentShape(f"block_table is ({sequences}, pages), found {tuple(block_table.shape)}")
    if not is_whole(block_table):
        raise MixedDTypes(f"block_table holds whole numbers, found {block_table.dtype}; cast it to int32")


def is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding of x (B, N, H, D) at positions (B, N): pairs are neighbours, or the same place in the halves of
    the first columns."""
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * half > x.shape[-1]:
        raise ArgumentShape(
            f"rotary_cos and rotary_sin are (positions, rotary size / 2), with a rotary size of at most {x.shape[-1]}; "
            f"found {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    on_host = positions.device.type == "cpu" and has_contents(positions)
    if on_host and positions.numel() and int(positions.max()) >= len(cos):
        raise ArgumentShape(f"position {int(positions.max())} is rotated; rotary_cos has {len(cos)} positions")
    positions = positions.clamp(0, len(cos) - 1)  # of tokens outside the cache
    c, s = (table[positions].unsqueeze(2).float() for table in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, a * s + b * c
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)
