# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""print in a kernel, and the values of one program line by line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from monotile.cli import running
from monotile.cli.request import BadRequest, parse
from monotile.errors import UnsupportedPython
from monotile.language import Const, Tensor, arange, kernel, program_id


@kernel
def shout(x: Tensor["N"], y: Tensor["N"], *, B: Const = 2):
    i = program_id(x.shape[0] // B)
    rows = i * B + arange(B)
    tile = x[rows] * 2.0
    if i > 0:
        print("tile", tile, "of", B)
    y[rows] = tile


def test_print_shows_program_line_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    shout(x, y, backend="interpreter")
    assert capsys.readouterr().out == "program 1, line 23: tile [4. 6.] of 2\n"
    with pytest.raises(UnsupportedPython, match=r"interpreter only[\s\S]*print\("):
        shout(x, y, backend="cpu")


def test_values_of_one_program() -> None:
    place = f"{Path(__file__)}:shout"
    found = running.text(place, parse([], ["x=4"], None), "program=1")
    assert found.startswith("program 1 of 2") and "  21  tile = x[rows] * 2.0\n        tile float32[2]: [" in found
    assert "i int32: 1" in found and "y[...] = float32[2]" in found
    for at in ("program=2", "3"):
        with pytest.raises(BadRequest, match="write --at program"):
            running.text(place, parse([], ["x=4"], None), at)
