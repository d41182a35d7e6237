"""Panel sums: a dot that contracts the panel axis and is added to memory (memory_sums.py).

Everything else along the panel axis is pointwise, so the panels are computed one after the other. Such a dot adds the
part of its contraction that lies in the panel while the panel's tiles are in the L1 cache; its result, which has no
panel axis, is complete after the last panel. The gradient of queries is one, where keys are the panel axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...ir import Op, Value
from .axes import Axis
from .bf16_pairs import add_pair_products, interleave
from .dots import Contraction, DotEmitter
from .emit import Index, Reg
from .fuse import Fusion, Nest, Segment
from .point import Panel, Point


def emit_panel_sum(nests: DotEmitter, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
    """Add the products of one panel's lanes to the sum."""
    assert panel is not None
    lane_operand, row_operand, rows = nests.operands(nest, dot)
    e, scratch, (number, lanes) = nests.e, nests.ev.scratch, panel
    first, buffer = e.mul(number, nests.layout.panel), row_operand.buffer

    def address(row: Index, k: Index) -> str:
        """Where the panel holds the element of a row."""
        return scratch.address(buffer, row_operand.at(row, e.add(e.mul(number, buffer.panel_stride), k)), None)

    def vector(pt: Point, k: Index) -> Reg:
        return lane_operand.vector(pt, e.add(first, k))

    if dot in nests.layout.paired_sums and rows is not None and buffer.element == "float":
        packed = PanelPairs(nests, rows, lanes, address)
        packed.pack_steps(nest.lane, edge, vector)
        contraction = packed.contraction(row_operand.contracted)
    else:
        contraction = nests.float32_contraction(vector, row_operand)
        element = buffer.element
        contraction = replace(
            contraction, element=lambda row, k: Reg(e.load(address(row, k), element, 4), element), lanes=lanes
        )
    nests.register_blocks(nest, contraction, rows, None, edge)


class PanelPairs:
    """One panel of both operands as bfloat16 pairs along the contraction (bf16_pairs.py). The constructor packs the
    rows, `pack_steps` the operand with the lanes."""

    def __init__(self, nests: DotEmitter, rows: Axis, lanes: int, address: Callable[[Index, Index], str]) -> None:
        self.nests, self.e, self.scratch, self.lanes = nests, nests.e, nests.ev.scratch, lanes
        self._rows = self.scratch.new("i16", {}, None, rows.extent * lanes)
        e = self.e

        def pack(row: Index) -> None:
            for k in range(0, lanes, e.lanes):
                bits = Reg(e.load(address(row, k), e.vector_type("i32"), 4), "i32", True)
                bits = e.binary("lshr", bits, e.number(16, "i32"))
                e.store(e.convert("trunc", bits, "i16").text, self._row(row, k), e.vector_type("i16"), 2)

        e.loop(*nests.row_range(rows), 1, pack)

    def pack_steps(self, lane: Axis | None, edge: bool, vector: Callable[[Point, Index], Reg]) -> None:
        """Interleave two steps of the contraction at a time."""
        assert lane is not None
        e = self.e
        self._width = 2 * e.lanes * -(-lane.extent // e.lanes)
        self._steps = self.scratch.new("i16", {}, None, self.lanes // 2 * self._width)

        def pack(k: Index) -> None:
            def group(points: list[Point]) -> None:
                for pt in points:
                    both = interleave(e, vector(pt, k), vector(pt, e.add(k, 1)))
                    e.store(both.text, self._step(pt, k), e.vector_type("i32"), 4)

            self.nests.each_group(lane, None, edge, {}, group)

        e.loop(0, self.lanes, 2, pack)

    def contraction(self, axis: Axis | None) -> Contraction:
        e = self.e

        def vectors(points: list[Point], k: Index) -> list[Reg]:
            return [Reg(e.load(self._step(pt, k), e.vector_type("i32"), 4), "i32", True) for pt in points]

        def pair(row: Index, k: Index) -> Reg:
            return e.splat(Reg(e.load(self._row(row, k), "i32", 4), "i32"))

        def add(x: Reg, v: Reg, sums: Reg) -> Reg:
            return add_pair_products(e, v, x, sums)

        return Contraction(axis, 2, vectors, pair, add, lanes=self.lanes)

    def _row(self, row: Index, k: Index) -> str:
        e = self.e
        return e.element(self.scratch.address(self._rows, {}, None), e.add(e.mul(row, self.lanes), k), "i16")

    def _step(self, pt: Point, k: Index) -> str:
        """Where the pairs of a vector of lanes from step k on are; k is even."""
        e = self.e
        assert pt.lane is not None
        offset = e.add(e.mul(k, self._width // 2), e.mul(pt.at[pt.lane], 2))
        return e.element(self.scratch.address(self._steps, {}, None), offset, "i16")


def panel_nests(segment: Segment, fusion: Fusion, axis: Axis | None) -> tuple[list[Nest], list[Nest]]:
    """Return the nests that are computed panel by panel, and those that read what the panels sum. A nest whose rows run
    along the panel axis is computed panel by panel if it reads what another one computes."""
    made: set[Value] = set()  # panel by panel
    sums: set[Value] = set()
    in_panels, after = [], []
    for nest in segment.nests if axis is not None else ():
        reads, results = fusion.nest_reads(nest), {*nest.values, *(fold.result for fold in nest.folds)}
        if reads & sums:
            after.append(nest)
            sums |= results
        elif nest.sums_panels or nest.lane is axis or (axis in nest.axes and reads & made):
            in_panels.append(nest)
            (sums if nest.sums_panels else made).update(results)
    return in_panels, after


def emit_in_panel(nests: DotEmitter, nest: Nest, panel: tuple[Index, int]) -> None:
    """Emit the part of a nest that lies in one panel: lanes, or rows."""
    axis = nests.layout.panel_axis
    if nest.lane is axis or nest.sums_panels:
        nests.emit(nest, panel)
        return
    assert axis is not None
    skipped, first = nests.active_rows, nests.e.mul(panel[0], nests.layout.panel)
    nests.active_rows = (axis, first, nests.e.add(first, panel[1]))
    nests.emit(nest, None)
    nests.active_rows = skipped
