"""The benchmark of a GPU without one: Triton's interpreter computes, and a clock of the host stands in for CUDA's. The
tests that need results run in a process of their own, where Triton interprets."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from monotile import errors
from monotile.bench import baselines, suite
from monotile.bench.nvidia import goals, rows, run, table
from monotile.bench.nvidia.caches import GpuCache
from monotile.bench.nvidia.device import CudaTimer
from monotile.bench.nvidia.gradients import GpuGradient
from monotile.bench.nvidia.rows import GpuShape
from monotile.bench.nvidia.sweep import GpuSweep
from monotile.cli import commands

ROOT = Path(__file__).parents[1]
interpreting = os.environ.get("TRITON_INTERPRET") == "1"
has_packages = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
needs_results = pytest.mark.skipif(not (interpreting and has_packages), reason="needs TRITON_INTERPRET=1 and torch")

TINY = (
    GpuShape(1, (2, 2), 16, 16, 16, host=True),
    GpuShape(1, (4, 2), 1, 70, 16),
    GpuShape(1, (2, 2), 40, 40, 16),
    GpuShape(2, (4, 2), 40, 40, 16, True),
    *(GpuShape(1, (2, 2), 40, 40, 16, extra == "window", extra) for extra in rows.EXTRAS),
    GpuShape(2, (4, 2), 5, 70, 16),
    GpuShape(1, (16, 1), 1, 40, 24, Dv=16),
)
GRADIENTS = (
    GpuGradient("backward", 1, (2, 1), 40, 16, True),
    GpuGradient("forward+backward", 2, (2, 2), 40, 16),
)
MODS = tuple(
    GpuShape(1, (2, 2), 40, 40, 16, extra in ("alibi by score_mod", "near window"), extra) for extra in rows.MODS
)
CACHES = (
    GpuCache("quantised", "int8", 2, (4, 2), 70, 32),
    GpuCache("quantised", "aura4", 1, (2, 2), 70, 32),
    GpuCache("paged", 16, 2, (4, 2), 64, 16),
    GpuCache("mixed", None, 3, (4, 2), 200, 16),
    GpuCache("mixed", 16, 3, (4, 2), 200, 16),
    GpuCache("varlen", None, 2, (4, 2), 40, 16),
)
VISIBLE = tuple(GpuShape(2, (4, 2), 1 + 2 * (n % 2), 700, 16, extra=extra) for n, extra in enumerate(rows.FEW_VISIBLE))


class Clock:
    """Stands in for a GPU: what it is asked to run runs here."""

    name = "cpu"
    broken = False

    def describe(self) -> dict[str, Any]:
        return {"name": "NVIDIA Nothing", "architecture": "sm_00", "cuda": None, "cudnn": None}

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def release(self) -> None: ...

    def flush(self) -> None: ...

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return run

    def seconds(self, run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def timings(self, calls: list[Callable[[], Any]], *, cold: bool) -> list[float]:
        return [self.seconds(call) for call in calls]


def options(flex: str = "never", **others: Any) -> run.RunOptions:
    """Two rounds, tiny probes, and FlexAttention without its compiler."""
    uncompiled = run.peers.Flex(flex, compile=lambda function, dynamic: function)
    rounds, probes = run.RoundLimits(most=2, least=2, seconds=0.0), run.limits.ProbeSizes(16, 4096, (32,))
    return run.RunOptions(flex=uncompiled, rounds=rounds, probes=probes, host_calls=2, **others)


def test_what_may_have_waited_for_the_host_takes_part() -> None:
    """A trial of 38 us that is 16 us as a graph: with this, cuDNN was left out of a row that it leads."""
    assert run.contenders({"flash": 21.5e-6, "cuDNN": 37.8e-6, "math": 4e-4}) == ["flash", "cuDNN"]
    assert run.contenders({"flash": 1e-3, "cuDNN": 1.4e-3, "math": 4e-3}) == ["flash", "cuDNN"]
    assert run.contenders({}) == []


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def report_of(shapes: tuple[run.Shape, ...], **words: Any) -> dict[str, Any]:
    words = {"gpu": Clock(), "options": options(), **words}
    return run.run(console=quiet(), shapes=shapes, **words)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_names_are_distinct_and_quick_rows_exist() -> None:
    names = [row.name for row in run.ROWS]
    assert len(set(names)) == len(names) and set(rows.ROWS) >= rows.QUICK
    assert sum(suite.matches(name, "decode D512") for name in names) == 2
    assert sum(suite.matches(name, "visible") for name in names) == len(rows.FEW_VISIBLE)
    assert sum(suite.matches(name, "extend") for name in names) == len(rows.EXTEND)
    assert rows.EXTEND[0].name == "attention extend B1 64/1 Nq1 D128 N32768 bfloat16"
    assert rows.EXTEND[-1].name == "attention extend B32 16/1 Nq1 D576 Dv512 N8192 bfloat16 MLA"
    assert sum(suite.matches(name, "prefill B1 D128 N16384 causal") for name in names) == 3
    assert sum(suite.matches(name, "sweep") for name in names) == 1
    assert {row.extra for row in rows.LATER} == {"", *rows.MODS}


def test_every_goal_has_rows() -> None:
    for goal in goals.GOALS:
        assert any(goal.matches(row.tags) for row in run.ROWS), goal.work


def test_work_of_a_row() -> None:
    full = GpuShape(2, (4, 2), 100, 100, 64)
    assert full.flops == 4 * 2 * 4 * 100 * 100 * 64 and full.key_bytes == 2 * 2 * 2 * 100 * 64 * 2
    assert GpuShape(2, (4, 2), 100, 100, 64, True).flops == full.flops / 2
    latent = GpuShape(2, (4, 1), 3, 100, 72, Dv=64)
    few = GpuShape(2, (4, 1), 3, 2048, 64, extra="512 visible by window")
    assert few.flops == 4 * 2 * 4 * 3 * 512 * 64 and few.key_bytes == 2 * 2 * 512 * 64 * 2
    assert latent.flops == 2 * 2 * 4 * 3 * 100 * (72 + 64) and latent.key_bytes == 2 * 100 * 72 * 2
    N, W = 16384, rows.WINDOW
    seen = sum(min(i, W) + 1 for i in range(N))
    assert GpuShape(1, (1, 1), N, N, 64, True, "window").pairs == seen
    i, j = np.arange(1000)[:, None], np.arange(1000)[None, :]
    for extra, visible in (
        ("documents by mask_mod", i // rows.DOCUMENT == j // rows.DOCUMENT),
        ("prefix-LM by mask_mod", (j < rows.PREFIX) | (j <= i)),
        ("near window by mask_mod", (j <= i) & (i - j <= rows.NEAR)),
    ):
        assert GpuShape(1, (1, 1), 1000, 1000, 64, extra=extra).pairs == visible.sum(), extra
    assert GpuShape(1, (1, 1), N, N, 64, True, "window").plain == GpuShape(1, (1, 1), N, N, 64, True)


def test_the_limit_of_extend_is_what_takes_longest() -> None:
    best = {"read": {"best_per_s": 4e12}, "flop": {"best_per_s": 800e12}}
    many, few = (run.row_limit(row, 1e-3, best) for row in rows.EXTEND[-2:])
    assert (many["kind"], few["kind"]) == ("flop", "read")
    assert many["rate_per_s"] == rows.EXTEND[-2].flops * 1e3 and few["share"] == few["rate_per_s"] / 4e12


# ---- goals -----------------------------------------------------------------------------------------------------------


def row_of(shape: GpuShape, torch: float, rate: float, median: float = 1e-3) -> dict[str, Any]:
    best = {"read": {"best_per_s": 4e12}, "flop": {"best_per_s": 800e12}}
    limit = run.row_limit(shape, 1.0, best) | {"rate_per_s": rate, "best_per_s": 4e12, "share": rate / 4e12}
    return {
        "name": shape.name, "threads": 1, "tags": shape.tags, "ratios": {"torch": torch}, "limit": limit, "note": "",
        "times": {"monotile": {"median_s": median, "best_s": median, "spread": 0.01}}, "torch": {"way": "cuDNN"},
    }  # fmt: skip


def full_report() -> dict[str, Any]:
    found = [row_of(row, 1.0, 3.7e12, 20e-6 if row.host else 1e-3) for row in rows.ROWS]
    found[0]["times"]["monotile"]["median_s"] = 40e-6
    limits = {kind: {"best_per_s": 4e12, "rates_per_s": {}} for kind in ("copy", "read", "flop")}
    device = {"slug": "nvidia-nothing", **Clock().describe()}
    versions = {"torch": "2", "triton": "3", "monotile": "0"}
    about = {"backend": "nvidia", "device": device, "versions": versions, "commit": "0123456789ab", "dirty": False}
    about |= {
        "date": "2026-01-01T00:00:00+00:00",
        "quick": False,
        "doubts": ["a doubt"],
        "flex_refused": ["a row: why"],
    }
    return {**about, "limits": limits, "rows": found, "wrong": [], "starts": []}


def test_the_worst_row_counts() -> None:
    found = {f"{f.goal.work}, {f.goal.measure.name}": f for f in goals.judge(full_report()["rows"])}
    assert not found["forward D 64, N 16384, against the best of torch"].ok
    assert found["forward N 256-2048, against the best of torch"].ok
    assert found["decode, keys and values over 200 MB, of the read rate"].shown == ("92%", "90%")
    host = found["a warm call, host"]
    assert host.shown == ("40.0 us", "25.0 us") and not host.ok and host.row == rows.ROWS[0].name
    assert found["a warm call of decode, host"].ok


def test_short_caches_are_not_held_to_the_read_rate() -> None:
    large, small = (row_of(GpuShape(1, (32, 8), 1, N, 128), 1.0, 1e12, N * 4096e-12) for N in (131072, 32768))
    work = "decode, keys and values over 200 MB"
    assert [f.row for f in goals.judge([large, small]) if f.goal.work == work] == [large["name"]]
    assert not [f for f in goals.judge([small]) if f.goal.work == work]


def test_tables(tmp_path: Path) -> None:
    report, path = full_report(), tmp_path / "found.json"
    written = io.StringIO()
    table.show(report, Console(width=200, file=written), with_goals=True)
    text = written.getvalue()
    assert "NVIDIA Nothing (sm_00)" in text and "a warm call" in text and "short" in text and "a row: why" in text
    baselines.save(report, path)
    page = baselines.markdown(baselines.load(path))
    assert page.startswith("# nvidia-nothing\n") and "- doubtful: a doubt" in page
    assert page.count(rows.ROWS[-1].name) >= 1 and "| reached |" not in page
    assert baselines.compare(report, report)[0].slower == 0


def test_calls_of_cuda() -> None:
    """The one class that talks to CUDA, with something that takes every call in its place."""
    gpu = CudaTimer.__new__(CudaTimer)
    gpu.torch, gpu.flusher = mock.MagicMock(), mock.MagicMock()
    order: list[str] = []
    event = gpu.torch.cuda.Event.return_value
    event.record.side_effect = lambda: order.append("event")
    event.elapsed_time.return_value = 3.0
    gpu.flusher.amax.side_effect = lambda: order.append("flush")
    assert gpu.timings([lambda: order.append("run")] * 2, cold=True) == [0.003, 0.003]
    assert order == ["flush", "event", "run", "event"] * 2
    replay = gpu.graph(lambda: "result")
    assert replay() == "result" and gpu.torch.cuda.CUDAGraph.return_value.replay.called
    assert gpu.seconds(lambda: None) >= 0 and gpu.describe().keys() >= Clock().describe().keys()
    gpu.release()
    assert gpu.torch.cuda.empty_cache.called


# ---- the command -----------------------------------------------------------------------------------------------------


def monotile(*words: str) -> str:
    result = CliRunner().invoke(commands.app, words)
    assert result.exit_code == 1
    return str(result.exception)


def test_mistakes() -> None:
    assert "runs on cpu or nvidia, found 'metal'" in monotile("bench", "--backend", "metal")
    if not has_packages:
        assert "it needs torch" in monotile("bench", "--backend", "nvidia")
    elif not interpreting:
        assert "torch sees no NVIDIA GPU" in monotile("bench", "--backend", "nvidia")


# ---- a run, in Triton's interpreter ----------------------------------------------------------------------------------


@pytest.mark.skipif(interpreting or not has_packages, reason="runs the others in a process of their own")
def test_in_tritons_interpreter() -> None:
    """Run the tests that need results, here and of the tuner."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "tests/test_tune.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@needs_results
def test_every_kind_of_row(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    kept: list[int] = []

    def keep(report: dict[str, Any]) -> None:
        kept.append(len(report["rows"]))
        baselines.save(report, path)

    report = report_of(TINY, keep=keep, options=options("needed"))
    assert report["wrong"] == [] and kept == [*range(1, len(TINY) + 1), len(TINY)]
    assert baselines.load(path) == json.loads(json.dumps(report))
    found = {row["name"]: row for row in report["rows"]}
    for shape in TINY:
        row = found[shape.name]
        assert row["error"] <= row["allowed"] and row["ratios"]["torch"] > 0, shape.name
        assert ("no option" in row["ratios"]) == bool(shape.extra)
        assert shape.host or math.isclose(
            row["limit"]["share"] * row["limit"]["best_per_s"], row["limit"]["rate_per_s"]
        )
    assert found[TINY[1].name]["torch"]["errors"].keys() >= {"flash", "flash, folded", "math, folded"}
    assert found[TINY[-2].name]["torch"]["errors"].keys() >= {"flash, folded", "math, folded"}
    assert found[TINY[-1].name]["torch"]["errors"].keys() >= {"math, folded", "math, folded, keys as values"}
    assert "cuDNN" in found[TINY[2].name]["torch"]["failed"]
    assert all(found[s.name]["torch"]["way"] == "flex" for s in TINY if s.extra in ("softcap", "sinks"))
    assert {kind: sorted(found["rates_per_s"]) for kind, found in report["limits"].items()}["read"] == [
        "maximum of rows of 32", "torch.amax", "torch.sum",
    ]  # fmt: skip
    table.show(report, quiet())
    assert baselines.markdown(report)


@needs_results
def test_gradients() -> None:
    report = report_of(GRADIENTS)
    assert report["wrong"] == []
    for row, shape in zip(report["rows"], GRADIENTS, strict=True):
        assert row["error"] <= row["allowed"] and row["ratios"]["torch"] > 0, shape.name
        assert math.isclose(row["limit"]["rate_per_s"], shape.flops / row["times"]["monotile"]["median_s"])


@needs_results
def test_mods_beside_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, keys in (("NEAR", 9), ("DOCUMENT", 14), ("PREFIX", 11)):
        monkeypatch.setattr(rows, name, keys)
    report = report_of(MODS, options=options("needed"))
    assert report["wrong"] == [] and report["flex_refused"] == []
    for row in report["rows"]:
        assert row["torch"]["way"] == "flex" and list(row["torch"]["errors"]) == ["flex"], row["name"]
        assert row["torch"]["errors"]["flex"] < 0.02 and row["ratios"]["no option"] > 0


@needs_results
def test_a_sweep_over_the_queries() -> None:
    report = report_of((GpuSweep((4, 2), 70, 16, (1, 2, 5)),))
    assert report["wrong"] == []
    (row,) = report["rows"]
    assert [step["size"] for step in row["steps"]] == [1, 2, 5] and row["worst_step"]["cliff"] > 0
    assert table.cells(row)[-2] == "" and "queries: " in table.cells(row)[-1] and baselines.markdown(report)


@needs_results
def test_caches_beside_dense_tensors() -> None:
    report = report_of(CACHES)
    assert report["wrong"] == [] and len(report["rows"]) == len(CACHES)
    for row in report["rows"]:
        assert ("dense" in row["ratios"]) == ("mixed" not in row["name"]) and table.cells(row)[-2] == "", row["name"]
        assert row["limit"]["rate_per_s"] > 0
    assert baselines.markdown(report)


@needs_results
def test_few_visible_keys_beside_their_slice() -> None:
    report = report_of(VISIBLE, options=options("always"))
    assert report["wrong"] == [] and len(report["rows"]) == len(VISIBLE)
    for row in report["rows"]:
        assert row["ratios"]["slice"] > 0 and "x the time of the slice" in table.cells(row)[-1]
        assert row["torch"]["errors"]["math, folded"] < 0.02 and row["torch"]["errors"]["flex"] < 0.02, row["name"]


@needs_results
def test_flex_everywhere_and_within_its_time() -> None:
    shapes = TINY[1:4] + TINY[-7:-4]
    for row in report_of(shapes, options=options("always"))["rows"]:
        assert row["torch"]["errors"]["flex"] < 0.02, row["name"]
    limited = options("always")
    limited.flex.seconds = 0.0
    assert "used up" in report_of(shapes[:1], options=limited)["flex_refused"][0]


@needs_results
def test_a_wrong_row_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    plain = run.ops.attention
    for wrong, message in (
        (lambda *a, **w: plain(*a, **w) * 1.1, "at most"),
        (lambda q, *a, **w: torch.empty(q.shape), "not written"),
        (lambda q, *a, **w: torch.zeros(q.shape), "no output was poisoned"),
    ):
        monkeypatch.setattr(run.ops, "attention", wrong)
        report = report_of(TINY[2:3])
        assert report["rows"] == [] and message in report["wrong"][0]["wrong"]


@needs_results
def test_a_run_that_is_stopped() -> None:
    assert report_of(TINY[:2], options=options(total_s=-1.0))["left_out"] == [s.name for s in TINY[:2]]
    gpu = Clock()
    gpu.broken = True
    report = report_of(TINY[1:3], gpu=gpu)
    assert report["rows"] == [] and "2 rows were left out" in next(table.remarks(report))
    with pytest.raises(errors.MonotileError, match="no row matches"):
        run.run(run.RunOptions(only="nothing"), quiet(), gpu=Clock())
