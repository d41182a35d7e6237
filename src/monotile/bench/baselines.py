"""Baselines: what a benchmark found on a device, kept as JSON, compared, and shown as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MonotileError
from ..runtime import machine
from . import goals, table
from .nvidia import table as nvidia_table

Report = dict[str, Any]
FOLDER = machine.PACKAGE.parents[1] / "baselines"
BEGIN, END = "<!-- baselines: written by monotile snap --markdown -->", "<!-- end of baselines -->"
NEEDED = ("device", "versions", "commit", "dirty", "date", "rows")


def path_for(report: Report) -> Path:
    """Where a device's baseline is kept: in the repository, or else in the folder `baselines` of where one is."""
    folder = FOLDER if machine.commit() is not None else Path("baselines")
    return folder / f"{report['device']['slug']}.json"


def save(report: Report, path: Path) -> None:
    """Whole or not at all: a benchmark that is stopped while it writes leaves what it wrote before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def load(path: Path) -> Report:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise MonotileError(f"{path} cannot be read: {error.strerror}; `monotile snap` makes a baseline") from None
    except ValueError as error:
        raise MonotileError(f"{path} is not JSON: {error}; pass a file of `monotile bench --json`") from None
    missing = [key for key in NEEDED if key not in found] if isinstance(found, dict) else NEEDED
    if missing:
        raise MonotileError(f"{path} has no {', '.join(missing)}; pass a file of `monotile bench --json`")
    return dict(found)


# ---- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A row in two reports. Times are medians in seconds; the noise is what the two spreads explain."""

    name: str
    threads: int
    before: float
    after: float
    noise: float

    @property
    def slower(self) -> float:
        """How much longer it takes now, as a part of the time before; negative where it is quicker."""
        return self.after / self.before - 1

    @property
    def beyond_spread(self) -> bool:
        # A change is seen from the slower side, so that twice as fast counts as much as twice as slow.
        return max(self.after, self.before) / min(self.after, self.before) - 1 > self.noise


def compare(old: Report, new: Report) -> list[Change]:
    """The rows both reports have, in the order of the new one."""
    before = {(row["name"], row["threads"]): row["times"]["monotile"] for row in old["rows"]}
    changes = []
    for row in new["rows"]:
        then, now = before.get((row["name"], row["threads"])), row["times"]["monotile"]
        if then is not None:
            noise = then["spread"] + now["spread"]
            changes.append(Change(row["name"], row["threads"], then["median_s"], now["median_s"], noise))
    return changes


def remarks(old: Report, new: Report) -> Iterator[str]:
    """Why two reports may not be comparable, and which rows only one of them has."""
    if old["device"]["slug"] != new["device"]["slug"]:
        yield f"these are different devices: {old['device']['slug']} and {new['device']['slug']}"
    for label, report in (("first", old), ("second", new)):
        if report["dirty"]:
            yield f"the {label} was taken with changes that are not in commit {(report['commit'] or 'unknown')[:10]}"
        yield from (f"the {label} is doubtful: {doubt}" for doubt in report.get("doubts", ()))
    names = [{(row["name"], row["threads"]) for row in report["rows"]} for report in (old, new)]
    for label, only in (("first", names[0] - names[1]), ("second", names[1] - names[0])):
        if only:
            yield f"{len(only)} rows are in the {label} alone"


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """A report as a section of a page: what was measured where, the reach, and every row."""
    if report.get("backend") == "nvidia":
        return _markdown_nvidia(report)
    doubts = [f"- doubtful: {doubt}" for doubt in report.get("doubts", ())]
    facts = [f"{table.title(report)}; {report['date'][:10]}{'; a quick run' if report['quick'] else ''}.", *doubts]
    verdicts = [
        [f.work, f.measure, *f.shown, f"{f.row}, {f.threads}", "" if f.ok else "short"]
        for f in goals.judge(report["rows"])
    ]
    parts = [f"### {report['device']['slug']}", "\n".join(facts)]
    if verdicts:
        parts.append(_lines(["work", "measure", "worst", "wanted", "in this row, threads", ""], verdicts))
    if report["rows"]:
        head = ["row", "threads", "median", "spread", "x torch", "x NumPy", "of the limit"]
        parts.append(_lines(head, [_cells(row, report) for row in report["rows"]]))
    return "\n\n".join(parts) + "\n"


def _markdown_nvidia(report: Report) -> str:
    facts = [f"{nvidia_table.title(report)}; {report['date'][:10]}{'; a quick run' if report['quick'] else ''}."]
    facts += [f"{nvidia_table.ceilings(report)}.", "", *(f"- {remark}" for remark in nvidia_table.remarks(report))]
    parts = [f"### {report['device']['slug']}", "\n".join(facts)]
    parts.append(_lines(nvidia_table.GOALS_HEAD, nvidia_table.goal_cells(report)))
    parts.append(_lines(nvidia_table.HEAD, (nvidia_table.cells(row) for row in report["rows"])))
    return "\n\n".join(parts) + "\n"


def _cells(row: Report, report: Report) -> list[str]:
    mine = row["times"]["monotile"]
    share = f"{row['limit']['share']:.0%} of {table.rate(row['limit'])}" if "limit" in row else ""
    peers = [table.against_torch(row, report), table.against(row, "NumPy")]
    return [row["name"], str(row["threads"]), table.time(mine["median_s"]), f"{mine['spread']:.0%}", *peers, share]


def _lines(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def sections(paths: Iterable[Path]) -> str:
    """Every baseline, one after the other."""
    return "\n".join(markdown(load(path)) for path in sorted(paths))


def fill(page: Path, text: str) -> None:
    """Puts text between the markers of a page."""
    found = page.read_text()
    if BEGIN not in found or END not in found:
        raise MonotileError(f"{page} has no lines {BEGIN!r} and {END!r}; add them where the tables belong")
    before, after = found.split(BEGIN)[0], found.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
