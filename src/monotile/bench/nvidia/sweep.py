"""A row that sweeps over the number of queries: what one more of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...library import ops
from ..extend import SWEEP
from . import exact, rows
from .rows import GpuShape, Inputs


@dataclass(frozen=True)
class GpuSweep:
    """Calls of attention that differ in their number of queries only."""

    heads: tuple[int, int]
    Nk: int
    D: int
    sizes: tuple[int, ...] = SWEEP
    dtype: str = "bfloat16"
    quick: bool = False

    @property
    def name(self) -> str:
        words = [f"{self.heads[0]}/{self.heads[1]}", f"Nq{self.sizes[0]}-{self.sizes[-1]}", f"D{self.D}", f"N{self.Nk}"]
        return " ".join(["attention sweep", *words, self.dtype])

    @property
    def tags(self) -> dict[str, Any]:
        return {"op": "sweep", "B": 1, "D": self.D, "N": self.Nk, "dtype": self.dtype, "causal": False, "extra": ""}


def calls(sweep: GpuSweep, device: str) -> dict[int, Inputs]:
    """Return the inputs of each call; the keys are those of all."""
    most = rows.make(GpuShape(1, sweep.heads, max(sweep.sizes), sweep.Nk, sweep.D, dtype=sweep.dtype), device)
    return {n: Inputs(most.q[:, :, :n].contiguous(), most.k, most.v, {}) for n in sweep.sizes}


def checked(sweep: GpuSweep, inputs: dict[int, Inputs]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the calls by name, each of which was checked, and the largest error of them."""
    runs = {n: partial(ops.attention, x.q, x.k, x.v, backend="nvidia") for n, x in inputs.items()}
    verdicts = [exact.check(f"{sweep.name}, Nq{n}", runs[n], exact.sample(x)) for n, x in inputs.items()]
    worst = max(verdicts, key=lambda verdict: verdict["error"] / verdict["allowed"])
    return {str(n): run for n, run in runs.items()}, worst


ROWS = (GpuSweep((32, 8), 32768, 128),)
