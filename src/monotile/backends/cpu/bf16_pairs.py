"""bf16 pair products (AVX512-BF16): one instruction takes two steps of a contraction, and nothing is converted.

A lane of the result multiplies two neighbours along the contraction at once, from a 32-bit word of each operand. The
operand with the rows is packed into such words beforehand. A streamed tile consists of them already if it is contiguous
along the contraction; if it is contiguous along the lanes, two of its rows are interleaved. The products are exact in
float32, and each is rounded as it is added, as by an FMA; numbers below 2^-126 count as zero.
"""

from __future__ import annotations

from functools import partial

from ...ir import Op
from .bf16_words import Bf16Words, load_pairs
from .dots import Contraction, DotOperand
from .emit import Emitter, Index, Reg
from .nests import NestEmitter
from .point import Point
from .target import Target

INTRINSIC = "llvm.x86.avx512bf16.dpbf16ps.512"


def streams_pairs(target: Target, dot: Op, lane_operand: DotOperand, row_operand: DotOperand, *, inner: bool) -> bool:
    """True if a streamed dot can use pair products: both operands are bfloat16, and there are whole vectors (of an
    inner product's contraction the last one may be half)."""
    if not target.bfloat16_pairs or row_operand.contracted is None or lane_operand.free is None:
        return False
    step = target.lanes if inner else 2 * target.lanes
    whole = row_operand.contracted.extent % step == 0 and (inner or lane_operand.free.extent % target.lanes == 0)
    operands = (*dot.operands, lane_operand.base, row_operand.base)
    return whole and all(v.dtype.name == "bfloat16" for v in operands)


class PackedRows:
    """The rows of a dot as bfloat16, packed by the constructor: row by row if their lanes run along the contraction,
    else with two steps of it interleaved. Rows of bfloat16 along the contraction are pairs already."""

    def __init__(self, nests: NestEmitter, row_operand: DotOperand, height: int) -> None:
        assert row_operand.contracted is not None
        self.e, self.axis, self._depth = nests.e, row_operand.contracted, row_operand.contracted.extent
        self._rows, self._scratch = row_operand, nests.ev.scratch
        self.by_rows = row_operand.free is None or row_operand.buffer.lane is row_operand.contracted
        self._as_stored = self.by_rows and row_operand.buffer.element == "i16"
        if self._as_stored:
            return
        self._width = -(-height // self.e.lanes) * self.e.lanes
        size = (height if self.by_rows else self._width) * self._depth
        self._buffer = self._scratch.new("i16", {}, None, size)
        if self.by_rows:
            self.e.loop(0, height, 1, lambda r: self.e.loop(0, self._depth, self.e.lanes, partial(self._pack_row, r)))
        else:
            self.e.loop(0, self._depth, 2, lambda k: self.e.loop(0, height, self.e.lanes, partial(self._pack_step, k)))

    def _pack_row(self, row: Index, k: Index) -> None:
        e = self.e
        numbers = e.splat(self._scratch.read(self._rows.buffer, Point(self._rows.at(row, k), self._rows.contracted)))
        bits = e.binary("lshr", e.convert("bitcast", numbers, "i32"), e.number(16, "i32"))
        e.store(e.convert("trunc", bits, "i16").text, self._at(row, k), e.vector_type("i16"), 2)

    def _pack_step(self, k: Index, row: Index) -> None:
        e, row_operand = self.e, self._rows
        steps = [
            e.splat(self._scratch.read(row_operand.buffer, Point(row_operand.at(row, e.add(k, i)), row_operand.free)))
            for i in range(2)
        ]
        e.store(interleave(e, *steps).text, self._at(row, k), e.vector_type("i32"), 2)

    def _at(self, row: Index, k: Index) -> str:
        e = self.e
        if self._as_stored:
            return self._scratch.address(self._rows.buffer, self._rows.at(row, k), None)
        offset = e.add(e.mul(row, self._depth), k) if self.by_rows else e.add(e.mul(k, self._width), e.mul(row, 2))
        return e.element(self._scratch.address(self._buffer, {}, None), offset, "i16")

    def broadcast_pair(self, row: Index, k: Index) -> Reg:
        """Load the pair from k on into every lane."""
        return self.e.splat(Reg(self.e.load(self._at(row, k), "i32", 2), "i32"))

    def pairs(self, row: Index, k: Index, *, half: bool) -> Reg:
        """Load as many pairs from k on as there are lanes."""
        return load_pairs(self.e, self._at(row, k), half=half)


def interleave(e: Emitter, first: Reg, second: Reg) -> Reg:
    """Interleave two steps to pairs; the float32 numbers are bfloat16 already."""
    low, high = (e.convert("bitcast", x, "i32") for x in (first, second))
    low = e.binary("lshr", low, e.number(16, "i32"))
    return e.binary("or", low, e.binary("and", high, e.number(-65536, "i32")))


def add_pair_products(e: Emitter, a: Reg, b: Reg, total: Reg) -> Reg:
    """Add the two products of each lane to the total."""
    pairs, sums = f"<{2 * e.lanes} x bfloat>", e.vector_type("float")
    words = [e.op(f"bitcast {e.vector_type('i32')} {x.text} to {pairs}") for x in (a, b)]
    text = e.call(sums, INTRINSIC, (sums, total.text), *((pairs, w) for w in words))
    return Reg(text, "float", True)


def outer_contraction(nests: NestEmitter, load: Op, lane_operand: DotOperand, packed: PackedRows) -> Contraction:
    """Contract a streamed tile that is contiguous along the lanes: interleave two rows of it at a time."""
    e = nests.e
    assert lane_operand.free is not None
    words = Bf16Words(nests.ev, load, lane_operand.base, lane_operand.free)

    def row(pt: Point, k: Index, vectors: int) -> str:
        assert pt.lane is not None
        return words.read(lane_operand.at(pt.at[pt.lane], k), vectors)

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

    return Contraction(
        packed.axis, 2, vectors, packed.broadcast_pair, lambda x, v, sums: add_pair_products(e, v, x, sums)
    )


def panel_contraction(
    nests: NestEmitter, lane_operand: DotOperand, packed: PackedRows, points: list[Point]
) -> Contraction:
    """Pack one panel of the operand with the lanes, two steps interleaved, and contract it. Skipped rows are not
    packed."""
    e, scratch, width = nests.e, nests.ev.scratch, len(points) * nests.e.lanes
    assert lane_operand.contracted is not None
    buffer = scratch.new("i16", {}, None, lane_operand.contracted.extent * width)

    def at(pt: Point, k: Index) -> str:
        assert pt.panel is not None
        return e.element(
            scratch.address(buffer, {}, None), e.add(e.mul(k, width), e.mul(pt.panel[1], 2 * e.lanes)), "i16"
        )

    def pack(k: Index) -> None:
        for pt in points:
            steps = [lane_operand.vector(pt, e.add(k, i)) for i in range(2)]
            e.store(interleave(e, *steps).text, at(pt, k), e.vector_type("i32"), 2)

    def vectors(points: list[Point], k: Index) -> list[Reg]:
        return [Reg(e.load(at(pt, k), e.vector_type("i32"), 2), "i32", True) for pt in points]

    e.loop(*nests.row_range(packed.axis), 2, pack)
    return Contraction(
        packed.axis, 2, vectors, packed.broadcast_pair, lambda x, v, sums: add_pair_products(e, v, x, sums)
    )
