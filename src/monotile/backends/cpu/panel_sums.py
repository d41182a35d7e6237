"""Panel sums: a dot that contracts the panel axis and is added to memory (memory_sums.py).

Everything else along the panel axis is pointwise, so the panels are computed one after the other. Such a dot adds the
part of its contraction that lies in the panel while the panel's tiles are in the L1 cache; its result, which has no
panel axis, is complete after the last panel. The gradient of queries is one, where keys are the panel axis."""

from __future__ import annotations

from dataclasses import replace

from ...ir import Op
from .dots import DotEmitter
from .emit import Index, Reg
from .fuse import Nest
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
