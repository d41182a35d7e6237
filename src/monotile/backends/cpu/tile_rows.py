"""Where the rows of a tile begin in memory: a stride apart, or anywhere, by a table of addresses (row_tables.py)."""

from __future__ import annotations

from dataclasses import dataclass

from .emit import Emitter, Index
from .scratch import Buffer, Scratch
from .vectors import BYTES


@dataclass(frozen=True)
class StridedRows:
    """Rows of a tile that lie a stride apart, from a base address on."""

    base: str
    stride: Index
    element: str

    def start(self, e: Emitter, row: Index) -> str:
        return e.element(self.base, e.mul(row, self.stride), self.element)

    def address(self, e: Emitter, row: Index, column: Index) -> str:
        return e.element(self.base, e.add(e.mul(row, self.stride), column), self.element)

    def byte(self, e: Emitter, row: Index, byte: Index) -> str:
        """Return the address of a byte of a row."""
        return e.element(self.base, e.add(e.mul(row, e.mul(self.stride, BYTES[self.element])), byte), "i8")


@dataclass(frozen=True)
class TableRows:
    """Rows of a tile whose addresses are in a table, a buffer of one axis."""

    scratch: Scratch
    table: Buffer
    element: str

    def start(self, e: Emitter, row: Index) -> str:
        (axis,) = self.table.strides
        return e.load_once(self.scratch.address(self.table, {axis: row}, None), "ptr", 8)

    def address(self, e: Emitter, row: Index, column: Index) -> str:
        return e.element(self.start(e, row), column, self.element)

    def byte(self, e: Emitter, row: Index, byte: Index) -> str:
        return e.element(self.start(e, row), byte, "i8")


Rows = StridedRows | TableRows
