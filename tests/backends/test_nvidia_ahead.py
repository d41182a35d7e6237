"""Code that Triton compiles for sm_90, on a machine that need not have a GPU."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from arrays import random
from backends.nvidia_kernels import (
    attention_arrays,
    backward,
    compile_ahead,
    compiled,
    decode,
    forward,
    lowered,
    scale_rows,
    seen_rows,
)
from kernel_calls import in_splits, over_all_keys
from monotile import errors, ir
from monotile.backends.nvidia import backend as nvidia
from monotile.backends.nvidia import build, measured
from monotile.backends.nvidia.choices import NvidiaChoices
from monotile.backends.nvidia.gluon.module import pipeline_of, render_gluon
from monotile.backends.nvidia.program import NvidiaProgram
from monotile.backends.nvidia.schedule import SHARED_BYTES, Schedule, choose
from monotile.backends.nvidia.triton.module import render_triton
from monotile.dtypes import bool_
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options
from monotile.language import Const, Tensor, arange, cdiv, dot, exp2, full, kernel, program_id, zeros
from problems import problem


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("D", "BQ", "BK"), [(64, 128, 64), (80, 128, 64), (128, 128, 64), (256, 128, 64), (512, 64, 64)]
)
def test_forward_uses_the_matrix_units(D: int, BQ: int, BK: int, causal: bool) -> None:
    args = attention_arrays((1, 4, 2, 256), D, "bfloat16")
    made = compile_ahead(forward.ir(*args, 0.1, BQ=BQ, BK=BK, causal=causal))
    assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"] and ".f32.bf16.bf16" in made.asm["ptx"]
    assert "mma.sync" not in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_BYTES


@compiled
@pytest.mark.parametrize(
    ("D", "BQ", "BK"), [(64, 128, 64), (80, 128, 64), (128, 128, 128), (256, 128, 64), (512, 64, 64)]
)
def test_descriptors_use_the_copy_engine(D: int, BQ: int, BK: int) -> None:
    args = attention_arrays((1, 4, 2, 256), D, "bfloat16")
    call = forward.ir(*args, 0.1, BQ=BQ, BK=BK, causal=True)
    made = compile_ahead(call, replace(choose(lowered(call)), tensor_descriptors=True))
    assert "cp.async.bulk.tensor" in made.asm["ptx"] and "wgmma" in made.asm["ptx"]
    assert "cp.async.cg" not in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES


@compiled
def test_warps_are_specialised_in_a_single_loop() -> None:
    args = attention_arrays((1, 4, 2, 256), 128, "bfloat16")
    call = forward.ir(*args, 0.1, BQ=128, BK=64, causal=True)
    schedule = Schedule(4, 2, warp_specialize=True, peel=False, tensor_descriptors=True)
    assert render_triton(nvidia.BACKEND.lower(call, peel=False), schedule).text.count("    for ") == 1
    try:
        made = compile_ahead(call, schedule)
    except errors.DeviceLimit as error:  # an assertion in a pass of Triton 3.9; 3.6 compiles it
        pytest.skip(f"this Triton does not specialise the warps of this kernel: {error}")
    assert "setmaxnreg" in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES


@compiled
def test_backward_and_decode_use_the_matrix_units() -> None:
    wide, row = random((2, 256, 128), "bfloat16"), random((2, 256))
    made = compile_ahead(backward.ir(wide, wide, wide, wide, row, row, wide.copy(), wide.copy(), 0.1, BQ=64, BK=64))
    assert "wgmma" in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES
    q, o, m = random((2, 8, 128), "bfloat16"), random((2, 4, 8, 128)), random((2, 4, 8))
    made = compile_ahead(decode.ir(q, wide, wide, o, m, m.copy(), 0.1, BK=64))
    assert "mma.sync" in made.asm["ptx"] and made.metadata.shared <= SHARED_BYTES


@compiled
@pytest.mark.parametrize("D", [64, 256])
def test_rows_that_a_reduction_hides(D: int) -> None:
    """An assertion fails in Triton 3.6 where they are selected after the load, for an operand in registers."""
    x, seen = random((70, D), "bfloat16"), np.zeros((70, 70), bool)
    assert "mma.sync" in compile_ahead(seen_rows.ir(x, x, seen, np.zeros((70, D), np.float32))).asm["ptx"]


@compiled
def test_float32_products_are_not_rounded() -> None:
    args = attention_arrays((1, 2, 2, 128), 64, "float32")
    made = compile_ahead(forward.ir(*args, 0.1, BQ=64, BK=32, causal=False))
    assert "tf32" not in made.asm["ptx"] and "mma" not in made.asm["ptx"]


@compiled
def test_stages_show_text_and_ptx() -> None:
    x = random((9, 40))
    stages = nvidia.BACKEND.stages(scale_rows.ir(x, x.copy()))
    assert "@triton.jit" in stages["triton"]() and ".target sm_90" in stages["ptx"]()
    assert "# peel_with_bounds" in stages["passes"]()


# ---- the library -----------------------------------------------------------------------------------------------------

WORDS_OF_SOFTCAP = "rsqrt.approx", "rcp.approx", "ex2.", "div.", "selp.", "min.NaN", "fma.rn.f32"
# Bytes that a thread spills, full and causal, with the Triton that the project is tested with; a tuned row has none.
SPILLS = {64: (0, 0), 128: (0, 16), 256: (80, 80), 512: (1120, 1152)}


def library_call(D: int, causal: bool, dtype: str = "bfloat16") -> ir.Kernel:
    """The kernel that `monotile.attention` compiles for a GPU without measured choices."""
    q = random((1, 4, 256, D), dtype)
    blocks = NvidiaChoices().row_blocks(problem(D, dtype)).blocks
    options = Options("lower_right" if causal else None, None, None, None, None, None)
    return attention.ir(*over_all_keys(q, q[:, :2], q[:, 2:], q.copy()), options=options, **blocks)


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", SPILLS)
def test_the_library_for_every_tuned_head_size(D: int, causal: bool) -> None:
    made = compile_ahead(library_call(D, causal))
    assert "wgmma.mma_async.sync.aligned.m64" in made.asm["ptx"] and "mma.sync" not in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_BYTES
    if metadata.version("triton") == "3.6.0":
        assert build.resources(made)["STACK"] <= SPILLS[D][causal]


@compiled
@pytest.mark.parametrize(
    ("dtype", "D", "spills"),
    [("bfloat16", 576, 512), ("float32", 128, 512), ("float32", 256, 64), ("float32", 576, 64)],
)
def test_the_largest_head_sizes(dtype: str, D: int, spills: int) -> None:
    """The greatest of each row of blocks: tiles of 576 are as large as those of 1024, float32 is without a matrix
    unit."""
    made = compile_ahead(library_call(D, True, dtype))
    assert made.metadata.shared <= SHARED_BYTES
    if metadata.version("triton") == "3.6.0":
        assert build.resources(made)["STACK"] <= spills


@compiled
@pytest.mark.parametrize(("D", "mask_type"), [(128, bool), (256, np.float32)])
def test_masks_of_float32(mask_type: Any, D: int) -> None:
    """Blocks so small that nearly everything fits the registers."""
    blocks = NvidiaChoices().row_blocks(problem(D, "float32", mask=bool_)).blocks
    q, mask = random((1, 4, 256, D)), np.zeros((1, 4, 256, 256), mask_type)
    block_map = np.zeros((1, 4, 256 // blocks["BR"], 256 // blocks["BK"]), np.uint8)
    lse = random((1, 4, 256))
    call = over_all_keys(q, q[:, :2], q[:, 2:], q.copy(), lse, mask=mask, block_map=block_map)
    made = compile_ahead(attention.ir(*call, options=Options("lower_right"), covered=True, **blocks))
    if metadata.version("triton") == "3.6.0":
        assert build.resources(made)["STACK"] <= 256


@compiled
@pytest.mark.parametrize(
    ("D", "persistent", "spills"), [(64, False, 0), (128, False, 0), (128, True, 16), (256, False, 16)]
)
def test_measured_choices(D: int, persistent: bool, spills: int) -> None:
    """The rows of the table for sm_90, but for head size 512, whose module takes long to compile."""
    choice = dict(measured.forward_table(persistent))[D]
    q = random((1, 4, 256, D), "bfloat16")
    arguments = over_all_keys(q, q[:, :2], q[:, 2:], q.copy())
    call = attention.ir(*arguments, options=Options("lower_right", None, None, None, None, None), **choice.blocks)
    program = NvidiaProgram(lowered(call), choice.schedule)
    made = build.compile_ahead(program.kernel, program.default.source, choice.schedule)
    assert "wgmma" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_BYTES and build.resources(made)["STACK"] <= spills


@compiled
@pytest.mark.parametrize("exact", [False, True], ids=["short", "exact"])
@pytest.mark.parametrize("consumers", [0, 2])
def test_what_softcap_costs(consumers: int, exact: bool) -> None:
    """As Triton and as Gluon, for each score. The short form: one more of exp2, reciprocal, multiply and add. With a
    logsumexp: the rsqrt of `tanh`, no division, no selection, ten multiply-adds."""
    q = random((1, 4, 256, 64), "bfloat16")
    arguments = over_all_keys(q, q[:, :2], q[:, 2:], q.copy(), random((1, 4, 256)) if exact else None)
    way = Schedule(4, 2, consumers=consumers)
    counts = []
    for softcap in (None, 30.0):
        call = attention.ir(*arguments, options=Options(softcap=softcap), BR=64, BK=64)
        program = NvidiaProgram(lowered(call), way)
        ptx = build.compile_ahead(program.kernel, program.default.source, way).asm["ptx"]
        counts.append([ptx.count(word) for word in WORDS_OF_SOFTCAP])
    plain, capped = counts
    more = [after - before for before, after in zip(plain, capped, strict=True)]
    scores = more[0] + more[1]
    assert scores > 0 and scores % 32 == 0  # 64 x 64 scores, 128 threads, in each loop
    expected = [1, 0, 0, 0, 0, 1, 10] if exact else [0, 1, 1, 0, 0, 0, 0]
    assert more == [n * scores for n in expected]


@compiled
@pytest.mark.parametrize("BK", [16, 32, 64])
def test_decode_of_the_library(BK: int) -> None:
    D = 2048 // BK
    q, k = random((1, 2, 4, D), "bfloat16"), random((1, 2, 300, D), "bfloat16")
    o, m = random((1, 2, 4, 2, D)), random((1, 2, 4, 2))
    call = in_splits(q, k, k.copy(), (o, m, m.copy()), 256 // BK)
    made = compile_ahead(attention.ir(*call, options=Options(), BR=4, BK=BK, packed=True))
    assert made.metadata.shared <= SHARED_BYTES and build.resources(made)["STACK"] == 0


# ---- what does not fit -----------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("capability", [35, 999])
def test_an_architecture_that_triton_does_not_know(capability: int) -> None:
    x = random((9, 40))
    kernel_ir = lowered(scale_rows.ir(x, x.copy()))
    schedule = choose(kernel_ir)
    with pytest.raises(errors.UnknownArchitecture, match=f"install a newer triton, or use .* 'sm_{capability}") as said:
        build.compile_ahead(kernel_ir, render_triton(kernel_ir, schedule), schedule, capability)
    assert len(str(said.value).splitlines()) == 1


@compiled
def test_a_schedule_that_does_not_fit_shared_memory() -> None:
    args = attention_arrays((1, 2, 1, 256), 128, "bfloat16")
    kernel_ir = lowered(forward.ir(*args, 0.1, BQ=128, BK=128, causal=False))
    schedule = Schedule(8, 4)
    with pytest.raises(
        errors.DeviceLimit, match=r"bytes of shared memory, sm_90 has 232448; use smaller blocks, or .*stages"
    ):
        build.compile_ahead(kernel_ir, render_triton(kernel_ir, schedule), schedule)


# ---- producer and consumers ------------------------------------------------------------------------------------------


def pipeline_call(D: int, mask_type: Any = bool, BK: int = 64, masked: bool = False, **options: Any) -> Any:
    """The library's forward kernel after the passes, with a mask and its block map if asked for."""
    q = random((1, 2, 256, D), "bfloat16")
    mask = np.zeros((1, 2, 256, 256), mask_type) if masked else None
    block_map = np.zeros((1, 2, 4, 4), np.uint8) if masked else None
    call = over_all_keys(q, q.copy(), q.copy(), q.copy(), mask=mask, block_map=block_map)
    return lowered(attention.ir(*call, options=Options(**options), BR=64, BK=BK, covered=masked))


@compiled
@pytest.mark.parametrize(("BK", "each"), [(32, 16), (64, 32), (128, 64)])
def test_a_scaled_difference_is_one_instruction(BK: int, each: int) -> None:
    """(S - m) * c: as many fused operations as exponentials, those of sums and maxima included. Only what a warp
    branches past subtracts first."""
    call, way = pipeline_call(128, BK=BK), Schedule(4, 2, consumers=2)
    pipeline = pipeline_of(call)
    assert not isinstance(pipeline, str)
    rendered = render_gluon(call, way, pipeline)
    ptx = build.compile_ahead(call, rendered, way).asm["ptx"]
    votes = ptx.count("vote.sync.any")
    assert votes > 0 and rendered.text.count(f"scaled_difference_{each}(") == 1 + votes // way.consumers
    assert ptx.count("fma.rn.f32") == ptx.count("ex2.approx") > each * votes
    assert ptx.count("selp.f32") >= each * votes and "fma.rn.ftz" not in ptx


@kernel
def weighed(
    q: Tensor["N D"], k: Tensor["M D"], v: Tensor["M D"], o: Tensor["N D"], s: float,
    *, f: Const, D: Const, BQ: Const, BK: Const,
):  # fmt: skip
    """Products weighed by a function of themselves."""
    rows = program_id(cdiv(q.shape[0], BQ)) * BQ + arange(BQ)
    Q, acc = q[rows], zeros((BQ, D))
    for j in range(0, k.shape[0], BK):
        cols = j + arange(BK)
        acc += dot(f(dot(Q, k[cols].T), s, BQ).astype(v.dtype), v[cols])
    o[rows] = acc


def above(S: Any) -> Any:
    return S - S.max(axis=1)[:, None]


WEIGHTS = {
    "an exponential": (lambda S, s, n: exp2(above(S) * s), True),
    "the factor first": (lambda S, s, n: exp2(s * above(S)), True),
    "no exponential": (lambda S, s, n: (S - S.min(axis=1)[:, None]) * s, False),
    "an exponential and more": (lambda S, s, n: exp2(above(S) * s) + above(S), False),
    "one number for all rows": (lambda S, s, n: exp2((S - (full(n, s) * 2.0)[:, None]) * s), False),
    "a number for each column": (lambda S, s, n: exp2((S - S.max(axis=0)[None, :]) * s), False),
    "a factor for each row": (lambda S, s, n: exp2(above(S) * S.min(axis=1)[:, None]), False),
}


@compiled
@pytest.mark.parametrize("name", WEIGHTS)
def test_which_differences_are_fused(name: str) -> None:
    f, fused = WEIGHTS[name]
    x, way = random((256, 64), "bfloat16"), Schedule(4, 2, consumers=2)
    call = lowered(weighed.ir(x, x.copy(), x.copy(), x.copy(), 0.3, f=f, BQ=64, BK=64))
    pipeline = pipeline_of(call)
    assert not isinstance(pipeline, str), pipeline
    rendered = render_gluon(call, way, pipeline)
    assert ("scaled_difference_32(" in rendered.text) == fused
    assert ("vote.sync.any" in build.compile_ahead(call, rendered, way).asm["ptx"]) == fused


@compiled
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": "lower_right"}, {"causal": "lower_right", "left": 100}, {"softcap": 9.0}, {"masked": True}],
)
def test_every_form_of_the_forward_kernel_has_a_pipeline(options: dict[str, Any]) -> None:
    pipeline = pipeline_of(pipeline_call(128, **options))
    assert not isinstance(pipeline, str), pipeline
    assert bool(pipeline.zeroed) == ("left" in options or "masked" in options)
    assert [ring.name for ring in pipeline.rings.values()] == ["k", "v"]
    assert {op.attrs["tensor"].name for op in pipeline.private} == ({"mask"} if "masked" in options else set())
    assert {len(cases.bodies) for cases in pipeline.cases.values()} == ({3} if "masked" in options else set())


@compiled
@pytest.mark.parametrize(("mask_type", "word"), [(bool, "mask_by_bytes"), (np.float32, "mask_by_numbers")])
def test_masks_are_compared_where_they_select(mask_type: Any, word: str) -> None:
    """In unmasked blocks in which every row sees a key; elsewhere bools are computed, to count keys."""
    schedule = Schedule(4, 2, consumers=2)
    rendered = NvidiaProgram(pipeline_call(64, mask_type, masked=True), schedule).default.source
    text = rendered.text[rendered.text.index("def consume(") :]
    assert text.count(f"{word}(") >= 2  # a run of such blocks begins with one outside its loop
    assert text.count("mask_private.index(") > text.count(f"{word}(")  # other blocks are read, and not so compared


@compiled
def test_a_mask_in_a_gluon_module_compiles() -> None:
    kernel, schedule = pipeline_call(64, masked=True), Schedule(4, 2, consumers=2)
    program = NvidiaProgram(kernel, schedule)
    made = build.compile_ahead(kernel, program.default.source, schedule)
    assert "wgmma" in made.asm["ptx"] and build.resources(made)["STACK"] == 0


@kernel
def shift(y: Tensor["R C"]):
    i = program_id(y.shape[0])
    before, now = i, i
    for _ in range(i, i + y.shape[1], 1):
        before, now = now, 1
    y[i, 0] = before


@compiled
def test_a_carried_value_that_becomes_another_stays() -> None:
    """Triton 3.6 takes a carried value that becomes another one, which enters the loop with the same value, for one
    that never changes."""
    made = compile_ahead(shift.ir(np.zeros((4, 2), np.int32)))
    leaving = [line for line in made.asm["ttir"].splitlines() if "scf.yield" in line]
    assert [line.split(":")[0].count(",") for line in leaving] == [1], leaving
