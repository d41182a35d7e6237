"""Cuts: in a block that is partly hidden, each panel of lanes does only the rows some lane of it may see.

`blocks(..., visible)` promises that elements `visible` hides do not matter to any fold along the positions.
Comparisons of positions bound the visible rows of a panel, whatever else hides more; rows outside are left out of
every nest and contraction."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Block, Op, Value, walk
from ...ir.affine import Linear
from ...passes.peel import below, conjuncts
from .axes import Axes, Axis
from .emit import Emitter, Index


@dataclass(frozen=True)
class RowLimit:
    """`sign * row + factor * lane + rest < 0` wherever something is visible."""

    sign: int
    factor: int
    rest: Linear


@dataclass(frozen=True)
class SkippableRows:
    """The axis whose rows may be left out, and what bounds them."""

    axis: Axis
    bounds: tuple[RowLimit, ...]


def find_skippable_rows(body: Block, axes: Axes, lanes: Axis | None, unit: int) -> SkippableRows | None:
    """What the `visible` mark of a loop allows; `unit` is the number of rows that are done together."""
    marks = [op for op in body.ops if op.kind == "visible"]
    if not marks or lanes is None:
        return None
    tests = list(dict.fromkeys(test for test, _ in conjuncts(marks[0].operands[0])))  # the order decides the text
    dims = next((d for op in walk(body) if (d := _masked_by(op, tests, axes)) is not None), None)
    if dims is None or lanes not in dims:
        return None
    along = dims.index(lanes)
    rows = dims[1 - along]
    if rows is None or rows.extent % unit or _escapes(body, axes, lanes, rows):
        return None
    bounds = [b for test in tests if (b := _row_limit(test, along)) is not None]
    return SkippableRows(rows, tuple(bounds)) if bounds else None


def _masked_by(op: Op, tests: list[Op], axes: Axes) -> tuple[Axis | None, ...] | None:
    """The axes of what a `where` hides by all of the tests."""
    if op.kind != "where" or len(op.result.shape) != 2:
        return None
    return axes.dims(op.result) if {test for test, _ in conjuncts(op.operands[0])}.issuperset(tests) else None


def _escapes(body: Block, axes: Axes, lanes: Axis, rows: Axis) -> bool:
    """Whether something with both axes leaves the loop's body otherwise than through a fold."""

    def both(value: Value) -> bool:
        return {lanes, rows} <= set(axes.of(value))

    ends = [op for op in walk(body) if op.kind in ("store", "yield", "for")] + [body.terminator]
    return any(both(v) for op in ends for v in op.operands)


def _row_limit(test: Op, along: int) -> RowLimit | None:
    form = below(test)
    if form is None:
        return None
    sign = form.iotas.get(1 - along, 0)
    if sign not in (1, -1):
        return None
    return RowLimit(sign, form.iotas.get(along, 0), Linear(form.const, form.terms))


def visible_rows(
    e: Emitter, cut: SkippableRows, rests: list[Index], first: Index, lanes: int, unit: int
) -> tuple[Index, Index]:
    """The rows a panel of `lanes` lanes from `first` on may see, in whole units. `rests` are the bounds' scalar
    parts."""
    low: Index = 0
    high: Index = cut.axis.extent
    for bound, rest in zip(cut.bounds, rests, strict=True):
        # The lane at which most is visible: the one that makes factor * lane least.
        best = first if bound.factor > 0 else e.add(first, lanes - 1)
        level = e.add(rest, e.mul(best, bound.factor))
        if bound.sign > 0:  # row < -level
            high = _pick(e, "smin", high, e.sub(0, level))
        else:  # row > level
            low = _pick(e, "smax", low, e.add(level, 1))
    low = e.op(f"and i64 {low}, {-unit}") if not isinstance(low, int) else low // unit * unit
    high = e.op(f"and i64 {e.add(_pick(e, 'smax', high, 0), unit - 1)}, {-unit}") if not isinstance(high, int) else high
    return low, high


def _pick(e: Emitter, which: str, a: Index, b: Index) -> Index:
    return e.call("i64", f"llvm.{which}.i64", ("i64", str(a)), ("i64", str(b)))
