"""The rows on a GPU: forward, decode and extend attention, and the host time of a call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...library.block_mask import block_mask
from ..rows import kind_of_call

Tensor = Any
MASKED_LENGTH = 8192  # at LONG a mask would be larger than the keys and values of all heads
LONG = 16384
WINDOW, SOFTCAP, SINK_MEAN = 4096, 20.0, 4.0
NEAR, DOCUMENT, PREFIX = 1024, 700, 1024  # keys that a row of the MODS sees: in its window, its document, in front
VISIBLE = 512  # keys that a call of few queries sees in the rows "512 visible"


@dataclass(frozen=True)
class GpuShape:
    """One call of attention: batch, heads, queries, keys, head size, dtype; `extra` is a key of EXTRAS, MODS or
    FEW_VISIBLE, or empty.

    `Dv` is given where v is a view of the first columns of k, as in MLA.
    """

    B: int
    heads: tuple[int, int]
    Nq: int
    Nk: int
    D: int
    causal: bool = False
    extra: str = ""
    dtype: str = "bfloat16"
    host: bool = False  # time the host's part of the call instead of the GPU's
    Dv: int | None = None

    @property
    def kind(self) -> str:
        return kind_of_call(self.heads, self.Nq, self.Nk)

    @property
    def name(self) -> str:
        words = ["host time" if self.host else "attention", self.kind, f"B{self.B}", f"{self.heads[0]}/{self.heads[1]}"]
        words += [*([f"Nq{self.Nq}"] if self.kind == "extend" else []), f"D{self.D}"]
        words += [*([f"Dv{self.Dv}"] if self.Dv else []), f"N{self.Nk}", self.dtype, *(["MLA"] if self.Dv else [])]
        return " ".join([*words, *(["causal"] if self.causal else []), *([self.extra] if self.extra else [])])

    @property
    def tags(self) -> dict[str, Any]:
        return {
            "op": "host" if self.host else self.kind, "B": self.B, "D": self.D, "N": self.Nk, "dtype": self.dtype,
            "causal": self.causal, "grouped": self.heads[0] != self.heads[1], "extra": self.extra, "Nq": self.Nq,
            "group": self.heads[0] // self.heads[1], "MLA": self.Dv is not None,
        }  # fmt: skip

    @property
    def quick(self) -> bool:
        return self in QUICK

    @property
    def pairs(self) -> float:
        """Scores of one head that count as work: half of them under causality; with few visible keys, a window,
        documents or a prefix, the visible ones."""
        N = self.Nk
        if self.few_visible:
            return self.Nq * VISIBLE
        if "window" in self.extra:
            width = min((WINDOW if self.extra == "window" else NEAR) + 1, N)
            return width * self.Nq - width * (width - 1) / 2
        if "documents" in self.extra:
            return N // DOCUMENT * DOCUMENT**2 + (N % DOCUMENT) ** 2
        if "prefix" in self.extra:
            return N * (N + 1) / 2 + min(PREFIX, N) * (min(PREFIX, N) - 1) / 2
        return self.Nq * N * (0.5 if self.causal else 1.0)

    @property
    def few_visible(self) -> bool:
        return "visible" in self.extra

    @property
    def flops(self) -> float:
        return 2.0 * self.B * self.heads[0] * self.pairs * (self.D + (self.Dv or self.D))

    @property
    def key_bytes(self) -> float:
        """Bytes of visible keys and values; values that lie in the keys count once."""
        columns, keys = self.D if self.Dv else 2 * self.D, VISIBLE if self.few_visible else self.Nk
        return float(self.B * self.heads[1] * keys * columns * (4 if self.dtype == "float32" else 2))

    @property
    def plain(self) -> GpuShape:
        """The same call without its extra; a windowed call stays causal."""
        return replace(self, extra="")


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @property
    def on_slice(self) -> Inputs:
        """The call on a slice of the keys that holds the visible ones. Several queries still need their window."""
        Nq, window = self.q.shape[2], self.options.get("window")
        visible = slice(-(VISIBLE + Nq - 1), None) if window else slice(VISIBLE)
        options = {"window": window} if window and Nq > 1 else {}
        return Inputs(self.q, self.k[:, :, visible], self.v[:, :, visible], options)


def prepared(shape: GpuShape, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a block mask in place of a mask_mod, made beforehand like FlexAttention's."""
    mask_mod = options.get("mask_mod")
    if mask_mod is None:
        return options
    return options | {"mask_mod": block_mask(mask_mod, shape.B, shape.heads[0], shape.Nq, shape.Nk)}


def make(shape: GpuShape, device: str) -> Inputs:
    """Make normal inputs, equal in every run of a row on one kind of device."""
    import torch

    generator = torch.Generator(device).manual_seed(zlib.crc32(shape.name.encode()))
    dtype = getattr(torch, shape.dtype)

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, device=device, dtype=dtype)

    q, k = (normal(shape.B, h, n, shape.D) for h, n in zip(shape.heads, (shape.Nq, shape.Nk), strict=True))
    v = k[..., : shape.Dv] if shape.Dv else normal(*k.shape)
    options: dict[str, Any] = {"causal": shape.causal}
    if shape.extra:
        options |= (EXTRAS | MODS | FEW_VISIBLE)[shape.extra](shape, generator, device)
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


def _documents(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    """Packed documents: a key is visible in its own one."""
    import torch

    document = torch.arange(s.Nk, device=device, dtype=torch.int32) // DOCUMENT
    return {"mask_mod": lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]}


def _prefix(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx < PREFIX) | (kv_idx <= q_idx)}


def _alibi(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    import torch

    slopes = 2.0 ** (-8.0 / s.heads[0] * torch.arange(1, s.heads[0] + 1, device=device))
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)}


def _near_window(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"window": (NEAR, 0)}


def _near_mod(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx - kv_idx <= NEAR)}


def _near_keys(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    return {"window": (VISIBLE - 1, 0)}


def _padded_bool(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    """Hide the unused part of a cache that is padded to its capacity."""
    import torch

    return {"mask": (torch.arange(s.Nk, device=device) < VISIBLE).expand(1, 1, s.Nq, s.Nk).contiguous()}


def _padded_additive(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    import torch

    hidden = ~_padded_bool(s, generator, device)["mask"]
    zeros = torch.zeros(hidden.shape, device=device, dtype=getattr(torch, s.dtype))
    return {"mask": zeros.masked_fill_(hidden, float("-inf"))}


def _padded_mod(s: GpuShape, generator: Any, device: str) -> dict[str, Any]:
    import torch

    lengths = torch.full((s.B,), VISIBLE, device=device, dtype=torch.int32)
    return {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]}


EXTRAS: dict[str, Callable[[GpuShape, Any, str], dict[str, Any]]] = {
    "bool mask": _bool_mask,
    "additive mask": _additive_mask,
    "window": _window,
    "softcap": _softcap,
    "sinks": _sinks,
}
MODS: dict[str, Callable[[GpuShape, Any, str], dict[str, Any]]] = {  # beside FlexAttention alone
    "documents by mask_mod": _documents,
    "prefix-LM by mask_mod": _prefix,
    "alibi by score_mod": _alibi,
    "near window": _near_window,
    "near window by mask_mod": _near_mod,
}
FEW_VISIBLE = {
    f"{VISIBLE} visible by window": _near_keys,
    f"{VISIBLE} visible by bool mask": _padded_bool,
    f"{VISIBLE} visible by additive mask": _padded_additive,
    f"{VISIBLE} visible by mask_mod": _padded_mod,
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
SHORT = (
    *((B, (16, 16), N, D) for D in (64, 128) for B, N in ((16, 257), (8, 512), (4, 1024))),
    (2, (16, 16), 2048, 64),
    (8, (16, 16), 512, 96),
)
OTHER_SIZES = (
    *((2, (16, 16), 4096, D) for D in (72, 80, 96, 112, 160)),
    (1, (16, 4), 8192, 192),
    (2, (8, 8), 4096, 224),
)  # no powers of two
DECODE = (
    (1, (32, 8), 128, (4096, 32768, 131072)),
    (8, (32, 8), 128, (4096, 32768, 131072)),
    (64, (32, 8), 128, (4096, 32768)),
    (1, (32, 8), 64, (32768, 131072)),
    (1, (16, 2), 256, (32768, 131072)),
    (1, (16, 2), 512, (32768, 131072)),
    *((1, (16, 16), D, (16384,)) for D in (64, 96, 128)),  # one row of a KV head
    (1, (8, 8), 256, (16384,)),
    (128, (16, 16), 64, (700,)),
)
EXTEND = (
    GpuShape(1, (64, 1), 1, 32768, 128),
    GpuShape(8, (64, 1), 1, 8192, 128),
    GpuShape(8, (32, 8), 4, 8192, 128),
    GpuShape(64, (32, 8), 4, 4096, 128),
    *(GpuShape(1, (32, 8), Nq, 32768, 128) for Nq in (8, 16, 64, 128)),
    GpuShape(8, (32, 8), 16, 8192, 128),
    GpuShape(1, (16, 2), 16, 32768, 256),
    GpuShape(1, (8, 8), 9, 131072, 64),
    GpuShape(128, (16, 1), 1, 4096, 576, Dv=512),
    GpuShape(128, (128, 1), 1, 4096, 576, Dv=512),
    GpuShape(32, (16, 1), 1, 8192, 576, Dv=512),
)


def _shapes() -> Iterator[GpuShape]:
    """Yield short rows first, so that a run that is stopped has most of its rows."""
    yield GpuShape(1, (2, 2), 128, 128, 64, host=True)
    yield GpuShape(1, (4, 2), 1, 128, 64, host=True)
    for B, heads, D, lengths in DECODE:
        yield from (GpuShape(B, heads, 1, N, D) for N in lengths)
    yield from EXTEND
    for B, heads, N, D in (*SHORT, *FORWARD):
        yield from (GpuShape(B, heads, N, N, D, causal) for causal in (False, True))
    for extra in EXTRAS:
        N = MASKED_LENGTH if "mask" in extra else LONG
        yield GpuShape(1, (16, 16), N, N, 128, extra == "window", extra)
    yield from (GpuShape(64, (32, 8), 1, 32768, 128, extra=extra) for extra in FEW_VISIBLE)


def _later_shapes() -> Iterator[GpuShape]:
    """Yield rows that the first baselines do not have, after all others: a run that is stopped leaves them out."""
    for extra in MODS:
        yield GpuShape(
            1, (16, 16), MASKED_LENGTH, MASKED_LENGTH, 128, extra in ("alibi by score_mod", "near window"), extra
        )
    for B, heads, N, D in OTHER_SIZES:
        yield from (GpuShape(B, heads, N, N, D, causal) for causal in (False, True))


ROWS = tuple(_shapes())
LATER = tuple(_later_shapes())
QUICK = {
    *(row for row in ROWS if row.host),
    GpuShape(1, (32, 8), 1, 32768, 128),
    GpuShape(1, (16, 2), 1, 131072, 512),
    GpuShape(1, (32, 8), 16, 32768, 128),
    GpuShape(128, (128, 1), 1, 4096, 576, Dv=512),
    GpuShape(1, (32, 32), LONG, LONG, 64, True),
    *(GpuShape(1, (16, 16), LONG, LONG, 128, causal) for causal in (False, True)),
    GpuShape(1, (8, 8), LONG, LONG, 256),
    GpuShape(2, (16, 2), 8192, 8192, 512),
}
