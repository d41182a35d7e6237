"""`attention_varlen` as a torch operator, with gradients: as torch_operator.py has `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentKind, BadOption
from . import varlen, varlen_backward
from .inputs import read_window
from .mod_table import arrays_of, mods_of, number_of, watched
from .torch_operator import (
    LIBRARY,
    OPTIONS,
    READING,
    call_operator,
    no_gradients,
    no_second,
    no_tangent,
    register,
    scoring_options,
    split_saved,
)

ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, Tensor? sinks"
for _name, _read in READING.items():
    LIBRARY.define(f"attention_varlen{_name}({ARRAYS}, {OPTIONS}{_read}) -> (Tensor, Tensor)")
    LIBRARY.define(
        f"attention_varlen_backward{_name}(Tensor do, Tensor o, Tensor lse, Tensor dlse, {ARRAYS}, {OPTIONS}{_read})"
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
    read: Sequence[Tensor] = ()  # by functions of a compiled graph

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
    read = arrays_of(score_mod, mask_mod) + watched(number, q, k, v, sinks)
    o, lse = call_operator("attention_varlen", _Varlen, given[:-1], given[:6], read)
    del mods  # an entry of the table until here
    return (o, lse) if return_lse else o


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = VarlenArguments(*args)
    mods_of(given.mods).note_run(given.read)
    found: tuple[Tensor, Tensor] = varlen.attention_varlen(*given[:5], **given.options, return_lse=True)
    return found


def _forward_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = VarlenArguments(*args)[:3]
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    given = VarlenArguments(*args)
    q, k, v, *offsets = given[:5]
    with mods_of(given.mods).as_called():
        found = varlen_backward.attention_varlen_backward(do, q, k, v, o, lse, *offsets, dlse=dlse, **given.options)
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in found[:4])


def _backward_shapes(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, sinks = VarlenArguments(*args)[:6]
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q, k, v, sinks))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = VarlenArguments(*inputs)
    ctx.save_for_backward(*given[:6], *output, *given.read)
    ctx.rest, ctx.mods = given[6:-1], mods_of(given.mods)


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    arrays, (o, lse), read = split_saved(ctx, 6)
    given = do, o, lse, dlse, *arrays, *ctx.rest
    dq, dk, dv, dsinks = call_operator("attention_varlen_backward", _VarlenBackward, given, given[:10], read)
    return dq, dk, dv, None, None, None if arrays[5] is None else dsinks, *no_gradients(ctx.rest, read)


for _name in READING:
    register("attention_varlen" + _name, _forward, _forward_shapes, (_differentiate, _save))
    register("attention_varlen_backward" + _name, _backward, _backward_shapes, (no_second, None))


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
