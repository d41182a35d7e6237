"""Where the elements of a tile live: which lane and register of which simdgroup.

A program is one or more simdgroups. A tile follows one of three families:

- `Fragments`: a lane holds what an 8x8 simdgroup matrix gives it, two neighbours of one row in every 8x8 square.
  Squares are dealt out to the simdgroups by rows or by columns.
- `Lanes`: columns over the 32 lanes of one simdgroup, in runs that one vector load fills; every lane holds all rows.
- `Spread`: a tile of few rows, such as sums over lanes leave: rows and columns together fill the 32 lanes once.

In all of them the row of an element depends on the first index of its register only, its column on the others. So a
vector along rows is `v[rows held]`, one along columns `v[columns held]`, and elementwise code is the same for all. What
a side of 1 leaves is a vector, or a scalar that every lane holds. Sides are padded: elements outside the tile exist in
registers, and are never loaded, stored, folded or multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ...ir import Value

ROW, COLUMN = "row", "column"
LANES = 32
Index = tuple[str, ...]


@dataclass(frozen=True)
class Family(ABC):
    """Texts speak of `lane` and `sg`; for fragments of `fm` and `fn`, the lane's first row and column."""

    rows_over: int = 1  # simdgroups that share out the rows
    columns_over: int = 1

    @property
    def simdgroups(self) -> int:
        return self.rows_over * self.columns_over

    @property
    @abstractmethod
    def along_row(self) -> tuple[int, ...]:
        """Lanes that differ in these bits hold other columns of the same row."""

    @property
    @abstractmethod
    def along_column(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def first_of_row(self) -> str:
        """Picks one of the lanes that hold the same row; "" where there is one."""

    @property
    @abstractmethod
    def first_of_column(self) -> str: ...

    @abstractmethod
    def rows_held(self, side: int) -> int: ...

    @abstractmethod
    def columns_held(self, side: int) -> tuple[int, ...]:
        """Sizes of the loops over a lane's columns; a last loop of several is over neighbours."""

    @abstractmethod
    def row(self, index: str) -> str: ...

    @abstractmethod
    def column(self, index: Index, side: int) -> str: ...

    @abstractmethod
    def row_padded(self, side: int) -> bool:
        """Whether some lane holds a row that is not there."""

    @abstractmethod
    def column_padded(self, side: int) -> bool: ...

    def row_place(self, row: str) -> tuple[str, str] | None:
        """The register and lane of a row that all lanes ask for."""
        return None

    def column_loops(self, side: int) -> list[tuple[str, int]]:
        return list(zip("je", self.columns_held(side), strict=False))

    def neighbours(self, side: int) -> int:
        """How many columns next to each other a lane holds in a run."""
        held = self.columns_held(side)
        return held[1] if len(held) > 1 else 1


class Fragments(Family):
    along_row = (1, 8)
    along_column = (2, 4, 16)
    first_of_row, first_of_column = "fn == 0", "fm == 0"  # of all simdgroups, where they share that side out

    def rows_held(self, side: int) -> int:
        return -(-side // (8 * self.rows_over))

    def columns_held(self, side: int) -> tuple[int, ...]:
        return -(-side // (8 * self.columns_over)), 2

    def row(self, index: str) -> str:
        return scaled("fm", index, 8 * self.rows_over)

    def column(self, index: Index, side: int) -> str:
        return plus(scaled("fn", index[0], 8 * self.columns_over), index[1])

    def row_padded(self, side: int) -> bool:
        return side % (8 * self.rows_over) != 0

    def column_padded(self, side: int) -> bool:
        return side % (8 * self.columns_over) != 0


class Lanes(Family):
    along_row = (1, 2, 4, 8, 16)
    along_column = ()
    first_of_row, first_of_column = "lane == 0", ""

    def run(self, side: int) -> int:
        return next(n for n in (4, 2, 1) if n == 1 or (side % n == 0 and LANES * n <= side))

    def rows_held(self, side: int) -> int:
        return side

    def columns_held(self, side: int) -> tuple[int, ...]:
        run = self.run(side)
        count = -(-side // (LANES * run))
        return (count, run) if run > 1 else (count,)

    def row(self, index: str) -> str:
        return index

    def column(self, index: Index, side: int) -> str:
        run = self.run(side)
        first = scaled("lane" if run == 1 else f"{run} * lane", index[0], LANES * run)
        return plus(first, index[1]) if run > 1 else first

    def row_padded(self, side: int) -> bool:
        return False

    def column_padded(self, side: int) -> bool:
        return side % (LANES * self.run(side)) != 0

    def row_place(self, row: str) -> tuple[str, str] | None:
        return row, "0"


@dataclass(frozen=True)
class Spread(Family):
    rows: int = 1  # a power of two

    @property
    def columns(self) -> int:
        return LANES // self.rows

    @property
    def along_row(self) -> tuple[int, ...]:
        return tuple(bit for bit in (16, 8, 4, 2, 1) if bit < self.columns)

    @property
    def along_column(self) -> tuple[int, ...]:
        return tuple(bit for bit in (1, 2, 4, 8, 16) if bit >= self.columns)

    @property
    def first_of_row(self) -> str:
        return f"lane % {self.columns} == 0" if self.rows > 1 else "lane == 0"

    @property
    def first_of_column(self) -> str:
        return f"lane < {self.columns}" if self.rows > 1 else ""

    def rows_held(self, side: int) -> int:
        return 1

    def columns_held(self, side: int) -> tuple[int, ...]:
        return (-(-side // self.columns),)

    def row(self, index: str) -> str:
        return f"lane / {self.columns}" if self.rows > 1 else "0"

    def column(self, index: Index, side: int) -> str:
        return scaled(f"lane % {self.columns}" if self.rows > 1 else "lane", index[0], self.columns)

    def row_padded(self, side: int) -> bool:
        return side != self.rows

    def column_padded(self, side: int) -> bool:
        return side % self.columns != 0

    def row_place(self, row: str) -> tuple[str, str] | None:
        return "0", f"{row} * {self.columns}" if row != "0" else "0"


def scaled(base: str, index: str, factor: int) -> str:
    """base + factor * index."""
    if index == "0":
        return base
    return f"{base} + {int(index) * factor}" if index.isdigit() else f"{base} + {factor} * {index}"


def plus(text: str, more: str) -> str:
    return text if more == "0" else more if text == "0" else f"{text} + {more}"


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
