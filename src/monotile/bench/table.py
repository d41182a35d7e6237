"""Show a report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import goals
from .limits import UNITS
from .nvidia import table as nvidia_table
from .report import shared_processor

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]
PEERS = ("torch", "NumPy")
SWEEP_HEAD = ["sweep", "threads", "worst step", "ratio of times", "cliff", "best times"]


def show(report: Report, console: Console) -> None:
    from rich.table import Table

    if report.get("backend") == "nvidia":
        return nvidia_table.show(report, console)
    console.print(title(report), highlight=False, soft_wrap=True)
    table = Table("row", "threads", "best", "median", "spread", "x torch", "x NumPy", "of the limit", "note")
    for row in report["rows"]:
        mine = row["times"]["monotile"]
        times = (time(mine["best_s"]), time(mine["median_s"]), f"{mine['spread']:.0%}")
        of_limit = f"{row['limit']['share']:.0%} of {rate(row['limit'])}" if "limit" in row else ""
        others = (against_torch(row, report), against(row, "NumPy"), of_limit, note(row))
        table.add_row(row["name"], str(row["threads"]), *times, *others)
    if report["rows"]:
        console.print(table)
    _show_sweeps(report, console)
    _show_goals(report, console)
    _show_starts(report, console)
    for line in [*worst_ratios(report["rows"]), *(f"doubtful: {doubt}" for doubt in report["doubts"])]:
        console.print(line, highlight=False, soft_wrap=True)
    for row in report.get("wrong", ()):
        line = f"WRONG, not timed, threads: {row['threads']}: {row['wrong']}"
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    return None


def _show_goals(report: Report, console: Console) -> None:
    from rich.table import Table

    table = Table("work", "measure", "worst", "wanted", "", "in this row")
    for worst in judged(report):
        mark = "[green]reached[/]" if worst.ok else "[red]short[/]"
        place = f"{worst.row}, threads: {worst.threads}"
        table.add_row(worst.goal.work, worst.goal.measure.name, *worst.shown, mark, place)
    if table.row_count:
        console.print(table)


def judged(report: Report) -> Iterator[goals.WorstRow]:
    """Yield the worst row for every goal of the vector unit that the report is of."""
    return goals.judge(report["rows"], report["device"].get("vectors", "avx512"))


def _show_sweeps(report: Report, console: Console) -> None:
    from rich.table import Table

    sweeps = Table(*SWEEP_HEAD)
    for cells in sweep_cells(report):
        sweeps.add_row(*cells)
    if sweeps.row_count:
        console.print(sweeps)


def _show_starts(report: Report, console: Console) -> None:
    from rich.table import Table

    starts = Table("in a new process", "compiled", "from the disk cache")
    for row in report["starts"]:
        starts.add_row(row["name"], *(time(row[key]) for key in ("compiled_s", "from_disk_s", "best_s") if key in row))
    if starts.row_count:
        console.print(starts)


def worst_ratios(rows: list[Report]) -> Iterator[str]:
    """Name the worst row against each peer and each limit: an average would hide it."""
    for peer in PEERS:
        against = [(row["ratios"][peer], row) for row in rows if peer in row["ratios"]]
        if against:
            ratio, row = min(against, key=lambda pair: pair[0])
            yield f"worst against {peer}: {ratio:.2f} times its speed, {row['name']}, threads: {row['threads']}"
    for kind, unit in UNITS.items():
        shares = [(row["limit"]["share"], row) for row in rows if row.get("limit", {}).get("kind") == kind]
        if shares:
            share, row = min(shares, key=lambda pair: pair[0])
            limit = f"{row['limit']['best_per_s'] / 1e9:.0f} {unit} ({kind})"
            yield f"furthest from the limit: {share:.0%} of {limit}, {row['name']}, threads: {row['threads']}"


# ---- cells -----------------------------------------------------------------------------------------------------------


def title(report: Report) -> str:
    device, versions = report["device"], report["versions"]
    torch = versions.get("torch")
    held = " ".join(f"{name}={value}" for name, value in device.get("peers_held_by", {}).items())
    parts = [
        f"{device['processor']} ({device['llvm_name']}), {device['processors']} processors",
        f"vector unit {device.get('vectors', 'avx512')}",
        *([f"torch and NumPy held to it by {held}"] if held else []),
        f"torch {torch}" if torch else "torch is not installed",
        f"NumPy {versions['numpy']}, LLVM {versions['llvm']}",
        f"commit {(report['commit'] or 'unknown')[:10]}{' with changes' if report['dirty'] else ''}",
    ]
    return "; ".join(parts)


def against(row: Report, peer: str) -> str:
    return f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else ""


def against_torch(row: Report, report: Report) -> str:
    """Return the speed relative to torch with the variant of the torch call, or the reason why there is no number."""
    if "torch" in row["ratios"]:
        return f"{against(row, 'torch')} ({row['torch']['way']})"
    if row.get("tags", {}).get("op") not in ("decode", "extend", "prefill"):
        return ""
    if report["versions"].get("torch") is None:
        return "no torch"
    return "it fails"


def note(row: Report) -> str:
    others = [f"{r:.2f} x the speed of {name}" for name, r in row["ratios"].items() if name not in PEERS]
    shared = shared_processor(row)
    busy = f"took {shared:.1f} x its processor time" if shared else ""
    return "; ".join(filter(None, [row["note"], *others, busy]))


def sweep_cells(report: Report) -> Iterator[list[str]]:
    """Yield the worst step of every sweep, and all its times."""
    for row in report["rows"]:
        if "worst_step" in row:
            worst = row["worst_step"]
            place = f"Nq {worst['from']} to {worst['to']}"
            times = ", ".join(f"{step['size']}: {time(step['best_s'])}" for step in row["steps"])
            figures = [f"{worst['ratio']:.2f}", f"{worst['cliff']:.2f}"]
            yield [row["name"], str(row["threads"]), place, *figures, times]


def time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"


def rate(limit: Report) -> str:
    return f"{limit['best_per_s'] / 1e9:.0f} {UNITS.get(limit['kind'], 'GB/s')}"
