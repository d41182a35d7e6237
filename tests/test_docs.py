"""The examples in docs/ are programs: each runs, with the checks it contains."""

from __future__ import annotations

import importlib.util
import re
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
