"""The library on the vector units of this machine beside its own: rows depend on no others, and a unit has a name.

A machine with AVX-512 runs the code of AVX2 and of the least x86-64 too, so a choice that follows from the number of
lanes or registers is tested for all of them. `each_unit.py` runs the other tests of the library on each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import check_output, equal, normal, qkv
from monotile import backends, dtypes
from monotile.backends.choices import AttentionProblem
from monotile.backends.cpu import choices
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.host import host
from monotile.backends.cpu.row_costs import MEASURED, USUAL, row_costs
from monotile.backends.cpu.target import UNITS, chosen, host_for, runnable, target
from monotile.errors import UnknownBackend
from monotile.kernels import softmax
from monotile.kernels.examples import matmul
from monotile.kernels.merge import merge
from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, kernel, program_id

RUNNABLE = runnable()
OPTIONS = [{}, {"causal": "upper_left"}]
DTYPES = ("float32", "bfloat16")
every_unit = pytest.mark.parametrize("unit", RUNNABLE[1:] or RUNNABLE)  # the other tests of the library have its own
with_options = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal"])


@every_unit
@pytest.mark.parametrize(("options", "dtype"), zip(OPTIONS, DTYPES, strict=True), ids=["plain", "causal"])
def test_split_decode_of_a_row_depends_on_no_other_row(unit: str, options: dict[str, Any], dtype: str) -> None:
    """Row blocks of every size give the same bits: 1, 2, 3, 6 and 27 rows read a KV head."""
    q, k, v = qkv(9, 300, 24, Hq=3, dtype=dtype)
    run: Any = {"splits": 2, "backend": f"cpu:{unit}", **options}
    whole = monotile.decode_partials(q, k, v, **run)
    for heads, queries in ((1, 1), (2, 1), (1, 3), (3, 2)):
        alone = monotile.decode_partials(q[:, :heads, :queries], k, v, **run)
        equal(tuple(p[:, :heads, :queries] for p in whole), tuple(alone))


@every_unit
@with_options
def test_attention_of_a_row_depends_on_no_other_row(unit: str, options: dict[str, Any]) -> None:
    """Blocks of rows in panels of every size, and every head, give the same bits. (Up to 24 rows are streamed.)"""
    q, k, v = qkv(150, 200, 24, Hq=2)
    run: Any = {"return_lse": True, "backend": f"cpu:{unit}", **options}
    whole = monotile.attention(q, k, v, **run)
    for heads, queries in ((1, 30), (2, 40), (1, 70)):
        alone = monotile.attention(q[:, :heads, :queries], k, v, **run)
        equal(tuple(x[:, :heads, :queries] for x in whole), tuple(alone))


@kernel
def rows_over_keys(
    q: Tensor["N D"], k: Tensor["M D"], v: Tensor["M Dv"], o: Tensor["N Dv"],
    *, causal: Const, D: Const, Dv: Const, BR: Const, BK: Const,
):  # fmt: skip
    """Attention of one head with BR rows in a program."""
    i = program_id(cdiv(q.shape[0], BR))
    rows = i * BR + arange(BR)
    Q = q[rows]

    def seen(cols):  # type: ignore[no-untyped-def]
        inside = (rows[:, None] < q.shape[0]) & (cols[None, :] < k.shape[0])
        return inside & (cols[None, :] <= rows[:, None] + 40) if causal else inside

    state = softmax.empty(BR, Dv)
    for j in blocks(k.shape[0], BK, seen):
        cols = j + arange(BK)
        state = softmax.step(state, dot(Q, k[cols].T), v[cols], seen(cols), cols < k.shape[0], 0.3)
    o[rows], _ = softmax.finish(state)


@every_unit
@pytest.mark.parametrize(("causal", "dtype"), zip((False, True), DTYPES, strict=True), ids=["plain", "causal"])
@pytest.mark.parametrize("blocks", [(1, 3, 5, 8, 9, 12), (13, 16, 24, 32, 48, 64)], ids=["streamed", "panels"])
def test_bits_do_not_depend_on_the_row_block(unit: str, causal: bool, dtype: str, blocks: tuple[int, ...]) -> None:
    """Streamed dots of any height add in one order; panels of one vector and of several, whole ones and the rest of a
    tile, in another. Contractions over head size and keys are long enough to be summed in levels."""
    D, Dv = 160, 48
    q, k, v = (normal(*shape, dtype=dtype) for shape in ((70, D), (300, D), (300, Dv)))
    results = []
    for rows in blocks:
        o = normal(70, Dv, dtype=dtype)
        rows_over_keys(q, k, v, o, causal=causal, D=D, Dv=Dv, BR=rows, BK=192, backend=f"cpu:{unit}")
        results.append(o)
    for other in results[1:]:
        equal((results[0],), (other,))


@every_unit
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_may_be_any_distance_apart(unit: str, dtype: str) -> None:
    """Values are read in place from the keys' own columns, backwards, and from a single row."""
    q, k, _ = qkv(20, 150, 48, dtype=dtype)
    for v in (k[..., :32], k[:, :, ::-1, 16:], np.broadcast_to(k[:, :, :1], k.shape)):
        check_output(q, k, v, f"cpu:{unit}")


def test_units_by_name() -> None:
    for unit in UNITS:
        assert target(host_for(unit)).name == unit
    assert host_for(target(host()).name) == host() and RUNNABLE[0] == target(host()).name
    with pytest.raises(UnknownBackend, match="no backend 'metal:avx2'"):
        backends.get("metal:avx2")


def test_an_unknown_unit_names_those_there_are() -> None:
    with pytest.raises(UnknownBackend, match=f"there is no vector unit 'avx3'; this machine has {', '.join(RUNNABLE)}"):
        backends.get("cpu:avx3")


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit not in RUNNABLE])
def test_a_unit_of_another_machine_is_only_shown(unit: str) -> None:
    q, k, v = qkv(2, 20)
    with pytest.raises(UnknownBackend, match=f"'cpu:{unit}' cannot run here: .*; this machine has {RUNNABLE[0]}"):
        monotile.attention(q, k, v, backend=f"cpu:{unit}")


# ---- MONOTILE_CPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set MONOTILE_CPU as a new process would read it."""

    def setting(value: str) -> None:
        monkeypatch.setenv("MONOTILE_CPU", value)
        chosen.cache_clear()

    yield setting
    monkeypatch.undo()
    chosen.cache_clear()


WHOLE_PROCESS = """
import sys
import numpy as np
import monotile
from monotile import backends, dtypes
from monotile.backends.choices import AttentionProblem
from monotile.backends.cpu import choices
from monotile.backends.cpu.compiler import to_llvm
unit = sys.argv[1]
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 70, 16), np.float32)
np.testing.assert_array_equal(monotile.attention(q, k, v), monotile.attention(q, k, v, backend=f"cpu:{unit}"))
assert backends.get("cpu").identity() == backends.get(f"cpu:{unit}").identity()
print(backends.get("cpu").explain(None)[0])
"""


@every_unit
def test_a_unit_for_the_whole_process(unit: str) -> None:
    """Results, and keys in the disk cache, are those of the unit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MONOTILE_CPU": f" {unit} "}
    command = [sys.executable, "-c", WHOLE_PROCESS, unit]
    assert f"for {unit}," in subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("unit", ["avx3", *(unit for unit in UNITS if unit not in RUNNABLE)])
def test_a_chosen_unit_that_is_not_there(unit: str, choose: Callable[[str], None]) -> None:
    """One error with the list of those there are, before anything is written."""
    a, c = normal(8, 8), np.zeros((8, 8), np.float32)
    choose(unit)
    with pytest.raises(UnknownBackend, match=f"MONOTILE_CPU is '{unit}': .*; this machine has {', '.join(RUNNABLE)}"):
        matmul(a, a, c, BM=8, BN=8, BK=8)
    assert (c == 0).all()
    with pytest.raises(UnknownBackend, match="MONOTILE_CPU is"):
        backends.get("cpu").stages(matmul.ir(a, a, c))


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "instruction"), [("avx2", "vfmadd"), ("baseline", "fmaf"), ("neon", "fmla")])
def test_assembly_is_of_the_unit(unit: str, instruction: str) -> None:
    a = normal(32, 32)
    assembly = backends.get(f"cpu:{unit}").stages(matmul.ir(a, a, a))["asm"]()
    assert instruction in assembly and "zmm" not in assembly


@pytest.mark.parametrize(("unit", "size"), [("avx512", 64), ("avx2", 32)])
def test_the_stack_is_aligned_for_vectors(unit: str, size: int) -> None:
    """Spilled vectors do not cross cache lines, wherever the caller's stack lies."""
    a = normal(32, 32)
    assembly = backends.get(f"cpu:{unit}").stages(matmul.ir(a, a, a))["asm"]()
    assert f"andq\t$-{size}, %rsp" in assembly


@pytest.mark.parametrize(("processor", "requests"), [("znver5", True), ("znver4", False)])
def test_zen_5_requests_tiles_that_are_read_in_order(processor: str, requests: bool) -> None:
    """The parts of a merge follow each other in memory: elsewhere the hardware's prefetcher is enough."""
    o, m, out, lse = normal(8, 4096, 128), normal(8, 4096), normal(8, 128), normal(8)
    given = host_for("avx512")._replace(cpu=processor, features="+avx512f,+avx512vl,+avx512bw")
    text = to_llvm(merge.ir(o, m, m, None, out, lse, 1, BS=64), given).text
    assert ("call void @llvm.prefetch" in text) is requests


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_costs_of_rows_are_those_of_the_processor(name: str) -> None:
    assert row_costs("znver4", getattr(dtypes, name)) is row_costs("haswell", getattr(dtypes, name)) is USUAL
    assert row_costs("znver5", getattr(dtypes, name)) is MEASURED["znver5"][name]


def test_float32_rows_on_zen_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows are one panel, twenty are two; elsewhere they are streamed once and twice. Few of a fixed number of
    splits are streamed everywhere, and few rows on Zen 5 in shorter runs of keys."""
    few, more = (AttentionProblem("cpu", dtypes.float32, 1, n, 1, 1, 8192, 128) for n in (10, 20))
    for costs, found, run in ((USUAL, [10, 10], 128), (MEASURED["znver5"]["float32"], [16, 32], 64)):
        monkeypatch.setattr(choices, "row_costs", lambda processor, dtype, costs=costs: costs)
        unit = choices.CpuChoices("avx512")
        assert [unit.attention(given).row_block for given in (few, more)] == found
        assert unit.attention(replace(few, query_heads=4)).key_block == run
        assert unit.attention(few, keys_per_split=512).row_block <= 12


@kernel
def row_scores(q: Tensor["M D"], k: Tensor["N D"], s: Tensor["M N"], *, BM: Const, D: Const = 128):
    """Stream all keys."""
    rows = arange(BM)
    Q = q[rows, arange(D)]
    for j in range(0, k.shape[0], 64):
        cols = j + arange(64)
        s[rows, cols] = dot(Q, k[cols, arange(D)].T)


@pytest.mark.parametrize(
    ("processor", "rows", "again"),
    [("znver5", 1, False), ("znver5", 4, True), ("znver5", 12, False), ("znver4", 4, False)],
)
def test_zen_5_requests_lines_again(processor: str, rows: int, again: bool) -> None:
    """Shortly before they are read, into L1, where there is neither too little arithmetic nor too much."""
    q, k, s = normal(rows, 128), normal(4096, 128), normal(rows, 4096)
    given = host_for("avx512")._replace(cpu=processor, features="+avx512f,+avx512vl,+avx512bw")
    text = to_llvm(row_scores.ir(q, k, s, BM=rows), given).text
    assert ("i32 0, i32 3, i32 1)" in text) is again
