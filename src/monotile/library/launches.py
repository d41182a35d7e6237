"""Launches of a call: planned by a builder, then prepared to pick their arrays from those of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..launch.kernel import Plan


class Scale:
    """Placeholder for the scale, a number that each call passes to its kernels."""


SCALE = Scale()


class PlannedLaunch(NamedTuple):
    """A launch of a call in the making."""

    plan: Plan
    places: list[tuple[str, int]]  # of its arrays
    scalars: list[Any]  # SCALE may be the first
    threads: int | None


class LaunchStep(NamedTuple):
    """A launch of a prepared call."""

    launch: Callable[..., None]
    bound: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]]  # its arrays' addresses among those of the call
    takes_scale: bool  # the first scalar is the call's scale
    scalars: tuple[Any, ...]
    threads: int | None


def steps_of(launches: Sequence[PlannedLaunch], counts: Sequence[tuple[str, int]]) -> list[LaunchStep]:
    """Launches whose arrays are picked from those of all kinds, in this order, with their counts."""
    first, at = {}, 0
    for kind, count in counts:
        first[kind], at = at, at + count
    steps = []
    for plan, places, scalars, threads in launches:
        takes_scale = bool(scalars) and scalars[0] is SCALE
        pick = _picker([first[kind] + n for kind, n in places])
        rest = tuple(scalars[1:] if takes_scale else scalars)
        steps.append(LaunchStep(plan.program.launch, plan.bound, pick, takes_scale, rest, threads))
    return steps


def _picker(at: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(at) > 1:
        return itemgetter(*at)
    return lambda items: [items[n] for n in at]
