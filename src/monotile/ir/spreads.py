"""Spread loads: tiles that repeat elements of the slice of memory that they are loaded from."""

from __future__ import annotations

from typing import NamedTuple

from .ops import Op


class Spread(NamedTuple):
    """A side of a loaded tile that repeats elements of memory: its element i is (i * factor + offset) // divisor of the
    slice."""

    extent: int  # of the tile
    factor: int
    offset: int
    divisor: int

    def at(self, i: int) -> int:
        return (i * self.factor + self.offset) // self.divisor

    @property
    def memory(self) -> int:
        """The extent of the slice."""
        return self.at(self.extent - 1) + 1


def spreads(op: Op) -> tuple[Spread | None, ...]:
    """Return, for each dimension of a load's tensor, how the tile repeats its elements; None where it does not."""
    found: tuple[Spread | None, ...] = op.attrs.get("spread") or (None,) * op.attrs["tensor"].rank
    return found
