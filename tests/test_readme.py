"""What README.md shows is what happens: its kernels and commands run, and its error messages are those a user gets."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from monotile.cli import commands
from monotile.errors import ArgumentShape, ShapeMismatch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
RUN = ("devices", "inspect", "emit", "cache", "diff")  # `check` and `bench` take longer, and have tests of their own
OPTIONAL = ("torch", "transformers", "jax", "mlx")  # where they are installed, what shows them runs
WRONG = """\
import numpy as np

from monotile.language import Const, Tensor, arange, cdiv, dot, kernel, program_id


@kernel
def scores(q: Tensor["M D"], k: Tensor["N D"], s: Tensor["M N"], *, B: Const = 64, D: Const):
    i, j = program_id(cdiv(q.shape[0], B), cdiv(k.shape[0], B))
    rows, cols = i * B + arange(B), j * B + arange(B)
    s[rows, cols] = dot(q[rows, :], k[cols, :])


q, k, s = np.ones((100, 32), np.float32), np.ones((200, 32), np.float32), np.empty((100, 200), np.float32)
scores(q, k, s)
"""


def shell(text: str) -> list[list[str]]:
    """The `monotile` commands in blocks of code without a language, and in the text."""
    blocks = "\n".join(block for name, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if not name)
    blocks = blocks.replace("\\\n", " ")
    lines = re.findall(r"^monotile ([a-z].*?)(?:  +#.*)?$", blocks, re.M) + re.findall(r"`monotile ([a-z][^`]*)`", text)
    return [shlex.split(line) for line in lines]


def test_the_examples_run(tmp_path: Path) -> None:
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)):
        path = tmp_path / f"readme_{number}.py"
        path.write_text(block)
        try:
            runpy.run_path(str(path))
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise


def test_the_errors_are_real(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    with pytest.raises(ShapeMismatch) as caught:
        runpy.run_path(str(path))
    assert f"monotile.errors.ShapeMismatch: {caught.value}\n" in README
    path.write_text(WRONG.replace("k[cols, :])", "k[cols, :].T)").replace("(100, 200)", "(100, 201)"))
    with pytest.raises(ArgumentShape) as call:
        runpy.run_path(str(path))
    assert f"monotile.errors.ArgumentShape: {call.value}\n" in README


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the examples and two reports."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("before.json", "after.json"):
        shutil.copy(ROOT / "baselines" / "nvidia-h200.json", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    found = shell(README)
    assert {words[0] for words in found} == {*RUN, "check", "compile", "bench"}
    for words in found:
        if words[0] in RUN:
            result = CliRunner().invoke(commands.app, words)
            assert result.exit_code == 0, (words, result.output, result.exception)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_the_pages_exist(page: Path) -> None:
    """Their verbs and, but for those that take a kernel's constants, their options."""
    verbs = get_group(commands.app).commands
    for words in shell(page.read_text()):
        assert words[0] in verbs, words
        verb = verbs[words[0]]
        verb = getattr(verb, "commands", {}).get(words[1], verb) if len(words) > 1 else verb
        if not verb.context_settings.get("ignore_unknown_options"):
            known = {option for parameter in verb.params for option in parameter.opts}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words
