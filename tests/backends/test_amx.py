"""AMX: bfloat16 dots of panels, on tile registers where the processor has them, else on emulated ones.

The emulation runs the text that AMX runs, so shapes, padding, packing and row skipping are tested on any processor
with AVX512-BF16."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

import monotile
from fuzz import harness, programs
from fuzz.arguments import Program
from kernels.cases import check, check_output, equal, normal, qkv
from kernels.test_attention import OPTIONS
from monotile import backends, dtypes, ir
from monotile.backends.cpu import amx, image, jit
from monotile.backends.cpu import host as processor
from monotile.backends.cpu.compiler import OPTIONS as PASSES
from monotile.backends.cpu.compiler import to_llvm
from monotile.backends.cpu.host import host
from monotile.backends.cpu.lower import lower
from monotile.backends.cpu.target import UNITS, Target, host_for, target
from monotile.ir import Value
from monotile.ir.builder import Builder
from monotile.kernels.examples import matmul
from monotile.language import Const, Tensor, arange, bfloat16, blocks, cdiv, dot, kernel, program_id, zeros
from monotile.passes import pipeline

from .amx_emulation import BACKEND, REAL, EmulatedBackend, emulated, install

runnable = pytest.mark.skipif(BACKEND != REAL and EmulatedBackend().why_not() is not None, reason="needs AVX512-BF16")


@pytest.fixture(autouse=True, scope="module")
def emulation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


# ---- attention -------------------------------------------------------------------------------------------------------

# Queries, keys, head size, head size of the values: panels of one vector and of two, whole and not; contractions and
# rows that fill tiles or end inside one.
SHAPES = [
    (13, 40, 16, 16), (16, 64, 33, 33), (17, 130, 64, 64), (33, 70, 40, 48), (47, 129, 80, 17), (64, 128, 128, 128),
    (100, 257, 96, 200), (200, 300, 64, 33), (130, 200, 256, 256), (70, 150, 512, 512), (48, 90, 576, 512),
]  # fmt: skip


@runnable
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int]) -> None:
    Nq, Nk, D, Dv = shape
    q, k, v = qkv(Nq, Nk, D, Dv=Dv, Hq=2, Hkv=1, dtype="bfloat16")
    if SHAPES.index(shape) % 2:
        check(q, k, v, BACKEND)
    else:
        check_output(q, k, v, BACKEND, causal=True)


@runnable
@pytest.mark.parametrize("name", ["upper left", "window", "causal window", "softcap", "alibi", "documents"])
def test_options(name: str) -> None:
    check(*qkv(65, 300, 48, B=2, Hq=4, Hkv=2, dtype="bfloat16"), BACKEND, **OPTIONS[name])


@runnable
def test_masks_and_sinks() -> None:
    q, k, v = qkv(70, 200, 32, Hq=2, dtype="bfloat16")
    visible = np.random.default_rng(3).random((70, 200)) < 0.5
    visible[5] = False
    for options in (
        {"mask": normal(2, 70, 200, dtype="bfloat16", seed=4), "softcap": 20.0}, {"mask": visible, "causal": True},
        {"sinks": np.array([1.0, -2.0], np.float32)},
    ):  # fmt: skip
        check(q, k, v, BACKEND, **options)


@runnable
def test_views_are_read_where_they_are() -> None:
    """Keys and values with any distance between rows, backwards, and values that are a part of the keys."""
    q, k, _ = qkv(20, 150, 48, dtype="bfloat16")
    for v in (k[..., :32], k[:, :, ::-1, 16:], np.broadcast_to(k[:, :, :1], k.shape)):
        check_output(q, k, v, BACKEND)
    q, k, v = (np.swapaxes(normal(2, n, 3, 64, dtype="bfloat16", seed=n), 1, 2) for n in (40, 150, 150))
    check(q, k, v, BACKEND, causal=True)


@runnable
def test_values_that_are_not_numbers() -> None:
    """What a row sees propagates; what no row sees does not, and padding meets neither."""
    q, k, v = qkv(40, 100, 40, dtype="bfloat16")
    k[:, :, 90:], v[:, :, 90:] = np.nan, np.nan
    mask = np.arange(100) < 90
    found = check(q, k, v, BACKEND, mask=np.broadcast_to(mask, (40, 100)))
    assert np.isfinite(found[0].astype(np.float32)).all()
    v[:, :, 7, 3], v[:, :, 8, 39] = np.inf, np.nan
    found = check(q, k, v, BACKEND, mask=np.broadcast_to(mask, (40, 100)))
    assert np.isinf(found[0][..., 3].astype(np.float32)).all() and np.isnan(found[0][..., 39].astype(np.float32)).all()


@runnable
def test_a_row_depends_on_no_other_row() -> None:
    q, k, v = qkv(300, 200, 72, Hq=2, dtype="bfloat16")
    run: Any = {"return_lse": True, "backend": BACKEND, "causal": "upper_left"}
    whole = monotile.attention(q, k, v, **run)
    for heads, queries in ((1, 30), (2, 40), (1, 70)):
        alone = monotile.attention(q[:, :heads, :queries], k, v, **run)
        equal(tuple(x[:, :heads, :queries] for x in whole), tuple(alone))


# ---- other dots ------------------------------------------------------------------------------------------------------


@kernel
def gradients(
    q: Tensor["N D"], k: Tensor["M D"], v: Tensor["M Dv"], do: Tensor["N Dv"], dk: Tensor["M D"], dv: Tensor["M Dv"],
    *, D: Const, Dv: Const, BR: Const, BK: Const,
):  # fmt: skip
    """Dots as in a backward pass: weights made in the nest of a dot, read by two more, and as rows and lanes."""
    cols = program_id(cdiv(k.shape[0], BK)) * BK + arange(BK)
    K, V = k[cols], v[cols]
    DK, DV = zeros((BK, D)), zeros((BK, Dv))
    for i in blocks(q.shape[0], BR):
        rows = i + arange(BR)
        Q, DO = q[rows], do[rows]
        P = dot(K, Q.T)
        DP = dot(V, DO.T)
        DV = DV + dot(P.astype(bfloat16), DO)
        DS = (P * DP).astype(bfloat16)
        DK = DK + dot(DS, Q)
    dk[cols], dv[cols] = DK, DV


@runnable
@pytest.mark.parametrize("sizes", [(32, 32, 64, 32), (48, 32, 33, 17), (16, 64, 128, 64)], ids=str)
def test_dots_of_gradients(sizes: tuple[int, int, int, int]) -> None:
    BR, BK, D, Dv = sizes
    N, M = 100, 150
    q, k, v, do = (
        normal(*shape, dtype="bfloat16", seed=n) for n, shape in enumerate([(N, D), (M, D), (M, Dv), (N, Dv)])
    )
    found = []
    for backend in (BACKEND, "interpreter"):
        dk, dv = normal(M, D), normal(M, Dv)
        gradients(q, k, v, do, dk, dv, D=D, Dv=Dv, BR=BR, BK=BK, backend=backend)
        found.append((dk, dv))
    for mine, right in zip(*found, strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-2, atol=2e-2 * np.abs(right).max())


@kernel
def product_of_casts(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """c = a @ b, both cast to bfloat16 from whatever they are."""
    rows, inner, cols = program_id(1) * M + arange(M), arange(K), arange(N)
    c[rows, cols] = dot(a[rows, inner].astype(bfloat16), b[inner, cols].astype(bfloat16))


@runnable
@pytest.mark.parametrize("dtype", ["int8", "int32", "float16", "float32"])
def test_products_of_casts(dtype: str) -> None:
    a, b = ((8 * normal(*shape, seed=n)).astype(dtype) for n, shape in enumerate([(40, 33), (33, 24)]))
    found = [normal(40, 24), normal(40, 24)]
    for backend, c in zip((BACKEND, "interpreter"), found, strict=True):
        product_of_casts(a, b, c, M=40, K=33, N=24, backend=backend)
    np.testing.assert_allclose(*found, atol=1e-5 * np.abs(found[1]).max())


@kernel
def product_of_bytes(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """c = a @ b + c, exactly, in int32."""
    rows, inner, cols = program_id(1) * M + arange(M), arange(K), arange(N)
    c[rows, cols] = dot(a[rows, inner], b[inner, cols]) + c[rows, cols]


@runnable
@pytest.mark.parametrize("types", [("int8", "int8"), ("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8")], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_products_of_bytes(types: tuple[str, str], turned: bool) -> None:
    """All four instructions; contractions that end inside a tile and a word, and rows that are transposed; -128 too."""
    for M, K, N in ((40, 150, 48), (32, 64, 33)):
        rng = np.random.default_rng(K)
        a, b = (
            rng.integers(np.iinfo(t).min, np.iinfo(t).max, shape, endpoint=True, dtype=t)
            for t, shape in zip(types, [(M, K), (K, N)], strict=True)
        )
        if turned:
            a, b = np.asfortranarray(a), np.asfortranarray(b)
        c = rng.integers(-9, 9, (M, N)).astype(np.int32)
        exact = a.astype(np.int32) @ b.astype(np.int32) + c
        assert "@llvm.x86.tdpb" in (
            text := to_llvm(product_of_bytes.ir(a, b, c, M=M, K=K, N=N), host_for("avx512-amx")).text
        )
        assert "bf16ps" not in text
        product_of_bytes(a, b, c, M=M, K=K, N=N, backend=BACKEND)
        np.testing.assert_array_equal(c, exact)


@kernel
def product_of_inverses(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """c = (1 / a) @ (1 / b): what lies beyond the contraction is infinite."""
    rows, inner, cols = program_id(1) * M + arange(M), arange(K), arange(N)
    c[rows, cols] = dot((1.0 / a[rows, inner]).astype(bfloat16), (1.0 / b[inner, cols]).astype(bfloat16))


@runnable
@pytest.mark.parametrize("K", [33, 40, 48])
def test_nothing_beyond_a_contraction_counts(K: int) -> None:
    a, b = (1.0 + normal(*shape, seed=n) ** 2 for n, shape in enumerate([(40, K), (K, 24)]))
    found = [normal(40, 24), normal(40, 24)]
    for backend, c in zip((BACKEND, "interpreter"), found, strict=True):
        product_of_inverses(a, b, c, M=40, K=K, N=24, backend=backend)
    np.testing.assert_allclose(*found, atol=1e-5 * np.abs(found[1]).max())


class NarrowBuilder(Builder):
    """All numbers of random kernels that dots read are whole and small: exact in bfloat16."""

    def dot(self, a: Value, b: Value) -> Value:
        return super().dot(self.cast(a, dtypes.bfloat16), self.cast(b, dtypes.bfloat16))


@runnable
def test_random_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the fuzz tests, with scratch full of NaN and every dot in bfloat16: the first that use tiles."""

    def lowered(kernel: ir.Kernel, unit: Target, triple: str) -> Any:
        found = lower(kernel, unit, triple)
        return found if BACKEND == REAL else replace(found, text=emulated(found.text))

    def uses_tiles(program: Program) -> bool:
        kernel = ir.copy(program.kernel)
        pipeline.run(kernel, PASSES)
        has_dot = any(op.kind == "dot" for op in ir.walk(kernel.body))
        return has_dot and amx.BFLOAT16.intrinsic in lower(kernel, UNITS["avx512-amx"], host().triple).text

    monkeypatch.setattr(programs, "Builder", NarrowBuilder)
    monkeypatch.setattr(harness, "lower", lowered)
    found = (program for seed in count() if uses_tiles(program := programs.program(random.Random(seed))))
    for program in islice(found, 10):
        harness.check(program, (UNITS["avx512-amx"],))


@runnable
def test_matrix_product() -> None:
    a, b, c = normal(70, 90, dtype="bfloat16"), normal(90, 50, dtype="bfloat16", seed=1), normal(70, 50)
    matmul(a, b, c, backend=BACKEND)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(c, exact, atol=1e-5 * np.abs(exact).max())


# ---- the unit --------------------------------------------------------------------------------------------------------


def amx_text(dtype: str) -> str:
    a = normal(64, 64, dtype=dtype)
    return to_llvm(matmul.ir(a, a, normal(64, 64)), host_for("avx512-amx")).text


def test_assembly() -> None:
    """Registers are configured before the first tile and released at the end; nothing is called or relocated."""
    assembly = jit.assembly(amx_text("bfloat16"), host_for("avx512-amx"))
    order = [assembly.index(word) for word in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored")]
    assert order == sorted(order) and assembly.rindex("tilestored") < assembly.index("tilerelease")
    assert "callq" not in assembly
    image.link(jit.compile_object(amx_text("bfloat16"), host_for("avx512-amx")))  # raises for an unknown relocation


def test_other_types_need_no_tiles() -> None:
    for dtype in ("float32", "float16"):
        assert "tile" not in amx_text(dtype)


def test_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit is AVX-512 without permission, and the key of compiled code another."""
    able = host_for("avx512-amx")
    monkeypatch.setattr(processor, "_detected", lambda: able)
    names = []
    for allowed in (True, False):
        monkeypatch.setattr(processor, "_may_use_tiles", lambda allowed=allowed: allowed)
        processor.host.cache_clear()
        names.append(target(processor.host()).name)
    processor.host.cache_clear()
    assert names == ["avx512-amx", "avx512"]


def test_inspect() -> None:
    a = normal(64, 64, dtype="bfloat16")
    found = backends.get("cpu").explain(matmul.ir(a, a, normal(64, 64)), device="avx512-amx")
    assert "AMX" in found[0]
