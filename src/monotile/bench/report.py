"""Runs the workers and the new processes of a benchmark, and shows what they found."""

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

from .. import __version__, machine
from ..backends.cpu import jit, pool, target
from ..errors import BadThreadCount
from . import start, worker

if TYPE_CHECKING:
    from rich.console import Console

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
IMPORT_ROW = "import monotile"
REPEATS, QUICK_REPEATS = 5, 2  # of every new process
BUSY, SCALING = 0.5, 0.8
Report = dict[str, Any]


class WorkerFailed(Exception):
    """A process of the benchmark ended with an error."""


def run(*, quick: bool, only: str, threads: int | None, console: Console) -> Report:
    """Every row whose name holds `only`, on one thread and on `threads` (every processor where that is None)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    most = threads if threads is not None else pool.default_threads()
    if most < 1:
        raise BadThreadCount(f"threads must be a positive whole number, found {most}")
    groups, load = sorted({1, most}), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    kernels = [k for k in start.KERNELS if only.lower() in f"first call of {k}"]
    importing = only.lower() in IMPORT_ROW
    total = sum(len(worker.names(t, only)) for t in groups) + len(kernels) + importing
    rows: list[Report] = []
    started: list[Report] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        for count in groups:
            progress.update(task, description=f"on {count} thread{'s' if count > 1 else ''}")
            for row in _rows(count, quick, only) if worker.names(count, only) else ():
                rows.append(row)
                progress.advance(task)
        repeats = QUICK_REPEATS if quick else REPEATS
        progress.update(task, description="new processes")
        for measure in [*[_first_call(k) for k in kernels], *([_import] if importing else [])]:
            started.append(measure(repeats))
            progress.advance(task)
    _add_shares(rows)
    doubts = list(_doubts(rows, load))
    return {**_setting(quick), "load_before": load, "doubts": doubts, "rows": rows, "starts": started}


def _add_shares(rows: list[Report]) -> None:
    """The limit for a kind of work and a thread count is the best rate of any probe in any row of the run: a busy
    moment of the machine must not make a row look good."""
    best: dict[tuple[str, int], tuple[float, str]] = {}
    measured = [(row["limit"], (row["limit"]["kind"], row["threads"])) for row in rows if "limit" in row]
    for limit, key in measured:
        best[key] = max(best.get(key, (0.0, "")), *((rate, name) for name, rate in limit["rates_per_s"].items()))
    for limit, key in measured:
        limit["best_per_s"], limit["from"] = best[key]
        limit["share"] = limit["rate_per_s"] / limit["best_per_s"]


def _doubts(rows: list[Report], load: float) -> Iterator[str]:
    """Why these times may not be the machine's own: other work on it, or threads that do not scale."""
    if load > BUSY:
        yield f"the load was {load:.1f} before the run: other work took part of the machine"
    rates = {row["threads"]: row["limit"]["best_per_s"] for row in rows if row.get("limit", {}).get("kind") == "flop"}
    for threads, rate in rates.items():
        if 1 in rates and rate < SCALING * threads * rates[1]:
            gain = f"{threads} threads reach {rate / rates[1]:.2f} times the multiply-adds of one"
            yield f"{gain}: the processors were busy or are shared, and rows on {threads} threads say little"


def _setting(quick: bool) -> Report:
    host, found = jit.host(), machine.commit()
    return {
        "device": {
            "slug": machine.slug(machine.processor(), host.cpu),
            "processor": machine.processor(),
            "llvm_name": host.cpu,
            "vectors": target.target(host).name,
            "processors": pool.default_threads(),
            "system": platform.system(),
        },
        "versions": {
            "monotile": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "llvm": host.llvm,
        },
        "commit": found[0] if found else None,
        "dirty": found[1] if found else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
    }


# ---- processes -------------------------------------------------------------------------------------------------------


def _rows(threads: int, quick: bool, only: str) -> Iterator[Report]:
    request = json.dumps({"threads": threads, "quick": quick, "only": only})
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
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


def _seconds(*arguments: str, **environment: str) -> float:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        raise WorkerFailed(_last_line(result.stderr))
    return float(result.stdout)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _first_call(kernel: str) -> Callable[[int], Report]:
    """In a new process with an empty cache, and in one that finds the compiled kernel on disk."""

    def measure(repeats: int) -> Report:
        cold: list[float] = []
        cached: list[float] = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                for times in (cold, cached):
                    times.append(_seconds("-m", "monotile.bench.start", kernel, MONOTILE_CACHE_DIR=folder))
        both = {"compiled_s": min(cold), "compiled_median_s": statistics.median(cold)}
        both |= {"from_disk_s": min(cached), "from_disk_median_s": statistics.median(cached)}
        return {"name": f"first call of {kernel}", "repeats": repeats, **both}

    return measure


def _import(repeats: int) -> Report:
    times = [_seconds("-c", start.IMPORT) for _ in range(repeats)]
    return {"name": IMPORT_ROW, "repeats": repeats, "best_s": min(times), "median_s": statistics.median(times)}


# ---- showing ---------------------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    from rich.table import Table

    device, versions = report["device"], report["versions"]
    title = f"{device['processor']} ({device['llvm_name']}), {device['processors']} processors"
    console.print(f"{title}; NumPy {versions['numpy']}, LLVM {versions['llvm']}", highlight=False, soft_wrap=True)
    table = Table("row", "threads", "best", "median", "spread", "times NumPy", "of the limit", "note")
    for row in report["rows"]:
        mine, ratios = row["times"]["monotile"], row["ratios"]
        others = [f"{1 / r:.2f} x the time of {name}" for name, r in ratios.items() if name != "NumPy"]
        table.add_row(
            row["name"],
            str(row["threads"]),
            _time(mine["best_s"]),
            _time(mine["median_s"]),
            f"{mine['spread']:.0%}",
            f"{ratios['NumPy']:.2f}" if "NumPy" in ratios else "",
            f"{row['limit']['share']:.0%} of {_rate(row['limit'])}" if "limit" in row else "",
            "; ".join(filter(None, [row["note"], *others])),
        )
    if report["rows"]:
        console.print(table)
    if report["starts"]:
        starts = Table("in a new process", "compiled", "from the disk cache")
        for row in report["starts"]:
            times = [_time(row[key]) for key in ("compiled_s", "from_disk_s", "best_s") if key in row]
            starts.add_row(row["name"], *times)
        console.print(starts)
    for line in [*_worst(report["rows"]), *(f"doubtful: {doubt}" for doubt in report["doubts"])]:
        console.print(line, highlight=False, soft_wrap=True)


def _worst(rows: list[Report]) -> Iterator[str]:
    """An average would hide the slow row; the worst one is named."""
    against = [(row["ratios"]["NumPy"], row) for row in rows if "NumPy" in row["ratios"]]
    shares = [(row["limit"]["share"], row) for row in rows if "limit" in row]
    if against:
        ratio, row = min(against, key=lambda pair: pair[0])
        yield f"worst against NumPy: {ratio:.2f} times its speed, {row['name']}, threads: {row['threads']}"
    if shares:
        share, row = min(shares, key=lambda pair: pair[0])
        yield f"furthest from the limit: {share:.0%}, {row['name']}, threads: {row['threads']}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"


def _rate(limit: Report) -> str:
    rate = limit["best_per_s"] / 1e9
    return f"{rate:.0f} {'GFLOP/s' if limit['kind'] == 'flop' else 'GB/s'}"
