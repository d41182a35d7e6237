"""Streamed dots: a tile that is used once is read from its tensor by the dot itself, without a copy in scratch.

A dot with few rows multiplies each element of the tile with every row at once. If the tile is contiguous along the
lanes, its rows are read as vectors and accumulated (*outer product*). If it is contiguous along the contraction,
vectors of both operands are multiplied along it, and the lanes of as many sums as a vector has lanes are added by one
tree (*inner product*).

A tile is read in the order of memory as far as possible, because hardware prefetchers follow that order. Tiles of one
loop are streamed one after another, which no prefetcher predicts: while one is read, the next is prefetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ...dtypes import FP8
from ...ir import Op
from .axes import Axis
from .bf16_pairs import (
    PackedRows,
    add_pair_products,
    outer_contraction,
    panel_contraction,
    streams_pairs,
)
from .bf16_words import Bf16Words
from .code_vectors import CodeVectors, find_codes, several_at_once
from .dot_results import DotResults, finish_rows
from .dots import DotOperand
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .fuse import Fusion, Nest, unviewed
from .long_sums import CHUNK, sum_loop
from .panel_sums import emit_panel_sum
from .point import Panel, Point
from .prefetch import LINE, NextTile, PrefetchEmitter
from .target import Target
from .transpose import exchange, lane_sums
from .vectors import lane_mask

UNORDERED_BYTES = 512  # of a tile that may be read in any order
SHARING_ROWS = 4  # with fewer rows, reading them costs little beside reading the tile
CONSTANTS = 4  # registers that hold what codes are shifted, masked and looked up by: sums in memory are slow
COMPUTE_BOUND = 128  # FMAs per cache line that take longer than loading the line


@dataclass(frozen=True)
class InnerProduct:
    """A dot whose streamed tile is contiguous along the contraction."""

    load: Op
    lane_operand: DotOperand
    row_operand: DotOperand
    height: int
    edge: bool
    next_tile: NextTile | None
    packed: PackedRows | None  # the rows, for bf16 pair products
    words: Bf16Words | None  # the tile, for the same
    codes: CodeVectors | None = None  # the tile, where it is read in several vectors at once


class StreamedDotEmitter(PrefetchEmitter):
    def __init__(self, emitter: Emitter, target: Target, fusion: Fusion, evaluator: Evaluator) -> None:
        super().__init__(emitter, target, fusion, evaluator)
        self.packed: dict[Op, PackedRows] = {}

    def lazy_loads(self, nest: Nest) -> list[Op]:
        if nest.dot is None or nest.dot not in self.layout.streamed:
            return super().lazy_loads(nest)
        streamed = unviewed(nest.dot.operands[1] if self._lanes_second(nest, nest.dot) else nest.dot.operands[0])
        return [*super().lazy_loads(nest), *self.loads_of([streamed])]

    def _lanes_second(self, nest: Nest, dot: Op) -> bool:
        return nest.lane is not None and nest.lane is self.axes.dots[dot][2]

    def dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        if nest.sums_panels:
            emit_panel_sum(self, nest, dot, panel, edge)
            return
        load = self.layout.streamed.get(dot)
        if load is None and dot in self.packed and panel is not None:
            self._paired_panels(nest, dot, panel, edge)
            return
        if load is None:
            super().dot(nest, dot, panel, edge)
            return
        lane_operand, row_operand, rows = self.operands(nest, dot)
        height = rows.extent if rows is not None else 1
        if self.layout.contiguous_axis(load) is lane_operand.free:

            def vector(pt: Point, k: Index) -> Reg:
                assert pt.lane is not None
                return self.ev.value(
                    lane_operand.base, Point(lane_operand.at(pt.at[pt.lane], k), lane_operand.free, pt.valid, edge)
                )

            contraction = self.float32_contraction(vector, row_operand)
            paired = not edge and streams_pairs(self.target, dot, lane_operand, row_operand, inner=False)
            if paired:
                contraction = outer_contraction(self, load, lane_operand, PackedRows(self, row_operand, height))
            codes = None if edge else find_codes(self.ev, lane_operand.base, lane_operand.free)
            whole_rows = self._set_register_block(nest, load, height, codes)
            if codes is not None:
                contraction = several_at_once(contraction, codes, lane_operand, self.vectors)
            next_tile = None if edge else self.find_next_tile(load, height, paired, whole_rows)
            read_once = self.height == height
            prefetch = partial(self.prefetch_rows, next_tile, contraction.steps, read_once)
            contraction = replace(contraction, before=prefetch)
            self.register_blocks(nest, contraction, rows, panel, edge)
            self.vectors, self.height = self.target.vectors, None
        else:
            paired = not edge and streams_pairs(self.target, dot, lane_operand, row_operand, inner=True)
            packed = PackedRows(self, row_operand, height) if paired else None
            next_tile = None if edge else self.find_next_tile(load, height, paired, True)
            assert lane_operand.contracted is not None
            words = Bf16Words(self.ev, load, lane_operand.base, lane_operand.contracted) if paired else None
            codes = None if edge else find_codes(self.ev, lane_operand.base, lane_operand.contracted)
            inner = InnerProduct(load, lane_operand, row_operand, height, edge, next_tile, packed, words, codes)
            self._inner(nest, inner, rows)

    def _set_register_block(self, nest: Nest, load: Op, height: int, codes: CodeVectors | None) -> bool:
        """Choose the register block of an outer product: equal pieces of a row of the tile, and every row of the
        result, so that the tile is read once. Where that leaves registers for one vector alone, and a broadcast would
        be loaded for every FMA, rows are divided, and the tile is read again from L1 or L2. Return True if the tile is
        read in order. All registers are used if arithmetic takes longer than memory or pieces would be short; else
        prefetching the next tile works better with two pieces. Codes need some of 16 registers for themselves."""
        assert nest.lane is not None
        size = self.ev.tensors.tiles[load].bytes_along(nest.lane) // nest.lane.extent
        row = -(-nest.lane.extent // self.target.lanes)
        most, blocks = self.target.max_vectors(height), 1
        if size == 4 and height * LINE < COMPUTE_BOUND * size:
            most = max(1, self.target.accumulators // height)
        elif row > 1:
            while self.target.max_vectors(-(-height // blocks)) < 2:
                blocks += 1
            most = self.target.max_vectors(-(-height // blocks))
        rows, dtype = -(-height // blocks), load.result.dtype
        if codes is not None:
            most = 4 if rows <= 2 else 2
        elif self.target.registers == 16 and rows > 2 and (dtype in FP8 or not dtype.is_float):
            most = min(most, max(2, (self.target.registers - CONSTANTS - 1) // (rows + 1)))
        pieces = -(-row // most)
        self.vectors, self.height = -(-row // pieces), rows
        return pieces == blocks == 1

    # ---- bf16 pair products in panels --------------------------------------------------------------------------------

    def pack(self, nest: Nest) -> None:
        """Pack the rows that all panels of a nest read, for bf16 pair products."""
        dot = nest.dot
        if dot is None or dot not in self.layout.paired:
            return
        _, row_operand, rows = self.operands(nest, dot)
        if row_operand.base in self.ev.buffers:
            self.packed[dot] = PackedRows(self, row_operand, rows.extent if rows is not None else 1)
            self.ev.scratch.clock += 1

    def _paired_panels(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        lane_operand, _, rows = self.operands(nest, dot)
        points: list[Point] = []
        self.each_group(nest.lane, panel, edge, {}, points.extend)
        contraction = panel_contraction(self, lane_operand, self.packed[dot], points)
        self.register_blocks(nest, contraction, rows, panel, edge)

    # ---- inner products ----------------------------------------------------------------------------------------------

    def _inner(self, nest: Nest, dot: InnerProduct, rows: Axis | None) -> None:
        """Emit an inner product: for every `lanes` positions of the streamed tile, a vector of results of each row."""
        e, width = self.e, self.target.lanes
        assert nest.lane is not None
        slots = min(1 << (dot.height - 1).bit_length(), width)  # rows of one tree of sums: a power of two
        each = width // slots  # positions it covers
        results, vector = e.fresh("p"), e.vector_type("float")
        e.entry.append(f"  {results} = alloca [{slots} x {vector}]")

        def block(first: Index, count: int) -> None:
            def part(rows_here: range, number: Index) -> None:
                start = e.add(first, e.mul(number, each))
                sums = self._products(dot, rows_here, start, each)
                sums += ["zeroinitializer"] * (width - len(sums))
                e.store(lane_sums(e, sums), e.element(results, number, vector), vector, 64)

            found: list[str] = []
            for row in range(0, dot.height, slots):  # more rows than lanes take several trees
                e.loop(0, -(-count // each), 1, partial(part, range(row, min(row + slots, dot.height))))
                vectors = [e.load(e.element(results, i, vector), vector, 64) for i in range(slots)]
                found += exchange(e, vectors, each)
            self._finish_block(nest, rows, first, count, found, dot.edge)

        whole = nest.lane.extent // width * width
        e.loop(0, whole, width, lambda first: block(first, width))
        if nest.lane.extent - whole:
            block(whole, nest.lane.extent - whole)

    def _products(self, dot: InnerProduct, rows: range, start: Index, each: int) -> list[str]:
        """Multiply some rows with `each` positions from `start` on; return the sums, still spread over the lanes."""
        e, lane_operand = self.e, dot.lane_operand
        assert lane_operand.contracted is not None and lane_operand.free is not None
        depth = lane_operand.contracted.extent
        width = self.target.lanes * (1 if dot.packed is None else 2)
        zero = e.splat(e.number(0.0, "float"))
        sums = [e.var(e.vector_type("float"), zero.text) for _ in range(len(rows) * each)]

        def steps(positions: range, first: Index, starts: range, valid: int | None = None) -> None:
            mine = [[sums[r * each + i] for i in positions] for r in range(len(rows))]
            held = [[Reg(e.get(v), "float", True) for v in line] for line in mine]
            codes = dot.codes if dot.codes is not None and len(starts) % dot.codes.count == 0 else None
            ready: list[list[Reg]] = [[] for _ in positions]
            for s in starts:
                k = e.add(first, s)
                for i in positions if rows.start == 0 else ():  # once for all rows
                    self.prefetch_ahead(dot.next_tile, e.add(start, i), k, s)
                places = [
                    Point(lane_operand.at(e.add(start, i), k), lane_operand.contracted, valid, dot.edge)
                    for i in positions
                ]
                if codes is not None and not ready[0]:
                    ready = [codes.read([pt.at]) for pt in places]
                tile = [
                    vectors.pop(0) if vectors else self._tile_vector(dot, pt)
                    for vectors, pt in zip(ready, places, strict=True)
                ]
                for r, row in enumerate(rows):
                    add = self._row(dot, row, k, valid)
                    held[r] = [add(t, h) for t, h in zip(tile, held[r], strict=True)]
            for line, regs in zip(mine, held, strict=True):
                for variable, reg in zip(line, regs, strict=True):
                    e.set(variable, reg.text)

        whole = depth // width * width
        step = next((w for w in (4 * width, 2 * width) if whole % w == 0 and whole > w), width)
        # Few positions at once, in a loop of their own, so that LLVM cannot interleave them with others: memory is
        # fastest when it is read in order. With several rows, two positions at least share the loads of the rows:
        # otherwise there is more than one load for each FMA.
        row_bytes = self.ev.tensors.tiles[dot.load].bytes_along(lane_operand.contracted)
        shared = len(rows) >= (SHARING_ROWS if dot.packed is None else 2 * SHARING_ROWS)
        most = 2 * UNORDERED_BYTES if shared else UNORDERED_BYTES
        few = next((n for n in (8, 4, 2) if each % n == 0 and n * row_bytes <= most), 2 - each % 2 if shared else 1)
        for i in range(0, each, few):
            positions = range(i, i + few)
            body = partial(lambda p, first: steps(p, first, range(0, step, width)), positions)
            for p in positions if rows.start == 0 else ():
                self.prefetch_end(dot.next_tile, e.add(start, p), depth)
            mine = [sums[r * each + p] for r in range(len(rows)) for p in positions]
            sum_loop(e, (0, whole, whole), step, CHUNK * width, body, mine)
            if depth - whole:
                steps(positions, whole, range(0, 1), depth - whole)
        return [e.get(v) for v in sums]

    def _tile_vector(self, dot: InnerProduct, pt: Point) -> Reg:
        """Read a vector of the streamed tile along the contraction: numbers, or pairs of bfloat16. What is computed
        from the zeros behind the tile need not be a number."""
        if dot.words is None:
            x = self.ev.value(dot.lane_operand.base, pt)
            if pt.valid is None or dot.lane_operand.base is dot.load.result:
                return x
            mask = Reg(lane_mask(self.e, pt.valid), "i1", True)
            return self.e.select(mask, x, self.e.splat(self.e.number(0.0, "float")))
        return dot.words.pairs(pt.at, half=pt.valid is not None)

    def _row(self, dot: InnerProduct, row: int, k: Index, valid: int | None) -> Callable[[Reg, Reg], Reg]:
        """Return the function that adds the products of a vector of the tile with a row to a sum."""
        e = self.e
        if dot.packed is not None:
            pairs = dot.packed.pairs(row, k, half=valid is not None)
            return lambda t, total: add_pair_products(e, t, pairs, total)
        x = self.ev.scratch.read(
            dot.row_operand.buffer, Point(dot.row_operand.at(row, k), dot.row_operand.contracted, valid)
        )
        if valid is not None:  # scratch beyond the tile is undefined, and 0 times NaN is NaN
            x = e.select(Reg(lane_mask(e, valid), "i1", True), x, e.splat(e.number(0.0, "float")))
        return lambda t, total: e.fma(x, t, total)

    def _finish_block(
        self, nest: Nest, rows: Axis | None, first: Index, count: int, results: list[str], edge: bool
    ) -> None:
        """Emit the elementwise work and the folds of a block of results."""
        e = self.e
        assert nest.lane is not None
        group = Point({nest.lane: first}, nest.lane, count if count < e.lanes else None, edge)
        totals = self.open_folds(nest, 1)
        self.prepare(nest, [group], {nest.lane})
        sums = [[Reg(text, "float", True)] for text in results[: rows.extent if rows is not None else 1]]
        finish_rows(self, DotResults(nest, rows, [group], totals), 0, len(sums), lambda: sums)
        self.close_folds(nest, group, [t[0] for t in totals])
