"""The example kernels on every backend, in every float type, on shapes that do not fit their blocks.

The measure: at most twice as far from float64 as the definition evaluated naively, with inputs and outputs of the same
types and float32 between them.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arrays import FLOATS, Array, numpy_type, poisoned, random
from monotile.kernels import examples
from usable import TRITON, usable

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINING = EXAMPLES / "train_characters.py"
ON_RANKS = EXAMPLES / "context_parallel.py"  # tests/distributed runs it
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path not in (TRAINING, ON_RANKS))
GALLERY = [path for path in SCRIPTS if "def largest_error(" in path.read_text()]
TINY = 1e-30
EPS = 1e-3
MATMUL_BLOCKS = {"BM": 16, "BN": 32, "BK": 8}
ROW_BLOCKS = {"BR": 4, "BC": 16}
# (M, N, K): ones, primes, a multiple of every block, one past it, smaller than a block, and nothing along each side
MATMUL_SHAPES = [
    (1, 1, 1), (7, 13, 11), (16, 32, 8), (32, 64, 24), (17, 33, 9), (3, 5, 2), (0, 5, 4), (5, 0, 4), (5, 4, 0),
    (61, 1, 37),
]  # fmt: skip
ROW_SHAPES = [(1, 1), (7, 13), (4, 16), (8, 48), (5, 17), (3, 2), (0, 5), (1, 97), (31, 1)]


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def single(x: Array) -> Array:
    return x.astype(np.float32)


def product(a: Array, b: Array) -> Array:
    """a @ b, term after term, in the type of its operands."""
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k]
    return total


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
    return e / e.sum(axis=1, keepdims=True)


def norm(x: Array, w: Array) -> Array:
    mean = (x * x).sum(axis=1, keepdims=True) / x.dtype.type(x.shape[1])
    return x / np.sqrt(mean + x.dtype.type(EPS)) * w


def agrees(found: Array, formula: Callable[..., Array], *inputs: Array) -> None:
    """Checks a result against the formula in float64, by the measure above."""
    exact = formula(*map(wide, inputs))
    naive = formula(*map(single, inputs)).astype(found.dtype)
    assert found.shape == exact.shape
    error = np.abs(wide(found) - exact).max(initial=0.0)
    allowed = 2 * np.abs(wide(naive) - exact).max(initial=0.0) + TINY
    assert error <= allowed, (error, allowed)  # not so when it is NaN


def layouts(x: Array) -> dict[str, Array]:
    """The same numbers in memory in other ways; what lies between them is NaN."""
    rows, cols = x.shape
    spaced = np.full((2 * rows + 1, 3 * cols + 2), np.nan, x.dtype)
    spaced[1::2, 2::3] = x
    margin = np.full((rows + 4, cols + 6), np.nan, x.dtype)
    margin[2:-2, 3:-3] = x
    return {
        "transposed": np.asarray(x.T.copy()).T,
        "spaced": spaced[1::2, 2::3],
        "part of a larger one": margin[2:-2, 3:-3],
        "backwards": x[::-1, ::-1].copy()[::-1, ::-1],
    }


LAYOUTS = tuple(layouts(np.zeros((2, 2), np.float32)))


def framed(shape: tuple[int, int], dtype: str) -> tuple[Array, Array]:
    """A poisoned output inside a larger array, and that array: nothing around the output may change."""
    around = poisoned((shape[0] + 2, shape[1] + 2), dtype)
    return around[1:-1, 1:-1], around


def untouched(around: Array) -> bool:
    inner = np.zeros(around.shape, bool)
    inner[1:-1, 1:-1] = True
    return bool(np.isnan(single(around)[~inner]).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
def test_matmul(backend: str, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = random((m, k), dtype, 1), random((k, n), dtype, 2)
    c, around = framed((m, n), dtype)
    examples.matmul(a, b, c, **MATMUL_BLOCKS, backend=backend)
    agrees(c, product, a, b)
    assert untouched(around)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_reads_any_layout(backend: str, dtype: str, layout: str) -> None:
    a, b = layouts(random((37, 19), dtype, 1))[layout], layouts(random((19, 41), dtype, 2))[layout]
    c = layouts(poisoned((37, 41), dtype))[layout]
    examples.matmul(a, b, c, **MATMUL_BLOCKS, backend=backend)
    agrees(c, product, a, b)


def test_matmul_with_the_default_blocks(backend: str) -> None:
    a, b, c = random((257, 129), seed=1), random((129, 300), seed=2), poisoned((257, 300))
    examples.matmul(a, b, c, backend=backend)
    agrees(c, product, a, b)


@pytest.mark.parametrize("inputs, output", [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16")])
def test_matmul_may_store_another_type(backend: str, inputs: str, output: str) -> None:
    a, b, c = random((17, 23), inputs, 1), random((23, 33), inputs, 2), poisoned((17, 33), output)
    examples.matmul(a, b, c, **MATMUL_BLOCKS, backend=backend)
    agrees(c, product, a, b)


def biased(a: Array, b: Array, bias: Array) -> Array:
    return np.tanh(product(a, b) + bias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", MATMUL_SHAPES, ids=str)
def test_matmul_bias_tanh(backend: str, dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, bias = random((m, k), dtype, 1), random((k, n), dtype, 2), random(n, dtype, 3)
    c, around = framed((m, n), dtype)
    examples.matmul_bias_tanh(a, b, bias, c, **MATMUL_BLOCKS, backend=backend)
    agrees(c, biased, a, b, bias)
    assert untouched(around)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_bias_tanh_reads_any_layout(backend: str, layout: str) -> None:
    a, b = layouts(random((18, 19), seed=1))[layout], layouts(random((19, 35), seed=2))[layout]
    bias, c = np.repeat(random(35, seed=3), 2)[::2], layouts(poisoned((18, 35)))[layout]
    examples.matmul_bias_tanh(a, b, bias, c, **MATMUL_BLOCKS, backend=backend)
    agrees(c, biased, a, b, bias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_row_softmax(backend: str, dtype: str, shape: tuple[int, int]) -> None:
    x = (random(shape, dtype, 1) * numpy_type(dtype).type(4)).astype(numpy_type(dtype))
    y, around = framed(shape, dtype)
    examples.row_softmax(x, y, **ROW_BLOCKS, backend=backend)
    agrees(y, softmax, x)
    assert untouched(around)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_row_softmax_reads_any_layout(backend: str, dtype: str, layout: str) -> None:
    x, y = layouts(random((9, 35), dtype, 1))[layout], layouts(poisoned((9, 35), dtype))[layout]
    examples.row_softmax(x, y, **ROW_BLOCKS, backend=backend)
    agrees(y, softmax, x)


def test_row_softmax_of_large_and_hidden_scores(backend: str) -> None:
    """Large scores do not overflow, and a first block of -inf does not make NaN of what follows."""
    x, y = random((6, 40), seed=1) * np.float32(1000), poisoned((6, 40))
    x[2:, :20] = -np.inf
    examples.row_softmax(x, y, **ROW_BLOCKS, backend=backend)
    agrees(y, softmax, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_rms_norm(backend: str, dtype: str, shape: tuple[int, int]) -> None:
    x, w = random(shape, dtype, 1), random(shape[1], dtype, 2)
    y, around = framed(shape, dtype)
    examples.rms_norm(x, w, y, EPS, **ROW_BLOCKS, backend=backend)
    agrees(y, norm, x, w)
    assert untouched(around)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_reads_any_layout(backend: str, dtype: str, layout: str) -> None:
    x, y = layouts(random((9, 35), dtype, 1))[layout], layouts(poisoned((9, 35), dtype))[layout]
    w = np.repeat(random(35, dtype, 2), 3)[::3]
    examples.rms_norm(x, w, y, EPS, **ROW_BLOCKS, backend=backend)
    agrees(y, norm, x, w)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_copy(backend: str, dtype: str, shape: tuple[int, int]) -> None:
    x = random(shape, dtype, 1)
    y, around = framed(shape, dtype)
    examples.copy(x, y, **ROW_BLOCKS, backend=backend)
    assert np.array_equal(x, y) and untouched(around)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_scripts_run(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    said, _, error = capsys.readouterr().out.partition(":")
    assert said == "largest error" and float(error) < 1e-3


@pytest.mark.parametrize("backend", usable("interpreter", "metal", *TRITON))
@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.stem)
def test_the_gallery_on_other_backends(script: Path, backend: str) -> None:
    """`python examples/rope.py metal` is another way to run one."""
    assert runpy.run_path(str(script))["largest_error"](backend) < 2e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains(compiled: bool) -> None:
    """The loss of a few steps falls well below that of a guess, and is the same in one compiled graph."""
    torch = pytest.importorskip("torch", reason="the example trains a torch model")
    example = runpy.run_path(str(TRAINING))
    losses = example["train"](12, "aot_eager" if compiled else None)
    assert losses[0] > 4.0 and losses[-1] < 3.7
    assert "<svg" in example["picture"](losses)
    torch.compiler.reset()
