"""`monotile.jax.attention`: attention as a function of JAX, with a derivative and a rule for batches.

A traced call becomes a custom call of XLA's. Its one attribute is the text of a `TracedCall`, so that a compiled
function means the same in every process, unless it has functions, which are entries of this process's table."""

from __future__ import annotations

import ast
import itertools
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import dtypes
from ..errors import ArgumentDType, ArgumentKind
from ..launch.captures import captures
from ..library import ops
from ..library.block_mask import unwrapped
from ..library.dry_run import check, launches
from ..library.inputs import AttentionOptions, read_scoring
from ..library.leading import Lead, broadcast_lead
from ..library.quantized import is_quantized
from ..runtime import tensors
from ..runtime.tensors import View
from . import ffi

Array = Any
TARGET = "monotile_attention"


class TracedCall(NamedTuple):
    """What a custom call computes, of plain values."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    mods: str  # entry of the table of functions, "" for none
    threads: int | None
    ranks: tuple[int, ...]  # of q, k, v, mask and sinks, then of the arguments of the derivative; 0: left out
    results: str  # "o", "o lse", "gradients" or "gradients mask"

    def options(self) -> dict[str, Any]:
        score_mod, mask_mod = _functions(self.mods)
        return {
            "causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap,
            "score_mod": score_mod, "mask_mod": mask_mod, "threads": self.threads, "backend": "cpu",
        }  # fmt: skip


def attention(
    q: Array, k: Array, v: Array, *, causal: bool | str = False, scale: float | None = None, mask: Array | None = None,
    window: ops.Window = None, softcap: float | None = None, sinks: Array | None = None,
    score_mod: Callable[..., Any] | None = None, mask_mod: ops.MaskMod | None = None, return_lse: bool = False,
    threads: int | None = None,
) -> Any:  # fmt: skip
    """`monotile.attention` on arrays of JAX or in a trace of it: `jit`, `grad`, `vmap`. See docs/guide/jax.md."""
    scale, window, softcap, negative = read_scoring(causal, scale, window, softcap)
    arrays = tuple(None if a is None else _as_array(n, a) for n, a in zip(_NAMES, (q, k, v, mask, sinks), strict=True))
    causal = causal if isinstance(causal, str) else bool(causal)
    plain = unwrapped(mask_mod)[0] if mask_mod is not None else None
    refuse_traced_captures(score_mod, plain)
    options = AttentionOptions(causal, window, softcap, score_mod, plain, negative, False, return_lse, "cpu", threads)
    views = {name: None if a is None else _view(name, a) for name, a in zip(_NAMES, arrays, strict=True)}
    check("attention", views, options)
    if score_mod is not None or plain is not None:
        _check_functions(views, options)
    arrays, lead = _one_batch(arrays)
    ranks = tuple(0 if a is None else a.ndim for a in arrays)
    mods = _enter(score_mod, mask_mod)
    request = TracedCall(causal, window, scale, softcap, mods, threads, ranks, "o lse" if return_lse else "o")
    found = _attention(request, arrays)
    return found if lead is None else jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), found)


def _one_batch(arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], Lead | None]:
    """Return the arrays with leading dimensions broadcast and in one, and what those are; None where they are left."""
    *qkv, mask, sinks = arrays
    leads = {a.shape[:-3] for a in qkv}
    if len(leads) == 1 and len(qkv[0].shape) < 5:
        return arrays, None
    lead = broadcast_lead({name: a.shape for name, a in zip("qkv", qkv, strict=True)})
    if mask is not None and mask.ndim > 3:
        shared = all(n == 1 for n in mask.shape[:-3])
        mask = mask if shared else jnp.broadcast_to(mask, (*lead, *mask.shape[-3:]))
        mask = mask.reshape(-1, *mask.shape[-3:])
    flat = [jnp.broadcast_to(a, (*lead, *a.shape[-3:])).reshape(-1, *a.shape[-3:]) for a in qkv]
    return (*flat, mask, sinks), lead


_NAMES = ("q", "k", "v", "mask", "sinks")


def _as_array(name: str, array: Any) -> Array:
    if is_quantized(array):
        cure = "call monotile.attention, outside of jit, grad and vmap, or pass its dequantize()"
        raise ArgumentKind(f"{name!r} is Quantized, which monotile.jax.attention does not take; {cure}")
    if not isinstance(array, jax.Array | np.ndarray):
        raise ArgumentKind(
            f"{name!r} must be an array of JAX, found {type(array).__name__}; pass jax.numpy.asarray(...)"
        )
    return jnp.asarray(array)


def _view(name: str, array: Array) -> View:
    dtype, shape = dtypes.from_numpy(np.dtype(array.dtype)), tuple(array.shape)
    if dtype is None:
        raise ArgumentDType(f"{name!r} has dtype {array.dtype}; cast it to float32, float16 or bfloat16")
    return View(dtype, shape, tensors.dense(shape), "cpu")


# ---- functions among the options -------------------------------------------------------------------------------------

_mods: dict[tuple[Any, Any], str] = {}
_by_name: dict[str, tuple[Any, Any]] = {"": (None, None)}
_checked: set[Any] = set()  # calls whose functions compile
_process, _numbers = uuid.uuid4().hex, itertools.count()


def _enter(score_mod: Any, mask_mod: Any) -> str:
    """Return the name of two functions in the table. They stay: a compiled function may call them at any time."""
    if score_mod is None and mask_mod is None:
        return ""
    key = score_mod, mask_mod
    if key not in _mods:
        name = f"{_process} {next(_numbers)}"
        _mods[key], _by_name[name] = name, key
    return _mods[key]


def refuse_traced_captures(*functions: Any) -> None:
    """Raise an error for functions that read an array of the trace, which has no contents yet."""
    try:
        captures(functions)
    except ArgumentKind as error:
        if "traced by JAX" not in str(error):
            raise
        cure = "read an array that is not traced, or pass a bias or mask as the mask of attention, which may be"
        raise ArgumentKind(f"score_mod or mask_mod reads an array that JAX traces; {cure}") from None


def _check_functions(views: dict[str, View | None], options: AttentionOptions) -> None:
    """Raise the error that compiling a call's functions would raise, while it is traced: XLA would wrap it later."""
    key = tuple(None if v is None else (v.dtype, v.shape) for v in views.values()), options
    if key not in _checked:
        launches("attention", {name: view for name, view in views.items() if view is not None}, options)
        _checked.add(key)


def _functions(name: str) -> tuple[Any, Any]:
    if name not in _by_name:
        raise ArgumentKind("score_mod and mask_mod belong to the process that traced them; trace the function again")
    return _by_name[name]


# ---- what runs -------------------------------------------------------------------------------------------------------


def _run(text: str, arrays: list[np.ndarray[Any, Any]]) -> list[Any]:
    """Compute a request. Leading dimensions beyond those that were traced are vmap's; their elements are computed one
    after the other."""
    request = _parsed(text)
    ranks = [rank for rank in request.ranks if rank]
    leads = [a.shape[: a.ndim - rank] for a, rank in zip(arrays, ranks, strict=True)]
    lead = np.broadcast_shapes(*leads)
    if not lead:
        return _compute(request, arrays)
    wide = [np.broadcast_to(a, (*lead, *a.shape[len(lead) :])) for a in arrays]
    found = [_compute(request, [a[index] for a in wide]) for index in np.ndindex(*lead)]
    return [np.stack(parts).reshape(*lead, *parts[0].shape) for parts in zip(*found, strict=True)]


def _compute(request: TracedCall, arrays: Sequence[Any]) -> list[Any]:
    rest = iter(arrays)
    q, k, v, mask, sinks, *rows = [next(rest) if rank else None for rank in request.ranks]
    options = {"mask": mask, "sinks": sinks, **request.options()}
    if not rows:
        found = ops.attention(q, k, v, return_lse=request.results == "o lse", **options)
        return list(found) if request.results == "o lse" else [found]
    o, lse, do, dlse = rows
    mask_grad = request.results == "gradients mask"
    gradients = ops.attention_backward(do, q, k, v, o, lse, dlse=dlse, mask_grad=mask_grad, **options)
    return [gradient for gradient in gradients if gradient is not None]


@cache
def _parsed(text: str) -> TracedCall:
    return TracedCall(*ast.literal_eval(text))


ffi.register(TARGET, _run)


def _call(request: TracedCall, arrays: Sequence[Array | None], results: Sequence[tuple[Any, Any]]) -> list[Array]:
    given = [a for a in arrays if a is not None]
    request = request._replace(ranks=tuple(0 if a is None else a.ndim for a in arrays))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    call = jax.ffi.ffi_call(TARGET, shapes, vmap_method="expand_dims")
    return list(call(*given, request=repr(tuple(request))))


# ---- the derivative --------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(request: TracedCall, arrays: tuple[Array | None, ...]) -> Any:
    found = _forward(request, arrays)
    return tuple(found) if request.results == "o lse" else found[0]


def _forward(request: TracedCall, arrays: Sequence[Array | None]) -> list[Array]:
    q, v = arrays[0], arrays[2]
    assert q is not None and v is not None
    lead = q.shape[:-1]
    shapes = [((*lead, v.shape[-1]), q.dtype), (lead, jnp.float32)]
    return _call(request, arrays, shapes if request.results == "o lse" else shapes[:1])


def _forward_rule(request: TracedCall, given: tuple[Any, ...]) -> tuple[Any, Any]:
    arrays = tuple(None if a is None else a.value for a in given)
    mask_grad = given[3] is not None and given[3].perturbed and given[3].value.dtype != jnp.bool_
    o, lse = _forward(request._replace(results="o lse"), arrays)
    result = (o, lse) if request.results == "o lse" else o
    return result, (arrays, o, lse, mask_grad)


def _backward_rule(request: TracedCall, saved: Any, gradient: Any) -> tuple[Any]:
    arrays, o, lse, mask_grad = saved
    do, dlse = gradient if request.results == "o lse" else (gradient, None)
    q, k, v, mask, sinks = arrays
    do = _materialised(do, o)
    dlse = None if dlse is None else _materialised(dlse, lse)
    wanted = [q, k, v, sinks, mask if mask_grad else None]
    shapes = [(a.shape, a.dtype) for a in wanted if a is not None]
    request = request._replace(results="gradients mask" if mask_grad else "gradients")
    found = iter(_call(request, (*arrays, o, lse, do, dlse), shapes))
    dq, dk, dv, dsinks, dmask = (None if a is None else next(found) for a in wanted)
    if mask is not None and not mask_grad:
        dmask = np.zeros(mask.shape, jax.dtypes.float0) if mask.dtype == jnp.bool_ else jnp.zeros_like(mask)
    return ((dq, dk, dv, dmask, dsinks),)


def _materialised(gradient: Any, like: Array) -> Array:
    return jnp.zeros_like(like) if isinstance(gradient, jax.custom_derivatives.SymbolicZero) else gradient


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
