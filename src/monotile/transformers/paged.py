"""Continuous batching: sequences of different lengths packed one after the other, on Transformers' paged cache.

Transformers takes `sdpa`, `paged|eager` and implementations with `flash` in their names. For the last it makes no dense
masks, and passes where each sequence begins: what `attention_varlen` takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import BadOption
from ..library.entry import attention_varlen
from .forward import attention_forward, refuse_options

NAME = "monotile_flash"


@contextmanager
def continuous_batching(model: Any) -> Iterator[None]:
    """In this region `model.generate_batch` computes attention by monotile, on its paged cache and without masks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if "cache" not in inspect.signature(sdpa_attention_forward).parameters:
        raise BadOption("this version of Transformers gives its paged cache to no implementation; install >=5.22")
    if not model._can_set_attn_implementation():
        raise BadOption(f"{type(model).__name__} computes attention by itself and takes no other implementation")
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def paged_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of packed sequences (1, H, tokens, D) to their keys, which the cache keeps and gives back packed."""
    cache = options.pop("cache", None)
    if cache is None:
        return attention_forward(module, query, key, value, attention_mask, **options)
    refuse_options(module, options)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    window = options.get("sliding_window")
    o: Tensor = attention_varlen(
        q, k, v, options["cu_seq_lens_q"], options["cu_seq_lens_k"], causal=True, scale=options.get("scaling"),
        window=None if window is None else (window - 1, None), softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )  # fmt: skip
    return o.unsqueeze(0), None
