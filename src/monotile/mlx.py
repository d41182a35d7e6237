"""monotile in MLX: attention that `mx.grad` and `mx.value_and_grad` differentiate.

import monotile.mlx

gradient = mx.grad(lambda q: monotile.mlx.attention(q, k, v, causal=True).sum())(q)
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import mlx.core as mx

from .errors import ArgumentKind
from .launch.captures import captures, frozen
from .library import ops
from .library.block_mask import unwrapped
from .runtime.mlx_graph import refuse_forward_mode, without_derivatives

__all__ = ["attention"]
Array: TypeAlias = mx.array


# fmt: off
@overload
def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = ..., sinks: Array | None = ...,
    return_lse: Literal[False] = ..., backend: str | None = ..., **options: Any,
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = ..., sinks: Array | None = ..., return_lse: Literal[True],
    backend: str | None = ..., **options: Any,
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = ..., sinks: Array | None = ..., return_lse: bool,
    backend: str | None = ..., **options: Any,
) -> Array | tuple[Array, Array]: ...
# fmt: on
def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, sinks: Array | None = None, return_lse: bool = False,
    backend: str | None = None, **options: Any,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """`monotile.attention` on arrays of MLX, with gradients of q, k, v, sinks and an additive mask. Other derivatives
    (mx.jvp, those of gradients, of arrays that a mod reads) are an error. Without an Apple GPU the backend is "cpu".
    See docs/guide/attention.md for the options."""
    backend = "cpu" if backend is None and not mx.metal.is_available() else backend
    given = {name: a for name, a in zip(_NAMES, (q, k, v, mask, sinks), strict=True) if a is not None}
    for name, array in given.items():
        if not isinstance(array, mx.array):
            raise ArgumentKind(f"{name!r} must be an MLX array, found {type(array).__name__}; pass mx.array(...)")
    options |= {name: frozen(options[name]) for name in _MODS if options.get(name) is not None}
    options["backend"] = backend
    others = _without_gradients(options)

    def forward(*arrays: Array) -> tuple[Array, Array]:
        found: tuple[Array, Array] = ops.attention(**_named(given, arrays), return_lse=True, **options)
        return found

    def derivative(primals: Any, cotangents: Any, outputs: Any) -> list[Array]:
        arrays = _named(given, primals)
        (do, dlse), (o, lse) = cotangents, outputs
        mask_grad = mask is not None and mask.dtype != mx.bool_
        found = ops.attention_backward(do, o=o, lse=lse, dlse=dlse, mask_grad=mask_grad, **arrays, **options)
        gradients = {"q": found.dq, "k": found.dk, "v": found.dv, "sinks": found.dsinks, "mask": found.dmask}
        known = [mx.zeros_like(a) if gradients[n] is None else gradients[n] for n, a in arrays.items()]
        unknown = [mx.zeros_like(a) for a in others]  # whose own derivatives are errors
        return without_derivatives([*known, *unknown], [*primals, do, dlse], _OF_GRADIENTS)

    run = mx.custom_function(forward)
    run.vjp(derivative)
    run.jvp(refuse_forward_mode)
    o, lse = run(*given.values(), *others)
    return (o, lse) if return_lse else o


_NAMES = ("q", "k", "v", "mask", "sinks")
_MODS = ("score_mod", "mask_mod")
_OF_GRADIENTS = (
    "the gradients of monotile.mlx.attention have no derivatives of their own; pass mx.stop_gradient(gradient) where "
    "none are wanted, or use a formula of MLX's functions"
)
_OF_OPTIONS = (
    "attention has no gradient for an array that score_mod or mask_mod reads, nor for a scale; pass it as "
    "mx.stop_gradient(x), or a bias as an additive mask and a scale as a factor of q, which have one"
)


def _named(given: dict[str, Array], arrays: Any) -> dict[str, Array]:
    return dict(zip(given, arrays, strict=False))


def _without_gradients(options: dict[str, Any]) -> list[Array]:
    """Return the arrays of MLX among options and those that mods read; a derivative by one is an error."""
    found = [option for option in options.values() if isinstance(option, mx.array)]
    mods = [options[name] for name in _MODS if options.get(name) is not None]
    if mods:
        captured = captures([unwrapped(mod)[0] for mod in mods]).arrays.values()
        found += [array for array in captured if isinstance(array, mx.array)]
    return without_derivatives(found, found, _OF_OPTIONS) if found else []
