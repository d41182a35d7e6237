"""What README.md shows is what happens: its kernel runs, and its error messages are those a user gets."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from monotile.errors import ArgumentShape, ShapeMismatch

README = (Path(__file__).parents[1] / "README.md").read_text()
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


def test_the_examples_run(tmp_path: Path) -> None:
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)):
        path = tmp_path / f"readme_{number}.py"
        path.write_text(block)
        runpy.run_path(str(path))


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
