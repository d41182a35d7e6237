"""Lower dots to register-blocked FMAs: rows x lane vectors, accumulated along the contraction.

One operand has the lanes and is read as vectors, the other is read one element at a time and broadcast. A block of
`target.heights` x `target.vectors` accumulators stays in registers for the whole contraction. Both operands come from
scratch in float32, unless a tile is read only once: then it is streamed from its tensor (streamed_dots.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

from ...ir import Op, Value
from .axes import Axis
from .dot_results import DotResults, finish_rows
from .emit import Index, Reg
from .fuse import Nest, unviewed
from .in_place import read_in_place
from .layout import Layout
from .long_sums import CHUNK, sum_loop
from .nests import NestEmitter
from .point import Panel, Point
from .scratch import Buffer

# Steps of a contraction in one iteration. With 8, kernels take a sixth to a quarter longer to compile and run at most
# 1 % faster (prefill of D 64 to 256 and gradients, Zen 4).
UNROLL = 4


class DotOperand:
    """An operand of a dot, addressed by its position along the free axis (rows or lanes) and the contracted one."""

    def __init__(self, nests: NestEmitter, value: Value, free_first: bool) -> None:
        self.nests = nests
        self.base = unviewed(value)
        # Follow the views back: which of the two axes each dimension of the base is.
        place: list[str] = ["free", "contracted"] if free_first else ["contracted", "free"]
        while value is not self.base:
            op = value.op
            assert op is not None
            if op.kind == "trans":
                place.reverse()
            else:
                place.pop(op.attrs["position"])
            value = op.operands[0]
        dims = nests.axes.dims(self.base)
        self.free, self.contracted = (
            next((a for a, p in zip(dims, place, strict=True) if p == w), None) for w in ("free", "contracted")
        )

    def at(self, free: Index, contracted: Index) -> dict[Axis, Index]:
        places = ((self.free, free), (self.contracted, contracted))
        return {axis: index for axis, index in places if axis is not None}

    @property
    def buffer(self) -> Buffer:
        return self.nests.ev.buffers[self.base]

    def element(self, row: Index, k: Index) -> Reg:
        return self.nests.ev.scratch.read(self.buffer, Point(self.at(row, k)))

    def vector(self, pt: Point, k: Index) -> Reg:
        """Read a vector along the lanes of a point."""
        if pt.lane is None:
            return self.element(0, k)
        where = Point(self.at(pt.at[pt.lane], k), self.free, pt.valid, False, pt.panel)
        return self.nests.e.splat(self.nests.ev.scratch.read(self.buffer, where))


@dataclass(frozen=True)
class Contraction:
    """The inner loop of a dot: `add` accumulates the products of vectors along the lanes with one element of each row,
    for `steps` positions of the contracted axis at once. `before` is called at every step."""

    axis: Axis | None
    steps: int
    vectors: Callable[[list[Point], Index], list[Reg]]
    element: Callable[[Index, Index], Reg]
    add: Callable[[Reg, Reg, Reg], Reg]
    before: Callable[[list[Point], Index], None] = lambda points, k: None
    together: int = 1  # positions whose vectors are read at once, one position after the other; divides UNROLL
    lanes: int | None = None  # of a panel sum: those of the panel are contracted, not the whole axis

    @property
    def depth(self) -> int:
        if self.lanes is not None:
            return self.lanes
        return self.axis.extent if self.axis is not None else 1


class DotEmitter(NestEmitter):
    layout: Layout

    def _body(self, nest: Nest, panel: Panel, edge: bool) -> None:
        if nest.dot is None:
            super()._body(nest, panel, edge)
        else:
            self.dot(nest, nest.dot, panel, edge)

    def read_in_place(self, nest: Nest, inside: str | None, copy: Callable[[], None]) -> bool:
        load = nest.made[0] if nest.made else None
        if load is None or load not in self.layout.in_place:
            return False
        read_in_place(self.ev, load, inside, copy, stepped=load in self.layout.stepped)
        return True

    def operands(self, nest: Nest, dot: Op) -> tuple[DotOperand, DotOperand, Axis | None]:
        """Return the operand with the lanes, the one with the rows, and the axis of the rows."""
        m, _, n = self.axes.dots[dot]
        a, b = DotOperand(self, dot.operands[0], True), DotOperand(self, dot.operands[1], False)
        return (b, a, m) if nest.lane is not None and nest.lane is n else (a, b, n)

    def dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        lane_operand, row_operand, rows = self.operands(nest, dot)
        contraction = self.float32_contraction(lane_operand.vector, row_operand)
        self.register_blocks(nest, contraction, rows, panel, edge)

    def float32_contraction(self, vector: Callable[[Point, Index], Reg], row_operand: DotOperand) -> Contraction:
        """Contract in float32, one position at a time."""

        def vectors(points: list[Point], k: Index) -> list[Reg]:
            return [vector(pt, k) for pt in points]

        return Contraction(row_operand.contracted, 1, vectors, row_operand.element, self.e.fma)

    def register_blocks(
        self, nest: Nest, contraction: Contraction, rows: Axis | None, panel: Panel, edge: bool
    ) -> None:
        """Loop over the register blocks of the result."""
        low, high = self.row_range(rows)

        def group(points: list[Point]) -> None:
            totals = self.open_folds(nest, len(points))
            self.prepare(nest, points, {nest.lane})
            results = DotResults(nest, rows, points, totals)
            height = self.height or self.target.block_rows(len(points))

            def block(row: Index, count: int) -> None:
                prefetch = self.prefetch_shared(nest, panel, row, height, UNROLL)
                sums = partial(self._accumulate, points, row, count, contraction, prefetch)
                finish_rows(self, results, row, count, sums)

            self._row_blocks(low, high, height, block)
            for i, pt in enumerate(points):
                self.close_folds(nest, pt, [t[i] for t in totals])

        self.each_group(nest.lane, panel, edge, {}, group)

    def _row_blocks(self, low: Index, high: Index, step: int, block: Callable[[Index, int], None]) -> None:
        """Loop over rows in blocks of `step`, then over what is left. Visible rows, whose range is known when the
        kernel runs, come in units of `target.rows`."""
        e = self.e

        def blocks(begin: Index, end: Index, count: int) -> None:
            e.loop(begin, end, count, lambda row: block(row, count))

        if isinstance(low, int) and isinstance(high, int):
            whole, rest = divmod(high - low, step)
            short = [rest] if rest else []
            if whole and 0 < 2 * rest < step:  # two blocks of like height instead of a whole and a low one
                whole, short = whole - 1, [(step + rest + 1) // 2, (step + rest) // 2]
            end = low + whole * step
            blocks(low, end, step)
            for count in dict.fromkeys(short):
                begin, end = end, end + count * short.count(count)
                blocks(begin, end, count)
            return
        unit = gcd(step, self.target.rows)
        if step > unit:
            rest_rows = e.op(f"urem i64 {e.sub(high, low)}, {step}")
            end_rows = e.sub(high, rest_rows)
            blocks(low, end_rows, step)
            low = end_rows
        blocks(low, high, unit)

    def prefetch_shared(self, nest: Nest, panel: Panel, row: Index, height: int, steps: int) -> Callable[[Index], None]:
        """Return the function that prefetches, at every `steps` positions of the contraction, a part of what the dot
        reads in the next iteration of a loop, if nothing else does. A register block has `height` rows."""
        return lambda k: None

    def _accumulate(
        self,
        points: list[Point],
        row: Index,
        count: int,
        contraction: Contraction,
        prefetch: Callable[[Index], None],
    ) -> list[list[Reg]]:
        """Accumulate one register block: at each step one vector for each point, and one broadcast element for each of
        `count` rows."""
        e = self.e
        zero = e.number(0.0, "float")
        zero = e.splat(zero) if points[0].lane is not None else zero
        sums = [[e.var(e.type_of(zero), zero.text) for _ in points] for _ in range(count)]

        def steps(first: Index, number: int) -> None:
            prefetch(first)
            held = [[Reg(e.get(v), "float", zero.vector) for v in line] for line in sums]
            for u in range(0, number, contraction.steps):
                k = e.add(first, u)
                contraction.before(points, k)
                if u % contraction.together == 0:
                    read = contraction.vectors(points, k)
                vectors, read = read[: len(points)], read[len(points) :]
                for i in range(count):
                    x = contraction.element(e.add(row, i), k)
                    held[i] = [contraction.add(x, v, h) for v, h in zip(vectors, held[i], strict=True)]
            for line, regs in zip(sums, held, strict=True):
                for variable, reg in zip(line, regs, strict=True):
                    e.set(variable, reg.text)

        depth, chains = contraction.depth, [variable for line in sums for variable in line]
        low, high = self.row_range(contraction.axis)
        if not (isinstance(low, int) and isinstance(high, int)):  # some rows are skipped
            step = min(self.target.rows, UNROLL)
            sum_loop(e, (low, high, depth), step, CHUNK, lambda k: steps(k, step), chains)
        else:
            whole = depth // UNROLL * UNROLL
            sum_loop(e, (0, whole, whole), UNROLL, CHUNK, lambda k: steps(k, UNROLL), chains)
            if depth > whole:
                steps(whole, depth - whole)
        return [[Reg(e.get(v), "float", zero.vector) for v in line] for line in sums]
