"""How a launch is shared out: programs of causal attention come longest first, and few heads get smaller row blocks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import monotile
from monotile.backends.choices import AttentionChoice, AttentionProblem
from monotile.backends.cpu import choices, pool
from monotile.backends.cpu.makespan import makespan
from monotile.backends.cpu.program_order import BAND
from monotile.backends.cpu.row_costs import USUAL
from monotile.dtypes import float32
from monotile.library import ops

CAUSAL = "lower_right"


def random(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def greedy(times: Sequence[float], slots: int) -> float:
    """The time of a launch whose threads take programs one by one."""
    busy = [0.0] * slots
    for time in times:
        heapq.heapreplace(busy, busy[0] + time)
    return max(busy)


# ---- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, BAND - 1, BAND, BAND + 1, 2 * BAND + 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_program_of_a_band_runs_once(heads: int, batch: int) -> None:
    """Each head, computed alone, has the bits it has beside the others."""
    q, k, v = (random(batch, heads, 70, 16) for _ in "qkv")
    together = monotile.attention(q, k, v, causal=True, threads=2)
    for b in range(batch):
        for h in range(0, heads, 7):
            own = slice(b, b + 1), slice(h, h + 1)
            alone = monotile.attention(q[own], k[own], v[own], causal=True, threads=1)
            assert np.array_equal(together[own], alone)


def longest_first(monkeypatch: pytest.MonkeyPatch, causal: bool, queries: int) -> set[bool]:
    """Whether the programs of a call are taken one by one, in their order."""
    found: set[bool] = set()

    def run(*args: object) -> None:
        found.add(bool(args[5]))

    with monkeypatch.context() as patched:
        patched.setattr(pool, "run", run)
        q, k, v = random(1, 2, queries, 32), random(1, 2, 600, 32), random(1, 2, 600, 32)
        monotile.attention(q, k, v, causal=causal)
    return found


def test_only_uneven_programs_come_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed keys are read in the order of memory, and full attention has nothing to gain."""
    assert longest_first(monkeypatch, True, 600) == {True}
    assert longest_first(monkeypatch, False, 600) == {False}
    assert longest_first(monkeypatch, True, 1) == {False}


# ---- row blocks ------------------------------------------------------------------------------------------------------


def problem(heads: tuple[int, int], length: int, causal: str | None = None, size: int = 128) -> AttentionProblem:
    return AttentionProblem("cpu", float32, 1, *heads, length, length, size, causal)


def chosen(
    cores: int, given: AttentionProblem, monkeypatch: pytest.MonkeyPatch, usable: int | None = None
) -> AttentionChoice:
    monkeypatch.setattr(choices, "cores", lambda: cores)
    monkeypatch.setattr(choices, "default_threads", lambda: usable or cores)
    monkeypatch.setattr(choices, "l2_bytes", lambda: 2 << 20)
    monkeypatch.setattr(choices, "row_costs", lambda processor, dtype: USUAL)
    return choices.CpuChoices("avx512").attention(given)


@pytest.mark.parametrize("cores", [2, 16, 32, 64])
@pytest.mark.parametrize("heads", [(2, 1), (8, 8), (32, 8)], ids=str)
@pytest.mark.parametrize("length", [1500, 4096, 8192])
@pytest.mark.parametrize("causal", [None, CAUSAL])
def test_cores_are_busy(
    cores: int, heads: tuple[int, int], length: int, causal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs as the pool takes them keep the cores busy at least 85 % of the time; 75 % with so few rows that 32 of
    them are more than a core's share."""
    given = problem(heads, length, causal)
    choice = chosen(cores, given, monkeypatch)
    if choice.splits:
        return
    rows, groups = (given.rows, given.kv_heads) if choice.packed else (given.queries, given.query_heads)
    ends = [min(first + choice.row_block, rows) for first in range(0, rows, choice.row_block)]
    times = [
        (end - n * choice.row_block) * ((end + n * choice.row_block) / 2 if causal else length)
        for n, end in enumerate(ends)
    ]
    order = [time for time in reversed(times) for _ in range(groups)]
    share = groups * rows / cores
    assert sum(order) / cores / greedy(order, cores) > (0.85 if share >= 64 else 0.75)


def test_the_largest_blocks_are_kept_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new length needs no new program, unless cores would be idle."""
    for cores in (1, 2, 16):
        for length in (4096, 5000, 8192, 30000):
            assert chosen(cores, problem((32, 8), length), monkeypatch).row_block == 256
            assert chosen(cores, problem((32, 8), length, CAUSAL), monkeypatch).row_block == 256
    assert chosen(16, problem((2, 1), 1500, CAUSAL, 512), monkeypatch).row_block == 64


def test_a_process_with_few_cores_keeps_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container on a large machine; but splits, which change the sums, follow from the machine."""
    given = problem((8, 8), 1500, CAUSAL)
    assert chosen(64, given, monkeypatch).row_block == 64
    assert chosen(64, given, monkeypatch, usable=2).row_block == 256
    few = replace(given, queries=100)
    machine = chosen(64, few, monkeypatch)
    assert machine.splits and chosen(64, few, monkeypatch, usable=2) == machine


@pytest.mark.parametrize("slots", [2, 16, 64])
def test_makespan_is_what_threads_need(slots: int) -> None:
    """A lower bound, and close."""
    for blocks in (1, 2, 3, 6, 16, 33):
        for copies in (1, 2, 8, 32):
            for times in ([1.0] * blocks, [float(n) for n in range(blocks, 0, -1)]):
                order = [time for time in times for _ in range(copies)]
                found = makespan(times, copies, slots)
                assert found <= greedy(order, slots) * (1 + 1e-9)
                assert found >= greedy(order, slots) * 0.8


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_number_of_cores_changes_no_bit(dtype: type, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides how many rows a program has. Only splits of the keys, which few rows get, change the sums."""
    q, k, v = random(1, 2, 700, 64, dtype=dtype), random(1, 1, 700, 64, dtype=dtype), random(1, 1, 700, 64, dtype=dtype)
    results, blocks = [], set()
    for cores in (1, 3, 8, 16):
        monkeypatch.setattr(choices, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(choices, "default_threads", lambda cores=cores: cores)
        monkeypatch.setattr(ops._ATTENTION, "calls", {})
        given = replace(problem((2, 1), 700, CAUSAL if causal else None, 64), dtype=float32)
        blocks.add(choices.CpuChoices().attention(given).row_block)
        results.append(monotile.attention(q, k, v, causal=causal))
    assert len(blocks) > 1
    assert all(np.array_equal(results[0], other) for other in results[1:])
