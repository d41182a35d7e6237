"""Where the elements of a tile live: which lane and register of which simdgroup.

A program is one or more simdgroups. Every tile of a kernel follows one family:

- `Fragments`, in kernels with a `dot`. A lane holds what an 8x8 simdgroup matrix gives it: two neighbours of one row in
  every 8x8 square. Squares are dealt out to the simdgroups by rows.
- `Lanes`, in the others. A lane holds every 32nd column; rows are dealt out to the simdgroups.

In both, a tile is an array `t[rows held][columns held]`: the row of an element depends on the first index only, its
column on the second. So a vector along rows is `v[rows held]`, one along columns `v[columns held]`, and elementwise
code is the same for all. What a side of 1 leaves is a vector, or a scalar that every lane holds. Sides are padded:
elements outside the tile exist in registers, and are never loaded, stored, folded or multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ...ir import Value

ROW, COLUMN = "row", "column"


@dataclass(frozen=True)
class Family(ABC):
    """Texts speak of `sg`, `lane` and, for fragments, `fm` and `fn`, the lane's place in a square."""

    simdgroups: int
    along_row: ClassVar[tuple[int, ...]]  # lanes that differ in these bits hold other columns of the same row
    along_column: ClassVar[tuple[int, ...]]
    first_of_row: ClassVar[str]  # picks one of the lanes that hold the same row
    first_of_column: ClassVar[str]

    @abstractmethod
    def rows_held(self, side: int) -> int: ...

    @abstractmethod
    def columns_held(self, side: int) -> int: ...

    @abstractmethod
    def row(self, index: str) -> str: ...

    @abstractmethod
    def column(self, index: str) -> str: ...

    @abstractmethod
    def row_padded(self, side: int) -> bool:
        """Whether some lane holds a row that is not there."""

    @abstractmethod
    def column_padded(self, side: int) -> bool: ...


class Fragments(Family):
    along_row = (1, 8)
    along_column = (2, 4, 16)
    first_of_row, first_of_column = "fn == 0", "fm == 0"

    def rows_held(self, side: int) -> int:
        return -(-side // (8 * self.simdgroups))

    def columns_held(self, side: int) -> int:
        return 2 * -(-side // 8)

    def row(self, index: str) -> str:
        if self.simdgroups == 1:
            return f"8 * {index} + fm" if index != "0" else "fm"
        return f"8 * ({index} * {self.simdgroups} + sg) + fm" if index != "0" else "8 * sg + fm"

    def column(self, index: str) -> str:
        return f"{index} / 2 * 8 + fn + {index} % 2"

    def row_padded(self, side: int) -> bool:
        return side % (8 * self.simdgroups) != 0

    def column_padded(self, side: int) -> bool:
        return side % 8 != 0


class Lanes(Family):
    along_row = (1, 2, 4, 8, 16)
    along_column = ()
    first_of_row, first_of_column = "lane == 0", ""

    def rows_held(self, side: int) -> int:
        return -(-side // self.simdgroups)

    def columns_held(self, side: int) -> int:
        return -(-side // 32)

    def row(self, index: str) -> str:
        return index if self.simdgroups == 1 else f"{index} * {self.simdgroups} + sg"

    def column(self, index: str) -> str:
        return f"{index} * 32 + lane" if index != "0" else "lane"

    def row_padded(self, side: int) -> bool:
        return side % self.simdgroups != 0

    def column_padded(self, side: int) -> bool:
        return side % 32 != 0


@dataclass(frozen=True)
class Shape:
    """How a value is held: how many rows and columns it has; 1 where it is the same for all."""

    rows: int = 1
    columns: int = 1

    @property
    def kind(self) -> str:
        if self.rows > 1:
            return "tile" if self.columns > 1 else ROW
        return COLUMN if self.columns > 1 else "scalar"


def shape_of(value: Value, orientation: str) -> Shape:
    """Orientation matters for values of rank 1."""
    sides = value.shape
    if len(sides) == 2:
        return Shape(*sides)
    if not sides:
        return Shape()
    return Shape(rows=sides[0]) if orientation == ROW else Shape(columns=sides[0])
