"""Show a report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import columns, goals
from .columns import Heading
from .entries import Entry, against, entries
from .limits import UNITS
from .nvidia import table as nvidia_table
from .report import shared_processor

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]
PEERS = ("torch", "NumPy")
SWEEP_HEAD = ["sweep", "threads", "worst step", "ratio of times", "cliff", "best times"]
HEADS = (
    Heading("row", wraps=True),
    Heading("best"),
    Heading("x torch", 1),
    Heading("x NumPy", 2),
    Heading("speed-up", 3),
    Heading("of the limit", 4),
    Heading("spread", 5),
    Heading("torch by", 7),
    Heading("median", 8),
    Heading("note", 6, wraps=True),
)
SWEEP_HEADS = tuple(
    Heading(text, rank, wraps=not rank) for text, rank in zip(SWEEP_HEAD, (0, 1, 0, 2, 3, 4), strict=True)
)
GOAL_HEADS = tuple(
    Heading(text, rank, wraps=wraps)
    for text, rank, wraps in (
        ("work", 0, True), ("measure", 1, False), ("worst", 0, False), ("wanted", 0, False), ("", 0, False),
        ("in this row", 2, True),
    )
)  # fmt: skip
NO_TORCH = "torch is not installed: with it (pip install torch) the rows are compared with torch, too"


def show(report: Report, console: Console, *, with_goals: bool = False) -> None:
    """Print what ran, how fast it is against its peers, what is doubtful, and last whether all results were right.

    The goals of the project are for its own baselines.
    """
    found = entries(report)
    if report.get("backend") == "nvidia":
        nvidia_table.show(report, console, with_goals=with_goals)
    else:
        _show_cpu(report, found, console, with_goals)
    lines = [*against(found), *(f"doubtful: {doubt}" for doubt in report["doubts"])]
    if report["versions"].get("torch") is None:
        lines.append(NO_TORCH)
    for line in lines:
        say(console, line)
    _show_verdict(report, console)


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line of text: wrapped between words on a terminal, in one piece in a file."""
    console.print(line, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _show_cpu(report: Report, found: list[Entry], console: Console, with_goals: bool) -> None:
    say(console, title(report))
    most = max((entry.peer.ratio for entry in found if entry.peer), default=1.0)
    counts = sorted({row["threads"] for row in report["rows"]})
    for count in counts:
        rows = [(row, entry) for row, entry in zip(report["rows"], found, strict=True) if entry.threads == count]
        name = "one thread" if count == 1 else f"{count} threads"
        cells = [_cells(console, row, entry, most, report) for row, entry in rows]
        columns.show(console, HEADS, cells, f"On {name}", silent=count != counts[-1])
    columns.show(console, SWEEP_HEADS, sweep_cells(report))
    if with_goals:
        columns.show(console, GOAL_HEADS, _goal_cells(report))
    _show_starts(report, console)
    if with_goals:
        for line in furthest(report["rows"]):
            say(console, line)


def _cells(console: Console, row: Report, entry: Entry, most: float, report: Report) -> list[Any]:
    mine, peer = row["times"]["monotile"], entry.peer
    drawn = columns.bar(console, peer.ratio, most, peer.verdict) if peer else ""
    of_limit = f"{row['limit']['share']:.0%} of {rate(row['limit'])}" if "limit" in row else ""
    missing = report["versions"].get("torch") is None  # said once, below the table
    torch, _, way = ("", "", "") if missing else against_torch(row, report).partition(" (")
    peers = [torch, times_the_speed(row, "NumPy"), drawn, of_limit]
    return [
        row["name"],
        time(mine["best_s"]),
        *peers,
        f"{mine['spread']:.0%}",
        way.removesuffix(")"),
        time(mine["median_s"]),
        note(row),
    ]


def _show_verdict(report: Report, console: Console) -> None:
    wrong, total = report.get("wrong", ()), len(report["rows"]) + len(report.get("wrong", ()))
    for row in wrong:
        say(console, f"WRONG, not timed, threads: {row['threads']}: {row['wrong']}", "red")
    if wrong:
        say(console, f"{len(wrong)} of {total} results are wrong.", "red")
    elif total:
        say(console, f"All {total} results are right: each was compared with float64 before it was timed.", "green")


def _goal_cells(report: Report) -> Iterator[list[Any]]:
    from rich.text import Text

    for worst in judged(report):
        mark = Text("reached", "green") if worst.ok else Text("short", "red")
        yield [worst.goal.work, worst.goal.measure.name, *worst.shown, mark, f"{worst.row}, threads: {worst.threads}"]


def judged(report: Report) -> Iterator[goals.WorstRow]:
    """Yield the worst row for every goal of the vector unit that the report is of."""
    return goals.judge(report["rows"], report["device"].get("vectors", "avx512"))


def _show_starts(report: Report, console: Console) -> None:
    heads = [Heading("in a new process", wraps=True), Heading("compiled"), Heading("from the disk cache")]
    keys = ("compiled_s", "from_disk_s")
    rows = [
        [row["name"], *(time(row[key]) if key in row else "" for key in keys)] if "best_s" not in row
        else [row["name"], time(row["best_s"]), ""]
        for row in report["starts"]
    ]  # fmt: skip
    columns.show(console, heads, rows)


def furthest(rows: list[Report]) -> Iterator[str]:
    """Name the row that is furthest from each limit."""
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


def times_the_speed(row: Report, peer: str) -> str:
    return f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else ""


def against_torch(row: Report, report: Report) -> str:
    """Return the speed relative to torch with the variant of the torch call, or the reason why there is no number."""
    if "torch" in row["ratios"]:
        return f"{times_the_speed(row, 'torch')} ({row['torch']['way']})"
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
