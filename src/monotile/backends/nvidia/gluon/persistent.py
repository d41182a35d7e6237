"""Persistent tiles. When a CTA exits, its SM idles until the next CTA has started and its first K/V tiles have landed;
for short sequences that start-up dominates. With `Schedule(persistent=True)` each consumer of a CTA computes several
output tiles, and the producer prefetches the next tiles' first blocks during the current epilogue.

Its resident operands, too, where shared memory has two slots for them: a tile reads one while the next one's arrive in
the other. Results leave through shared memory (stores.py); those that lie in the slot of an operand release it when the
next tile begins.

The tiles of a CTA are spread over the last size of the grid, forwards and backwards in turn: where tiles far along it
take longer, as under causality, all CTAs get the same work. The number of tiles is an argument of the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ARGUMENT = "tiles_per_cta"
CANDIDATES = (1, 2, 4, 8, 16)
START_COST = 0.1  # of a CTA, as a fraction of one tile's time


@dataclass(frozen=True)
class ResidentPlace:
    """Where the resident operands of a consumer lie, and which phase of their barriers a tile waits for."""

    slots: int
    persistent: bool

    def index(self, consumer: int | str, tile: str = "cta_tile") -> str:
        return str(consumer) if self.slots == 1 else f"{consumer} * {self.slots} + ({tile} & 1)"

    @property
    def phase(self) -> str:
        if not self.persistent:
            return "0"
        return "cta_tile & 1" if self.slots == 1 else "(cta_tile >> 1) & 1"


def tiles_per_cta(ctas: Callable[[int], int], multiprocessors: int) -> int:
    """Return the tiles per CTA that minimise the makespan: waves x (tiles per CTA + start-up cost). `ctas` counts the
    CTAs for a number of tiles per CTA."""
    return min(CANDIDATES, key=lambda tiles: -(-ctas(tiles) // multiprocessors) * (tiles + START_COST))
