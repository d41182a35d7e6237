"""The report as a page and on a terminal: what it says, that it fits, and that it needs nothing from outside."""

from __future__ import annotations

import copy
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from monotile.bench import baselines, entries, html, table
from monotile.cli import commands

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "baselines").glob("*.json"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "input"}


def small(path: Path, rows: int = 30) -> dict[str, Any]:
    """A kept report with few of its rows."""
    report = baselines.load(path)
    return {**report, "rows": report["rows"][:: max(1, len(report["rows"]) // rows)]}


@pytest.fixture(params=KEPT, ids=lambda path: path.stem)
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    return small(request.param)


class Balanced(HTMLParser):
    """Checks that every element is closed where it should be, and gathers attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_every_row_and_its_peer(kept: dict[str, Any]) -> None:
    text = html.page(kept)
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    rows = [attributes for tag, attributes in parser.found if tag == "tr" and "data-id" in attributes]
    assert [row["data-name"] for row in rows] == [row["name"] for row in kept["rows"]]
    for shown, row in zip(rows, kept["rows"], strict=True):
        ratios = [row["ratios"][peer] for peer in entries.PEERS if peer in row["ratios"]]
        assert shown["data-ratio"] == (f"{min(ratios):.4f}" if ratios else "")
    points = sum(entry.point is not None for entry in entries.entries(kept))
    assert points > 3 and sum(tag == "circle" for tag, _ in parser.found) == points
    assert f"All {len(rows)} results are right" in text


def test_the_page_asks_for_nothing(kept: dict[str, Any]) -> None:
    text = html.page(kept)
    assert "default-src 'none'" in text
    assert not re.search(r"""https?://|\b(?:src|href)=|url\(|@import|fetch\(|XMLHttp""", text)


def test_text_from_a_file_is_text(kept: dict[str, Any]) -> None:
    kept = copy.deepcopy(kept)
    kept["rows"][0]["name"] = kept["doubts"] = kept["device"]["processor"] = "<script>alert(1)</script>"
    kept |= {"doubts": ["<script>alert(1)</script>"], "wrong": [{"threads": 1, "wrong": "<script>alert(1)</script>"}]}
    text = html.page(kept)
    assert "<script>alert" not in text and f"1 of {len(kept['rows']) + 1} results are wrong" in text


def test_what_is_doubtful_is_said() -> None:
    report = {**small(KEPT[0]), "dirty": True, "doubts": ["the load was 3.0"], "left_out": ["some row"]}
    report["rows"][0]["times"]["monotile"]["spread"] = 0.5
    text = html.page(report)
    for phrase in ("changes that are not in its commit", "the load was 3.0", "left out: some row", "spread 50%"):
        assert phrase in text


def test_work_is_read_from_names() -> None:
    """As the benchmark counts it: these rows hold both their rates."""
    rows = [row for row in baselines.load(KEPT[0])["rows"] if len(row.get("limits", ())) == 2]
    assert rows
    for row in rows[::20]:
        flops, seconds = row["limits"][1]["rate_per_s"], row["times"]["monotile"]["best_s"]
        shape = entries._shape(row["name"])
        assert shape is not None and shape.flops == pytest.approx(flops * seconds, rel=1e-6)
    assert entries._shape("launch overhead") is entries._shape("caches paged decode 32/8 D128 N64 float32") is None


def test_bench_shows_a_kept_file(tmp_path: Path) -> None:
    kept, page = tmp_path / "kept.json", tmp_path / "out" / "report.html"
    baselines.save(small(KEPT[0], 5), kept)
    result = CliRunner().invoke(commands.app, ["bench", "--from", str(kept), "--html", str(page)])
    assert result.exit_code == 0 and "results are right" in result.output and "wanted" not in result.output
    assert page.read_text().startswith("<!doctype html>")
    missing = CliRunner().invoke(commands.app, ["bench", "--from", str(tmp_path / "none.json")])
    assert missing.exit_code == 1 and "cannot be read" in str(missing.exception)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_fit_the_terminal(kept: dict[str, Any], width: int) -> None:
    """No line is longer, and no name is cut: its words follow each other in the first column."""
    written = io.StringIO()
    table.show(kept, Console(width=width, file=written, force_terminal=True, color_system=None, highlight=False))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    names = " ".join(word for line in lines for word in re.split(r"  ", line)[0].split())
    assert [row["name"] for row in kept["rows"] if row["name"] not in names] == []
    assert "short" not in written.getvalue() and lines[-1].startswith("All ")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(width: int, tmp_path: Path) -> None:
    """Filter and sort as a reader would; nothing is wider than the screen."""
    script = """<script>
const set = (id, value) => {
  const e = document.getElementById(id); e.value = value; e.dispatchEvent(new Event('input')); };
set('filter', 'decode D128'); set('sort', 'time');
const rows = [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden);
const dots = [...document.querySelectorAll('circle')].filter(d => !d.hasAttribute('hidden'));
document.getElementById('theme').click();
const result = document.createElement('pre'); result.id = 'result';
result.textContent = JSON.stringify({names: rows.map(r => r.dataset.name), times: rows.map(r => +r.dataset.time),
  shown: document.getElementById('shown').textContent, dots: dots.length, wide: document.documentElement.scrollWidth,
  inner: innerWidth, theme: document.documentElement.dataset.theme});
document.body.append(result);
</script></body>"""
    report = small(KEPT[0], 60)
    path = tmp_path / "report.html"
    path.write_text(html.page(report).replace("</body>", script))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += [f"--window-size={width},900", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(re.search(r'<pre id="result">(.*?)</pre>', shown, re.S)[1])  # type: ignore[index]
    wanted = [row["name"] for row in report["rows"] if {"decode", "D128"} <= set(row["name"].split())]
    assert sorted(found["names"]) == sorted(wanted) and found["times"] == sorted(found["times"])
    assert found["shown"] == f"{len(wanted)} of {len(report['rows'])} rows" and found["dots"] == len(wanted)
    assert found["wide"] <= found["inner"] and found["theme"] in ("light", "dark")
