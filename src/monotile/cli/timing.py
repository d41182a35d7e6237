"""The verbs that time kernels: bench, snap, diff."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from .. import bench
from ..bench import baselines, columns, html, table
from ..bench.columns import Heading
from ..errors import MonotileError
from .terminal import plain_console

DIFF_HEADS = tuple(
    Heading(text, rank, wraps=text == "row")
    for text, rank in (("row", 0), ("threads", 1), ("before", 3), ("after", 4), ("time", 0), ("spreads", 2), ("", 0))
)
Quick = Annotated[bool, typer.Option("--quick", help="A small choice of rows and fewer repeats: less than a minute.")]
Only = Annotated[str, typer.Option("--filter", help="Rows with words that begin as these: 'decode D128 bfloat16'.")]
Threads = Annotated[int | None, typer.Option(help="cpu: instead of every processor; a full run measures one, too.")]
Where = Annotated[
    str, typer.Option("--backend", help="cpu, a vector unit of it (cpu:avx2; torch is held to it, too) or nvidia")
]
FlexWhen = Annotated[
    Literal["needed", "always", "never"], typer.Option("--flex", help="nvidia: when to time FlexAttention.")
]
Seconds = Annotated[float, typer.Option(help="nvidia: no row begins after this time.")]
Commit = Annotated[str | None, typer.Option(help="Of this source, where git cannot tell.")]


def run_bench(
    quick: Quick = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page to look at to this file.")] = None,
    of: Annotated[Path | None, typer.Option("--from", help="Show this file of `bench --json`; run nothing.")] = None,
    only: Only = "",
    threads: Threads = None,
    backend: Where = "cpu",
    flex: FlexWhen = "needed",
    seconds: Seconds = 500.0,
    commit: Commit = None,
) -> None:
    """Time the kernels against torch, NumPy and what this machine can do; the exit code is 1 if a result is wrong."""
    console = plain_console()
    baselines.check_writable(json_file, page)
    if of is not None:
        report = baselines.load(of)
    elif _on_gpu(backend):
        options = bench.RunOptions(quick, only, seconds, commit, bench.Flex(flex))
        report = _measure_gpu(console, options, json_file)
    else:
        report = _measure(console, quick, only, threads, backend, commit)
    bench.show(report, console)
    if json_file is not None:
        _keep(console, report, json_file)
    if page is not None:
        html.save(report, page)
        console.print(f"open this page in a browser: {page}", highlight=False, markup=False, soft_wrap=True)
    if report.get("wrong"):
        raise typer.Exit(1)


def _on_gpu(backend: str) -> bool:
    if backend.partition(":")[0] not in ("cpu", "nvidia"):
        raise MonotileError(f"the benchmark runs on cpu or nvidia, found {backend!r}")
    return backend == "nvidia"


def _measure_gpu(console: Console, options: bench.RunOptions, path: Path | None) -> baselines.Report:
    """Run the benchmark on the GPU; the report is written to the path after every row."""
    keep = partial(baselines.save, path=path) if path is not None else lambda report: None
    return bench.run_nvidia(options, console, keep=keep)


def _measure(
    console: Console, quick: bool, only: str, threads: int | None, backend: str, commit: str | None = None
) -> baselines.Report:
    try:
        return bench.run(quick=quick, only=only, threads=threads, console=console, backend=backend, commit=commit)
    except bench.WorkerFailed as error:
        raise MonotileError(f"a benchmark stopped: {error}") from None


def _keep(console: Console, report: baselines.Report, path: Path) -> None:
    baselines.save(report, path)
    changes = ", with changes that are not in its commit" if report["dirty"] else ""
    console.print(f"written{changes}: {path}", highlight=False, soft_wrap=True)


def snap(
    file: Annotated[Path | None, typer.Argument(help="Where to keep it; baselines/<device>.json if left out.")] = None,
    of: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="Keep this file of `bench --json`; run nothing. Several: one device, other threads."
        ),
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Run nothing: rewrite the .md of FILE, or of every kept baseline.")
    ] = False,
    quick: Quick = False,
    only: Only = "",
    threads: Threads = None,
    backend: Where = "cpu",
) -> None:
    """Run the benchmark and keep the report as this device's baseline: a .json, and its tables as a .md beside it.
    Vector units other than the machine's own have baselines of their own."""
    console = plain_console()
    if tables:
        for path in [file] if file is not None else sorted(baselines.FOLDER.glob("*.json")):
            print(baselines.save_tables(baselines.load(path), path))
        return
    if file is None and not of and (quick or only):
        raise MonotileError("a run of some rows is no baseline of a device; pass a FILE to keep it in")
    baselines.check_writable(file)
    if of:
        report = baselines.join([baselines.load(path) for path in of])
    elif _on_gpu(backend):
        report = _measure_gpu(console, bench.RunOptions(quick, only), None)
    else:
        report = _measure(console, quick, only, threads, backend)
    if not of:
        bench.show(report, console, with_goals=True)
    if report.get("wrong"):
        raise MonotileError(f"nothing is kept: {report['wrong'][0]['wrong']}")
    path = file if file is not None else baselines.path_for(report)
    _keep(console, report, path)
    baselines.save_tables(report, path)


def diff(
    first: Annotated[Path, typer.Argument(help="The older file; the newer one, if it is the only one.")],
    second: Annotated[Path | None, typer.Argument(help="If left out, FIRST is held against its baseline.")] = None,
    tolerance: Annotated[float, typer.Option(help="Per cent a row may be slower, beyond its spread.")] = 5.0,
    every: Annotated[bool, typer.Option("--all", help="Show rows that did not change, too.")] = False,
) -> None:
    """Show the rows that changed beyond their spread. The exit code is 1 where one got slower than tolerated."""
    console = plain_console()
    new = baselines.load(first if second is None else second)
    old = baselines.load(baselines.path_for(new) if second is None else first)
    changes = baselines.compare(old, new)
    shown = [c for c in changes if c.beyond_spread]
    failed = [c for c in shown if 100 * c.slower > tolerance]
    columns.show(
        console, DIFF_HEADS, [_change_cells(c, c in shown, c in failed) for c in (changes if every else shown)]
    )
    for line in baselines.remarks(old, new):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{len(changes)} rows compared, {len(shown)} changed, {len(failed)} slower by more than {tolerance:g} %"
    )
    if failed:
        raise typer.Exit(1)


def _change_cells(c: baselines.Change, beyond_spread: bool, failed: bool) -> list[str | Text]:
    mark = Text("faster", "green") if beyond_spread and c.slower <= 0 else Text("")
    times = table.time(c.before), table.time(c.after)
    figures = f"{c.slower:+.0%}", f"{c.noise:.0%}"
    return [c.name, str(c.threads), *times, *figures, Text("slower", "red") if failed else mark]
