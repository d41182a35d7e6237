"""The words of the kernel language. Functions under `@kernel` are compiled from them; called from Python they raise.

Users import them from `monotile.language`; docs/guide/words.md is the reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ..dtypes import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    int8,
    int32,
    int64,
    uint8,
    uint32,
)
from ..errors import BadSignature, OutsideKernel

F = TypeVar("F", bound=Callable[..., Any])
inf = math.inf


class Const:
    """Mark a compile-time parameter: an int, float, bool, None, dtype, tuple or function."""


class Tensor:
    """Annotate a tensor with its shape: `Tensor["M K"]`. A name that is also a Const parameter is a compile-time
    length and binds that Const; equal names must have equal lengths; a number is a fixed length; `_` is any length."""

    def __init__(self, dims: tuple[str | int, ...]) -> None:
        self.dims = dims

    def __class_getitem__(cls, spec: str) -> Tensor:
        names = spec.split() if isinstance(spec, str) else []
        if not names or not all(n.isidentifier() or (n.isascii() and n.isdecimal()) for n in names):
            cure = 'name every dimension, separated by spaces: Tensor["M K"], Tensor["M 3"], Tensor["_ K"]'
            raise BadSignature(f"Tensor[{spec!r}] is not a shape", cure)
        return cls(tuple(int(d) if d.isdecimal() else d for d in names))


def word(function: F) -> F:
    """Declare a word. The front end recognises the function object and never runs it."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        name = function.__name__
        raise OutsideKernel(f"{name}() is a word of the kernel language: call it inside a @kernel function")

    stand_in.__name__ = function.__name__
    stand_in.__doc__ = function.__doc__
    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return stand_in  # type: ignore[return-value]


@word
def program_id(*counts: Any) -> Any:
    """This program's position in a grid of the given sizes: one number for one size, a tuple for more."""


@word
def arange(n: int) -> Any:
    """The int32 tile 0, 1, ..., n - 1."""


@word
def full(shape: Any, value: Any, dtype: DType | None = None) -> Any:
    """A tile with every element equal to one number."""


@word
def zeros(shape: Any, dtype: DType = float32) -> Any:
    """A tile of zeros."""


@word
def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, `no` elsewhere. The value not selected never matters, not even a NaN."""


@word
def dot(a: Any, b: Any) -> Any:
    """The matrix product of (m, k) and (k, n), summed in float32."""


@word
def cdiv(a: Any, b: Any) -> Any:
    """a / b rounded up."""


@word
def exp(x: Any) -> Any:
    """e to the x."""


@word
def exp2(x: Any) -> Any:
    """2 to the x."""


@word
def log(x: Any) -> Any:
    """Natural logarithm."""


@word
def log2(x: Any) -> Any:
    """Logarithm to base 2."""


@word
def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""


@word
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow."""


@word
def erf(x: Any) -> Any:
    """The error function."""


@word
def sin(x: Any) -> Any:
    """Sine of an angle in radians, of any size."""


@word
def cos(x: Any) -> Any:
    """Cosine of an angle in radians, of any size."""


@word
def sqrt(x: Any) -> Any:
    """Square root."""


@word
def floor(x: Any) -> Any:
    """The greatest whole number not above x, as a float; an integer is itself."""


@word
def ceil(x: Any) -> Any:
    """The least whole number not below x, as a float; an integer is itself."""


@word
def round(x: Any) -> Any:
    """The nearest whole number as a float, of two equally near the even one; an integer is itself."""


@word
def trunc(x: Any) -> Any:
    """The whole number next to x towards zero, as a float; an integer is itself."""


@word
def reciprocal(x: Any) -> Any:
    """1 / x to within 2 units in the last place: faster than a division, which is correctly rounded."""


@word
def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once. Nothing else in the language is fused: every other op rounds its result."""


@word
def abs(x: Any) -> Any:
    """Absolute value."""


@word
def maximum(a: Any, b: Any) -> Any:
    """The greater of two; if one is NaN, the other."""


@word
def minimum(a: Any, b: Any) -> Any:
    """The lesser of two; if one is NaN, the other."""


@word
def sum(x: Any, axis: int) -> Any:
    """Sum along an axis."""


@word
def max(x: Any, axis: int) -> Any:
    """Maximum along an axis, ignoring NaN (-inf if every element is NaN)."""


@word
def min(x: Any, axis: int) -> Any:
    """Minimum along an axis, ignoring NaN (inf if every element is NaN)."""


@word
def argmax(x: Any, axis: int) -> Any:
    """First position of the maximum along an axis (int32). NaN is ignored; 0 where nothing is above -inf."""


@word
def argmin(x: Any, axis: int) -> Any:
    """First position of the minimum along an axis (int32). NaN is ignored; 0 where nothing is below inf."""


@word
def cumsum(x: Any, axis: int) -> Any:
    """Sums of the elements up to each position along an axis."""


@word
def reshape(x: Any, *shape: Any) -> Any:
    """A tile with other sides and the same elements, rows first; one side may be -1."""


@word
def elementwise(function: Callable[..., Any]) -> Any:
    """`elementwise(f)(x, ...)` is f(x, ...), where f may not mix elements of a tile: a reduction, a product or a
    transpose in it is an error."""


@word
def grad(function: Callable[..., Any]) -> Any:
    """The derivative of an elementwise function by its first argument: `grad(f)(x, ...)` is a float32 tile.

    Each element of f(x, ...) may depend on one element of x. docs/guide/derivatives.md has the rules."""


@word
def value_and_grad(function: Callable[..., Any]) -> Any:
    """`value, slope = value_and_grad(f)(x, ...)`: f(x, ...), and its derivative as `grad` gives it."""


@word
def blocks(length: Any, step: int, visible: Callable[[Any], Any] | None = None, start: Any = 0) -> Any:
    """`for j in blocks(length, step, visible)`: j = start, start + step, start + 2 * step, ... below length.

    `visible` maps the tile of positions `j + arange(step)` to a bool tile. The compiler may skip what it hides: a block
    in which it is False everywhere, a row all of whose positions it hides, or single positions of a reduction. So
    hidden positions must not affect the result."""


@word
def static_range(*bounds: int) -> Any:
    """Like range, but the loop is unrolled at compile time and its variable is a constant."""


__all__ = [
    "Const",
    "Tensor",
    "abs",
    "arange",
    "argmax",
    "argmin",
    "bfloat16",
    "blocks",
    "bool_",
    "cdiv",
    "ceil",
    "cos",
    "cumsum",
    "dot",
    "elementwise",
    "erf",
    "exp",
    "exp2",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "floor",
    "fma",
    "full",
    "grad",
    "inf",
    "int8",
    "int32",
    "int64",
    "log",
    "log2",
    "max",
    "maximum",
    "min",
    "minimum",
    "program_id",
    "reciprocal",
    "reshape",
    "round",
    "sigmoid",
    "sin",
    "sqrt",
    "static_range",
    "sum",
    "tanh",
    "trunc",
    "uint8",
    "uint32",
    "value_and_grad",
    "where",
    "zeros",
]  # fmt: skip
