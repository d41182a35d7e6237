"""Split contracted sides that are no powers of two: a dot over 576 becomes a dot over 512 and one over 64, added up.

Tiles have sides that are powers of two (triton/padding.py). A loaded tile that is nothing but contracted needs no
padding: its power-of-two pieces are loaded and multiplied one by one, and each dot starts from the sum of those before
it. A piece that equals another load is the same load: with keys of 576 whose first 512 columns are the values, those
are read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...ir import Kernel, Op, Type, Value, uses, walk
from ...ir.builder import Builder
from ...ir.matchers import untransposed
from ...ir.ops import Block
from ...passes.pipeline import CLEAN
from .triton.padding import LEAST, padded

COLUMNS = 8  # 16 bytes of 16-bit elements
MAX_PIECES = 2  # more take more copies and barriers than they save
Uses = Mapping[Value, list[Op]]


class Piece(NamedTuple):
    start: int
    side: int


def pieces(side: int) -> tuple[Piece, ...]:
    """Return the pieces of a side, or the side itself where pieces save nothing, or would not begin at a multiple of 8
    columns, as copies of 16 bytes do. Each is a power of two but for the last, which may be padded."""
    found, start = list[Piece](), 0
    if side % COLUMNS:
        return (Piece(0, side),)
    while side - start > LEAST and len(found) < MAX_PIECES - 1:
        found.append(Piece(start, 1 << ((side - start).bit_length() - 1)))
        start += found[-1].side
    if start < side:
        found.append(Piece(start, side - start))
    saves = sum(padded(piece.side) for piece in found) < padded(side)
    return tuple(found) if saves else (Piece(0, side),)


def split_sides(kernel: Kernel) -> None:
    """Split the contracted sides of dots whose operands are loads, or transposed loads, that only such dots read."""
    readers = uses(kernel.body)
    dots = {op for op in walk(kernel.body) if op.kind == "dot" and len(pieces(op.operands[0].shape[1])) > 1}
    while wrong := {
        op for op in dots if not all(_only_contracted(op.operands[n], 1 - n, dots, readers) for n in (0, 1))
    }:
        dots -= wrong
    if dots:
        _Splitter(dots).block(kernel.body)
        for clean in CLEAN:  # merges equal loads
            clean(kernel)


def _only_contracted(value: Value, axis: int, dots: set[Op], readers: Uses) -> bool:
    """Return True if an operand is a load, and everything that reads the load contracts the same side in one of the
    dots."""
    value, transposed = untransposed(value)
    if value.op is None or value.op.kind != "load" or "spread" in value.op.attrs:
        return False
    return _contracts(value, axis ^ transposed, dots, readers)


def _contracts(value: Value, axis: int, dots: set[Op], readers: Uses) -> bool:
    for op in readers[value]:
        if op.kind == "trans":
            if not _contracts(op.result, 1 - axis, dots, readers):
                return False
        elif op not in dots or op.operands[1 - axis] is not value or op.operands[axis] is value:
            return False
    return True


class _Splitter:
    """Writes the pieces of loads and transposes where those were, and sums of dots. What they replace is dead."""

    def __init__(self, dots: set[Op]) -> None:
        self.dots = dots
        self.axes = dict(_sides(dots))
        self.found: dict[Value, list[Value]] = {}  # the pieces of a value

    def block(self, block: Block) -> None:
        ops, block.ops = block.ops, []
        builder = Builder(block)
        for op in ops:
            builder.loc = op.loc
            if op in self.dots:
                self._dot(builder, op)
                continue
            for inner in op.blocks:
                self.block(inner)
            block.ops.append(op)
            if op.results and op.results[0] in self.axes:
                self.found[op.result] = [self._piece(builder, op, n) for n in range(len(self._pieces(op.result)))]

    def _pieces(self, value: Value) -> tuple[Piece, ...]:
        return pieces(value.shape[self.axes[value]])

    def _piece(self, builder: Builder, op: Op, n: int) -> Value:
        if op.kind == "trans":
            return builder.trans(self.found[op.operands[0]][n])
        axis, (start, side) = self.axes[op.result], self._pieces(op.result)[n]
        extents, operands = list(op.attrs["extents"]), list(op.operands)
        of_tensor = [i for i, extent in enumerate(extents) if extent is not None][axis]
        if start:
            operands[of_tensor] = builder.binary("add", operands[of_tensor], start)
        extents[of_tensor] = side
        shape = tuple(side if i == axis else old for i, old in enumerate(op.result.shape))
        attrs = {**op.attrs, "extents": tuple(extents)}
        found = builder.emit("load", tuple(operands), Type(op.result.dtype, shape), **attrs).result
        found.hint = op.result.hint
        return found

    def _dot(self, builder: Builder, op: Op) -> None:
        """The last addition takes the place of the dot: everything that read it reads the sum."""
        lefts, rights = (self.found[v] for v in op.operands)
        total = builder.dot(lefts[0], rights[0])
        for left, right in list(zip(lefts, rights, strict=True))[1:-1]:
            total = builder.binary("add", builder.dot(left, right), total)
        last = builder.dot(lefts[-1], rights[-1])
        op.kind, op.operands = "add", (last, total)
        builder.block.ops.append(op)


def _sides(dots: Iterable[Op]) -> Iterable[tuple[Value, int]]:
    """Yield every value that is split, and its side."""
    for op in dots:
        for axis, value in ((1, op.operands[0]), (0, op.operands[1])):
            yield value, axis
            while value.op is not None and value.op.kind == "trans":
                value, axis = value.op.operands[0], 1 - axis
                yield value, axis
