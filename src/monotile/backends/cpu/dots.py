"""Dots: register blocks of rows x lane vectors, accumulated along the contraction.

One operand has the lanes and is read as vectors, the other is read one element at a time and broadcast. A block of
`target.rows` x `target.vectors` accumulators stays in registers for the whole contraction. Both operands come from
scratch in float32, unless a tile is read only once: then it is streamed from its tensor (streams.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir import Op, Value
from .axes import Axis
from .emit import Index, Reg
from .fuse import Nest, unviewed
from .layout import Layout
from .nests import NestEmitter, Panel
from .point import Point
from .scratch import Buffer

UNROLL = 8
CHUNK = 64  # steps of a long contraction that are summed at once


class DotOperand:
    """A dot's operand in scratch, addressed by its position along the free axis (rows or lanes) and the contraction."""

    def __init__(self, nests: NestEmitter, value: Value, free_first: bool) -> None:
        self.nests = nests
        self.base = unviewed(value)
        # Follow the changes of shape back: which of the two positions each dimension of the base has.
        place: list[str] = ["free", "deep"] if free_first else ["deep", "free"]
        while value is not self.base:
            op = value.op
            assert op is not None
            if op.kind == "trans":
                place.reverse()
            else:
                place.pop(op.attrs["position"])
            value = op.operands[0]
        dims = nests.axes.dims(self.base)
        self.free, self.deep = (
            next((a for a, p in zip(dims, place, strict=True) if p == w), None) for w in ("free", "deep")
        )

    def at(self, free: Index, deep: Index) -> dict[Axis, Index]:
        places = ((self.free, free), (self.deep, deep))
        return {axis: index for axis, index in places if axis is not None}

    @property
    def buffer(self) -> Buffer:
        return self.nests.ev.buffers[self.base]

    def element(self, row: Index, k: Index) -> Reg:
        return self.nests.ev.scratch.read(self.buffer, Point(self.at(row, k)))

    def vector(self, pt: Point, k: Index) -> Reg:
        """Along the lanes of a point."""
        if pt.lane is None:
            return self.element(0, k)
        where = Point(self.at(pt.at[pt.lane], k), self.free, pt.valid, False, pt.panel)
        return self.nests.e.splat(self.nests.ev.scratch.read(self.buffer, where))


@dataclass(frozen=True)
class MultiplyAdd:
    """How a contraction goes on: so many steps of it at once, vectors along the lanes, one element for each row, and
    what adds their product to a sum. `before` is told of every step."""

    steps: int
    vectors: Callable[[list[Point], Index], list[Reg]]
    element: Callable[[Index, Index], Reg]
    add: Callable[[Reg, Reg, Reg], Reg]
    before: Callable[[list[Point], Index], None] = lambda points, k: None


class DotEmitter(NestEmitter):
    layout: Layout

    def _body(self, nest: Nest, panel: Panel, edge: bool) -> None:
        if nest.dot is None:
            super()._body(nest, panel, edge)
        else:
            self.dot(nest, nest.dot, panel, edge)

    def read_in_place(self, nest: Nest, inside: str | None, copy: Callable[[], None]) -> bool:
        """A tile whose rows follow one another in memory as they would in scratch is read where it is."""
        load = nest.made[0] if nest.made else None
        if load is None or load not in self.layout.in_place:
            return False
        e, tile, buffer = self.e, self.ev.tensors.tiles[load], self.ev.buffers[load.result]
        tests = [inside] if inside is not None else []
        for dim in tile.dims:
            if dim.axis is not None and dim.stride != buffer.strides[dim.axis]:
                tests.append(e.compare("eq", dim.stride, buffer.strides[dim.axis]))
        there = e.all(tests)
        if there is None:
            buffer.place = tile.base
        else:
            e.when(there, lambda: None, copy)
            buffer.place = e.op(f"select i1 {there}, ptr {tile.base}, ptr {buffer.name}")
        return True

    def operands(self, nest: Nest, dot: Op) -> tuple[DotOperand, DotOperand, Axis | None]:
        """The operand with the lanes, the one with the rows, and the axis of the rows."""
        m, _, n = self.axes.dots[dot]
        a, b = DotOperand(self, dot.operands[0], True), DotOperand(self, dot.operands[1], False)
        return (b, a, m) if nest.lane is not None and nest.lane is n else (a, b, n)

    def dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        lanes, others, rows = self.operands(nest, dot)
        how = self.float32_steps(lanes.vector, others)
        self.blocks(nest, how, others.deep, rows, dot.operands[0].shape[1], panel, edge)

    def float32_steps(self, vector: Callable[[Point, Index], Reg], others: DotOperand) -> MultiplyAdd:
        """In float32, step by step."""
        return MultiplyAdd(1, lambda points, k: [vector(pt, k) for pt in points], others.element, self.e.fma)

    def blocks(
        self,
        nest: Nest,
        how: MultiplyAdd,
        deep: Axis | None,
        rows: Axis | None,
        depth: int,
        panel: Panel,
        edge: bool,
    ) -> None:
        """Register block by register block over the lanes and rows of the result."""
        low, high = self.row_range(rows)

        def group(points: list[Point]) -> None:
            totals = self.open_folds(nest, len(points))
            self.prepare(nest, points, {nest.lane})

            def block(row: Index, count: int) -> None:
                grid = [[self.below(pt, rows, self.e.add(row, i)) for pt in points] for i in range(count)]
                self.prefetch_shared(nest, rows, panel, row)
                sums = self._accumulate(points, row, count, depth, how, deep)
                for line, values in zip(grid, sums, strict=True):
                    for i, (pt, value) in enumerate(zip(line, values, strict=True)):
                        self.total(nest, pt, value, points[i])
                        self.finish(nest, pt, [t[i] for t in totals])

            step = self.height
            whole = high // step * step if isinstance(high, int) else high  # a cut is made of whole blocks
            self.e.loop(low, whole, step, lambda row: block(row, step))
            if isinstance(high, int) and isinstance(whole, int) and high > whole:
                block(whole, high - whole)
            for i, pt in enumerate(points):
                self.close_folds(nest, pt, [t[i] for t in totals])

        self.each_group(nest.lane, panel, edge, {}, group)

    def prefetch_shared(self, nest: Nest, rows: Axis | None, panel: Panel, row: Index) -> None:
        """Asks for a part of what the dot will read in the next turn of a loop, if nothing else does."""

    def below(self, pt: Point, rows: Axis | None, row: Index) -> Point:
        """The point of one row under a group of lanes."""
        at = pt.at | ({rows: row} if rows is not None else {})
        return Point(at, pt.lane, pt.valid, pt.edge, pt.panel, dict(pt.memo))

    def total(self, nest: Nest, pt: Point, value: Reg, group: Point) -> None:
        """Makes a finished sum known at its point, with what it is added to. Each dot is summed on its own and then
        added, as the source says: a long sum in blocks rounds less than one chain."""
        assert nest.total is not None
        if nest.start is not None:
            value = self.e.binary("fadd", self.ev.moved(nest.start, nest.total, pt), value)
        pt.memo = dict(group.memo) | {nest.total: value}

    def _accumulate(
        self,
        points: list[Point],
        row: Index,
        count: int,
        depth: int,
        how: MultiplyAdd,
        deep: Axis | None,
    ) -> list[list[Reg]]:
        """For each step of the contraction one row of vectors, and one broadcast element per row. A long contraction is
        summed in chunks, which are then added: that rounds less than one chain."""
        e = self.e
        zero = e.number(0.0, "float")
        zero = e.splat(zero) if points[0].lane is not None else zero
        sums = [[e.var(e.type_of(zero), zero.text) for _ in points] for _ in range(count)]
        totals = [[e.var(e.type_of(zero), zero.text) for _ in points] for _ in range(count)]

        def steps(first: Index, number: int) -> None:
            held = [[Reg(e.get(v), "float", zero.vector) for v in line] for line in sums]
            for u in range(0, number, how.steps):
                k = e.add(first, u)
                how.before(points, k)
                vectors = how.vectors(points, k)
                for i in range(count):
                    x = how.element(e.add(row, i), k)
                    held[i] = [how.add(x, v, h) for v, h in zip(vectors, held[i], strict=True)]
            for line, regs in zip(sums, held, strict=True):
                for variable, reg in zip(line, regs, strict=True):
                    e.set(variable, reg.text)

        def run(first: int, last: int) -> None:
            whole = first + (last - first) // UNROLL * UNROLL
            e.loop(first, whole, UNROLL, lambda k: steps(k, UNROLL))
            if last > whole:
                steps(whole, last - whole)

        def flush() -> None:
            for line, whole in zip(sums, totals, strict=True):
                for variable, total in zip(line, whole, strict=True):
                    e.set(total, e.op(f"fadd {variable.type} {e.get(total)}, {e.get(variable)}"))
                    e.set(variable, zero.text)

        def chunk(first: Index) -> None:
            e.loop(first, e.add(first, CHUNK), UNROLL, lambda k: steps(k, UNROLL))
            flush()

        low, high = self.row_range(deep)
        if not isinstance(high, int):
            e.loop(low, high, self.target.rows, lambda first: steps(first, self.target.rows))
        elif depth <= 2 * CHUNK:
            run(0, depth)
        else:
            e.loop(0, depth // CHUNK * CHUNK, CHUNK, chunk)
            run(depth // CHUNK * CHUNK, depth)
            flush()
            sums = totals
        return [[Reg(e.get(v), "float", zero.vector) for v in line] for line in sums]
