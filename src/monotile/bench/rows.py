"""The types of a benchmark row, and the rows of the example kernels; attention.py has those of the library.

To add a row, write a function that makes a `TimedCall` and put it in ROWS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import examples

Array = npt.NDArray[Any]
DECODE_GROUP = 8  # query heads of a KV head: one query with more of them is an extend row


@dataclass(frozen=True)
class Sample:
    """Part of an output: a function that takes it, its float64 reference, and the naive formula in the row's dtype."""

    take: Callable[[Array], Array]
    exact: Array
    naive: Array


@dataclass
class TimedCall:
    """One call on given arrays, with its peers.

    Before anything is timed the result is checked against float64: either the array `output` that `run` writes, or the
    `sample` of what it returns.
    """

    run: Callable[[], Any]
    output: Array | None = None
    exact: Array | None = None  # in float64
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)  # "NumPy" writes to the same output
    naive: Callable[[], Array] | None = None  # the formula in the kernel's dtype; None: the NumPy peer is that
    sample: Sample | None = None
    torch: Mapping[str, Callable[[], Any]] | None = None  # variants of the torch call; None: torch is no peer
    work: dict[str, float] = field(default_factory=dict)  # amount by kind, a key of limits.UNITS
    calls: int = 1  # that one `run` makes, where a single one is too short for the clock
    note: str = ""
    steps: Mapping[int, Callable[[], Any]] = field(default_factory=dict)  # a sweep: calls of growing size; `run` is all


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[np.random.Generator, int], TimedCall]
    multithreaded: bool = True  # timed on one thread and on all; else on one
    quick: bool = True  # part of `bench --quick`
    tags: Mapping[str, Any] = field(default_factory=dict)  # op, dtype, sizes: what goals.py selects rows by


def kind_of_call(heads: tuple[int, int], Nq: int, Nk: int) -> str:
    """Return decode for one query of a small group, prefill for as many queries as keys, else extend."""
    if Nq == 1 and heads[0] <= DECODE_GROUP * heads[1]:
        return "decode"
    return "extend" if Nq < Nk else "prefill"


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def sequential_matmul(a: Array, b: Array) -> Array:
    """Multiply by the definition, one term after another in float32.

    NumPy calls a BLAS that sums in blocks, which is about twice as accurate at this size; a row's JSON holds the errors
    of all three.
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    term = np.empty_like(total)
    for k in range(a.shape[1]):
        np.multiply(a[:, k : k + 1], b[k], out=term)
        np.add(total, term, out=total)
    return total


def matmul(rng: np.random.Generator, threads: int) -> TimedCall:
    n = 1024
    a, b, c = _normal(rng, n, n), _normal(rng, n, n), np.empty((n, n), np.float32)
    return TimedCall(
        lambda: examples.matmul(a, b, c, threads=threads),
        c,
        a.astype(np.float64) @ b,
        {"NumPy": lambda: np.matmul(a, b, out=c)},
        lambda: sequential_matmul(a, b),
        work={"flop": 2.0 * n**3},
    )


def matmul_bias_tanh(rng: np.random.Generator, threads: int) -> TimedCall:
    """Time a fused epilogue: bias and tanh should cost next to nothing."""
    n = 1024
    a, b, c = _normal(rng, n, n) / 32, _normal(rng, n, n), np.empty((n, n), np.float32)
    bias, plain = _normal(rng, n), np.empty((n, n), np.float32)

    def numpy() -> None:
        np.matmul(a, b, out=c)
        np.add(c, bias, out=c)
        np.tanh(c, out=c)

    return TimedCall(
        lambda: examples.matmul_bias_tanh(a, b, bias, c, threads=threads),
        c,
        np.tanh(a.astype(np.float64) @ b + bias),
        {"NumPy": numpy, "the plain matmul": lambda: examples.matmul(a, b, plain, threads=threads)},
        lambda: np.tanh(sequential_matmul(a, b) + bias),
        work={"flop": 2.0 * n**3},
    )


def softmax(rng: np.random.Generator, threads: int) -> TimedCall:
    n = 4096
    x, y = _normal(rng, n, n), np.empty((n, n), np.float32)

    def numpy() -> None:
        np.subtract(x, x.max(axis=1, keepdims=True), out=y)
        np.exp(y, out=y)
        np.divide(y, y.sum(axis=1, keepdims=True), out=y)

    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    run = lambda: examples.row_softmax(x, y, BR=16, BC=n, threads=threads)  # noqa: E731
    return TimedCall(run, y, exact, {"NumPy": numpy}, work={"copy": 2.0 * x.nbytes}, note="a row is one block")


def rms_norm(rng: np.random.Generator, threads: int) -> TimedCall:
    n, eps = 4096, 1e-6
    x, w, y = _normal(rng, n, n), _normal(rng, n), np.empty((n, n), np.float32)

    def numpy() -> None:
        np.multiply(x, x, out=y)
        scale = 1 / np.sqrt(y.mean(axis=1, keepdims=True) + np.float32(eps))
        np.multiply(x, scale, out=y)
        np.multiply(y, w, out=y)

    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + eps) * w
    run = lambda: examples.rms_norm(x, w, y, eps, BC=n, threads=threads)  # noqa: E731
    return TimedCall(run, y, exact, {"NumPy": numpy}, work={"copy": 2.0 * x.nbytes}, note="a row is one block")


def launch(rng: np.random.Generator, threads: int) -> TimedCall:
    """Time the overhead of a call, with a kernel that does next to nothing."""
    x, y = _normal(rng, 1, 16), np.empty((1, 16), np.float32)
    calls = 2000

    def run() -> None:
        for _ in range(calls):
            examples.copy(x, y, BR=1, BC=16, threads=threads)

    return TimedCall(run, y, x.astype(np.float64), calls=calls, note="copy of 16 numbers")


ROWS = (
    Row("matmul 1024x1024x1024 float32", matmul),
    Row("matmul + bias + tanh 1024x1024x1024 float32", matmul_bias_tanh),
    Row("softmax 4096x4096 float32", softmax),
    Row("rms_norm 4096x4096 float32", rms_norm),
    Row("launch overhead", launch, multithreaded=False),
)
