"""The rows of a dot as A tiles of AMX: 16 rows with the steps of a product side by side (amx.py)."""

from __future__ import annotations

from functools import partial

from .amx import ROWS, Product
from .bf16_pairs import interleave
from .dots import DotOperand
from .emit import Emitter, Index, Reg
from .nests import NestEmitter
from .point import Point
from .transpose import transpose
from .vectors import lane_mask


def byte_words(e: Emitter, steps: list[Reg]) -> str:
    """Return words of four bytes from vectors of whole numbers in float32, as many as there are."""
    if not steps:
        return "zeroinitializer"
    word: Reg | None = None
    for n, numbers in enumerate(steps):
        byte = e.binary("and", e.convert("fptosi", e.splat(numbers), "i32"), e.number(255, "i32"))
        byte = e.binary("shl", byte, e.number(8 * n, "i32")) if n else byte
        word = byte if word is None else e.binary("or", word, byte)
    assert word is not None
    return word.text


class PackedTiles:
    """Tiles in scratch, all steps of 16 rows one after the other, packed by the constructor. Rows whose lanes run along
    the contraction are copied; else words of two or four steps are transposed. Steps beyond the contraction are zero;
    rows beyond the last one are undefined, and so are their sums."""

    def __init__(self, nests: NestEmitter, row_operand: DotOperand, height: int, product: Product) -> None:
        assert row_operand.contracted is not None
        self.e, self.axis, self._depth = nests.e, row_operand.contracted, row_operand.contracted.extent
        self._rows, self._scratch = row_operand, nests.ev.scratch
        self._steps, self._element, self._group = product.steps, product.element, product.group
        self._tiles = -(-self._depth // self._steps)  # along the contraction
        self._buffer = self._scratch.new(self._element, {}, None, -(-height // ROWS) * self._tiles * product.tile)
        self._narrow = row_operand.buffer.element == "i16"
        if row_operand.free is None or row_operand.buffer.lane is row_operand.contracted:
            self._copy(height)
        else:
            self._transpose(height)

    def tile(self, row: Index, k: Index) -> str:
        """Return the address of a tile from its first row and its first step."""
        e = self.e
        offset = e.add(e.mul(row, self._tiles * self._steps), e.mul(k, ROWS))
        return e.element(self._scratch.address(self._buffer, {}, None), offset, self._element)

    # ---- lanes along the contraction ---------------------------------------------------------------------------------

    def _copy(self, height: int) -> None:
        e, whole = self.e, height - height % ROWS

        def row(first: Index, i: Index) -> None:
            e.loop(0, self._depth - self._depth % self._steps, self._steps, partial(copy, first, i))
            if self._depth % self._steps:
                copy(first, i, self._depth - self._depth % self._steps)

        def copy(first: Index, i: Index, k: Index) -> None:
            at = e.element(self.tile(first, k), e.mul(i, self._steps), self._element)
            e.store(self._steps_of(e.add(first, i), k), at, f"<{self._steps} x {self._element}>", 1)

        e.loop(0, whole, ROWS, lambda first: e.loop(0, ROWS, 1, partial(row, first)))
        e.loop(0, height - whole, 1, partial(row, whole))

    def _steps_of(self, row: Index, k: Index) -> str:
        """Load the steps of a tile from k on of one row; the last tile's k is known here."""
        e, operand = self.e, self._rows
        there = self._depth - k if isinstance(k, int) else self._steps
        if self._narrow and there >= self._steps:
            return e.load(self._scratch.address(operand.buffer, operand.at(row, k), None), f"<{self._steps} x i16>", 2)
        parts = [self._part(row, e.add(k, n), there - n) for n in range(0, self._steps, e.lanes)]
        width = e.lanes
        while len(parts) > 1:
            kind, picks = f"<{width} x {self._element}>", ", ".join(f"i32 {i}" for i in range(2 * width))
            parts = [
                e.op(f"shufflevector {kind} {a}, {kind} {b}, <{2 * width} x i32> <{picks}>")
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
            width *= 2
        return parts[0]

    def _part(self, row: Index, k: Index, there: int) -> str:
        """Load a vector of steps, of which the first `there` exist."""
        e, operand = self.e, self._rows
        if there <= 0:
            return "zeroinitializer"
        numbers = self._scratch.read(operand.buffer, Point(operand.at(row, k), operand.contracted))
        if self._element == "i8":
            bits = e.convert("fptosi", e.splat(numbers), "i32")
        else:
            bits = e.binary("lshr", e.convert("bitcast", e.splat(numbers), "i32"), e.number(16, "i32"))
        steps = e.convert("trunc", bits, self._element)
        if there < e.lanes:  # scratch beyond the tile is undefined
            steps = e.select(Reg(lane_mask(e, there), "i1", True), steps, Reg("zeroinitializer", self._element, True))
        return steps.text

    # ---- lanes along the rows ----------------------------------------------------------------------------------------

    def _transpose(self, height: int) -> None:
        e = self.e

        def tile(k: Index, row: Index) -> None:
            there = self._depth - k if isinstance(k, int) else self._steps
            words = [self._words(row, k, i, there) for i in range(0, self._steps, self._group)]
            pointer = self.tile(row, k)
            for i, text in enumerate(transpose(e, words)):
                e.store(text, e.element(pointer, i * self._steps, self._element), e.vector_type("float"), 4)

        def tiles(k: Index) -> None:
            e.loop(0, height, ROWS, partial(tile, k))

        whole = self._depth - self._depth % self._steps
        e.loop(0, whole, self._steps, tiles)
        if self._depth > whole:
            tiles(whole)

    def _words(self, row: Index, k: Index, step: int, there: int) -> str:
        """Load words of steps for as many rows as a vector has lanes, as a vector of float."""
        e, operand = self.e, self._rows
        if step >= there:
            return "zeroinitializer"
        count = min(self._group, there - step)
        steps = [e.add(k, step + i) for i in range(count)]
        if self._narrow and count == 2:
            kind = e.vector_type("i16")
            low, high = (
                e.load(self._scratch.address(operand.buffer, operand.at(row, at), None), kind, 2) for at in steps
            )
            picks = ", ".join(f"i32 {i // 2 + e.lanes * (i % 2)}" for i in range(2 * e.lanes))
            pairs = e.op(f"shufflevector {kind} {low}, {kind} {high}, <{2 * e.lanes} x i32> <{picks}>")
            return e.op(f"bitcast <{2 * e.lanes} x i16> {pairs} to {e.vector_type('float')}")
        numbers = [self._scratch.read(operand.buffer, Point(operand.at(row, at), operand.free)) for at in steps]
        if self._element == "i8":
            return e.convert("bitcast", Reg(byte_words(e, numbers), "i32", True), "float").text
        numbers += [e.splat(e.number(0.0, "float"))] * (2 - count)
        return e.convert("bitcast", interleave(e, *numbers), "float").text
