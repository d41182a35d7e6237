"""The same work asked of torch on a GPU: its four backends in every way that gives the same result, and FlexAttention,
which has to be compiled for each shape and is therefore asked where it is needed."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .rows import Inputs, Shape, Tensor

Ways = dict[str, Callable[[], Any]]
BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cuDNN": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
WHEN = ("needed", "always", "never")
MOST_SCORES = 10 << 30  # bytes of float32 scores: beyond it the path that writes them out is hopeless
MOST_REPEATED = 4 << 30  # bytes of keys or values written out for every query head


def ways(shape: Shape, inputs: Inputs) -> Ways:
    """What torch has no word for becomes a mask, made beforehand. Softcap and sinks are FlexAttention's alone."""
    if shape.extra in ("softcap", "sinks"):
        return {}
    q, k, v = inputs.q, inputs.k, inputs.v
    group = shape.heads[0] // shape.heads[1]
    mask = _mask(shape, inputs)
    words = {"is_causal": shape.causal and mask is None, "attn_mask": mask}
    found: Ways = {}
    for name in BACKENDS:
        if name == "math" and 4 * shape.B * shape.heads[0] * shape.Nq * shape.Nk > MOST_SCORES:
            continue
        if group == 1:
            found[name] = _ask(name, q, k, v, words)
        elif name == "efficient":  # it does not share keys among heads
            if group * shape.key_bytes / 2 <= MOST_REPEATED:
                found["efficient, repeated heads"] = _ask_repeated(name, group, inputs, words)
        else:
            found[name] = _ask(name, q, k, v, {**words, "enable_gqa": True})
        if group > 1 and shape.Nq == 1 and mask is None:  # the heads of a group as rows of one head
            folded = q.reshape(shape.B, shape.heads[1], group, shape.D)
            found[f"{name}, folded"] = _ask(name, folded, k, v, {}, tuple(q.shape))
    return found


def _mask(shape: Shape, inputs: Inputs) -> Tensor | None:
    if shape.extra != "window":
        return inputs.options.get("mask")
    import torch

    i = torch.arange(shape.Nq, device=inputs.q.device)[:, None] + shape.Nk - shape.Nq
    j = torch.arange(shape.Nk, device=inputs.q.device)[None, :]
    left, right = inputs.options["window"]
    return ((j >= i - left) & (j <= i + right))[None, None]


def _ask(
    name: str, q: Tensor, k: Tensor, v: Tensor, words: dict[str, Any], out_shape: tuple[int, ...] | None = None
) -> Callable[[], Tensor]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend, sdpa = getattr(SDPBackend, BACKENDS[name]), torch.nn.functional.scaled_dot_product_attention

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = sdpa(q, k, v, **words)
        return out if out_shape is None else out.reshape(out_shape)

    return run


def _ask_repeated(name: str, group: int, inputs: Inputs, words: dict[str, Any]) -> Callable[[], Tensor]:
    """The copy is part of the work."""

    def run() -> Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
        return _ask(name, inputs.q, k, v, words)()

    return run


@contextlib.contextmanager
def quiet() -> Any:
    """torch warns at length of each backend that cannot take a shape; its error says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


@dataclass
class Flex:
    """When to ask it, and how long its compiler may take in a whole run."""

    when: str = "needed"  # where torch has no other fused kernel
    seconds: float = 120.0
    spent: float = 0.0
    compile: Callable[..., Any] | None = None  # torch.compile; tests have another
    refused: list[str] = field(default_factory=list)

    def wanted(self, fused: bool) -> bool:
        return self.when == "always" or (self.when == "needed" and not fused)

    def way(self, shape: Shape, inputs: Inputs) -> Ways:
        """Compiled here and run once, so that its time is known; nothing where the time is used up or it fails."""
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


def _flex(shape: Shape, inputs: Inputs, compile: Callable[..., Any] | None) -> Callable[[], Tensor]:
    import torch
    from torch import _dynamo
    from torch.nn.attention import flex_attention as flex

    _dynamo.reset()  # else it gives up compiling after some shapes, and runs the slow path
    compiled = (compile or torch.compile)(flex.flex_attention, dynamic=False)
    options = inputs.options
    sinks, grouped = options.get("sinks"), shape.heads[0] != shape.heads[1]
    words: dict[str, Any] = {"enable_gqa": grouped, "score_mod": _score_mod(options), "return_lse": sinks is not None}
    mask_mod = _mask_mod(shape, options)
    if mask_mod is not None:
        device = str(inputs.q.device)
        words["block_mask"] = flex.create_block_mask(mask_mod, None, None, shape.Nq, shape.Nk, device=device)

    def run() -> Tensor:
        found = compiled(inputs.q, inputs.k, inputs.v, **words)
        if sinks is None:
            return found
        out, lse = found
        return out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)

    return run


def _score_mod(options: dict[str, Any]) -> Callable[..., Tensor] | None:
    import torch

    cap, mask = options.get("softcap"), options.get("mask")
    if cap is not None:
        return lambda score, b, h, i, j: torch.tanh(score / cap) * cap
    if mask is not None and mask.dtype is not torch.bool:
        return lambda score, b, h, i, j: score + mask[0, 0, i, j]
    return None


def _mask_mod(shape: Shape, options: dict[str, Any]) -> Callable[..., Tensor] | None:
    import torch

    mask, window = options.get("mask"), options.get("window")
    ahead = shape.Nk - shape.Nq
    if mask is not None and mask.dtype is torch.bool:
        return lambda b, h, i, j: mask[0, 0, i, j]
    if window is not None:
        left = window[0]
        return lambda b, h, i, j: (j <= i + ahead) & (j >= i + ahead - left)
    if shape.causal:
        return lambda b, h, i, j: j <= i + ahead
    return None
