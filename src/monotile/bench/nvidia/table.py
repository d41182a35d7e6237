"""Show a GPU's report as tables; baselines.py uses the same cells for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import columns
from ..columns import Heading
from . import goals

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]
HEAD = ["row", "median", "spread", "rate", "of the limit", "x torch", "note"]
GOALS_HEAD = ["work", "measure", "worst", "wanted", "in this row", ""]
HEADS = tuple(
    Heading(text, rank, wraps=text in ("row", "x torch", "note"))
    for text, rank in zip(HEAD, (0, 0, 4, 2, 3, 1, 5), strict=True)
)
GOAL_HEADS = tuple(
    Heading(text, rank, wraps=text in ("work", "in this row"))
    for text, rank in zip(GOALS_HEAD, (0, 1, 0, 0, 2, 0), strict=True)
)
NOT_IN_TORCH = "torch takes it in no way that was asked"
NO_PEER = ("sweep", "quantised cache", "paged cache", "varlen cache", "mixed cache")  # not timed beside torch


def show(report: Report, console: Console, *, with_goals: bool = False) -> None:
    for line in (title(report), ceilings(report)):
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    columns.show(console, HEADS, (cells(row) for row in report["rows"]))
    if with_goals:
        columns.show(console, GOAL_HEADS, _marked(goal_cells(report)))
    for remark in _flex_remarks(report):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)


def _marked(lines: Iterable[list[str]]) -> Iterator[list[Any]]:
    from rich.text import Text

    for line in lines:
        yield [*line[:-1], Text(line[-1], "red") if line[-1] else Text("reached", "green")]


def _flex_remarks(report: Report) -> Iterator[str]:
    return (f"FlexAttention was not timed: {reason}" for reason in report.get("flex_refused", ()))


def remarks(report: Report) -> Iterator[str]:
    """Name the worst row against torch (an average would hide it) and the reasons to doubt the run."""
    against = [(row["ratios"]["torch"], row["name"]) for row in report["rows"] if "torch" in row.get("ratios", {})]
    if against:
        ratio, name = min(against)
        yield f"worst against torch: {ratio:.2f} times its speed, {name}"
    yield from _flex_remarks(report)
    if report.get("left_out"):
        yield f"{len(report['left_out'])} rows were left out: the time was up, or the GPU stopped answering"
    yield from (f"doubtful: {doubt}" for doubt in report["doubts"])


def title(report: Report) -> str:
    device, versions = report["device"], report["versions"]
    parts = [
        f"{device['name']} ({device['architecture']}), CUDA {device['cuda']}, cuDNN {device['cudnn']}",
        f"torch {versions['torch']}, Triton {versions['triton']}",
        f"commit {(report['commit'] or 'unknown')[:10]}{' with changes' if report['dirty'] else ''}",
    ]
    return "; ".join(parts)


def ceilings(report: Report) -> str:
    found = report["limits"]
    rates = [f"{kind} {found[kind]['best_per_s'] / 1e12:.2f} TB/s" for kind in ("copy", "read")]
    return f"Measured in this run: {', '.join(rates)}, matmul {found['flop']['best_per_s'] / 1e12:.0f} TFLOP/s"


def cells(row: Report) -> list[str]:
    mine, limit = row["times"]["monotile"], row.get("limit")
    rate = "" if limit is None else _rate(limit["kind"], limit["rate_per_s"])
    share = "" if limit is None else f"{limit['share']:.0%}"
    note = row.get("note", "")
    if "no option" in row["ratios"]:
        note = "; ".join(filter(None, [f"{row['ratios']['no option']:.2f} x the rate without", note]))
    if "slice" in row["ratios"]:
        note = "; ".join(filter(None, [f"{1 / row['ratios']['slice']:.2f} x the time of the slice", note]))
    if "dense" in row["ratios"]:
        note = "; ".join(filter(None, [f"{row['ratios']['dense']:.2f} x the speed of dense tensors", note]))
    if "worst_step" in row:
        worst = row["worst_step"]
        said = f"{worst['from']} to {worst['to']} queries: {worst['ratio']:.2f} x the time, cliff {worst['cliff']:.2f}"
        note = "; ".join(filter(None, [said, note]))
    return [row["name"], time(mine["median_s"]), f"{mine['spread']:.0%}", rate, share, _torch(row), note]


def _torch(row: Report) -> str:
    if "torch" not in row["ratios"]:
        return "" if row["tags"]["op"] in NO_PEER else NOT_IN_TORCH
    return f"{row['ratios']['torch']:.2f} ({row['torch']['way']})"


def _rate(kind: str, per_s: float) -> str:
    return f"{per_s / 1e12:.0f} TFLOP/s" if kind == "flop" else f"{per_s / 1e9:.0f} GB/s"


def time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def goal_cells(report: Report) -> Iterator[list[str]]:
    for worst in goals.judge(report["rows"]):
        yield [worst.goal.work, worst.goal.measure.name, *worst.shown, worst.row, "" if worst.ok else "short"]
