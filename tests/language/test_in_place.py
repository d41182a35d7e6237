"""An output that is also an input: taken where every element is read before it is written, else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arrays import Array, random, same
from monotile.errors import OverlappingOutput
from monotile.language import Const, Tensor, arange, cdiv, kernel, program_id, zeros
from monotile.launch.kernel import Kernel
from usable import TRITON, usable


@pytest.fixture(params=usable("interpreter", "cpu", "metal", *TRITON))
def backend(request: pytest.FixtureRequest) -> str:
    """Here Metal text is run, too."""
    name: str = request.param
    return name


@kernel
def rotate(x: Tensor["M D"], c: Tensor["M H"], s: Tensor["M H"], y: Tensor["M D"], *, D: Const, H: Const, B: Const = 4):
    """Each half is written in a statement that loads both."""
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows, 0:H] = x[rows, 0:H] * c[rows] - x[rows, H:D] * s[rows]
    y[rows, H:D] = x[rows, H:D] * c[rows] + x[rows, 0:H] * s[rows]


@kernel
def rotate_pairs(
    x: Tensor["M D"], c: Tensor["M H"], s: Tensor["M H"], y: Tensor["M D"], *, D: Const, H: Const, B: Const = 4
):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    even, odd = 2 * arange(H), 2 * arange(H) + 1
    y[rows, even] = x[rows, even] * c[rows] - x[rows, odd] * s[rows]
    y[rows, odd] = x[rows, odd] * c[rows] + x[rows, even] * s[rows]


@kernel
def centre(x: Tensor["M N"], c: Tensor["M H"], s: Tensor["M H"], y: Tensor["M N"], *, H: Const, B: Const = 8):
    """Two loops over a row: the second reads and writes block by block."""
    i = program_id(x.shape[0])
    total = zeros(B)
    for j in range(0, x.shape[1], B):
        total += x[i, j + arange(B)]
    for j in range(0, x.shape[1], B):
        y[i, j + arange(B)] = x[i, j + arange(B)] - total.sum(axis=0)


@kernel
def shifted(x: Tensor["M N"], c: Tensor["M H"], s: Tensor["M H"], y: Tensor["M N"], *, B: Const = 8, H: Const):
    i, j = program_id(x.shape[0], cdiv(x.shape[1], B))
    cols = j * B + arange(B)
    y[i, cols] = x[i, cols + 1]


@kernel
def twice(x: Tensor["M N"], c: Tensor["M H"], s: Tensor["M H"], y: Tensor["M N"], *, N: Const, H: Const):
    for i in range(x.shape[0]):
        y[i, :] = x[i, :] + 1.0
    for i in range(x.shape[0]):
        y[i, :] = x[i, :] * 2.0


def arguments(n: int = 22) -> tuple[Array, Array, Array]:
    return random((7, n)), random((7, 11), seed=1), random((7, 11), seed=2)


@pytest.mark.parametrize("function", [rotate, rotate_pairs, centre])
def test_taken(backend: str, function: Kernel) -> None:
    x, c, s = arguments()
    expected = np.empty_like(x)
    for _ in range(2):  # the second call finds the program
        function(x, c, s, expected, backend=backend)
        function(x, c, s, x, backend=backend)
        same(x, expected)


@pytest.mark.parametrize(("function", "why"), [(shifted, "does not write.*cols . 1"), (twice, "after they are")])
def test_refused(function: Kernel, why: str) -> None:
    x, c, s = arguments()
    before = x.copy()
    for _ in range(2):
        with pytest.raises(OverlappingOutput, match=f"the output 'y' is also the input 'x', but .*{why}.*separate"):
            function(x, c, s, x, backend="interpreter")
    with pytest.raises(OverlappingOutput, match="shares memory with 'x'"):  # of two views only the same one is taken
        rotate(x[1:], c[1:], s[1:], x[:-1], backend="interpreter")
    same(x, before)


def test_interleaved_views_of_torch() -> None:
    torch: Any = pytest.importorskip("torch")
    x, c, s = map(torch.from_numpy, arguments(44))
    expected = torch.empty((7, 22))
    rotate(x[:, ::2], c, s, expected, backend="cpu")
    rotate(x[:, ::2], c, s, x[:, 1::2], backend="cpu")
    assert (x[:, 1::2] == expected).all()
    rotate(x[:, ::2], c, s, x[:, ::2], backend="cpu")
    assert (x[:, ::2] == expected).all()
    with pytest.raises(OverlappingOutput):
        rotate(x[:, :22], c, s, x[:, 1:23], backend="cpu")
