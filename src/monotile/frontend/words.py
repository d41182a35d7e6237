"""Build the IR of each word of the language, and of the Python builtins that mean the same.

A handler takes the expression builder `s` of the call and the call's arguments."""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable
from typing import Any

from .. import dtypes
from ..dtypes import DType, bool_, float32, int32
from ..errors import BadOperand, BadStep, DTypeMismatch, ShapeNotConstant, WrongCall
from ..ir import Tensor, Value, composed, special
from . import library_words, vocabulary
from .derivatives import call_derivative, call_elementwise
from .expressions import REDUCTIONS, ExpressionBuilder
from .functions import is_function
from .library_words import element_type, method_of
from .objects import Closure, Method, RuntimeRange, TransformedFunction, describe

MAX_UNROLLED = 4096


def _program_id(s: ExpressionBuilder, *counts: Any) -> Any:
    if not counts:
        raise s.fail(WrongCall, "program_id needs the size of the grid", "program_id(cdiv(n, BLOCK))")
    ids = s.builder.program_id([_int32(s, c) for c in counts])
    return ids[0] if len(ids) == 1 else ids


def _integer(s: ExpressionBuilder, item: Any) -> Any:
    """Check that an argument is one integer."""
    item = s.number(item)
    if isinstance(item, Value) and not item.shape and item.dtype.is_int:
        return item
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    found = f"one whole number is needed here, found {describe(item)}"
    raise s.fail(WrongCall, found, "use an int or an integer scalar")


def _int32(s: ExpressionBuilder, item: Any) -> Any:
    """Check that an argument is one integer of at most 32 bits, as sizes of grids and bounds of loops are."""
    item = _integer(s, item)
    if isinstance(item, Value) and item.dtype.limits[1] > int32.limits[1]:
        raise s.fail(DTypeMismatch, f"grids and loops count in int32, found {item.type}", "cast it: .astype(int32)")
    return item


def _arange(s: ExpressionBuilder, n: Any) -> Value:
    return s.builder.arange(n)


def _full(s: ExpressionBuilder, shape: Any, value: Any, dtype: Any = None) -> Value:
    sides = shape if isinstance(shape, tuple) else (shape,)
    value = s.number(value)
    if dtype is not None:
        element = element_type(s, dtype)
        value = s.builder.cast(s.builder.value(value, element), element)
    return s.builder.full(value, sides)


def _zeros(s: ExpressionBuilder, shape: Any, dtype: Any = float32) -> Value:
    return _full(s, shape, False if dtype is bool_ else 0, dtype)


def _unary(kind: str, plain: Callable[[Any], Any]) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, x: Any) -> Any:
        x = s.number(x)
        return s.builder.unary(kind, x) if isinstance(x, Value) else s.call_python(plain, x)

    return build


def _binary(kind: str, plain: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, a: Any, b: Any) -> Any:
        a, b = s.number(a), s.number(b)
        if isinstance(a, Value) or isinstance(b, Value):
            return s.builder.binary(kind, a, b)
        return plain(a, b)

    return build


def _rounded(how: str, plain: Callable[[Any], Any]) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, x: Any) -> Any:
        x = s.number(x)
        if isinstance(x, Value):
            return composed.rounded(s.builder, how, x)
        return s.call_python(plain, x)

    return build


def _round(s: ExpressionBuilder, x: Any, ndigits: Any = None) -> Any:
    x = s.number(x)
    if not isinstance(x, Value):
        return s.call_python(builtins.round, x, ndigits)
    if ndigits is not None:
        raise s.fail(WrongCall, "round to digits of a run-time value", "write round(x * 100.0) / 100.0")
    return composed.rounded(s.builder, "round", x)


def _fma(s: ExpressionBuilder, a: Any, b: Any, c: Any) -> Any:
    a, b, c = s.number(a), s.number(b), s.number(c)
    if any(isinstance(x, Value) for x in (a, b, c)):
        return s.builder.fma(a, b, c)
    return s.call_python(lambda a, b, c: a * b + c, a, b, c)


def _reduce(kind: str) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, x: Any, axis: Any = None) -> Any:
        if not isinstance(x, Value) or not x.shape:
            found = f"{kind} along an axis needs a tile, found {describe(x)}"
            raise s.fail(WrongCall, found, "give a tile: load one with t[rows]")
        if axis is None and len(x.shape) == 1:
            axis = 0
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise s.fail(
                ShapeNotConstant, f"{kind} needs a constant axis, found {describe(axis)}", "write axis=0 or axis=1"
            )
        if kind.startswith("arg"):
            return composed.position_of_extremum(s.builder, kind[3:], x, axis)
        return s.builder.cumsum(x, axis) if kind == "cumsum" else s.builder.reduce(kind, x, axis)

    return build


def _python_extremum(kind: str) -> Callable[..., Any]:
    """Build Python's max or min: along an axis of a tile, or of several numbers."""

    def build(s: ExpressionBuilder, *args: Any, axis: Any = None) -> Any:
        if len(args) == 1 and isinstance(args[0], Value):
            return _reduce(kind)(s, args[0], axis)
        items = args[0] if len(args) == 1 and isinstance(args[0], tuple) else args
        if len(items) < (1 if items is not args else 2) or axis is not None:
            raise s.fail(WrongCall, f"{kind} of {len(items)} number(s)", f"write {kind}(a, b) or {kind}(x, axis=1)")
        result = s.number(items[0])
        for other in items[1:]:
            result = _binary(kind, getattr(builtins, kind))(s, result, other)
        return result

    return build


def _extremum(kind: str) -> Callable[..., Any]:
    """Build the words max and min: along an axis of a tile, else Python's, in whose place they may be imported."""

    def build(s: ExpressionBuilder, x: Any, axis: Any = None, *others: Any) -> Any:
        if isinstance(x, Value) and x.shape and not isinstance(axis, Value) and not others:
            return _reduce(kind)(s, x, axis)
        return _python_extremum(kind)(s, x, *(() if axis is None else (axis,)), *others)

    return build


def _where(s: ExpressionBuilder, condition: Any, yes: Any, no: Any) -> Any:
    condition, yes, no = s.number(condition), s.number(yes), s.number(no)
    if isinstance(condition, Value):
        return s.builder.where(condition, yes, no)
    return s.builder.choose(bool(condition), yes, no)


def _dot(s: ExpressionBuilder, a: Any, b: Any) -> Value:
    for item in (a, b):
        if not isinstance(item, Value):
            cure = "load tiles first: dot(a[rows, inner], b[inner, cols])"
            raise s.fail(WrongCall, f"dot needs two tiles, found {describe(item)}", cure)
    return s.builder.dot(a, b)


def _cdiv(s: ExpressionBuilder, a: Any, b: Any) -> Any:
    return s.builder.cdiv(_integer(s, a), _integer(s, b))


def _range(s: ExpressionBuilder, *bounds: Any) -> RuntimeRange:
    if not 1 <= len(bounds) <= 3:
        raise s.fail(WrongCall, f"range takes 1 to 3 arguments, found {len(bounds)}", "write range(low, high, step)")
    low, high, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    return _runtime_range(s, low, high, step, None)


def _blocks(s: ExpressionBuilder, length: Any, step: Any, visible: Any = None, start: Any = 0) -> RuntimeRange:
    return _runtime_range(s, start, length, step, visible)


def _runtime_range(s: ExpressionBuilder, low: Any, high: Any, step: Any, visible: Any) -> RuntimeRange:
    if isinstance(step, Value):
        raise s.fail(ShapeNotConstant, "the step of a loop is only known at run time", "make the step a Const")
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < 2**31:
        found = f"the step of a loop must be a positive whole number, found {describe(step)}"
        if isinstance(step, int) and -(2**31) < step < 1:
            found = f"the step of a loop must be a positive whole number, found {step}"
        raise s.fail(BadStep, found, "count upwards; inside the loop use high - 1 - j")
    b = s.builder
    ends = [b.cast(_int32(s, x), int32) for x in (low, high)]
    return RuntimeRange(ends[0], ends[1], step, visible)


def _static_range(s: ExpressionBuilder, *bounds: Any) -> range:
    for bound in bounds:
        if isinstance(bound, bool) or not isinstance(bound, int):
            found = f"static_range needs constant bounds, found {describe(bound)}"
            raise s.fail(ShapeNotConstant, found, "use range for run-time bounds")
    try:
        iterations = range(*bounds)
        if len(iterations) <= MAX_UNROLLED:
            return iterations
    except (TypeError, ValueError) as error:
        raise s.fail(BadStep, f"static_range: {error}", "write static_range(low, high, step)") from None
    except OverflowError:
        pass
    raise s.fail(BadStep, f"static_range of more than {MAX_UNROLLED} iterations", "use range, which is not unrolled")


def _transformed(name: str) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, function: Any) -> TransformedFunction:
        known = is_function(function) or isinstance(function, Closure) or handler(function) is not None
        if not known:
            cure = f"give it the function, then the arguments: {name}(f)(x)"
            raise s.fail(WrongCall, f"{name} needs a function, found {describe(function)}", cure)
        return TransformedFunction(function, name)

    return build


def _conversion(dtype: DType, plain: type) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, x: Any) -> Any:
        if isinstance(x, Value):
            return s.builder.cast(x, dtype)
        return s.call_python(plain, x if isinstance(x, str) else s.number(x))

    return build


def _reduction_method(kind: str, owner: Value) -> Callable[..., Any]:
    def build(s: ExpressionBuilder, axis: Any = None) -> Any:
        return _reduce(kind)(s, owner, axis)

    return build


def _print(s: ExpressionBuilder, *items: Any) -> None:
    """Build a print: text and constants are known now, tiles and run-time scalars are shown by the interpreter."""
    for item in items:
        if isinstance(item, Tensor):
            cure = f"load a tile first: print({item.name}[rows])"
            raise s.fail(BadOperand, f"print shows tiles and numbers, found {describe(item)}", cure)
    values = tuple(item for item in items if isinstance(item, Value))
    s.builder.emit("print", values, parts=tuple(None if isinstance(item, Value) else str(item) for item in items))


def handler(function: Any) -> Callable[..., Any] | None:
    """Return the handler of a word, of a method such as `x.astype` or of what `grad` gave; None for other things."""
    if isinstance(function, Method):
        return _method(function)
    if isinstance(function, TransformedFunction):
        return call_elementwise(function) if function.name == "elementwise" else call_derivative(function)
    known = isinstance(function, types.FunctionType | types.BuiltinFunctionType | type)
    return WORDS.get(function) if known else None


def _method(target: Method) -> Callable[..., Any]:
    if target.name in REDUCTIONS:
        return _reduction_method(target.name, target.owner)
    return method_of(target.name, target.owner)


WORDS: dict[Any, Callable[..., Any]] = {
    vocabulary.program_id: _program_id,
    vocabulary.arange: _arange,
    vocabulary.full: _full,
    vocabulary.zeros: _zeros,
    vocabulary.where: _where,
    vocabulary.dot: _dot,
    vocabulary.cdiv: _cdiv,
    vocabulary.exp: _unary("exp", math.exp),
    vocabulary.exp2: _unary("exp2", lambda x: 2.0**x),
    vocabulary.log: _unary("log", math.log),
    vocabulary.log2: _unary("log2", math.log2),
    vocabulary.tanh: _unary("tanh", math.tanh),
    vocabulary.sigmoid: _unary("sigmoid", lambda x: float(special.sigmoid(x))),
    vocabulary.erf: _unary("erf", math.erf),
    vocabulary.sin: _unary("sin", math.sin),
    vocabulary.cos: _unary("cos", math.cos),
    vocabulary.sqrt: _unary("sqrt", math.sqrt),
    vocabulary.floor: _rounded("floor", math.floor),
    vocabulary.ceil: _rounded("ceil", math.ceil),
    vocabulary.round: _round,
    vocabulary.trunc: _rounded("trunc", math.trunc),
    vocabulary.reciprocal: _unary("reciprocal", lambda x: 1.0 / x),
    vocabulary.fma: _fma,
    vocabulary.abs: _unary("abs", builtins.abs),
    vocabulary.maximum: _binary("max", builtins.max),
    vocabulary.minimum: _binary("min", builtins.min),
    vocabulary.sum: _reduce("sum"),
    vocabulary.max: _extremum("max"),
    vocabulary.min: _extremum("min"),
    vocabulary.argmax: _reduce("argmax"),
    vocabulary.argmin: _reduce("argmin"),
    vocabulary.cumsum: _reduce("cumsum"),
    vocabulary.reshape: library_words.reshape,
    vocabulary.elementwise: _transformed("elementwise"),
    vocabulary.grad: _transformed("grad"),
    vocabulary.value_and_grad: _transformed("value_and_grad"),
    vocabulary.blocks: _blocks,
    vocabulary.static_range: _static_range,
    builtins.abs: _unary("abs", builtins.abs),
    builtins.round: _round,
    builtins.max: _python_extremum("max"),
    builtins.min: _python_extremum("min"),
    builtins.sum: _reduce("sum"),
    builtins.print: _print,
    range: _range,
    float: _conversion(float32, float),
    int: _conversion(int32, int),
    bool: _conversion(dtypes.bool_, bool),
}
