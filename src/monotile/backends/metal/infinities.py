"""Infinities as finite numbers, so that a kernel is right under fast math too, which assumes that there are none.

In registers, the largest float32 and its negative stand for the infinities (dialect.py writes them so). They survive
`where`, maximum and minimum, and reductions to a maximum or minimum start from them. This pass adds what other
arithmetic needs: a sum or a product with an infinity is that infinity, the logarithm of 0 is -inf, and an exponential
that is divided by does not overflow. Only exponentials need no help: that of a hidden score is 0 anyway. Values of
memory that meet an infinity keep a distance of one digit from it. A store turns the numbers back into infinities, and
so does a cast in front of an op that is not guarded (`RESTORES`): in safe math it then computes with real ones.
"""

from __future__ import annotations

import math

import numpy as np

from ...dtypes import bool_, float32
from ...ir import COMPARE, SHAPE_ONLY, Block, Kernel, Op, Type, Value, constant, replace, uses, walk
from ...ir.builder import Builder
from .bool_reductions import all_blocks

LARGEST = float(np.finfo(np.float32).max)
NEXT = float(np.nextafter(np.float32(LARGEST), np.float32(0)))
Signs = frozenset[int]  # of the infinities that a value may be: -1, 1
NONE: Signs = frozenset()
UPPER: Signs = frozenset({1})
LARGEST_DIVISOR = 1e30  # of a number that stands for an infinity and is the argument of an exponential
EXPONENTIALS = {"exp": 87.0, "exp2": 126.0}  # with the largest argument before they overflow
GUARDED = frozenset({"add", "sub", "mul", "fma", "log", "log2", "sqrt", "div"})
# Ops whose operands are turned back into infinities. So are those of sums and of some of the guarded.
RESTORES = frozenset({"dot", "scan", "sin", "cos", "reciprocal", "lt", "le", "eq", "ne"})
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
            if op.kind == "for" and op.results:
                carried, parameters = op.operands[-len(op.results) :], block.params[-len(op.results) :]
                for n, (first, last) in enumerate(zip(carried, yielded, strict=False)):
                    for value in (parameters[n], op.results[n]):  # the result of no iteration is the first value
                        self._add(value, self.of(first) | self.of(last))

    def _signs(self, op: Op) -> Signs:
        operands = [self.of(v) for v in op.operands]
        kind = op.kind
        if kind == "const":
            sign = None if op.attrs.get("real") else infinity_of(op.result)
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
            return NONE if op.attrs["fold"] == "sum" else operands[0] | _identity(op)
        if kind in SHAPE_ONLY or kind == "reshape":
            return operands[0]
        if kind == "lookup":
            return frozenset(1 if x > 0 else -1 for x in op.attrs["table"] if math.isinf(x))
        return self._of_arithmetic(op, operands)

    def _of_arithmetic(self, op: Op, operands: list[Signs]) -> Signs:
        """Return the signs of a result; NONE where `_restored` or the op itself makes real infinities."""
        kind = op.kind
        if kind in ("add", "sub"):
            return operands[0] | (operands[1] if kind == "add" else _swapped(operands[1]))
        if kind == "fma":
            return NONE if operands[0] | operands[1] else operands[2]
        if kind == "neg":
            return _swapped(operands[0])
        if kind in ("abs", "sqrt"):
            return UPPER if 1 in (_either(operands[0]) if kind == "abs" else operands[0]) else NONE
        if kind == "mul":
            a, b = op.operands
            return _times(operands[0], b) | _times(operands[1], a)
        if kind == "div":
            factor = _finite_factor(op.operands[1])
            return NONE if factor is None else operands[0] if factor > 0 else _swapped(operands[0])
        return frozenset({-1}) | (operands[0] & UPPER) if kind in ("log", "log2") else NONE


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


def _finite_factor(value: Value) -> float | None:
    """Return a constant that is finite and not 0, also through a change of shape."""
    found = constant(_stripped(value))
    return float(found) if found and math.isfinite(found) else None


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
    if len(op.results) != 1:
        return None
    b = Builder(block)
    b.loc = op.loc
    if op.kind in COMPARE and op.operands[0].dtype is float32:
        return _compared(b, op, infinities)
    if op.result.dtype is not float32:
        return None
    if op in bounded:
        limit = b.const(EXPONENTIALS[op.kind], float32)
        return b.unary(op.kind, b.where(b.binary("lt", limit, op.operands[0]), limit, op.operands[0]))
    if op.kind == "where":
        sign = infinity_of(op.operands[2])
        kept = None if sign is None else _apart(b, op.operands[1], sign, infinities)
        return None if kept is None else b.where(op.operands[0], kept, op.operands[2])
    if op.kind == "reduce" and op.attrs["fold"] != "sum":
        return _reduced(b, op, infinities)
    if op.kind in ("max", "min"):
        return _extreme(b, op, infinities)
    if op.kind in RESTORES or op.kind == "reduce":
        return _restored(b, op, infinities)
    needs = op.kind in ("log", "log2") or any(infinities.of(v) for v in op.operands)
    if op.kind not in GUARDED or not needs:
        return None
    if _only_in_exponentials(op.result, users) and _is_large(op, infinities):
        return None
    return _arithmetic(b, op, infinities)


def _arithmetic(b: Builder, op: Op, infinities: Infinities) -> Value | None:
    """Write arithmetic so that the infinities of its operands are kept."""
    kind, (first, *rest) = op.kind, op.operands
    if kind == "fma" and any(infinities.of(v) for v in (first, rest[0])):
        return _restored(b, op, infinities)
    if kind == "div" and _finite_factor(rest[0]) is None:
        return _restored(b, op, infinities)
    raw = b.emit(kind, op.operands, op.result.type, **op.attrs).result
    if kind in ("log", "log2", "sqrt"):
        if 1 in infinities.of(first):
            raw = b.where(b.binary("eq", first, math.inf), math.inf, raw)
        return raw if kind == "sqrt" else b.where(b.binary("eq", first, 0.0), -math.inf, raw)
    if kind in ("mul", "div"):
        return _of_product(b, op, infinities, raw)
    return _of_sum(b, op, infinities, raw)


def _restored(b: Builder, op: Op, infinities: Infinities) -> Value | None:
    """The op on real infinities; None if its operands are none."""
    operands = tuple(_real(b, v, infinities.of(v)) for v in op.operands)
    return None if operands == op.operands else b.emit(op.kind, operands, op.result.type, **op.attrs).result


def _real(b: Builder, value: Value, signs: Signs) -> Value:
    """Turn the numbers that stand for infinities of these signs back into infinities."""
    if not signs:
        return value
    sign = infinity_of(value)
    if sign is not None:
        real = b.emit("const", (), Type(float32), value=sign * math.inf, real=True).result
        return b.broadcast(real, value.shape)
    return b.emit("cast", (value,), value.type, restored=sum(signs)).result


def _compared(b: Builder, op: Op, infinities: Infinities) -> Value | None:
    """A comparison with an infinity is one of bits, or has one answer; others compare real infinities."""
    for n, other in enumerate(op.operands):
        sign = infinity_of(other)
        if sign is None:
            continue
        value, beyond = op.operands[1 - n], sign == (1 if n == 0 else -1)  # `inf < x` and `x < -inf` never hold
        if op.kind in ("eq", "ne") or (op.kind == "lt" and not beyond):
            return None
        if op.kind == "le":
            return b.binary("eq", value, sign * math.inf if beyond else value)
        return b.broadcast(b.const(False, bool_), op.result.shape)
    return _restored(b, op, infinities)


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
    """The sum, or the infinity that a term is; with the opposite infinity, also of memory, or NaN it is NaN."""
    terms: list[tuple[Value, int]] = [(op.operands[-1], -1 if op.kind == "sub" else 1)]
    terms.append((raw if op.kind == "fma" else op.operands[0], 1))  # NaN and infinities of a product are in the sum
    result = raw
    for n, (term, factor) in enumerate(terms):
        for sign in sorted(infinities.of(term)):
            whole: Value | float = sign * factor * math.inf
            for other, other_factor in terms[:n] + terms[n + 1 :]:
                if not _is_finite(other):
                    below = sign * factor * other_factor < 0  # of the infinity that is opposite to this
                    pair = (other, math.inf) if below else (-math.inf, other)
                    real = _real(b, other, infinities.of(other))
                    whole = b.where(b.binary("lt", *pair), whole, b.binary("sub", real, real))  # NaN
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


def _is_finite(value: Value) -> bool:
    """True for a value that is neither infinite nor NaN: a constant, a number of integers."""
    value = _stripped(value)
    found = constant(value)
    if found is not None:
        return math.isfinite(found)
    return value.op is not None and value.kind == "cast" and value.op.operands[0].dtype.is_int


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


def _is_large(op: Op, infinities: Infinities) -> bool:
    """True if arithmetic with a number that stands for an infinity is so large that its exponential is 0 or infinite:
    terms that cancel are not, nor its logarithm, nor a quotient that may be small."""
    signs = [infinities.of(v) for v in op.operands]
    if op.kind in ("add", "sub"):
        return not signs[0] & (_swapped(signs[1]) if op.kind == "add" else signs[1])
    if op.kind == "fma":
        return not (signs[2] and signs[0] | signs[1])
    if op.kind == "div":
        return abs(_finite_factor(op.operands[1]) or math.inf) < LARGEST_DIVISOR
    return op.kind not in ("log", "log2") or 1 not in signs[0]


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
