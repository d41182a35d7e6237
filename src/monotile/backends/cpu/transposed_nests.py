"""Nests whose tensor is contiguous along the rows: squares of it are transposed in registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ...ir import Op
from .axes import Axis
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .fuse import Nest
from .pair_storage import end_pairs, pair_buffers
from .point import Panel, Point, partly_filled
from .target import Target
from .transpose import transpose


class Nests(Protocol):
    """What emits nests: Nests."""

    e: Emitter
    ev: Evaluator
    target: Target

    def each_group(
        self, lane: Axis, panel: Panel, edge: bool, at: dict[Axis, Index], body: Callable[[list[Point]], None]
    ) -> None:
        """Run a body for each group of vectors along the lanes."""

    def prefetch_next(self, load: Op, points: list[Point]) -> None:
        """Prefetch what a load reads at these points in the next iteration of a loop."""


def needs_transpose(nests: Nests, op: Op, nest: Nest) -> bool:
    """True if the tensor is contiguous along the rows of the nest, so that squares of it are transposed in
    registers."""
    if op.kind == "gather" or len(nest.axes) != 2:
        return False
    dims = nests.ev.tensors.tiles[op].dims
    unit = [d for d in dims if d.stride == 1 and d.axis is not None]
    dtype = op.attrs["tensor"].dtype
    supported = dtype.is_float or (op.kind == "load" and dtype.kind == "bool")
    return bool(unit) and unit[0].axis is not nest.lane and supported


def emit_transposed(nests: Nests, nest: Nest, op: Op, panel: Panel, edge: bool) -> None:
    """Copy or store a tile that is contiguous along the rows: transpose squares of `lanes` x `lanes` elements."""
    e, width = nests.e, nests.target.lanes
    rows = next(a for a in nest.axes if a is not nest.lane)
    lane = nest.lane
    assert lane is not None

    def square(pt: Point, row: Index, count: int) -> None:
        """Transpose `count` rows from `row` on, for the vector of lanes at `pt`."""
        lanes = width if pt.valid is None else pt.valid
        outer = [
            Point({rows: row, lane: e.add(pt.at[lane], i)}, rows, partly_filled(count, width), edge)
            for i in range(lanes)
        ]
        inner = [Point({rows: e.add(row, i), lane: pt.at[lane]}, lane, pt.valid, edge, pt.panel) for i in range(count)]
        if op.kind == "load":
            if not edge:
                nests.prefetch_next(op, outer)
            columns = [nests.ev.tensors.read(op, p) for p in outer]
            bools = columns[0].type == "i1"  # transposed as zeros and ones
            floats = [(e.convert("uitofp", c, "float") if bools else c).text for c in columns]
            for p, text in zip(inner, transpose(e, floats), strict=False):
                reg = Reg(text, "float", True)
                reg = e.binary("fcmp une", reg, e.number(0, "float"), "i1") if bools else reg
                nests.ev.scratch.write(nests.ev.buffers[op.result], p, reg)
        else:
            values = [e.splat(nests.ev.value(op.operands[0], p)).text for p in inner]
            for p, text in zip(outer, transpose(e, values), strict=False):
                nests.ev.tensors.write(op, p, Reg(text, "float", True))

    def squares(pt: Point) -> None:
        whole = rows.extent // width * width
        e.loop(0, whole, width, partial(square, pt, count=width))
        if rows.extent - whole:
            square(pt, whole, rows.extent - whole)

    def group(points: list[Point]) -> None:
        pairs = pair_buffers(nests.ev, nest)
        if panel is not None and not pairs and all(pt.valid is None for pt in points):
            first, (number, _) = points[0].at[lane], panel

            def vector(n: Index) -> None:
                squares(Point({lane: e.add(first, e.mul(n, width))}, lane, None, edge, (number, n)))

            e.loop(0, len(points), 1, vector)
            return
        for pt in points:
            squares(pt)
        end_pairs(nests.ev, nest, points)

    nests.each_group(lane, panel, edge, {}, group)
