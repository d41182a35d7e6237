"""Races between programs of a grid, found by the interpreter: which program wrote and read each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RaceBetweenPrograms
from ..ir import Kernel, Op

Array = npt.NDArray[Any]
Region = tuple[Any, ...]  # slices or arrays of positions, one per dimension
SEVERAL = -1
CURE = "give every element to one program: the one that writes it reads it, and no other program does either"
STORE_CURE = "store at positions that all differ; those outside of the tensor, such as -1, are left out"


class Races:
    """The last program that wrote each element of the tensors that a kernel writes, and the one that read it; 0 is
    none. Programs are counted from 1."""

    def __init__(self, kernel: Kernel, arrays: Sequence[Array], grid: tuple[int, ...]) -> None:
        self.grid, self.program = grid, 0
        tracked = kernel.written if int(np.prod(grid)) > 1 else ()
        self.writers = {n: np.zeros(arrays[n].shape, np.int64) for n in tracked}
        self.readers = {n: np.zeros(arrays[n].shape, np.int64) for n in tracked}

    def read(self, op: Op, region: Region) -> None:
        n = op.attrs["tensor"].index
        if n not in self.writers:
            return
        self._require(op, self.writers[n], region, "{1} reads what {0} wrote")
        seen = self.readers[n][region]
        self.readers[n][region] = np.where((seen == 0) | (seen == self.program), self.program, SEVERAL)

    def write(self, op: Op, region: Region) -> None:
        n = op.attrs["tensor"].index
        if op.kind == "scatter":
            self._require_distinct(op, region)
        if n not in self.writers:
            return
        self._require(op, self.writers[n], region, "{0} and {1} both write")
        self._require(op, self.readers[n], region, "{1} writes what {0} read")
        self.writers[n][region] = self.program

    def _require(self, op: Op, programs: Array, region: Region, found: str) -> None:
        others = (programs[region] != 0) & (programs[region] != self.program)
        if not others.any():
            return
        positions = [axis[region][others][0] for axis in list[Array](np.indices(programs.shape))]
        other = int(programs[region][others][0])
        names = "another program" if other == SEVERAL else self._name(other), self._name(self.program)
        raise self._error(op, found.format(*names), positions)

    def _require_distinct(self, op: Op, region: Region) -> None:
        places = np.stack([np.ravel(positions) for positions in region])
        _, first, counts = np.unique(places, axis=1, return_index=True, return_counts=True)
        if (counts > 1).any():
            twice = places[:, first[counts > 1][0]]
            raise self._error(op, "one store writes twice to", list(twice), STORE_CURE)

    def _error(self, op: Op, found: str, positions: Sequence[int], cure: str = CURE) -> RaceBetweenPrograms:
        element = f"{op.attrs['tensor'].name}[{', '.join(str(int(p)) for p in positions)}]"
        return RaceBetweenPrograms(f"{found} {element}: which comes first is not known", cure, op.loc)

    def _name(self, program: int) -> str:
        position = [int(n) for n in np.unravel_index(program - 1, self.grid)]
        return f"program {position[0] if len(position) == 1 else tuple(position)}"
