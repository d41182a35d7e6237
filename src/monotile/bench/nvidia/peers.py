"""Variants of the torch call on a GPU: torch's four backends, and FlexAttention.

FlexAttention has to be compiled for each shape and is therefore timed only where it is needed.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .rows import MODS, GpuShape, Inputs, Tensor

Variants = dict[str, Callable[[], Any]]
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
WHEN = ("needed", "always", "never")
MOST_SCORES = 10 << 30  # bytes of float32 scores: above it the math backend, which writes them to memory, is left out
MOST_REPEATED = 4 << 30  # bytes of keys or values repeated for every query head


def variants(shape: GpuShape, inputs: Inputs) -> Variants:
    """Return the sdpa variants. A window becomes a mask, made beforehand; only FlexAttention has softcap, sinks and
    mods."""
    if shape.extra in ("softcap", "sinks", *MODS):
        return {}
    q, k, v = inputs.q, inputs.k, inputs.v
    group = shape.heads[0] // shape.heads[1]
    mask = _mask(shape, inputs)
    options = {"is_causal": shape.causal and mask is None, "attn_mask": mask}
    found: Variants = {}
    for name in BACKENDS:
        if name == "math" and 4 * shape.B * shape.heads[0] * shape.Nq * shape.Nk > MOST_SCORES:
            continue
        if group == 1:
            found[name] = _sdpa(name, q, k, v, options)
        elif name == "efficient":  # it does not share keys among heads
            if group * k.nbytes <= MOST_REPEATED:
                found["efficient, repeated heads"] = _sdpa_repeated(name, group, inputs, options)
        else:
            found[name] = _sdpa(name, q, k, v, {**options, "enable_gqa": True})
        if group > 1 and shape.kind != "prefill" and not shape.causal:  # the heads of a group as rows of one head
            folded = q.reshape(shape.B, shape.heads[1], group * shape.Nq, shape.D)
            tiled = {} if mask is None else {"attn_mask": mask.repeat(1, 1, group, 1)}
            out_shape = (*q.shape[:3], v.shape[3])
            found[f"{name}, folded"] = _sdpa(name, folded, k, v, tiled, out_shape)
            if shape.Dv:  # as in MLA: the fused kernels take equal head sizes only
                found[f"{name}, folded, keys as values"] = _sdpa(name, folded, k, k, tiled, out_shape)
    return found


def _mask(shape: GpuShape, inputs: Inputs) -> Tensor | None:
    mask_mod = inputs.options.get("mask_mod")
    if mask_mod is None and inputs.options.get("window") is None:
        return inputs.options.get("mask")
    import torch

    i = torch.arange(shape.Nq, device=inputs.q.device)[:, None]
    j = torch.arange(shape.Nk, device=inputs.q.device)[None, :]
    if mask_mod is not None:
        return mask_mod(0, 0, i, j).expand(1, 1, shape.Nq, shape.Nk)
    left, right = inputs.options["window"]
    return ((j >= i + shape.Nk - shape.Nq - left) & (j <= i + shape.Nk - shape.Nq + right))[None, None]


def _sdpa(
    name: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], out_shape: tuple[int, ...] | None = None
) -> Callable[[], Tensor]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend, sdpa = getattr(SDPBackend, BACKENDS[name]), torch.nn.functional.scaled_dot_product_attention

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = sdpa(q, k, v, **options)
        return out if out_shape is None else out[..., : out_shape[3]].reshape(out_shape)

    return run


def _sdpa_repeated(name: str, group: int, inputs: Inputs, options: dict[str, Any]) -> Callable[[], Tensor]:
    """Repeat the key heads in every call: the copy is part of the work."""

    def run() -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
        return _sdpa(name, inputs.q, k, v, options)()

    return run


@contextlib.contextmanager
def quiet() -> Any:
    """Silence torch's warnings about backends that do not take a shape; its error says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


@dataclass
class Flex:
    """When to time FlexAttention, and how long its compiler may take in a whole run."""

    when: str = "needed"  # where torch has no other fused kernel
    seconds: float = 120.0
    spent: float = 0.0
    compile: Callable[..., Any] | None = None  # default: torch.compile
    refused: list[str] = field(default_factory=list)

    def wanted(self, fused: bool) -> bool:
        return self.when == "always" or (self.when == "needed" and not fused)

    def compile_and_run(self, shape: GpuShape, inputs: Inputs) -> Variants:
        """Compile it, run it once and return it; return nothing where its time is used up or it fails."""
        if self.spent >= self.seconds:
            self.refused.append(f"{shape.name}: {self.seconds:.0f} s of compiling are used up")
            return {}
        begin = time.perf_counter()
        try:
            run = _flex(shape, inputs, self.compile)
            run()
        except Exception as error:  # a compiler's errors have no common class
            said = (str(error).splitlines() or [""])[0]
            self.refused.append(f"{shape.name}: {type(error).__name__}: {said}")
            return {}
        finally:
            self.spent += time.perf_counter() - begin
        return {"flex": run}


def _flex(shape: GpuShape, inputs: Inputs, compile: Callable[..., Any] | None) -> Callable[[], Tensor]:
    import torch
    from torch import _dynamo
    from torch.nn.attention import flex_attention as flex

    _dynamo.reset()  # else it stops compiling after some shapes and runs uncompiled
    compiled = (compile or torch.compile)(flex.flex_attention, dynamic=False)
    options = inputs.options
    sinks, grouped = options.get("sinks"), shape.heads[0] != shape.heads[1]
    asked: dict[str, Any] = {"enable_gqa": grouped, "score_mod": _score_mod(options), "return_lse": sinks is not None}
    mask_mod = _mask_mod(shape, options)
    if mask_mod is not None:
        device = str(inputs.q.device)
        asked["block_mask"] = flex.create_block_mask(mask_mod, None, None, shape.Nq, shape.Nk, device=device)

    def run() -> Tensor:
        found = compiled(inputs.q, inputs.k, inputs.v, **asked)
        if sinks is None:
            return found
        out, lse = found
        return out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)

    return run


def _score_mod(options: dict[str, Any]) -> Callable[..., Tensor] | None:
    import torch

    cap, mask = options.get("softcap"), options.get("mask")
    if options.get("score_mod") is not None:
        return options["score_mod"]  # type: ignore[no-any-return]
    if cap is not None:
        return lambda score, b, h, i, j: torch.tanh(score / cap) * cap
    if mask is not None and mask.dtype is not torch.bool:
        return lambda score, b, h, i, j: score + mask[0, 0, i, j]
    return None


def _mask_mod(shape: GpuShape, options: dict[str, Any]) -> Callable[..., Tensor] | None:
    import torch

    mask, window = options.get("mask"), options.get("window")
    ahead = shape.Nk - shape.Nq
    if mask is not None and mask.dtype is torch.bool:
        return lambda b, h, i, j: mask[0, 0, i, j]
    if options.get("mask_mod") is not None:
        return options["mask_mod"]  # type: ignore[no-any-return]
    if window is not None:
        left = window[0]
        return lambda b, h, i, j: (j <= i + ahead) & (j >= i + ahead - left)
    if shape.causal:
        return lambda b, h, i, j: j <= i + ahead
    return None
