"""The processes of `monotile check --sweep`: each runs families of calls (sweep.py), and is replaced after a fault."""

from __future__ import annotations

import collections
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import backends
from ..errors import MonotileError
from . import sweep
from .sweep import CallOutcome

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 300.0  # seconds that one call may take, its kernels' compilation included
MAX_FAULTS = 3  # of a family, after which its other calls are left out
MAX_SKIPPED = 1000  # families in a row that have another name
NOTED = 100  # calls between two lines of progress in a file


@dataclass(frozen=True)
class Sweep:
    """What is swept: `cases` calls in families of `per_family`, drawn from a seed."""

    cases: int
    seed: int = 0
    backend: str = "cpu"
    processes: int = 1
    seconds: float = 0.0  # after which no call begins; 0: no limit
    per_family: int = 40
    first: tuple[int, int] = (0, 0)  # family and number of the first call
    only: str = ""  # families whose name holds this text

    def families(self) -> list[tuple[int, int, int]]:
        """Family, first and end of its calls."""
        family, start = self.first
        left, found = self.cases, []
        while left > 0:
            if self.only.lower() in self._name(family).lower():
                end = min(self.per_family, start + left) if start < self.per_family else start + left
                found.append((family, start, end))
                left -= end - start
            elif family - (found[-1][0] if found else self.first[0]) > MAX_SKIPPED:
                raise MonotileError(f"no family's name holds {self.only!r}; names are like: {self._name(family)}")
            family, start = family + 1, 0
        return found

    def _name(self, family: int) -> str:
        return str(sweep.draw_family(self.seed, family))


@dataclass
class Worker:
    """A process, and the family it runs."""

    process: Any
    pipe: Any
    family: int = -1
    case: int = 0  # that it runs now
    end: int = 0
    since: float = 0.0
    faults: int = 0

    def begin(self, family: int, case: int, end: int) -> None:
        self.family, self.case, self.end, self.since = family, case, end, time.monotonic()
        self.pipe.send((family, case, end))

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@dataclass
class Runner:
    """Gives families to processes and collects the outcomes."""

    sweep: Sweep
    told: Callable[[CallOutcome], None]
    work: Callable[[Any, int, str], None] | None = None  # in a process; None: run families
    outcomes: list[CallOutcome] = field(default_factory=list)
    not_run: int = 0

    def run(self) -> None:
        todo = collections.deque(self.sweep.families())
        deadline = time.monotonic() + self.sweep.seconds if self.sweep.seconds else float("inf")
        workers: list[Worker] = []
        try:
            while todo or workers:
                while todo and len(workers) < self.sweep.processes and time.monotonic() < deadline:
                    workers.append(self._start())
                    workers[-1].begin(*todo.popleft())
                if not workers:
                    break
                self._listen(workers, todo, deadline)
        finally:
            for worker in workers:
                worker.stop()
        self.not_run += sum(end - start for _, start, end in todo)

    def _start(self) -> Worker:
        import multiprocessing  # not before it is needed: it loads modules of the system

        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = there, self.sweep.seed, self.sweep.backend
        process = context.Process(target=self.work or _work, args=arguments, daemon=True)
        process.start()
        there.close()
        return Worker(process, here)

    def _listen(self, workers: list[Worker], todo: Any, deadline: float) -> None:
        """Take what the processes say, and look for those that say nothing any more."""
        from multiprocessing import connection

        ready = connection.wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            outcome = self._outcome(worker, worker.pipe in ready)
            if outcome is None:
                continue
            self.outcomes.append(outcome)
            self.told(outcome)
            worker.case, worker.since = worker.case + 1, time.monotonic()
            late = worker.since > deadline
            if late:
                self.not_run += worker.end - worker.case
            if outcome.fault or late:
                worker.stop()
                workers.remove(worker)
                rest = worker.family, worker.case, worker.end
                if not late and worker.case < worker.end:
                    self._resume(workers, rest, worker.faults + 1)
            elif worker.case == worker.end:
                if todo:
                    worker.faults = 0
                    worker.begin(*todo.popleft())
                else:
                    worker.stop()
                    workers.remove(worker)

    def _resume(self, workers: list[Worker], rest: tuple[int, int, int], faults: int) -> None:
        """Let a new process run the rest of a family."""
        if faults >= MAX_FAULTS:
            self.not_run += rest[2] - rest[1]
            return
        workers.append(self._start())
        workers[-1].faults = faults
        workers[-1].begin(*rest)

    def _outcome(self, worker: Worker, ready: bool) -> CallOutcome | None:
        if ready:
            try:
                found: CallOutcome = worker.pipe.recv()
            except EOFError:
                worker.process.join()
                said = f"the process ended with exit code {worker.process.exitcode}"
                return self._fault(worker, said)
            return found
        if time.monotonic() - worker.since > PATIENCE:
            return self._fault(worker, f"no result after {PATIENCE:.0f} s")
        return None

    def _fault(self, worker: Worker, said: str) -> CallOutcome:
        name = str(sweep.draw_family(self.sweep.seed, worker.family))
        return CallOutcome(worker.family, worker.case, name, said, fault=True)


def _work(pipe: Any, seed: int, backend: str) -> None:
    """Run families until there are no more."""
    while True:
        try:
            family, start, end = pipe.recv()
        except EOFError:
            return
        for case in range(start, end):
            outcome = outcome_of(seed, family, case, backend)
            pipe.send(outcome)
            if outcome.fault:
                return


def outcome_of(seed: int, family: int, case: int, backend: str) -> CallOutcome:
    """Run a call; whatever it raises is its outcome."""
    try:
        return sweep.run_case(seed, family, case, backend)
    except MonotileError as error:
        problem, fault = f"{type(error).__name__}: {error}", False
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        first = str(error).partition("\n")[0]
        problem, fault = f"{type(error).__name__}: {first} ({where.name}, line {where.lineno})", True
    return CallOutcome(family, case, str(sweep.draw_family(seed, family)), problem, fault)


def run(console: Console, wanted: Sweep) -> bool:
    """Show progress, what failed and how to repeat it; return True if every call was right and nothing was left out for
    lack of time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    backends.usable(wanted.backend)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    begin = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"sweeping {wanted.backend}", total=wanted.cases)

        def told(outcome: CallOutcome) -> None:
            bar.advance(task)
            if outcome.problem:
                repeat = f"--sweep 1 --seed {wanted.seed} --from {outcome.family}.{outcome.case}"
                text = f"{repeat}\n  {outcome.name}\n  {outcome.problem}"
                console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
            if not console.is_terminal and len(runner.outcomes) % NOTED == 0:
                failed = sum(bool(o.problem) for o in runner.outcomes)
                text = f"{len(runner.outcomes)} calls, {failed} failed, {time.monotonic() - begin:.0f} s"
                console.print(text, highlight=False)

        runner = Runner(wanted, told)
        runner.run()
    failed = sum(bool(o.problem) for o in runner.outcomes)
    faults = sum(o.fault for o in runner.outcomes)
    families = len({o.family for o in runner.outcomes})
    took = f"{time.monotonic() - begin:.0f} s, {wanted.processes} processes"
    text = f"{len(runner.outcomes) - failed} of {len(runner.outcomes)} calls in {families} families hold on "
    text += f"{wanted.backend}, seed {wanted.seed}; {faults} faults; {runner.not_run} not run; {took}"
    console.print(text, highlight=False, soft_wrap=True)
    return failed == 0 and runner.not_run == 0
