"""Block maps that outlive their call: kept with what they were made from, and used again while that is the same.

A map is a function of the numbers and arrays that a mask_mod captures. Arrays in this machine's memory are compared by
contents, which takes a pass over them. On a GPU that would wait for it, and torch counts writes: a map holds while
identity, address and version are the same. Where nothing counts writes (inference tensors, MLX) a map is made at every
call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..runtime import tensors
from ..runtime.arrays import Library
from ..runtime.tensors import View
from .launches import LaunchStep

Array = Any
Maps = tuple[list[Array], list[int]]  # maps and their addresses
MAX_COPIED = 1 << 24  # bytes of captured arrays that are compared: beyond, a map is made at every call
MAX_KEPT = 1 << 26  # bytes of maps, and of copies they were made from, that one store keeps
MAX_ENTRIES = 256  # of one store: each belongs to calls of one shape


class Stamp(Protocol):
    """The state of an array when a map was made from it."""

    def holds(self, array: Array) -> bool: ...


class Contents(NamedTuple):
    """A copy of an array in this machine's memory."""

    data: bytes

    def holds(self, array: Array) -> bool:
        return _contents(array) == self.data


class Version(NamedTuple):
    """How often torch has seen a tensor written."""

    tensor: weakref.ref[Any]
    address: int
    version: int

    def holds(self, array: Array) -> bool:
        same: bool = self.tensor() is array and self.address == tensors.address(array)
        return same and bool(self.version == array._version)


class Identity(NamedTuple):
    """An array that is promised not to change."""

    array: Array

    def holds(self, array: Array) -> bool:
        return self.array is array


def stamps(arrays: Sequence[Array], *, promised: bool) -> list[Stamp] | None:
    """Return the state of arrays; None where a later change could not be told, unless there shall be none."""
    found: list[Stamp] = []
    copied = 0
    for array in arrays:
        if tensors.device(array) == "cpu":
            copied += array.nbytes
            if copied <= MAX_COPIED:
                found.append(Contents(_contents(array)))
                continue
        elif not tensors.is_mlx(array) and not array.is_inference():
            found.append(Version(weakref.ref(array), tensors.address(array), array._version))
            continue
        if not promised:
            return None
        found.append(Identity(array))
    return found


def _contents(array: Array) -> bytes:
    """The elements of an array in this machine's memory."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    found: bytes = array.tobytes()
    return found


class KeptMaps:
    """Maps by where they are used and the addresses of captured arrays. The oldest leave first. `promised`: arrays
    whose writes nobody counts do not change."""

    def __init__(self, *, promised: bool = False) -> None:
        self._promised = promised
        self._found: dict[Any, tuple[list[Stamp], Maps, int]] = {}
        self._in_graphs: list[Maps] = []  # recorded graphs read them: they stay as long as this store
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, key: Any, captured: Sequence[Array]) -> Maps | None:
        entry = self._found.get(key)
        if entry is None or not all(stamp.holds(a) for stamp, a in zip(entry[0], captured, strict=True)):
            return None
        return entry[1]

    def find_for_graph(self, place: Any, made_of: Sequence[Any], captured: Sequence[Array]) -> Maps | None:
        """Return maps that some queue has made already, for launches of a graph that is being recorded."""
        for key in list(self._found):
            if key[0] == place and key[2:] == tuple(made_of):
                found = self.find(key, captured)
                if found is not None:
                    if all(kept is not found for kept in self._in_graphs):
                        self._in_graphs.append(found)
                    return found
        return None

    def stamps(self, captured: Sequence[Array]) -> list[Stamp] | None:
        return stamps(captured, promised=self._promised)

    def keep(self, key: Any, made_from: list[Stamp], maps: Maps, size: int) -> None:
        size += sum(len(stamp.data) for stamp in made_from if isinstance(stamp, Contents))
        with self._lock:
            self._drop(key)
            self._found[key] = made_from, maps, size
            self._bytes += size
            while self._bytes > MAX_KEPT or len(self._found) > MAX_ENTRIES:
                self._drop(next(iter(self._found)))

    def clear(self) -> None:
        """Forget all maps."""
        with self._lock:
            self._found.clear()
            self._bytes = 0

    def _drop(self, key: Any) -> None:
        entry = self._found.pop(key, None)
        if entry is not None:
            self._bytes -= entry[2]


OF_FUNCTIONS = KeptMaps()  # of calls with a plain mask_mod


class MapStore(Protocol):
    """What a call needs of a block mask: the maps it keeps, and whether it fits."""

    maps: KeptMaps

    def check(self, scores: tuple[int, ...]) -> None:
        """Raise an error unless the mask fits scores of these sides."""


class MapMaker:
    """Makes a call's kept maps from captured arrays. `steps` are launches as a prepared call has them, `reads` the
    captured arrays they read, and `keys` tell maps of one shape from each other."""

    def __init__(
        self, lib: Library, views: Sequence[View], steps: Sequence[LaunchStep], reads: Sequence[int],
        keys: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.lib, self.device, self.steps, self.reads = lib, views[0].device, steps, reads
        self.templates = [lib.template(view) for view in views]
        self.bytes = sum(tensors.span(v)[1] for v in views)
        self.numbers = sorted({n for step in steps for n in step.numbers})
        programs = tuple([step.launch for step in steps])  # others once a number that the function reads has changed
        self.key = type(lib), tuple(views), keys, programs

    def maps(
        self, captured: Sequence[Array], addresses: Sequence[int], numbers: Sequence[Any], of: MapStore | None
    ) -> Maps:
        """Return the maps that a block mask, or else this process, keeps for these arrays and numbers, or make them.
        Launches of one queue run in order, so that each queue has maps of its own. In a graph that is recorded a
        function's are made by the graph, each time it runs; a block mask's are those that it has, as arguments are."""
        arrays = [captured[n] for n in self.reads]
        made_of = [*[addresses[n] for n in self.reads], *[repr(numbers[n]) for n in self.numbers]]  # -0.0 is not 0.0
        store, place = (OF_FUNCTIONS, self) if of is None else (of.maps, self.key)
        queue = self.lib.queue(self.device)
        if queue is None:
            found = None if of is None else store.find_for_graph(place, made_of, arrays)
            return found or self._make(captured, addresses, numbers)
        key = place, queue, *made_of
        found = store.find(key, arrays)
        if found is None:
            made_from = store.stamps(arrays)
            found = self._make(captured, addresses, numbers)
            if made_from is not None:
                store.keep(key, made_from, found, self.bytes)
        return found

    def _make(self, captured: Sequence[Array], addresses: Sequence[int], numbers: Sequence[Any]) -> Maps:
        made = [self.lib.allocate(template) for template in self.templates]
        maps, places = [array for array, _ in made], [address for _, address in made]
        every, all_places = [*captured, *maps], [*addresses, *places]
        for step in self.steps:
            scalars = step.scalars_of(None, numbers)
            step.launch(step.bound, step.pick(every), step.pick(all_places), scalars, step.threads)
        return maps, places
