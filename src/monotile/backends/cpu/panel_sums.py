"""Panel sums: a dot that contracts the panel axis and is added to memory (memory_sums.py).

Everything else along the panel axis is pointwise, so the panels are computed one after the other. Such a dot adds the
part of its contraction that lies in the panel while the panel's tiles are in the L1 cache; its result, which has no
panel axis, is complete after the last panel. The gradient of queries is one, where keys are the panel axis."""

from __future__ import annotations

from dataclasses import replace

from ...ir import Op, Value
from .axes import Axis
from .dots import DotEmitter
from .emit import Index, Reg
from .fuse import Fusion, Nest, Segment
from .nests import Panel


def emit_panel_sum(nests: DotEmitter, nest: Nest, dot: Op, panel: Panel, edge: bool) -> None:
    """Add the products of one panel's lanes to the sum."""
    assert panel is not None
    lane_operand, row_operand, rows = nests.operands(nest, dot)
    e, scratch, (number, lanes) = nests.e, nests.ev.scratch, panel
    first = e.mul(number, nests.layout.panel)

    def element(row: Index, k: Index) -> Reg:
        buffer = row_operand.buffer
        lane = e.add(e.mul(number, buffer.panel_stride), k)
        return Reg(e.load(scratch.address(buffer, row_operand.at(row, lane), None), buffer.element, 4), buffer.element)

    contraction = nests.float32_contraction(lambda pt, k: lane_operand.vector(pt, e.add(first, k)), row_operand)
    contraction = replace(contraction, element=element, lanes=lanes)
    nests.register_blocks(nest, contraction, rows, None, edge)


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
