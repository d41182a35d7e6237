"""Vectors of spread loads: a few elements of memory, each for several neighbouring lanes.

Vectors begin at multiples of their lanes. If the lanes then always follow the elements alike, a vector is one load and
a shuffle that is known at compile time (two codes of a byte). Otherwise it is a choice among a few broadcast elements
(codes of 3 bits in words of 32)."""

from __future__ import annotations

from ...ir import Spread
from .emit import Emitter, Index, Reg
from .point import Point
from .vectors import BYTES, gather_at, lane_mask


def spread_position(e: Emitter, spread: Spread, index: Index) -> Index:
    """Return the position in memory of a position of the tile."""
    if isinstance(index, int):
        return spread.at(index)
    scaled = e.add(e.mul(index, spread.factor), spread.offset)
    return scaled if spread.divisor == 1 else e.op(f"udiv i64 {scaled}, {spread.divisor}")


def read_spread(
    e: Emitter, pointer: str, element: str, spread: Spread, stride: Index, pt: Point, mask: Reg | None
) -> str:
    """Read a vector from the address of its first element; zeros if the mask, one for all lanes, is false. Lanes behind
    the tile are undefined."""
    assert pt.lane is not None and (mask is None or not mask.vector)
    index, count = pt.at[pt.lane], e.lanes if pt.valid is None else pt.valid
    patterns = _patterns(spread, index, e.lanes, count)
    if stride != 1:
        return _gathered(e, pointer, element, (spread, index, stride), count, mask)
    if len(patterns) == 1:
        return _shuffled(e, pointer, element, patterns.pop(), mask)
    return _chosen(e, pointer, element, (spread, index), max(p[-1] for p in patterns), mask)


def _patterns(spread: Spread, index: Index, lanes: int, count: int) -> set[tuple[int, ...]]:
    """Return the elements of a vector's lanes, counted from the first, for every place that a vector may have."""
    places = [index] if isinstance(index, int) else range(0, spread.extent - count + 1, lanes)
    return {tuple(spread.at(k + i) - spread.at(k) for i in range(count)) for k in places}


def _shuffled(e: Emitter, pointer: str, element: str, pattern: tuple[int, ...], mask: Reg | None) -> str:
    kind = f"<{pattern[-1] + 1} x {element}>"
    found = e.load(_or_zeros(e, pointer, mask, (pattern[-1] + 1) * BYTES[element]), kind, BYTES[element])
    picks = ", ".join(f"i32 {p}" for p in (*pattern, *[0] * (e.lanes - len(pattern))))
    return e.op(f"shufflevector {kind} {found}, {kind} poison, <{e.lanes} x i32> <{picks}>")


def _chosen(e: Emitter, pointer: str, element: str, place: tuple[Spread, Index], last: int, mask: Reg | None) -> str:
    """Broadcast the elements that some place of the vector has, up to the last of the slice; choose one in each lane.
    An element past the last of the slice is not there, and not chosen."""
    spread, index = place
    first, steps = spread_position(e, spread, index), _steps(e, spread, index)
    result = Reg("poison", element, True)
    for n in range(last + 1):
        there = e.sub(e.extreme("smin", e.add(first, n), spread.memory - 1), first)
        at = _or_zeros(e, e.element(pointer, there, element), mask, BYTES[element])
        x = e.splat(Reg(e.load(at, element, BYTES[element]), element))
        result = x if n == 0 else e.select(e.binary("icmp uge", steps, e.number(n, "i32"), "i1"), x, result)
    return result.text


def _gathered(
    e: Emitter, pointer: str, element: str, place: tuple[Spread, Index, Index], count: int, mask: Reg | None
) -> str:
    spread, index, stride = place
    steps = e.convert("zext", _steps(e, spread, index), "i64")
    offsets = e.binary("mul", steps, Reg(str(stride), "i64")).text
    lanes = lane_mask(e, count)
    if mask is not None:
        lanes = e.binary("and", Reg(lanes, "i1", True), mask).text
    pointers = e.op(f"getelementptr {element}, ptr {pointer}, {e.vector_type('i64')} {offsets}")
    return gather_at(e, pointers, element, lanes)


def _steps(e: Emitter, spread: Spread, index: Index) -> Reg:
    """Return how many elements each lane is behind the first one's."""
    scaled = e.add(e.mul(index, spread.factor), spread.offset)
    rest = scaled % spread.divisor if isinstance(scaled, int) else e.op(f"urem i64 {scaled}, {spread.divisor}")
    start = Reg(str(rest), "i32") if isinstance(rest, int) else Reg(e.op(f"trunc i64 {rest} to i32"), "i32")
    behind = e.binary("mul", e.iota(), e.number(spread.factor, "i32"))
    return e.binary("udiv", e.binary("add", behind, start), e.number(spread.divisor, "i32"))


def _or_zeros(e: Emitter, pointer: str, mask: Reg | None, size: int) -> str:
    """Return a pointer, or one to as many zeros where the mask is false."""
    if mask is None:
        return pointer
    zeros = e.constant(f"[{size} x i8] zeroinitializer")
    return e.op(f"select i1 {mask.text}, ptr {pointer}, ptr {zeros}")
