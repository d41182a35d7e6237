"""Where a nest stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir import Value
from .axes import Axis
from .emit import Index, Reg


@dataclass
class Point:
    """Where a nest stands: an index along each of its axes, which of them the lanes run along, and what is known
    there."""

    at: dict[Axis, Index]
    lane: Axis | None = None
    valid: int | None = None  # lanes of the tile in this vector, when not all
    edge: bool = False  # whether tensors may end here
    panel: tuple[Index, int] | None = None  # the panel and the vector in it, for lanes along the panel axis
    memo: dict[Value, Reg] = field(default_factory=dict)
    group: int = 0  # which vector of its register group this is

    def translated(self, mine: tuple[Axis | None, ...], theirs: tuple[Axis | None, ...]) -> Point:
        """The same place for a value whose dimensions are called otherwise."""
        if all(b is None or a is b for a, b in zip(mine, theirs, strict=True)):
            return self
        at = {b: self.at[a] if a is not None else 0 for a, b in zip(mine, theirs, strict=True) if b is not None}
        lane = next((b for a, b in zip(mine, theirs, strict=True) if a is self.lane and a is not None), None)
        return Point(at, lane, self.valid, self.edge, self.panel)
