"""Where a consumer of a CTA is in the kernel's grid."""

from __future__ import annotations

from ....ir import Op
from ..triton.renderer import TritonRenderer


def write_program_id(writer: TritonRenderer, op: Op, consumer: str) -> None:
    """Find a consumer's place in the kernel's grid (for one of its persistent tiles), and whether the grid has it."""
    consumers, persistent = writer.schedule.consumers, writer.schedule.persistent
    *sizes, last = [writer.value(v).text for v in op.operands]
    writer.lines.add("pid = gl.program_id(0)")
    each = f"({consumers} * tiles_per_cta)" if persistent else consumers
    writer.lines.add(f"ctas = ({last} + {each} - 1) // {each}")
    group = "(pid % ctas)"
    if persistent:
        group = "tile_group"
        backwards = "gl.where(cta_tile % 2 == 0, pid % ctas, ctas - 1 - pid % ctas)"
        writer.lines.add(f"tile_group = cta_tile * ctas + {backwards}")
    writer.define(op.results[-1], f"{group} * {consumers} + {consumer}", stem="i")
    writer.lines.add(f"in_grid = {writer.value(op.results[-1])} < {last}")
    writer.lines.add("pid = pid // ctas")
    for n in range(len(sizes) - 1, -1, -1):
        writer.define(op.results[n], f"pid % {sizes[n]}" if n else "pid", stem="i")
        if n:
            writer.lines.add(f"pid = pid // {sizes[n]}")
