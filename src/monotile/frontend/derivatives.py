"""Calls of what `grad`, `value_and_grad` and `elementwise` give: build a function's ops, then those of its derivative,
or check them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from .. import ir
from ..dtypes import bool_
from ..errors import KernelError, NotDifferentiable, NotElementwise, WrongCall
from ..ir import Block, Value
from ..ir.derivatives import derivative
from .expressions import ExpressionBuilder
from .objects import TransformedFunction, describe
from .source import function_node, place

MIXING = frozenset({"reduce", "dot", "trans", *ir.MOVES})  # ops whose elements come from others of their operands
MASK_ARGUMENTS = 4  # of a mask_mod; a score_mod has the score before them
MODS = {4: "mask_mod(b, h, q_idx, kv_idx)", 5: "score_mod(score, b, h, q_idx, kv_idx)"}
MASK_RESULT = "a mask_mod returns True where a key is visible", "compare: q_idx >= kv_idx, or x != 0"
SCORE_RESULT = "a score_mod returns the new score, a number", "return it; to hide a score, where(seen, score, -inf)"
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
        value = _result(s, target.function, args, named)
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


def _result(s: ExpressionBuilder, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function, in which a bool beside a number is 0 or 1. Where a kernel of the library calls a mod that does
    not fit, the error shows the mod, not the library's line."""
    loc = s.builder.loc
    of_library = str(s.globals.get("__name__")).startswith("monotile.") and isinstance(function, types.FunctionType)
    outer, s.builder.counts_bools = s.builder.counts_bools, True
    try:
        value = s.call(function, args, named)
    except WrongCall as error:
        if not of_library or error.loc != loc:
            raise
        found, cure = error.found, f"give it {len(args)} parameters, as {MODS.get(len(args), 'documented')}"
    else:
        is_bool = isinstance(value, bool) or (isinstance(value, Value) and value.dtype is bool_)
        if not of_library or (isinstance(value, Value | int | float) and is_bool == (len(args) == MASK_ARGUMENTS)):
            return value
        wanted, cure = MASK_RESULT if len(args) == MASK_ARGUMENTS else SCORE_RESULT
        found = f"{wanted}, found {describe(value)}"
    finally:
        s.builder.counts_bools = outer
    s.builder.loc = place(function_node(function), function.__code__.co_filename)
    failed = s.fail(WrongCall, found, cure)
    s.builder.loc = loc
    raise failed


def _differentiate(
    s: ExpressionBuilder, function: Any, x: Value, others: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Value]:
    """Return the function's value and its derivative by x, which has the shape that both broadcast to."""
    b, loc = s.builder, s.builder.loc
    argument = b.emit("broadcast", (x,), x.type)  # a value of its own: where the function captures x, x is a constant
    value = _result(s, function, (argument.result, *others), named)
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
