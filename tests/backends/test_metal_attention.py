"""Attention, split decode and merge as Metal source: accurate for every head size, the same bits in every order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernel_calls import in_splits, over_all_keys
from monotile import metal
from monotile.backends.metal.backend import MetalBackend, MetalProgram
from monotile.backends.metal.choices import MetalChoices
from monotile.kernels import reference
from monotile.kernels.attention import attention
from monotile.kernels.merge import merge
from monotile.kernels.scores import Options
from problems import problem

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": BF16}


def randoms(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


def in_every_order(kernel: Any, args: Sequence[Any], outputs: list[Array], **consts: Any) -> MetalProgram:
    """Launch a kernel in each order of threads; the runner raises for races and accesses out of bounds."""
    form = kernel.ir(*args, **consts)
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    scalars = [a for a in args if isinstance(a, int | float)]
    words: list[int] = []
    for a in arrays:
        words += [0, *a.shape, *(stride // a.itemsize for stride in a.strides)]
    found = []
    for order in metal.ORDERS:
        for out in outputs:
            out[...] = metal.poisoned(out.shape, out.dtype)
        program = MetalBackend(order).compile(form)
        assert isinstance(program, MetalProgram)
        bound = program.bind(words + [0] * len(scalars))
        program.launch(bound, arrays, [a.ctypes.data for a in arrays], scalars, None)
        found.append([out.tobytes() for out in outputs])
    assert found[0] == found[1] == found[2], "the outputs depend on the order of threads"
    assert program.rendered.threadgroup_bytes <= 32 << 10 and 32 <= program.rendered.threads <= 1024
    return program


def near(found: Array, exact: Array, naive: Array) -> None:
    limit = 2 * np.abs(naive.astype(found.dtype).astype(np.float64) - exact).max() + 1e-6
    assert np.abs(found.astype(np.float64) - exact).max() <= limit


CASES = [
    (33, "float32"), (64, "bfloat16"), (64, "float32"), (77, "bfloat16"), (80, "float16"), (96, "bfloat16"),
    (128, "bfloat16"), (128, "float32"), (192, "bfloat16"), (256, "float16"), (512, "bfloat16"), (512, "float32"),
    (576, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "dtype"), CASES)
def test_attention(size: int, dtype: str) -> None:
    """Rows and keys end inside a block; some blocks are full, some cut by the diagonal, some hidden."""
    q = randoms(1, 2, 70, size, dtype=TYPES[dtype])
    k, v = (randoms(1, 1, 97, size, dtype=TYPES[dtype], seed=n) for n in (1, 2))
    o, lse = metal.poisoned(q.shape, q.dtype), metal.poisoned(q.shape[:3], np.float32)
    blocks = MetalChoices().attention(problem(size, dtype)).blocks
    args = over_all_keys(q, k, v, o, lse, scale=size**-0.5)
    in_every_order(attention, args, [o, lse], options=Options(causal="lower_right"), **blocks)
    exact, exact_lse = reference.attention(q, k, v, causal=True)
    near(o, exact, reference.attention(q, k, v, causal=True, compute=np.float32)[0])
    assert np.abs(lse - exact_lse).max() <= 1e-6


DECODE_CASES = [
    (33, "bfloat16", 3), (80, "float16", 1), (128, "float32", 4), (256, "bfloat16", 8), (512, "bfloat16", 4),
    (576, "float32", 2),
]  # fmt: skip


@pytest.mark.parametrize(("size", "dtype", "heads"), DECODE_CASES)
def test_split_decode_and_merge(size: int, dtype: str, heads: int) -> None:
    q = randoms(1, 1, heads, size, dtype=TYPES[dtype])
    k, v = (randoms(1, 1, 150, size, dtype=TYPES[dtype], seed=n) for n in (1, 2))
    splits = 3
    o = metal.poisoned((1, 1, heads, splits, size), np.float32)
    m, l = (metal.poisoned((1, 1, heads, splits), np.float32) for _ in range(2))
    facts = problem(size, dtype, query_heads=heads, kv_heads=1, queries=1, keys=150)
    choice = MetalChoices().attention(facts, 50).in_splits(splits, 50)
    args = in_splits(q, k, v, (o, m, l), choice.blocks_per_split, scale=size**-0.5)
    program = in_every_order(attention, args, [o, m, l], options=Options(), **choice.blocks)
    assert program.rendered.threadgroup_bytes == 0 and program.rendered.threads == 32
    out, lse = metal.poisoned((heads, size), np.float32), metal.poisoned(heads, np.float32)
    parts = [o.reshape(heads, splits, size), m.reshape(heads, splits), l.reshape(heads, splits)]
    in_every_order(merge, [*parts, None, out, lse, 1], [out, lse], BS=64)
    whole = q.reshape(1, heads, 1, size), k, v
    exact, exact_lse = reference.attention(*whole)
    naive = reference.attention(*whole, compute=np.float32)[0].astype(q.dtype).astype(np.float64)
    limit = 2 * np.abs(naive - exact).max() + 1e-6
    assert np.abs(out.astype(np.float64) - exact.reshape(heads, size)).max() <= limit
    assert np.abs(lse - exact_lse.reshape(heads)).max() <= 1e-6


@pytest.mark.parametrize("size", [64, 77, 256])
def test_bfloat_before_metal_3_1(size: int) -> None:
    """The source does not use the type, and gives the same bits."""
    q = randoms(1, 1, 70, size, dtype=BF16)
    k, v = (randoms(1, 1, 97, size, dtype=BF16, seed=n) for n in (1, 2))
    consts = {"options": Options(causal="lower_right"), **MetalChoices().attention(problem(size)).blocks}
    found = []
    for bfloat in (True, False):
        o, lse = metal.poisoned(q.shape, BF16), metal.poisoned(q.shape[:3], np.float32)
        args = over_all_keys(q, k, v, o, lse, scale=size**-0.5)
        program = MetalBackend(bfloat=bfloat).compile(attention.ir(*args, **consts))
        assert isinstance(program, MetalProgram) and ("bfloat" in program.rendered.source) == bfloat
        arrays, scalars = [q, k, v, o, lse], args[-4:]
        words = [w for a in arrays for w in (0, *a.shape, *(stride // a.itemsize for stride in a.strides))]
        program.launch(program.bind([*words, 0, 0, 0, 0]), arrays, [a.ctypes.data for a in arrays], [*scalars], None)
        found.append((o.tobytes(), lse.tobytes()))
    assert found[0] == found[1]
