"""`torch.nn.functional.scaled_dot_product_attention`, with torch's signature and meaning, by monotile's kernels."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ArgumentKind, ArgumentRank, BadOption, HeadsDoNotDivide
from ..library.entry import attention
from ..library.readable import check_readable
from ..library.torch_calls import with_clear_errors

_patching = threading.Lock()


@with_clear_errors
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of query (..., Hq, L, E) to key (..., H, S, E) and value (..., H, S, Ev), as torch defines it.

    Leading dimensions are broadcast. `attn_mask` is bool (True takes part) or is added to the scores; it broadcasts to
    (..., Hq, L, S). `is_causal` aligns the diagonal with the first query and the first key. With `enable_gqa` the heads
    of a group share a head of key and value. Dropout is refused: monotile has none.
    """
    if dropout_p:
        raise BadOption(f"dropout_p is {dropout_p}; monotile has no dropout: call model.eval(), or set dropout to 0")
    if is_causal and attn_mask is not None:
        raise BadOption("attn_mask and is_causal are given together; put causality into the mask, as torch asks for")
    if query.is_nested or key.is_nested or value.is_nested:
        raise ArgumentKind(
            "query, key or value is a nested tensor; pass torch.nested.to_padded_tensor(...) and a mask, or each part"
        )
    rank = max(t.dim() for t in (query, key, value))
    if min(t.dim() for t in (query, key, value)) < 2:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ArgumentRank(f"query, key and value have at least 2 dimensions (length, head size), found {shapes}")
    q, k, v = (t if t.dim() > 2 else t.unsqueeze(0) for t in (query, key, value))
    heads = _query_heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    q, k, v = q.expand(*q.shape[:-3], heads, -1, -1), *_same_heads(k, v, heads)
    o: Tensor = attention(q, k, v, mask=attn_mask, causal="upper_left" if is_causal else False, scale=scale)
    return o if rank > 2 else o.squeeze(0)


def _query_heads(queries: int, keys: int, values: int, enable_gqa: bool) -> int:
    """The heads of the result. Without `enable_gqa` heads are broadcast like any other dimension."""
    most = max(keys, values)
    alike = keys == values or 1 in (keys, values)
    if (queries == most and alike) or most == 1:
        return queries
    if queries == 1 and alike:
        return most
    if not enable_gqa:
        found = f"query has {queries} heads, key {keys}, value {values}"
        raise HeadsDoNotDivide(f"{found}; pass enable_gqa=True where heads of query share heads of key and value")
    return queries


def _same_heads(k: Tensor, v: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Keys and values with one number of heads, where they differ: each head for as many query heads as it serves."""
    keys, values = k.shape[-3], v.shape[-3]
    if keys == values:
        return k, v
    if min(keys, values) == 1:
        heads = max(keys, values)
        return k.expand(*k.shape[:-3], heads, -1, -1), v.expand(*v.shape[:-3], heads, -1, -1)
    if 0 in (keys, values) or queries % keys or queries % values:
        found = f"query has {queries} heads, key {keys}, value {values}"
        raise HeadsDoNotDivide(f"{found}; the heads of key and of value must divide those of query")
    check_readable(key=k, value=v)
    heads = math.lcm(keys, values)
    return k.repeat_interleave(heads // keys, -3), v.repeat_interleave(heads // values, -3)


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """In this region `torch.nn.functional.scaled_dot_product_attention` is monotile's, for the whole process. A name
    that was imported from there before keeps torch's."""
    functional = torch.nn.functional
    with _patching:
        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        with _patching:
            functional.scaled_dot_product_attention = before
