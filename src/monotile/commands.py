"""The verbs of the command line: devices, inspect, check, bench."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from . import __version__, backends, bench, cache, inspection, machine
from .errors import MonotileError

ALL_BACKENDS = ("cpu", "interpreter", "nvidia", "metal")
LEXERS = {"source": "python", "ir": "llvm", "passes": "llvm", "llvm": "llvm", "asm": "gas"}
PLAIN_WIDTH = 140  # of tables that go to a file or a pipe

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"monotile {__version__}")
        raise typer.Exit


@app.callback()
def monotile(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tile kernels, written once."""


@app.command()
def devices() -> None:
    """What can run here, and what to do where something cannot."""
    table = Table("backend", "runs here", "details")
    for name in ALL_BACKENDS:
        reason = _why_not(name)
        details = reason if reason is not None else _details(name)
        table.add_row(name, "yes" if reason is None else "no", details)
    console = _console()
    console.print(table)
    console.print(f"compiled kernels are kept in {cache.directory()}", highlight=False, soft_wrap=True)


def _why_not(name: str) -> str | None:
    if name not in backends.MODULES:
        return f"planned; not part of monotile {__version__}. Use the cpu backend."
    try:
        return backends.get(name).why_not()
    except ImportError as error:
        return f"{error}. Run: pip install {error.name}"


def _details(name: str) -> str:
    if name != "cpu":
        return "NumPy, one operation at a time: defines the language, for tests" if name == "interpreter" else ""
    from .backends.cpu import jit, pool, target

    host = jit.host()
    chosen = target.target(host)
    vectors = f"{chosen.name}, {chosen.lanes} float32 lanes"
    return f"{machine.processor()} ({host.cpu})\n{vectors}\n{pool.default_threads()} threads\nLLVM {host.llvm}"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    kernel: Annotated[str, typer.Argument(help="path/to/file.py:NAME or package.module:NAME")],
    stage: Annotated[str, typer.Option(help="source, ir, passes, llvm or asm")] = "ir",
    dtype: Annotated[list[str] | None, typer.Option(help="of every tensor, or of one: a=float16")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="of a tensor: a=64x128; 64 where nothing is said")] = None,
    backend: Annotated[str, typer.Option(help="whose stages to show")] = "cpu",
) -> None:
    """Show a kernel at one stage of its compilation. Every other option is a constant: --BM=128."""
    found = inspection.find(kernel)
    request = inspection.Request(
        inspection.parse_values(context.args),
        inspection.parse_shapes(shape or ()),
        inspection.parse_dtypes(dtype or ["float32"]),
    )
    text = inspection.text(found, stage, request, backend)
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, LEXERS.get(stage, "text"), background_color="default"))
    else:
        print(text, end="")


@app.command("check")
def run_check(
    backend: Annotated[str, typer.Option(help="where to run")] = "cpu",
    only: Annotated[str, typer.Option("--filter", help="Cases whose name holds this text.")] = "",
) -> None:
    """Hold every op of the library against float64. The exit code is 1 where one does not hold."""
    from . import check

    if not check.run(_console(), backend=backend, only=only):
        raise typer.Exit(1)


@app.command("bench")
def run_bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: less than a minute.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number to this file.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Write it to <device>.json in this folder.")] = None,
    only: Annotated[str, typer.Option("--filter", help="Rows whose name holds this text.")] = "",
    threads: Annotated[int | None, typer.Option(help="Instead of every processor; one is always measured.")] = None,
) -> None:
    """Time the example kernels against NumPy and against what this machine can do."""
    console = _console()
    try:
        report = bench.run(quick=quick, only=only, threads=threads, console=console)
    except bench.WorkerFailed as error:
        raise MonotileError(f"a benchmark stopped: {error}") from None
    bench.show(report, console)
    if baseline is not None:
        json_file = baseline / f"{report['device']['slug']}.json"
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"written: {json_file}", highlight=False, soft_wrap=True)
