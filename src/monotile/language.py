"""The kernel language as users import it: `@kernel` and its words. docs/guide/words.md is the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .frontend.vocabulary import (
    Const,
    Tensor,
    abs,
    arange,
    bfloat16,
    blocks,
    bool_,
    cdiv,
    dot,
    exp,
    exp2,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    fma,
    full,
    grad,
    inf,
    int8,
    int32,
    int64,
    log,
    log2,
    max,
    maximum,
    min,
    minimum,
    program_id,
    reciprocal,
    sqrt,
    static_range,
    sum,
    tanh,
    uint8,
    uint32,
    value_and_grad,
    where,
    zeros,
)
from .launch.kernel import Kernel

if TYPE_CHECKING:
    # A kernel is the tile language, which only looks like Python: checkers pass over its body and its annotations.
    from typing import no_type_check as kernel
else:

    def kernel(function: Callable[..., None]) -> Kernel:
        """Make a kernel of a Python function. Its source is specialised and compiled when it is called."""
        return Kernel(function)


__all__ = [
    "Const",
    "Tensor",
    "abs",
    "arange",
    "bfloat16",
    "blocks",
    "bool_",
    "cdiv",
    "dot",
    "exp",
    "exp2",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "fma",
    "full",
    "grad",
    "inf",
    "int8",
    "int32",
    "int64",
    "kernel",
    "log",
    "log2",
    "max",
    "maximum",
    "min",
    "minimum",
    "program_id",
    "reciprocal",
    "sqrt",
    "static_range",
    "sum",
    "tanh",
    "uint8",
    "uint32",
    "value_and_grad",
    "where",
    "zeros"
]  # fmt: skip
