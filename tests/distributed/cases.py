"""Calls of attention across ranks: the whole sequence, options, and the exact results in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from monotile.library import registry

Array = np.ndarray[Any, Any]
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01], np.float32)


def distance_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 1.25 - (q_idx - kv_idx) * 0.01 * SLOPES[h]


def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx + kv_idx + h) % 3 != 0) & (kv_idx != 5)


@dataclass(frozen=True)
class Sequence:
    """A call on a whole sequence."""

    name: str
    N: int
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (16, 16)
    dtype: str = "float32"
    backend: str = "interpreter"
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    methods: tuple[str, ...] = ("ring", "all_gather", "all_to_all")
    repeated: bool = False  # a second run must give the same bits
    sinks: bool = False
    documents: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def tensor(self, n: int, *shape: int) -> Array:
        found = np.random.default_rng(n).standard_normal(shape, dtype=np.float32)
        return registry.from_device(torch.from_numpy(found).to(getattr(torch, self.dtype)))

    @cached_property
    def arrays(self) -> dict[str, Array]:
        (Hq, H), (D, Dv), N = self.heads, self.sizes, self.N
        shapes = {"q": (1, Hq, N, D), "k": (1, H, N, D), "v": (1, H, N, Dv), "do": (1, Hq, N, Dv)}
        found = {name: self.tensor(n, *shape) for n, (name, shape) in enumerate(shapes.items())}
        found["dlse"] = np.random.default_rng(9).standard_normal((1, Hq, N), dtype=np.float32)
        if self.sinks:
            found["sinks"] = np.random.default_rng(8).standard_normal(Hq, dtype=np.float32)
        return found

    @cached_property
    def results(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Output, logsumexp and gradients in float64, and by the plain formula."""
        given = {**self.arrays, **self.options}
        if self.documents is not None:
            document = np.searchsorted(self.documents, np.arange(self.N), side="right")
            given["mask"] = (document[:, None] == document[None, :])[None, None]
        without = {name: value for name, value in given.items() if name not in ("do", "dlse")}
        exact, naive = ({} for _ in range(2))  # type: dict[str, Array], dict[str, Array]
        for found, forward, backward in (
            (exact, registry.OPS["attention"].exact, registry.OPS["attention_backward"].exact),
            (naive, registry.OPS["attention"].naive, registry.OPS["attention_backward"].naive),
        ):
            found.update(forward({**without}))
            found.update(backward(given))
        return exact, naive


SEQUENCES = (
    Sequence("full", 24, worlds=(2, 3)),
    Sequence("causal, odd length", 37, repeated=True, options={"causal": True}),
    Sequence("causal, groups of 6, softcap, scale", 40, (6, 1), (16, 8), worlds=(3, 4), options={
        "causal": True, "softcap": 2.0, "scale": -0.4}),
    Sequence("window", 45, worlds=(2, 4), options={"causal": True, "window": (6, 0)}),
    Sequence("window on both sides in documents, sinks", 50, (3, 3), sinks=True, documents=(0, 21, 50), worlds=(2, 3),
             options={"window": (7, 9)}),
    Sequence("sinks and mods", 33, sinks=True, worlds=(2, 4), options={
        "causal": True, "score_mod": distance_bias, "mask_mod": every_third}),
    Sequence("documents", 48, documents=(0, 5, 6, 30, 48), worlds=(3, 4), options={"causal": True}),
    Sequence("fewer positions than ranks", 3, worlds=(4,), options={"causal": True}),
    Sequence("bfloat16", 48, (4, 2), (16, 16), "bfloat16", worlds=(3,), options={"causal": True}),
    Sequence("cpu backend", 64, backend="cpu", repeated=True, worlds=(2,), methods=("ring",), options={"causal": True}),
)  # fmt: skip
