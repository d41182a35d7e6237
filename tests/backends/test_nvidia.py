"""The nvidia backend without a GPU: its text, its choices and its errors."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from arrays import random
from backends.nvidia_kernels import (
    attention_arrays,
    compiled,
    forward,
    lowered,
    repeat_columns,
    scale_rows,
    text,
    through_table,
    twice,
)
from kernel_calls import in_splits
from monotile import backends, errors
from monotile.backends.nvidia import backend as nvidia
from monotile.backends.nvidia import build
from monotile.backends.nvidia.schedule import Schedule, choose
from monotile.backends.nvidia.triton.module import render_triton
from monotile.backends.nvidia.triton.padding import padded
from monotile.dtypes import float32
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options
from monotile.language import Const, Tensor, kernel
from monotile.launch.arguments import Arguments
from monotile.launch.captures import NOTHING
from monotile.runtime.tensors import View

# ---- text ------------------------------------------------------------------------------------------------------------


def test_sides_are_padded_to_powers_of_two() -> None:
    assert [padded(n) for n in (1, 2, 16, 17, 64, 80, 96, 192, 576)] == [1, 16, 16, 32, 64, 128, 128, 256, 1024]


def test_the_name_carries_the_parameters() -> None:
    args = attention_arrays((1, 2, 1, 64), 64, "bfloat16")
    rendered = text(forward.ir(*args, 0.1, BQ=128, BK=64, causal=True))
    assert rendered.name.startswith("forward_D64_Dv64_BQ128_BK64_causal_")
    assert f"def {rendered.name}(" in rendered.text
    compile(rendered.text, rendered.name, "exec")


def test_strides_and_lengths_that_are_known_are_literals() -> None:
    x = random((40, 96))
    rendered = text(scale_rows.ir(x, x.copy()))
    assert "iota_16[:, None] * 96 + iota_128[None, :]" in rendered.text
    assert [a.kind for a in rendered.arguments] == ["pointer", "pointer", "dim"]


def test_unmasked_blocks_have_no_bounds() -> None:
    """The first loop of a forward pass checks nothing but that the head exists."""
    args = attention_arrays((1, 2, 1, 64), 64, "bfloat16")
    source = text(forward.ir(*args, 0.1, BQ=128, BK=64, causal=True)).text
    unmasked = source.split("    for ")[1]
    assert "tl.load" in unmasked and "tl.where(seen" not in unmasked
    assert all("iota" not in line.partition("mask=")[2] for line in unmasked.splitlines() if "tl.load" in line)


def test_decode_has_two_loops() -> None:
    """Blocks that are whole, and the last one, which is not pipelined: code that runs once is fetched from memory."""
    q, k = random((1, 2, 4, 64), "bfloat16"), random((1, 2, 300, 64), "bfloat16")
    o, m = random((1, 2, 4, 2, 64)), random((1, 2, 4, 2))
    call = in_splits(q, k, k.copy(), (o, m, m.copy()), 4)
    made = nvidia.BACKEND.lower(attention.ir(*call, options=Options(), BR=4, BK=64, packed=True))
    text = render_triton(made, Schedule(4, 3, edge_stages=1)).text
    loops = [line.split(" in ")[1] for line in text.splitlines() if line.strip().startswith("for ")]
    assert len(loops) == 2 and loops[0].startswith("range(low, ")
    assert loops[1].startswith("tl.range(") and loops[1].endswith("num_stages=1):")


def test_a_load_after_a_store_waits_for_all_threads() -> None:
    x = random(100)
    assert text(twice.ir(x, x.copy())).text.count("tl.debug_barrier()") == 2
    assert "barrier" not in text(scale_rows.ir(random((9, 4)), random((9, 4)))).text


def test_wide_offsets() -> None:
    x = random((64, 40))[::2]
    call = scale_rows.ir(x, x.copy())
    assert ".to(tl.int64)[:, None] * x_s0" not in text(call).text
    assert "iota_16.to(tl.int64)[:, None] * x_s0" in text(call, wide=True).text


@compiled
def test_bind_chooses_wide_offsets() -> None:
    x = random((64, 40))[::2]
    program = nvidia.BACKEND.compile(scale_rows.ir(x, x.copy()))
    near, far = (program.bind([0, 64, 40, stride, 1, 0, 64, 40, 40, 1]) for stride in (80, 2**30))
    assert near.variant is program.default and far.variant is not program.default  # type: ignore[attr-defined]
    assert near.grid == far.grid == 8


def test_a_grid_too_large() -> None:
    x = random((64, 40))
    program = nvidia.BACKEND.compile(scale_rows.ir(x, x.copy(), B=1))
    assert program.bind([0, 2**31 - 2**16, 40, 40, 1, 0, 2**31 - 2**16, 40, 40, 1]).grid == 2**31 - 2**16
    assert program.bind([0, 0, 40, 40, 1, 0, 0, 40, 40, 1]).grid == 0


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


def backend_for(x: View, y: View, name: str | None = None) -> object:
    """The backend that a call of scale_rows with these arrays runs on."""
    return backends.for_device(name, Arguments(scale_rows.signature, (x, y), NOTHING, {}).device)


@compiled
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is there, and sees no GPU."""
    blind = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False, init=lambda: None), Tensor=type("Tensor", (), {})
    )
    monkeypatch.setitem(sys.modules, "torch", blind)
    monkeypatch.setattr(nvidia.importlib.util, "find_spec", lambda name: name)
    x = random((4, 4))
    with pytest.raises(errors.UnknownBackend, match=r"no NVIDIA GPU; use backend='cpu', or .*TRITON_INTERPRET=1"):
        scale_rows(x, x.copy(), backend="nvidia")
    with pytest.raises(errors.UnknownBackend, match="'nvidia' cannot run here"):  # what a CUDA tensor asks for
        backend_for(*[View(float32, (4, 4), (4, 1), "cuda:0")] * 2)


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(nvidia.importlib.util, "find_spec", lambda name: None if name == package else name)
    found = nvidia.BACKEND.why_not()
    if package == "torch" and build.interpreting():
        assert found is None
    else:
        assert f"it needs {package}: pip install {package}" in (found or "")


@compiled
def test_arrays_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, simulated without one."""
    monkeypatch.setattr(nvidia.BACKEND, "why_not", lambda: None)
    x = random((4, 4))
    with pytest.raises(errors.ArgumentDevice, match=r"'nvidia' cannot use arrays on 'cpu'; move them with .cuda\(\)"):
        scale_rows(x, x.copy(), backend="nvidia")
    near, far, other = (View(float32, (4, 4), (4, 1), device) for device in ("cpu", "cuda:0", "cuda:1"))
    with pytest.raises(errors.ArgumentDevice, match=r"'cpu' cannot use arrays on 'cuda:0'; move them with .cpu\(\)"):
        backend_for(far, far, "cpu")
    for views in ((near, far), (far, other)):
        with pytest.raises(errors.ArgumentDevice, match=r"different devices: x on .*, y on cuda.*; move them to one"):
            backend_for(*views)
    assert backend_for(far, far) is nvidia.BACKEND


def test_complaints_of_triton_are_translated() -> None:
    from triton.runtime.errors import OutOfResources

    found = build.translated(OutOfResources(300000, 232448, "shared memory"), "forward_D64")
    assert isinstance(found, errors.DeviceLimit)
    assert "forward_D64 does not fit the GPU" in str(found) and "smaller blocks" in str(found)
    unknown = build.translated(RuntimeError("ptxas fatal: Value 'sm_999' is not defined for option 'gpu-name'"), "f")
    assert isinstance(unknown, errors.UnknownArchitecture)
    assert build.translated(ValueError("something else"), "f") is None


@pytest.mark.parametrize(
    "line",
    [
        "ptxas fatal   : (C7600) Register allocation failed with register count of '255'. Compile with a higher target",
        "ptxas error   : Entry function 'f' uses too much shared data (0x40000 bytes, 0x38c00 max)",
    ],
)
def test_what_ptxas_cannot_fit(line: str) -> None:
    """Its one line, with the cure, and not the text it was given."""
    said = f"Internal Triton PTX codegen error\n`ptxas` stderr:\n{line}\n\nRepro command: ptxas\n\n.version 8.7"
    found = build.translated(RuntimeError(said), "forward_D64")
    assert isinstance(found, errors.DeviceLimit)
    assert str(found) == f"forward_D64 does not fit the GPU: {line}; {build.FITTING}"


def test_what_else_ptxas_says() -> None:
    said = "Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas x.ptx, line 9; error   : Bad\n.version 8.7"
    found = build.translated(RuntimeError(said), "f")
    assert isinstance(found, errors.DeviceLimit) and str(found) == "ptxas refuses f: ptxas x.ptx, line 9; error   : Bad"


def test_columns_that_repeat_are_loaded_once() -> None:
    x, y = random((64, 8)), random((64, 64))
    wide = text(repeat_columns.ir(x, y, M=64, times=8)).text
    assert wide.count("tl.join") == 3 and wide.count("tl.load") == 1 and "iota_8[None, :]" in wide
    for other, times in ((64, 12), (16, 8)):  # no power of two; a small tile, whose products Triton 3.6 gets wrong
        assert "tl.join" not in text(repeat_columns.ir(x[:other], y[:other], M=other, times=times)).text


def test_loads_that_place_others_have_stages_of_their_own() -> None:
    """Triton divides a loop's stages among loads that follow one another."""
    table = np.zeros(4, np.int32)
    call = through_table.ir(random((16, 32)), random((64, 32)), table, random((16, 16)))
    assert "num_stages=5" in render_triton(lowered(call), Schedule(4, 3)).text
