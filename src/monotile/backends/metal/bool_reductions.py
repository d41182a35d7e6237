"""Bool reductions of position tests as tests of positions.

`visible.max(axis=0)` asks, for each key, whether some query of the block sees it. Where `visible` is a conjunction of
comparisons in which the row has coefficient 1 or -1 (`j <= i + offset`, `i < n`), each comparison is a bound on the
row. Some row passes all of them exactly if every lower bound, 0 included, is at most every upper bound, the last row
included. That is again a test of positions: nothing is reduced, and no lane needs a value of another lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...dtypes import bool_
from ...ir import Block, Kernel, Value, replace, walk
from ...ir.affine import Linear, to_scalar
from ...ir.builder import Builder
from ...passes.peel import below


@dataclass
class PositionBounds:
    """Bounds on the position along an axis, and tests that do not depend on it."""

    lower: list[Linear] = field(default_factory=list)  # the position is at least each of these
    upper: list[Linear] = field(default_factory=list)  # and at most each of these
    forms: list[Linear] = field(default_factory=list)  # independent of the position; negative where the test holds
    others: list[Value] = field(default_factory=list)  # tests of length 1 along the axis


def replace_bool_reductions(kernel: Kernel) -> None:
    renamed: dict[Value, Value] = {}
    for block in all_blocks(kernel.body):
        ops, block.ops = block.ops, []
        for op in ops:
            is_max = op.kind == "reduce" and op.attrs["fold"] == "max"
            bounds = bounds_on(op.operands[0], op.attrs["axis"]) if is_max else None
            if bounds is None:
                block.ops.append(op)
            else:
                b = Builder(block)
                b.loc = op.loc
                renamed[op.result] = any_within(b, bounds, op.operands[0].shape, op.attrs["axis"])
    replace(kernel.body, renamed)


def bounds_on(tests: Value, axis: int) -> PositionBounds | None:
    """Return the bounds on the position along an axis of which a bool tile is the conjunction; None if it is not."""
    if tests.dtype is not bool_ or len(tests.shape) != 2 or tests.shape[axis] == 1:
        return None
    bounds = PositionBounds()
    for test in _conjuncts(tests):
        if not _add(test, axis, bounds):
            return None
    return bounds


def _conjuncts(value: Value) -> Iterator[Value]:
    op = value.op
    if op is not None and op.kind == "and":
        for operand in op.operands:
            yield from _conjuncts(operand)
    else:
        yield value


def _add(test: Value, axis: int, bounds: PositionBounds) -> bool:
    """Add a test to the bounds; return False if it is not a bound."""
    op = test.op
    if not test.shape or test.shape[axis] == 1:
        bounds.others.append(test)
        return bool(test.shape)
    compared = op is not None and op.kind in ("lt", "le") and op.operands[0].dtype.is_int
    form = below(op) if op is not None and compared else None
    if form is None or form.remainders or any(v.dtype.bits == 64 for v in form.terms):
        return False
    rest = Linear(form.const, form.terms, {d: c for d, c in form.iotas.items() if d != axis})
    coefficient = form.iotas.get(axis, 0)
    if coefficient == 1:  # position + rest < 0
        bounds.upper.append(rest.times(-1) - Linear(1))
    elif coefficient == -1:  # rest - position < 0
        bounds.lower.append(rest + Linear(1))
    elif coefficient == 0:
        bounds.forms.append(rest)
    return coefficient in (-1, 0, 1)


def any_within(b: Builder, bounds: PositionBounds, shape: tuple[int, ...], axis: int) -> Value:
    """For each position along the other axis, test that some position along this axis is within the bounds."""
    count = shape[1 - axis]
    positions = b.arange(count)

    def value(form: Linear) -> Value:
        total = to_scalar(b, Linear(form.const, form.terms))
        coefficient = form.iotas.get(1 - axis, 0)
        return b.binary("add", b.binary("mul", positions, coefficient), total) if coefficient else total

    tests = [b.binary("lt", value(form), 0) for form in bounds.forms]
    tests += [b.binary("le", 0, value(form)) for form in bounds.upper]
    tests += [b.binary("lt", value(form), shape[axis]) for form in bounds.lower]
    tests += [b.binary("le", value(low), value(high)) for low in bounds.lower for high in bounds.upper]
    tests += [b.reduce("max", test, axis) for test in bounds.others]
    result = tests[0]
    for test in tests[1:]:
        result = b.binary("and", result, test)
    return b.broadcast(result, (count,))


def all_blocks(block: Block) -> list[Block]:
    return [block, *(inner for op in walk(block) for inner in op.blocks)]
