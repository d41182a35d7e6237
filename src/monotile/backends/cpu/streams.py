"""Streamed dots: a tile that is read only once is not worth a copy; it is used as it comes from its tensor.

With few rows, each element of the tile that has the lanes meets every row at once. If the tile is contiguous along
the lanes, its rows are read as vectors and accumulate (*outer*). If it is contiguous along the contraction, vectors
of both operands are multiplied along it and their lanes summed at the end by a tree that handles as many sums as a
vector has lanes (*inner*).

Tiles of one loop are streamed one after another, and no hardware guesses that order: while one is read, the next is
fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Op
from ...passes.axes import Axis
from ...passes.fuse import Nest
from .dots import DotEmitter, Operand
from .emit import Index, Reg
from .layout import Layout
from .nests import Panel
from .point import Point
from .transpose import exchange
from .vectors import BYTES, lane_mask

LINE = 64  # bytes fetched at once


@dataclass(frozen=True)
class Ahead:
    """The next tile: where it starts, and how far apart its rows are."""

    base: str
    element: str
    stride: Index


class StreamEmitter(DotEmitter):
    layout: Layout

    def lazy_loads(self, nest: Nest) -> list[Op]:
        streamed = self.layout.streamed.get(nest.dot) if nest.dot is not None else None
        return [*super().lazy_loads(nest), *([streamed] if streamed is not None else [])]

    def dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        load = self.layout.streamed.get(dot)
        if load is None:
            super().dot(nest, dot, panel, edge)
            return
        lanes, others, rows = self.operands(nest, dot)
        ahead = None if edge else self._find_ahead(load)
        if self.layout.unit(load) is lanes.free:

            def vector(pt: Point, k: Index) -> Reg:
                assert pt.lane is not None
                self._fetch(ahead, k, pt.at[pt.lane], self._known(pt))
                return self.ev.tensors.read(load, Point(lanes.at(pt.at[pt.lane], k), lanes.free, pt.valid, edge))

            self.blocks(nest, vector, others, rows, dot.operands[0].shape[1], panel, edge)
        else:
            self._inner(nest, load, lanes, others, rows, edge, ahead)

    def _known(self, pt: Point) -> int:
        """Which vector of its group a point is, in lanes."""
        assert pt.lane is not None
        at = pt.at[pt.lane]
        return at if isinstance(at, int) else pt.group * self.target.lanes

    # ---- inner products ----------------------------------------------------------------------------------------------

    def _inner(
        self, nest: Nest, load: Op, lanes: Operand, others: Operand, rows: Axis | None, edge: bool, ahead: Ahead | None
    ) -> None:
        """A vector of results at a time: for `lanes` positions of the streamed tile, every row."""
        e, width = self.e, self.target.lanes
        assert nest.lane is not None
        height = rows.extent if rows is not None else 1
        slots = 1 << (height - 1).bit_length()  # rows rounded up to a power of two
        each = width // slots  # positions a single tree of sums covers
        results = e.fresh("p")
        e.entry.append(f"  {results} = alloca [{slots} x {e.vector_type('float')}]")

        def block(first: Index, count: int) -> None:
            def part(number: Index) -> None:
                start = e.add(first, e.mul(number, each))
                sums = self._products(load, lanes, others, start, each, height, edge, ahead)
                sums += ["zeroinitializer"] * (width - len(sums))
                e.store(
                    self._tree(sums), e.element(results, number, e.vector_type("float")), e.vector_type("float"), 64
                )

            e.loop(0, -(-count // each), 1, part)
            found = [
                e.load(e.element(results, i, e.vector_type("float")), e.vector_type("float"), 64) for i in range(slots)
            ]
            self._finish_block(nest, rows, first, count, exchange(e, found, each), edge)

        whole = nest.lane.extent // width * width
        e.loop(0, whole, width, lambda first: block(first, width))
        if nest.lane.extent - whole:
            block(whole, nest.lane.extent - whole)

    def _products(
        self,
        load: Op,
        lanes: Operand,
        others: Operand,
        start: Index,
        each: int,
        height: int,
        edge: bool,
        ahead: Ahead | None,
    ) -> list[str]:
        """Sums, still spread over the lanes, of `height` rows with `each` positions from `start`: row by row."""
        e, width = self.e, self.target.lanes
        assert lanes.deep is not None and lanes.free is not None
        depth = lanes.deep.extent
        zero = e.splat(e.number(0.0, "float"))
        sums = [e.var(e.vector_type("float"), zero.text) for _ in range(height * each)]

        def steps(first: Index, starts: range, valid: int | None = None) -> None:
            held = [e.get(v) for v in sums]
            for s in starts:
                k = e.add(first, s)
                for i in range(each):
                    self._fetch(ahead, e.add(start, i), k, s)
                tile = [
                    self.ev.tensors.read(load, Point(lanes.at(e.add(start, i), k), lanes.deep, valid, edge))
                    for i in range(each)
                ]
                for r in range(height):
                    x = self.ev.scratch.read(others.buffer, Point(others.at(r, k), others.deep, valid))
                    if valid is not None:  # beyond the tile scratch holds anything, and anything times 0 may be NaN
                        x = e.select(Reg(lane_mask(e, valid), "i1", True), x, zero)
                    for i in range(each):
                        held[r * each + i] = e.fma(x, tile[i], Reg(held[r * each + i], "float", True)).text
            for variable, text in zip(sums, held, strict=True):
                e.set(variable, text)

        whole = depth // width * width
        step = next((w for w in (4 * width, 2 * width) if whole % w == 0), width)
        e.loop(0, whole, step, lambda first: steps(first, range(0, step, width)))
        if depth - whole:
            steps(whole, range(0, 1), depth - whole)
        return [e.get(v) for v in sums]

    def _tree(self, vectors: list[str]) -> str:
        """The sums of as many vectors as a vector has lanes, one in each lane, in order."""
        e = self.e
        size = 1
        while len(vectors) > 1:
            # Neighbours are folded together: lanes of one vector end up beside those of the other.
            vectors = [self._fold_pair(a, b, size) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
            size *= 2
        assert size == e.lanes
        return vectors[0]

    def _fold_pair(self, a: str, b: str, size: int) -> str:
        """Both vectors hold groups of `size` finished-so-far sums; each group is added to its neighbour."""
        e = self.e
        even, odd = [], []
        for group in range(0, e.lanes, 2 * size):
            for vector in (0, e.lanes):
                even += [vector + group + i for i in range(size)]
                odd += [vector + group + size + i for i in range(size)]
        left, right = e.shuffle(a, b, "float", even), e.shuffle(a, b, "float", odd)
        return e.op(f"fadd {e.vector_type('float')} {left}, {right}")

    def _finish_block(
        self, nest: Nest, rows: Axis | None, first: Index, count: int, results: list[str], edge: bool
    ) -> None:
        """The row work on a block of results."""
        e = self.e
        assert nest.lane is not None
        group = Point({nest.lane: first}, nest.lane, count if count < e.lanes else None, edge)
        totals = self.open_folds(nest, 1)
        self.prepare(nest, [group], {nest.lane})
        for row in range(rows.extent if rows is not None else 1):
            pt = self.below(group, rows, row)
            self.total(nest, pt, Reg(results[row], "float", True), group)
            self.finish(nest, pt, [t[0] for t in totals])
        self.close_folds(nest, group, [t[0] for t in totals])

    # ---- fetching ahead ----------------------------------------------------------------------------------------------

    def _find_ahead(self, load: Op) -> Ahead | None:
        """Where the tile that is streamed after this one lies, if it has the same shape."""
        following = self.layout.next_streamed.get(load)
        if following is None or following[0] not in self.ev.tensors.tiles:
            return None
        op, turns = following
        e, tile = self.e, self.ev.tensors.tiles[op]
        mine = self.ev.tensors.tiles[load]
        if [d.extent for d in tile.dims] != [d.extent for d in mine.dims] or tile.dims[-1].stride != 1 != mine.dims[
            -1
        ].stride:
            return None
        offset: Index = 0
        for dim, step in zip(tile.dims, turns, strict=True):
            offset = e.add(offset, e.mul(dim.stride, step))
        return Ahead(e.element(tile.base, offset, tile.element), tile.element, tile.dims[0].stride)

    def _fetch(self, ahead: Ahead | None, row: Index, column: Index, offset: int) -> None:
        """Asks for the line at a place of the next tile; `offset` is the part of the column known now, so that each
        line is
        asked for once."""
        e = self.e
        if ahead is None or offset * BYTES[ahead.element] % LINE:
            return
        at = e.element(ahead.base, e.add(e.mul(row, ahead.stride), column), ahead.element)
        e.call("void", "llvm.prefetch.p0", ("ptr", at), ("i32", "0"), ("i32", "2"), ("i32", "1"))
