"""Calls with another number of keys than a planned one, as each step of decoding makes.

In a plan of attention on plain keys the number of keys decides the choice of blocks and splits, the number of threads,
and the lengths and strides that are bound to programs. Where the choice is the same, everything else is too, and the
call is prepared from the earlier one without its checks being repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..backends.base import Program
from ..backends.choices import AttentionChoice, AttentionProblem
from ..ir.ops import MAX_LENGTH
from ..launch.layouts import layout_of
from ..runtime.arrays import Library
from ..runtime.tensors import View
from .launches import LaunchStep, PlannedLaunch

AHEAD = 16  # calls that are made with the next one of a growing cache: they take a tenth of the time of a first one
MOST_ENDS = 16  # of growing caches that take turns
MOST_CHOICES = 8  # of calls alike: keys in different numbers of splits
K, V = ("input", 1), ("input", 2)  # places of keys and values among the arrays of a call


class Growth(NamedTuple):
    """What a plan depends on that the number of keys decides."""

    problem: AttentionProblem
    choice: AttentionChoice
    flops_per_key: int
    bytes_per_key: int


class GrowingLaunch(NamedTuple):
    """A launch that reads the keys of a call: which of the call's steps it is, and the words that its program is bound
    to, with the places in them of the lengths and strides of k and v."""

    step: int
    program: Program
    words: list[int]
    of_k: slice
    of_v: slice | None  # None where values are read with the keys


class GrowingCall:
    """A prepared call and what it was made from: `prepared` is a PreparedCall, `builder` its CallBuilder."""

    def __init__(self, prepared: Any, builder: Any) -> None:
        self.prepared, self.builder = prepared, builder
        self._step = builder.choices.keys_of_a_choice(builder.growth.problem, builder.growth.choice)
        # The greatest numbers of keys that calls were made for: caches that grow by a key ask for the next one.
        self.ends = deque([builder.growth.problem.keys], maxlen=MOST_ENDS)
        self._same: dict[int, bool] = {}  # by blocks of keys: whether the choice is that of the prepared call
        self._launches = _growing_launches(builder.launches)

    def with_keys(self, keys: int, k: tuple[int, ...], v: tuple[int, ...]) -> Any:
        """Return the call on another number of keys, given the lengths and strides of k and v; None where it has to be
        planned. In a model this code runs once a step, when other work has filled the caches: it is short."""
        same = self._same.get((keys - 1) // self._step)
        if same is False or (same is None and not self._has_choice(keys)):
            return None
        builder, prepared = self.builder, self.prepared
        _, _, flops_per_key, bytes_per_key = builder.growth
        threads = builder.threads_for(flops_per_key * keys, bytes_per_key * keys)
        steps = list(prepared.steps)
        for n, program, bound, of_k, of_v in self._launches:
            words = bound.copy()
            words[of_k] = k
            if of_v is not None:
                words[of_v] = v
            launch, _, pick, takes_scale, scalars, numbers, _ = steps[n]
            words_bound = program.bind(words, builder.device)
            steps[n] = LaunchStep(launch, words_bound, pick, takes_scale, scalars, numbers, threads)
        made = object.__new__(type(prepared))
        made.__dict__.update(prepared.__dict__)
        made.steps = steps
        return made

    def _has_choice(self, keys: int) -> bool:
        problem, choice, _, _ = self.builder.growth
        same: bool = self.builder.choices.attention(replace(problem, keys=keys)) == choice
        self._same[(keys - 1) // self._step] = same
        return same


def _growing_launches(launches: Sequence[PlannedLaunch]) -> list[GrowingLaunch]:
    found = []
    for n, launch in enumerate(launches):
        words: list[int] = []
        places: dict[tuple[str, int], slice] = {}
        for place, view in zip(launch.places, launch.views, strict=True):
            at = len(words) + 1  # behind the address
            words += layout_of(view).words
            places[place] = slice(at, len(words))
        if K in places:
            words += [0] * len(launch.plan.scalars)
            found.append(GrowingLaunch(n, launch.plan.program, words, places[K], places.get(V)))
    return found


class Families:
    """Calls from which others are made, by what these have in common: by `family_key` and by `signature_key`. Each has
    a few choices, since sequences of different lengths may take turns; those made last come first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_views: dict[Any, list[GrowingCall]] = {}
        self._by_signatures: dict[Any, list[GrowingCall]] = {}

    def clear(self) -> None:
        self._by_views.clear()
        self._by_signatures.clear()

    def grown(self, signatures: Sequence[Any], options: tuple[Any, ...]) -> list[tuple[Sequence[Any], Any]]:
        """Return the call with these signatures, made of one that was seen, and behind it the next calls of a cache
        that grows by a key at a time, with theirs. An empty list where the call has to be planned."""
        alike = signature_key(signatures, options) if self._by_signatures else None
        if alike is None:
            return []
        for family in self._by_signatures.get(alike[0], ()):
            made = _grown_of(family, alike, signatures, options)
            if made:
                return made
        return []

    def grown_views(self, key: Any, views: Mapping[str, View | None]) -> tuple[Any, GrowingCall | None]:
        """Return the call on these views, made of one that was seen, and what it was made of."""
        k, v = views.get("k"), views.get("v")
        if k is None or v is None:
            return None, None
        for family in self._by_views.get(key, ()):
            made = family.with_keys(k.shape[2], k.shape + k.strides, v.shape + v.strides)
            if made is not None:
                return made, family
        return None, None

    def add(self, key: Any, family: GrowingCall) -> GrowingCall:
        self._add(self._by_views, key, family)
        return family

    def add_signatures(self, signatures: Sequence[Any], options: tuple[Any, ...], family: GrowingCall | None) -> None:
        alike = signature_key(signatures, options) if family is not None else None
        if alike is not None and family is not None:
            self._add(self._by_signatures, alike[0], family)

    def _add(self, families: dict[Any, list[GrowingCall]], key: Any, family: GrowingCall) -> None:
        if len(families) >= self._most:
            families.clear()
        others = [other for other in families.get(key, ()) if other is not family]
        families[key] = [family, *others[: MOST_CHOICES - 1]]


def _grown_of(
    family: GrowingCall, alike: tuple[Any, int], signatures: Sequence[Any], options: tuple[Any, ...]
) -> list[tuple[Sequence[Any], Any]]:
    """Return the calls that `Families.grown` does, of one family."""
    (key, keys), made = alike, []
    for n in range(keys, keys + (1 + AHEAD if keys - 1 in family.ends else 1)):
        if n > keys:
            signatures = [signatures[0], longer(signatures[1]), longer(signatures[2]), *signatures[3:]]
            if signature_key(signatures, options) != (key, n):
                break
        call = family.with_keys(n, *[lengths_and_strides(signatures[at]) for at in (1, 2)])
        if call is None:
            break
        made.append((signatures, call))
    if made:
        family.ends.append(keys + len(made) - 1)
    return made


def signature_key(signatures: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, int] | None:
    """Return what the signatures of calls have in common that differ in the number of keys alone, and that number: in a
    fifth of the time that `family_key` takes. None for arrays of other kinds than NumPy's and torch's, of rows that are
    not contiguous, and for fewer than two keys."""
    k = _grown(signatures[1])
    v = k if signatures[2] == signatures[1] else _grown(signatures[2])
    if k is None or v is None or k[1] != v[1] or not 1 < k[1] <= MAX_LENGTH:
        return None
    return (signatures[0], k[0], v[0], *signatures[3:], *options, type(options[-1])), k[1]


def _grown(signature: Any) -> tuple[tuple[Any, ...], int] | None:
    """A signature without the number of keys, and the number. Strides that are multiples of it count as what they
    are."""
    if type(signature) is not tuple or len(signature) < 3 or len(signature[0]) != 4:
        return None
    (batch, heads, n, size), others = signature[0], signature[2:]
    s0, s1, s2, s3 = strides_of(signature)
    if s3 != 1:
        return None
    of_keys = -1 if s1 == n * s2 else s1
    of_batch = -1 if s0 == heads * s1 else -2 if s0 == n * s2 else s0
    dense = s1 == n * size, s0 == heads * n * size  # strides that a contiguous array has
    return (batch, heads, size, of_batch, of_keys, s2, dense, *others), n


def longer(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the signature that keys probably have with one key more: strides that are multiples of the number of keys
    grow with it."""
    (batch, heads, n, size), (s0, s1, s2, s3) = signature[:2]
    of_keys = (n + 1) * s2 if s1 == n * s2 else s1
    of_batch = heads * of_keys if s0 == heads * s1 else (n + 1) * s2 if s0 == n * s2 else s0
    return (batch, heads, n + 1, size), (of_batch, of_keys, s2, s3), *signature[2:]


def strides_of(signature: tuple[Any, ...]) -> Sequence[int]:
    """The strides of an array in elements; NumPy's are in bytes."""
    strides, dtype = signature[1], signature[2]
    if not isinstance(dtype, np.dtype):
        found: Sequence[int] = strides
        return found
    return [stride // dtype.itemsize for stride in strides]


def lengths_and_strides(signature: tuple[Any, ...]) -> tuple[int, ...]:
    return (*signature[0], *strides_of(signature))


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
