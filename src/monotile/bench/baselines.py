"""Keep benchmark reports as baselines: <device>.json with every number, <device>.md with its tables; compare two."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MonotileError
from ..runtime import machine
from . import table
from .nvidia import table as nvidia_table

Report = dict[str, Any]
FOLDER = machine.REPOSITORY / "baselines"
GUIDE = "../docs/results/performance.md"
NEEDED = ("device", "versions", "commit", "dirty", "date", "rows")


def path_for(report: Report) -> Path:
    """Return the file of a device's baseline: in the repository, or else in ./baselines."""
    folder = FOLDER if machine.commit() is not None else Path("baselines")
    return folder / f"{report['device']['slug']}.json"


def save(report: Report, path: Path) -> None:
    """Write a report atomically: a run that is killed while it writes leaves the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def check_writable(*paths: Path | None) -> None:
    """Raise an error, before anything is measured, if a file cannot be written."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            trial = path.with_name(f".{path.name}.new")
            trial.write_text("")
            trial.unlink()
        except OSError as error:
            raise MonotileError(f"{path} cannot be written: {error.strerror}; name another file") from None


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


def join(reports: list[Report]) -> Report:
    """Return one report of runs with other rows, or on other numbers of threads, of one device. The cold starts are
    those of its first run."""
    first, *others = reports
    rows, doubts, left_out = list(first["rows"]), list(first.get("doubts", ())), list(first.get("left_out", ()))
    for other in others:
        differing = [key for key in ("device", "versions", "commit", "quick") if other[key] != first[key]]
        if differing:
            raise MonotileError(f"runs with another {', '.join(differing)} are no one baseline; keep them one by one")
        repeated = {(row["name"], row["threads"]) for row in rows} & {(r["name"], r["threads"]) for r in other["rows"]}
        if repeated:
            raise MonotileError(
                f"{len(repeated)} rows are in both files, such as {min(repeated)}; pass runs on other threads"
            )
        rows += other["rows"]
        left_out += other.get("left_out", ())
        doubts += [doubt for doubt in other.get("doubts", ()) if doubt not in doubts]
    measured = {row["name"] for row in rows}
    left_out = [name for name in dict.fromkeys(left_out) if name not in measured]
    return {
        **first,
        **({"left_out": left_out} if "left_out" in first else {}),
        "rows": rows,
        "doubts": doubts,
        "wrong": [w for report in reports for w in report.get("wrong", ())],
    }


# ---- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A row in two reports. Times are medians in seconds; the noise is the sum of the two spreads."""

    name: str
    threads: int
    before: float
    after: float
    noise: float

    @property
    def slower(self) -> float:
        """The relative change of the time; negative where it got faster."""
        return self.after / self.before - 1

    @property
    def beyond_spread(self) -> bool:
        # The ratio is taken from the slower side, so that twice as fast counts as much as twice as slow.
        return max(self.after, self.before) / min(self.after, self.before) - 1 > self.noise


def compare(old: Report, new: Report) -> list[Change]:
    """Return the changes of the rows that both reports have, in the order of the new one."""
    before = {(row["name"], row["threads"]): row["times"]["monotile"] for row in old["rows"]}
    changes = []
    for row in new["rows"]:
        then, now = before.get((row["name"], row["threads"])), row["times"]["monotile"]
        if then is not None:
            noise = then["spread"] + now["spread"]
            changes.append(Change(row["name"], row["threads"], then["median_s"], now["median_s"], noise))
    return changes


def remarks(old: Report, new: Report) -> Iterator[str]:
    """Yield the reasons why two reports may not be comparable, and how many rows only one of them has."""
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


def tables_path(path: Path) -> Path:
    """Return the page beside a baseline."""
    return path.with_suffix(".md")


def save_tables(report: Report, path: Path) -> Path:
    """Write the page beside a baseline and return its path."""
    page = tables_path(path)
    page.write_text(markdown(report))
    return page


def markdown(report: Report) -> str:
    """Render a report as a page: the setting, the goals, and every row."""
    return _page(report, *(_parts_nvidia(report) if report.get("backend") == "nvidia" else _parts_cpu(report)))


def _page(report: Report, facts: list[str], tables: list[str]) -> str:
    origin = f"`monotile snap` writes this page from the JSON beside it; [performance.md]({GUIDE}) says how to read it."
    return "\n\n".join([f"# {report['device']['slug']}", origin, "\n".join(facts), *tables]) + "\n"


def _parts_cpu(report: Report) -> tuple[list[str], list[str]]:
    doubts = [f"- doubtful: {doubt}" for doubt in report.get("doubts", ())]
    facts = [f"{table.title(report)}; {_date(report)}.", *(["", *doubts] if doubts else [])]
    verdicts = [
        [w.goal.work, w.goal.measure.name, *w.shown, f"{w.row}, {w.threads}", "" if w.ok else "short"]
        for w in table.judged(report)
    ]
    tables = []
    if verdicts:
        tables.append(_lines(["work", "measure", "worst", "wanted", "in this row, threads", ""], verdicts))
    if report["rows"]:
        head = ["row", "threads", "median", "spread", "x torch", "x NumPy", "of the limit"]
        tables.append(_lines(head, [_cells(row, report) for row in report["rows"]]))
    sweeps = list(table.sweep_cells(report))
    if sweeps:
        tables.append(_lines(table.SWEEP_HEAD, sweeps))
    return facts, tables


def _parts_nvidia(report: Report) -> tuple[list[str], list[str]]:
    facts = [f"{nvidia_table.title(report)}; {_date(report)}."]
    facts += [f"{nvidia_table.ceilings(report)}.", "", *(f"- {remark}" for remark in nvidia_table.remarks(report))]
    verdicts = _lines(nvidia_table.GOALS_HEAD, nvidia_table.goal_cells(report))
    return facts, [verdicts, _lines(nvidia_table.HEAD, (nvidia_table.cells(row) for row in report["rows"]))]


def _date(report: Report) -> str:
    return f"{report['date'][:10]}{'; a quick run' if report['quick'] else ''}"


def _cells(row: Report, report: Report) -> list[str]:
    mine = row["times"]["monotile"]
    share = f"{row['limit']['share']:.0%} of {table.rate(row['limit'])}" if "limit" in row else ""
    peers = [table.against_torch(row, report), table.times_the_speed(row, "NumPy")]
    return [row["name"], str(row["threads"]), table.time(mine["median_s"]), f"{mine['spread']:.0%}", *peers, share]


def _lines(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
