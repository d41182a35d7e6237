"""Functions and methods of array libraries (torch, NumPy, JAX, MLX) that mean a word of the language on run-time
values, so that a score_mod or mask_mod written for them compiles as it is.

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
from . import library_functions as composed_words
from .library_functions import TypeLimits, limits
from .objects import describe

LIBRARIES = ("torch", "numpy", "mlx.core", "jax.numpy", "torch.nn.functional", "torch.special", "jax.nn", "jax.lax")
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


def _extremum(kind: str) -> Handler:
    """`maximum` or `minimum`, NaN where one of both is: the language's own ignore it."""

    def build(s: Any, a: Any, b: Any) -> Any:
        found = s.builder.binary(kind, s.number(a), s.number(b))
        for x in (s.number(b), s.number(a)):
            if isinstance(x, Value) and x.dtype.is_float:
                found = s.builder.where(s.builder.binary("ne", x, x), x, found)
        return found

    return build


def _clamp(s: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """By comparisons, so that NaN stays."""
    x = s.number(x)
    for bound, beyond in ((min, "lt"), (max, "gt")):
        if bound is not None:
            x = s.builder.where(s.builder.binary(beyond, x, s.number(bound)), s.number(bound), x)
    return x


def _rounded(how: str) -> Handler:
    def build(s: Any, x: Any) -> Any:
        return composed.rounded(s.builder, how, s.builder.value(s.number(x)))

    return build


def _masked_fill(s: Any, x: Any, mask: Any, value: Any) -> Any:
    x = s.builder.value(s.number(x))
    return s.builder.where(s.number(mask), _in_type_of(s, x, value), x)


def _full_like(s: Any, x: Any, fill_value: Any, dtype: Any = None) -> Any:
    like = s.builder.value(s.number(x))
    if dtype is not None:
        like = s.builder.cast(like, element_type(s, dtype))
    return s.builder.broadcast(_in_type_of(s, like, fill_value), like.shape)


def _in_type_of(s: Any, x: Value, value: Any) -> Value:
    found: Value = s.builder.cast(s.builder.value(s.number(value)), x.dtype)
    return found


def _tensor(s: Any, data: Any, dtype: Any = None, device: Any = None) -> Any:
    """A number written as a tensor without dimensions. As in torch, its width does not change the other operand's."""
    number = s.number(data)
    if dtype is None:
        return number
    element = element_type(s, dtype)
    if isinstance(number, Value):
        return s.builder.cast(number, element)
    return s.call_python(float if element.is_float else bool if element is bool_ else int, number)


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


def _new_full(s: Any, x: Any, size: Any, fill_value: Any, dtype: Any = None) -> Any:
    sides = size if isinstance(size, tuple) else (size,)
    value = s.builder.cast(s.builder.value(s.number(fill_value)), x.dtype if dtype is None else element_type(s, dtype))
    return s.builder.full(value, sides) if sides else value


def _new_tensor(s: Any, x: Any, data: Any, dtype: Any = None) -> Any:
    return s.builder.cast(s.builder.value(s.number(data)), x.dtype if dtype is None else element_type(s, dtype))


def _type_as(s: Any, x: Any, other: Any) -> Any:
    return s.builder.cast(x, s.builder.value(s.number(other)).dtype)


def _clamp_min(s: Any, x: Any, min: Any) -> Any:
    return _clamp(s, x, min=min)


def _clamp_max(s: Any, x: Any, max: Any) -> Any:
    return _clamp(s, x, max=max)


def _tan(s: Any, x: Any) -> Any:
    return s.builder.binary("div", _unary("sin")(s, x), _unary("cos")(s, x))


def _positive(s: Any, x: Any) -> Any:
    return s.number(x)


def _limits(kind: str) -> Handler:
    """`finfo` or `iinfo` of a library's type or of a tile's."""

    def build(s: Any, type: Any = float32) -> TypeLimits:
        element = element_type(s, type)
        if element is bool_ or element.is_float != (kind == "finfo"):
            raise s.fail(WrongCall, f"{kind}: found {element}", "use finfo for float types and iinfo for whole ones")
        return limits(element)

    return build


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


COMPOSED = (
    "sign", "isnan", "isinf", "isfinite", "nan_to_num", "relu", "relu6", "leaky_relu", "silu", "gelu", "softplus",
    "log1p", "expm1", "log10", "pow", "div", "floor_divide", "remainder", "fmod", "frac",
)  # fmt: skip
WORDS: dict[str, Handler] = {
    **{name: _unary(name) for name in FLOAT_FUNCTIONS},
    **{name: _binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul")},
    **{name: getattr(composed_words, name) for name in COMPOSED},
    "add": composed_words.scaled("add"), "sub": composed_words.scaled("sub"), "sgn": composed_words.sign,
    "absolute": _unary("abs"), "neg": _unary("neg"), "negative": _unary("neg"),
    "maximum": _extremum("max"), "minimum": _extremum("min"), "fmax": _binary("max"), "fmin": _binary("min"),
    "equal": _binary("eq"), "not_equal": _binary("ne"), "less": _binary("lt"), "less_equal": _binary("le"),
    "greater": _binary("gt"), "greater_equal": _binary("ge"),
    "subtract": composed_words.scaled("sub"), "multiply": _binary("mul"),
    "divide": composed_words.div, "true_divide": _binary("div"), "power": composed_words.pow,
    "logical_xor": _both("xor"), "tan": _tan, "positive": _positive, "max": _extremum("max"), "min": _extremum("min"),
    "logical_and": _both("and"), "logical_or": _both("or"), "logical_not": _neither,
    "bitwise_and": _binary("and"), "bitwise_or": _binary("or"), "bitwise_not": _unary("not"),
    "bitwise_xor": _binary("xor"), "bitwise_left_shift": _binary("shl"), "bitwise_right_shift": _binary("shr"),
    "where": _where, "rsqrt": _rsqrt, "square": _square, "clamp": _clamp, "clip": _clamp,
    "clamp_min": _clamp_min, "clamp_max": _clamp_max, "finfo": _limits("finfo"), "iinfo": _limits("iinfo"),
    "floor": _rounded("floor"), "ceil": _rounded("ceil"), "round": _rounded("round"), "rint": _rounded("round"),
    "trunc": _rounded("trunc"), "masked_fill": _masked_fill, "tensor": _tensor,
    "ones_like": _like(1), "zeros_like": _like(0), "full_like": _full_like, "reshape": reshape,
}  # fmt: skip
NO_METHODS = ("where", "ones_like", "zeros_like", "full_like", "tensor", "max", "min", "finfo", "iinfo")
ON_CONSTANTS = ("tensor", "finfo", "iinfo")  # functions that are words on compile-time values too
METHODS: dict[str, Handler] = {
    **{name: word for name, word in WORDS.items() if name not in NO_METHODS},
    "float": _cast(float32), "half": _cast(dtypes.float16), "bfloat16": _cast(dtypes.bfloat16),
    "int": _cast(dtypes.int32), "long": _cast(dtypes.int64), "bool": _cast(bool_),
    "astype": _to, "to": _to, "type": _to, "new_ones": _new(1), "new_zeros": _new(0), "size": _size,
    "new_full": _new_full, "new_tensor": _new_tensor, "type_as": _type_as, "where": composed_words.where_method,
}  # fmt: skip


def word_of(function: Any, *, runtime: bool) -> Handler | None:
    """Return the handler of a library's function; None where it means no word. On compile-time values libraries
    compute themselves, except for ON_CONSTANTS."""
    name = getattr(function, "__name__", None)
    if name not in WORDS or not (runtime or name in ON_CONSTANTS):
        return None
    known = any(getattr(sys.modules.get(library), name, None) is function for library in LIBRARIES)
    return WORDS[name] if known else None


def is_of_library(function: Any) -> bool:
    """True for a function of a library, which is not compiled from its source, as that of torch.nn.functional.elu."""
    name = getattr(function, "__name__", "")
    return any(getattr(sys.modules.get(library), name, None) is function for library in LIBRARIES)


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
