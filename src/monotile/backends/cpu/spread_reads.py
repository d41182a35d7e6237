"""Vectors of spread loads: a few elements of memory, each for several neighbouring lanes.

Vectors begin at multiples of their lanes. If the lanes then always follow the elements alike, a vector is one load and
a shuffle that is known at compile time (two codes of a byte). Otherwise it is a choice among a few broadcast elements
(codes of 3 bits in words of 32).

With AVX2, bit fields that fill at most 32 bits in all lanes are read as one word, which each lane shifts by its own
count: a broadcast from memory takes no place among the arithmetic, other than a shuffle."""

from __future__ import annotations

from ...ir import Spread
from ...ir.fields import Fields
from .emit import Emitter, Index, Reg
from .point import Point
from .vectors import BYTES, gather_at, lane_mask

AVX2_LANES = 8


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


def one_word(e: Emitter, fields: Fields) -> bool:
    """True if vectors of bit fields are best read as one word, or as bytes if each field is one."""
    whole_bytes = fields.step == fields.width == 8 and fields.first % 8 == 0
    return e.lanes == AVX2_LANES and (whole_bytes or _field_bytes(e, fields) <= 4)


def read_fields(e: Emitter, row: str, fields: Fields, column: Index, mask: Reg | None) -> Reg:
    """Read a vector of bit fields from the address of their row; zeros if the mask, one for all lanes, is false."""
    size = e.lanes if fields.step == 8 else _field_bytes(e, fields)
    # Columns come in multiples of 8. A constant is added after the division, where it becomes part of an address.
    start, more = e.base_and_offset(column)
    eighth = start // 8 if isinstance(start, int) else e.op(f"udiv exact i64 {start}, 8")
    behind, skipped = (more * fields.step + fields.first) // 8, fields.first % 8
    if size == 3 and behind > 0:  # a whole word, with the byte before
        size, behind, skipped = 4, behind - 1, skipped + 8
    byte = e.add(e.mul(eighth, fields.step), behind)
    pointer = _or_zeros(e, e.element(row, byte, "i8"), mask, size)
    if fields.step == 8:
        return e.convert("zext", Reg(e.load(pointer, e.vector_type("i8"), 1), "i8", True), "i32")
    word = Reg(e.load(pointer, f"i{8 * size}", 1), f"i{8 * size}")
    if size == 3:
        word = e.convert("zext", word, "i32")
    copies = 4 // size if size < 3 else 1  # of a short word, in the upper bits that the mask clears
    kind = f"<{copies * e.lanes} x {word.type}>"
    first = e.op(f"insertelement {kind} poison, {word.type} {word.text}, i64 0")
    every = e.op(f"shufflevector {kind} {first}, {kind} poison, <{copies * e.lanes} x i32> zeroinitializer")
    words = Reg(every if copies == 1 else e.op(f"bitcast {kind} {every} to {e.vector_type('i32')}"), "i32", True)
    counts = ", ".join(f"i32 {skipped + n * fields.step}" for n in range(e.lanes))
    moved = e.binary("lshr", words, Reg(f"<{counts}>", "i32", True))
    return e.binary("and", moved, e.number(2**fields.width - 1, "i32"))


def _field_bytes(e: Emitter, fields: Fields) -> int:
    """Return the bytes that the fields of a vector lie in."""
    return (fields.first % 8 + (e.lanes - 1) * fields.step + fields.width + 7) // 8


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
