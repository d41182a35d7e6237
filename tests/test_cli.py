"""The command line, run as a user runs it: in a process of its own, with its output in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from monotile import __version__, dtypes
from monotile.bench import report, rows, worker
from monotile.cli import commands, inspection
from monotile.cli.request import BadRequest, Request, parse_values
from monotile.kernels import examples
from monotile.launch.kernel import Kernel
from monotile.runtime import machine
from monotile.runtime.tensors import View

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src")}


def monotile(*words: str, code: int = 0, **environment: str) -> str:
    """What the command prints; its exit code must be as given."""
    result = subprocess.run(
        [sys.executable, "-m", "monotile", *words],
        env={**os.environ, **ENVIRONMENT, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    if code:
        assert "Traceback" not in result.stderr
        return result.stderr
    return result.stdout


def test_version() -> None:
    assert monotile("--version").strip() == f"monotile {__version__}"


def test_devices_shows_extras_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_why_not", lambda name: "run `pip install 'monotile[metal]'`")
    assert "'monotile[metal]'" in CliRunner().invoke(commands.app, ["devices"]).output


def test_devices_names_every_backend(cache_folder: Path) -> None:
    text = monotile("devices")
    for name in ("cpu", "interpreter", "nvidia", "metal", "LLVM", "threads", machine.processor()):
        assert name in text
    assert "MLX arrays: " in text and "torch tensors on 'mps': " in text
    assert str(cache_folder) in text


def test_cache_shows_limits_and_clears(tmp_path: Path) -> None:
    (tmp_path / "a.cpu").write_bytes(bytes(2048))
    here = {"MONOTILE_CACHE_DIR": str(tmp_path)}
    text = monotile("cache", **here)
    assert str(tmp_path) in text and "1, in 1 files" in text and "2.0 KiB of 1.0 GiB" in text and "last used" in text
    assert "of 5.0 MiB" in monotile("cache", "--limit", "5M", **here)
    assert "'much'" in monotile("cache", "--limit", "much", code=1, **here)
    assert "removed 1 files" in monotile("cache", "--clear", **here)


@pytest.mark.parametrize(
    "stage, phrases",
    [
        ("source", ("@kernel", "acc += dot(a[rows, inner], b[inner, cols])")),
        ("ir", ("kernel matmul(@a: float16[M K]", "value=31", "dot(")),
        ("passes", ("# frontend", "# fold", "# cse", "# dce")),
        ("llvm", ("define void @kernel(", "ret void")),
        ("asm", ("kernel:", "ret")),
    ],
)
def test_inspect_shows_every_stage(stage: str, phrases: tuple[str, ...]) -> None:
    options = ("--stage", stage, "--BM", "32", "--BN=32", "--BK=16", "--dtype", "float16")
    text = monotile("inspect", "examples/matmul.py:matmul", *options)
    for phrase in phrases:
        assert phrase in text
    assert "\x1b" not in text


def test_inspect_numbers_the_lines_of_the_file() -> None:
    text = monotile("inspect", "monotile.kernels.examples:matmul", "--stage", "source")
    number, line = text.splitlines()[-1].split(maxsplit=1)
    lines = Path(examples.__file__).read_text().splitlines()
    assert lines[int(number) - 1].strip() == line


@pytest.mark.parametrize(
    "words, phrase",
    [
        (("examples/none.py:matmul",), "there is no file examples/none.py"),
        (("examples/matmul.py:product",), "it has matmul"),
        (("monotile.kernels.examples",), "examples:NAME"),
        (("monotile.nothing:matmul",), "package.module:NAME"),
        (("examples/matmul.py:matmul", "--stage", "ptx"), "no stage 'ptx'"),
        (("examples/matmul.py:matmul", "--BQ=3"), "matmul has no Const 'BQ'"),
        (("examples/matmul.py:matmul", "--BM=big"), "is not a constant"),
        (("examples/matmul.py:matmul", "--BM"), "write --BM=VALUE"),
        (("examples/matmul.py:matmul", "--dtype", "float65"), "float32, float16"),
        (("examples/matmul.py:matmul", "--shape", "a=3by4"), "--shape a=64x128"),
        (("examples/matmul.py:matmul", "--shape", "z=3x4"), "no tensor 'z'"),
        (("examples/matmul.py:matmul", "--shape", "a=3x4", "--shape", "b=5x6"), "b.shape[0] is 5"),
        (("examples/matmul.py:matmul", "--backend", "abacus"), "there is no backend 'abacus'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(words: tuple[str, ...], phrase: str) -> None:
    assert phrase in monotile("inspect", *words, code=1)


def test_mistake_in_a_kernel_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("from monotile.language import *\n\n\n@kernel\ndef wrong(x: Tensor['N']):\n    x[0] = nothing\n")
    text = monotile("inspect", str(path), code=1)
    assert "x[0] = nothing" in text and "^^^^^^^" in text and "cure:" in text


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    paths = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, "-m", "monotile", "devices"]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert result.returncode == 1 and "pip install typer rich" in result.stdout + result.stderr


# ---- what a call runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        ("attention --D=128 --causal --device sm_90", ("1 launch", "BR=64, BK=128", "on an H200", "path: Gluon")),
        ("attention --Nq=1 --Nk=32768 --device sm_90", ("2 launches", "split_o float32", "kernel merge")),
        ("attention --device sm_90 --dtype float32", ("no schedule was measured for float32", "path: plain Triton")),
        ("attention --device sm_80", ("no schedule was measured on a GPU of sm_80", "path: plain Triton")),
        ("attention_backward --device sm_90", ("3 launches", "kernel backward_queries", "kernel backward_keys")),
        ("attention --dtype mask=bool --device sm_90", ("2 launches", "kernel mask_blocks", "covered=True")),
        ("attention --mask --device sm_90", ("2 launches", "tensors: mask bool", "covered=True")),
        ("attention --mask=float32 --sinks --device avx2", ("2 launches", "tensors: mask float32", "sinks float32")),
        ("attention --Nq=16", ("BR=64", "packed=True", "panels of 64 rows", "splits: ")),
        ("decode_partials --Nq=1", ("kernel attention", "BR=4", "packed=True")),
        ("examples/matmul.py:matmul --backend nvidia", ("path: plain Triton", "why: ")),
    ],
)  # fmt: skip
def test_explain_says_what_runs_and_why(words: str, phrases: tuple[str, ...]) -> None:
    pytest.importorskip("triton", reason="the choice of a path asks for Triton's version")
    text = monotile("inspect", *words.split(), "--explain")
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_a_function_shows_the_text_of_every_launch() -> None:
    text = monotile("inspect", "attention", "--Nq=1", "--Nk=2000", "--stage", "llvm")
    assert text.count("define void @kernel(") == 2 and "# launch 2 of 2: merge" in text
    pytest.importorskip("triton", reason="the choice of a path asks for Triton's version")
    assert "gl.warp_specialize(" in monotile("inspect", "attention", "--device", "sm_90", "--stage", "gluon")


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        ("attention --mask=7 --explain", "mask is an array; write --mask=DTYPE"),
        ("attention --BR=32 --explain", "block sizes are the backend's choice"),
        ("attention --D=600 --explain", "it must be from 1 to 576"),
        ("attention --causal=sideways --explain", "is not a constant"),
        ("softmax --explain", "no kernel of monotile is called 'softmax'"),
        (
            "attention --device avx9 --explain",
            "knows no device 'avx9'; it has avx512-amx, avx512, avx2, neon, baseline",
        ),
        ("attention --device sm_95 --stage ptx", "knows no device 'sm_95'; it has sm_80"),
        ("attention --backend metal --device sm_90", "backend 'metal' knows no device 'sm_90'; it has mps"),
        ("merge --backend interpreter --device avx2", "none to choose from"),
        ("attention --D=1.5", "--D=1.5 is a length; write a whole number"),
        ("attention --Nk=None", "--Nk=None is a length"),
        ("attention --D=-1", "--D=-1 is a length"),
        ("attention --Nq=0", "launches nothing"),
        ("merge --left=3 --explain", "merge has no option, length or array 'left'"),
    ],
)
def test_mistakes_in_the_description_of_a_call(words: str, phrase: str) -> None:
    assert phrase in monotile("inspect", *words.split(), code=1)


# ---- arguments made for inspect --------------------------------------------------------------------------------------


def test_values() -> None:
    words = ["--A=1", "--B", "2.5", "--C=true", "--D", "None", "--E=float16", "--F=-3", "--G=1e-3"]
    found = parse_values(words)
    assert found == {"A": 1, "B": 2.5, "C": True, "D": None, "E": dtypes.float16, "F": -3, "G": 1e-3}


def test_a_function_as_value(tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    path.write_text("def twice(x):\n    return x + x\n")
    assert parse_values([f"--score={path}:twice"])["score"](4) == 8


def plain(x, n, k: int, b: bool, *, B=1):  # type: ignore[no-untyped-def]
    """A kernel whose signature says little."""


def test_shapes_follow_the_signature() -> None:
    args, consts = inspection.arguments(examples.matmul, Request({"BM": 8}, {"a": (3, 4)}, {"b": dtypes.float16}))
    assert [a.shape for a in args] == [(3, 4), (4, 64), (3, 64)]
    assert [str(a.dtype) for a in args] == ["float32", "float16", "float32"]
    assert consts == {"BM": 8}
    args, consts = inspection.arguments(Kernel(plain), Request({"n": 7}, {"x": (2, 3)}))
    assert isinstance(args[0], View) and args[1:] == [7, 1, True] and not consts
    with pytest.raises(BadRequest, match="--shape x=64x64"):
        inspection.arguments(Kernel(plain), Request({"n": 7}))


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench_writes_every_number(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    text = monotile("bench", "--quick", "--filter", "launch", "--json", str(path), "--threads", "1")
    assert "launch overhead" in text
    found = json.loads(path.read_text())
    assert found["device"]["processor"] == machine.processor() and found["quick"] is True
    (row,) = found["rows"]
    assert 0 < row["times"]["monotile"]["best_s"] <= row["times"]["monotile"]["median_s"] < 1
    assert {"commit", "dirty", "date", "versions", "starts"} <= found.keys()


def test_bench_refuses_wrong_results() -> None:
    """A kernel that leaves its output as it was, or writes something else, is never timed."""
    x = np.ones(4, np.float32)
    y = np.empty(4, np.float32)
    for run in (lambda: None, lambda: y.fill(2.0)):
        call = rows.TimedCall(run, y, x.astype(np.float64), {"NumPy": lambda: np.copyto(y, x)})
        with pytest.raises(AssertionError, match="the error is"):
            worker.check("copy", call)


def test_the_limit_is_the_best_probe_of_the_run() -> None:
    limits = [{"kind": "byte", "rates_per_s": rates, "rate_per_s": 2.0} for rates in ({"a": 4.0, "b": 5.0}, {"a": 8.0})]
    report._add_shares([{"threads": 1, "limits": [limit]} for limit in limits])
    assert [(x["share"], x["from"]) for x in limits] == [(0.25, "a")] * 2


def test_a_busy_machine_is_said_to_be_busy() -> None:
    rows = [{"threads": t, "limits": [{"kind": "flop", "best_per_s": rate}]} for t, rate in ((1, 10.0), (2, 11.0))]
    assert len(list(report._doubts(rows, 2.0))) == 2
    rows[1]["limits"] = [{"kind": "flop", "best_per_s": 19.0}]
    assert list(report._doubts(rows, 0.1)) == []


def test_slug() -> None:
    assert machine.slug("AMD EPYC(tm) 9R14 96-Core", "znver4 EPYC") == "amd-epyc-tm-9r14-96-core-znver4"
