"""Write a report as one self-contained page: the machine, doubts, peers, roofline, every row. docs/guide/report.md."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from . import roofline
from .entries import WIDE, Entry, against, entries, roofs
from .roofline import LogAxis, count

Report = dict[str, Any]
Numbered = list[tuple[int, Entry]]
NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
COLUMNS = {
    "name": "row",
    "threads": "threads",
    "time": "time",
    "spread": "spread",
    "ratio": "against the best peer",
    "share": "of the limit",
}
SORTS = {"order": "as measured", **COLUMNS}
DTYPES = ("float32", "float16", "bfloat16")


def save(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report), encoding="utf-8")


def page(report: Report) -> str:
    """Render a report. The text is the page's; what filters and sorts it is the script's."""
    found = list(enumerate(entries(report)))
    name = report["device"].get("name") or report["device"]["processor"]
    sections = [
        _verdict(report, found),
        _machine(report),
        _doubts(report, found),
        _controls(found),
        _peers(found),
        _rooflines(report, found),
        _rows(found),
        _starts(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{NO_REQUESTS}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>monotile on {escape(name)}</title>\n<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>monotile on {escape(name)}</h1><button id="theme" type="button">dark or light</button></header>\n'
        + "\n".join(filter(None, sections))
        + f"\n<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"
    )


@cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def _section(title: str, body: str, name: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n{body}</section>'


# ---- what it is of ---------------------------------------------------------------------------------------------------


def _verdict(report: Report, found: Numbered) -> str:
    wrong = report.get("wrong", ())
    total = len(found) + len(wrong)
    checked = "each was compared with float64 before it was timed"
    right = f'<p class="right"><b>All {total} results are right</b>: {checked}.</p>'
    if wrong:
        head = f'<p class="wrong"><b>{len(wrong)} of {total} results are wrong</b>, and were not timed:</p>'
        right = head + _list(str(row["wrong"]) for row in wrong)
    return f'<section id="verdict">{right}{_list(against([entry for _, entry in found]))}</section>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _machine(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    commit = (report["commit"] or "unknown")[:10] + (" with changes" if report["dirty"] else "")
    facts = {"device": _device(report), "versions": versions, "commit": commit, "date": report["date"][:16]}
    facts["run"] = ("quick: few rows, few repeats" if report["quick"] else "full") + (
        f"; filter: {report['filter']}" if report.get("filter") else ""
    )
    units = {"flop": "FLOP/s", "pair flop": "FLOP/s", "copy": "B/s", "read": "B/s"}
    for threads, limits in sorted(roofs(report).items()):
        rates = ", ".join(f"{kind} {count(rate, units[kind])}" for kind, rate in limits.items())
        facts["limits" if report.get("backend") == "nvidia" else f"limits, threads: {threads}"] = rates
    body = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return _section("The machine", f"<dl>{body}</dl>", "machine")


def _device(report: Report) -> str:
    device = report["device"]
    if report.get("backend") == "nvidia":
        memory = f"{device['memory_bytes'] / 2**30:.0f} GiB"
        return f"{device['name']} ({device['architecture']}), {device['multiprocessors']} multiprocessors, {memory}"
    unit = f", vector unit {device['vectors']}" if "vectors" in device else ""
    return f"{device['processor']} ({device['llvm_name']}), {device['processors']} processors{unit}"


def _doubts(report: Report, found: Numbered) -> str:
    lines = [*report.get("doubts", ()), *(f"left out: {name}" for name in report.get("left_out", ()))]
    if report["dirty"]:
        lines.append("the source had changes that are not in its commit")
    if report["quick"]:
        lines.append("a quick run: few repeats, so that a busy moment shows in its times")
    marked = sum(bool(entry.doubts) for _, entry in found)
    if marked:
        why = f"a spread above {WIDE:.0%}, or a processor that other work shared"
        lines.append(f"{marked} of {len(found)} rows are marked below: {why}")
    return _section("What is doubtful", _list(lines or ["nothing was noticed"]), "doubts")


# ---- pictures --------------------------------------------------------------------------------------------------------


def _controls(found: Numbered) -> str:
    threads = sorted({entry.threads for _, entry in found})
    works = sorted({entry.work for _, entry in found})
    return (
        '<section id="controls"><label>filter <input id="filter" type="search" placeholder="decode D128"></label>'
        + _select("work", {"": "all work", **{work: work for work in works}})
        + (_select("threads", {"": "any threads", **{str(n): f"threads: {n}" for n in threads}}) if threads[1:] else "")
        + _select("verdict", {"": "all rows", "slower": "slower than the peer", "doubtful": "doubtful"})
        + _select("sort", {key: f"sort: {text}" for key, text in SORTS.items()})
        + f'<output id="shown">{len(found)} of {len(found)} rows</output></section>'
    )


def _select(name: str, options: dict[str, str]) -> str:
    body = "".join(f'<option value="{escape(key)}">{escape(text)}</option>' for key, text in options.items())
    return f'<select id="{name}" aria-label="{name}">{body}</select>'


def ratio_axis(found: Numbered) -> LogAxis:
    """Return the axis of all bars, in per cent of their width."""
    ratios = [entry.peer.ratio for _, entry in found if entry.peer is not None]
    return LogAxis(min([0.5, *ratios]) / 1.15, max([2.0, *ratios]) * 1.15, 0.0, 100.0)


def _peers(found: Numbered) -> str:
    """One line for each kind of work and dtype, with a dot for each row."""
    groups: dict[tuple[str, str], Numbered] = {}
    for number, entry in found:
        if entry.peer is not None:
            groups.setdefault((entry.work, entry.dtype), []).append((number, entry))
    if not groups:
        return ""
    axis = ratio_axis(found)
    ticks = "".join(f'<span style="left:{axis.at(value):.1f}%">{value:g} x</span>' for value in axis.ticks(7))
    lines = [f'<div class="strip axis"><span></span><span class="track">{ticks}</span><span></span></div>']
    for (work, dtype), rows in groups.items():
        ratios = [entry.peer.ratio for _, entry in rows if entry.peer is not None]
        dots = "".join(_strip_dot(axis, number, entry) for number, entry in rows)
        one = f'<i class="one" style="left:{axis.at(1.0):.1f}%"></i>'
        span = f"{min(ratios):.2f}" if len(ratios) == 1 else f"{min(ratios):.2f} to {max(ratios):.3g}"
        head = f"<span>{escape(f'{work} {dtype}'.strip())}</span>"
        lines.append(f'<div class="strip">{head}<span class="track">{one}{dots}</span><span>{span}</span></div>')
    said = "How many times as fast as the fastest of torch and NumPy; a dot is a row. Right of 1 x monotile is faster."
    return _section("Against the best peer", f"<p>{said}</p>{''.join(lines)}", "peers")


def _strip_dot(axis: LogAxis, number: int, entry: Entry) -> str:
    assert entry.peer is not None
    title = f"{entry.name}, threads: {entry.threads}: {entry.peer.ratio:.2f} x {entry.peer.name}"
    place = f"left:{axis.at(entry.peer.ratio):.1f}%"
    return f'<i class="dot {entry.peer.verdict}" data-id="{number}" style="{place}" title="{escape(title)}"></i>'


def _rooflines(report: Report, found: Numbered) -> str:
    figures, on_gpu = [], report.get("backend") == "nvidia"
    for threads, limits in sorted(roofs(report).items()):
        drawn = roofline.draw([row for row in found if row[1].threads == threads], limits, on_gpu=on_gpu)
        if drawn:
            caption = "" if on_gpu else f"<figcaption>threads: {threads}</figcaption>"
            figures.append(f'<figure data-threads="{threads}">{drawn}{caption}</figure>')
    if not figures:
        return ""
    kinds = [kind for kind in DTYPES if any(e.point is not None and e.dtype == kind for _, e in found)]
    legend = "".join(f'<span><i class="key {kind}"></i>{kind}</span>' for kind in kinds)
    placed = sum(entry.point is not None for _, entry in found)
    said = f"{placed} of {len(found)} rows; the arithmetic of the others is not counted."
    body = f'<p>{said}</p><p class="legend">{legend}</p><div class="figures">{"".join(figures)}</div>'
    return _section("Roofline", body, "roofline")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(found: Numbered) -> str:
    head = "".join(
        f'<th scope="col" class="{key}" data-sort="{key}"><button type="button">{text}</button></th>'
        for key, text in COLUMNS.items()
    )
    axis = ratio_axis(found)
    body = "\n".join(_row(axis, number, entry) for number, entry in found)
    kind = "" if len({entry.threads for _, entry in found}) > 1 else ' class="one-count"'
    return _section(
        "Every row", f"<table{kind}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>", "rows"
    )


def _row(axis: LogAxis, number: int, entry: Entry) -> str:
    peer = entry.peer
    keys = {
        "id": number, "name": entry.name, "work": entry.work, "threads": entry.threads, "time": f"{entry.time_s:.4g}",
        "spread": f"{entry.spread:.4f}", "ratio": f"{peer.ratio:.4f}" if peer else "",
        "share": "" if entry.share is None else f"{entry.share:.4f}", "verdict": peer.verdict if peer else "",
        "doubtful": "yes" if entry.doubts else "",
    }  # fmt: skip
    data = " ".join(f'data-{key}="{escape(str(value))}"' for key, value in keys.items())
    marks = "".join(f'<small class="doubt">{escape(doubt)}</small>' for doubt in entry.doubts)
    notes = "".join(f"<small>{escape(note)}</small>" for note in entry.notes)
    share = "" if entry.share is None else f"{entry.share:.0%}<small>{escape(entry.limit)}</small>"
    times = {"time": _time(entry.time_s), "spread": f"{entry.spread:.0%}"}
    cells = _cells(threads=str(entry.threads), **times, ratio=_bar(axis, entry), share=share)
    return f'<tr {data}><th scope="row">{escape(entry.name)}{notes}{marks}</th>{cells}</tr>'


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"


def _cells(**texts: str) -> str:
    return "".join(f'<td class="{key}" data-label="{COLUMNS[key]}">{text}</td>' for key, text in texts.items())


def _bar(axis: LogAxis, entry: Entry) -> str:
    """Draw a bar from 1 to the ratio: to the right where monotile is faster."""
    if entry.peer is None:
        return '<span class="none">no peer</span>'
    one, end = axis.at(1.0), axis.at(entry.peer.ratio)
    left, width = min(one, end), abs(end - one)
    bar = f'<i class="{entry.peer.verdict}" style="left:{left:.1f}%;width:{width:.1f}%"></i>'
    mark = f'<i class="one" style="left:{one:.1f}%"></i>'
    said = f"{entry.peer.ratio:.2f} x {escape(entry.peer.name)}"
    return f'<span class="track">{bar}{mark}</span><span class="said">{said}</span>'


def _starts(report: Report) -> str:
    """List what a first call costs in a new process."""
    lines = []
    for row in report.get("starts", ()):
        if "best_s" in row:
            lines.append(f"{row['name']}: {_time(row['best_s'])}")
        else:
            times = f"{_time(row['compiled_s'])} compiled, {_time(row['from_disk_s'])} from the disk cache"
            lines.append(f"{row['name']}: {times}")
    return _section("In a new process", _list(lines), "starts") if lines else ""
