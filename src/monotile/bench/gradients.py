"""Rows of the backward pass: alone, and after the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..library import ops, registry
from . import peers
from .attention import normal
from .rows import Array, Row, Sample, TimedCall

PRODUCTS = {"backward": 5, "forward+backward": 7}  # matrix products of a tile of scores
QUICK = "attention backward 8/8 D64 N1024 float32 causal"


@dataclass(frozen=True)
class GradientShape:
    """One call of attention_backward, or of attention and then attention_backward."""

    passes: str  # a key of PRODUCTS
    heads: tuple[int, int]
    N: int
    D: int
    dtype: str
    causal: bool = False

    @property
    def name(self) -> str:
        words = ["attention", self.passes, f"{self.heads[0]}/{self.heads[1]}", f"D{self.D}", f"N{self.N}", self.dtype]
        return " ".join([*words, *(["causal"] if self.causal else [])])

    @property
    def tags(self) -> dict[str, Any]:
        return {"op": self.passes, "D": self.D, "N": self.N, "dtype": self.dtype, "causal": self.causal}


def make(s: GradientShape, rng: np.random.Generator, threads: int) -> TimedCall:
    Hq, Hkv = s.heads
    q, k, v, do = (normal(rng, s.dtype, 1, h, s.N, s.D) for h in (Hq, Hkv, Hkv, Hq))
    forward: dict[str, Any] = {"causal": s.causal, "threads": threads}
    o, lse = ops.attention(q, k, v, return_lse=True, **forward)

    def backward() -> Any:
        return ops.attention_backward(do, q, k, v, o, lse, **forward)

    def both() -> Any:
        out, logsumexp = ops.attention(q, k, v, return_lse=True, **forward)
        return ops.attention_backward(do, q, k, v, out, logsumexp, **forward)

    alone = s.passes == "backward"
    call = TimedCall(backward if alone else both, sample=sample(do, q, k, v, s.causal))
    call.torch = peers.gradient_variants(do, q, k, v, causal=s.causal, alone=alone)
    products = 2.0 * Hq * s.N * s.N * s.D * PRODUCTS[s.passes] * (0.5 if s.causal else 1.0)
    call.work = {"flop": products} if s.dtype == "float32" else {}
    return call


def sample(do: Array, q: Array, k: Array, v: Array, causal: bool) -> Sample:
    """Return the reference of the first KV head and its query heads, each gradient relative to its largest element."""
    group = q.shape[1] // k.shape[1]
    given = {"do": do[:, :group], "q": q[:, :group], "k": k[:, :1], "v": v[:, :1], "causal": causal}
    exact, naive = (formula(given) for formula in registry.BACKWARD)
    names = "dq", "dk", "dv"

    def relative(gradients: Any) -> Array:
        parts = zip(names, gradients, strict=True)
        return np.concatenate([(part.astype(np.float64) / np.abs(exact[name]).max()).ravel() for name, part in parts])

    def take(found: Any) -> Array:
        dq, dk, dv = found[:3]
        return relative((dq[:, :group], dk[:, :1], dv[:, :1]))

    return Sample(take, *(relative([of[name] for name in names]) for of in (exact, naive)))


def _shapes() -> Iterator[GradientShape]:
    for passes in PRODUCTS:
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                yield from (GradientShape(passes, (8, 8), 2048, D, dtype, causal) for D in (64, 128, 256))
                yield GradientShape(passes, (16, 4), 2048, 128, dtype, causal)
    yield GradientShape("backward", (8, 8), 1024, 64, "float32", True)  # small enough for a quick run


def _row(s: GradientShape) -> Row:
    timed: Callable[[np.random.Generator, int], TimedCall] = lambda rng, threads: make(s, rng, threads)  # noqa: E731
    return Row(s.name, timed, quick=s.name == QUICK, tags=s.tags)


ROWS = tuple(map(_row, _shapes()))
