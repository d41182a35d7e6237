"""Vectors of the numbers that codes stand for, several at a time (AVX2).

fp8 is converted through float16, whose words fill a register with those of two vectors.

Codes of 4 bits that are looked up: the bytes of 32 codes are looked up in two tables of 16 bytes, which hold the lower
and the upper byte of bfloat16 numbers, and widened to float32: 12 instructions for four vectors. One vector at a time
takes two permutations across 128 bits, each of which takes the time of two other instructions, and a choice."""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import FP8
from ...ir import Op, Value
from ...ir.fields import Table, as_table
from .axes import Axis
from .bf16_words import zeroed_rows
from .dots import UNROLL, Contraction, DotOperand
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .fp8 import decode_two
from .point import Point

LANES = 8
QUARTER = "<8 x i8>"
HALF = "<16 x i8>"
BYTES = "<32 x i8>"
WORDS = "<16 x i16>"


class CodeVectors:
    """The tile of a streamed dot as vectors of float32, along one of its axes, `count` of them at a time."""

    count: int

    def __init__(self, ev: Evaluator, axis: Axis, test: Op | None) -> None:
        self.ev, self.e, self.axis, self._test = ev, ev.e, axis, test

    def read(self, places: list[dict[Axis, Index]]) -> list[Reg]:
        """Return vectors inside the tensor: all from one position on, or as many each from several."""
        e, vectors = self.e, self.numbers(places)
        if self._test is None:
            return vectors
        zero, each = e.splat(e.number(0.0, "float")), self.count // len(places)
        tests = [self.ev.operand(self._test, self._test.operands[0], Point(at, self.axis)) for at in places]
        return [e.select(e.splat(tests[n // each]), x, zero) for n, x in enumerate(vectors)]

    def numbers(self, places: list[dict[Axis, Index]]) -> list[Reg]:
        raise NotImplementedError


class Fp8Vectors(CodeVectors):
    """Two vectors of fp8: words of 16 bits fill a register."""

    count = 2

    def __init__(self, ev: Evaluator, load: Op, axis: Axis, test: Op | None) -> None:
        super().__init__(ev, axis, test)
        self._load = load

    def numbers(self, places: list[dict[Axis, Index]]) -> list[Reg]:
        e, pointers = self.e, [self.ev.tensors.address(self._load, Point(at, self.axis)) for at in places]
        if len(pointers) == 1:
            return decode_two(e, self._load.result.dtype, e.load(pointers[0], HALF, 1))
        a, b = (e.load(pointer, QUARTER, 1) for pointer in pointers)
        picks = ", ".join(f"i32 {n}" for n in range(2 * LANES))
        both = e.op(f"shufflevector {QUARTER} {a}, {QUARTER} {b}, <{2 * LANES} x i32> <{picks}>")
        return decode_two(e, self._load.result.dtype, both)


class TableVectors(CodeVectors):
    """Four vectors of numbers in a table, by codes of 4 bits."""

    count = 4

    def __init__(self, ev: Evaluator, table: Table, axis: Axis, test: Op | None) -> None:
        super().__init__(ev, axis, test)
        self._table = table

    def numbers(self, places: list[dict[Axis, Index]]) -> list[Reg]:
        return look_up(self.e, self._table, self._codes(places))

    def _codes(self, places: list[dict[Axis, Index]]) -> str:
        """Return the 16 bytes of 32 codes, in both halves of a register."""
        e, kind = self.e, "<4 x i64>"
        if len(places) == 1:
            found = e.load(self._address(places[0]), "<2 x i64>", 1)
            picks = "<4 x i32> <i32 0, i32 1, i32 0, i32 1>"
            both = e.op(f"shufflevector <2 x i64> {found}, <2 x i64> poison, {picks}")
        else:
            a, b = (e.load(self._address(at), "i64", 1) for at in places)
            a, b = (_broadcast(e, x) for x in (a, b))
            both = e.op(f"shufflevector {kind} {a}, {kind} {b}, <4 x i32> <i32 0, i32 5, i32 2, i32 7>")
        return e.op(f"bitcast {kind} {both} to {BYTES}")

    def _address(self, at: dict[Axis, Index]) -> str:
        fields = self._table.fields
        assert fields is not None
        e, (start, more) = self.e, self.e.base_and_offset(at[self.axis])
        row = self.ev.tensors.address(fields.load, Point(at | {self.axis: 0}, self.axis))
        half = start // 2 if isinstance(start, int) else e.op(f"udiv exact i64 {start}, 2")
        return e.element(row, e.add(half, more // 2 + fields.first // 8), "i8")


def find_codes(ev: Evaluator, value: Value, axis: Axis | None) -> CodeVectors | None:
    """Return the reader of a tile that is a function of codes along an axis and of nothing else."""
    if axis is None or ev.e.lanes != LANES:
        return None
    test = zeroed_rows(ev, value, axis)
    value = value if test is None else test.operands[1]
    source = value
    while source.op is not None and source.op.kind == "cast":
        source = source.op.operands[0]
    if source.op is None or source in ev.buffers:
        return None
    if source.op.kind == "load" and source.dtype in FP8:
        return Fp8Vectors(ev, source.op, axis, test) if ev.tensors.is_contiguous(source.op, axis) else None
    # Numbers that are computed from codes, not looked up, take fewer instructions one vector at a time.
    table = as_table(value) if source.op.kind == "lookup" else None
    if table is None or table.fields is None or table.load.result in ev.buffers:
        return None
    packed = table.fields.width == table.fields.step == 4 and table.fields.first % 8 == 0
    return TableVectors(ev, table, axis, test) if packed and ev.axes.dims(table.load.result)[-1] is axis else None


def several_at_once(contraction: Contraction, codes: CodeVectors, tile: DotOperand, vectors: int) -> Contraction:
    """Read several vectors of a register block at once: of one row, or where it has fewer, of two rows."""
    together = max(1, codes.count // vectors)
    chunk = min(codes.count, vectors)
    if chunk * together != codes.count or vectors % chunk or contraction.depth % UNROLL:
        return contraction
    e, one_by_one = codes.e, contraction.vectors

    def read(points: list[Point], k: Index) -> list[Reg]:
        rows, lane = [e.add(k, n) for n in range(together)], points[0].lane
        if lane is None or len(points) % chunk or points[-1].valid is not None:
            return [x for row in rows for x in one_by_one(points, row)]
        firsts = [pt.at[lane] for pt in points[::chunk]]
        return [x for first in firsts for x in codes.read([tile.at(first, row) for row in rows])]

    return replace(contraction, vectors=read, together=together)


def look_up(e: Emitter, table: Table, codes: str) -> list[Reg]:
    """Look up the numbers of 32 codes. Interleaving works inside 128 bits: codes are arranged so that the numbers of
    each vector end up side by side."""
    order = [2 * half + 4 * n + i for half in (0, 1) for n in range(4) for i in (0, 1)]
    picks = ", ".join(f"i32 {byte + 16 * (n // 8)}, i32 32" for n, byte in enumerate(order))
    spread = e.op(f"shufflevector {BYTES} {codes}, {BYTES} zeroinitializer, <32 x i32> <{picks}>")
    words = e.op(f"bitcast {BYTES} {spread} to {WORDS}")
    both = e.op(f"or {WORDS} {words}, {e.op(f'shl {WORDS} {words}, splat (i16 4)')}")
    index = e.op(f"bitcast {WORDS} {e.op(f'and {WORDS} {both}, splat (i16 3855)')} to {BYTES}")
    low, high = (_permuted(e, [n >> shift & 255 for n in table.numbers], index) for shift in (0, 8))
    vectors = []
    for upper in (0, 1):
        pairs = _interleave(e, BYTES, low, high, 16, upper)
        numbers = e.op(f"bitcast {BYTES} {pairs} to {WORDS}")
        for part in (0, 1):
            bits = _interleave(e, WORDS, "zeroinitializer", numbers, 8, part)
            vectors.append(Reg(e.op(f"bitcast {WORDS} {bits} to {e.vector_type('float')}"), "float", True))
    return vectors


def _permuted(e: Emitter, entries: list[int], index: str) -> str:
    table = "<" + ", ".join(f"i8 {n}" for n in entries * 2) + ">"
    return e.call(BYTES, "llvm.x86.avx2.pshuf.b", (BYTES, table), (BYTES, index))


def _interleave(e: Emitter, kind: str, a: str, b: str, width: int, upper: int) -> str:
    """Interleave the lower or the upper elements of every 128 bits, which hold `width` elements, of two vectors."""
    half = width // 2
    picks = [v + first + half * upper + i for first in (0, width) for i in range(half) for v in (0, 2 * width)]
    chosen = ", ".join(f"i32 {n}" for n in picks)
    return e.op(f"shufflevector {kind} {a}, {kind} {b}, <{2 * width} x i32> <{chosen}>")


def _broadcast(e: Emitter, word: str) -> str:
    first = e.op(f"insertelement <4 x i64> poison, i64 {word}, i64 0")
    return e.op(f"shufflevector <4 x i64> {first}, <4 x i64> poison, <4 x i32> zeroinitializer")
