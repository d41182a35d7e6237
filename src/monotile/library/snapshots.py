"""What the functions of a call read, as it is when the call is made. Gradients are computed later, when the caller has
gone on: numbers are read as they were, and it is an error if anything else has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import CapturedChanged
from ..launch.captures import captures, captures_and_reads, make_argument, number_of, reading_earlier
from ..launch.reads import Read
from .torch_calls import is_tensor

MAX_COMPARED = 1 << 16  # bytes of an array of NumPy: the contents of larger ones are not compared
PLAIN = (bool, int, float, str)  # constants that are the same if they are equal


class Snapshot:
    """The arrays, numbers and constants that functions read, at one moment."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = tuple(functions)
        found, self.reads = captures_and_reads(self.functions)
        self.arrays, self.numbers = list(found.arrays.values()), found.numbers
        self.states = [_state(array) for array in self.arrays]

    def __bool__(self) -> bool:
        """True if functions read anything."""
        return bool(self.arrays or self.numbers or self.reads)

    def is_current(self) -> bool:
        """True if nothing has changed."""
        if self.states != [_state(array) for array in self.arrays]:
            return False
        return not self._changes() and captures(self.functions).numbers == self.numbers

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let calls on the functions read the numbers of the snapshot. Raise an error if something else has changed."""
        for array, state in zip(self.arrays, self.states, strict=True):
            if _state(array) != state:
                raise _changed(self._name_of(array), "was changed in place")
        numbers = dict(self.numbers)
        changes = self._changes()
        for place, read in changes.items():
            earlier = number_of(read.value)
            if earlier is None or number_of(read.now()) is None:
                raise _changed(read.name, "was bound to something else")
            numbers[place] = earlier
            if read.is_global:
                make_argument(place)
        with reading_earlier(numbers):
            if changes:
                for place in changes.keys() - captures(self.functions).numbers.keys():
                    raise _changed(changes[place].name, "was bound to another number")
            yield

    def _changes(self) -> dict[Any, Read]:
        """Return what is bound to something else now, by where it is bound, as it was."""
        found = {}
        for place, read in self.reads.items():
            before, now = read.value, read.now()
            if before is not now and not (type(before) is type(now) and type(now) in PLAIN and before == now):
                found[place] = read
        return found

    def _name_of(self, array: Any) -> str:
        return next((read.name for read in self.reads.values() if read.value is array), "")


def _state(array: Any) -> Any:
    """Return what tells whether an array was written: torch counts writes, contents of NumPy arrays are compared. None
    where a change cannot be told."""
    if is_tensor(array):
        return None if array.is_inference() else array._version
    if isinstance(array, np.ndarray) and array.nbytes <= MAX_COMPARED:
        return array.tobytes()
    return None


def _changed(name: str, how: str) -> CapturedChanged:
    what = repr(name) if name else "an array"
    return CapturedChanged(
        f"{what}, which score_mod or mask_mod reads, {how} after the call whose gradients are computed; change it "
        "after backward, or let the function read a copy"
    )
