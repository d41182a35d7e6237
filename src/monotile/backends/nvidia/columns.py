"""Split result columns that are no powers of two: a dot with 192 columns becomes one with 128 and one with 64.

Tiles have sides that are powers of two (triton/padding.py): an accumulator of 192 columns would be computed, and kept
in registers, as one of 256. Columns of a product do not depend on one another: the pieces of a result
(sides.pieces) are accumulated, scaled and stored each on its own. Only whole chains are split, from the loads of right
operands to the stores: whatever reads or makes a tile of such columns must be elementwise in them."""

from __future__ import annotations

from collections.abc import Iterator

from ...ir import ELEMENTWISE, Block, Kernel, Op, Type, Value, uses, walk
from ...ir.builder import Builder
from ...passes.pipeline import CLEAN
from .sides import Piece, pieces


def split_columns(kernel: Kernel) -> None:
    """Split the columns of dots whose results, and whose right operands, are used column by column."""
    chains = _Chains(kernel)
    if any(value.kind == "dot" for value in chains.values):
        _ColumnSplitter(chains.values).block(kernel.body)
        for clean in CLEAN:
            clean(kernel)


def _column_pieces(value: Value) -> tuple[Piece, ...]:
    return pieces(value.shape[1])


class _Chains:
    """The values whose columns can be split: all that have such columns, less those that are made or read in another
    way, less what is connected with them."""

    def __init__(self, kernel: Kernel) -> None:
        self.readers = uses(kernel.body)
        self.links: dict[Value, set[Value]] = {}  # values that are split together
        self.values = {v for v in _values(kernel.body) if len(v.shape) == 2 and len(_column_pieces(v)) > 1}
        self.whole: set[Value] = set()
        for op in walk(kernel.body):
            self._read(op)
        stack = list(self.whole)
        while stack:
            value = stack.pop()
            if value in self.values:
                self.values.discard(value)
                stack += self.links.get(value, ())

    def _together(self, *values: Value) -> None:
        """Values are split alike, or none of them is."""
        if not all(v in self.values and v.shape[1] == values[0].shape[1] for v in values):
            self.whole.update(values)
        for value in values:
            self.links.setdefault(value, set()).update(values)

    def _read(self, op: Op) -> None:
        if op.kind == "dot":
            self.whole.add(op.operands[0])
            self._together(op.result, op.operands[1])
        elif op.kind in ELEMENTWISE or op.kind == "broadcast":
            columns = op.result.shape[1:]
            self._together(op.result, *(v for v in op.operands if v.shape[1:] == columns and len(v.shape) == 2))
        elif op.kind == "for":
            (body,) = op.blocks
            carried = zip(op.operands[2:], body.params[1:], body.terminator.operands, op.results, strict=True)
            for values in carried:
                self._together(*values)
        elif op.kind == "if":
            for values in zip(op.results, *(block.terminator.operands for block in op.blocks), strict=True):
                self._together(*values)
        elif op.kind not in ("load", "store", "yield") or "spread" in op.attrs:
            self.whole.update((*op.operands, *op.results))


def _values(block: Block) -> Iterator[Value]:
    yield from block.params
    for op in block.ops:
        yield from op.results
        for inner in op.blocks:
            yield from _values(inner)


class _ColumnSplitter:
    """Writes the pieces of every split value where it was."""

    def __init__(self, split: set[Value]) -> None:
        self.split = split
        self.found: dict[Value, list[Value]] = {}

    def block(self, block: Block) -> None:
        ops, block.ops = block.ops, []
        builder = Builder(block)
        for op in ops:
            builder.loc = op.loc
            if op.kind == "store" and op.operands[0] in self.split:
                for n in range(len(_column_pieces(op.operands[0]))):
                    self._store(builder, op, n)
            elif op.kind not in ("for", "if") and op.results and op.results[0] in self.split:
                self.found[op.result] = [self._piece(builder, op, n) for n in range(len(_column_pieces(op.result)))]
            else:
                self._control(op)
                block.ops.append(op)

    def _control(self, op: Op) -> None:
        """Carry, choose and yield the pieces in place of the whole."""
        op.operands = self._apart(op.operands)
        for block in op.blocks:
            block.params = self._fresh(block.params, block)
            self.block(block)
        op.results = self._fresh(op.results, op)

    def _apart(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(part for v in values for part in (self.found[v] if v in self.split else [v]))

    def _fresh(self, values: tuple[Value, ...], owner: Op | Block) -> tuple[Value, ...]:
        for value in values:
            if value in self.split:
                types = [Type(value.dtype, (value.shape[0], piece.side)) for piece in _column_pieces(value)]
                self.found[value] = [Value(type, owner, value.hint) for type in types]
        return self._apart(values)

    def _piece(self, builder: Builder, op: Op, n: int) -> Value:
        piece = _column_pieces(op.result)[n]
        operands, attrs = tuple(self.found[v][n] if v in self.split else v for v in op.operands), op.attrs
        if op.kind == "load":
            operands, attrs = _moved(builder, op, operands, piece)
        found = builder.emit(op.kind, operands, Type(op.result.dtype, (op.result.shape[0], piece.side)), **attrs)
        found.result.hint = op.result.hint
        return found.result

    def _store(self, builder: Builder, op: Op, n: int) -> None:
        value, positions = op.operands[0], op.operands[1:]
        positions, attrs = _moved(builder, op, positions, _column_pieces(value)[n])
        builder.emit("store", (self.found[value][n], *positions), **attrs)


def _moved(
    builder: Builder, op: Op, positions: tuple[Value, ...], piece: Piece
) -> tuple[tuple[Value, ...], dict[str, object]]:
    """Positions and attributes of an access to a piece of a tile's columns."""
    extents, moved = list(op.attrs["extents"]), list(positions)
    columns = [n for n, extent in enumerate(extents) if extent is not None][1]
    if piece.start:
        moved[columns] = builder.binary("add", moved[columns], piece.start)
    extents[columns] = piece.side
    return tuple(moved), {**op.attrs, "extents": tuple(extents)}
