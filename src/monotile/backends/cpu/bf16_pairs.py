"""Products of bfloat16 in pairs, where the processor has them: two steps of a contraction in one instruction, with
nothing to convert.

A lane of the result takes two neighbours along the contraction at once, from a 32-bit word of each operand. The rows,
which are few, are packed so beforehand. The streamed tile has its words ready if it is contiguous along the
contraction; along the lanes two of its rows are interleaved. The products are exact in float32, and each is rounded as
it is added, as by a multiply-add; numbers below 2^-126 count as zero.
"""

from __future__ import annotations

from functools import partial

from ...ir import Op
from .dots import DotOperand, MultiplyAdd
from .emit import Emitter, Index, Reg
from .fuse import Nest
from .nests import NestEmitter
from .point import Point
from .target import Target

INTRINSIC = "llvm.x86.avx512bf16.dpbf16ps.512"


def streams_pairs(target: Target, dot: Op, load: Op, lanes: DotOperand, others: DotOperand, *, inner: bool) -> bool:
    """Whether a streamed dot can be done so: both operands are bfloat16, nothing is done to the tile on its way, and
    there are whole vectors (of an inner product's contraction the last one may be half)."""
    if not target.bfloat16_pairs or lanes.base is not load.result or others.deep is None or lanes.free is None:
        return False
    deep = target.lanes if inner else 2 * target.lanes
    whole = others.deep.extent % deep == 0 and (inner or lanes.free.extent % target.lanes == 0)
    return whole and all(v.dtype.name == "bfloat16" for v in dot.operands) and others.base.dtype.name == "bfloat16"


def packs_panels(target: Target, dot: Op, nest: Nest, lanes: DotOperand, others: DotOperand) -> bool:
    """Whether a dot from scratch can be done so, panel by panel."""
    if not target.bfloat16_pairs or others.deep is None or nest.lane is None or nest.lane in others.at(0, 0):
        return False
    whole = others.deep.extent % target.lanes == 0
    return whole and all(v.dtype.name == "bfloat16" for v in (*dot.operands, lanes.base, others.base))


class PackedRows:
    """The rows of a dot as bfloat16, packed when this is made: each row by itself if they lie along the contraction,
    else two steps of it interleaved."""

    def __init__(self, nests: NestEmitter, others: DotOperand, height: int) -> None:
        assert others.deep is not None
        self.e, self._depth = nests.e, others.deep.extent
        self._others, self._scratch = others, nests.ev.scratch
        self.by_rows = others.free is None or others.buffer.lane is others.deep
        self._width = -(-height // self.e.lanes) * self.e.lanes
        size = (height if self.by_rows else self._width) * self._depth
        self._buffer = self._scratch.new("i16", {}, None, size)
        if self.by_rows:
            self.e.loop(0, height, 1, lambda r: self.e.loop(0, self._depth, self.e.lanes, partial(self._pack_row, r)))
        else:
            self.e.loop(0, self._depth, 2, lambda k: self.e.loop(0, height, self.e.lanes, partial(self._pack_step, k)))

    def _pack_row(self, row: Index, k: Index) -> None:
        e = self.e
        numbers = e.splat(self._scratch.read(self._others.buffer, Point(self._others.at(row, k), self._others.deep)))
        bits = e.binary("lshr", e.convert("bitcast", numbers, "i32"), e.number(16, "i32"))
        e.store(e.convert("trunc", bits, "i16").text, self._at(row, k), e.vector_type("i16"), 2)

    def _pack_step(self, k: Index, row: Index) -> None:
        e, others = self.e, self._others
        both = [
            e.splat(self._scratch.read(others.buffer, Point(others.at(row, e.add(k, i)), others.free)))
            for i in range(2)
        ]
        e.store(interleave(e, *both).text, self._at(row, k), e.vector_type("i32"), 2)

    def _at(self, row: Index, k: Index) -> str:
        e = self.e
        offset = e.add(e.mul(row, self._depth), k) if self.by_rows else e.add(e.mul(k, self._width), e.mul(row, 2))
        return e.element(self._scratch.address(self._buffer, {}, None), offset, "i16")

    def word(self, row: Index, k: Index) -> Reg:
        """The pair from k on, in every lane."""
        return self.e.splat(Reg(self.e.load(self._at(row, k), "i32", 2), "i32"))

    def words(self, row: Index, k: Index, *, half: bool) -> Reg:
        """As many pairs from k on as there are lanes."""
        return load_pairs(self.e, self._at(row, k), half=half)


def load_pairs(e: Emitter, pointer: str, *, half: bool) -> Reg:
    """A vector of pairs, one after the other in memory, or half a vector and zeros."""
    if not half:
        return Reg(e.load(pointer, e.vector_type("i32"), 2), "i32", True)
    numbers, pairs = f"<{e.lanes} x i16>", f"<{e.lanes // 2} x i32>"
    text = e.op(f"bitcast {numbers} {e.load(pointer, numbers, 2)} to {pairs}")
    picks = ", ".join(f"i32 {i}" for i in range(e.lanes))
    text = e.op(f"shufflevector {pairs} {text}, {pairs} zeroinitializer, <{e.lanes} x i32> <{picks}>")
    return Reg(text, "i32", True)


def interleave(e: Emitter, first: Reg, second: Reg) -> Reg:
    """The words of two steps, from numbers that are bfloat16 already."""
    low, high = (e.convert("bitcast", x, "i32") for x in (first, second))
    low = e.binary("lshr", low, e.number(16, "i32"))
    return e.binary("or", low, e.binary("and", high, e.number(-65536, "i32")))


def add_pair_products(e: Emitter, a: Reg, b: Reg, total: Reg) -> Reg:
    """total + the two products of each lane."""
    pairs, sums = f"<{2 * e.lanes} x bfloat>", e.vector_type("float")
    words = [e.op(f"bitcast {e.vector_type('i32')} {x.text} to {pairs}") for x in (a, b)]
    text = e.call(sums, INTRINSIC, (sums, total.text), *((pairs, w) for w in words))
    return Reg(text, "float", True)


def outer(nests: NestEmitter, load: Op, lanes: DotOperand, packed: PackedRows) -> MultiplyAdd:
    """A tile that is contiguous along the lanes: two rows of it at a time, interleaved."""
    e = nests.e

    def row(pt: Point, k: Index, vectors: int) -> str:
        assert pt.lane is not None
        at = nests.ev.tensors.address(load, Point(lanes.at(pt.at[pt.lane], k), lanes.free))
        return e.load(at, f"<{vectors * e.lanes} x i16>", 2)

    def vectors(points: list[Point], k: Index) -> list[Reg]:
        found = []
        for first in range(0, len(points), 2):
            few = len(points[first : first + 2])
            width = few * e.lanes
            upper, lower = (row(points[first], e.add(k, i), few) for i in range(2))
            for part in range(few):
                picks = [part * e.lanes + i // 2 + width * (i % 2) for i in range(2 * e.lanes)]
                mask = ", ".join(f"i32 {p}" for p in picks)
                kind = f"<{width} x i16>"
                text = e.op(f"shufflevector {kind} {upper}, {kind} {lower}, <{len(picks)} x i32> <{mask}>")
                text = e.op(f"bitcast <{len(picks)} x i16> {text} to {e.vector_type('i32')}")
                found.append(Reg(text, "i32", True))
        return found

    return MultiplyAdd(2, vectors, packed.word, lambda x, v, total: add_pair_products(e, v, x, total))


def panel(
    nests: NestEmitter,
    lanes: DotOperand,
    packed: PackedRows,
    points: list[Point],
    steps: tuple[Index, Index],
    width: int,
) -> MultiplyAdd:
    """A panel of the operand with the lanes, packed here: two steps interleaved, from one step to another. A panel has
    `width` lanes."""
    e, scratch = nests.e, nests.ev.scratch
    assert lanes.deep is not None
    buffer = scratch.new("i16", {}, None, lanes.deep.extent * width)

    def at(pt: Point, k: Index) -> str:
        assert pt.panel is not None
        return e.element(scratch.address(buffer, {}, None), e.add(e.mul(k, width), 2 * e.lanes * pt.panel[1]), "i16")

    def pack(k: Index) -> None:
        for pt in points:
            both = [lanes.vector(pt, e.add(k, i)) for i in range(2)]
            e.store(interleave(e, *both).text, at(pt, k), e.vector_type("i32"), 2)

    def vectors(points: list[Point], k: Index) -> list[Reg]:
        return [Reg(e.load(at(pt, k), e.vector_type("i32"), 2), "i32", True) for pt in points]

    e.loop(*steps, 2, pack)
    return MultiplyAdd(2, vectors, packed.word, lambda x, v, total: add_pair_products(e, v, x, total))
