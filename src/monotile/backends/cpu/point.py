"""A position in the loops of a nest."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir import Value
from .axes import Axis
from .emit import Index, Reg

Panel = tuple[Index, int] | None  # number of the panel, and how many of its lanes the tile fills


@dataclass
class Point:
    """A position in the loops of a nest: an index along each axis, the axis of the lanes, and values computed there."""

    at: dict[Axis, Index]
    lane: Axis | None = None
    valid: int | None = None  # lanes of the tile in this vector, when not all
    edge: bool = False  # tensors may end here
    panel: tuple[Index, Index] | None = None  # the panel and the vector in it, for lanes along the panel axis
    memo: dict[Value, Reg] = field(default_factory=dict)
    group: int = 0  # number of the vector in its register group

    def translated(self, mine: tuple[Axis | None, ...], theirs: tuple[Axis | None, ...]) -> Point:
        """Return the same position in the axes of another value."""
        if all(b is None or a is b for a, b in zip(mine, theirs, strict=True)):
            return self
        at = {b: self.at[a] if a is not None else 0 for a, b in zip(mine, theirs, strict=True) if b is not None}
        lane = next((b for a, b in zip(mine, theirs, strict=True) if a is self.lane and a is not None), None)
        return Point(at, lane, self.valid, self.edge, self.panel if lane is self.lane else None)


def partly_filled(count: int, width: int) -> int | None:
    """Return how many lanes of a vector are filled; None for all."""
    return count if count < width else None
