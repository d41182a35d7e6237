"""Dots: register blocks of rows x lane vectors, accumulated along the contraction.

One operand has the lanes and is read as vectors, the other is read one element at a time and broadcast; both come from scratch
in float32. A block of `target.rows` x `target.vectors` accumulators stays in registers for the whole contraction.
"""

from __future__ import annotations

from ...ir import Op, Value
from ...passes.axes import Axis
from ...passes.fuse import Nest, strip
from .emit import Index, Reg, Var
from .memory import Buffer, Point
from .nests import NestEmitter, Panel

UNROLL = 8


class Operand:
    """A dot's operand in scratch, addressed by the positions (m, k) or (k, n) of its two dimensions."""

    def __init__(self, nests: NestEmitter, value: Value) -> None:
        self.nests = nests
        self.base = strip(value)
        self.buffer: Buffer = nests.ev.buffers[self.base]
        # Follow the changes of shape back: which of the two positions each dimension of the base has.
        place: list[int | None] = [0, 1]
        while value is not self.base:
            op = value.op
            assert op is not None
            if op.kind == "trans":
                place.reverse()
            else:
                place.pop(op.attrs["position"])
            value = op.operands[0]
        self.axes = [(axis, place[d]) for d, axis in enumerate(nests.axes.dims(self.base)) if axis is not None]

    def at(self, first: Index, second: Index) -> dict[Axis, Index]:
        return {axis: (first, second)[side] for axis, side in self.axes if side is not None}


class DotEmitter(NestEmitter):
    def _body(self, nest: Nest, panel: Panel, edge: bool) -> None:
        if nest.dot is None:
            super()._body(nest, panel, edge)
        else:
            self._dot(nest, nest.dot, panel, edge)

    def _dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        m, k, n = self.axes.dots[dot]
        a, b = (Operand(self, v) for v in dot.operands)
        lanes_on_n = nest.lane is not None and nest.lane is n
        rows = m if lanes_on_n else n
        lane_operand, row_operand = (b, a) if lanes_on_n else (a, b)
        depth = dot.operands[0].shape[1]
        height = rows.extent if rows is not None else 1

        def group(points: list[Point]) -> None:
            totals = self.open_folds(nest, len(points))
            self.prepare(nest, points, {nest.lane})

            def block(row: Index, count: int) -> None:
                grid = [
                    [Point(pt.at | ({rows: self.e.add(row, i)} if rows else {}), pt.lane, pt.valid, edge, pt.panel, dict(pt.memo))
                     for pt in points]
                    for i in range(count)
                ]  # fmt: skip
                starts = [[self._start(nest, pt) for pt in line] for line in grid]
                sums = self._accumulate(starts, points, row, count, depth, lane_operand, row_operand, lanes_on_n)
                assert nest.total is not None
                for line, values in zip(grid, sums, strict=True):
                    for i, (pt, value) in enumerate(zip(line, values, strict=True)):
                        pt.memo = dict(points[i].memo) | {nest.total: value}
                        self.finish(nest, pt, [t[i] for t in totals])

            step = self.target.rows
            whole = height // step * step
            self.e.loop(0, whole, step, lambda row: block(row, step))
            if height - whole:
                block(whole, height - whole)
            for i, pt in enumerate(points):
                self.close_folds(nest, pt, [t[i] for t in totals])

        self.each_group(nest.lane, panel, edge, {}, group)

    def _start(self, nest: Nest, pt: Point) -> Reg:
        if nest.start is None:
            zero = self.e.number(0.0, "float")
            return self.e.splat(zero) if pt.lane is not None else zero
        assert nest.total is not None
        start = self.ev.moved(nest.start, nest.total, pt)
        return self.e.splat(start) if pt.lane is not None else start

    def _accumulate(
        self,
        starts: list[list[Reg]],
        points: list[Point],
        row: Index,
        count: int,
        depth: int,
        lane_operand: Operand,
        row_operand: Operand,
        lanes_on_n: bool,
    ) -> list[list[Reg]]:
        """The register block: for each step of the contraction one row of vectors, and one broadcast per row."""
        e = self.e
        sums = [[e.var(e.type_of(r), r.text) for r in line] for line in starts]

        def steps(first: Index, number: int) -> None:
            held = [[Reg(e.get(v), "float", starts[0][0].vector) for v in line] for line in sums]
            for u in range(number):
                k = e.add(first, u)
                vectors = [self._lane_vector(lane_operand, pt, k, lanes_on_n) for pt in points]
                for i in range(count):
                    x = self._element(row_operand, e.add(row, i), k, lanes_on_n)
                    held[i] = [e.fma(x, v, h) for v, h in zip(vectors, held[i], strict=True)]
            for line, regs in zip(sums, held, strict=True):
                for variable, reg in zip(line, regs, strict=True):
                    e.set(variable, reg.text)

        whole = depth // UNROLL * UNROLL
        e.loop(0, whole, UNROLL, lambda first: steps(first, UNROLL))
        if depth - whole:
            steps(whole, depth - whole)
        return [[self._value(v, r) for v, r in zip(line, regs, strict=True)] for line, regs in zip(sums, starts, strict=True)]

    def _value(self, variable: Var, like: Reg) -> Reg:
        return Reg(self.e.get(variable), "float", like.vector)

    def _lane_vector(self, operand: Operand, pt: Point, k: Index, lanes_on_n: bool) -> Reg:
        if pt.lane is None:
            return self._element(operand, 0, k, not lanes_on_n)
        along: Index = pt.at[pt.lane]
        at = operand.at(k, along) if lanes_on_n else operand.at(along, k)
        lane = next((axis for axis, side in operand.axes if side == (1 if lanes_on_n else 0)), None)
        reg = self.ev.scratch.read(operand.buffer, Point(at, lane, pt.valid, False, pt.panel))
        return self.e.splat(reg)

    def _element(self, operand: Operand, row: Index, k: Index, lanes_on_n: bool) -> Reg:
        at = operand.at(row, k) if lanes_on_n else operand.at(k, row)
        return self.ev.scratch.read(operand.buffer, Point(at))
