# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""Elements that several programs access, at least one of them to write: the interpreter reports the line."""

from __future__ import annotations

import numpy as np
import pytest

from arrays import random
from monotile.errors import RaceBetweenPrograms
from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id
from usable import usable


@kernel
def total(x: Tensor["N"], y: Tensor["N"]):
    i = program_id(x.shape[0])
    y[0] += x[i]


@kernel
def blocks(x: Tensor["N"], y: Tensor["N"], *, B: Const = 4):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B + 1)
    y[rows] = x[rows]


@kernel
def neighbour(x: Tensor["N"], y: Tensor["N"]):
    i = program_id(x.shape[0])
    y[i] = x[i]
    y[i] = y[i - 1]


@kernel
def following(x: Tensor["N"], y: Tensor["N"]):
    i = program_id(x.shape[0])
    y[i] = y[i + 1] + x[i]


@kernel
def twice(x: Tensor["N"], y: Tensor["N"], *, N: Const):
    y[arange(N) // 2] = x[:]


CASES = {
    total: r"program 1 reads what program 0 wrote y\[0\]",
    blocks: r"program 0 and program 1 both write y\[4\]",
    neighbour: r"program 1 reads what program 0 wrote y\[0\]",
    following: r"program 1 writes what program 0 read y\[1\]",
    twice: r"one store writes twice to y\[0\]",
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.name)
def test_found_with_the_line(function) -> None:
    x, y = random(9), np.full(9, 7.0, np.float32)
    with pytest.raises(RaceBetweenPrograms, match=CASES[function]) as caught:
        function(x, y, backend="interpreter")
    assert caught.value.loc is not None and "y[" in caught.value.loc.text
    assert ("cure: store at" if function is twice else "cure: give every") in str(caught.value)
    assert (y == 7.0).all() or function is twice  # as it was


@pytest.mark.parametrize("function", [total, blocks, following, twice], ids=lambda f: f.name)
@pytest.mark.parametrize("backend", usable("metal"))
def test_found_by_the_runner(function, backend: str) -> None:
    """metal: it was reported as a fault of monotile, with lines of the Metal text."""
    x, y = random(9), np.full(9, 7.0, np.float32)
    found = "one store writes twice to an element of y" if function is twice else "an element of y that another program"
    with pytest.raises(RaceBetweenPrograms, match=found) as caught:
        function(x, y, backend=backend)
    assert caught.value.loc is not None and "y[" in caught.value.loc.text
    assert 'backend="interpreter"' in str(caught.value)
