"""Variants of the torch call that compute the same result; the fastest one is the peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..kernels import reference

Array = np.ndarray[Any, Any]
Variants = dict[str, Callable[[], Any]]
MOST_REPEATED = 1 << 30  # bytes of keys repeated for every query head; above it the variant cannot win


def torch_version() -> str | None:
    """Return torch's version, or None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


def set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def to_torch(array: Array) -> Any:
    """View an array as a tensor. torch does not know NumPy's bfloat16, which is passed by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(found: Any) -> Array:
    """Convert a result of torch or NumPy to an array; bfloat16 becomes float32."""
    if isinstance(found, np.ndarray):
        return found
    return np.asarray(found.float().numpy())


def attention_variants(q: Array, k: Array, v: Array, options: Mapping[str, Any]) -> Variants | None:
    """Return the variants, or None where torch is not installed. Options torch lacks become a mask, made beforehand."""
    if torch_version() is None:
        return None
    import torch

    causal, sinks = bool(options.get("causal")), options.get("sinks")
    Nq, Nk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    assert not causal or Nq == Nk, "torch aligns causality with the first key, monotile with the last"
    mask = _mask(Nq, Nk, options)
    if mask is not None and mask.dtype == np.float32 and q.dtype != np.float32:
        mask = mask.astype(q.dtype)  # torch requires a mask of its inputs' dtype
    options_sdpa = {"is_causal": causal and mask is None, "attn_mask": None if mask is None else to_torch(mask)}
    Q, K, V = (to_torch(x) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if sinks is not None:
        return _sink_variants(Q, K, V, to_torch(sinks), causal)
    if group == 1:
        return {"sdpa": lambda: sdpa(Q, K, V, **options_sdpa)}
    variants: Variants = {"enable_gqa": lambda: sdpa(Q, K, V, enable_gqa=True, **options_sdpa)}
    if k.nbytes * group <= MOST_REPEATED:
        variants["repeated heads"] = lambda: sdpa(
            Q, K.repeat_interleave(group, 1), V.repeat_interleave(group, 1), **options_sdpa
        )
    if not options_sdpa["is_causal"] and mask is None:  # the heads of a group as rows of one head: no row may be hidden
        B, Hkv, D = k.shape[0], k.shape[1], q.shape[3]
        shape = (B, Hkv * group, Nq, v.shape[3])
        variants["folded"] = lambda: sdpa(Q.reshape(B, Hkv, group * Nq, D), K, V).reshape(shape)
    return variants


def _mask(Nq: int, Nk: int, options: Mapping[str, Any]) -> Array | None:
    """Combine mask, window and causality in one array; None where there is neither mask nor window."""
    mask, window, causal = options.get("mask"), options.get("window"), options.get("causal", False)
    if mask is None and window is None:
        return None
    seen = reference.visible(Nq, Nk, causal, window)[None, None]
    if mask is None or mask.dtype == bool:
        return seen if mask is None else seen & mask
    return np.where(seen, mask, np.float32(-np.inf)).astype(np.float32)


def _sink_variants(Q: Any, K: Any, V: Any, sinks: Any, causal: bool) -> Variants:
    """Return variants with sinks, which torch lacks: one more key scored by a mask, or the lse of torch's kernel."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    B, H, N, D = Q.shape
    bias = torch.zeros((1, H, N, N + 1), dtype=Q.dtype)
    if causal:
        bias[..., :N].masked_fill_(torch.ones(N, N, dtype=torch.bool).triu(1), float("-inf"))
    bias[..., N] = sinks[None, :, None]
    none = torch.zeros((B, H, 1, D), dtype=Q.dtype)

    def one_more_key() -> Any:
        return sdpa(Q, torch.cat([K, none], 2), torch.cat([V, none], 2), attn_mask=bias)

    variants: Variants = {"one more key": one_more_key}
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if flash is not None:

        def by_lse() -> Any:
            out, lse = flash(Q, K, V, 0.0, causal)
            return out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)

        variants["flash and its lse"] = by_lse
    return variants
