"""Groups of programs that go on. A group that ends leaves its multiprocessor idle until the next has started and its
first blocks have arrived: much, where there are few blocks. With `Schedule(laps=True)` a group goes on with other
programs for several *laps*, whose first blocks are fetched while the lap before ends.

The laps of a group are spread over the last size of the grid, to and fro: where programs have more to do the further
they are along it, as under causality, all groups have the same to do. How many laps there are is an argument of the
launch."""

from __future__ import annotations

from collections.abc import Callable

ARGUMENT = "laps"
TRIED, START = (1, 2, 4, 8, 16), 0.1  # numbers of laps, and what a start costs, as a part of one


def enough(groups: Callable[[int], int], cores: int) -> int:
    """How many, where so many laps make `groups(laps)` groups: so that the multiprocessor with the most to do has the
    least, of laps and of starts."""
    return min(TRIED, key=lambda laps: -(-groups(laps) // cores) * (laps + START))
