"""Calls of what `grad`, `value_and_grad` and `elementwise` give: build a function's ops, then those of its derivative,
or check them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import ir
from ..errors import KernelError, NotDifferentiable, NotElementwise
from ..ir import Block, Value
from ..ir.derivatives import derivative
from .expressions import ExpressionBuilder
from .objects import TransformedFunction, describe

MIXING = frozenset({"reduce", "dot", "trans", *ir.MOVES})  # ops whose elements come from others of their operands
NAMES = {"trans": ".T", "scan": "cumsum"}


def call_derivative(target: TransformedFunction) -> Callable[..., Any]:
    """Return the handler of a call `grad(f)(x, ...)`."""

    def build(s: ExpressionBuilder, x: Any, /, *others: Any, **named: Any) -> Any:
        x = s.number(x)
        if not isinstance(x, Value | float) or (isinstance(x, Value) and not x.dtype.is_float):
            found = f"{target.name} is the derivative by the first argument, found {describe(x)}"
            raise s.fail(NotDifferentiable, found, "make it a float: .astype(float32)")
        value, slope = _differentiate(s, target.function, s.builder.value(x), others, named)
        return (value, slope) if target.with_value else slope

    return build


def call_elementwise(target: TransformedFunction) -> Callable[..., Any]:
    """Return the handler of a call `elementwise(f)(x, ...)`."""

    def build(s: ExpressionBuilder, *args: Any, **named: Any) -> Any:
        block, loc = s.builder.block, s.builder.loc
        before = len(block.ops)
        value = s.call(target.function, args, named)
        made = Block()
        made.ops = block.ops[before:]
        for op in ir.walk(made):
            if op.kind in MIXING and any(len(v.shape) == 2 for v in op.operands):
                s.builder.loc = op.loc
                word = op.attrs.get("fold", NAMES.get(op.kind, op.kind))
                found = f"{word!r} mixes elements of a tile, in a function that is called for each element alone"
                error = s.fail(NotElementwise, found, "compute from the element and its position; reduce in a kernel")
                if loc is not None:
                    error.calls.append(loc)
                raise error
        return value

    return build


def _differentiate(
    s: ExpressionBuilder, function: Any, x: Value, others: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Value]:
    """Return the function's value and its derivative by x, which has the shape that both broadcast to."""
    b, loc = s.builder, s.builder.loc
    argument = b.emit("broadcast", (x,), x.type)  # a value of its own: where the function captures x, x is a constant
    value = s.call(function, (argument.result, *others), named)
    if not isinstance(value, Value | int | float):
        found = f"a function with a derivative returns one tile or number, found {describe(value)}"
        raise s.fail(NotDifferentiable, found, "return the one result whose derivative is asked for")
    try:
        slope = derivative(b, argument, value) if isinstance(value, Value) else None
    except KernelError as error:
        if loc is not None:
            error.calls.append(loc)
        raise
    of_both = b.broadcast_shape((x, value)) if isinstance(value, Value) else x.shape
    slope = b.broadcast(slope if slope is not None else b.value(0.0), of_both)
    at = b.block.ops.index(argument)
    tail = Block()
    tail.ops = b.block.ops[at + 1 :]
    ir.replace(tail, {argument.result: x})
    del b.block.ops[at]
    return (x if value is argument.result else value), slope
