"""Launches of a call: planned by a builder, then prepared to pick their arrays from those of the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..backends.base import picker
from ..launch.plans import Plan
from ..runtime.tensors import View


class Scale:
    """Placeholder for the scale, a number that each call passes to its kernels."""


SCALE = Scale()


class PlannedLaunch(NamedTuple):
    """A launch of a call in the making."""

    plan: Plan
    places: list[tuple[str, int]]  # of its arrays
    views: list[View]  # of those that are arguments
    scalars: list[Any]  # SCALE may be the first
    numbers: list[int]  # captured ones that follow, among those of the call
    threads: int | None


class LaunchStep(NamedTuple):
    """A launch of a prepared call."""

    launch: Callable[..., None]
    bound: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]]  # its arrays' addresses among those of the call
    takes_scale: bool  # the first scalar is the scale, that of a call which passes none
    scalars: tuple[Any, ...]
    numbers: tuple[int, ...]  # captured ones that follow
    threads: int | None

    def scalars_of(self, scale: float | None, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Return the scalars for a call with this scale, None for its own, and these captured numbers."""
        scalars = self.scalars if scale is None or not self.takes_scale else (scale, *self.scalars[1:])
        return (*scalars, *[numbers[n] for n in self.numbers]) if self.numbers else scalars


def steps_of(
    launches: Sequence[PlannedLaunch], counts: Sequence[tuple[str, int]], scale: float | None
) -> list[LaunchStep]:
    """Launches whose arrays are picked from those of all kinds, in this order, with their counts. `scale` is that of a
    call which passes none."""
    first, at = {}, 0
    for kind, count in counts:
        first[kind], at = at, at + count
    steps = []
    for plan, places, _, scalars, captured, threads in launches:
        takes_scale = bool(scalars) and scalars[0] is SCALE
        pick = picker([first[kind] + n for kind, n in places])
        numbers = tuple(scale if number is SCALE else number for number in scalars)
        steps.append(LaunchStep(plan.program.launch, plan.bound, pick, takes_scale, numbers, tuple(captured), threads))
    return steps
