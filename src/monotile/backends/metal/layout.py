"""Register layouts: which lane and register of which simdgroup holds an element of a tile.

A program is one threadgroup of one or more simdgroups. A tile has one of three layouts:

- `FragmentLayout`: the layout of 8x8 simdgroup matrices. Each lane holds two adjacent elements of one row of every 8x8
  matrix; the matrices are distributed over the simdgroups by rows or by columns.
- `LaneLayout`: columns are distributed over the 32 lanes of one simdgroup, in runs as long as one vector load; every
  lane holds all rows.
- `LaneGridLayout`: the 32 lanes form a grid of rows x columns. Reductions over lanes leave tiles of few rows like this.

In each of them the row of an element depends only on the first index of its register, and the column on the other
indices. A vector along rows is therefore `v[rows per lane]`, a vector along columns `v[columns per lane]`, and
elementwise code is the same for all layouts. A dimension of length 1 has no index; a tile with two of them is a scalar
that every lane holds. Dimensions are padded to the layout's unit: padding exists in registers, and is never loaded,
stored, reduced or multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ...ir import Value

ROW, COLUMN = "row", "column"
LANES = 32
Index = tuple[str, ...]
Loops = list[tuple[str, int]]  # loop variables with their trip counts


@dataclass(frozen=True)
class TileLayout(ABC):
    """Expressions refer to `lane` and `sg`; those of fragments to `fm` and `fn`, the lane's first row and column."""

    row_simdgroups: int = 1  # simdgroups over which the rows are distributed
    column_simdgroups: int = 1

    @property
    def simdgroups(self) -> int:
        return self.row_simdgroups * self.column_simdgroups

    @property
    @abstractmethod
    def row_masks(self) -> tuple[int, ...]:
        """Lane masks for xor shuffles that reach the other columns of a row."""

    @property
    @abstractmethod
    def column_masks(self) -> tuple[int, ...]:
        """Lane masks for xor shuffles that reach the other rows of a column."""

    @property
    @abstractmethod
    def first_of_row(self) -> str:
        """Test that selects one of the lanes that hold the same row; "" where only one does."""

    @property
    @abstractmethod
    def first_of_column(self) -> str: ...

    @abstractmethod
    def rows_per_lane(self, length: int) -> int: ...

    @abstractmethod
    def columns_per_lane(self, length: int) -> tuple[int, ...]:
        """Trip counts of the loops over a lane's columns; the second loop, if any, runs over adjacent columns."""

    @abstractmethod
    def row(self, index: str) -> str:
        """Expression of the row that a register index holds."""

    @abstractmethod
    def column(self, index: Index, length: int) -> str: ...

    @abstractmethod
    def row_padded(self, length: int) -> bool:
        """True if some lane's registers hold rows beyond the length."""

    @abstractmethod
    def column_padded(self, length: int) -> bool: ...

    def row_owner(self, row: str) -> tuple[str, str] | None:
        """Return the register and the lane that hold a row which is the same for all lanes."""
        return None

    def column_loops(self, length: int) -> Loops:
        return list(zip("je", self.columns_per_lane(length), strict=False))

    def run_length(self, length: int) -> int:
        """Return how many adjacent columns a lane holds."""
        counts = self.columns_per_lane(length)
        return counts[1] if len(counts) > 1 else 1


class FragmentLayout(TileLayout):
    row_masks = (1, 8)
    column_masks = (2, 4, 16)
    # fm and fn count over all simdgroups, so these select one lane of one of them.
    first_of_row, first_of_column = "fn == 0", "fm == 0"

    def rows_per_lane(self, length: int) -> int:
        return -(-length // (8 * self.row_simdgroups))

    def columns_per_lane(self, length: int) -> tuple[int, ...]:
        return -(-length // (8 * self.column_simdgroups)), 2

    def row(self, index: str) -> str:
        return scaled("fm", index, 8 * self.row_simdgroups)

    def column(self, index: Index, length: int) -> str:
        return plus(scaled("fn", index[0], 8 * self.column_simdgroups), index[1])

    def row_padded(self, length: int) -> bool:
        return length % (8 * self.row_simdgroups) != 0

    def column_padded(self, length: int) -> bool:
        return length % (8 * self.column_simdgroups) != 0


class LaneLayout(TileLayout):
    row_masks = (1, 2, 4, 8, 16)
    column_masks = ()
    first_of_row, first_of_column = "lane == 0", ""

    def _width(self, length: int) -> int:
        """Return the longest vector that divides the columns and still gives every lane one."""
        return next(n for n in (4, 2, 1) if n == 1 or (length % n == 0 and LANES * n <= length))

    def rows_per_lane(self, length: int) -> int:
        return length

    def columns_per_lane(self, length: int) -> tuple[int, ...]:
        width = self._width(length)
        count = -(-length // (LANES * width))
        return (count, width) if width > 1 else (count,)

    def row(self, index: str) -> str:
        return index

    def column(self, index: Index, length: int) -> str:
        width = self._width(length)
        first = scaled("lane" if width == 1 else f"{width} * lane", index[0], LANES * width)
        return plus(first, index[1]) if width > 1 else first

    def row_padded(self, length: int) -> bool:
        return False

    def column_padded(self, length: int) -> bool:
        return length % (LANES * self._width(length)) != 0

    def row_owner(self, row: str) -> tuple[str, str] | None:
        return row, "0"


@dataclass(frozen=True)
class LaneGridLayout(TileLayout):
    rows: int = 1  # a power of two

    @property
    def columns(self) -> int:
        return LANES // self.rows

    @property
    def row_masks(self) -> tuple[int, ...]:
        return tuple(bit for bit in (16, 8, 4, 2, 1) if bit < self.columns)

    @property
    def column_masks(self) -> tuple[int, ...]:
        return tuple(bit for bit in (1, 2, 4, 8, 16) if bit >= self.columns)

    @property
    def first_of_row(self) -> str:
        return f"lane % {self.columns} == 0" if self.rows > 1 else "lane == 0"

    @property
    def first_of_column(self) -> str:
        return f"lane < {self.columns}" if self.rows > 1 else ""

    def rows_per_lane(self, length: int) -> int:
        return 1

    def columns_per_lane(self, length: int) -> tuple[int, ...]:
        return (-(-length // self.columns),)

    def row(self, index: str) -> str:
        return f"lane / {self.columns}" if self.rows > 1 else "0"

    def column(self, index: Index, length: int) -> str:
        return scaled(f"lane % {self.columns}" if self.rows > 1 else "lane", index[0], self.columns)

    def row_padded(self, length: int) -> bool:
        return length != self.rows

    def column_padded(self, length: int) -> bool:
        return length % self.columns != 0

    def row_owner(self, row: str) -> tuple[str, str] | None:
        return "0", f"{row} * {self.columns}" if row != "0" else "0"


def scaled(base: str, index: str, factor: int) -> str:
    """Return the text of base + factor * index."""
    if index == "0":
        return base
    return plus(base, str(int(index) * factor) if index.isdigit() else f"{factor} * {index}")


def plus(text: str, more: str) -> str:
    """Return the text of a sum, without a term that is 0."""
    return text if more == "0" else more if text == "0" else f"{text} + {more}"


@dataclass(frozen=True)
class OrientedShape:
    """Rows and columns of a value, once it is known along which of them a vector lies."""

    rows: int = 1
    columns: int = 1

    @property
    def kind(self) -> str:
        if self.rows > 1:
            return "tile" if self.columns > 1 else ROW
        return COLUMN if self.columns > 1 else "scalar"


def oriented_shape(value: Value, orientation: str) -> OrientedShape:
    """Return the rows and columns of a value; the orientation matters for vectors."""
    lengths = value.shape
    if len(lengths) == 2:
        return OrientedShape(*lengths)
    if not lengths:
        return OrientedShape()
    return OrientedShape(rows=lengths[0]) if orientation == ROW else OrientedShape(columns=lengths[0])
