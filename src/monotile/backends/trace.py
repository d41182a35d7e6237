"""The values of one program, line by line: `monotile inspect KERNEL --stage run --at program=3`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import Loc
from ..ir import WRITES, Kernel, Op, Value
from .interpreter import Array, Run
from .races import Races

MAX_LINES = 2000  # of a trace; the rest of a long loop is left out


class Trace(Run):
    """A run of one program that writes down what each line of the source gives its names."""

    def __init__(self, kernel: Kernel, arrays: Sequence[Array], scalars: Sequence[Any]) -> None:
        super().__init__(kernel, arrays, scalars, float64=False, skip_hidden=True)
        self.lines: list[str] = []
        self.place: tuple[str, int] | None = None

    def run(self, program: int) -> str:
        """Run a program of the grid, counted from 0, and return the trace."""
        with np.errstate(all="ignore"):
            grid = self.grid()
            count = int(np.prod(grid))
            if not 0 <= program < count:
                raise IndexError(count)
            self.races = Races(self.kernel, self.arrays, ())
            self.position = tuple(int(n) for n in np.unravel_index(program, grid)) if grid else ()
            self.lines = [f"program {program} of {count}, at {self.position} in the grid {grid}"]
            self.values.clear()
            self.block(self.kernel.body)
        if len(self.lines) > MAX_LINES:
            self.lines[MAX_LINES:] = [f"... and {len(self.lines) - MAX_LINES} lines more"]
        return "\n".join(self.lines) + "\n"

    def set(self, value: Value, content: Any) -> None:
        super().set(value, content)
        if value.hint and value.kind != "dim":
            self._show(value.op.loc if value.op is not None else None, value.hint, value)

    def op(self, op: Op) -> None:
        super().op(op)
        if op.kind in WRITES:
            self._show(op.loc, f"{op.attrs['tensor'].name}[...] =", op.operands[0])

    def _show(self, loc: Loc | None, name: str, value: Value) -> None:
        if not hasattr(self, "races"):  # the size of the grid is computed
            return
        if loc is not None and (loc.file, loc.line) != self.place:
            self.place = loc.file, loc.line
            self.lines.append(f"{loc.line:4}  {loc.text.strip()}")
        label = f"        {name} {value.type}: "
        text = np.array2string(self.values[value], precision=6, threshold=64, edgeitems=4, prefix=label)
        self.lines += f"{label}{text}".splitlines()
