"""Values that a nest stores as pairs of rows, the B tiles of AMX (`Buffer.pairs`)."""

from __future__ import annotations

from ...ir import Value
from .emit import Reg
from .evaluate import Evaluator
from .fuse import Nest
from .point import Point
from .scratch import Buffer


def pair_buffers(ev: Evaluator, nest: Nest) -> list[Buffer]:
    """Return the storage of the values that a nest writes two rows at a time."""
    stored = (ev.buffers[v] for v in nest.values if v in ev.buffers)
    return [buffer for buffer in stored if buffer.pairs is not None]


def end_pairs(ev: Evaluator, nest: Nest, points: list[Point]) -> None:
    """Complete the storage of pairs when all rows are written."""
    for buffer in pair_buffers(ev, nest):
        for pt in points:
            ev.scratch.end_pairs(buffer, pt)


def value_to_store(ev: Evaluator, value: Value, pt: Point) -> Reg:
    """Return a value for its storage: that of pairs rounds floats to bfloat16 itself."""
    op = value.op
    if op is not None and op.kind == "cast" and ev.buffers[value].pairs is not None:
        (source,) = op.operands
        if source.dtype.is_float:
            return ev.operand(op, source, pt)
    return ev.value(value, pt)
