"""Rows of the backward pass on a GPU, alone and after the forward pass, beside torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...library import ops
from ..gradients import PRODUCTS
from ..rows import Array, Sample
from . import peers
from .exact import numpy_of

Tensor = Any
GradientArrays = tuple[Any, ...]  # dq, dk and dv
SHAPES = (
    (2, (32, 32), 8192, 64),
    (2, (16, 16), 8192, 128),
    (2, (32, 8), 4096, 128),
    (8, (16, 16), 1024, 128),
    (2, (16, 16), 4096, 96),
    (2, (8, 8), 8192, 256),
    (1, (8, 8), 4096, 512),
)


@dataclass(frozen=True)
class GpuGradient:
    """One call of attention_backward, or of attention and then attention_backward: batch, heads, length, head size."""

    passes: str  # a key of PRODUCTS
    B: int
    heads: tuple[int, int]
    N: int
    D: int
    causal: bool = False
    dtype: str = "bfloat16"
    quick: bool = False

    @property
    def name(self) -> str:
        words = ["attention", self.passes, f"B{self.B}", f"{self.heads[0]}/{self.heads[1]}", f"D{self.D}", f"N{self.N}"]
        return " ".join([*words, self.dtype, *(["causal"] if self.causal else [])])

    @property
    def tags(self) -> dict[str, Any]:
        return {
            "op": self.passes, "B": self.B, "D": self.D, "N": self.N, "dtype": self.dtype, "causal": self.causal,
            "grouped": self.heads[0] != self.heads[1], "extra": "",
        }  # fmt: skip

    @property
    def flops(self) -> float:
        """Five products for the backward pass, seven with the forward pass; half of the scores under causality."""
        scores = self.N * self.N * (0.5 if self.causal else 1.0)
        return 2.0 * PRODUCTS[self.passes] * self.B * self.heads[0] * scores * self.D


@dataclass
class GradientInputs:
    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool

    @property
    def group(self) -> int:
        return int(self.q.shape[1] // self.k.shape[1])


def make(shape: GpuGradient, device: str) -> GradientInputs:
    import torch

    generator = torch.Generator(device).manual_seed(shape.N + shape.D)
    sides = [(shape.B, heads, shape.N, shape.D) for heads in (shape.heads[0], *shape.heads, shape.heads[1])]
    dtype = getattr(torch, shape.dtype)
    do, q, k, v = (torch.randn(side, generator=generator, device=device, dtype=dtype) for side in sides)
    return GradientInputs(do, q, k, v, shape.causal)


def call(shape: GpuGradient, inputs: GradientInputs) -> Callable[[], Any]:
    """Return the call that is timed: it gives dq, dk and dv."""
    q, k, v = inputs.q, inputs.k, inputs.v
    options: dict[str, Any] = {"causal": inputs.causal, "backend": "nvidia"}
    o, lse = ops.attention(q, k, v, return_lse=True, **options)

    def alone() -> Any:
        return ops.attention_backward(inputs.do, q, k, v, o, lse, **options)[:3]

    def both() -> Any:
        out, logsumexp = ops.attention(q, k, v, return_lse=True, **options)
        return ops.attention_backward(inputs.do, q, k, v, out, logsumexp, **options)[:3]

    return alone if shape.passes == "backward" else both


def variants(shape: GpuGradient, inputs: GradientInputs) -> peers.Variants:
    """Return torch's autograd over each of its fused backends."""
    return {name: _autograd(name, shape, inputs) for name in peers.BACKENDS if name != "math"}


def _autograd(name: str, shape: GpuGradient, inputs: GradientInputs) -> Callable[[], Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arrays = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    backend, kept = getattr(SDPBackend, peers.BACKENDS[name]), list[Tensor]()

    def forward() -> Tensor:
        k, v = arrays[1:]
        shares = {"enable_gqa": True} if inputs.group > 1 and name != "efficient" else {}
        if inputs.group > 1 and name == "efficient":  # it does not share keys among heads
            k, v = (x.repeat_interleave(inputs.group, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(arrays[0], k, v, is_causal=inputs.causal, **shares)

    def run() -> Any:
        if shape.passes != "backward":
            return torch.autograd.grad(forward(), arrays, inputs.do)
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], arrays, inputs.do, retain_graph=True)

    return run


# ---- exact results ---------------------------------------------------------------------------------------------------


def sample(inputs: GradientInputs) -> Sample:
    """Return the reference of the last KV head of the last sequence, each gradient relative to its largest element."""
    exact, naive = (_formula(inputs, rounded) for rounded in (False, True))
    largest = [float(x.abs().max()) for x in exact]

    def relative(gradients: GradientArrays) -> Array:
        parts = zip(gradients, largest, strict=True)
        return np.concatenate([numpy_of(part).astype(np.float64).ravel() / size for part, size in parts])

    def take(found: Any) -> Array:
        dq, dk, dv = found
        return relative((dq[-1:, -inputs.group :], dk[-1:, -1:], dv[-1:, -1:]))

    return Sample(take, relative(exact), relative(naive))


def _formula(inputs: GradientInputs, rounded: bool) -> GradientArrays:
    """The gradients of one KV head in float64; or in float32, with weights and gradients rounded as arrays are."""
    import torch

    compute, store = (torch.float32, inputs.q.dtype) if rounded else (torch.float64, torch.float64)
    do, q = (x[-1:, -inputs.group :].to(compute) for x in (inputs.do, inputs.q))
    k, v = (x[-1:, -1:].to(compute) for x in (inputs.k, inputs.v))
    scale = q.shape[3] ** -0.5
    S = q @ k.transpose(2, 3) * scale
    if inputs.causal:
        S = S.masked_fill(~torch.ones(S.shape[2:], dtype=torch.bool, device=S.device).tril(), -torch.inf)
    P = torch.softmax(S, 3)
    O = (P.to(store).to(compute) @ v).to(store).to(compute)
    dS = P * (do @ v.transpose(2, 3) - (do * O).sum(3, keepdim=True))
    P, dS = (x.to(store).to(compute) for x in (P, dS))
    dk, dv = (dS.transpose(2, 3) @ q * scale).sum(1, keepdim=True), (P.transpose(2, 3) @ do).sum(1, keepdim=True)
    return tuple(x.to(store) for x in (dS @ k * scale, dk, dv))


def _shapes() -> Iterator[GpuGradient]:
    for B, heads, N, D in SHAPES:
        yield from (
            GpuGradient("backward", B, heads, N, D, c, quick=c and D == 128 and N == 8192) for c in (False, True)
        )
    yield from (GpuGradient("forward+backward", 2, (16, 16), 8192, 128, causal) for causal in (False, True))


ROWS = tuple(_shapes())
