"""Live panels: those of a program's panels that reach memory.

The last block of a sequence may reach past the end of the tensor or the view that it is stored to, and the block of a
single query among ragged sequences lies past it but for one row. Everything with the panel axis is pointwise in it, so
nothing of a panel behind the last stored position is kept, and the panel need not be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import MOVES, WRITES, Kernel, Op, Value, spreads, starts, view_of, walk
from .axes import Axes, Axis
from .emit import Index
from .evaluate import Evaluator
from .tiles import Tensors


@dataclass(frozen=True)
class StoredRange:
    """Where a store along the panel axis begins, and where its tensor or view ends."""

    start: Value
    tensor: int
    dim: int
    length: Value | None  # of the view; None: the tensor's own


def stored_ranges(kernel: Kernel, axes: Axes, panel_axis: Axis | None) -> list[StoredRange]:
    """Return the ranges that a kernel stores along its panel axis; none if panels have any other effect."""
    if panel_axis is None or panel_axis.folded:
        return []
    found: list[StoredRange] = []
    outer = {result for op in kernel.body.ops for result in op.results}
    for op in walk(kernel.body):
        if op.kind in MOVES and panel_axis in axes.of(op.operands[0]):
            return []
        if op.kind in WRITES and panel_axis in axes.of(op.operands[0]):
            stored = _stored_range(op, axes, panel_axis)
            if stored is None or not {stored.start, *([stored.length] if stored.length else [])} <= outer:
                return []
            found.append(stored)
    return found


def _stored_range(op: Op, axes: Axes, panel_axis: Axis) -> StoredRange | None:
    """None for a scatter, for positions that do not count along the axis, and where the store cannot reach past the
    end."""
    if op.kind != "store":
        return None
    tiled = [dim for dim, extent in enumerate(op.attrs["extents"]) if extent is not None]
    dim = tiled[axes.dims(op.operands[0]).index(panel_axis)]
    if not op.attrs["checked"][dim] or spreads(op)[dim] is not None:
        return None
    view = view_of(op, dim)
    return StoredRange(starts(op)[dim], op.attrs["tensor"].index, dim, None if view is None else view[1])


def count_live(ranges: list[StoredRange], tensors: Tensors, values: Evaluator, panel: int) -> Index | None:
    """Emit how many panels reach memory; None if all do, or where the ranges are not known yet."""
    e = values.e
    live: Index | None = None
    for stored in ranges:
        if not all(v in values.scalars for v in (stored.start, stored.length) if v is not None):
            return None
        own = tensors.lengths[stored.tensor][stored.dim]
        end = e.sub(own if stored.length is None else values.index(stored.length), values.index(stored.start))
        live = end if live is None else e.extreme("smax", live, end)
    if live is None:
        return None
    return e.op(f"udiv i64 {e.add(e.extreme('smax', live, 0), panel - 1)}, {panel}")
