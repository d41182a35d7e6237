"""How often the rows of a group read their keys on Metal: once for each block of rows. The blocks that are chosen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import monotile
from backends.metal_orders import collect_reports
from monotile import metal
from monotile.backends.metal.backend import MetalBackend
from monotile.backends.metal.choices import MetalChoices
from monotile.backends.metal.render import render
from monotile.dtypes import BY_NAME, to_numpy
from monotile.kernels import reference
from monotile.kernels.attention import DENSE, attention
from monotile.kernels.scores import Options
from problems import problem

needs_runner = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def randoms(*shape: int, dtype: Any, seed: int = 0) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32).astype(dtype)


# Query and KV heads; D, Dv; dtype; for some numbers of queries how often the keys are read.
READS: list[tuple[int, int, int, int, str, dict[int, int]]] = [
    (32, 8, 128, 128, "bfloat16", dict.fromkeys(range(1, 9), 1)),
    (32, 8, 128, 128, "float32", {1: 1, 3: 1, 8: 1}),
    (32, 8, 512, 512, "bfloat16", {2: 1, 8: 1}),
    (64, 1, 128, 128, "bfloat16", {1: 1, 2: 1, 3: 2, 8: 4}),
    (64, 1, 128, 128, "float32", {1: 1, 2: 1}),
    (64, 1, 256, 256, "bfloat16", {1: 2, 2: 3}),
    (128, 1, 64, 64, "bfloat16", {1: 1, 2: 2, 8: 8}),
    (128, 1, 128, 128, "bfloat16", {1: 1, 2: 2}),
    (16, 1, 576, 512, "bfloat16", {1: 1, 2: 1, 4: 2}),
    (128, 1, 576, 512, "bfloat16", {1: 4}),
]


@needs_runner
@pytest.mark.parametrize(("heads", "kv_heads", "D", "Dv", "dtype", "reads"), READS)
def test_keys_are_read_once_for_a_block_of_rows(
    heads: int, kv_heads: int, D: int, Dv: int, dtype: str, reads: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, kind = collect_reports(monkeypatch), TYPES[dtype]
    k, v = randoms(1, kv_heads, 130, D, dtype=kind, seed=1), randoms(1, kv_heads, 130, Dv, dtype=kind, seed=2)
    for queries, times in reads.items():
        q = randoms(1, heads, queries, D, dtype=kind)
        reports.clear()
        out = monotile.attention(q, k, v, backend="metal")
        exact, _ = reference.attention(q, k, v)
        assert np.abs(out.astype(np.float64) - exact).max() < (1e-5 if kind is np.float32 else 1e-2)
        found = reports[0].bytes_read
        assert (found["k_p"], found["v_p"]) == (times * k.nbytes, times * v.nbytes), queries


@needs_runner
def test_a_window_reads_the_keys_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows skip the blocks of keys that no row sees."""
    reports = collect_reports(monkeypatch)
    k, v = (randoms(1, 1, 2000, 64, dtype=np.float32, seed=seed) for seed in (1, 2))
    for heads, queries in ((4, 1), (4, 4), (8, 8)):
        q = randoms(1, heads, queries, 64, dtype=np.float32)
        reports.clear()
        monotile.attention(q, k, v, window=(100, 0), backend="metal")
        visible = 101 + queries - 1
        assert visible * 256 <= reports[0].bytes_read["v_p"] <= (visible + 63) * 256


# ---- the blocks that are chosen --------------------------------------------------------------------------------------

# Rows of a group: of a block at D 64, 128, 192, 256 and 576 (Dv 512).
ROW_BLOCKS = {
    "bfloat16": {
        1: (1,) * 5, 3: (4, 4, 4, 4, 8), 8: (8, 8, 16, 16, 8), 9: (16,) * 5, 17: (24,) * 5, 25: (32,) * 5,
        33: (40, 40, 40, 40, 24), 49: (64, 64, 64, 32, 32), 65: (80, 80, 80, 40, 24), 192: (96, 96, 96, 48, 32),
        1000: (128, 128, 128, 48, 32),
    },
    "float32": {
        1: (1,) * 5, 3: (4, 4, 16, 16, 8), 8: (8, 16, 16, 16, 8), 9: (16,) * 5, 17: (24,) * 5, 25: (32,) * 5,
        33: (40, 40, 24, 40, 24), 49: (64, 64, 32, 32, 32), 65: (80, 80, 24, 40, 24), 192: (96, 96, 32, 40, 32),
        1000: (128, 128, 32, 40, 32),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ROW_BLOCKS)
def test_blocks_hold_a_group(dtype: str) -> None:
    for rows, blocks in ROW_BLOCKS[dtype].items():
        for size, block in zip((64, 128, 192, 256, 576), blocks, strict=True):
            choice = MetalChoices().attention(
                problem(size, dtype, query_heads=rows, kv_heads=1, queries=1, value_size=min(size, 512))
            )
            assert (choice.row_block, choice.packed) == (block, rows > 1), (rows, size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [33, 64, 80, 128, 144, 192, 256, 384, 576])
def test_chosen_blocks_fit(size: int, dtype: str) -> None:
    """Every block that is chosen can be rendered: threadgroup memory holds what it stages."""
    kind = to_numpy(BY_NAME[dtype])
    for rows in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128):
        choice = MetalChoices().attention(problem(size, dtype, query_heads=rows, kv_heads=1, queries=1))
        q, k = np.zeros((1, 1, rows, size), kind), np.zeros((1, 1, 99, size), kind)
        mask, lse = np.ones((1, rows, 1, 99), bool), np.zeros((1, 1, rows), np.float32)
        args = [q, k, k.copy(), mask, None, None, q.copy(), lse, None, None, None, *DENSE, 1.0, 1, 0, 0]
        found = render(
            MetalBackend().lower(attention.ir(*args, options=Options(causal="lower_right"), **choice.blocks))
        )
        assert found.threadgroup_bytes <= 32 << 10 and found.threads <= 512


def test_splits_follow_the_model() -> None:
    """Few rows over many keys are split until every core has work; a call with many programs is not split, and a split
    has at least 128 keys."""

    def splits(**facts: Any) -> int:
        return MetalChoices().attention(problem(128, **facts)).splits

    assert splits(query_heads=32, kv_heads=8, queries=1, keys=32768) * 8 >= 400  # one simdgroup in each threadgroup
    assert splits(query_heads=64, kv_heads=1, queries=1, keys=32768) >= 100  # four
    assert splits(query_heads=128, kv_heads=1, queries=1, keys=32768) >= 40
    assert splits(query_heads=32, kv_heads=8, queries=4096, keys=4096) == 0
    assert splits(query_heads=8, kv_heads=8, batch=256, queries=1, keys=256) == 0
    assert splits(query_heads=1, kv_heads=1, queries=1, keys=1000) in range(2, 9)
