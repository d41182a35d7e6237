"""8x8 matrices of a dot's operands: in registers, or loaded from threadgroup or device memory or by elements."""

from __future__ import annotations

from ...ir import Op, Value
from ...ir.matchers import untransposed
from .expressions import ZERO, Coordinate, ElementIndex, Expressions, tile_axes
from .layout import COLUMN, ROW, OrientedShape, scaled
from .registers import Registers, column_coordinate
from .staging import StagedOperands
from .threadgroup import ThreadgroupTile


class MatrixOperands:
    """Loads `left` (or left[i]) and `right`, the operands of a multiplication. `k_matrix` counts matrices along k."""

    def __init__(self, staged: StagedOperands, registers: Registers, expressions: Expressions) -> None:
        self.staged, self.registers, self.expressions = staged, registers, expressions
        self.layout = expressions.layouts.main

    # ---- where an operand is -----------------------------------------------------------------------------------------

    def held_matrices(self, a: Value) -> str:
        """Return the name of a left operand that this simdgroup's registers hold as matrices, or ""."""
        expressions = self.expressions
        alone = self.layout.column_simdgroups == 1 and a in expressions.names and expressions.in_matrices(a)
        return expressions.names[a] if alone and not a.shape[1] % 8 else ""

    def staged_whole(self, value: Value) -> bool:
        """True for a tile in threadgroup memory whose sides are padded to multiples of 8. The padding of a part of a
        wider tile is not zero, but belongs to columns of the product that nothing reads."""
        tile = self.expressions.tile_of(value)
        padded = value in self.staged or value not in self.expressions.tiles
        return tile is not None and (padded or not any(n % 8 for n in value.shape))

    def in_memory(self, op: Op, *parts: ThreadgroupTile | None) -> bool:
        """True if both operands, or the parts of them in tiles, are read from memory: the loop over k then needs no
        unrolling."""
        return all(
            part is not None or self.staged_whole(untransposed(v)[0]) or self._in_device_memory(v)
            for v, part in zip(op.operands, parts, strict=True)
        )

    def _in_device_memory(self, operand: Value) -> bool:
        """True if whole matrices can be loaded from device memory: no bounds to check, adjacent columns."""
        value, _ = untransposed(operand)
        op = value.op
        if op is None or op.kind != "load" or value in self.expressions.names or op not in self.expressions.slices:
            return False
        if len(value.shape) != 2 or value.shape[0] % 8 or value.shape[1] % 8 or any(op.attrs["checked"]):
            return False
        return bool(op.attrs["tensor"].unit == tile_axes(op)[1])

    # ---- loading -----------------------------------------------------------------------------------------------------

    def first_column(self, n: int) -> str:
        """Return the first column of this simdgroup's matrix j of n columns."""
        over = self.layout.column_simdgroups
        j = "j" if self.layout.columns_per_lane(n)[0] > 1 else "0"
        return scaled("8 * sg" if over > 1 else "0", j, 8 * over)

    def left(self, target: str, a: Value, k_matrix: str, tile: ThreadgroupTile | None) -> str:
        """Return the expression of a held matrix, or the line that loads one into a target; `tile` holds the part of
        the operand that `k_matrix` counts in."""
        (m, k), layout = a.shape, self.layout
        several = layout.rows_per_lane(m) > 1
        held = self.held_matrices(a)
        if held:
            columns = layout.columns_per_lane(k)[0]
            return held + ("[i]" if several else "") + (f"[{k_matrix}]" if columns > 1 else "")
        row = scaled("8 * sg" if layout.row_simdgroups > 1 else "0", "i" if several else "0", 8 * layout.row_simdgroups)
        if tile is None and self.staged_whole(untransposed(a)[0]) and m > 1:
            tile = self.expressions.tile_of(untransposed(a)[0])
        if tile is not None:
            load = self._load_tile(target, a, tile, row, _times8(k_matrix))
            uneven = -(-m // 8) % layout.row_simdgroups != 0  # some simdgroups have a matrix less than others
            return f"if ({row} < {m}) {load}" if uneven else load
        if m % (8 * layout.row_simdgroups) == 0 and self._in_device_memory(a) and min(a.shape) > 1:
            return self._load_device(target, a, row, _times8(k_matrix))
        # All simdgroups hold the same columns of the left operand. A k of 1 is not distributed over lanes.
        shared = layout.column_simdgroups > 1
        column = f"{_times8(k_matrix)} + {'(fn - 8 * sg)' if shared else 'fn'} + e"
        across = Coordinate(column, axis=COLUMN) if shared else Coordinate(column, layout, COLUMN, (k_matrix, "e"))
        index = self.registers.index(layout, OrientedShape(m, 1))
        text = self.expressions.at(a, ElementIndex(index.row, across if k > 1 else ZERO))
        zero = self.expressions.dialect.zero(a.dtype)
        text = f"{column} < {k} ? {text} : {zero}" if k % 8 else text
        return f"UNROLL for (int e = 0; e < 2; ++e) {target}.thread_elements()[e] = {text};"

    def right(self, target: str, b: Value, k_matrix: str, tile: ThreadgroupTile | None) -> str:
        """Return the line that loads a matrix into a target; `tile` holds the part of the operand that `k_matrix`
        counts in."""
        (k, n), layout = b.shape, self.layout
        column = self.first_column(n)
        if tile is None and self.staged_whole(untransposed(b)[0]) and n > 1:
            tile = self.expressions.tile_of(untransposed(b)[0])
        if tile is not None:
            return self._load_tile(target, b, tile, _times8(k_matrix), column)
        if self._in_device_memory(b) and min(b.shape) > 1:
            return self._load_device(target, b, _times8(k_matrix), column)
        shared = layout.row_simdgroups > 1
        row = f"{_times8(k_matrix)} + {'(fm - 8 * sg)' if shared else 'fm'}"
        down = Coordinate(row, axis=ROW) if shared else Coordinate(row, layout, ROW, (k_matrix,))
        across = column_coordinate(layout, n, "j" if layout.columns_per_lane(n)[0] > 1 else "0", "e")
        text = self.expressions.at(b, ElementIndex(down if k > 1 else ZERO, across if n > 1 else ZERO))
        tests = ([f"{row} < {k}"] if k % 8 else []) + ([f"{across.text} < {n}"] if n % 8 and n > 1 else [])
        zero = self.expressions.dialect.zero(b.dtype)
        text = f"{' && '.join(tests)} ? {text} : {zero}" if tests else text
        return f"UNROLL for (int e = 0; e < 2; ++e) {target}.thread_elements()[e] = {text};"

    def _load_tile(self, target: str, operand: Value, tile: ThreadgroupTile, row: str, column: str) -> str:
        self.expressions.read_tile(tile)
        return self._load(target, operand, tile.name, str(tile.stride), (row, column))

    def _load_device(self, target: str, operand: Value, row: str, column: str) -> str:
        op = untransposed(operand)[0].op
        assert op is not None
        stride = self.expressions.preamble.tile_stride(op.attrs["tensor"], tile_axes(op)[0])
        return self._load(target, operand, self.expressions.slices[op].pointer, stride, (row, column))

    def _load(self, target: str, operand: Value, pointer: str, stride: str, first: tuple[str, str]) -> str:
        """Return the line that loads the matrix whose first element is at this row and column of the operand."""
        _, transposed = untransposed(operand)
        row, column = first[::-1] if transposed else first
        address = _address(pointer, row, stride, column)
        dialect = self.expressions.dialect
        if dialect.as_bits(operand.dtype):
            return f"{dialect.use('load_matrix')}({target}, {address}, {stride}, lane, {str(transposed).lower()});"
        return f"simdgroup_load({target}, {address}, {stride}{', ulong2(0), true' if transposed else ''});"


def _times8(k_matrix: str) -> str:
    return "0" if k_matrix == "0" else f"8 * {k_matrix}"


def _address(pointer: str, row: str, stride: str, column: str) -> str:
    terms = [pointer]
    if row != "0":
        terms.append(f"({row}) * {stride}" if " " in row else f"{row} * {stride}")
    if column != "0":
        terms.append(column)
    return " + ".join(terms)
