"""Persistent tiles. When a CTA exits, its SM idles until the next CTA has started and its first K/V tiles have landed;
for short sequences that start-up dominates. With `Schedule(persistent=True)` each consumer of a CTA computes several
output tiles, and the producer prefetches the next tiles' first blocks during the current epilogue.

The tiles of a CTA are spread over the last size of the grid, forwards and backwards in turn: where tiles far along it
take longer, as under causality, all CTAs get the same work. The number of tiles is an argument of the launch."""

from __future__ import annotations

from collections.abc import Callable

ARGUMENT = "tiles_per_cta"
CANDIDATES = (1, 2, 4, 8, 16)
START_COST = 0.1  # of a CTA, as a fraction of one tile's time


def tiles_per_cta(ctas: Callable[[int], int], multiprocessors: int) -> int:
    """Return the tiles per CTA that minimise the makespan: waves x (tiles per CTA + start-up cost). `ctas` counts the
    CTAs for a number of tiles per CTA."""
    return min(CANDIDATES, key=lambda tiles: -(-ctas(tiles) // multiprocessors) * (tiles + START_COST))
