"""Variants of the torch call that compute the same result; the fastest one is the peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels import reference

Array = np.ndarray[Any, Any]
Variants = dict[str, Callable[[], Any]]
MOST_REPEATED = 1 << 30  # bytes of keys repeated for every query head; above it the variant cannot win
MOST_SCORES = 1 << 28  # bytes of scores that the variant by matrix products may write to memory

# What holds a peer to a vector unit of this machine that is not its own: torch's kernels, oneDNN, MKL, OpenBLAS.
HELD_TO = {
    "avx512": ("avx512", "AVX512_CORE_FP16", "AVX512", None),
    "avx2": ("avx2", "AVX2", "AVX2", "Haswell"),
    "baseline": ("default", "SSE41", "SSE4_2", "Nehalem"),
}
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE")


def held_to(unit: str) -> dict[str, str]:
    """Return the environment variables that hold torch and NumPy's BLAS to a vector unit; none for those above."""
    pairs = zip(VARIABLES, HELD_TO.get(unit, (None,) * len(VARIABLES)), strict=True)
    return {name: value for name, value in pairs if value is not None}


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


def to_numpy(found: Any) -> Any:
    """Convert a result of torch or NumPy to an array, or several of them to arrays; bfloat16 becomes float32."""
    if isinstance(found, tuple):
        return tuple(map(to_numpy, found))
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
    Q, K, V = (to_torch(x) for x in (q, k, v))
    if sinks is not None:
        return _sink_variants(Q, K, V, to_torch(sinks), causal)
    mask = combined_mask(Nq, Nk, options) if _hides_by_mask(options) else None
    if mask is not None and mask.dtype == np.float32 and q.dtype != np.float32:
        mask = mask.astype(q.dtype)  # torch requires a mask of its inputs' dtype
    options_sdpa = {"is_causal": causal and mask is None, "attn_mask": None if mask is None else to_torch(mask)}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    variants: Variants = {}
    if group == 1:
        variants["sdpa"] = lambda: sdpa(Q, K, V, **options_sdpa)
    else:
        variants["enable_gqa"] = lambda: sdpa(Q, K, V, enable_gqa=True, **options_sdpa)
        if k.nbytes * group <= MOST_REPEATED:
            variants["repeated heads"] = lambda: sdpa(
                Q, K.repeat_interleave(group, 1), V.repeat_interleave(group, 1), **options_sdpa
            )
    if mask is None and not causal:
        variants |= _folded_variants(Q, K, V, None)
    elif mask is not None and group > 1 and mask.shape[1] == 1 and mask.nbytes * group <= MOST_SCORES:
        variants |= _folded_variants(Q, K, V, to_torch(np.tile(mask, (1, 1, group, 1))))
    return variants


def _folded_variants(Q: Any, K: Any, V: Any, mask: Any) -> Variants:
    """Return variants with the query heads of a group as rows of one head: by sdpa, and by matrix products, which need
    memory for all scores."""
    import torch

    (B, Hq, Nq, D), (_, Hkv, Nk, _), Dv = Q.shape, K.shape, V.shape[3]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows, shape = Q.reshape(B, Hkv, Hq // Hkv * Nq, D), (B, Hq, Nq, Dv)
    variants: Variants = {}
    if Hq > Hkv:
        variants["folded"] = lambda: sdpa(rows, K, V, attn_mask=mask).reshape(shape)
    in_keys = V.data_ptr() == K.data_ptr() and V.stride() == K.stride()
    if Dv < D and in_keys:  # as in MLA: torch's fused kernel takes equal head sizes only
        variants["folded, keys as values"] = lambda: sdpa(rows, K, K, attn_mask=mask)[..., :Dv].reshape(shape)
    if mask is None and B * Hq * Nq * Nk * Q.element_size() <= MOST_SCORES:
        variants["products"] = lambda: (torch.softmax(rows * D**-0.5 @ K.mT, -1) @ V).reshape(shape)
    return variants


def gradient_variants(do: Array, q: Array, k: Array, v: Array, *, causal: bool, alone: bool) -> Variants | None:
    """Return variants of torch's gradients of q, k and v: `alone`, from a forward pass made beforehand, or with it."""
    if torch_version() is None:
        return None
    import torch

    group = q.shape[1] // k.shape[1]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    dO, *inputs = (to_torch(x) for x in (do, q, k, v))
    for x in inputs:
        x.requires_grad_(True)

    def repeated(Q: Any, K: Any, V: Any) -> Any:
        return sdpa(Q, K.repeat_interleave(group, 1), V.repeat_interleave(group, 1), is_causal=causal)

    forwards = {"sdpa": lambda Q, K, V: sdpa(Q, K, V, is_causal=causal, enable_gqa=group > 1)}
    if group > 1:
        forwards["repeated heads"] = repeated

    def gradients(forward: Callable[..., Any]) -> Callable[[], Any]:
        kept = forward(*inputs) if alone else None

        def run() -> Any:
            with torch.enable_grad():
                out = kept if alone else forward(*inputs)
                return torch.autograd.grad(out, inputs, dO, retain_graph=alone)

        return run

    with torch.enable_grad():
        return {name: gradients(forward) for name, forward in forwards.items()}


def _hides_by_mask(options: Mapping[str, Any]) -> bool:
    """Return True for options that torch needs a mask for."""
    return any(options.get(name) is not None for name in ("mask", "window", "mask_mod"))


def combined_mask(Nq: int, Nk: int, options: Mapping[str, Any], rows: Sequence[int] | None = None) -> Array:
    """Combine mask, mask_mod, window and causality in one array, for all queries or some rows of them."""
    mask, mask_mod = options.get("mask"), options.get("mask_mod")
    seen = reference.visible(Nq, Nk, options.get("causal", False), options.get("window"), rows)
    if mask_mod is not None:
        queries = np.arange(Nq) if rows is None else np.asarray(rows)
        seen = seen & mask_mod(0, 0, queries[:, None], np.arange(Nk)[None, :])
    if mask is None:
        return seen[None, None]
    part = mask if rows is None else mask[:, :, rows]
    return seen & part if mask.dtype == bool else np.where(seen, part, np.float32(-np.inf)).astype(np.float32)


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
