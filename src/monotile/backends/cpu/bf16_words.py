"""Vectors of bfloat16 words for pair products: twice as many lanes as a vector of float32 has.

A tile that memory holds as bfloat16 is loaded. One that is a function of codes of a few bits is looked up by them: the
bytes of a vector's codes are permuted to its lanes, shifted, and looked up by permutations of tables in registers. Any
other tile is computed in float32, and two vectors are rounded to one."""

from __future__ import annotations

from ...dtypes import float32
from ...ir import Op, Value, constant
from ...ir.fields import Fields, Table, as_table
from .axes import Axis
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .point import Point
from .scratch import ROUND_TWO

HALF_SIGN = 0x8000
WORDS = 32  # of a vector with AVX-512


class Bf16Words:
    """The tile of a streamed dot as bfloat16 words, along one of its axes."""

    def __init__(self, ev: Evaluator, load: Op, value: Value, axis: Axis) -> None:
        self.ev, self.e, self._load, self._axis = ev, ev.e, load, axis
        self._test = zeroed_rows(ev, value, axis)
        self._value = value if self._test is None else self._test.operands[1]
        self._table = self._find_table(self._value)
        self._factor = self._find_factor() if self._table is None else None

    def _find_table(self, value: Value) -> Table | None:
        table = as_table(value) if value is not self._load.result else None
        along = table is not None and self.ev.axes.dims(table.load.result)[-1] is self._axis
        return table if along else None

    def _find_factor(self) -> tuple[Value, Table] | None:
        """Return the factor of a product that is a table, as codes are that a scale is multiplied by."""
        product = self._rounded_value.op
        for factor in product.operands if product is not None and product.kind == "mul" else ():
            table = self._find_table(factor)
            if table is not None:
                return factor, table
        return None

    @property
    def _rounded_value(self) -> Value:
        """What is rounded to the tile: float32 numbers, or the tile itself."""
        op = self._value.op
        cast = op is not None and op.kind == "cast" and op.operands[0].dtype is float32
        return op.operands[0] if op is not None and cast else self._value

    def read(self, at: dict[Axis, Index], vectors: int) -> str:
        """Return `vectors` x lanes words from a position on, inside the tensor."""
        e, count = self.e, vectors * self.e.lanes
        if self._value is self._load.result:
            words = e.load(self.ev.tensors.address(self._load, Point(at, self._axis)), f"<{count} x i16>", 2)
        elif self._table is not None and count == WORDS:
            words = look_up(e, self._table, self._read_codes(self._table, at))
        else:
            words = self._rounded(at, vectors)
        if self._test is None:
            return words
        test = self.ev.operand(self._test, self._test.operands[0], Point(at, self._axis))
        return e.op(f"select i1 {test.text}, <{count} x i16> {words}, <{count} x i16> zeroinitializer")

    def pairs(self, at: dict[Axis, Index], *, half: bool) -> Reg:
        """Return as many pairs of neighbours from a position on as there are lanes, or half of them and zeros."""
        if self._value is self._load.result and self._test is None:
            return load_pairs(self.e, self.ev.tensors.address(self._load, Point(at, self._axis)), half=half)
        return as_pairs(self.e, self.read(at, 1 if half else 2), half=half)

    def _rounded(self, at: dict[Axis, Index], vectors: int) -> str:
        """Compute in float32 and round; what a cast would round is rounded here alone."""
        e = self.e
        points = [Point(at | {self._axis: e.add(at[self._axis], n * e.lanes)}, self._axis) for n in range(vectors)]
        if self._factor is not None and vectors * e.lanes == WORDS:
            factor, table = self._factor
            words = look_up(e, table, self._read_codes(table, at))
            for n, point in enumerate(points):
                part = e.convert("zext", Reg(take(e, words, WORDS, n * e.lanes, e.lanes), "i16", True), "i32")
                bits = e.binary("shl", part, e.number(16, "i32"))
                point.memo[factor] = e.convert("bitcast", bits, "float")
        numbers = [e.splat(self.ev.value(self._rounded_value, point)).text for point in points]
        numbers += ["zeroinitializer"] * (2 - vectors)
        words, half = f"<{2 * e.lanes} x bfloat>", e.vector_type("float")
        text = e.call(words, ROUND_TWO, (half, numbers[1]), (half, numbers[0]))
        text = e.op(f"bitcast {words} {text} to <{2 * e.lanes} x i16>")
        return text if vectors == 2 else take(e, text, WORDS, 0, e.lanes)

    def _read_codes(self, table: Table, at: dict[Axis, Index]) -> str:
        """Return words whose lowest bits are the codes of as many columns."""
        if table.fields is not None:
            return self._read_fields(table.fields, at)
        e, kind = self.e, f"<{WORDS} x i8>"
        pointer = self.ev.tensors.address(table.load, Point(at, self._axis))
        return e.op(f"zext {kind} {e.load(pointer, kind, 1)} to <{WORDS} x i16>")

    def _read_fields(self, fields: Fields, at: dict[Axis, Index]) -> str:
        e, column = self.e, at[self._axis]
        row = self.ev.tensors.address(fields.load, Point(at | {self._axis: 0}, self._axis))
        # Columns come in multiples of a vector's lanes, whose bits are whole bytes.
        skipped = e.mul(column, fields.step)
        byte = skipped // 8 if isinstance(skipped, int) else e.op(f"udiv i64 {skipped}, 8")
        starts = [fields.first + c * fields.step for c in range(WORDS)]
        base = starts[0] // 8
        # The first and the last byte of each field: one that lies in a single byte never looks at the second.
        ends = [at // 8 - base for s in starts for at in (s, s + fields.width - 1)]
        kind = f"<{ends[-1] + 1} x i8>"
        raw = e.load(e.element(row, e.add(byte, base), "i8"), kind, 1)
        picks = ", ".join(f"i32 {n}" for n in ends)
        lanes = e.op(f"shufflevector {kind} {raw}, {kind} poison, <{2 * WORDS} x i32> <{picks}>")
        words = e.op(f"bitcast <{2 * WORDS} x i8> {lanes} to <{WORDS} x i16>")
        counts = ", ".join(f"i16 {s % 8}" for s in starts)
        return e.op(f"lshr <{WORDS} x i16> {words}, <{counts}>") if any(s % 8 for s in starts) else words


def zeroed_rows(ev: Evaluator, value: Value, axis: Axis) -> Op | None:
    """Match `where(test, tile, 0)` with one test for all lanes."""
    op = value.op
    if op is None or op.kind != "where" or axis in ev.axes.of(op.operands[0]) or op.operands[1].shape != value.shape:
        return None
    other = op.operands[2]
    while other.op is not None and other.op.kind == "cast":
        (other,) = other.op.operands
    return op if str(constant(other)) == "0.0" else None  # and not -0.0


def load_pairs(e: Emitter, pointer: str, *, half: bool) -> Reg:
    """Load a vector of pairs that are contiguous in memory, or half a vector and zeros."""
    if not half:
        return Reg(e.load(pointer, e.vector_type("i32"), 2), "i32", True)
    return as_pairs(e, e.load(pointer, f"<{e.lanes} x i16>", 2), half=True)


def as_pairs(e: Emitter, words: str, *, half: bool) -> Reg:
    """Return neighbouring words as pairs; half a vector of them is followed by zeros."""
    if not half:
        return Reg(e.op(f"bitcast <{2 * e.lanes} x i16> {words} to {e.vector_type('i32')}"), "i32", True)
    numbers, pairs = f"<{e.lanes} x i16>", f"<{e.lanes // 2} x i32>"
    text = e.op(f"bitcast {numbers} {words} to {pairs}")
    picks = ", ".join(f"i32 {i}" for i in range(e.lanes))
    text = e.op(f"shufflevector {pairs} {text}, {pairs} zeroinitializer, <{e.lanes} x i32> <{picks}>")
    return Reg(text, "i32", True)


def look_up(e: Emitter, table: Table, codes: str) -> str:
    """Look up words by the lowest bits of others, whose upper bits may be anything."""
    numbers, kind = list(table.numbers), f"<{WORDS} x i16>"
    half = len(numbers) // 2
    odd = len(numbers) == 256 and [n ^ HALF_SIGN for n in numbers[:half]] == numbers[half:]  # the last bit is the sign
    if odd:
        numbers = numbers[:half]
    while len(numbers) < WORDS:  # upper bits choose between equals
        numbers = numbers * 2
    if len(numbers) == WORDS:
        return e.call(kind, "llvm.x86.avx512.permvar.hi.512", (kind, _words(numbers)), (kind, codes))
    parts = []
    for n in range(0, len(numbers), 2 * WORDS):
        low, high = _words(numbers[n : n + WORDS]), _words(numbers[n + WORDS : n + 2 * WORDS])
        parts.append(e.call(kind, "llvm.x86.avx512.vpermi2var.hi.512", (kind, low), (kind, codes), (kind, high)))
    bit = 2 * WORDS
    while len(parts) > 1:
        upper = e.op(f"icmp ne {kind} {e.op(f'and {kind} {codes}, splat (i16 {bit})')}, zeroinitializer")
        parts = [
            e.op(f"select <{WORDS} x i1> {upper}, {kind} {b}, {kind} {a}")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        bit *= 2
    if not odd:
        return parts[0]
    sign = e.op(f"and {kind} {e.op(f'shl {kind} {codes}, splat (i16 8)')}, splat (i16 {HALF_SIGN - 2**16})")
    return e.op(f"or {kind} {parts[0]}, {sign}")


def take(e: Emitter, words: str, width: int, first: int, count: int) -> str:
    """Return some words of a vector."""
    picks = ", ".join(f"i32 {first + i}" for i in range(count))
    return e.op(f"shufflevector <{width} x i16> {words}, <{width} x i16> poison, <{count} x i32> <{picks}>")


def _words(numbers: list[int]) -> str:
    return "<" + ", ".join(f"i16 {n - 2**16 if n >= HALF_SIGN else n}" for n in numbers) + ">"
