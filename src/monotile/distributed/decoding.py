"""Decode across devices: each rank has some of the cached keys, all ranks have the queries, and one small all-gather of
outputs and logsumexps joins what they computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentShape, BadOption, MonotileError
from ..launch.captures import const_key
from ..library import merging, ops, torch_calls
from . import groups, mods, transport

UNBOUNDED = 2**30


def decode(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, causal: bool = False, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, return_lse: bool = False,
    backend: str | None = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """Attention of the same few queries on every rank to a cache that is divided among the ranks: q (B, Hq, Nq, D),
    k (B, Hkv, m, D) and v (B, Hkv, m, Dv) with any m on each rank. Every rank gets the same result. Without
    `q_positions` (Nq,) and `k_positions` (m,) every query sees every key. See docs/guide/distributed.md."""
    torch_calls.refuse_gradients("decode", q, k, v, sinks)
    own = groups.resolve(group)
    chosen = {"causal": causal, "window": window, "score_mod": score_mod, "mask_mod": mask_mod}
    try:
        places = _in_places(q, k, chosen, (q_positions, k_positions))
    except MonotileError:
        own.refuse(q)
        raise
    functions = tuple(None if f is None else const_key(f) for f in (score_mod, mask_mod))
    shapes = tuple(q.shape), k.shape[-3], v.shape[-3:-2] + v.shape[-1:], q.dtype, sinks is None
    fields = {"function": "decode", "shapes": shapes, "scale": scale, "softcap": softcap, **chosen}
    own.agree(("decode", shapes, scale, softcap, causal, window, *functions), lambda: fields, q)
    once = sinks if own.rank == 0 else None  # sinks count once
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "backend": backend, "threads": threads}
    o, lse = ops.attention(q, k, v, sinks=once, return_lse=True, **places, **options)
    if own.size > 1:
        o, lse = _join(own, o, lse, backend, threads)
    return (o, lse) if return_lse else o


def _join(own: groups.Group, o: Tensor, lse: Tensor, backend: str | None, threads: int | None) -> tuple[Tensor, Tensor]:
    """Join the parts of all ranks, in the order of ranks: the same bits on each of them."""
    parts = (o.contiguous(), lse.contiguous())
    sizes = [t.numel() * t.element_size() for t in parts]
    record = torch.cat([t.view(-1).view(torch.uint8) for t in reversed(parts)])
    found = [record.split(sizes[::-1]) for record in transport.gather(own, record)]
    lses = [a.view(torch.float32).view(lse.shape) for a, _ in found]
    outs = [b.clone().view(o.dtype).view(o.shape) for _, b in found]
    joined: tuple[Tensor, Tensor] = merging.merge_lse(outs, lses, backend=backend, threads=threads)
    return joined


def _in_places(q: Tensor, k: Tensor, chosen: dict[str, Any], positions: tuple[Tensor | None, ...]) -> dict[str, Any]:
    """The options of position as functions of the positions that rows and keys have."""
    if not any(chosen.values()):
        return {}
    if positions[0] is None or positions[1] is None:
        asked = ", ".join(name for name, value in chosen.items() if value)
        raise BadOption(f"{asked} asks for positions; pass q_positions and k_positions, those of this rank's keys")
    for name, given, length in zip(("q_positions", "k_positions"), positions, (q.shape[-2], k.shape[-2]), strict=True):
        if given is not None and tuple(given.shape) != (length,):
            raise ArgumentShape(f"{name} has shape {tuple(given.shape)}; there are {length} of them")
    i, j = (t.to(device=q.device, dtype=torch.int32) for t in positions if t is not None)
    left, right = chosen["window"] or (None, None)
    right = 0 if chosen["causal"] else right
    mask = None
    if left is not None or right is not None:
        mask = mods.within(i, j, *(UNBOUNDED if side is None else min(side, UNBOUNDED) for side in (left, right)))
    places = i, j, 0
    if chosen["mask_mod"] is not None:
        mask = mods.both(mods.mask_at(chosen["mask_mod"], *places), mask)
    score = None if chosen["score_mod"] is None else mods.score_at(chosen["score_mod"], *places)
    return {"score_mod": score, "mask_mod": mask}
