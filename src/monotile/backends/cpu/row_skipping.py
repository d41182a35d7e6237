"""Row skipping: in a partly hidden block, each panel of lanes computes only the rows that some lane of it may see.

`blocks(..., visible)` promises that hidden elements do not matter to any fold along the positions. The position tests
in `visible` bound the visible rows of a panel, whatever else hides more; every nest and contraction of the panel skips
the rows outside these bounds. On the diagonal of causal attention that is half of the work."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import MOVES, WRITES, Block, Op, Value, walk
from ...ir.affine import Linear
from ...passes.peel import below, conjuncts
from .axes import Axes, Axis
from .emit import Emitter, Index
from .evaluate import Evaluator


@dataclass(frozen=True)
class RowLimit:
    """`sign * row + factor * lane + rest < 0` holds for every visible element."""

    sign: int
    factor: int
    rest: Linear


@dataclass(frozen=True)
class SkippableRows:
    """The axis whose rows may be skipped, and the limits of its visible rows."""

    axis: Axis
    limits: tuple[RowLimit, ...]


def find_skippable_rows(body: Block, axes: Axes, lanes: Axis | None, block_rows: int) -> SkippableRows | None:
    """Return the rows that the `visible` mark of a loop allows to skip; `block_rows` are computed together."""
    marks = [op for op in body.ops if op.kind == "visible"]
    if not marks or lanes is None:
        return None
    tests = list(dict.fromkeys(test for test, _ in conjuncts(marks[0].operands[0])))  # the order decides the text
    dims = next((d for op in walk(body) if (d := _masked_by(op, tests, axes)) is not None), None)
    if dims is None or lanes not in dims:
        return None
    along = dims.index(lanes)
    rows = dims[1 - along]
    if rows is None or rows.extent % block_rows or _escapes(body, axes, lanes, rows):
        return None
    limits = [limit for test in tests if (limit := _row_limit(test, along)) is not None]
    return SkippableRows(rows, tuple(limits)) if limits else None


def _masked_by(op: Op, tests: list[Op], axes: Axes) -> tuple[Axis | None, ...] | None:
    """Return the axes of a `where` that hides by all of the tests; None for any other op."""
    if op.kind != "where" or len(op.result.shape) != 2:
        return None
    return axes.dims(op.result) if {test for test, _ in conjuncts(op.operands[0])}.issuperset(tests) else None


def _escapes(body: Block, axes: Axes, lanes: Axis, rows: Axis) -> bool:
    """True if a tile with both axes leaves the loop's body otherwise than through a fold."""

    def both(value: Value) -> bool:
        return {lanes, rows} <= set(axes.of(value))

    ends = [op for op in walk(body) if op.kind in WRITES | MOVES | {"yield", "for"}] + [body.terminator]
    return any(both(v) for op in ends for v in op.operands)


def _row_limit(test: Op, along: int) -> RowLimit | None:
    form = below(test)
    if form is None:
        return None
    sign = form.iotas.get(1 - along, 0)
    if sign not in (1, -1):
        return None
    least, _ = form.scalar_range()
    return RowLimit(sign, form.iotas.get(along, 0), least + Linear(form.const))


def visible_rows(
    ev: Evaluator, skippable: SkippableRows, first: Index, lanes: int, block_rows: int
) -> tuple[Index, Index]:
    """Emit the range of rows that `lanes` lanes from `first` on may see, in whole register blocks."""
    e = ev.e
    low: Index = 0
    high: Index = skippable.axis.extent
    rests = [_scalar_part(ev, limit.rest) for limit in skippable.limits]
    for limit, rest in zip(skippable.limits, rests, strict=True):
        # The lane that sees most is the one with the smallest factor * lane.
        best = first if limit.factor > 0 else e.add(first, lanes - 1)
        level = e.add(rest, e.mul(best, limit.factor))
        if limit.sign > 0:  # row < -level
            high = e.extreme("smin", high, e.sub(0, level))
        else:  # row > level
            low = e.extreme("smax", low, e.add(level, 1))
    low = _rounded_down(e, low, block_rows)
    if not isinstance(high, int):
        high = _rounded_down(e, e.add(e.extreme("smax", high, 0), block_rows - 1), block_rows)
    return low, high


def _scalar_part(ev: Evaluator, form: Linear) -> Index:
    """Emit a sum of scalars and a constant."""
    total: Index = form.const
    for value, factor in form.terms.items():
        total = ev.e.add(total, ev.e.mul(ev.index(value), factor))
    return total


def _rounded_down(e: Emitter, row: Index, step: int) -> Index:
    return row // step * step if isinstance(row, int) else e.op(f"and i64 {row}, {-step}")
