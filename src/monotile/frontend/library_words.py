"""Functions and methods of array libraries (torch, NumPy, MLX) that mean a word of the language on run-time values, so
that a score_mod or mask_mod written for them compiles as it is.

Libraries are not imported: a function is recognised by being the one that a loaded library has under its name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from .. import dtypes
from ..dtypes import ALL, BY_NAME, DType, bool_, float32
from ..errors import WrongCall
from ..ir import Value, composed
from .objects import describe

LIBRARIES = ("torch", "numpy", "mlx.core")
Handler = Callable[..., Any]


def _unary(kind: str) -> Handler:
    """An op of one float; whole numbers become floats, as they do in these libraries."""

    def build(s: Any, x: Any) -> Any:
        value = s.builder.value(s.number(x))
        whole = value.dtype.is_int and kind not in ("abs", "neg", "not")
        return s.builder.unary(kind, s.builder.cast(value, float32) if whole else value)

    return build


def _binary(kind: str) -> Handler:
    def build(s: Any, a: Any, b: Any) -> Any:
        return s.builder.binary(kind, s.number(a), s.number(b))

    return build


def _both(kind: str) -> Handler:
    """`and` or `or` of what is not zero."""

    def build(s: Any, a: Any, b: Any) -> Any:
        return s.builder.binary(kind, _truth(s, a), _truth(s, b))

    return build


def _neither(s: Any, x: Any) -> Any:
    return s.builder.unary("not", _truth(s, x))


def _truth(s: Any, x: Any) -> Value:
    found: Value = s.builder.cast(s.number(x), bool_)
    return found


def _where(s: Any, condition: Any, yes: Any, no: Any) -> Any:
    return s.builder.where(s.number(condition), s.number(yes), s.number(no))


def _rsqrt(s: Any, x: Any) -> Any:
    return s.builder.binary("div", 1.0, _unary("sqrt")(s, x))


def _square(s: Any, x: Any) -> Any:
    return s.builder.binary("mul", s.number(x), s.number(x))


def _clamp(s: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    x = s.number(x)
    if min is not None:
        x = s.builder.binary("max", x, s.number(min))
    return x if max is None else s.builder.binary("min", x, s.number(max))


def _divide(s: Any, a: Any, b: Any) -> Any:
    a, b = s.number(a), s.number(b)
    if not isinstance(a, float) and not isinstance(b, float):
        a = s.builder.cast(s.builder.value(a), float32)
    return s.builder.binary("div", a, b)


def _like(number: int) -> Handler:
    def build(s: Any, x: Any, dtype: Any = None) -> Any:
        value = s.builder.value(s.number(x))
        return _filled(s, value.shape, number, value.dtype if dtype is None else element_type(s, dtype))

    return build


def _new(number: int) -> Handler:
    def build(s: Any, x: Any, size: Any, dtype: Any = None) -> Any:
        sides = size if isinstance(size, tuple) else (size,)
        return _filled(s, sides, number, x.dtype if dtype is None else element_type(s, dtype))

    return build


def _filled(s: Any, shape: tuple[int, ...], number: int, dtype: DType) -> Any:
    value = s.builder.cast(s.builder.value(number), dtype)
    return s.builder.full(value, shape) if shape else value


def _cast(dtype: DType) -> Handler:
    def build(s: Any, x: Any) -> Any:
        return s.builder.cast(s.number(x), dtype)

    return build


def _to(s: Any, x: Any, dtype: Any) -> Any:
    return s.builder.cast(x, element_type(s, dtype))


def _size(s: Any, x: Any) -> Any:
    return x.shape


FLOAT_FUNCTIONS = (
    "exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "sin", "cos", "sqrt", "reciprocal", "abs",
)  # fmt: skip


def reshape(s: Any, x: Any, *shape: Any) -> Any:
    """A tile with other sides, given one by one or as a tuple."""
    sides = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    if not isinstance(x, Value) or not x.shape:
        raise s.fail(WrongCall, f"reshape needs a tile, found {describe(x)}", "give a tile: load one with t[rows]")
    return composed.reshape(s.builder, x, tuple(sides))


WORDS: dict[str, Handler] = {
    **{name: _unary(name) for name in FLOAT_FUNCTIONS},
    **{name: _binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul")},
    "absolute": _unary("abs"), "neg": _unary("neg"), "negative": _unary("neg"),
    "maximum": _binary("max"), "minimum": _binary("min"), "fmax": _binary("max"), "fmin": _binary("min"),
    "equal": _binary("eq"), "not_equal": _binary("ne"), "less": _binary("lt"), "less_equal": _binary("le"),
    "greater": _binary("gt"), "greater_equal": _binary("ge"),
    "subtract": _binary("sub"), "multiply": _binary("mul"), "divide": _divide, "div": _divide, "true_divide": _divide,
    "floor_divide": _binary("floordiv"), "remainder": _binary("mod"),
    "logical_and": _both("and"), "logical_or": _both("or"), "logical_not": _neither,
    "bitwise_and": _binary("and"), "bitwise_or": _binary("or"), "bitwise_not": _unary("not"),
    "bitwise_xor": _binary("xor"), "bitwise_left_shift": _binary("shl"), "bitwise_right_shift": _binary("shr"),
    "where": _where, "rsqrt": _rsqrt, "square": _square, "clamp": _clamp, "clip": _clamp,
    "ones_like": _like(1), "zeros_like": _like(0), "reshape": reshape,
}  # fmt: skip
METHODS: dict[str, Handler] = {
    **{name: word for name, word in WORDS.items() if name not in ("where", "ones_like", "zeros_like")},
    "float": _cast(float32), "half": _cast(dtypes.float16), "bfloat16": _cast(dtypes.bfloat16),
    "int": _cast(dtypes.int32), "long": _cast(dtypes.int64), "bool": _cast(bool_),
    "astype": _to, "to": _to, "type": _to, "new_ones": _new(1), "new_zeros": _new(0), "size": _size,
}  # fmt: skip


def word_of(function: Any) -> Handler | None:
    """Return the handler of a library's function; None where it means no word."""
    name = getattr(function, "__name__", None)
    if name not in WORDS or not any(getattr(sys.modules.get(lib), name, None) is function for lib in LIBRARIES):
        return None
    return WORDS[name]


def method_of(name: str, owner: Value) -> Handler:
    """Return the handler of a method of a library's arrays."""

    def build(s: Any, *args: Any, **kwargs: Any) -> Any:
        return METHODS[name](s, owner, *args, **kwargs)

    found = inspect.signature(METHODS[name])
    first, _, *rest = found.parameters.values()  # errors show the arguments without the owner
    build.__signature__ = found.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
    return build


def element_type(s: Any, dtype: Any) -> DType:
    """Return an element type by monotile's, torch's, NumPy's or MLX's name for it."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).rpartition(".")[2]
    found = dtype if isinstance(dtype, DType) else BY_NAME.get(name)
    if isinstance(dtype, str | Value) or found is None:
        cure = f"use {', '.join(d.name for d in ALL[:-1])} or bool_ of monotile.language"
        raise s.fail(WrongCall, f"an element type is needed here, found {describe(dtype)}", cure)
    return found
