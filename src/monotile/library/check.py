"""`monotile check`: run every registered case on a backend and compare it with float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import backends
from ..errors import MonotileError
from . import registry
from .registry import Case, Verdict

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Result:
    """A case with the verdict on each output, or the reason why it did not run."""

    case: Case
    verdicts: tuple[Verdict, ...]
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and all(v.ok for v in self.verdicts)

    @property
    def share(self) -> float:
        """The largest error of an output as a share of its tolerance; above 1 is a failure."""
        if self.problem:
            return float("inf")
        return max(
            (v.error / v.allowed if v.allowed else float("inf") if v.error else 0.0 for v in self.verdicts), default=0.0
        )


def cases(only: str = "") -> list[Case]:
    return [case for case in registry.CHECKS if only.lower() in case.name.lower()]


def results(wanted: list[Case], backend: str | None = None) -> Iterator[Result]:
    """Run one case after the other; an error of a case is its result, and the others still run."""
    for case in wanted:
        try:
            yield Result(case, tuple(registry.verdicts(case, backend)))
        except MonotileError as error:
            yield Result(case, (), f"{type(error).__name__}: {error}")


def run(console: Console, *, backend: str = "cpu", only: str = "") -> bool:
    """Show progress, a table and the worst case; return True if every case holds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    backends.usable(backend)
    place = f"{backend} ({registry.gpu_of(backend) or 'the runner, on the CPU'})" if backend == "metal" else backend
    wanted = cases(only)
    if not wanted:
        raise MonotileError(f"no case's name holds {only!r}; the ops are {', '.join(registry.OPS)}")
    table = Table("case", "output", "error", "allowed", "")
    found = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(f"checking on {place}", total=len(wanted))
        for result in results(wanted, backend):
            found.append(result)
            for verdict in result.verdicts:
                mark = "[green]holds[/]" if verdict.ok else "[red]FAILS[/]"
                table.add_row(result.case.name, verdict.output, f"{verdict.error:.2g}", f"{verdict.allowed:.2g}", mark)
            if result.problem:
                table.add_row(result.case.name, "", "", "", "[red]FAILS[/]")
            bar.advance(task)
    console.print(table)
    failed = [r for r in found if not r.ok]
    worst = max(found, key=lambda r: r.share)
    console.print(f"{len(found) - len(failed)} of {len(found)} cases hold on {place}", highlight=False)
    console.print(
        f"worst: {worst.case.name}, at {worst.share:.0%} of what is allowed",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for result in failed:
        if result.problem:
            console.print(
                f"{result.case.name}: {result.problem}", style="red", markup=False, highlight=False, soft_wrap=True
            )
    return not failed
