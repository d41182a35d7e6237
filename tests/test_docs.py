"""The manual's examples are programs: each runs, on the interpreter, with the checks it contains."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from monotile import ir, language

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (DOCS / "language.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_language_examples_run(number: int, tmp_path: Path) -> None:
    """Kernels are compiled from their source, so each block becomes a file."""
    path = tmp_path / f"manual_{number}.py"
    path.write_text(BLOCKS[number])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_word_is_in_the_manual() -> None:
    text = (DOCS / "language.md").read_text()
    missing = [name for name in language.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)]
    assert not missing


def test_every_op_is_in_the_description_of_the_ir() -> None:
    text = (DOCS / "ir.md").read_text()
    assert not [kind for kind in ir.KINDS if f"`{kind}`" not in text]
