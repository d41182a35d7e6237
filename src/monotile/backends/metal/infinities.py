"""Infinities as finite numbers, so that a kernel is right under fast math too, which assumes that there are none.

In registers, the largest float32 and its negative stand for the infinities (dialect.py writes them so). They survive
`where`, maximum and minimum, and reductions to a maximum or minimum start from them. This pass adds what other
arithmetic needs: a sum or a product with an infinity is that infinity, the logarithm of 0 is -inf, and an exponential
that is divided by does not overflow. Only exponentials need no help: that of a hidden score is 0 anyway. Values of
memory that meet an infinity keep a distance of one digit from it. A store turns the numbers back into infinities.
"""

from __future__ import annotations

import math

import numpy as np

from ...dtypes import float32
from ...ir import SHAPE_ONLY, Block, Kernel, Op, Value, constant, replace, uses, walk
from ...ir.builder import Builder
from .bool_reductions import all_blocks

LARGEST = float(np.finfo(np.float32).max)
NEXT = float(np.nextafter(np.float32(LARGEST), np.float32(0)))
Signs = frozenset[int]  # of the infinities that a value may be: -1, 1
NONE: Signs = frozenset()
EXPONENTIALS = {"exp": 87.0, "exp2": 126.0}  # with the largest argument before they overflow
GUARDED = frozenset({"add", "sub", "mul", "fma", "log", "log2"})
FROM_MEMORY = frozenset({"load", "gather", "add", "sub", "fma", "cast", "param"})


def infinity_of(value: Value) -> int | None:
    """Return the sign of a constant infinity, also through a change of shape; None for anything else."""
    while value.op is not None and value.kind in SHAPE_ONLY:
        (value,) = value.op.operands
    found = constant(value)
    return None if not isinstance(found, float) or not math.isinf(found) else 1 if found > 0 else -1


def is_from_memory(value: Value) -> bool:
    """True for elements of a tensor, also converted."""
    while value.op is not None and (value.kind in SHAPE_ONLY or value.kind == "cast"):
        (value,) = value.op.operands
    return value.kind in ("load", "gather")


class Infinities:
    """Which float32 values of a kernel may be infinite by its own constants and logarithms; memory is not asked."""

    def __init__(self, kernel: Kernel) -> None:
        self.signs: dict[Value, Signs] = {}
        changed = True
        while changed:
            before = dict(self.signs)
            for op in walk(kernel.body):
                self._visit(op)
            changed = self.signs != before

    def of(self, value: Value) -> Signs:
        return self.signs.get(value, NONE)

    def in_store(self, value: Value) -> Signs:
        """Return the signs of infinities that may be stored: also of a maximum or minimum of nothing but NaN."""
        op = value.op
        while op is not None and op.kind in SHAPE_ONLY:
            op = op.operands[0].op
        fold = op.attrs["fold"] if op is not None and op.kind == "reduce" else "sum"
        return self.of(value) | {"sum": NONE, "max": frozenset({-1}), "min": frozenset({1})}[fold]

    def _visit(self, op: Op) -> None:
        if op.kind in ("for", "if"):
            self._visit_blocks(op)
        elif len(op.results) == 1 and op.result.dtype is float32:
            self._add(op.result, self._signs(op))

    def _add(self, value: Value, signs: Signs) -> None:
        if signs and value.dtype is float32:
            self.signs[value] = self.of(value) | signs

    def _visit_blocks(self, op: Op) -> None:
        for block in op.blocks:
            yielded = block.terminator.operands
            for result, last in zip(op.results, yielded, strict=False):
                self._add(result, self.of(last))
            if op.kind == "for":
                carried, parameters = op.operands[-len(op.results) :], block.params[-len(op.results) :]
                for parameter, first, last in zip(parameters, carried, yielded, strict=False):
                    self._add(parameter, self.of(first) | self.of(last))

    def _signs(self, op: Op) -> Signs:
        operands = [self.of(v) for v in op.operands]
        kind = op.kind
        if kind == "const":
            sign = infinity_of(op.result)
            return NONE if sign is None else frozenset({sign})
        if kind == "where":
            tested = _tested_infinity(op)
            return operands[1] | (operands[2] - tested)
        if kind in ("max", "min"):
            low, high = (-1, 1) if kind == "max" else (1, -1)
            found = operands[0] | operands[1]
            finite = any(constant(_stripped(v)) is not None and infinity_of(v) is None for v in op.operands)
            return found & {high} if finite else found & {low, high}  # NaN beside an infinity leaves that
        if kind == "reduce":
            return operands[0] | _identity(op)
        if kind in SHAPE_ONLY:
            return operands[0]
        if kind in ("add", "fma", "sub", "neg", "abs"):
            last = operands[-1] if kind in ("add", "fma") else _swapped(operands[-1])
            last |= operands[-1] if kind == "abs" else NONE
            product = _either(operands[0] | operands[1]) if kind == "fma" else NONE
            return last | product | (operands[0] if kind in ("add", "sub") else NONE)
        if kind == "mul":
            a, b = op.operands
            return _times(operands[0], b) | _times(operands[1], a)
        return frozenset({-1}) if kind in ("log", "log2") else NONE


def _identity(op: Op) -> Signs:
    """Return the sign of the infinity from which a reduction starts: what it is of nothing but NaN."""
    return frozenset({"max": {-1}, "min": {1}}.get(op.attrs["fold"], NONE))


def _tested_infinity(op: Op) -> Signs:
    """Return the infinity that the last operand of `where(x == inf, y, x)` cannot be."""
    test = op.operands[0].op
    while test is not None and test.kind in SHAPE_ONLY:
        test = test.operands[0].op
    if test is None or test.kind != "eq":
        return NONE
    for tested, other in (test.operands, test.operands[::-1]):
        sign = infinity_of(other)
        if sign is not None and tested is op.operands[2]:
            return frozenset({sign})
    return NONE


def _swapped(signs: Signs) -> Signs:
    return frozenset(-s for s in signs)


def _times(signs: Signs, factor: Value) -> Signs:
    return signs if is_positive(factor) else _either(signs)


def _either(signs: Signs) -> Signs:
    return signs | _swapped(signs)


def is_positive(value: Value) -> bool:
    """True for a number above 0: a constant, a maximum with one, a product of such."""
    while value.op is not None and value.kind in SHAPE_ONLY:
        (value,) = value.op.operands
    if value.op is None:
        return False
    found = constant(value)
    if found is not None:
        return found > 0
    if value.kind == "max":
        return any(is_positive(v) for v in value.op.operands)
    return value.kind == "mul" and all(is_positive(v) for v in value.op.operands)


# ---- the pass --------------------------------------------------------------------------------------------------------


def bound_infinities(kernel: Kernel) -> None:
    infinities, users = Infinities(kernel), uses(kernel.body)
    bounded = _divided_by(kernel)
    renamed: dict[Value, Value] = {}
    for block in all_blocks(kernel.body):
        ops, block.ops = block.ops, []
        for op in ops:
            made = _guarded(block, op, infinities, users, bounded)
            if made is None:
                block.ops.append(op)
            else:
                made.hint = op.result.hint
                renamed[op.result] = made
    replace(kernel.body, renamed)


def _guarded(
    block: Block, op: Op, infinities: Infinities, users: dict[Value, list[Op]], bounded: set[Op]
) -> Value | None:
    """Write an op anew, with what it needs; None if it needs nothing."""
    if len(op.results) != 1 or op.result.dtype is not float32:
        return None
    b = Builder(block)
    b.loc = op.loc
    if op in bounded:
        limit = b.const(EXPONENTIALS[op.kind], float32)
        return b.unary(op.kind, b.where(b.binary("lt", limit, op.operands[0]), limit, op.operands[0]))
    if op.kind == "where":
        sign = infinity_of(op.operands[2])
        kept = None if sign is None else _apart(b, op.operands[1], sign, infinities)
        return None if kept is None else b.where(op.operands[0], kept, op.operands[2])
    if op.kind == "reduce":
        return _reduced(b, op, infinities)
    if op.kind in ("max", "min"):
        return _extreme(b, op, infinities)
    needs = op.kind in ("log", "log2") or any(infinities.of(v) for v in op.operands)
    if op.kind not in GUARDED or not needs or _only_in_exponentials(op.result, users):
        return None
    raw = b.emit(op.kind, op.operands, op.result.type, **op.attrs).result
    if op.kind in ("log", "log2"):
        return b.where(b.binary("eq", op.operands[0], 0.0), -math.inf, raw)
    return _of_product(b, op, infinities, raw) if op.kind == "mul" else _of_sum(b, op, infinities, raw)


def _apart(b: Builder, value: Value, sign: int, infinities: Infinities) -> Value | None:
    """Keep a value of memory apart from the number that stands for an infinity it meets."""
    if infinities.of(value) or _stripped(value).kind not in FROM_MEMORY:
        return None
    return b.where(b.binary("eq", value, sign * LARGEST), sign * NEXT, value)


def _reduced(b: Builder, op: Op, infinities: Infinities) -> Value | None:
    """A maximum or minimum starts from an infinity, which its operand meets."""
    for sign in _identity(op):
        kept = _apart(b, op.operands[0], sign, infinities)
        return None if kept is None else b.reduce(op.attrs["fold"], kept, op.attrs["axis"])
    return None


def _extreme(b: Builder, op: Op, infinities: Infinities) -> Value | None:
    """The greater or smaller of a value of memory and one that may be infinite."""
    sign = -1 if op.kind == "max" else 1
    if not any(sign in infinities.of(v) for v in op.operands):
        return None
    apart = [_apart(b, v, sign, infinities) for v in op.operands]
    if apart == [None, None]:
        return None
    return b.binary(op.kind, *(kept or v for kept, v in zip(apart, op.operands, strict=True)))


def _of_sum(b: Builder, op: Op, infinities: Infinities, raw: Value) -> Value:
    """The sum, or the infinity that a term is; two terms that are opposite infinities are NaN."""
    terms: list[tuple[Value, int]] = [(op.operands[-1], -1 if op.kind == "sub" else 1)]
    if op.kind != "fma":
        terms.append((op.operands[0], 1))
    result = raw
    for n, (term, factor) in enumerate(terms):
        for sign in sorted(infinities.of(term)):
            whole: Value | float = sign * factor * math.inf
            for other, other_factor in terms[:n]:
                opposite = -sign * factor * other_factor
                if opposite in infinities.of(other):
                    whole = b.where(b.binary("eq", other, opposite * math.inf), math.nan, whole)
            result = b.where(b.binary("eq", term, sign * math.inf), whole, result)
    return result


def _of_product(b: Builder, op: Op, infinities: Infinities, raw: Value) -> Value:
    """The product, or the infinity that a factor is, with the sign of the other; times 0 it is NaN."""
    result = raw
    for factor, other in (op.operands, op.operands[::-1]):
        for sign in sorted(infinities.of(factor)):
            whole: Value | float = sign * math.inf
            if not is_positive(other):
                negative = b.where(b.binary("lt", other, 0.0), -sign * math.inf, math.nan)
                whole = b.where(b.binary("lt", 0.0, other), whole, negative)
            result = b.where(b.binary("eq", factor, sign * math.inf), whole, result)
    return result


def _stripped(value: Value) -> Value:
    while value.op is not None and value.kind in SHAPE_ONLY:
        (value,) = value.op.operands
    return value


def _only_in_exponentials(value: Value, users: dict[Value, list[Op]]) -> bool:
    """True if a value is read as the argument of exponentials only, perhaps scaled."""
    found = users.get(value, [])
    return bool(found) and all(
        op.kind in EXPONENTIALS or (op.kind in SHAPE_ONLY | {"mul"} and _only_in_exponentials(op.result, users))
        for op in found
    )


def _divided_by(kernel: Kernel) -> set[Op]:
    """Return the exponentials that are terms of a denominator."""
    found: set[Op] = set()
    stack = [op.operands[-1] for op in walk(kernel.body) if op.kind in ("reciprocal", "div") and op.results]
    while stack:
        op = stack.pop().op
        if op is None:
            continue
        if op.kind in EXPONENTIALS:
            found.add(op)
        elif op.kind in SHAPE_ONLY | {"add", "sub", "neg", "mul"}:
            stack += op.operands
    return found
