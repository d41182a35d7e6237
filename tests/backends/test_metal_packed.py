"""Packed rows as Metal source: blocks of 1 to 128 rows, with every option, split or not, held to the library's error
rule; and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from backends.metal_orders import collect_reports, forget, in_every_order
from monotile import metal
from monotile.backends.choices import AttentionChoice, AttentionProblem, Choices, cdiv
from monotile.backends.metal.backend import MetalBackend, MetalProgram
from monotile.kernels import reference
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.scores import Options
from monotile.library import ops, registry

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
Array = np.ndarray[Any, Any]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def forget_afterwards() -> Iterator[None]:
    yield
    forget()


class Fixed(Choices):
    """The choice of a test: packed rows in blocks of BR rows and BK keys, split or not."""

    def __init__(self, BR: int, BK: int, splits: int) -> None:
        self.blocks, self.parts = {"BR": BR, "BK": BK, "packed": True}, splits

    def attention(self, problem: AttentionProblem, keys_per_split: int | None = None) -> AttentionChoice:
        chosen = AttentionChoice(self.blocks)
        return chosen.in_splits(self.parts, cdiv(problem.keys, self.parts)) if self.parts else chosen


def randoms(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


def additive(*shape: int) -> Array:
    mask = randoms(*shape, seed=7)
    mask[..., : shape[-1] // 2 : 3] = -np.inf
    return mask


def boolean(*shape: int) -> Array:
    return np.random.default_rng(shape).random(shape) < 0.6


SLOPES = (2.0 ** -np.arange(1, 65)).astype(np.float32)
# Options of a call with B batches, H query heads, Nq queries and N keys. Masks broadcast along every axis.
OPTIONS: dict[str, Any] = {
    "plain": lambda B, H, Nq, N: {},
    "causal": lambda B, H, Nq, N: {"causal": True},
    "upper left": lambda B, H, Nq, N: {"causal": "upper_left"},
    "window": lambda B, H, Nq, N: {"window": (40, 3)},
    "bool mask": lambda B, H, Nq, N: {"mask": boolean(B, H, Nq, N)},
    "bool mask of keys": lambda B, H, Nq, N: {"mask": boolean(1, 1, 1, N)},
    "bool mask of heads": lambda B, H, Nq, N: {"mask": boolean(1, H, 1, N), "causal": True},
    "bool mask of queries": lambda B, H, Nq, N: {"mask": boolean(B, 1, Nq, N)},
    "bool mask of rows": lambda B, H, Nq, N: {"mask": boolean(B, H, Nq, 1)},
    "additive mask": lambda B, H, Nq, N: {"mask": additive(B, H, Nq, N)},
    "float16 additive mask of queries": lambda B, H, Nq, N: {"mask": additive(1, 1, Nq, N).astype(np.float16)},
    "mask_mod": lambda B, H, Nq, N: {"mask_mod": lambda b, h, i, j: (j % 3 != 1) | (i % 2 == h % 2)},
    "score_mod": lambda B, H, Nq, N: {"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "causal": True},
    "softcap": lambda B, H, Nq, N: {"softcap": 3.0},
    "sinks": lambda B, H, Nq, N: {"sinks": randoms(H, seed=9), "window": (None, 0)},
}
# B, query heads, KV heads, queries, keys, D, Dv; dtype; BR, BK. Rows and keys end inside blocks, and blocks of rows
# inside heads.
BLOCKS: list[tuple[tuple[int, ...], str, int, int]] = [
    ((2, 3, 3, 1, 90, 576, 512), "bfloat16", 1, 64),
    ((1, 4, 2, 1, 90, 256, 256), "float16", 2, 64),
    ((2, 3, 1, 1, 90, 72, 40), "bfloat16", 4, 64),
    ((2, 6, 2, 2, 90, 64, 64), "float32", 8, 64),
    ((1, 7, 1, 1, 90, 512, 512), "float16", 8, 64),
    ((2, 10, 2, 3, 90, 80, 64), "float16", 16, 64),
    ((1, 5, 1, 3, 90, 33, 77), "float32", 16, 32),
    ((1, 7, 1, 6, 90, 128, 128), "bfloat16", 24, 64),
    ((1, 5, 1, 5, 90, 128, 128), "bfloat16", 32, 64),
    ((1, 11, 1, 3, 90, 576, 512), "bfloat16", 32, 128),
    ((1, 9, 1, 3, 90, 320, 288), "float32", 32, 64),
    ((1, 13, 1, 3, 90, 256, 256), "bfloat16", 40, 64),
    ((1, 7, 1, 6, 90, 64, 96), "float32", 64, 32),
    ((1, 13, 1, 5, 90, 192, 128), "bfloat16", 64, 16),
    ((1, 19, 1, 4, 90, 64, 64), "float16", 80, 64),
    ((1, 16, 1, 7, 90, 64, 64), "bfloat16", 128, 64),
    ((1, 33, 1, 4, 90, 128, 128), "float16", 128, 32),
]
CASES = [
    pytest.param(*block, name, (0, 2, 3)[(row + column) % 3], id=f"{name}, {block[1]} {block[0][5]}, BR {block[2]}")
    for row, block in enumerate(BLOCKS)
    for column, name in enumerate(OPTIONS)
    if (row + 2 * column) % 7 == 0
]


@pytest.mark.parametrize(("sizes", "dtype", "BR", "BK", "name", "splits"), CASES)
def test_options(
    sizes: tuple[int, ...], dtype: str, BR: int, BK: int, name: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    B, Hq, Hkv, Nq, N, D, Dv = sizes
    shapes = {"q": (B, Hq, Nq, D), "k": (B, Hkv, N, D), "v": (B, Hkv, N, Dv)}
    inputs = {n: randoms(*shape, dtype=TYPES[dtype], seed=seed) for seed, (n, shape) in enumerate(shapes.items())}
    inputs |= OPTIONS[name](B, Hq, Nq, N)
    monkeypatch.setattr(MetalBackend, "choices", Fixed(BR, BK, splits))
    op = registry.OPS["attention"]
    found = in_every_order(lambda: op.run(inputs, backend="metal", threads=None), monkeypatch)
    exact, naive = op.exact(inputs), op.naive(inputs)
    for output, result in found.items():
        verdict = registry.judge(output, result, exact[output], naive[output])
        assert verdict.ok, f"{output}: the error is {verdict.error}, {verdict.allowed} is allowed"


@pytest.mark.parametrize(("BR", "D"), [(4, 64), (16, 64), (32, 128), (64, 64)])
def test_a_mask_is_read_once_and_not_outside(BR: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element that belongs to a row of the block; one that is broadcast along heads or queries has one address."""
    reports = collect_reports(monkeypatch)
    monkeypatch.setattr(MetalBackend, "choices", Fixed(BR, 32, 0))
    q, k, v = randoms(1, BR, 1, D), randoms(1, 1, 70, D, seed=1), randoms(1, 1, 70, D, seed=2)
    for shape in ((1, BR, 1, 70), (1, 1, 1, 70)):
        reports.clear()
        ops.attention(q, k, v, mask=boolean(*shape), backend="metal")
        assert reports[-1].bytes_read["mask_p"] == BR * 70


# ---- values that are columns of the keys -----------------------------------------------------------------------------

# Rows, D, Dv, dtype, BR, BK, and how often the memory of the keys is read. Blocks that simdgroups read where they are
# are read twice, the second time from a cache.
SHARED: list[tuple[int, int, int, str, int, int, float]] = [
    (16, 64, 64, "float16", 16, 64, 1),
    (15, 128, 84, "float16", 16, 64, 1),
    (16, 288, 256, "bfloat16", 16, 32, 1),
    (31, 128, 128, "bfloat16", 32, 64, 1),
    (64, 128, 96, "bfloat16", 64, 32, 1),
    (64, 128, 128, "float32", 64, 16, 1),
    (128, 128, 64, "bfloat16", 128, 32, 1),
    (4, 64, 64, "float32", 4, 64, 2),
    (8, 576, 512, "bfloat16", 8, 64, 1 + 512 / 576),
    (16, 576, 512, "bfloat16", 16, 64, 1 + 512 / 576),
    (32, 576, 512, "bfloat16", 32, 128, 1 + 512 / 576),
    (32, 576, 512, "float32", 32, 128, 1 + 512 / 576),
]


@pytest.mark.parametrize(("rows", "D", "Dv", "dtype", "BR", "BK", "times"), SHARED)
def test_values_are_columns_of_the_keys(rows: int, D: int, Dv: int, dtype: str, BR: int, BK: int, times: float) -> None:
    """A tile of the keys that is staged serves as the values too."""
    q, k = randoms(1, 1, rows, D, dtype=TYPES[dtype]), randoms(1, 1, 150, D, dtype=TYPES[dtype], seed=1)
    out, lse = np.empty((1, 1, rows, Dv), q.dtype), np.empty((1, 1, rows), np.float32)
    args = [q, k, None, None, None, None, out, lse, None, None, None, *DENSE, D**-0.5, 1, 0, 0]
    for options, plain in ((Options(), {}), (Options(left=60), {"window": (60, None)})):
        found = set()
        for order in metal.ORDERS:
            out[...], lse[...] = metal.poisoned(out.shape, out.dtype), metal.poisoned(lse.shape, np.float32)
            program = launch(args, order, options=options, Dv=Dv, BR=BR, BK=BK, packed=True)
            found.add(out.tobytes() + lse.tobytes())
        assert len(found) == 1, "the outputs depend on the order of threads"
        whole = q.reshape(1, rows, 1, D), k, k[..., :Dv]
        exact, exact_lse = reference.attention(*whole, **plain)
        naive, naive_lse = reference.attention(*whole, **plain, compute=np.float32)
        assert registry.judge("out", out.reshape(exact.shape), exact, naive.astype(q.dtype)).ok
        assert registry.judge("lse", lse.reshape(exact_lse.shape), exact_lse, naive_lse).ok
        assert program.report is not None
        if not plain:
            assert program.report.bytes_read["k_p"] == pytest.approx(times * k.nbytes)


def launch(args: list[Any], order: str, **consts: Any) -> MetalProgram:
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    scalars = [a for a in args if isinstance(a, int | float)]
    program = MetalBackend(order).compile(attention.ir(*args, **consts))
    assert isinstance(program, MetalProgram)
    words = [w for a in arrays for w in (0, *a.shape, *(stride // a.itemsize for stride in a.strides))]
    bound = program.bind(words + [0] * len(scalars))
    program.launch(bound, arrays, [a.ctypes.data for a in arrays], scalars, None)
    return program
