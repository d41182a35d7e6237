# ruff: noqa: UP037 (a tensor annotation such as Tensor["N"] names dimensions, not types)
"""The nvidia backend without a GPU: its text, its results in Triton's interpreter, and what Triton compiles for sm_90.

Triton either interprets or compiles in a process. Here it compiles; `test_in_tritons_interpreter` runs the tests that
need results in a process of their own, and the language's tests with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from arrays import Array, numpy_type, poisoned, random, same
from monotile import errors, ir
from monotile.backends.nvidia import backend as nvidia
from monotile.backends.nvidia import build
from monotile.backends.nvidia.padding import padded
from monotile.backends.nvidia.render import Rendered, render
from monotile.backends.nvidia.schedule import SHARED_BYTES, Schedule, choose
from monotile.dtypes import float32
from monotile.language import (
    Const,
    Tensor,
    arange,
    blocks,
    cdiv,
    dot,
    exp2,
    full,
    inf,
    kernel,
    log2,
    maximum,
    minimum,
    program_id,
    where,
    zeros,
)  # fmt: skip
from monotile.tensors import View

pytest.importorskip("torch", reason="the nvidia backend needs torch")
pytest.importorskip("triton", reason="the nvidia backend needs triton")
import torch

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
interpreted = pytest.mark.skipif(not build.interpreting(), reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(build.interpreting(), reason="Triton's interpreter does not compile")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(build.interpreting() or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# ---- kernels ---------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    m: Any
    l: Any
    acc: Any


def step(state: State, S: Any, V: Any) -> State:
    m = maximum(state.m, S.max(axis=1))
    shift = where(m == -inf, 0.0, m)
    alpha = exp2(state.m - shift)
    P = exp2(S - shift[:, None])
    return State(m, state.l * alpha + P.sum(axis=1), state.acc * alpha[:, None] + dot(P.astype(V.dtype), V))


@kernel
def forward(
    q: Tensor["B Hq Nq D"], k: Tensor["B Hkv Nk D"], v: Tensor["B Hkv Nk Dv"], o: Tensor["B Hq Nq Dv"],
    lse: Tensor["B Hq Nq"], scale: float, *, D: Const, Dv: Const, BQ: Const, BK: Const, causal: Const,
):  # fmt: skip
    b, h, i = program_id(q.shape[0], q.shape[1], cdiv(q.shape[2], BQ))
    g = h // (q.shape[1] // k.shape[1])
    rows = i * BQ + arange(BQ)
    Nk, ahead = k.shape[2], k.shape[2] - q.shape[2]

    def visible(cols):
        seen = cols[None, :] < Nk
        return seen & (cols[None, :] <= rows[:, None] + ahead) if causal else seen

    Q = q[b, h, rows]
    state = State(full(BQ, -inf), zeros(BQ), zeros((BQ, Dv)))
    for j in blocks(Nk, BK, visible):
        cols = j + arange(BK)
        seen = visible(cols)
        S = where(seen, dot(Q, k[b, g, cols].T) * (scale * LOG2E), -inf)
        state = step(state, S, where(seen.max(axis=0)[:, None], v[b, g, cols], 0.0))
    o[b, h, rows] = state.acc * where(state.l == 0.0, 0.0, 1.0 / state.l)[:, None]
    lse[b, h, rows] = (state.m + log2(state.l)) * LN2


@kernel
def backward(
    q: Tensor["H Nq D"], k: Tensor["H Nk D"], v: Tensor["H Nk D"], do: Tensor["H Nq D"], lse: Tensor["H Nq"],
    delta: Tensor["H Nq"], dk: Tensor["H Nk D"], dv: Tensor["H Nk D"], scale: float, *, D: Const, BQ: Const, BK: Const,
):  # fmt: skip
    h, i = program_id(k.shape[0], cdiv(k.shape[1], BK))
    cols = i * BK + arange(BK)
    K, V = k[h, cols], v[h, cols]
    gk, gv = zeros((BK, D)), zeros((BK, D))
    for j in range(0, q.shape[1], BQ):
        rows = j + arange(BQ)
        Q, G = q[h, rows], do[h, rows]
        P = exp2((dot(Q, K.T) * scale - lse[h, rows][:, None]) * LOG2E)
        P = where(rows[:, None] < q.shape[1], P, 0.0)
        dS = P * (dot(G, V.T) - delta[h, rows][:, None])
        gk += dot(dS.astype(q.dtype).T, Q)
        gv += dot(P.astype(q.dtype).T, G)
    dk[h, cols] = gk * scale
    dv[h, cols] = gv


@kernel
def decode(
    q: Tensor["H G D"], k: Tensor["H Nk D"], v: Tensor["H Nk D"], o: Tensor["H S G D"], m: Tensor["H S G"],
    l: Tensor["H S G"], scale: float, *, G: Const, D: Const, BK: Const,
):  # fmt: skip
    h, s = program_id(k.shape[0], o.shape[1])
    per = cdiv(cdiv(k.shape[1], o.shape[1]), BK) * BK
    high = minimum(k.shape[1], s * per + per)
    Q = q[h]
    state = State(full(G, -inf), zeros(G), zeros((G, D)))
    for j in range(s * per, high, BK):
        cols = j + arange(BK)
        S = where(cols[None, :] < high, dot(Q, k[h, cols].T) * (scale * LOG2E), -inf)
        state = step(state, S, v[h, cols])
    o[h, s], m[h, s], l[h, s] = state.acc, state.m, state.l


@kernel
def scale_rows(x: Tensor["M N"], y: Tensor["M N"], *, B: Const = 8, N: Const):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows] * 2.0


@kernel
def twice(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows]
    y[rows] = y[rows] + x[rows]


@kernel
def fold(x: Tensor["M N"], y: Tensor["3 M"], *, M: Const, N: Const):
    """Folds of what is not zero in the padding."""
    tile = x[:, :] + 7.0
    y[0, :] = tile.sum(axis=1)
    y[1, :] = tile.max(axis=1)
    y[2, :] = (-tile).min(axis=1)


@kernel
def product(a: Tensor["M K"], b: Tensor["K N"], c: Tensor["M N"], *, M: Const, K: Const, N: Const):
    """Operands whose padding is not zero, but for the casts."""
    c[:, :] = dot((a[:, :] + 1.0).astype(a.dtype), (b[:, :] + 1.0).astype(b.dtype))


def attention_arrays(shape: tuple[int, int, int, int], D: int, dtype: str) -> tuple[Array, ...]:
    B, Hq, Hkv, N = shape
    q, k, v = random((B, Hq, N, D), dtype, 1), random((B, Hkv, N, D), dtype, 2), random((B, Hkv, N, D), dtype, 3)
    return q, k, v, poisoned((B, Hq, N, D), dtype), poisoned((B, Hq, N))


def lowered(call: ir.Kernel) -> ir.Kernel:
    return nvidia.BACKEND.lower(call)


def text(call: ir.Kernel, **options: Any) -> Rendered:
    kernel_ir = lowered(call)
    return render(kernel_ir, choose(kernel_ir), **options)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_sides_are_padded_to_powers_of_two() -> None:
    assert [padded(n) for n in (1, 2, 16, 17, 64, 80, 96, 192, 576)] == [1, 16, 16, 32, 64, 128, 128, 256, 1024]


def test_the_name_carries_the_parameters() -> None:
    args = attention_arrays((1, 2, 1, 64), 64, "bfloat16")
    rendered = text(forward.ir(*args, 0.1, BQ=128, BK=64, causal=True))
    assert rendered.name.startswith("forward_D64_Dv64_BQ128_BK64_causal_")
    assert f"def {rendered.name}(" in rendered.source
    compile(rendered.source, rendered.name, "exec")


def test_strides_and_lengths_that_are_known_are_literals() -> None:
    x = random((40, 96))
    rendered = text(scale_rows.ir(x, x.copy()))
    assert "iota_16[:, None] * 96 + iota_128[None, :]" in rendered.source
    assert [a.kind for a in rendered.arguments] == ["pointer", "pointer", "dim"]


def test_clean_blocks_have_no_bounds() -> None:
    """The first loop of a forward pass looks at nothing but whether the head exists."""
    args = attention_arrays((1, 2, 1, 64), 64, "bfloat16")
    source = text(forward.ir(*args, 0.1, BQ=128, BK=64, causal=True)).source
    clean = source.split("    for ")[1]
    assert "tl.load" in clean and "tl.where(seen" not in clean
    assert all("iota" not in line.partition("mask=")[2] for line in clean.splitlines() if "tl.load" in line)


def test_a_load_after_a_store_waits_for_all_threads() -> None:
    x = random(100)
    assert text(twice.ir(x, x.copy())).source.count("tl.debug_barrier()") == 2
    assert "barrier" not in text(scale_rows.ir(random((9, 4)), random((9, 4)))).source


def test_wide_offsets() -> None:
    x = random((64, 40))[::2]
    call = scale_rows.ir(x, x.copy())
    assert ".to(tl.int64)[:, None] * x_s0" not in text(call).source
    assert "iota_16.to(tl.int64)[:, None] * x_s0" in text(call, wide=True).source


@compiled
def test_bind_chooses_wide_offsets() -> None:
    x = random((64, 40))[::2]
    program = nvidia.BACKEND.compile(scale_rows.ir(x, x.copy()))
    near, far = (program.bind([0, 64, 40, stride, 1, 0, 64, 40, 40, 1]) for stride in (80, 2**30))
    assert near.variant is program.usual and far.variant is not program.usual  # type: ignore[attr-defined]
    assert near.programs == far.programs == 8


def test_a_grid_too_large() -> None:
    x = random((64, 40))
    program = nvidia.BACKEND.compile(scale_rows.ir(x, x.copy(), B=1))
    assert program.bind([0, 2**31 - 2**16, 40, 40, 1, 0, 2**31 - 2**16, 40, 40, 1]).programs == 2**31 - 2**16
    assert program.bind([0, 0, 40, 40, 1, 0, 0, 40, 40, 1]).programs == 0


@kernel
def huge(x: Tensor["M N"], y: Tensor["M N"], *, M: Const, N: Const):
    y[:, :] = x[:, :] * 2.0


def test_a_tile_too_large() -> None:
    x = random((1025, 600))
    with pytest.raises(errors.DeviceLimit, match=r"1025 x 600 is 2097152 elements.*smaller blocks"):
        text(huge.ir(x, x.copy()))


def test_schedules_fit_shared_memory() -> None:
    for D, BQ, BK, warps, stages in (
        (64, 128, 64, 4, 3),
        (128, 128, 128, 8, 3),
        (256, 128, 64, 8, 2),
        (512, 64, 64, 8, 1),
    ):
        args = attention_arrays((1, 1, 1, 16), D, "bfloat16")
        found = choose(lowered(forward.ir(*args, 0.1, BQ=BQ, BK=BK, causal=False)))
        assert (found.num_warps, found.num_stages) == (warps, stages)


# ---- errors ----------------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    x = random((4, 4))
    with pytest.raises(errors.UnknownBackend, match=r"no NVIDIA GPU; use backend='cpu', or .*TRITON_INTERPRET=1"):
        scale_rows(x, x.copy(), backend="nvidia")
    with pytest.raises(errors.UnknownBackend, match="'nvidia' cannot run here"):  # what a CUDA tensor asks for
        scale_rows._backend({0: View(float32, (4, 4), (4, 1), "cuda:0")}, None)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = nvidia.importlib.util.find_spec
    monkeypatch.setattr(nvidia.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    assert f"it needs {package}: pip install {package}" in (nvidia.BACKEND.why_not() or "")


def test_complaints_of_triton_are_translated() -> None:
    from triton.runtime.errors import OutOfResources

    found = build.translated(OutOfResources(300000, 232448, "shared memory"), "forward_D64")
    assert isinstance(found, errors.DeviceLimit)
    assert "forward_D64 does not fit the GPU" in str(found) and "smaller blocks" in str(found)
    unknown = build.translated(RuntimeError("ptxas fatal: Value 'sm_999' is not defined for option 'gpu-name'"), "f")
    assert isinstance(unknown, errors.UnknownArchitecture)
    assert build.translated(ValueError("something else"), "f") is None


# ---- results, in Triton's interpreter --------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("place", ["tests/language", "tests/backends/test_nvidia.py"])
def test_in_tritons_interpreter(place: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", place]
    if place == "tests/language":
        command += ["-k", "nvidia"]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout or "100%" in done.stdout


def attention_oracle(q: Array, k: Array, v: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    S = q @ k.swapaxes(2, 3) * scale
    if causal:
        i, j = np.indices(S.shape[2:])
        S = np.where(j <= i + S.shape[3] - S.shape[2], S, -np.inf)
    lse = np.logaddexp.reduce(S, axis=3)
    return np.exp(S - lse[..., None]) @ v, lse


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("D", [1, 3, 16, 64, 80, 96])
def test_attention(D: int, dtype: str, causal: bool) -> None:
    args = attention_arrays((1, 4, 2, 37), D, dtype)
    forward(*args, 0.2, BQ=16, BK=16, causal=causal, backend="nvidia")
    expected, lse = attention_oracle(*args[:3], 0.2, causal)
    tolerance = 2e-5 if dtype == "float32" else 2e-3 if dtype == "float16" else 2e-2
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(args[4], lse, rtol=1e-5, atol=1e-5)


def launch_with(schedule: Schedule, call: ir.Kernel, arrays: tuple[Array, ...], scalars: list[Any]) -> Any:
    """Runs a kernel with this schedule; gives what was bound."""
    program = nvidia.BACKEND.compile_as(call, schedule)
    words: list[int] = []
    for array in arrays:
        words += [0, *array.shape, *(s // array.itemsize for s in array.strides)]
    bound = program.bind(words + [0] * len(scalars))
    program.launch(bound, arrays, [a.ctypes.data for a in arrays], scalars, None)
    return bound


DESCRIPTORS = Schedule(tensor_descriptors=True)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "BK"), [(64, 32), (80, 16), (96, 24)])
def test_descriptors(D: int, BK: int, causal: bool) -> None:
    """24 rows are padded to 32, and what follows them in memory is not zero: those tiles have no descriptor."""
    args = attention_arrays((2, 4, 2, 77), D, "float16")
    call = forward.ir(*args, 0.2, BQ=16, BK=BK, causal=causal)
    bound = launch_with(DESCRIPTORS, call, args, [0.2])
    assert len(bound.variant.described) == (3 if BK != 24 else 1)
    expected, _ = attention_oracle(*args[:3], 0.2, causal)
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize("schedule", [Schedule(peel=False), Schedule(peel=False, tensor_descriptors=True)])
def test_without_peeling(schedule: Schedule) -> None:
    args = attention_arrays((1, 4, 2, 77), 80, "float16")
    launch_with(schedule, forward.ir(*args, 0.2, BQ=16, BK=32, causal=True), args, [0.2])
    expected, _ = attention_oracle(*args[:3], 0.2, True)
    np.testing.assert_allclose(args[3].astype(np.float64), expected, rtol=2e-3, atol=2e-3)


@interpreted
def test_layouts_without_descriptors() -> None:
    """A stride or an origin that is no multiple of 16 bytes, and an empty tensor: the pointers are used instead."""
    q, k, v, o, lse = attention_arrays((1, 2, 2, 33), 16, "float16")
    odd = np.zeros((1, 2, 33, 19), np.float16)[..., 1:17]
    odd[:] = k
    call = forward.ir(q, odd, v, o, lse, 0.2, BQ=16, BK=16, causal=False)
    bound = launch_with(DESCRIPTORS, call, (q, odd, v, o, lse), [0.2])
    assert bound.otherwise is None and len(bound.variant.described) == 0
    shifted = np.zeros((1, 2, 33, 24), np.float16)[..., 1:17]
    shifted[:] = k
    call = forward.ir(q, shifted, v, o, lse, 0.2, BQ=16, BK=16, causal=False)
    bound = launch_with(DESCRIPTORS, call, (q, shifted, v, o, lse), [0.2])
    assert bound.otherwise is not None
    expected, _ = attention_oracle(q, k, v, 0.2, False)
    np.testing.assert_allclose(o.astype(np.float64), expected, rtol=2e-3, atol=2e-3)
    nothing = np.zeros((1, 2, 0, 16), np.float16)
    call = forward.ir(q, nothing, nothing, o, lse, 0.2, BQ=16, BK=16, causal=False)
    launch_with(DESCRIPTORS, call, (q, nothing, nothing, o, lse), [0.2])
    assert (o == 0).all() and (lse == -np.inf).all()


@interpreted
@pytest.mark.parametrize("block", [8, 16, 24, 48])
def test_blocks_that_are_no_powers_of_two(block: int) -> None:
    args = attention_arrays((1, 2, 2, 50), 20, "float32")
    forward(*args, 0.2, BQ=block, BK=block, causal=True, backend="nvidia")
    expected, _ = attention_oracle(*args[:3], 0.2, True)
    np.testing.assert_allclose(args[3], expected, rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("heads", [1, 4])
def test_decode(heads: int) -> None:
    q, k, v = random((2, heads, 80), seed=1), random((2, 300, 80), seed=2), random((2, 300, 80), seed=3)
    o, m, l = poisoned((2, 3, heads, 80)), poisoned((2, 3, heads)), poisoned((2, 3, heads))
    decode(q, k, v, o, m, l, 0.2, BK=32, backend="nvidia")
    weights = np.exp2(m - m.max(axis=1, keepdims=True))
    found = (o * weights[..., None]).sum(axis=1) / (l * weights).sum(axis=1)[..., None]
    expected, _ = attention_oracle(q[:, None].swapaxes(0, 1), k[None], v[None], 0.2, False)
    np.testing.assert_allclose(found, expected[0], rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("shape", [(3, 5), (1, 17), (17, 1), (20, 33)])
def test_folds_ignore_padding(shape: tuple[int, int]) -> None:
    x, y = -np.abs(random(shape)) - 8, poisoned((3, shape[0]))
    fold(x, y, backend="nvidia")
    tile = x + np.float32(7)
    np.testing.assert_allclose(y[0], tile.sum(axis=1), rtol=1e-5)
    same(y[1:], np.stack([tile.max(axis=1), (-tile).min(axis=1)]))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (3, 1, 7), (3, 5, 1), (1, 1, 1), (17, 20, 33)])
def test_products_ignore_padding(dtype: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b, c = random((m, k), dtype, 1), random((k, n), dtype, 2), poisoned((m, n))
    product(a, b, c, backend="nvidia")
    one = np.float32(1)
    wide_a, wide_b = ((x.astype(np.float32) + one).astype(numpy_type(dtype)).astype(np.float64) for x in (a, b))
    np.testing.assert_allclose(c, wide_a @ wide_b, rtol=1e-5, atol=1e-5)


@interpreted
def test_wide_offsets_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "NARROW", 0)
    x, y = random((18, 40))[::2], poisoned((9, 40))
    scale_rows(x, y, backend="nvidia")
    same(y, x * 2)


@interpreted
def test_torch_tensors_and_numpy_arrays() -> None:
    for dtype in ("float32", "bfloat16", "bool", "int64", "uint8"):
        x = torch.arange(100).to(getattr(torch, dtype))
        y = torch.zeros_like(x)
        copy(x, y, backend="nvidia")
        assert torch.equal(x, y)


@kernel
def copy(x: Tensor["N"], y: Tensor["N"], *, B: Const = 32):
    rows = program_id(cdiv(x.shape[0], B)) * B + arange(B)
    y[rows] = x[rows]


# ---- what Triton compiles for sm_90 ----------------------------------------------------------------------------------


def compile_ahead(call: ir.Kernel, schedule: Schedule | None = None) -> Any:
    kernel_ir = nvidia.BACKEND.lower(call, peel=schedule is None or schedule.peel)
    schedule = schedule or choose(kernel_ir)
    return build.ahead(kernel_ir, render(kernel_ir, schedule), schedule)


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
    assert render(nvidia.BACKEND.lower(call, peel=False), schedule).source.count("    for ") == 1
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


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def gpu_attention(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn((2, h, 333, D), generator=generator, device="cuda").to(dtype) for h in (4, 2, 2))
    return [q, k, v, torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")]


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("D", [1, 17, 64, 80, 96, 128, 192, 256, 512])
    @pytest.mark.parametrize("causal", [False, True])
    def test_attention(self, D: int, dtype: torch.dtype, causal: bool) -> None:
        args = gpu_attention(D, dtype)
        for _ in range(2):  # the second launch takes the short way
            args[3].fill_(float("nan"))
            forward(*args, 0.1, BQ=64, BK=32, causal=causal)
        expected, lse = attention_oracle(*(a.float().cpu().numpy() for a in args[:3]), 0.1, causal)
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        np.testing.assert_allclose(args[3].float().cpu().numpy(), expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(args[4].cpu().numpy(), lse, rtol=1e-3, atol=1e-3)

    def test_graphs_and_streams(self) -> None:
        args = gpu_attention(64, torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            forward(*args, 0.1, BQ=64, BK=32, causal=True)
        stream.synchronize()
        expected = args[3].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(*args, 0.1, BQ=64, BK=32, causal=True)
        args[3].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(args[3], expected)

    def test_views_with_other_alignment(self) -> None:
        """A pointer that is not a multiple of 16 must not use what was compiled for one that is."""
        x = torch.randn(1000, device="cuda")
        for start in (0, 4, 1, 2, 0):
            y = torch.zeros_like(x[start:])
            copy(x[start:], y)
            assert torch.equal(x[start:], y)

    def test_a_grid_past_65535(self) -> None:
        x = torch.randn(70000, 8, device="cuda")
        y = torch.zeros_like(x)
        scale_rows(x, y, B=1)
        assert torch.equal(y, x * 2)

    def test_a_schedule_that_does_not_fit(self) -> None:
        x = torch.randn(512, 512, device="cuda").to(torch.bfloat16)
        with pytest.raises(errors.DeviceLimit, match="does not fit the GPU"):
            product(x, x.clone(), torch.empty(512, 512, device="cuda"))
