"""`attention_varlen` as a torch operator, with gradients: as torch_operator.py has `attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentKind, BadOption
from . import varlen, varlen_backward
from .inputs import read_window
from .torch_operator import LIBRARY, OPTIONS, call_operator, mods_of, no_second, no_tangent, number_of, scoring_options

ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, Tensor? sinks"
LIBRARY.define(f"attention_varlen({ARRAYS}, {OPTIONS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"attention_varlen_backward(Tensor do, Tensor o, Tensor lse, Tensor dlse, {ARRAYS}, {OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


class VarlenArguments(NamedTuple):
    """The arguments of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    sinks: Tensor | None
    causal: str
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    mods: int
    backend: str | None
    threads: int | None

    @property
    def options(self) -> dict[str, Any]:
        return {"sinks": self.sinks, **scoring_options(*self[6:])}


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, sinks: Tensor | None, causal: Any,
    window: Any, score_mod: Any, mask_mod: Any, return_lse: bool, check: bool, **options: Any,
) -> Any:  # fmt: skip
    """`varlen.attention_varlen` as an operator. `options` are its scale, softcap, backend and threads."""
    if check and (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
        raise BadOption("check=True reads the offsets, which have no contents in a trace; leave it out there")
    if check:
        varlen.check_offsets(q, k, q_offsets, k_offsets)
    left, right = (None, None) if window is None else read_window(window)
    number, mods = number_of(score_mod, mask_mod)
    given = VarlenArguments(q, k, v, q_offsets, k_offsets, sinks, str(causal), left, right, mods=number, **options)
    o, lse = call_operator("attention_varlen", _Varlen, given, given[:6])
    del mods  # an entry of the table until here
    return (o, lse) if return_lse else o


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = VarlenArguments(*args)
    found: tuple[Tensor, Tensor] = varlen.attention_varlen(*given[:5], **given.options, return_lse=True)
    return found


def _forward_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = VarlenArguments(*args)[:3]
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    given = VarlenArguments(*args)
    q, k, v, *offsets = given[:5]
    found = varlen_backward.attention_varlen_backward(do, q, k, v, o, lse, *offsets, dlse=dlse, **given.options)
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in found[:4])


def _backward_shapes(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, sinks = VarlenArguments(*args)[:6]
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q, k, v, sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = VarlenArguments(*inputs)
    ctx.save_for_backward(*given[:6], *output)
    ctx.rest, ctx.mods = given[6:], mods_of(given.mods)


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    *arrays, o, lse = ctx.saved_tensors
    given = do, o, lse, dlse, *arrays, *ctx.rest
    dq, dk, dv, dsinks = call_operator("attention_varlen_backward", _VarlenBackward, given, given[:10])
    return dq, dk, dv, None, None, None if arrays[5] is None else dsinks, *[None] * len(ctx.rest)


LIBRARY.impl("attention_varlen", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_varlen_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("monotile::attention_varlen", _forward_shapes, lib=LIBRARY)
torch.library.register_fake("monotile::attention_varlen_backward", _backward_shapes, lib=LIBRARY)
torch.library.register_autograd("monotile::attention_varlen", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("monotile::attention_varlen_backward", no_second, lib=LIBRARY)


def _no_vmap(*args: Any) -> Any:
    raise ArgumentKind("vmap has no rule for attention_varlen; pack the sequences of the whole batch into one call")


class _Varlen(torch.autograd.Function):  # type: ignore[misc]
    """The operator under torch.func, whose transforms know functions and not operators' derivatives."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.monotile.attention_varlen(*args)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(no_tangent)
    vmap = staticmethod(_no_vmap)


class _VarlenBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.monotile.attention_varlen_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to keep."""

    backward = staticmethod(no_second)
    jvp = staticmethod(no_tangent)
    vmap = staticmethod(_no_vmap)
