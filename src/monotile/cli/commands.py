"""The verbs of the command line: devices, inspect, emit, check, compile, tune, cache, metal run, bench, snap, diff."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .. import __version__, backends
from ..errors import MonotileError
from ..runtime import cache, machine
from . import catalogue, inspection, running, timing
from .request import parse
from .terminal import plain_console

ALL_BACKENDS = ("cpu", "interpreter", "nvidia", "metal")
LEXERS = {
    "source": "python",
    "ir": "llvm",
    "passes": "llvm",
    "llvm": "llvm",
    "asm": "gas",
    "triton": "python",
    "gluon": "python",
    "metal": "cpp",
}
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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
    """Show which backends can run here, and what to do about those that cannot."""
    table = Table("backend", "runs here", "details")
    for name in ALL_BACKENDS:
        reason = _why_not(name)
        details = reason if reason is not None else _details(name)
        table.add_row(name, "yes" if reason is None else "no", Text(details))  # markup would eat monotile[metal]
    console = plain_console()
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
    if name == "metal":
        from ..backends.metal.backend import RUNTIMES

        return "\n".join(f"{runtime}: {why_not() or 'yes'}" for runtime, why_not in RUNTIMES.items())
    if name != "cpu":
        return "NumPy, one operation at a time: defines the language, for tests" if name == "interpreter" else ""
    from ..backends.cpu import target
    from ..backends.cpu.processors import default_threads

    host = target.processor()
    used = target.target(host)
    others = [unit for unit in target.runnable() if unit != used.name]
    by = " by MONOTILE_CPU" if target.chosen() is not None else ""
    vectors = f"vector unit in use{by}: {used.name}, {used.lanes} float32 lanes"
    lines = [f"{machine.processor()} ({host.cpu})", vectors]
    lines += [f"others that it has: {', '.join(others)}"] if others else []
    return "\n".join([*lines, f"{default_threads()} threads", f"LLVM {host.llvm}"])


KERNELS = "attention, merge, ..., path/to/file.py:NAME or package.module:NAME"
Device = Annotated[str | None, typer.Option(help="a GPU (sm_90) or a vector unit (avx2), which need not be here")]
DTypes = Annotated[list[str] | None, typer.Option(help="of every tensor, or of one: a=float16")]
Shapes = Annotated[list[str] | None, typer.Option(help="of a tensor: a=64x128; 64 where nothing is said")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def inspect(
    context: typer.Context,
    kernel: Annotated[str, typer.Argument(help=KERNELS)],
    stage: Annotated[
        str, typer.Option(help="source, ir, passes, run; llvm or asm; triton, gluon or ptx; metal")
    ] = "ir",
    dtype: DTypes = None,
    shape: Shapes = None,
    backend: Annotated[str | None, typer.Option(help="whose stages to show; cpu, or the device's")] = None,
    device: Device = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say which blocks, schedule and path, and why.")] = False,
) -> None:
    """Show what a call of a library function (attention, decode_partials, merge, ...) runs on a device, or a kernel at
    one stage of its compilation. Every other option is a length or option of the function (--Nq=1 --D=128 --causal) or
    a constant of the kernel (--BM=128). --stage run --at program=3 shows the values of one program."""
    words, at = running.split_at(context.args)
    request = parse(words, shape, dtype)
    named = inspection.backend_for(backend, device)
    if explain:
        print(inspection.explanation(kernel, request, named, device), end="")
        return
    text = (
        running.text(kernel, request, at) if stage == "run" else inspection.text(kernel, stage, request, named, device)
    )
    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, LEXERS.get(stage, "text"), background_color="default"))
    else:
        print(text, end="")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def emit(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="metal, nvidia or cpu")],
    kernel: Annotated[list[str], typer.Option(help=f"{KERNELS}; may be given again")],
    out: Annotated[Path, typer.Option(help="The folder to write to; it is made if it is not there.")],
    dtype: DTypes = None,
    shape: Shapes = None,
    device: Device = None,
    package: Annotated[
        str | None, typer.Option("--with", help="swift: a Swift package with a test, for a Mac (metal).")
    ] = None,
) -> None:
    """Write kernels and a manifest.json by which other programs can launch them. Every other option is a constant of
    the kernels (--BR=64) or an option of attention (--causal=true)."""
    from . import emission

    kernels = [catalogue.find_kernel(name) for name in kernel]
    for path in emission.write(target, kernels, parse(context.args, shape, dtype), out, device, package=package):
        print(path)


@app.command("check")
def run_check(
    backend: Annotated[str, typer.Option(help="where to run")] = "cpu",
    only: Annotated[
        str, typer.Option("--filter", help="Cases, or families of the sweep, whose name holds this text.")
    ] = "",
    sweep: Annotated[int, typer.Option(min=0, help="Instead: this many random calls between poisoned neighbours.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of the sweep")] = 0,
    first: Annotated[str, typer.Option("--from", help="Family and number of the sweep's first call: 12.3")] = "0.0",
    processes: Annotated[int, typer.Option(min=1, help="of the sweep, at once")] = 1,
    seconds: Annotated[float, typer.Option(help="No call of the sweep begins after this time; 0: no limit.")] = 0.0,
    per_family: Annotated[int, typer.Option(min=1, help="Calls of the sweep that share their kernels.")] = 40,
) -> None:
    """Hold every op of the library against float64. The exit code is 1 where one does not hold."""
    from ..library import check, sweep_processes

    if sweep:
        place = [int(part) for part in first.split(".") if part.isdecimal()]
        if len(place) != 2:
            raise MonotileError(f"--from is a family and a call's number in it, such as 12.3; found {first!r}")
        wanted = sweep_processes.Sweep(sweep, seed, backend, processes, seconds, per_family, (place[0], place[1]), only)
        ok = sweep_processes.run(plain_console(), wanted)
    else:
        ok = check.run(plain_console(), backend=backend, only=only)
    if not ok:
        raise typer.Exit(1)


@app.command("compile")
def run_compile(
    device: Annotated[
        list[str] | None, typer.Option(help="sm_86; may be given again. Every described GPU else.")
    ] = None,
    only: Annotated[str, typer.Option("--filter", help="Calls with words that begin as these: 'float16 D 128'.")] = "",
    sample: Annotated[int, typer.Option(min=0, help="This many of the calls, drawn at random; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="at once")] = 1,
) -> None:
    """Compile attention with every option, its gradients, and ragged, paged and quantised calls for NVIDIA GPUs that
    need not be here; show the shared memory, registers and spills of each kernel. The exit code is 1 where one does
    not compile."""
    from ..backends.nvidia.device import DESCRIBED
    from . import ahead

    devices = device or list(DESCRIBED)
    if not ahead.run(plain_console(), devices, only=only, sample=sample, seed=seed, processes=processes):
        raise typer.Exit(1)


@app.command("tune")
def run_tune(
    only: Annotated[str, typer.Option("--filter", help="Work with words that begin as these: 'attention D128'.")] = "",
    dtype: Annotated[str, typer.Option(help="of queries, keys and values")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="For each kernel and head size.")] = 60.0,
) -> None:
    """Measure which block sizes and schedules are fastest on this GPU, and keep them for later calls."""
    from ..bench.nvidia import tune

    tune.run(plain_console(), only=only, dtype=dtype, seconds=seconds)


@app.command("cache")
def run_cache(
    limit: Annotated[str | None, typer.Option(help="Bytes that it may take from now on: 500M, 2GiB.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all compiled kernels.")] = False,
) -> None:
    """Show where compiled kernels are kept, how many there are and how much they take; clear or limit them."""
    from . import cache_report

    cache_report.run(plain_console(), limit=limit, clear=clear)


# ---- other people's Metal kernels ------------------------------------------------------------------------------------

metal_app = typer.Typer(help="Metal shaders, anyone's, without a Mac.", no_args_is_help=True)
app.add_typer(metal_app, name="metal")


@metal_app.command("run")
def run_metal(
    shader: Annotated[Path, typer.Argument(help="a .metal file")],
    buffers: Annotated[Path, typer.Option(help="JSON of the launch: buffers, grid, threads (docs: metal_runner)")],
    kernel: Annotated[str | None, typer.Option(help="The function, if the file has several.")] = None,
    order: Annotated[str, typer.Option(help="of threads: ascending, descending, shuffled, or all three")] = "all",
    fast_math: Annotated[bool, typer.Option("--fast-math", help="Compile as Metal does by default.")] = False,
    style: Annotated[str, typer.Option("--format", help="text, or github for annotations")] = "text",
    out: Annotated[Path | None, typer.Option(help="A folder to write the buffers to, as .npy files.")] = None,
) -> None:
    """Run a Metal kernel on the CPU and report its mistakes by line, and its counters. The exit code is 1 where it has
    any, where a result is not as expected, or where results depend on the order of threads."""
    from . import metal_run

    if not metal_run.command(shader, buffers, metal_run.RunChoices(kernel, order, fast_math, style, out)):
        raise typer.Exit(1)


# ---- times -----------------------------------------------------------------------------------------------------------

app.command("bench")(timing.run_bench)
app.command("snap")(timing.snap)
app.command("diff")(timing.diff)
