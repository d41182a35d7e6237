"""The library on every vector unit this machine can run: results hold, and rows do not depend on one another.

A machine with AVX-512 runs the code of AVX2 and of the least x86-64 too, so a choice that follows from the number of
lanes or registers is tested for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monotile
from kernels.cases import check, check_output, check_splits, equal, normal, qkv
from monotile import backends
from monotile.backends.cpu.host import host
from monotile.backends.cpu.target import UNITS, host_for, target, why_not
from monotile.errors import UnknownBackend
from monotile.kernels import softmax
from monotile.kernels.examples import matmul
from monotile.language import Const, Tensor, arange, blocks, cdiv, dot, kernel, program_id

RUNNABLE = [unit for unit in UNITS if why_not(unit) is None]
OPTIONS = [{}, {"causal": "upper_left"}]
every_unit = pytest.mark.parametrize("unit", RUNNABLE)
with_options = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal"])


@every_unit
@with_options
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [(1, 3, 5, 8, 9, 12), (13, 16, 24, 32, 48, 64)], ids=["streamed", "panels"])
def test_bits_do_not_depend_on_the_row_block(unit: str, causal: bool, dtype: str, blocks: tuple[int, ...]) -> None:
    """Streamed dots of any height add in one order; panels of one vector and of several, whole ones and the rest of a
    tile, in another."""
    D, Dv = 160, 48
    q, k, v = (normal(*shape, dtype=dtype) for shape in ((70, D), (150, D), (150, Dv)))
    results = []
    for rows in blocks:
        o = normal(70, Dv, dtype=dtype)
        rows_over_keys(q, k, v, o, causal=causal, D=D, Dv=Dv, BR=rows, BK=64, backend=f"cpu:{unit}")
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


@every_unit
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_hold(unit: str, dtype: str) -> None:
    check(*qkv(33, 70, 40, dtype=dtype), backend=f"cpu:{unit}", causal=True)
    check_splits(*qkv(4, 150, 40, dtype=dtype), 3, f"cpu:{unit}")


def test_units_by_name() -> None:
    for unit in UNITS:
        assert target(host_for(unit)).name == unit
    assert host_for(target(host()).name) == host()
    with pytest.raises(UnknownBackend, match="there is no vector unit 'avx3'; choose one of avx512-amx, avx512, avx2"):
        backends.get("cpu:avx3")
    with pytest.raises(UnknownBackend, match="no backend 'metal:avx2'"):
        backends.get("metal:avx2")


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit not in RUNNABLE])
def test_a_unit_of_another_machine_is_only_shown(unit: str) -> None:
    q, k, v = qkv(2, 20)
    with pytest.raises(UnknownBackend, match=f"backend 'cpu:{unit}' cannot run here"):
        monotile.attention(q, k, v, backend=f"cpu:{unit}")


@pytest.mark.parametrize(("unit", "instruction"), [("avx2", "vfmadd"), ("baseline", "fmaf"), ("neon", "fmla")])
def test_assembly_is_of_the_unit(unit: str, instruction: str) -> None:
    a = normal(32, 32)
    assembly = backends.get(f"cpu:{unit}").stages(matmul.ir(a, a, a))["asm"]()
    assert instruction in assembly and "zmm" not in assembly
