"""Run the worker processes of a benchmark and collect their rows in a report."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__, backends
from ..backends.cpu import host as processor
from ..backends.cpu import target
from ..backends.cpu.processors import default_threads
from ..errors import BadThreadCount, MonotileError
from ..runtime import machine
from . import cold_start, limits, peers, suite

if TYPE_CHECKING:
    from rich.console import Console

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
IMPORT_ROW = "import monotile"
REPEATS, QUICK_REPEATS = 5, 1  # of every cold start
QUICK_KERNELS = ("matmul",)
BUSY = 0.5  # load average before the run above which its times are doubtful
SCALING = 0.8  # speedup of the FMA probe per thread below which rows on several threads are doubtful
SHARED = 1.1  # elapsed over processor time above which a row did not have a processor to itself
Report = dict[str, Any]


class WorkerFailed(Exception):
    """A worker process ended with an error."""


def run(
    *, quick: bool, only: str, threads: int | None, console: Console, backend: str = "cpu", commit: str | None = None
) -> Report:
    """Measure the rows that the filter `only` matches, with the code of cpu or of another vector unit ("cpu:avx2").

    They run on `threads` (default: every processor) and on one; a quick run of no filter on `threads` alone. `commit`
    is that of this source, where git cannot tell.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    backends.usable(backend)
    unit = target.target(target.processor(backend.partition(":")[2] or None)).name
    most = threads if threads is not None else default_threads()
    if most < 1:
        raise BadThreadCount(f"threads must be a positive whole number, found {most}")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    groups = [most] if quick and not only else sorted({1, most})
    names = {count: [row.name for row in suite.select(count, only, quick)] for count in groups}
    starts = list(_cold_starts(only, quick))
    total = sum(map(len, names.values())) + len(starts)
    if not total:
        raise MonotileError(f"no row matches the filter {only!r}; try attention, decode, extend, merge or matmul")
    found: list[Report] = []
    started: list[Report] = []
    columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        for count in groups:
            for row in _rows(count, quick, only, unit) if names[count] else ():
                found.append(row)
                left = names[count][names[count].index(row["name"]) + 1 :]
                progress.update(task, advance=1, description=f"{count} x {left[0]}" if left else "")
        progress.update(task, description="cold starts")
        for measure in starts:
            started.append(measure(QUICK_REPEATS if quick else REPEATS, unit))
            progress.advance(task)
    rows, wrong = [r for r in found if "wrong" not in r], [r for r in found if "wrong" in r]
    _add_shares(rows)
    doubts = list(_doubts(rows, load))
    about = {**_setting(quick, unit, commit), "filter": only, "load_before": load, "doubts": doubts}
    return {**about, "rows": rows, "wrong": wrong, "starts": started}


def _cold_starts(only: str, quick: bool) -> Iterator[Callable[[int, str], Report]]:
    for kernel in QUICK_KERNELS if quick and not only else cold_start.KERNELS:
        if suite.matches(f"first call of {kernel}", only):
            yield _first_call(kernel)
    if suite.matches(IMPORT_ROW, only):
        yield _import


def _add_shares(rows: list[Report]) -> None:
    """Set each row's share of its limit.

    The limit for a kind of work and a thread count is the best rate of any probe in any row of the run: a busy moment
    of the machine must not make a row look good. Of several kinds of work, the one that takes longest at its limit is
    the row's limit.
    """
    best: dict[tuple[str, int], tuple[float, str]] = {}
    for limit, threads in _limits(rows):
        rates = ((rate, name) for name, rate in limit["rates_per_s"].items())
        best[limit["kind"], threads] = max(best.get((limit["kind"], threads), (0.0, "")), *rates)
    for limit, threads in _limits(rows):
        limit["best_per_s"], limit["from"] = best[limit["kind"], threads]
        limit["share"] = limit["rate_per_s"] / limit["best_per_s"]
    for row in rows:
        if row.get("limits"):
            row["limit"] = max(row["limits"], key=lambda limit: limit["share"])


def _limits(rows: list[Report]) -> Iterator[tuple[Report, int]]:
    """Yield each measured limit with its thread count."""
    return ((limit, row["threads"]) for row in rows for limit in row.get("limits", ()))


def _doubts(rows: list[Report], load: float) -> Iterator[str]:
    """Yield the reasons why these times may not be the machine's own: other load, or threads that do not scale."""
    if load > BUSY:
        yield f"the load was {load:.1f} before the run: other work took part of the machine"
    shared = [row for row in rows if shared_processor(row)]
    if shared:
        yield f"{len(shared)} rows on one thread had a processor for part of their best time only: see their notes"
    rates = {threads: limit["best_per_s"] for limit, threads in _limits(rows) if limit["kind"] == "flop"}
    for threads, rate in rates.items():
        if 1 in rates and rate < SCALING * threads * rates[1]:
            gain = f"{threads} threads reach {rate / rates[1]:.2f} times the multiply-adds of one"
            yield f"{gain}: the processors were busy or are shared, and rows on {threads} threads say little"


def shared_processor(row: Report) -> float | None:
    """Return elapsed over processor time of a row on one thread, where it shows that the processor was shared."""
    mine = row.get("times", {}).get("monotile", {})
    if row["threads"] > 1 or "cpu_s" not in mine or mine["best_s"] < SHARED * mine["cpu_s"]:
        return None
    return float(mine["best_s"] / mine["cpu_s"])


def _setting(quick: bool, unit: str, commit: str | None) -> Report:
    host = processor.host()
    found = (commit, None) if commit is not None else machine.commit()  # the option wins: git may describe another tree
    return {
        "device": {
            "slug": machine.slug(machine.processor(), host.cpu, *([] if _is_own(unit) else [unit])),
            "processor": machine.processor(),
            "llvm_name": host.cpu,
            "vectors": unit,
            "peers_held_by": _peer_variables(unit),
            "processors": default_threads(),
            "last_level_cache_bytes": limits.last_level_cache(),
            "system": platform.system(),
        },
        "versions": {
            "monotile": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "llvm": host.llvm,
            "torch": peers.torch_version(),
        },
        "commit": found[0] if found else None,
        "dirty": found[1] if found else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
    }


def _is_own(unit: str) -> bool:
    return target.target(processor.host()).name == unit


def _peer_variables(unit: str) -> dict[str, str]:
    """Return the environment of peers that must not use more than a vector unit: none where the machine has no more."""
    return {} if _is_own(unit) else peers.held_to(unit)


# ---- worker processes ------------------------------------------------------------------------------------------------


def _rows(threads: int, quick: bool, only: str, unit: str) -> Iterator[Report]:
    request = json.dumps({"threads": threads, "quick": quick, "only": only})
    environment = {**os.environ, "MONOTILE_CPU": unit, **_peer_variables(unit)}
    environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    command = [sys.executable, "-m", "monotile.bench.worker", request]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)
        finally:
            process.kill() if process.poll() is None and sys.exc_info()[0] else process.wait()
        if process.returncode:
            errors.seek(0)
            raise WorkerFailed(_last_line(errors.read()))


def _seconds(script: str, bytecode: str, **environment: str) -> float:
    """Run a script in a new process and return the seconds it prints.

    Byte code of its imports is kept in a folder, as it is for installed packages.
    """
    command, given = [sys.executable, "-c", script], {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, **environment}
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run(command, env=given, capture_output=True, text=True)
    if result.returncode:
        raise WorkerFailed(_last_line(result.stderr))
    return float(result.stdout)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _first_call(kernel: str) -> Callable[[int, str], Report]:
    """Time a first call in a new process, with an empty disk cache and with the compiled kernel in it."""

    def measure(repeats: int, unit: str) -> Report:
        cold: list[float] = []
        cached: list[float] = []
        script = cold_start.first_call(kernel)
        with tempfile.TemporaryDirectory() as bytecode:
            for _ in range(repeats):
                with tempfile.TemporaryDirectory() as folder:
                    for times in (cold, cached):
                        times.append(_seconds(script, bytecode, MONOTILE_CACHE_DIR=folder, MONOTILE_CPU=unit))
        both = {"compiled_s": min(cold), "compiled_median_s": statistics.median(cold)}
        both |= {"from_disk_s": min(cached), "from_disk_median_s": statistics.median(cached)}
        return {"name": f"first call of {kernel}", "repeats": repeats, **both}

    return measure


def _import(repeats: int, unit: str) -> Report:
    with tempfile.TemporaryDirectory() as bytecode:
        times = [_seconds(cold_start.IMPORT, bytecode) for _ in range(repeats)]
    return {"name": IMPORT_ROW, "repeats": repeats, "best_s": min(times), "median_s": statistics.median(times)}
