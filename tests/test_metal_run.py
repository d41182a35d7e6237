"""`monotile metal run`: a shader and a JSON file, what is found in it, and what is wrong with the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monotile import metal
from monotile.cli import metal_run
from monotile.cli.request import BadRequest
from test_cli import monotile

pytestmark = pytest.mark.skipif(metal.why_not() is not None, reason=str(metal.why_not()))

Captured = pytest.CaptureFixture[str]
SHADER = """#include <metal_stdlib>
using namespace metal;
kernel void reverse(device const float *x [[buffer(0)]], device float *y [[buffer(1)]], constant uint &n [[buffer(2)]],
                    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = x[i];
  BARRIER
  y[i] = shared[n - 1 - i];
}
"""
LAUNCH = {
    "grid": 1,
    "threads": [64, 1],
    "buffers": {
        "x": {"shape": [64], "fill": "count"},
        "1": {"shape": [64], "expect": "y.npy"},
        "n": {"dtype": "uint32", "value": 64},
    },
}


def run(
    folder: Path, capsys: Captured, *, barrier: bool = True, launch: Any = LAUNCH, **options: Any
) -> tuple[bool, str]:
    """True if nothing was found, and what was printed."""
    text = SHADER.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);" if barrier else "")
    (folder / "reverse.metal").write_text(text)
    (folder / "launch.json").write_text(json.dumps(launch))
    shader, described = folder / "reverse.metal", folder / "launch.json"
    clean = metal_run.command(shader, described, metal_run.RunChoices(**options))
    return clean, capsys.readouterr().out


def test_a_shader_that_does_not_compile(tmp_path: Path, capsys: Captured) -> None:
    """The error names the file and, for GitHub, is an annotation of its line."""
    np.save(tmp_path / "y.npy", np.arange(64, dtype=np.float32))
    text = SHADER.replace("BARRIER", "undeclared = 3;")
    (tmp_path / "wrong.metal").write_text(text)
    (tmp_path / "launch.json").write_text(json.dumps(LAUNCH))
    for style in ("text", "github"):
        with pytest.raises(metal.ShaderError, match=r"wrong\.metal:7:") as caught:
            metal_run.command(tmp_path / "wrong.metal", tmp_path / "launch.json", metal_run.RunChoices(style=style))
        assert "shader.metal" not in str(caught.value)
        said = capsys.readouterr().out
        assert (f"::error file={tmp_path / 'wrong.metal'},line=7::" in said) == (style == "github")


def test_a_correct_kernel(tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "y.npy", np.arange(63, -1, -1, dtype=np.float32))
    clean, text = run(tmp_path, capsys, out=tmp_path / "out")
    assert clean and "barriers                   1\n" in text and text.endswith("nothing found\n")
    assert "model: memory on the core  16 clocks of a core\n" in text  # 4 x 256 bytes
    assert "model: barriers            32 clocks of a core\n" in text
    assert "model: M5, Pro, Max        at least 0.0184, 0.0184, 0.0184 us\n" in text  # one core waits 32 clocks
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "1.npy"), np.arange(63, -1, -1))
    np.save(tmp_path / "y.npy", np.arange(64, dtype=np.float32))
    clean, text = run(tmp_path, capsys, fast_math=True)
    assert not clean and "64 elements of 1 are wrong; element 0 is 63.0, expected 0.0" in text
    monotile("metal", "run", str(tmp_path / "reverse.metal"), "--buffers", str(tmp_path / "launch.json"), code=1)


def test_findings_by_line(tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "y.npy", np.zeros(64, np.float32))
    clean, text = run(tmp_path, capsys, barrier=False)
    assert not clean and text.count("reverse.metal:8: race") == 1  # in three orders
    assert (
        f"{tmp_path}/reverse.metal:8: race: line 8 reads byte" in text and "\n    y[i] = shared[n - 1 - i];\n" in text
    )
    assert "element 0 of 1 is not the same in ascending and descending order" in text
    _, text = run(tmp_path, capsys, barrier=False, style="github", order="shuffled")
    assert f"::error file={tmp_path}/reverse.metal,line=8::race" in text


@pytest.mark.parametrize(
    "launch, buffer, phrase",
    [
        ({}, {"dtype": "float64"}, "buffer 'x' has dtype 'float64'; known are float32"),
        ({}, {}, "buffer 'x' has no size: give it a 'shape'"),
        ({}, {"shape": [64], "fill": "ones"}, "has fill 'ones'; known are random, zeros"),
        ({}, {"shape": [64], "size": 3}, "has a field 'size'; it may have"),
        ({}, {"file": "none.npy"}, "cannot read"),
        ({}, {"shape": [64], "expect": [1, 2]}, "64 elements, and 2 are expected of it"),
        ({"colour": 1}, {"shape": [64]}, "has a field 'colour'; it may have"),
    ],
)
def test_mistakes_in_the_launch(launch: Any, buffer: Any, phrase: str, tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "y.npy", np.zeros(64, np.float32))
    described: Any = {**LAUNCH, **launch, "buffers": {**LAUNCH["buffers"], "x": buffer}}  # type: ignore[dict-item]
    with pytest.raises(BadRequest, match=phrase):
        run(tmp_path, capsys, launch=described)


def test_options_that_are_not_known(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(BadRequest, match="--order sideways is not known; write all, ascending"):
        run(tmp_path, capsys, order="sideways")
    with pytest.raises(BadRequest, match="lacks 'grid'"):
        run(tmp_path, capsys, launch={"threads": 1, "buffers": {}})
