"""What follows the sums of a register block: the elementwise work of its nest, folds and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .axes import Axis
from .emit import Index, Reg, Var
from .fuse import Nest
from .nests import NestEmitter
from .point import Point


@dataclass(frozen=True)
class DotResults:
    """What the sums of a dot belong to: its nest, the axis of the rows, points along the lanes, variables of folds."""

    nest: Nest
    rows: Axis | None
    points: list[Point]
    totals: list[list[Var]]


def row_point(pt: Point, rows: Axis | None, row: Index) -> Point:
    """Return the point of a row for the lanes of a point."""
    at = pt.at | ({rows: row} if rows is not None else {})
    return Point(at, pt.lane, pt.valid, pt.edge, pt.panel, dict(pt.memo))


def add_total(nests: NestEmitter, nest: Nest, pt: Point, value: Reg, group: Point) -> None:
    """Make the finished sum known at its point, after adding the x of `x + dot(...)`. The dot is summed on its own and
    then added, as the source says: a long sum in blocks rounds less than one chain."""
    assert nest.total is not None
    if nest.addend is not None:
        added_to = nests.ev.moved(nest.addend, nest.total, pt)
        value = nests.e.binary("fadd", added_to, value)
    pt.memo = dict(group.memo) | {nest.total: value}


def finish_rows(
    nests: NestEmitter, results: DotResults, row: Index, count: int, sums: Callable[[], list[list[Reg]]]
) -> None:
    """Emit the elementwise work and the folds of a register block of `count` rows from `row` on. `sums` emits its sums,
    a line for each row. Large work is a loop, which reads the sums from the stack."""
    e, nest, points = nests.e, results.nest, results.points
    width, vector = len(points), points[0].lane is not None
    kind = e.vector_type("float") if vector else "float"

    def finish(first: Index, lines: list[list[Reg]]) -> None:
        for i, line in enumerate(lines):
            for n, (group, value) in enumerate(zip(points, line, strict=True)):
                pt = row_point(group, results.rows, e.add(row, e.add(first, i)))
                add_total(nests, nest, pt, value, group)
                nests.finish(nest, pt, [t[n] for t in results.totals])

    each = nests.rows_at_once(nest, width, [n for n in range(count, 0, -1) if count % n == 0])
    if each == count:
        finish(0, sums())
        return
    stack = e.fresh("p")
    e.entry.append(f"  {stack} = alloca [{count * width} x {kind}]")

    def place(n: Index) -> Var:
        return Var(e.element(stack, n, kind), kind)

    def keep() -> None:
        for n, value in enumerate(value for line in sums() for value in line):
            e.set(place(n), value.text)

    def several(first: Index) -> None:
        start = e.mul(first, width)
        found = [Reg(e.get(place(e.add(start, n))), "float", vector) for n in range(each * width)]
        finish(first, [found[n : n + width] for n in range(0, each * width, width)])

    e.part(keep)
    e.loop(0, count, each, several)
