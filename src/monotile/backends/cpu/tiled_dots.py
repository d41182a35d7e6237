"""Dots of narrow panels by AMX: blocks of tile registers instead of rows x lane vectors (amx.py).

A tile of the result has 16 rows and the 16 lanes of a vector. The operand with the rows is packed into A tiles before
the panels, once for all of them. The operand with the lanes is stored as words of two steps, B tiles, by the nest that
computes it (`Buffer.pairs`), or packed by the dot if something else reads it too or if it is bytes. The sums of a block
are stored, and the elementwise work of the nest reads them from L1: those of one block while the next is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...ir import Op
from . import amx
from .amx import LANES, ROWS, Product
from .axes import Axis
from .dot_results import add_total, row_point
from .dots import DotOperand
from .emit import Emitter, Index, Reg, Var
from .evaluate import Evaluator
from .fuse import Fusion, Nest
from .packed_tiles import PackedTiles, byte_words
from .pair_storage import end_pairs
from .point import Panel, Point
from .scratch import Buffer
from .streamed_dots import StreamedDotEmitter
from .target import Target
from .vectors import BYTES

# Tile rows of a register block, by its number of vectors. The tile registers hold the accumulators, one B tile for each
# vector, and A tiles.
TILE_ROWS = {1: 4, 2: 2}
FINISHED_ROWS = 4  # rows of sums whose elementwise work is one iteration


@dataclass(frozen=True)
class Sums:
    """Where the sums of a block are stored: those of a row and a point."""

    address: Callable[[Index, Point], str]  # of a row, counted from the first one of the axis
    stride_bytes: Index
    in_place: bool  # in the storage of the dot's result
    type: str = "float"


class TiledDotEmitter(StreamedDotEmitter):
    def __init__(self, emitter: Emitter, target: Target, fusion: Fusion, evaluator: Evaluator) -> None:
        super().__init__(emitter, target, fusion, evaluator)
        self._packed_rows: dict[Op, PackedTiles] = {}

    def pack(self, nest: Nest) -> None:
        """Pack the rows that all panels of a nest read."""
        if nest.dot is None or nest.dot not in self.layout.tiled:
            super().pack(nest)
            return
        _, row_operand, rows = self.operands(nest, nest.dot)
        self._packed_rows[nest.dot] = PackedTiles(
            self, row_operand, rows.extent if rows is not None else 1, self.layout.tiled[nest.dot]
        )
        self.ev.scratch.clock += 1

    def dot(self, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
        if dot not in self.layout.tiled:
            super().dot(nest, dot, panel, edge)
            return
        lane_operand, _, rows = self.operands(nest, dot)
        points: list[Point] = []
        self.each_group(nest.lane, panel, edge, {}, points.extend)
        product, lanes = self.layout.tiled[dot], lane_operand.buffer
        if lanes.pairs is None:
            lanes = self._pack_lanes(lane_operand, points, product)
        totals = self.open_folds(nest, len(points))
        self.prepare(nest, points, {nest.lane})
        most = TILE_ROWS[len(points)] * ROWS

        def block(row: Index, height: int) -> None:
            tiles = -(-height // ROWS)
            sums = self._place_sums(nest, rows, points, row, tiles, product)
            prefetch = self.prefetch_shared(nest, panel, row, most, product.steps)
            self._multiply(dot, lanes, points, row, tiles, prefetch)
            for tile in range(tiles):
                for n, pt in enumerate(points):
                    at = sums.address(self.e.add(row, tile * ROWS), pt)
                    amx.store(self.e, tile * len(points) + n, at, sums.stride_bytes)
            if not sums.in_place or nest.folds or nest.stores or len(nest.values) > 1:
                self._finish_rows(nest, rows, points, row, height, sums, totals)

        self._tile_blocks(*self.row_range(rows), most, block)
        for n, pt in enumerate(points):
            self.close_folds(nest, pt, [t[n] for t in totals])
        end_pairs(self.ev, nest, points)
        self.stored_total = False

    def _tile_blocks(self, low: Index, high: Index, most: int, block: Callable[[Index, int], None]) -> None:
        """Loop over rows in blocks of at most `most`. A range known only when the kernel runs has whole units of
        `layout.skipped_rows`."""
        e = self.e
        if isinstance(low, int) and isinstance(high, int):
            whole = high - high % most
            e.loop(low, whole, most, lambda row: block(row, most))
            if high > whole:
                block(whole, high - whole)
            return
        unit, end = self.layout.skipped_rows, high
        if most > unit:
            end = e.sub(high, e.op(f"urem i64 {e.sub(high, low)}, {most}"))
        e.loop(low, end, most, lambda row: block(row, most))
        if most > unit:
            e.loop(end, high, unit, lambda row: block(row, unit))

    def _multiply(
        self, dot: Op, lanes: Buffer, points: list[Point], row: Index, tiles: int, prefetch: Callable[[Index], None]
    ) -> None:
        """Accumulate a block of tiles along the whole contraction."""
        e, packed, scratch, product = self.e, self._packed_rows[dot], self.ev.scratch, self.layout.tiled[dot]
        vectors = len(points)
        first_b = tiles * vectors
        for register in range(first_b):
            amx.zero(e, register)

        def step(k: Index) -> None:
            prefetch(k)
            for n, pt in enumerate(points):
                assert lanes.lane is not None and lanes.pairs is not None
                b = scratch.address(lanes, {lanes.lane: 0, lanes.pairs: k}, pt.panel)
                amx.load(e, first_b + n, b, e.mul(lanes.strides[lanes.pairs], product.group * BYTES[product.element]))
            for tile in range(tiles):
                a = first_b + vectors + tile % 2
                amx.load(e, a, packed.tile(e.add(row, tile * ROWS), k), amx.BYTES)
                for n in range(vectors):
                    amx.add_products(e, product, tile * vectors + n, a, first_b + n)

        e.loop(*self.row_range(packed.axis), product.steps, step)

    def _pack_lanes(self, lane_operand: DotOperand, points: list[Point], product: Product) -> Buffer:
        """Pack one panel of the operand with the lanes into words of two steps, or of four bytes."""
        e, scratch = self.e, self.ev.scratch
        axis, lane = lane_operand.contracted, lane_operand.free
        assert axis is not None and lane is not None
        if product.element == "i8":
            return self._pack_bytes(lane_operand, points, product)
        buffer = scratch.new_pairs(lane, axis, self.layout.panel, product.steps)

        def place(n: int, k: Index) -> Point:
            return Point({lane: 0, axis: k}, lane, panel=(0, n))

        def pack(k: Index, count: int = 2) -> None:
            for n, pt in enumerate(points):
                for i in range(count):
                    scratch.write(buffer, place(n, e.add(k, i)), lane_operand.vector(pt, e.add(k, i)))

        low, high = self.row_range(axis)
        whole = high - high % 2 if isinstance(high, int) else high
        e.loop(low, whole, 2, pack)
        if whole != high:
            pack(whole, 1)
        for n in range(len(points)):
            scratch.end_pairs(buffer, place(n, 0))
        return buffer

    def _pack_bytes(self, lane_operand: DotOperand, points: list[Point], product: Product) -> Buffer:
        """Pack one panel into words of four steps. Steps beyond the contraction are zero."""
        e, scratch, group = self.e, self.ev.scratch, product.group
        axis, lane = lane_operand.contracted, lane_operand.free
        assert axis is not None and lane is not None
        padded, width = -(-axis.extent // product.steps) * product.steps, self.layout.panel
        buffer = scratch.new("i8", {lane: group, axis: width}, lane, padded * width)
        buffer.pairs = axis

        def pack(k: Index, count: int = group) -> None:
            for n, pt in enumerate(points):
                word = byte_words(e, [lane_operand.vector(pt, e.add(k, i)) for i in range(count)])
                e.store(word, scratch.address(buffer, {lane: 0, axis: k}, (0, n)), e.vector_type("i32"), 4)

        low, high = self.row_range(axis)
        if not isinstance(high, int):  # whole tiles
            e.loop(low, high, group, pack)
            return buffer
        e.loop(low, high - high % group, group, pack)
        for k in range(high - high % group, padded, group):
            pack(k, max(0, high - k))
        return buffer

    # ---- results -----------------------------------------------------------------------------------------------------

    def _place_sums(
        self, nest: Nest, rows: Axis | None, points: list[Point], row: Index, tiles: int, product: Product
    ) -> Sums:
        """Store the sums where the dot's result is stored, if it is and holds whole tiles of their type, else in a
        block of scratch."""
        e, scratch = self.e, self.ev.scratch
        assert nest.total is not None
        buffer = self.ev.buffers.get(nest.total)
        others = {self.ev.buffers.get(v) for v in self.fusion.nest_reads(nest) if v is not nest.total}
        whole = rows is not None and rows.extent % ROWS == 0 and product.sums == "float"
        in_place = buffer is not None and nest.addend is None and buffer not in others and buffer.pairs is None
        self.stored_total = in_place and whole
        if self.stored_total and buffer is not None and rows is not None:
            size = BYTES[buffer.element]
            return Sums(
                lambda r, pt: scratch.address(buffer, {rows: r}, pt.panel), e.mul(buffer.strides[rows], size), True
            )
        width = len(points) * LANES
        block = scratch.new(product.sums, {}, None, tiles * ROWS * width)

        def address(r: Index, pt: Point) -> str:
            assert pt.panel is not None
            offset = e.add(e.mul(e.sub(r, row), width), e.mul(pt.panel[1], LANES))
            return e.element(scratch.address(block, {}, None), offset, product.sums)

        return Sums(address, width * BYTES[product.sums], False, product.sums)

    def _finish_rows(
        self,
        nest: Nest,
        rows: Axis | None,
        points: list[Point],
        row: Index,
        height: int,
        sums: Sums,
        totals: list[list[Var]],
    ) -> None:
        """Emit the elementwise work and the folds of the rows of a block."""
        e = self.e

        def several(first: Index, count: int = FINISHED_ROWS) -> None:
            for i in range(count):
                at = e.add(row, e.add(first, i))
                for n, group in enumerate(points):
                    pt = row_point(group, rows, at)
                    text = e.load(sums.address(at, group), e.vector_type(sums.type), BYTES[sums.type])
                    value = Reg(text, sums.type, True)
                    add_total(
                        self, nest, pt, value if sums.type == "float" else e.convert("sitofp", value, "float"), group
                    )
                    self.finish(nest, pt, [t[n] for t in totals])

        whole = height - height % FINISHED_ROWS
        e.loop(0, whole, FINISHED_ROWS, several)
        if height > whole:
            several(whole, height - whole)
