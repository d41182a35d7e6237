"""Attention as a torch operator: `torch.ops.monotile.attention` and `attention_backward`, with gradients.

`entry.attention` comes here for torch tensors that plain addresses do not describe: those that require gradients, and
those of a trace (torch.compile, export, torch.func, fake tensors). Everything else in torch is built on the operator's
three parts: what it computes, the shapes of its results, and its derivative.

An operator takes tensors, numbers and words. Functions (`score_mod`, `mask_mod`) are passed as the number of their
entry in a table (mod_table.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MaskShape, NoGradient
from . import backward, ops
from .inputs import read_window
from .leading import broadcast_lead
from .mod_table import arrays_of, mods_of, number_of, watched
from .torch_calls import is_refused_by_class, no_forward_mode, no_rule

OPTIONS = "str causal, int? left, int? right, float? scale, float? softcap, int mods, str? backend, int? threads"
ARRAYS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks"
LIBRARY = torch.library.Library("monotile", "DEF")
READING = {"": "", "_reading": ", Tensor[] read"}  # operators whose functions read tensors of a compiled graph
for _name, _read in READING.items():
    LIBRARY.define(f"attention{_name}({ARRAYS}, {OPTIONS}{_read}) -> (Tensor, Tensor)")
    LIBRARY.define(
        f"attention_backward{_name}(Tensor do, Tensor o, Tensor lse, Tensor dlse, bool mask_grad, {ARRAYS}, {OPTIONS}"
        f"{_read}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
CAUSAL = {"True": True, "False": False}


# ---- the operator ----------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The arguments of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
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
    def arrays(self) -> dict[str, Any]:
        return {"q": self.q, "k": self.k, "v": self.v}

    @property
    def options(self) -> dict[str, Any]:
        """What `ops.attention` and `ops.attention_backward` are called with, but for q, k and v."""
        return {"mask": self.mask, "sinks": self.sinks, **scoring_options(*self[5:])}


def scoring_options(
    causal: str, left: int | None, right: int | None, scale: float | None, softcap: float | None, mods: int,
    backend: str | None, threads: int | None, *read: Sequence[Tensor],
) -> dict[str, Any]:  # fmt: skip
    """OPTIONS, as functions of the library take them, and the list of arrays that functions read, if there is one."""
    score_mod, mask_mod = mods_of(mods).with_arrays(read[0] if read else ())
    return {
        "causal": CAUSAL.get(causal, causal), "window": None if left is None and right is None else (left, right),
        "scale": scale, "softcap": softcap, "score_mod": score_mod, "mask_mod": mask_mod,
        "backend": backend, "threads": threads,
    }  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, sinks: Tensor | None, causal: Any, window: Any,
    score_mod: Any, mask_mod: Any, return_lse: bool, **options: Any,
) -> Any:  # fmt: skip
    """`ops.attention` as an operator. `options` are its scale, softcap, backend and threads."""
    q, k, v, mask, lead = _one_batch(q, k, v, mask)
    left, right = (None, None) if window is None else read_window(window)
    number, mods = number_of(score_mod, mask_mod)
    given = Given(q, k, v, mask, sinks, str(causal), left, right, mods=number, **options)
    read = arrays_of(score_mod, mask_mod) + watched(number, q, k, v, mask, sinks)
    o, lse = call_operator("attention", _Attention, given[:-1], given[:5], read)
    del mods  # an entry of the table until here
    if lead is not None:
        o, lse = o.unflatten(0, lead), lse.unflatten(0, lead)
    return (o, lse) if return_lse else o


def _one_batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors with leading dimensions broadcast and in one, and what those are; None where they are left as
    they are: torch sums the gradients of what it broadcasts."""
    leads = [t.shape[:-3] for t in (q, k, v)]
    if min(t.dim() for t in (q, k, v)) < 3 or (leads[0] == leads[1] == leads[2] and len(leads[0]) < 2):
        return q, k, v, mask, None
    lead = broadcast_lead({"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)})
    if mask is not None and mask.dim() > 3 and any(n != 1 for n in mask.shape[:-3]):
        own = mask.shape[:-3]
        if len(own) > len(lead) or any(n not in (1, m) for n, m in zip(own[::-1], lead[::-1], strict=False)):
            raise MaskShape(f"the mask {tuple(mask.shape)} does not broadcast to the batch {lead} of q, k and v")
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    elif mask is not None and mask.dim() > 4:
        mask = mask.flatten(0, -4)
    return *[t.expand(*lead, *t.shape[-3:]).flatten(0, -4) for t in (q, k, v)], mask, lead


def call_operator(
    name: str, function: type[torch.autograd.Function], given: Sequence[Any], arrays: Any, read: Sequence[Tensor] = ()
) -> Any:
    """Call an operator, or the function that stands for it under torch.func."""
    if read:
        return getattr(torch.ops.monotile, name + "_reading")(*given, list(read))
    operator = getattr(torch.ops.monotile, name)
    if torch.compiler.is_compiling():
        return operator(*given)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*given)
    try:
        return operator(*given)
    except (NotImplementedError, TypeError) as error:
        if isinstance(error, TypeError) and not is_refused_by_class(error):
            raise
        raise no_rule(name, arrays) from error


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = Given(*args)
    mods_of(given.mods).note_run(given.read)
    found: tuple[Tensor, Tensor] = ops.attention(**given.arrays, **given.options, return_lse=True)
    return found


def _forward_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    given = Given(*args)
    shape = given.q.shape[:-1]
    return given.q.new_empty((*shape, given.v.shape[-1])), given.q.new_empty(shape, dtype=torch.float32)


def register(name: str, run: Any, shapes: Any, derivative: tuple[Any, Any]) -> None:
    """Register the parts of an operator: what it computes, the shapes of its results, and its derivative with what that
    keeps."""
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monotile::{name}", shapes, lib=LIBRARY)
    differentiate, save = derivative
    torch.library.register_autograd(f"monotile::{name}", differentiate, setup_context=save, lib=LIBRARY)


# ---- its derivative --------------------------------------------------------------------------------------------------


def _backward(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, mask_grad: bool, *args: Any) -> tuple[Tensor, ...]:
    given = Given(*args)
    with mods_of(given.mods).as_called():
        found = backward.attention_backward(do, *given[:3], o, lse, dlse=dlse, mask_grad=mask_grad, **given.options)
    return tuple(given.q.new_empty(0) if gradient is None else gradient for gradient in found)


def _backward_shapes(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor, mask_grad: bool, *args: Any) -> tuple[Any, ...]:
    q, k, v, mask, sinks = Given(*args)[:5]
    wanted = (q, k, v, sinks, mask if mask_grad else None)
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = Given(*inputs)
    ctx.save_for_backward(*given[:5], *output, *given.read)
    ctx.rest, ctx.mods = given[5:-1], mods_of(given.mods)


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    arrays, (o, lse), read = split_saved(ctx, 5)
    mask_grad = bool(ctx.needs_input_grad[3])
    given = do, o, lse, dlse, mask_grad, *arrays, *ctx.rest
    found = call_operator("attention_backward", _AttentionBackward, given, (do, *arrays), read)
    dq, dk, dv, dsinks, dmask = found
    with_sinks = arrays[4] is not None
    gradients = dq, dk, dv, dmask if mask_grad else None, dsinks if with_sinks else None
    return *gradients, *no_gradients(ctx.rest, read)


def split_saved(ctx: Any, count: int) -> tuple[Any, Any, list[Tensor]]:
    """Return the arrays of a call, its two results and the arrays that its functions read."""
    saved = ctx.saved_tensors
    return saved[:count], saved[count : count + 2], list(saved[count + 2 :])


def no_gradients(rest: Sequence[Any], read: Sequence[Tensor]) -> list[Any]:
    """The gradients of options and of the arrays that functions read, which torch wants as a list in a list."""
    return [*[None] * len(rest), *([[None] * len(read)] if read else [])]


def no_tangent(*args: Any) -> None:
    """The jvp of the operators under torch.func."""
    raise no_forward_mode("attention")


def no_second(*args: Any) -> None:
    raise NoGradient(
        "attention has no second derivative: its gradients cannot be differentiated; "
        "compute them without create_graph=True, or use a formula of torch operations"
    )


for _name in READING:
    register("attention" + _name, _forward, _forward_shapes, (_differentiate, _save))
    register("attention_backward" + _name, _backward, _backward_shapes, (no_second, None))


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The operator under torch.func, whose transforms know functions and not operators' derivatives."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.monotile.attention(*args)

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(no_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        merged = _Merged(info.batch_size, args[0], in_dims[0])
        found = _Attention.apply(*merged.arrays(args[:5], in_dims[:5]), *args[5:])
        return tuple(map(merged.apart, found)), (0, 0)


class _AttentionBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.monotile.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """There is nothing to keep."""

    backward = staticmethod(no_second)
    jvp = staticmethod(no_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        mask_grad, *given = args[4:]
        if mask_grad or given[4] is not None:
            raise NoGradient(
                "under vmap attention has gradients of q, k and v; those of sinks and of a mask would be summed over "
                "the batch: loop over it instead"
            )
        merged = _Merged(info.batch_size, given[0], in_dims[5])
        rows = [merged.array(t, d, t.dim() - (d is not None)) for t, d in zip(args[:4], in_dims[:4], strict=True)]
        found = _AttentionBackward.apply(*rows, mask_grad, *merged.arrays(given[:5], in_dims[5:10]), *given[5:])
        gradients = *map(merged.apart, found[:3]), *found[3:]
        return gradients, (0, 0, 0, None, None)


class _Merged:
    """A dimension of vmap's as a batch dimension, or as the outer part of the one that a call has."""

    def __init__(self, size: int, q: Tensor, dim: int | None) -> None:
        self.size, self.has_batch = size, q.dim() - (dim is not None) == 4
        self.batch = (q if dim is None else q.movedim(dim, 0)[0]).shape[0] if self.has_batch else 1

    def arrays(self, given: Sequence[Tensor | None], dims: Sequence[int | None]) -> tuple[Tensor | None, ...]:
        *arrays, sinks = given
        if dims[4] is not None:
            raise NoGradient("sinks have one value to a head: vmap cannot batch them; loop over them instead")
        rank = 4 if self.has_batch else 3
        merged = [None if t is None else self.array(t, d, rank) for t, d in zip(arrays, dims[:4], strict=True)]
        return (*merged, sinks)

    def array(self, array: Tensor, dim: int | None, rank: int) -> Tensor:
        """`rank` is that of the array without vmap's dimension, with dimensions of length 1 in front."""
        array = array.expand(self.size, *array.shape) if dim is None else array.movedim(dim, 0)
        while array.dim() <= rank:
            array = array.unsqueeze(1)
        if not self.has_batch:
            return array
        return array.expand(-1, self.batch, *array.shape[2:]).flatten(0, 1)

    def apart(self, result: Tensor) -> Tensor:
        return result.unflatten(0, (self.size, self.batch)) if self.has_batch else result
