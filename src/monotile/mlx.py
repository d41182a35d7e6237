"""monotile in MLX: attention that `mx.grad` and `mx.value_and_grad` differentiate.

import monotile.mlx

gradient = mx.grad(lambda q: monotile.mlx.attention(q, k, v, causal=True).sum())(q)
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import mlx.core as mx

from .errors import ArgumentKind
from .library import ops

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
    """`monotile.attention` on arrays of MLX, with gradients of q, k, v, sinks and an additive mask. Without an Apple
    GPU the backend is "cpu". See docs/guide/attention.md for the options."""
    backend = "cpu" if backend is None and not mx.metal.is_available() else backend
    given = {name: a for name, a in zip(_NAMES, (q, k, v, mask, sinks), strict=True) if a is not None}
    for name, array in given.items():
        if not isinstance(array, mx.array):
            raise ArgumentKind(f"{name!r} must be an MLX array, found {type(array).__name__}; pass mx.array(...)")
    options["backend"] = backend

    def forward(*arrays: Array) -> tuple[Array, Array]:
        found: tuple[Array, Array] = ops.attention(**_named(given, arrays), return_lse=True, **options)
        return found

    def derivative(primals: Any, cotangents: Any, outputs: Any) -> tuple[Array, ...]:
        arrays = _named(given, primals)
        (do, dlse), (o, lse) = cotangents, outputs
        mask_grad = mask is not None and mask.dtype != mx.bool_
        found = ops.attention_backward(do, o=o, lse=lse, dlse=dlse, mask_grad=mask_grad, **arrays, **options)
        gradients = {"q": found.dq, "k": found.dk, "v": found.dv, "sinks": found.dsinks, "mask": found.dmask}
        return tuple(mx.zeros_like(a) if gradients[n] is None else gradients[n] for n, a in arrays.items())

    run = mx.custom_function(forward)
    run.vjp(derivative)
    o, lse = run(*given.values())
    return (o, lse) if return_lse else o


_NAMES = ("q", "k", "v", "mask", "sinks")


def _named(given: dict[str, Array], arrays: Any) -> dict[str, Array]:
    return dict(zip(given, arrays, strict=True))
