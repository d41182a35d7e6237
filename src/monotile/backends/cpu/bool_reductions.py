"""Truth values: counted by the bits of a mask, and read as many at a time as a register has bytes."""

from __future__ import annotations

from ...ir import Op, Value
from .emit import Emitter, Reg
from .fuse import Nest
from .tiles import Tile

BYTES_PER_LANE = 4  # of a float32, for which the lanes are made


def counted_bools(nest: Nest, fold: Op) -> Value | None:
    """The truth values a fold along the lanes counts, if it does: a sum of them as integers."""
    cast = fold.operands[0].op
    if fold.attrs["fold"] != "sum" or nest.fold_axis is not nest.lane or nest.dot is not None:
        return None
    if cast is None or cast.kind != "cast" or cast.result.dtype.bits < 32 or not cast.result.dtype.is_int:
        return None
    truths = cast.operands[0]
    return truths if truths.dtype.kind == "bool" else None


def reduces_only_bools(nest: Nest, tiles: list[Tile], lanes: int) -> bool:
    """Whether a nest only folds truth values that lie as bytes along its lanes: then a vector may have `lanes` of
    them, one a byte. A fold along the rows leaves whole vectors, so the lanes must be made of such."""
    if nest.lane is None or nest.lane.extent % lanes or nest.dot is not None or nest.stores or nest.moves:
        return False
    counts = {fold.operands[0] for fold in nest.folds if counted_bools(nest, fold) is not None}
    values = {v for op in nest.made for v in (op.result, *op.operands)} | {fold.operands[0] for fold in nest.folds}
    plain = all(v in counts or (v.dtype.kind == "bool" and v.shape) for v in values)
    bytes_ = all(
        t.tensor.dtype.kind == "bool" and any(d.axis is nest.lane and d.stride == 1 for d in t.dims) for t in tiles
    )
    return bool(nest.folds) and plain and bool(tiles) and bytes_


def count(e: Emitter, truths: Reg, type_: str) -> Reg:
    """How many lanes are true."""
    bits = Reg(e.op(f"bitcast {e.type_of(truths)} {truths.text} to i{e.lanes}"), f"i{e.lanes}")
    number = e.intrinsic("ctpop", bits)
    wide = int(type_[1:])
    if e.lanes == wide:
        return number
    return e.convert("zext" if e.lanes < wide else "trunc", number, type_)


def any_or_all(e: Emitter, fold: str, truths: Reg) -> Reg:
    """Whether some lane is true (max) or every one (min)."""
    bits = e.op(f"bitcast {e.type_of(truths)} {truths.text} to i{e.lanes}")
    return Reg(e.op(f"icmp {'ne' if fold == 'max' else 'eq'} i{e.lanes} {bits}, {0 if fold == 'max' else -1}"), "i1")
