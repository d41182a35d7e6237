"""The rows on a GPU: forward and decode attention, and the host time of a call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Tensor = Any
MASKED_LENGTH = 8192  # at LONG a mask would be larger than the keys and values of all heads
LONG = 16384
WINDOW, SOFTCAP, SINK_MEAN = 4096, 20.0, 4.0


@dataclass(frozen=True)
class GpuShape:
    """One call of attention: batch, heads, queries, keys, head size, dtype; `extra` is a key of EXTRAS or empty."""

    B: int
    heads: tuple[int, int]
    Nq: int
    Nk: int
    D: int
    causal: bool = False
    extra: str = ""
    dtype: str = "bfloat16"
    host: bool = False  # time the host's part of the call instead of the GPU's

    @property
    def name(self) -> str:
        kind = "decode" if self.Nq == 1 else "prefill"
        words = ["host time" if self.host else "attention", kind, f"B{self.B}", f"{self.heads[0]}/{self.heads[1]}"]
        words += [f"D{self.D}", f"N{self.Nk}", self.dtype]
        return " ".join([*words, *(["causal"] if self.causal else []), *([self.extra] if self.extra else [])])

    @property
    def tags(self) -> dict[str, Any]:
        kind = "host" if self.host else "decode" if self.Nq == 1 else "prefill"
        return {
            "op": kind, "B": self.B, "D": self.D, "N": self.Nk, "dtype": self.dtype, "causal": self.causal,
            "grouped": self.heads[0] != self.heads[1], "extra": self.extra,
        }  # fmt: skip

    @property
    def quick(self) -> bool:
        return self in QUICK

    @property
    def pairs(self) -> float:
        """Scores of one head that count as work: half of them under causality; with a window, the visible ones."""
        if self.extra == "window":
            width = min(WINDOW + 1, self.Nk)
            return width * self.Nq - width * (width - 1) / 2
        return self.Nq * self.Nk * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        return 4.0 * self.B * self.heads[0] * self.pairs * self.D

    @property
    def key_bytes(self) -> float:
        """Bytes of keys and values."""
        return 2.0 * self.B * self.heads[1] * self.Nk * self.D * (4 if self.dtype == "float32" else 2)

    @property
    def plain(self) -> GpuShape:
        """The same call without its extra; a windowed call stays causal."""
        return GpuShape(self.B, self.heads, self.Nq, self.Nk, self.D, self.causal, "", self.dtype, self.host)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def make(shape: GpuShape, device: str) -> Inputs:
    """Make normal inputs, equal in every run of a row on one kind of device."""
    import torch

    generator = torch.Generator(device).manual_seed(zlib.crc32(shape.name.encode()))
    dtype = getattr(torch, shape.dtype)

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, device=device, dtype=dtype)

    sides = ((shape.heads[0], shape.Nq), (shape.heads[1], shape.Nk), (shape.heads[1], shape.Nk))
    q, k, v = (normal(shape.B, heads, length, shape.D) for heads, length in sides)
    options: dict[str, Any] = {"causal": shape.causal}
    if shape.extra:
        options |= EXTRAS[shape.extra](shape, generator, device)
    return Inputs(q, k, v, options)


def _bool_mask(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    """Hide three positions of ten, in every block."""
    import torch

    return {"mask": torch.rand((1, 1, s.Nq, s.Nk), generator=generator, device=device) < 0.7}


def _additive_mask(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    import torch

    dtype = getattr(torch, s.dtype)
    return {"mask": torch.randn((1, 1, s.Nq, s.Nk), generator=generator, device=device, dtype=dtype)}


def _window(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"window": (WINDOW, 0)}


def _softcap(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"softcap": SOFTCAP}


def _sinks(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    import torch

    return {"sinks": SINK_MEAN + torch.randn(s.heads[0], generator=generator, device=device)}


EXTRAS: dict[str, Callable[[GpuShape, Any, str], dict[str, Any]]] = {
    "bool mask": _bool_mask,
    "additive mask": _additive_mask,
    "window": _window,
    "softcap": _softcap,
    "sinks": _sinks,
}

FORWARD = (
    (1, (32, 32), LONG, 64),
    (1, (16, 16), LONG, 128),
    (1, (32, 8), LONG, 128),
    (8, (32, 8), 2048, 128),
    (1, (8, 8), LONG, 256),
    (2, (16, 2), 8192, 512),
    (8, (8, 8), 2048, 512),
)
DECODE = (
    (1, (32, 8), 128, (4096, 32768, 131072)),
    (8, (32, 8), 128, (4096, 32768, 131072)),
    (64, (32, 8), 128, (4096, 32768)),
    (1, (32, 8), 64, (32768, 131072)),
    (1, (16, 2), 256, (32768, 131072)),
    (1, (16, 2), 512, (32768, 131072)),
)


def _shapes() -> Iterator[GpuShape]:
    """Yield short rows first, so that a run that is stopped has most of its rows."""
    yield GpuShape(1, (2, 2), 128, 128, 64, host=True)
    yield GpuShape(1, (4, 2), 1, 128, 64, host=True)
    for B, heads, D, lengths in DECODE:
        yield from (GpuShape(B, heads, 1, N, D) for N in lengths)
    for B, heads, N, D in FORWARD:
        yield from (GpuShape(B, heads, N, N, D, causal) for causal in (False, True))
    for extra in EXTRAS:
        N = MASKED_LENGTH if "mask" in extra else LONG
        yield GpuShape(1, (16, 16), N, N, 128, extra == "window", extra)


ROWS = tuple(_shapes())
QUICK = {
    *(row for row in ROWS if row.host),
    GpuShape(1, (32, 8), 1, 32768, 128),
    GpuShape(1, (16, 2), 1, 131072, 512),
    GpuShape(1, (32, 32), LONG, LONG, 64, True),
    *(GpuShape(1, (16, 16), LONG, LONG, 128, causal) for causal in (False, True)),
    GpuShape(1, (8, 8), LONG, LONG, 256),
    GpuShape(2, (16, 2), 8192, 8192, 512),
}
