"""Reductions of bools: counted by the bits of a mask, and read one byte per lane.

A vector of bytes has four times the lanes of a vector of float32, 64 with AVX-512, so a nest that only reduces a bool
tensor reads it four times as fast. Panels are counted in vectors of float32: a nest of one panel keeps their lanes."""

from __future__ import annotations

from ...ir import Op, Value
from .emit import Emitter, Reg
from .fuse import Nest
from .tiles import Tile

BYTES_PER_LANE = 4  # a lane holds a float32


def counted_bools(nest: Nest, fold: Op) -> Value | None:
    """Return the bools that a fold along the lanes counts: it sums them as integers. None for any other fold."""
    cast = fold.operands[0].op
    if fold.attrs["fold"] != "sum" or nest.fold_axis is not nest.lane or nest.dot is not None:
        return None
    if cast is None or cast.kind != "cast" or cast.result.dtype.bits < 32 or not cast.result.dtype.is_int:
        return None
    bools = cast.operands[0]
    return bools if bools.dtype.kind == "bool" else None


def reduces_only_bools(nest: Nest, tiles: list[Tile], lanes: int) -> bool:
    """True if a nest only folds bools that are contiguous along its lanes, in whole vectors of `lanes` bytes: a fold
    along the rows writes whole vectors."""
    if nest.lane is None or nest.lane.extent % lanes or nest.dot is not None or nest.stores or nest.moves:
        return False
    counts = {fold.operands[0] for fold in nest.folds if counted_bools(nest, fold) is not None}
    values = {v for op in nest.made for v in (op.result, *op.operands)} | {fold.operands[0] for fold in nest.folds}
    only_bools = all(v in counts or (v.dtype.kind == "bool" and v.shape) for v in values)
    contiguous = all(
        t.tensor.dtype.kind == "bool" and any(d.axis is nest.lane and d.stride == 1 for d in t.dims) for t in tiles
    )
    return bool(nest.folds) and only_bools and bool(tiles) and contiguous


def count_true(e: Emitter, bools: Reg, type_: str) -> Reg:
    """Count the lanes that are true."""
    bits = Reg(e.op(f"bitcast {e.type_of(bools)} {bools.text} to i{e.lanes}"), f"i{e.lanes}")
    number = e.intrinsic("ctpop", bits)
    width = int(type_[1:])
    if e.lanes == width:
        return number
    return e.convert("zext" if e.lanes < width else "trunc", number, type_)


def any_or_all(e: Emitter, fold: str, bools: Reg) -> Reg:
    """Reduce the lanes: any of them (max) or all of them (min)."""
    bits = e.op(f"bitcast {e.type_of(bools)} {bools.text} to i{e.lanes}")
    return Reg(e.op(f"icmp {'ne' if fold == 'max' else 'eq'} i{e.lanes} {bits}, {0 if fold == 'max' else -1}"), "i1")
