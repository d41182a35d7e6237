"""Check and time the rows on a GPU and make the report.

The report is passed on after every row, so that a run that is stopped keeps its rows.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import __version__, backends
from ...errors import MonotileError
from ...library import ops
from ...runtime import machine
from .. import suite
from ..rows import Sample
from ..worker import COMPETE_WITHIN, SAME_WORK, RoundLimits, near, worst_step
from . import caches, exact, gradients, limits, peers, rows, sweep, table
from .caches import GpuCache
from .device import CudaTimer
from .gradients import GpuGradient
from .rows import GpuShape, Inputs
from .sweep import GpuSweep

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]
Shape = GpuShape | GpuGradient | GpuSweep | GpuCache
ROWS: tuple[Shape, ...] = (*rows.ROWS, *gradients.ROWS, *rows.LATER, *sweep.ROWS, *caches.ROWS)
GRAPH_S = 0.01  # shorter calls are captured in a CUDA graph, so that host time is not measured
HOST_CALLS, HOST_ROUNDS = 200, 15  # calls per timing of the host: fewer than the launch queue holds
TRIALS = 3  # of each variant of the torch call
HOST_BOUND_S = 100e-6  # a trial is not in a graph: a shorter one may be host time, so the variant competes anyway


FULL, QUICK = RoundLimits(most=60, least=7, seconds=1.0), RoundLimits(most=20, least=5, seconds=0.3)


@dataclass
class RunOptions:
    """The rows of a run and how long each of them, and the whole, may take."""

    quick: bool = False
    only: str = ""  # the filter
    total_s: float = 500.0  # no row begins later
    commit: str | None = None  # of this source, where git cannot tell
    flex: peers.Flex = field(default_factory=peers.Flex)
    rounds: RoundLimits | None = None  # default: FULL or QUICK
    probes: limits.ProbeSizes = field(default_factory=limits.ProbeSizes)
    host_calls: int = HOST_CALLS

    @property
    def round_limits(self) -> RoundLimits:
        return self.rounds or (QUICK if self.quick else FULL)


def run(
    options: RunOptions, console: Console, *, keep: Callable[[Report], None] = lambda report: None,
    gpu: CudaTimer | None = None, shapes: tuple[Shape, ...] = ROWS,
) -> Report:  # fmt: skip
    """Measure the rows that the filter matches. `keep` gets the report after every row."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    backends.usable("nvidia")
    if options.flex.when not in peers.WHEN:
        raise MonotileError(f"FlexAttention is timed {', '.join(peers.WHEN)}; found {options.flex.when!r}")
    quick, only = options.quick, options.only
    wanted = [s for s in shapes if (suite.matches(s.name, only) if only else s.quick or not quick)]
    if not wanted:
        raise MonotileError(
            f"no row matches the filter {only!r}; try prefill, decode, extend, sweep, backward, caches or D128"
        )
    begin, gpu = time.perf_counter(), gpu or CudaTimer()
    lists: Report = {name: [] for name in ("doubts", "rows", "wrong", "starts", "left_out")}
    report: Report = {**_setting(gpu, options), "filter": only, **lists}
    columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("limits", total=len(wanted) + 1)
        report["limits"] = limits.measure(gpu, options.probes)
        for shape in wanted:
            progress.update(task, advance=1, description=shape.name)
            if time.perf_counter() - begin > options.total_s or not _answers(gpu):
                report["left_out"].append(shape.name)
                continue
            row = measure(shape, gpu, options, report["limits"])
            report["wrong" if "wrong" in row else "rows"].append(row)
            report["seconds"], report["flex_refused"] = time.perf_counter() - begin, options.flex.refused
            keep(report)
            if not console.is_terminal:  # a log shows how far a run came
                line = row["wrong"] if "wrong" in row else ", ".join(table.cells(row)[:-1])
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    report["doubts"] = list(_doubts(report))
    keep(report)
    return report


def _answers(gpu: CudaTimer) -> bool:
    """Return False if the GPU no longer works for this process, as after some errors."""
    try:
        gpu.synchronize()
    except RuntimeError:
        return False
    return True


def _doubts(report: Report) -> Iterator[str]:
    noisy = [row["name"] for row in report["rows"] if row["times"]["monotile"]["spread"] > 0.1]
    if noisy:
        yield f"{len(noisy)} rows have a spread above 10 %: {', '.join(noisy)}"


def _setting(gpu: CudaTimer, options: RunOptions) -> Report:
    import torch
    import triton

    device, found, commit = gpu.describe(), machine.commit(), options.commit
    return {
        "backend": "nvidia",
        "device": {"slug": machine.slug("nvidia", device["name"]), "processor": machine.processor(), **device},
        "versions": {
            "monotile": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
        },
        "commit": commit or (found[0] if found else None),  # the option wins: git may describe another tree
        "dirty": found[1] if found and not commit else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
    }


# ---- one row ---------------------------------------------------------------------------------------------------------


def measure(shape: Shape, gpu: CudaTimer, options: RunOptions, best: Report) -> Report:
    """Check and time a row. A wrong row is not timed: its report says what was wrong."""
    result: Report = {"name": shape.name, "threads": 1, "tags": shape.tags, "note": ""}
    begin = time.perf_counter()
    try:
        with peers.quiet():
            if isinstance(shape, GpuSweep):
                result |= _sweep(shape, gpu, options)
            elif isinstance(shape, GpuCache):
                result |= _cache(shape, gpu, options, best)
            elif isinstance(shape, GpuGradient):
                result |= _gradients(shape, gpu, options, best)
            else:
                result |= _forward(shape, gpu, options, best)
    except (AssertionError, RuntimeError, MonotileError) as error:
        result |= {"wrong": f"{shape.name}: {type(error).__name__}: {error}"}
    gpu.release()
    return result | {"took_s": time.perf_counter() - begin}


def _forward(shape: GpuShape, gpu: CudaTimer, options: RunOptions, best: Report) -> Report:
    inputs = rows.make(shape, gpu.name)
    prepared = rows.prepared(shape, inputs.options)
    mine = partial(ops.attention, inputs.q, inputs.k, inputs.v, **prepared, backend="nvidia")
    sample = exact.sample(inputs)
    checked = exact.check(shape.name, mine, sample)
    if shape.host:
        return checked | _host(shape, mine, inputs, gpu, options.host_calls)
    return checked | _device(shape, mine, inputs, sample, gpu, options, best)


def _gradients(shape: GpuGradient, gpu: CudaTimer, options: RunOptions, best: Report) -> Report:
    inputs = gradients.make(shape, gpu.name)
    mine, sample = gradients.call(shape, inputs), gradients.sample(inputs)
    gpu.release()
    checked = exact.check(shape.name, mine, sample)
    torch = _try_out(gradients.variants(shape, inputs), sample, gpu)
    entries = {"monotile": mine, **{f"torch {name}": run for name, run in torch.pop("runs").items()}}
    times, notes = interleave(entries, gpu, options.round_limits, cold=False)
    found = _compared(times, torch, notes)
    rate, limit = shape.flops / found["times"]["monotile"]["median_s"], best["flop"]["best_per_s"]
    share = {"kind": "flop", "rate_per_s": rate, "best_per_s": limit, "share": rate / limit}
    return checked | found | {"limit": share}


def _sweep(shape: GpuSweep, gpu: CudaTimer, options: RunOptions) -> Report:
    """Time the calls of a sweep in the same rounds. The time of the row is that of all its calls."""
    runs, checked = sweep.checked(shape, sweep.calls(shape, gpu.name))
    times, notes = interleave(runs, gpu, options.round_limits, cold=True)
    medians = {n: statistics.median(times[str(n)]) for n in shape.sizes}
    together = [sum(round) for round in zip(*times.values(), strict=True)]
    steps = [{"size": n, "median_s": seconds} for n, seconds in medians.items()]
    about = {"rounds": len(together), "note": "; ".join(notes), "steps": steps, "worst_step": worst_step(medians)}
    return checked | about | {"times": {"monotile": summary(together)}, "ratios": {}}


def _cache(shape: GpuCache, gpu: CudaTimer, options: RunOptions, best: Report) -> Report:
    call = caches.make(shape, gpu.name)
    checked = exact.check(shape.name, call.run, call.sample)
    entries = {"monotile": call.run, **({} if call.dense is None else {"dense": call.dense})}
    times, notes = interleave(entries, gpu, options.round_limits, cold=shape.kind != "varlen")
    found = _compared(times, {}, notes)
    kind, amount = ("flop", call.flops) if call.flops else ("read", call.bytes)
    rate, limit = amount / found["times"]["monotile"]["median_s"], best[kind]["best_per_s"]
    return checked | found | {"limit": {"kind": kind, "rate_per_s": rate, "best_per_s": limit, "share": rate / limit}}


def _device(
    shape: GpuShape, mine: Callable[[], Any], inputs: Inputs, sample: Sample, gpu: CudaTimer, options: RunOptions,
    best: Report,
) -> Report:  # fmt: skip
    """Time a row on the GPU beside torch, and compare it with the limits `best`."""
    torch = try_variants(shape, inputs, sample, gpu, options.flex)
    entries = {"monotile": mine, **{f"torch {name}": run for name, run in torch.pop("runs").items()}}
    if shape.few_visible:
        part = inputs.on_slice
        entries["slice"] = partial(ops.attention, part.q, part.k, part.v, **part.options, backend="nvidia")
        off = exact.distance(sample, entries["slice"]())
        assert off <= SAME_WORK, f"the slice computes something else: its error is {off}"
    elif shape.extra:
        entries["no option"] = partial(
            ops.attention, inputs.q, inputs.k, inputs.v, causal=shape.causal, backend="nvidia"
        )
    times, notes = interleave(entries, gpu, options.round_limits, cold=shape.kind != "prefill")
    found = _compared(times, torch, notes)
    if "no option" in found["ratios"]:  # of rates: a window has less work
        found["ratios"]["no option"] *= shape.flops / shape.plain.flops
    return found | {"limit": row_limit(shape, found["times"]["monotile"]["median_s"], best)}


def _compared(times: dict[str, list[float]], torch: Report, notes: list[str]) -> Report:
    """Summarise timings; of the variants of the torch call the fastest counts."""
    summaries = {name: summary(t) for name, t in times.items()}
    variants = {name: summaries.pop(name) for name in list(summaries) if name.startswith("torch ")}
    if variants:
        fastest = min(variants, key=lambda name: variants[name]["median_s"])
        summaries["torch"], torch["way"] = variants[fastest], fastest.removeprefix("torch ")
        torch["times"] = {name.removeprefix("torch "): t for name, t in variants.items()}
    median = summaries["monotile"]["median_s"]
    ratios = {name: t["median_s"] / median for name, t in summaries.items() if name != "monotile"}
    about = {"torch": torch, "rounds": len(times["monotile"]), "note": "; ".join(notes)}
    return {**about, "times": summaries, "ratios": ratios}


def row_limit(shape: GpuShape, seconds: float, best: Report) -> Report:
    """Return a row's rate beside its limit: reading for decode, products for prefill, and for extend the one of both
    that takes longer at best."""
    amounts = {"read": shape.key_bytes, "flop": shape.flops}
    kinds = {"decode": ["read"], "prefill": ["flop"]}.get(shape.kind, ["read", "flop"])
    kind = max(kinds, key=lambda kind: amounts[kind] / best[kind]["best_per_s"])
    rate, best_rate = amounts[kind] / seconds, best[kind]["best_per_s"]
    return {"kind": kind, "rate_per_s": rate, "best_per_s": best_rate, "share": rate / best_rate}


def try_variants(shape: GpuShape, inputs: Inputs, sample: Sample, gpu: CudaTimer, flex: peers.Flex) -> Report:
    """Try every variant of the torch call, FlexAttention where it is wanted."""

    def more(trials: dict[str, float]) -> peers.Variants:
        if not flex.wanted(fused=any(not name.startswith("math") for name in trials)):
            return {}
        return flex.compile_and_run(shape, inputs)

    return _try_out(peers.variants(shape, inputs), sample, gpu, more)


def _try_out(
    runs: peers.Variants, sample: Sample, gpu: CudaTimer,
    more: Callable[[dict[str, float]], peers.Variants] = lambda trials: {},
) -> Report:  # fmt: skip
    """Try variants, then those that `more` adds; `runs` of the report holds those that may be the fastest and take part
    in the rounds."""
    trials: dict[str, float] = {}
    errors, failed = {}, {}

    def try_out(name: str) -> None:
        try:
            errors[name] = exact.distance(sample, runs[name]())
            if errors[name] <= SAME_WORK:
                trials[name] = min(gpu.timings([runs[name]] * TRIALS, cold=True))
        except RuntimeError as error:
            failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
        gpu.release()

    for name in list(runs):
        try_out(name)
    added = more(trials)
    runs = runs | added
    for name in added:
        try_out(name)
    kept = {name: runs[name] for name in contenders(trials)}
    return {"trials_s": trials, "errors": errors, "failed": failed, "runs": kept}


def contenders(trials: dict[str, float]) -> list[str]:
    """Return the variants that may be the fastest."""
    close = near(trials, COMPETE_WITHIN)
    return [name for name, seconds in trials.items() if name in close or seconds < HOST_BOUND_S]


def _host(shape: GpuShape, mine: Callable[[], Any], inputs: Inputs, gpu: CudaTimer, calls: int) -> Report:
    """Time the host's part of a warm call, without waiting for the GPU."""
    group = {"enable_gqa": shape.heads[0] != shape.heads[1]}

    def torch_call() -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, **group)

    times: dict[str, list[float]] = {"monotile": [], "torch": []}
    for _ in range(HOST_ROUNDS):
        for name, run in (("monotile", mine), ("torch", torch_call)):
            gpu.seconds(run)
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - begin) / calls)
            gpu.synchronize()
    summaries = {name: summary(t) for name, t in times.items()}
    ratios = {"torch": summaries["torch"]["median_s"] / summaries["monotile"]["median_s"]}
    return {"rounds": HOST_ROUNDS, "times": summaries, "ratios": ratios, "torch": {"way": "sdpa"}}


# ---- timing ----------------------------------------------------------------------------------------------------------


def interleave(
    entries: dict[str, Callable[[], Any]], gpu: CudaTimer, rounds: RoundLimits, *, cold: bool
) -> tuple[dict[str, list[float]], list[str]]:
    """Time every entry once per round, so that a slow moment of the GPU affects all of them."""
    calls, usual, notes = {}, {}, []
    for name, run in entries.items():
        gpu.seconds(run)
        usual[name] = gpu.seconds(run)
        calls[name] = run
        if usual[name] < GRAPH_S:
            try:
                calls[name] = gpu.graph(run)
            except RuntimeError as error:
                notes.append(f"{name} is not in a graph: {(str(error).splitlines() or [''])[0]}")
    count = max(rounds.least, min(rounds.most, int(rounds.seconds / max(sum(usual.values()), 1e-9))))
    for run in calls.values():
        gpu.seconds(run)
    order = [run for _ in range(count) for run in calls.values()]
    found = gpu.timings(order, cold=cold)
    return {name: found[n :: len(calls)] for n, name in enumerate(calls)}, notes


def summary(times: list[float]) -> dict[str, float]:
    """Summarise timings; the spread is the interquartile range relative to the median."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return {"best_s": min(times), "median_s": median, "spread": (third - first) / median}
