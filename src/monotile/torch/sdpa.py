"""`torch.nn.functional.scaled_dot_product_attention`, with torch's signature and meaning, by monotile's kernels."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ..errors import ArgumentKind, ArgumentRank, BadOption, HeadsDoNotDivide, MaskShape
from ..library.entry import attention
from ..library.readable import check_kinds, check_readable
from ..library.torch_calls import is_causal_bias, with_clear_errors

TORCHS = torch._C._nn.scaled_dot_product_attention  # torch's own, also where its name in torch.nn.functional is not
PLAIN_MASKS = Tensor, type(None)
DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


@with_clear_errors
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of query (..., Hq, L, E) to key (..., H, S, E) and value (..., H, S, Ev), as torch defines it.

    Leading dimensions are broadcast. `attn_mask` is bool (True takes part) or is added to the scores; it broadcasts to
    (..., Hq, L, S). `is_causal` aligns the diagonal with the first query and the first key. With `enable_gqa` the heads
    of a group share a head of key and value. `attn_mask` may be a `torch.nn.attention.bias.CausalBias`. Arguments whose
    class has a `__torch_function__` of its own decide what torch's function means. Dropout is refused: monotile has
    none.
    """
    causal: bool | str = "upper_left" if is_causal else False
    if not type(query) is type(key) is type(value) is Tensor or type(attn_mask) not in PLAIN_MASKS:
        if handlers := _handlers(query, key, value, attn_mask):
            given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return _handled(handlers, (query, key, value), {**given, "enable_gqa": enable_gqa})
        check_kinds(query=query, key=key, value=value)
        if is_causal_bias(attn_mask) and not is_causal:
            causal, attn_mask = _alignment(attn_mask, query.shape[-2], key.shape[-2]), None
    if dropout_p:
        raise BadOption(f"dropout_p is {dropout_p}; monotile has no dropout: call model.eval(), or set dropout to 0")
    if is_causal and attn_mask is not None:
        raise BadOption("attn_mask and is_causal are given together; put causality into the mask, as torch asks for")
    if query.is_nested or key.is_nested or value.is_nested:
        raise ArgumentKind(
            "query, key or value is a nested tensor; pass torch.nested.to_padded_tensor(...) and a mask, or each part"
        )
    ranks = query.dim(), key.dim(), value.dim()
    if min(ranks) < 2:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ArgumentRank(f"query, key and value have at least 2 dimensions (length, head size), found {shapes}")
    q, k, v = (t if t.dim() > 2 else t.unsqueeze(0) for t in (query, key, value))
    heads = _query_heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    q, k, v = q.expand(*q.shape[:-3], heads, -1, -1), *_same_heads(k, v, heads)
    o: Tensor = attention(q, k, v, mask=attn_mask, causal=causal, scale=scale)
    return o if max(ranks) > 2 else o.squeeze(0)


def _handlers(*given: Any) -> tuple[Any, ...]:
    """Return the arguments whose class replaces torch's functions by `__torch_function__`. monotile replaces them for
    CausalBias, and refuses nested tensors by name."""
    if not torch._C._is_torch_function_enabled():
        return ()
    found = [t for t in given if not is_causal_bias(t) and _replaces_functions(type(t))]
    return tuple([t for t in found if not (isinstance(t, Tensor) and t.is_nested)])


def _handled(handlers: tuple[Any, ...], arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call the handlers of torch's function with the options that are not left out."""
    given = {name: option for name, option in options.items() if option is not None and option != DEFAULTS.get(name)}
    return handle_torch_function(TORCHS, handlers, *arrays, **given)


def _replaces_functions(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", None)
    own = getattr(function, "__func__", function)  # of a class method
    return own not in (None, torch._C._disabled_torch_function_impl, Tensor.__torch_function__.__func__)


def _alignment(bias: Any, queries: int, keys: int) -> str:
    """Return the value of `causal` for a CausalBias. As in torch, one that is square or begins at the upper left is as
    long as query and key are, whatever its own lengths."""
    lengths = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name == "UPPER_LEFT" or lengths[0] == lengths[1]:
        return "upper_left"
    if lengths != (queries, keys):
        found = f"a CausalBias of {lengths[0]} queries and {lengths[1]} keys"
        raise MaskShape(f"attn_mask is {found}, query and key have {queries} and {keys}; make it of these lengths")
    return "lower_right"


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


# ---- in place of torch's ---------------------------------------------------------------------------------------------


class _Regions:
    """The regions that are open, in all threads. The first one puts monotile's function in place of torch's, and the
    last one puts back what the first one found."""

    def __init__(self) -> None:
        self.lock, self.open = threading.Lock(), 0
        self.found: Any = None  # before the first of them

    def enter(self) -> None:
        with self.lock:
            if not self.open:
                self.found = torch.nn.functional.scaled_dot_product_attention
                torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
            self.open += 1

    def leave(self) -> None:
        with self.lock:
            self.open -= 1
            if not self.open:
                torch.nn.functional.scaled_dot_product_attention, self.found = self.found, None


_regions = _Regions()


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """In this region `torch.nn.functional.scaled_dot_product_attention` is monotile's, for the whole process. A name
    that was imported from there before keeps torch's. Regions may overlap, in one thread or several: torch's is back
    after the last of them."""
    if torch.compiler.is_dynamo_compiling():
        raise BadOption("a region of sdpa() is opened in compiled code; open it around the call of the compiled model")
    _regions.enter()
    try:
        yield
    finally:
        _regions.leave()
