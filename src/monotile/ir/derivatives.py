"""Derivatives of elementwise functions, in forward mode: each value that depends on the input gets a derivative.

`RULES` has one rule per op. Comparisons, integers and loaded values have derivative zero, and nothing is built for
them. A product with a derivative that is zero because `where` took the other branch is zero, even with infinity or
NaN: `Tangent.live` keeps such zeros apart until the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ..dtypes import bool_, float32
from ..errors import NotDifferentiable
from .builder import Builder, ValueOrNumber
from .ops import MOVES, WRITES, Block, Op, Type, Value, walk


class Tangent(NamedTuple):
    """The derivative of a value: `slope` where `live` holds, and zero elsewhere whatever `slope` is there. Both
    broadcast to the value; without `live` it holds everywhere."""

    slope: Value
    live: Value | None = None


Maybe: TypeAlias = Tangent | None  # None: the value does not depend on the input


def derivative(builder: Builder, x: Op, result: Value) -> Value | None:
    """Build the derivative of a value by the result of `x`, an op of the current block, among the ops behind `x`. None
    if it is zero. Each element may depend on one element of x only: other ops raise NotDifferentiable."""
    loc, block = builder.loc, builder.block
    at = block.ops.index(x) + 1
    ops, block.ops = block.ops[at:], block.ops[:at]
    forward = _Forward(builder, x.result)
    forward.run(ops)
    builder.loc = loc
    tangent = forward.tangents.get(result)
    return None if tangent is None else forward.dense(tangent)


class _Forward:
    """Build the tangents of ops in their order."""

    def __init__(self, builder: Builder, x: Value) -> None:
        self.b = builder
        self.one_element = all(side == 1 for side in x.shape)  # then ops cannot mix elements of x
        self.tangents: dict[Value, Tangent] = {x: Tangent(builder.const(1.0, float32))}

    def run(self, ops: Sequence[Op]) -> None:
        """Append the ops to the current block, each with its tangent behind it."""
        for op in ops:
            self.b.loc = op.loc
            if op.kind == "if":
                self.branches(op)
            self.b.block.ops.append(op)
            if op.kind == "for" and any(v in self.tangents for v in (*op.operands, *_read(op.blocks[0]))):
                raise self.fail("a run-time loop", "unroll it: for n in static_range(...)")
            if op.kind not in ("if", "for") and any(v in self.tangents for v in op.operands):
                self.apply(op)

    def apply(self, op: Op) -> None:
        """Set the tangent of an op that reads a value with one."""
        if op.kind == "print":
            return
        if op.kind in WRITES:
            raise self.fail("a store", "store the value after the call")
        if op.kind in MOVES | {"reduce", "dot"}:
            name = op.attrs["fold"] if op.kind == "reduce" else "cumsum" if op.kind == "scan" else op.kind
            raise self.fail(f"{name!r}", "compute it outside, from values whose derivative is not asked for")
        if not op.result.dtype.is_float or op.result in self.b.flat:
            return
        tangent = RULES[op.kind](self, op, *(self.tangents.get(v) for v in op.operands))
        if tangent is not None:
            self.tangents[op.result] = tangent

    def fail(self, what: str, cure: str) -> Exception:
        found = f"{what} depends on the argument of grad and is not elementwise: it has no derivative here"
        return self.b.fail(NotDifferentiable, found, cure)

    # ---- branches ----------------------------------------------------------------------------------------------------

    def branches(self, op: Op) -> None:
        """Let both branches of an `if` yield the tangents of its results, too."""
        ends = []
        for block in op.blocks:
            outer, self.b.block = self.b.block, block
            (*ops, end), block.ops = block.ops, []
            self.run(ops)
            block.ops.append(end)
            self.b.block = outer
            ends.append([self.tangents.get(v) for v in end.operands])
        self.b.loc = op.loc
        for result, *sides in zip(op.results, *ends, strict=True):
            if any(side is not None for side in sides):
                slope = self.yielded(op, Type(float32, result.shape), [0.0 if t is None else t.slope for t in sides])
                lives = [False if t is None else True if t.live is None else t.live for t in sides]
                whole = all(live is True for live in lives)
                self.tangents[result] = Tangent(
                    slope, None if whole else self.yielded(op, Type(bool_, result.shape), lives)
                )

    def yielded(self, op: Op, type_: Type, sides: Sequence[ValueOrNumber]) -> Value:
        """Add a result to an `if`."""
        for block, side in zip(op.blocks, sides, strict=True):
            outer, self.b.block = self.b.block, block
            end = block.ops.pop()
            value = self.b.broadcast(self.b.value(side), type_.shape)
            block.ops.append(Op("yield", (*end.operands, value), loc=end.loc))
            self.b.block = outer
        result = Value(type_, op)
        op.results = (*op.results, result)
        return result

    # ---- arithmetic of tangents --------------------------------------------------------------------------------------

    def dense(self, t: Tangent) -> Value:
        """Return the derivative with its zeros."""
        return t.slope if t.live is None else self.b.where(t.live, t.slope, 0.0)

    def apply_to_slope(self, kind: str, t: Maybe, *others: ValueOrNumber) -> Maybe:
        if t is None:
            return None
        slope = self.b.binary(kind, t.slope, *others) if others else self.b.unary(kind, t.slope)
        return Tangent(slope, t.live)

    def neg(self, t: Maybe) -> Maybe:
        return self.apply_to_slope("neg", t)

    def scale(self, t: Maybe, factor: ValueOrNumber) -> Maybe:
        return self.apply_to_slope("mul", t, factor)

    def divide(self, t: Maybe, divisor: ValueOrNumber) -> Maybe:
        return self.apply_to_slope("div", t, divisor)

    def add(self, a: Maybe, b: Maybe) -> Maybe:
        if a is None or b is None:
            return a or b
        if a.live is b.live:
            return Tangent(self.b.binary("add", a.slope, b.slope), a.live)
        live = None if a.live is None or b.live is None else self.b.binary("or", a.live, b.live)
        return Tangent(self.b.binary("add", self.dense(a), self.dense(b)), live)

    def select(self, test: Value, yes: Maybe, no: Maybe) -> Maybe:
        """Return the tangent of where(test, ...)."""
        if yes is None:
            return None if no is None else Tangent(no.slope, self.both(self.b.unary("not", test), no.live))
        if no is None:
            return Tangent(yes.slope, self.both(test, yes.live))
        slope = self.b.where(test, yes.slope, no.slope)
        if yes.live is None and no.live is None:
            return Tangent(slope)
        lives = (True if t.live is None else t.live for t in (yes, no))
        return Tangent(slope, self.b.where(test, *lives))

    def both(self, test: Value, live: Value | None) -> Value:
        return test if live is None else self.b.binary("and", test, live)


def _read(block: Block) -> set[Value]:
    return {v for op in walk(block) for v in op.operands}


# ---- rules: the op and the tangents of its operands give the tangent of its result -----------------------------------


def _cast(d: _Forward, op: Op, t: Maybe) -> Maybe:
    """Rounding to a narrower float has derivative 1. Integers have none."""
    return t


def _abs(d: _Forward, op: Op, t: Maybe) -> Maybe:
    """The sign, and 0 at 0."""
    x = op.operands[0]
    return d.select(d.b.binary("gt", x, 0.0), t, d.select(d.b.binary("lt", x, 0.0), d.neg(t), None))


def _extremum(d: _Forward, op: Op, a: Maybe, b: Maybe) -> Maybe:
    """The derivative of the operand that was taken; of two equal ones, the mean."""
    takes_a, takes_b = (d.b.binary("eq", op.result, x) for x in op.operands)
    return d.select(takes_a, d.select(takes_b, d.scale(d.add(a, b), 0.5), a), b)


def _where(d: _Forward, op: Op, test: Maybe, yes: Maybe, no: Maybe) -> Maybe:
    return d.select(op.operands[0], yes, no)


def _mul(d: _Forward, op: Op, a: Maybe, b: Maybe) -> Maybe:
    return d.add(d.scale(a, op.operands[1]), d.scale(b, op.operands[0]))


def _div(d: _Forward, op: Op, a: Maybe, b: Maybe) -> Maybe:
    return d.divide(d.add(a, d.neg(d.scale(b, op.result))), op.operands[1])


def _tanh(d: _Forward, op: Op, t: Maybe) -> Maybe:
    return d.scale(t, d.b.binary("sub", 1.0, d.b.binary("mul", op.result, op.result)))


def _sigmoid(d: _Forward, op: Op, t: Maybe) -> Maybe:
    """sigmoid(x) * sigmoid(-x), exact also where one of them is near 1."""
    return d.scale(d.scale(t, op.result), d.b.unary("sigmoid", d.b.unary("neg", op.operands[0])))


def _erf(d: _Forward, op: Op, t: Maybe) -> Maybe:
    x = op.operands[0]
    bell = d.b.unary("exp", d.b.unary("neg", d.b.binary("mul", x, x)))
    return d.scale(d.scale(t, 2.0 / math.sqrt(math.pi)), bell)


def _reciprocal(d: _Forward, op: Op, t: Maybe) -> Maybe:
    return d.neg(d.scale(d.scale(t, op.result), op.result))


def _shape(d: _Forward, op: Op, t: Maybe) -> Maybe:
    """Adding a leading side of 1 is what broadcasting does. What moves an element elsewhere is not elementwise."""
    assert t is not None
    source = op.operands[0]
    if op.kind == "broadcast":
        return t
    if not d.one_element and (op.kind == "trans" or (op.attrs["position"] > 0 and source.shape != (1,))):
        raise d.fail(
            "a transpose" if op.kind == "trans" else "[:, None]", "give the function a tile of the result's shape"
        )

    def moved(part: Value) -> Value:
        if not part.shape:
            return part
        whole = d.b.broadcast(part, source.shape)
        return d.b.trans(whole) if op.kind == "trans" else d.b.expand(whole, op.attrs["position"])

    return Tangent(moved(t.slope), None if t.live is None else moved(t.live))


RULES: dict[str, Callable[..., Maybe]] = {
    "neg": lambda d, op, t: d.neg(t),
    "abs": _abs,
    "exp": lambda d, op, t: d.scale(t, op.result),
    "exp2": lambda d, op, t: d.scale(d.scale(t, math.log(2.0)), op.result),
    "log": lambda d, op, t: d.divide(t, op.operands[0]),
    "log2": lambda d, op, t: d.divide(d.scale(t, 1.0 / math.log(2.0)), op.operands[0]),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "sin": lambda d, op, t: d.scale(t, d.b.unary("cos", op.operands[0])),
    "cos": lambda d, op, t: d.neg(d.scale(t, d.b.unary("sin", op.operands[0]))),
    "sqrt": lambda d, op, t: d.divide(d.scale(t, 0.5), op.result),
    "reciprocal": _reciprocal,
    "add": lambda d, op, a, b: d.add(a, b),
    "sub": lambda d, op, a, b: d.add(a, d.neg(b)),
    "mul": _mul,
    "div": _div,
    "fma": lambda d, op, a, b, c: d.add(_mul(d, op, a, b), c),
    "max": _extremum,
    "min": _extremum,
    "where": _where,
    "cast": _cast,
    "expand": _shape,
    "trans": _shape,
    "broadcast": _shape,
}
