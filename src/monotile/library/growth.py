"""Calls with another number of keys than a planned one, as each step of decoding makes.

In a plan of attention on plain keys the number of keys decides the choice of blocks and splits, the number of threads,
and the lengths and strides that are bound to programs. Where the choice is the same, everything else is too, and the
call is prepared from the earlier one without its checks being repeated."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..backends.choices import AttentionChoice, AttentionProblem
from ..launch.layouts import layout_of
from ..runtime.arrays import Library
from ..runtime.tensors import View


class Growth(NamedTuple):
    """What a plan depends on that the number of keys decides."""

    problem: AttentionProblem
    choice: AttentionChoice
    flops_per_key: int
    bytes_per_key: int


class GrowingCall(NamedTuple):
    """A prepared call and what it was made from."""

    prepared: Any  # a PreparedCall
    builder: Any  # its CallBuilder

    def with_keys(self, k: Any, v: Any) -> Any:
        """Return the call on these keys and values; None where it has to be planned."""
        builder, (problem, choice, flops_per_key, bytes_per_key) = self.builder, self.builder.growth
        keys = k.shape[2]
        if builder.choices.attention(replace(problem, keys=keys)) != choice:
            return None
        threads = builder.threads_for(flops_per_key * keys, bytes_per_key * keys)
        words = {("input", 1): layout_of(k).words, ("input", 2): layout_of(v).words}
        made = copy.copy(self.prepared)
        made.steps = list(made.steps)
        for n, launch in enumerate(builder.launches):
            if ("input", 1) in launch.places:
                bound: list[int] = []
                for place, view in zip(launch.places, launch.views, strict=True):
                    bound += words.get(place) or layout_of(view).words
                bound += [0] * len(launch.plan.scalars)
                made.steps[n] = made.steps[n]._replace(
                    bound=launch.plan.program.bind(bound, builder.device), threads=threads
                )
        return made


def family_key(lib: Library, views: Mapping[str, View | None], options: tuple[Any, ...]) -> Any:
    """Return the key of calls that differ in the number of keys alone; None for a call that has no such family."""
    k, v = views["k"], views["v"]
    if k is None or v is None or len(k.shape) != 4 or len(v.shape) != 4 or views.get("mask") is not None:
        return None
    layouts = layout_of(k), layout_of(v)
    if k.shape[2] != v.shape[2] or not k.shape[2] or layouts[0].is_too_long:
        return None
    sides = k.shape[:2], k.shape[3], v.shape[:2], v.shape[3]
    others = type(lib), views["q"], views.get("sinks"), *options, type(options[-1])
    key = *others, layouts[0].pattern, layouts[1].pattern, *sides
    try:
        hash(key)
    except TypeError:  # an option of a wrong kind, which the plan refuses
        return None
    return key
