"""Quantifying: whether any row passes a test of positions is itself a test of positions.

`visible.max(axis=0)` asks, for each key, whether some query of the block sees it. Where `visible` is a conjunction of
comparisons in which the row stands alone (`j <= i + offset`, `i < n`), each of them is a bound on the row: some row
passes them all exactly when every lower bound, 0 among them, is at most every upper one, the last row among them.
Nothing has to be folded then, and no lane has to ask another.
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
class Bounds:
    """What is asked of the row: at least each of `lower`, at most each of `upper`; and what does not depend on it."""

    lower: list[Linear] = field(default_factory=list)
    upper: list[Linear] = field(default_factory=list)
    forms: list[Linear] = field(default_factory=list)  # negative where a test holds
    others: list[Value] = field(default_factory=list)  # tests with a side of 1 along the rows


def quantify(kernel: Kernel) -> None:
    renamed: dict[Value, Value] = {}
    for block in blocks(kernel.body):
        ops, block.ops = block.ops, []
        for op in ops:
            asks = op.kind == "reduce" and op.attrs["fold"] == "max"
            bounds = bounds_on(op.operands[0], op.attrs["axis"]) if asks else None
            if bounds is None:
                block.ops.append(op)
            else:
                b = Builder(block)
                b.loc = op.loc
                renamed[op.result] = build(b, bounds, op.operands[0].shape, op.attrs["axis"])
    replace(kernel.body, renamed)


def bounds_on(tests: Value, axis: int) -> Bounds | None:
    """The bounds on the position along an axis that a bool tile is the conjunction of; None where it is not that."""
    if tests.dtype is not bool_ or len(tests.shape) != 2 or tests.shape[axis] == 1:
        return None
    bounds = Bounds()
    for test in _conjuncts(tests):
        if not _sort(test, axis, bounds):
            return None
    return bounds


def _conjuncts(value: Value) -> Iterator[Value]:
    op = value.op
    if op is not None and op.kind == "and":
        for operand in op.operands:
            yield from _conjuncts(operand)
    else:
        yield value


def _sort(test: Value, axis: int, bounds: Bounds) -> bool:
    """Puts a test where it belongs; False where it is not understood."""
    op = test.op
    if not test.shape or test.shape[axis] == 1:
        bounds.others.append(test)
        return bool(test.shape)
    compared = op is not None and op.kind in ("lt", "le") and op.operands[0].dtype.is_int
    form = below(op) if op is not None and compared else None
    if form is None or any(v.dtype.bits == 64 for v in form.terms):
        return False
    rest = Linear(form.const, form.terms, {d: c for d, c in form.iotas.items() if d != axis})
    factor = form.iotas.get(axis, 0)
    if factor == 1:  # row + rest < 0
        bounds.upper.append(rest.times(-1) - Linear(1))
    elif factor == -1:  # rest - row < 0
        bounds.lower.append(rest + Linear(1))
    elif factor == 0:
        bounds.forms.append(rest)
    return factor in (-1, 0, 1)


def build(b: Builder, bounds: Bounds, shape: tuple[int, ...], axis: int) -> Value:
    """Whether some position along the axis is within the bounds, for each along the other."""
    count = shape[1 - axis]
    along = b.arange(count)

    def code(form: Linear) -> Value:
        total = to_scalar(b, Linear(form.const, form.terms))
        factor = form.iotas.get(1 - axis, 0)
        return b.binary("add", b.binary("mul", along, factor), total) if factor else total

    parts = [b.binary("lt", code(form), 0) for form in bounds.forms]
    parts += [b.binary("le", 0, code(form)) for form in bounds.upper]
    parts += [b.binary("lt", code(form), shape[axis]) for form in bounds.lower]
    parts += [b.binary("le", code(low), code(high)) for low in bounds.lower for high in bounds.upper]
    parts += [b.reduce("max", test, axis) for test in bounds.others]
    result = parts[0]
    for part in parts[1:]:
        result = b.binary("and", result, part)
    return b.broadcast(result, (count,))


def blocks(block: Block) -> list[Block]:
    return [block, *(inner for op in walk(block) for inner in op.blocks)]
