"""The rows of a dot as A tiles of AMX: 16 rows with 32 steps of the contraction side by side (amx.py)."""

from __future__ import annotations

from functools import partial

from .amx import BFLOAT16, ROWS
from .bf16_pairs import interleave
from .dots import DotOperand
from .emit import Index, Reg
from .nests import NestEmitter
from .point import Point
from .transpose import transpose
from .vectors import lane_mask

STEPS = BFLOAT16.steps


class PackedTiles:
    """Tiles in scratch, all steps of 16 rows one after the other, packed by the constructor. Rows whose lanes run along
    the contraction are copied; else words of two steps are transposed. Steps beyond the contraction are zero; rows
    beyond the last one are undefined, and so are their sums."""

    def __init__(self, nests: NestEmitter, row_operand: DotOperand, height: int) -> None:
        assert row_operand.contracted is not None
        self.e, self.axis, self._depth = nests.e, row_operand.contracted, row_operand.contracted.extent
        self._rows, self._scratch = row_operand, nests.ev.scratch
        self._tiles = -(-self._depth // STEPS)  # along the contraction
        self._buffer = self._scratch.new("i16", {}, None, -(-height // ROWS) * self._tiles * BFLOAT16.tile)
        self._narrow = row_operand.buffer.element == "i16"
        if row_operand.free is None or row_operand.buffer.lane is row_operand.contracted:
            self._copy(height)
        else:
            self._transpose(height)

    def tile(self, row: Index, k: Index) -> str:
        """Return the address of a tile from its first row and its first step."""
        e = self.e
        offset = e.add(e.mul(row, self._tiles * STEPS), e.mul(k, ROWS))
        return e.element(self._scratch.address(self._buffer, {}, None), offset, "i16")

    # ---- lanes along the contraction ---------------------------------------------------------------------------------

    def _copy(self, height: int) -> None:
        e, whole = self.e, height - height % ROWS

        def row(first: Index, i: Index) -> None:
            e.loop(0, self._depth - self._depth % STEPS, STEPS, partial(copy, first, i))
            if self._depth % STEPS:
                copy(first, i, self._depth - self._depth % STEPS)

        def copy(first: Index, i: Index, k: Index) -> None:
            at = e.element(self.tile(first, k), e.mul(i, STEPS), "i16")
            e.store(self._steps_of(e.add(first, i), k), at, f"<{STEPS} x i16>", 2)

        e.loop(0, whole, ROWS, lambda first: e.loop(0, ROWS, 1, partial(row, first)))
        e.loop(0, height - whole, 1, partial(row, whole))

    def _steps_of(self, row: Index, k: Index) -> str:
        """Load the steps of a tile from k on of one row; the last tile's k is known here."""
        e, operand = self.e, self._rows
        there = self._depth - k if isinstance(k, int) else STEPS
        if self._narrow and there >= STEPS:
            return e.load(self._scratch.address(operand.buffer, operand.at(row, k), None), f"<{STEPS} x i16>", 2)
        halves = [self._half(row, e.add(k, n), there - n) for n in range(0, STEPS, e.lanes)]
        picks = ", ".join(f"i32 {i}" for i in range(STEPS))
        kind = e.vector_type("i16")
        return e.op(f"shufflevector {kind} {halves[0]}, {kind} {halves[1]}, <{STEPS} x i32> <{picks}>")

    def _half(self, row: Index, k: Index, there: int) -> str:
        """Load a vector of steps, of which the first `there` exist."""
        e, operand = self.e, self._rows
        if there <= 0:
            return "zeroinitializer"
        numbers = self._scratch.read(operand.buffer, Point(operand.at(row, k), operand.contracted))
        bits = e.binary("lshr", e.convert("bitcast", e.splat(numbers), "i32"), e.number(16, "i32"))
        steps = e.convert("trunc", bits, "i16")
        if there < e.lanes:  # scratch beyond the tile is undefined
            steps = e.select(Reg(lane_mask(e, there), "i1", True), steps, Reg("zeroinitializer", "i16", True))
        return steps.text

    # ---- lanes along the rows ----------------------------------------------------------------------------------------

    def _transpose(self, height: int) -> None:
        e = self.e

        def tile(k: Index, row: Index) -> None:
            there = self._depth - k if isinstance(k, int) else STEPS
            words = [self._words(row, k, i, there) for i in range(0, STEPS, 2)]
            pointer = self.tile(row, k)
            for i, text in enumerate(transpose(e, words)):
                e.store(text, e.element(pointer, i * STEPS, "i16"), e.vector_type("float"), 4)

        def tiles(k: Index) -> None:
            e.loop(0, height, ROWS, partial(tile, k))

        whole = self._depth - self._depth % STEPS
        e.loop(0, whole, STEPS, tiles)
        if self._depth > whole:
            tiles(whole)

    def _words(self, row: Index, k: Index, step: int, there: int) -> str:
        """Load words of two steps for as many rows as a vector has lanes, as a vector of float."""
        e, operand = self.e, self._rows
        if step >= there:
            return "zeroinitializer"
        count = min(2, there - step)
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
        numbers += [e.splat(e.number(0.0, "float"))] * (2 - count)
        return e.convert("bitcast", interleave(e, *numbers), "float").text
