"""Attention of a group of ranks as a torch operator: `torch.ops.monotile.context_attention`, with gradients. The group
is passed by its name, the caller's functions by their number."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BadOption, NoGradient
from ..launch.captures import const_key
from ..library.mod_table import mods_of
from . import gathered, groups, heads, ring
from .compute import RankPart, RowTensors
from .schedule import Sight, schedule

ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor? sinks"
OPTIONS = (
    "str group, str method, str layout, int length, int[]? documents, bool causal, int? left, int? right,"
    " float? scale, float? softcap, int mods, str? backend, int? threads,"
    " bool return_lse"
)
RESULTS = "Tensor o, Tensor lse, Tensor rows, Tensor head_o, Tensor head_lse"
LIBRARY = torch.library.Library("monotile", "FRAGMENT")
LIBRARY.define(f"context_attention({ARRAYS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define(
    f"context_attention_backward(Tensor do, Tensor? dlse, {RESULTS}, {ARRAYS}, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
COMPARED = "method", "layout", "length", "documents", "causal", "left", "right", "scale", "softcap", "return_lse"
METHODS = ("ring", "all_gather", "all_to_all")


class ContextCall(NamedTuple):
    """The arguments of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    group: str
    method: str
    layout: str
    length: int
    documents: list[int] | None
    causal: bool
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    mods: int
    backend: str | None
    threads: int | None
    return_lse: bool  # on every rank: the gradient of the logsumexp is exchanged

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same on every rank, but for the functions."""
        (B, Hq, _, D), (_, Hkv, _, Dv) = self.q.shape, self.v.shape
        named = self._asdict()
        shapes = {"batch": B, "query heads": Hq, "key-value heads": Hkv, "head sizes": (D, Dv)}
        found = {"function": "attention", **shapes, "dtype": self.q.dtype, "sinks": self.sinks is not None}
        return {**found, **{name: named[name] for name in COMPARED}}

    def agree(self) -> None:
        """Compare the call with those of other ranks, if it is the first of its kind."""
        facts, mods = self.facts, mods_of(self.mods)
        functions = {"score_mod": mods.score_mod, "mask_mod": mods.mask_mod}
        key = repr(facts), *(None if f is None else const_key(f) for f in functions.values())
        groups.resolve(self.group).agree(key, lambda: {**facts, **functions}, self.q)

    def part(self, *, backward: bool = False) -> RankPart:
        group, mods = groups.resolve(self.group), mods_of(self.mods)
        documents = None if self.documents is None else tuple(self.documents)
        sight = Sight(self.length, self.causal, self.left, self.right, documents)
        options = {"scale": self.scale, "softcap": self.softcap, "backend": self.backend, "threads": self.threads}
        plan = schedule(sight, group.size, group.rank, self.layout)
        arrays, tag = (self.q, self.k, self.v, self.sinks), groups.tag_of(backward, *self.facts.values())
        return RankPart(group, plan, *arrays, mods.score_mod, mods.mask_mod, options, tag)

    @property
    def sent_method(self) -> Any:
        """The module that computes the method. Windows have few keys to send: they come all at once."""
        windowed = Sight(self.length, self.causal, self.left, self.right).windowed
        return gathered if self.method == "all_gather" or windowed else ring


def check_method(method: Any) -> None:
    if method not in METHODS:
        raise BadOption(f"method is 'ring', 'all_gather' or 'all_to_all', found {method!r}")


@torch.no_grad()  # type: ignore[untyped-decorator]
def _forward(*args: Any) -> tuple[Tensor, ...]:
    given = ContextCall(*args)
    given.agree()
    part = given.part()
    if given.method == "all_to_all":
        return heads.forward(part)
    none = given.q.new_empty(0), given.q.new_empty(0), given.q.new_empty(0, dtype=torch.float32)
    return *given.sent_method.forward(part), *none


def _forward_shapes(*args: Any) -> tuple[Tensor, ...]:
    given = ContextCall(*args)
    q, v = given.q, given.v
    o, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if given.method != "all_to_all":
        return o, lse, q.new_empty(0), q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    group = groups.resolve(given.group)
    own = heads.heads_of(group.rank, group.size, q.shape[1], given.k.shape[1])
    B, H, N, D, Dv = q.shape[0], own.queries.length, given.length, q.shape[3], v.shape[3]
    kept = (
        q.new_empty((N, B, own.width(D, Dv))),
        q.new_empty((B, H, N, Dv)),
        q.new_empty((B, H, N), dtype=torch.float32),
    )
    return o, lse, *kept


@torch.no_grad()  # type: ignore[untyped-decorator]
def _backward(do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    kept, given = args[:3], ContextCall(*args[3:])
    if given.return_lse:
        dlse = torch.zeros_like(lse) if dlse is None else dlse
    rows = RowTensors(do.contiguous(), o, lse, dlse if given.return_lse else None)
    part = given.part(backward=True)
    with mods_of(given.mods).as_called():
        if given.method == "all_to_all":
            *found, dsinks = heads.backward(part, rows, kept)
        else:
            *found, dsinks = given.sent_method.backward(part, rows)
    return *found, given.q.new_empty(0) if dsinks is None else dsinks


def _backward_shapes(do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    given = ContextCall(*args[3:])
    sinks = given.q.new_empty(0) if given.sinks is None else given.sinks.new_empty(given.sinks.shape)
    return *(t.new_empty(t.shape) for t in (given.q, given.k, given.v)), sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given = ContextCall(*inputs)
    ctx.save_for_backward(*given[:4], *output)
    ctx.rest, ctx.entry = given[4:], mods_of(given.mods)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None, *kept: Any) -> tuple[Any, ...]:
    q, k, v, sinks, o, lse, *head_results = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    derivative = torch.ops.monotile.context_attention_backward
    dq, dk, dv, dsinks = derivative(do, dlse, o, lse, *head_results, q, k, v, sinks, *ctx.rest)
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * len(ctx.rest)


def _no_second(*args: Any) -> None:
    raise NoGradient("attention has no second derivative: its gradients cannot be differentiated")


LIBRARY.impl("context_attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("context_attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("monotile::context_attention", _forward_shapes, lib=LIBRARY)
torch.library.register_fake("monotile::context_attention_backward", _backward_shapes, lib=LIBRARY)
torch.library.register_autograd("monotile::context_attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("monotile::context_attention_backward", _no_second, lib=LIBRARY)
