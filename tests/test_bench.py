"""The benchmark: its rows, one of them from end to end, the JSON it writes, and baselines kept and compared."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from monotile import errors
from monotile.backends.cpu import target
from monotile.bench import attention, baselines, extend, goals, gradients, limits, peers, report, suite, table, worker
from monotile.bench.attention import AttentionShape
from monotile.bench.rows import Row, Sample, TimedCall
from monotile.cli import commands
from monotile.runtime import machine

ROOT = Path(__file__).parents[1]
TINY = AttentionShape((4, 2), 1, 96, 64, "float32")
TWO_ROUNDS = worker.RoundLimits(most=2, least=2, seconds=0.0)


def tiny(shape: AttentionShape) -> Row:
    return Row(shape.name, lambda rng, threads: attention.make(shape, rng, threads), tags=shape.tags)


def report_of(**times: tuple[float, float]) -> dict[str, Any]:
    """A report with rows of these names: median in seconds, spread."""
    found = [
        {"name": name, "threads": 1, "note": "", "ratios": {}, "times": {"monotile": {
            "best_s": median, "median_s": median, "spread": spread}}}
        for name, (median, spread) in times.items()
    ]  # fmt: skip
    device = {"slug": "some-chip", "processor": "Some Chip", "llvm_name": "chip", "processors": 2}
    about = {"commit": "0123456789abcdef", "dirty": False, "date": "2026-11-15T00:00:00+00:00", "quick": False}
    versions = {"numpy": "2", "llvm": "20", "torch": None}
    return {**about, "device": device, "versions": versions, "doubts": [], "rows": found, "wrong": [], "starts": []}


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_well_formed() -> None:
    names, library = [row.name for row in suite.ROWS], (*attention.ROWS, *extend.ROWS)
    assert len(set(names)) == len(names) and all(row.tags for row in library)
    assert names == [" ".join(name.split()) for name in names]
    ops = {"decode", "prefill", "extend", "sweep", "merge", "mask_blocks"}
    assert {row.tags["op"] for row in library} == ops


def test_rows_are_named_for_their_kind() -> None:
    """Names of decode and prefill have no Nq: baselines refer to them."""
    assert AttentionShape((32, 8), 1, 8192, 64, "float32").name == "attention decode 32/8 D64 N8192 float32"
    assert AttentionShape((8, 8), 64, 64, 64, "float32").name == "attention prefill 8/8 D64 N64 float32"
    assert AttentionShape((32, 8), 4, 64, 64, "float32").name == "attention extend 32/8 Nq4 D64 N64 float32"
    many = AttentionShape((128, 1), 1, 4096, 576, "bfloat16", Dv=512)
    assert many.name == "attention extend 128/1 Nq1 D576 Dv512 N4096 bfloat16 MLA" and many.tags["MLA"]


def test_quick_rows_exist() -> None:
    assert attention.QUICK - {row.name for row in suite.ROWS} == set()
    assert 5 < len(suite.select(1, "", True)) < 20 < len(suite.select(1, "", False))


@pytest.mark.parametrize("unit", [*goals.COLUMNS, "baseline"])
def test_every_goal_has_rows(unit: str) -> None:
    wanted = goals.goals_of(unit)
    assert [goal.work for goal in wanted if not any(goal.matches(dict(row.tags)) for row in suite.ROWS)] == []


@pytest.mark.parametrize(
    "only, count",
    [
        ("decode N16384 D128", 11),
        ("decode N16384 float16", 6),
        ("MLA", 2),
        ("visible", 12),
        ("MERGE", 2),
        ("nothing", 0),
    ],
)
def test_filter(only: str, count: int) -> None:
    assert len(suite.select(1, only, False)) == len(suite.select(1, only, True)) == count


# ---- one row, from end to end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        AttentionShape((4, 4), 64, 64, 64, "bfloat16", causal=True),
        AttentionShape((2, 2), 64, 64, 64, "float32", causal=True, extra="window"),
        AttentionShape((2, 2), 64, 64, 64, "float32", causal=True, extra="sinks"),
        AttentionShape((2, 2), 64, 64, 64, "float32", extra="additive mask"),
        AttentionShape((2, 1), 64, 64, 64, "float32", extra="bool mask"),
        AttentionShape((4, 2), 9, 96, 64, "bfloat16"),
        AttentionShape((16, 1), 1, 96, 72, "float32", Dv=64),
        *(AttentionShape((4, 2), 1, 700, 64, "float32", extra=extra) for extra in attention.FEW_VISIBLE),
        *(AttentionShape((4, 2), 3, 700, 64, "bfloat16", extra=extra) for extra in attention.FEW_VISIBLE),
    ],
    ids=lambda s: s.name,
)
def test_a_row_is_checked_and_timed(shape: AttentionShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    limits._read_source.cache_clear()
    found = worker.measure(tiny(shape), 1, TWO_ROUNDS)
    limits._read_source.cache_clear()
    assert json.loads(json.dumps(found)) == found and "wrong" not in found
    assert found["rounds"] == 2 and 0 < found["error"] <= found["allowed"]
    numbers = {"best_s", "median_s", "spread"} | (set() if sys.platform == "win32" else {"cpu_s"})
    assert all(numbers <= times.keys() for times in found["times"].values())
    assert found["times"].keys() - {"monotile"} == found["ratios"].keys()
    if peers.torch_version() is not None:
        assert found["torch"]["failed"] == {} and max(found["torch"]["errors"].values()) < 0.05
    if not shape.extra:
        kinds = ["flop"] if shape.kind == "prefill" else ["read", limits.arithmetic(shape.dtype)]
        assert [limit["kind"] for limit in found["limits"]] == kinds
    if shape.extra in attention.FEW_VISIBLE:
        assert found["slice_error"] < 0.01 and found["ratios"]["slice"] > 0


@pytest.mark.parametrize("shape", [AttentionShape((4, 2), 9, 96, 64, "float32"), TINY], ids=lambda s: s.name)
def test_torch_has_every_variant(shape: AttentionShape) -> None:
    pytest.importorskip("torch")
    call = attention.make(shape, np.random.default_rng(0), 1)
    assert call.torch is not None and call.sample is not None
    assert call.torch.keys() == {"enable_gqa", "repeated heads", "folded", "products"}
    assert max(worker.distance(call.sample, run()) for run in call.torch.values()) < 1e-5
    latent = AttentionShape((16, 1), 1, 96, 72, "float32", Dv=64)
    assert "folded, keys as values" in (attention.make(latent, np.random.default_rng(0), 1).torch or {})


def test_work_of_a_row() -> None:
    """Values that lie in the keys are read with them."""
    rng, shape = np.random.default_rng(0), AttentionShape((16, 1), 1, 96, 72, "float32", Dv=64)
    work = attention.make(shape, rng, 1).work
    assert work == {"read": 96 * 72 * 4, "flop": 2 * 16 * 96 * (72 + 64)}
    grouped = attention.make(AttentionShape((4, 2), 9, 96, 64, "float32"), rng, 1).work
    assert grouped == {"read": 2 * 2 * 96 * 64 * 4, "flop": 4 * 4 * 9 * 96 * 64}


def test_a_sweep() -> None:
    row = Row("sweep", lambda rng, threads: extend.sweep((4, 2), 96, 64, (1, 2, 5), rng, threads), tags={"op": "sweep"})
    found = worker.measure(row, 1, TWO_ROUNDS)
    assert json.loads(json.dumps(found)) == found and 0 < found["error"] <= found["allowed"]
    assert [step["size"] for step in found["steps"]] == [1, 2, 5] and found["worst_step"]["cliff"] > 0
    whole = {**report_of(), "rows": [found]}
    ((*_, place, ratio, _, times),) = table.sweep_cells(whole)
    assert place in ("Nq 1 to 2", "Nq 2 to 5") and float(ratio) > 0 and times.startswith("1: ")
    assert f"| {place} |" in baselines.markdown(whole)
    (only,) = goals.judge([found])
    assert only.goal.measure is goals.CLIFF and only.value == found["worst_step"]["cliff"]


@pytest.mark.parametrize(
    "times, cliff, place",
    [
        ({1: 1.0, 2: 1.1, 3: 1.5}, 1.5 / 1.1, (2, 3)),
        ({8: 1.0, 9: 1.2, 16: 2.0}, 1.2, (8, 9)),  # in proportion from 9 on
        ({8: 1.0, 12: 2.2, 16: 2.9}, 2.2 * 8 / 11, (8, 12)),
    ],
)
def test_the_worst_step(times: dict[int, float], cliff: float, place: tuple[int, int]) -> None:
    worst = worker.worst_step(times)
    assert worst["cliff"] == pytest.approx(cliff) and (worst["from"], worst["to"]) == place


def test_a_hidden_mask_hides_nine_blocks_of_ten() -> None:
    made = attention.EXTRAS["nine blocks of ten hidden"](
        np.random.default_rng(0), AttentionShape((1, 1), 4096, 4096, 64, "float32")
    )
    assert 0.09 < made["mask"].mean() <= 0.1 and made["mask"].any(axis=-1).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: attention.merge(3, 20, 64, rng, 1),
        lambda rng: attention.mask_blocks(1, 256, "bool", rng, 1),
        lambda rng: attention.mask_blocks(1, 256, "float32", rng, 1),
    ],
)
def test_merge_and_maps_agree_with_numpy(make: Any) -> None:
    call = make(np.random.default_rng(0))
    errors = worker.check("row", call)
    assert errors["numpy_error"] < 1e-5 and call.work.keys() == {"read"} and call.work["read"] > 0


@pytest.mark.parametrize("passes", gradients.PRODUCTS)
def test_gradients_are_checked_beside_those_of_torch(passes: str) -> None:
    shape = gradients.GradientShape(passes, (4, 2), 33, 16, "float32", causal=True)
    call = gradients.make(shape, np.random.default_rng(0), 1)
    errors = worker.check("row", call)
    assert errors["error"] <= errors["allowed"] and call.torch is not None and call.sample is not None
    found = worker.choose(call.torch, call.sample)
    assert found["errors"].keys() == {"sdpa", "repeated heads"} and max(found["errors"].values()) < 1e-5


def test_a_wrong_result_is_not_timed() -> None:
    """Neither another result nor an output that was left alone: what ops.py allocates is poisoned."""
    exact = np.ones((2, 3))
    call = TimedCall(lambda: np.full((2, 3), 1.1, np.float32), sample=Sample(lambda out: out, exact, exact))
    found = worker.measure(Row("some row", lambda rng, threads: call), 1, TWO_ROUNDS)
    assert "the error is 0.1" in found["wrong"] and "times" not in found
    with worker.poisoned():
        array, _ = worker.arrays.Numpy().allocate(((2,), np.dtype(np.float32)))
    assert np.isnan(array).all()


def test_the_fastest_way_that_does_the_same_work_competes() -> None:
    def slow() -> Any:
        return [np.linalg.norm(np.ones((300, 300)), 2), np.ones((1, 4), np.float32)][1]

    def broken() -> Any:
        raise RuntimeError("no such kernel")

    exact, right = np.ones((1, 4)), np.ones((1, 4), np.float32)
    ways = {"slow": slow, "quick": lambda: right, "wrong": lambda: 0 * right, "broken": broken}
    call = TimedCall(lambda: right, sample=Sample(lambda out: out, exact, exact), torch=ways)
    found = worker.measure(Row("some row", lambda rng, threads: call), 1, TWO_ROUNDS)
    assert found["torch"]["contenders"] == ["quick"] and found["torch"]["way"] == "quick"
    assert found["torch"]["failed"] == {"broken": "no such kernel"} and found["torch"]["errors"]["wrong"] == 1.0
    assert found["times"].keys() == {"monotile", "torch"}


def test_the_json_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "monotile", "bench", "--quick", "--threads", "1"]
    command += ["--filter", "decode N128 D64 float32", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MONOTILE_THREADS": "1"}
    subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = baselines.load(path)
    assert {"load_before", "doubts", "wrong", "starts", "quick", "filter"} <= found.keys()
    (row,) = found["rows"]
    assert row["name"] == "attention decode 32/8 D64 N128 float32" and row["tags"]["op"] == "decode"
    assert {"best_per_s", "share", "from", "kind"} <= row["limit"].keys()
    if found["versions"]["torch"] is None:
        assert table.against_torch(row, found) == "no torch"
    else:
        assert row["torch"]["way"] in row["torch"]["trials_s"]


@pytest.mark.parametrize("unit", target.runnable()[1:])
def test_a_run_on_another_vector_unit(unit: str, tmp_path: Path) -> None:
    """Torch and NumPy are held to it, the report says so, and its baseline is another file."""
    path = tmp_path / "found.json"
    words = [
        "--quick",
        "--threads",
        "1",
        "--backend",
        f"cpu:{unit}",
        "--filter",
        "launch overhead",
        "--json",
        str(path),
    ]
    monotile("bench", *words)
    found = baselines.load(path)
    assert found["device"]["vectors"] == unit and baselines.path_for(found).stem.endswith(f"-{unit}")
    assert found["device"]["peers_held_by"] == peers.held_to(unit) != {}
    assert f"vector unit {unit}; torch and NumPy held to it by ATEN_CPU_CAPABILITY" in table.title(found)


def test_an_unknown_vector_unit() -> None:
    assert f"no vector unit 'avx3'; this machine has {target.runnable()[0]}" in monotile(
        "bench", "--quick", "--backend", "cpu:avx3", code=1
    )


def test_the_limit_is_what_takes_longest() -> None:
    """10 units to read at 5 a second and 8 to compute at 2 a second take 4 seconds at best, whatever took 5."""
    (row,) = found = report_of(a=(5.0, 0.0))["rows"]
    row["limits"] = [
        {"kind": "read", "rates_per_s": {"slow": 3.0, "quick": 5.0}, "rate_per_s": 10 / 5.0},
        {"kind": "flop", "rates_per_s": {"chains": 2.0}, "rate_per_s": 8 / 5.0},
    ]
    report._add_shares(found)
    assert row["limit"]["kind"] == "flop" and row["limit"]["share"] == pytest.approx(4 / 5)
    assert table.rate(row["limit"]) == "0 GFLOP/s" and row["limits"][0]["from"] == "quick"


def test_bfloat16_has_a_limit_of_its_own_where_it_has_an_instruction() -> None:
    for kind in {limits.arithmetic(dtype) for dtype in attention.DTYPES}:
        (probe,) = limits.probes(kind, 1)
        probe.run()
        assert probe.work > 0 and kind in limits.UNITS


def test_a_row_that_shared_its_processor_is_marked() -> None:
    (row,) = report_of(a=(1.0, 0.0))["rows"]
    assert table.note(row) == ""
    row["times"]["monotile"]["cpu_s"] = 0.5
    assert table.note(row) == "took 2.0 x its processor time"
    assert "1 rows on one thread" in "".join(report._doubts([row], 0.0))


# ---- goals -----------------------------------------------------------------------------------------------------------


def test_the_worst_row_counts() -> None:
    found = report_of(a=(1.0, 0.0), b=(1.0, 0.0))
    for row, ratio, share in zip(found["rows"], (3.0, 2.0), (0.8, 0.7), strict=True):
        row["tags"] = AttentionShape((32, 8), 1, 16384, 64, "float32").tags
        row["ratios"], row["limit"] = {"torch": ratio}, {"share": share}
    against, share = goals.judge(found["rows"])
    assert (against.value, against.row, against.ok) == (2.0, "b", False)
    assert share.shown == ("70%", "75%")


def test_the_goal_of_few_queries_is_a_time() -> None:
    """At most 1.3 times that of the slice: the slower row is the worst."""
    found = report_of(a=(1.0, 0.0), b=(1.0, 0.0))["rows"]
    for row, ratio in zip(found, (0.9, 0.5), strict=True):
        row["tags"] = AttentionShape((32, 8), 1, 16384, 64, "float32", extra=attention.FEW_VISIBLE[0]).tags
        row["ratios"] = {"slice": ratio}
    (only,) = goals.judge(found)
    assert (only.value, only.row, only.ok) == (2.0, "b", False)


def test_vector_units_have_goals_of_their_own() -> None:
    found = report_of(a=(1.0, 0.0))["rows"]
    found[0] |= {"tags": AttentionShape((32, 8), 4, 8192, 128, "float32").tags, "ratios": {"torch": 1.4}}
    assert [worst.ok for worst in goals.judge(found)] == [False]
    assert [worst.ok for worst in goals.judge(found, "avx2")] == [True]
    assert [worst.ok for worst in goals.judge(found, "baseline")] == []
    found[0] |= {"tags": AttentionShape((16, 2), 1, 16384, 512, "float16").tags, "ratios": {"torch": 5.5}}
    assert [(worst.goal.wanted, worst.ok) for worst in goals.judge(found, "avx2")] == [(5.0, True)]
    assert [(worst.goal.wanted, worst.ok) for worst in goals.judge(found, "avx512")] == [(6.0, False)]
    assert list(goals.judge(found, "avx512-amx")) == []


def test_threads_are_held_against_one() -> None:
    found = report_of(a=(1.0, 0.0))["rows"]
    found += [{**copy.deepcopy(found[0]), "threads": 2}]
    for row in found:
        row["tags"] = {"op": "prefill", "extra": "sinks", "dtype": "float32", "D": 64, "causal": True}
    found[1]["times"]["monotile"]["best_s"] = 0.5
    (only,) = goals.judge(found)
    assert (only.value, only.goal.wanted, only.ok) == (2.0, 1.85, True)


# ---- snap and diff ---------------------------------------------------------------------------------------------------


def monotile(*words: str, code: int = 0) -> str:
    """What the command prints; its exit code must be as given."""
    result = CliRunner().invoke(commands.app, words)
    assert result.exit_code == code, result.output
    return result.output + str(result.exception or "")


def test_diff_sees_what_is_beyond_the_spread() -> None:
    old = report_of(same=(1.0, 0.1), noisy=(1.0, 0.5), slower=(1.0, 0.1), faster=(1.0, 0.1), gone=(1.0, 0.0))
    new = report_of(same=(1.1, 0.1), noisy=(1.5, 0.5), slower=(1.3, 0.1), faster=(0.7, 0.1), added=(1.0, 0.0))
    changes = {change.name: change for change in baselines.compare(old, new)}
    assert list(changes) == ["same", "noisy", "slower", "faster"]
    assert [name for name, change in changes.items() if change.beyond_spread] == ["slower", "faster"]
    assert changes["slower"].slower == pytest.approx(0.3)
    new["dirty"], new["device"] = True, {**new["device"], "slug": "another"}
    text = "\n".join(baselines.remarks(old, new))
    assert (
        "different devices" in text and "changes that are not in commit" in text and "1 rows are in the first" in text
    )


def test_diff_of_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    baselines.save(report_of(a=(1.0, 0.01), b=(1.0, 0.01)), old)
    baselines.save(report_of(a=(1.2, 0.01), b=(0.5, 0.01)), new)
    text = monotile("diff", str(old), str(new), code=1)
    assert "+20%" in text and "-50%" in text and "1 slower by more than 5 %" in text
    assert "0 slower by more than 30 %" in monotile("diff", str(old), str(new), "--tolerance", "30")


def test_snap_keeps_a_file_and_shows_it(tmp_path: Path) -> None:
    found, kept, page = tmp_path / "found.json", tmp_path / "kept" / "chip.json", tmp_path / "kept" / "chip.md"
    dirty = {**report_of(a=(1.0, 0.01)), "dirty": True}
    baselines.save(dirty, found)
    assert "with changes" in monotile("snap", str(kept), "--from", str(found))
    assert baselines.load(kept) == dirty
    text = page.read_text()
    assert text.count("| a | 1 | 1000.00 ms | 1% |") == 1 and "0123456789 with changes" in text
    page.write_text("old")
    assert monotile("snap", str(kept), "--tables").strip() == str(page) and page.read_text() == text
    assert "pass a FILE" in monotile("snap", "--quick", code=1)


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in ("bench --quick --json", "bench --quick --html", "snap --quick"):
        for place in (tmp_path / "file" / "found", tmp_path):
            assert "cannot be written" in monotile(*words.split(), str(place), code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_snap_joins_runs_on_several_numbers_of_threads(tmp_path: Path) -> None:
    one, kept = report_of(a=(1.0, 0.01)), tmp_path / "kept.json"
    four = {**one, "rows": [{**row, "threads": 4} for row in one["rows"]], "doubts": ["the load was 3"]}
    paths = [tmp_path / name for name in ("one.json", "four.json", "other.json")]
    for path, run in zip(paths, (one, four, {**four, "commit": "another"}), strict=True):
        baselines.save(run, path)
    monotile("snap", str(kept), "--from", str(paths[0]), "--from", str(paths[1]))
    found = baselines.load(kept)
    assert [row["threads"] for row in found["rows"]] == [1, 4] and found["doubts"] == ["the load was 3"]
    joined = baselines.join([{**one, "left_out": ["b", "c"]}, {**report_of(b=(1.0, 0.01)), "left_out": ["c"]}])
    assert [row["name"] for row in joined["rows"]] == ["a", "b"] and joined["left_out"] == ["c"]
    kept.unlink()
    for second, message in ((paths[0], "1 rows are in both files"), (paths[2], "runs with another commit")):
        assert message in monotile("snap", str(kept), "--from", str(paths[0]), "--from", str(second), code=1)
    assert not kept.exists()


def test_a_file_that_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for text, message in (
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("{}", "has no device"),
        ("3", "has no device"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(errors.MonotileError, match=message):
            baselines.load(path)


@pytest.mark.parametrize("path", sorted((ROOT / "baselines").glob("*.json")), ids=lambda path: path.stem)
def test_the_tables_beside_a_baseline_are_its_own(path: Path) -> None:
    """`monotile snap --tables` rewrites them."""
    text = baselines.tables_path(path).read_text()
    assert text == baselines.markdown(baselines.load(path))
    assert all(re.match(r"^\|.*\|$", line) for line in text.splitlines() if line.startswith("|"))


def test_baselines_of_a_checkout_are_kept_in_it() -> None:
    assert ROOT / "baselines" == baselines.FOLDER
    if (ROOT / ".git").exists() and shutil.which("git"):
        assert machine.commit() is not None
