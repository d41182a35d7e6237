"""Derivatives in MLX. Kernels on a CPU read arrays of MLX outside of its graph, where its transforms would take the
results for constants: mx.grad and mx.jvp would give 0."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import NoGradient

PLAIN_FUNCTION = (
    "monotile's functions have no derivative in MLX, as they read arrays outside of its graph; use "
    "monotile.mlx.attention, which mx.grad differentiates, or attention_backward or attention_varlen_backward, or pass "
    "mx.stop_gradient(x) where no gradient is wanted"
)


def without_derivatives(results: Sequence[Any], sources: Sequence[Any], why: str = PLAIN_FUNCTION) -> list[Any]:
    """Return results, which were computed from `sources`, so that a derivative of one with respect to
    a source is an error."""
    core = sys.modules["mlx.core"]
    given = [a for a in sources if type(a) is core.array]
    if not given or not _are_traced(given):
        return list(results)
    floating = [a for a in given if core.issubdtype(a.dtype, core.inexact)]
    if not floating:
        return list(results)

    def refuse(*_: Any) -> NoReturn:
        raise NoGradient(why)

    made = tuple([array for array in results if array is not None])
    connected = core.custom_function(lambda *_: made)
    connected.vjp(refuse)
    connected.jvp(refuse_forward_mode)
    lazy = iter(connected(*floating))
    return [None if array is None else next(lazy) for array in results]


def refuse_forward_mode(*_: Any) -> NoReturn:
    raise NoGradient(
        "monotile has no forward-mode derivatives (mx.jvp); use mx.grad or mx.vjp of monotile.mlx.attention, or a "
        "formula of MLX's functions"
    )


def _are_traced(arrays: Sequence[Any]) -> bool:
    """False if no array belongs to a running transform of MLX, which has no function that says so. A compiled function
    runs its Python code for arrays that do, and otherwise only to compile it. Asking takes 1 us; custom functions for
    all calls would take 4, and 20 to evaluate their results, which are lazy and bound to a thread."""
    compiled, last_run = _probe()
    for _ in range(2):  # the first may compile
        before = last_run[0]
        compiled(*arrays)
        if last_run[0] is before:
            return False
    return True


@functools.cache
def _probe() -> tuple[Callable[..., Any], list[object]]:
    """Return a compiled function and a list of one object, which is another one after each run of its code."""
    last_run = [object()]

    def code(*arrays: Any) -> Any:
        last_run[0] = object()
        return arrays[0]

    return sys.modules["mlx.core"].compile(code, shapeless=True), last_run
