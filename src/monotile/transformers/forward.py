"""The attention function that Transformers' layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BadOption
from ..library.entry import attention_by_position
from .masks import LazyMask, Visible


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of query (B, Hq, Nq, D) to key and value (B, H, Nk, D) as a layer of Transformers asks for it: the
    result is (B, Nq, Hq, Dv), without attention weights."""
    given = options.get
    if given("dropout") or given("block_indices") is not None:
        refuse_options(module, options)
    if given("indices") is not None:
        attention_mask = _selected(options["indices"], key.shape[2], attention_mask)
    bias, mask_mod, window = given("position_bias"), None, None
    causal: bool | str = False
    mask = attention_mask
    if type(attention_mask) is LazyMask and key.shape[2] == attention_mask.shape[3]:
        visible = attention_mask.visible
        if visible.keys != key.shape[2]:
            key, value = key[:, :, : visible.keys], value[:, :, : visible.keys]
            bias = bias if bias is None else bias[..., : visible.keys]
        causal, window, mask_mod = visible.causal, visible.window, visible.mask_mod
        mask = None if visible.padding is None else visible.padding[:, None, None, :]
        if bias is not None and mask is not None:
            mask, mask_mod = None, _with_padding(visible)
    elif attention_mask is None and query.shape[2] > 1:
        wanted = given("is_causal")
        causal = "upper_left" if (getattr(module, "is_causal", True) if wanted is None else wanted) else False
    if bias is not None:
        mask = bias if mask is None else _biased(mask, bias)
    o: Tensor = attention_by_position(
        query, key, value, causal=causal, scale=given("scaling"), mask=mask, window=window, softcap=given("softcap"),
        sinks=given("s_aux"), mask_mod=mask_mod,
    )  # fmt: skip
    return o.contiguous(), None


def refuse_options(module: Any, options: dict[str, Any]) -> None:
    """Raise an error for what monotile does not have, if a layer asks for it."""
    asks, layer = options.get("dropout"), type(module).__name__
    if asks:
        raise BadOption(
            f"{layer} asks for an attention dropout of {asks}; monotile has no dropout: set the config's attention "
            "dropout to 0, or call model.eval()"
        )
    if options.get("block_indices") is not None:
        raise BadOption(f"{layer} selects blocks of keys by block_indices, which monotile does not read; use eager")


def _selected(indices: Tensor, keys: int, mask: Tensor | None) -> Tensor:
    """The dense mask of a layer that sees the keys indices (B, Nq, n) alone."""
    chosen = indices.new_zeros((*indices.shape[:2], keys), dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype is torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _with_padding(visible: Visible) -> Callable[..., Any]:
    """The mask_mod and the padding of a mask in one function, where a bias takes the place of the mask."""
    padding: Any = visible.padding
    other: Any = visible.mask_mod

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return padding[b, j]

    def both(b: Any, h: Any, i: Any, j: Any) -> Any:
        return padding[b, j] & other(b, h, i, j)

    return seen if other is None else both


def _biased(mask: Tensor, bias: Tensor) -> Tensor:
    """A dense mask and a bias as one additive mask."""
    if mask.dtype.is_floating_point:
        return mask + bias
    return bias.masked_fill(~mask, float("-inf"))
