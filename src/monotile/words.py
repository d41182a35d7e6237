"""What each word of the language builds. The keys are the words themselves, and the Python builtins that mean the same."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from . import dtypes, language
from .dtypes import DType, float32, int32
from .errors import ShapeNotConstant, WrongCall
from .expressions import Expressions, Loop, Method
from .ir import Value


def _program_id(s: Expressions, *counts: Any) -> Any:
    if not counts:
        raise s.fail(WrongCall, "program_id needs the size of the grid", "program_id(cdiv(n, BLOCK))")
    ids = s.builder.program_id([_scalar(s, c) for c in counts])
    return ids[0] if len(ids) == 1 else ids


def _scalar(s: Expressions, item: Any) -> Any:
    if isinstance(item, Value) and not item.shape and item.dtype.is_int:
        return item
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    raise s.fail(WrongCall, f"a whole number is needed here, found {item!r}", "use an int or an integer scalar")


def _full(s: Expressions, shape: Any, value: Any, dtype: DType | None = None) -> Value:
    sides = shape if isinstance(shape, tuple) else (shape,)
    number = s.builder.value(s.number(value)) if dtype is None else _convert(s, s.number(value), dtype)
    return s.builder.full(number, sides)


def _convert(s: Expressions, item: Any, dtype: DType) -> Value:
    if not isinstance(item, Value) and dtype in (float32, int32, dtypes.int64, dtypes.bool_):
        return s.builder.const(item, dtype)
    return s.builder.cast(item, dtype)


def _unary(kind: str, plain: Callable[[Any], Any]) -> Callable[..., Any]:
    def build(s: Expressions, x: Any) -> Any:
        if isinstance(s.number(x), Value):
            return s.builder.unary(kind, x)
        try:
            return plain(x)
        except (ValueError, OverflowError) as error:
            raise s.fail(WrongCall, f"{kind}({x}): {error}", "correct the constant") from None

    return build


def _binary(kind: str, plain: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def build(s: Expressions, a: Any, b: Any) -> Any:
        if isinstance(s.number(a), Value) or isinstance(s.number(b), Value):
            return s.builder.binary(kind, a, b)
        return plain(a, b)

    return build


def _reduce(kind: str) -> Callable[..., Any]:
    def build(s: Expressions, x: Any, axis: Any = None) -> Any:
        if not isinstance(x, Value):
            raise s.fail(WrongCall, f"{kind} along an axis needs a tile", "give a tile: load one with t[rows]")
        if axis is None and len(x.shape) == 1:
            axis = 0
        if isinstance(axis, Value) or not isinstance(axis, int):
            raise s.fail(ShapeNotConstant, f"{kind} needs a constant axis", "write axis=0 or axis=1")
        return s.builder.reduce(kind, x, axis)

    return build


def _builtin_extreme(kind: str) -> Callable[..., Any]:
    """Python's max and min: over an axis of a tile, or of several scalars."""

    def build(s: Expressions, *args: Any, axis: Any = None) -> Any:
        if len(args) == 1 and isinstance(args[0], Value):
            return _reduce(kind)(s, args[0], axis)
        if not any(isinstance(a, Value) for a in args):
            return getattr(builtins, kind)(*args)
        result = args[0]
        for other in args[1:]:
            result = s.builder.binary(kind, s.number(result), s.number(other))
        return result

    return build


def _where(s: Expressions, condition: Any, yes: Any, no: Any) -> Any:
    if not isinstance(condition, Value):
        return yes if condition else no
    return s.builder.where(condition, s.number(yes), s.number(no))


def _dot(s: Expressions, a: Any, b: Any) -> Value:
    for item in (a, b):
        if not isinstance(item, Value):
            raise s.fail(WrongCall, "dot needs two tiles", "load them first: dot(a[rows, cols], b[cols, ...])")
    return s.builder.dot(a, b)


def _range(s: Expressions, *bounds: Any) -> Loop:
    low, high, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}.get(len(bounds), (None, None, None))
    if high is None:
        raise s.fail(WrongCall, f"range takes 1 to 3 arguments, found {len(bounds)}", "range(low, high, step)")
    return _loop(s, low, high, step, None)


def _blocks(s: Expressions, length: Any, step: Any, visible: Any = None) -> Loop:
    return _loop(s, 0, length, step, visible)


def _loop(s: Expressions, low: Any, high: Any, step: Any, visible: Any) -> Loop:
    if isinstance(step, Value):
        raise s.fail(ShapeNotConstant, "the step of a loop is only known at run time", "make the step a Const")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise s.fail(WrongCall, f"the step of a loop must be a positive whole number, found {step!r}", "count upwards")
    b = s.builder
    ends = [b.cast(b.value(_scalar(s, x)), int32) for x in (low, high)]
    return Loop(ends[0], ends[1], step, visible)


def _static_range(s: Expressions, *bounds: Any) -> range:
    for bound in bounds:
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise s.fail(ShapeNotConstant, "static_range needs constant bounds", "use range for run-time bounds")
    return range(*bounds)


def _number(dtype: DType, plain: type) -> Callable[..., Any]:
    def build(s: Expressions, x: Any) -> Any:
        return s.builder.cast(x, dtype) if isinstance(x, Value) else plain(x)

    return build


def method(s: Expressions, target: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.astype(dtype)`, `x.sum(axis=1)` and their like."""
    if target.name == "astype":
        if len(args) != 1 or kwargs or not isinstance(args[0], DType):
            raise s.fail(WrongCall, "astype takes one element type", "x.astype(float32)")
        return s.builder.cast(target.owner, args[0])
    try:
        return _reduce(target.name)(s, target.owner, *args, **kwargs)
    except TypeError:
        raise s.fail(WrongCall, f"{target.name} takes an axis", f"x.{target.name}(axis=1)") from None


WORDS: dict[Any, Callable[..., Any]] = {
    language.program_id: _program_id,
    language.arange: lambda s, n: s.builder.arange(n),
    language.full: _full,
    language.zeros: lambda s, shape, dtype=float32: _full(s, shape, 0, dtype),
    language.where: _where,
    language.dot: _dot,
    language.cdiv: lambda s, a, b: s.builder.cdiv(_scalar(s, a), _scalar(s, b)),
    language.exp: _unary("exp", math.exp),
    language.exp2: _unary("exp2", lambda x: 2.0**x),
    language.log: _unary("log", math.log),
    language.log2: _unary("log2", math.log2),
    language.tanh: _unary("tanh", math.tanh),
    language.sqrt: _unary("sqrt", math.sqrt),
    language.abs: _unary("abs", builtins.abs),
    language.maximum: _binary("max", builtins.max),
    language.minimum: _binary("min", builtins.min),
    language.sum: _reduce("sum"),
    language.max: _reduce("max"),
    language.min: _reduce("min"),
    language.blocks: _blocks,
    language.static_range: _static_range,
    builtins.abs: _unary("abs", builtins.abs),
    builtins.max: _builtin_extreme("max"),
    builtins.min: _builtin_extreme("min"),
    builtins.sum: _reduce("sum"),
    range: _range,
    float: _number(float32, float),
    int: _number(int32, int),
    bool: _number(dtypes.bool_, bool),
}
