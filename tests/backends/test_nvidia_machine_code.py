"""Machine code for sm_90, read without a GPU: no wgmma may read outside shared memory (wgmma_descriptors.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arrays import random
from backends import wgmma_descriptors
from backends.nvidia_kernels import compiled, lowered
from kernel_calls import over_all_keys
from monotile.backends.nvidia import assembler, build, paths
from monotile.kernels.attention import attention
from monotile.kernels.scores import Options


def masked_call() -> Any:
    """The call that faulted: a mask that TMA cannot copy, few columns of values. K and V take turns in one place."""
    q, k, v = random((2, 3, 17, 64), "float16"), random((2, 3, 1, 64), "float16"), random((2, 3, 1, 16), "float16")
    mask, block_map = np.zeros((2, 3, 17, 1), bool), np.zeros((2, 3, 1, 1), np.uint8)
    call = over_all_keys(q, k, v, random((2, 3, 17, 16), "float16"), mask=mask, block_map=block_map)
    return lowered(attention.ir(*call, options=Options(), BR=64, BK=128, covered=True))


@compiled
def test_descriptors_are_those_of_the_ptx() -> None:
    kernel = masked_call()
    made, _ = build.compile_fitting(kernel, paths.select(kernel, None))
    report = wgmma_descriptors.check(made)
    assert report.wrong == [] and report.checked > 90 and report.unknown == 0


@compiled
def test_the_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel by the assembler that it faulted with: descriptors that no path through the PTX has."""
    knobs = assembler._knobs()
    if knobs is None or knobs.ptxas.version != assembler.WRONG_VERSION:
        pytest.skip("this Triton's ptxas is another one")
    monkeypatch.setattr(assembler, "needs_other", lambda kernel, architecture: False)
    kernel = masked_call()
    made, _ = build.compile_fitting(kernel, paths.select(kernel, None))
    report = wgmma_descriptors.check(made)
    assert report.wrong or report.unknown
    assert all("the PTX has no such strides" in line for line in report.wrong)


SASS = """
/*0000*/ UMOV UR6, 0x400 ;
/*0010*/ S2UR UR4, SR_CgaCtaId ;
/*0020*/ ULEA UR6, UR4, UR6, 0x18 ;
/*0030*/ USHF.R.U32.HI UR14, URZ, 0x4, UR6 ;
/*0040*/ USGXT.U32 UR14, UR14, 0xe ;
/*0050*/ UMOV UR15, 0xc0000010 ;
/*0060*/ HGMMA.64x16x16.F32 R24, R32, gdesc[UR12].tnspB, R24 ;
/*0070*/ UIADD3 UR10, UP0, {low}, 0x20, URZ ;
/*0080*/ UIADD3.X UR11, {high}, -0x3ffffff0, URZ, UP0, !UPT ;
/*0090*/ @!P1 BRA 0xb0 ;
/*00a0*/ UIADD3.64 UR10, UR10, {step}, URZ ;
/*00b0*/ HGMMA.64x16x16.F32 R24, R36, gdesc[UR8].tnspB, R24, gsb0 ;
/*00c0*/ EXIT ;
"""
PTX = "or.b64 %rd111, %rd200, -4611685949707911168;"


@pytest.mark.parametrize(("low", "high", "step", "found"), [
    ("UR14", "URZ", "0x0", ""),
    ("UR6", "UR6", "0x0", "no such strides"),  # what ptxas 12.8 does
    ("UR14", "UR15", "0x0", "no such strides"),
    ("UR6", "URZ", "0x0", "outside shared memory"),
])  # fmt: skip
def test_descriptors_of_machine_code(
    low: str, high: str, step: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SASS.format(low=low, high=high, step=step)
    monkeypatch.setattr(wgmma_descriptors, "disassembled", lambda made: text)
    made = SimpleNamespace(asm={"ptx": PTX}, metadata=SimpleNamespace(shared=8192))
    report = wgmma_descriptors.check(made)
    assert report.checked == 2 and report.unknown == 0
    assert [found in line for line in report.wrong] == ([True] if found else [])


def test_only_wgmma_of_plain_modules_is_assembled_otherwise() -> None:
    kernel = masked_call()
    assert assembler.needs_other(kernel, "sm_90") and not assembler.needs_other(kernel, "sm_80")
    with assembler.chosen(other=False) as options:
        assert options == {}
    knobs = assembler._knobs()
    if knobs is not None and knobs.ptxas.version == assembler.WRONG_VERSION:
        before = knobs.ptxas.path
        with assembler.chosen(other=True) as options:
            assert Path(knobs.ptxas.path).name == "ptxas-blackwell" and options == {"ptx_version": 87}
        assert knobs.ptxas.path == before
