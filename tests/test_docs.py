"""The examples in docs/ are programs: each runs, with the checks it contains."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from monotile import MonotileError, ir, language

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = {
    f"{page.stem}-{number}": block
    for page in sorted(DOCS.rglob("*.md"))
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
}


@pytest.mark.parametrize("name", BLOCKS)
def test_examples_run(name: str, tmp_path: Path) -> None:
    """Kernels are compiled from their source, so each block becomes a file."""
    path = tmp_path / f"{name.replace('-', '_')}.py"
    path.write_text(BLOCKS[name])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    for library in ("transformers", "jax"):
        if f"import monotile.{library}" in BLOCKS[name]:
            pytest.importorskip(library)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except MonotileError as error:
        if type(error).__name__ != "NoCompiler":
            raise
        pytest.skip(str(error))


def test_every_word_is_in_the_reference() -> None:
    text = (DOCS / "guide" / "words.md").read_text()
    missing = [name for name in language.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)]
    assert not missing


def test_every_op_is_in_the_description_of_the_ir() -> None:
    text = (DOCS / "internals" / "ir.md").read_text()
    assert not [kind for kind in ir.KINDS if f"`{kind}`" not in text]


def test_every_page_is_listed() -> None:
    text = (DOCS / "README.md").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    assert [page for page in pages if f"({page})" not in text] == []


def test_the_site_refuses_dead_links(tmp_path: Path) -> None:
    dead_links = runpy.run_path(str(DOCS / "site" / "build.py"))["dead_links"]
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a> <a href="a.html">a</a> <a href="https://x.y">x</a>')
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="a.html#there">a</a><a href="c.html">c</a>')
    assert dead_links(tmp_path) == ["b.html: a.html#there", "b.html: c.html"]
    (tmp_path / "b.html").write_text('<p id="here"></p><script src="https://x.y/z.js"></script>')
    assert dead_links(tmp_path) == ["b.html loads https://x.y/z.js"]
