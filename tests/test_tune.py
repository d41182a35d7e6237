"""`monotile tune` without a GPU: which candidates there are, the search with a clock that is told what to say, what is
kept, and how a later call finds it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton", reason="the nvidia backend needs triton")
from monotile import errors
from monotile.backends.choices import Choice
from monotile.backends.nvidia import tuning
from monotile.backends.nvidia.choices import NvidiaChoices
from monotile.backends.nvidia.device import Gpu
from monotile.backends.nvidia.schedule import SHARED_BYTES, Schedule
from monotile.backends.nvidia.tuning import Key
from monotile.bench.nvidia import tune
from monotile.cli import commands
from monotile.dtypes import bool_
from problems import problem

KEY = Key("attention", 128, "bfloat16")
GPU = Gpu("NVIDIA Nothing", "sm_00")
BEFORE = Choice({"BR": 128, "BK": 64}, Schedule(8, 2))
interpreting = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("torch") is not None


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "gpu", lambda device: GPU)
    tuning.forget()


# ---- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize("D", tune.HEAD_SIZES)
def test_there_are_candidates_for_every_head_size(D: int, dtype: str) -> None:
    found = [*tune.candidates(Key("attention", D, dtype)), *tune.candidates(Key("decode", D, dtype))]
    assert {"BR", "BK"} in [set(c.blocks) for c in found] and {"BK"} in [set(c.blocks) for c in found]
    assert found and len({tune.describe(c) for c in found}) == len(found)
    for choice in found:
        if choice.schedule.warp_specialize:
            assert choice.schedule.num_stages > 1 and not choice.schedule.peel


def test_what_cannot_fit_is_never_tried() -> None:
    """Sizes that Triton was seen to need: docs/internals/nvidia.md."""
    assert tune.shared_bytes(128, 128, 128, 2, Schedule(8, 3)) == 224 * 1024 <= SHARED_BYTES
    assert tune.shared_bytes(128, 64, 256, 2, Schedule(8, 2)) == 192 * 1024
    assert tune.shared_bytes(64, 64, 512, 2, Schedule(8, 1)) == 128 * 1024
    assert tune.shared_bytes(64, 128, 128, 2, Schedule(4, 2, consumers=2)) == 160 * 1024
    assert not tune.fits(128, 128, 128, 2, Schedule(8, 4))
    assert not tune.fits(128, 64, 512, 2, Schedule(8, 1)), "the sums of 128 rows of 512 are 256 registers of a thread"
    small = list(tune.candidates(KEY, most=100 * 1024))
    assert any(c.schedule.consumers == 2 for c in tune.candidates(KEY))
    assert not any(c.schedule.consumers for c in tune.candidates(replace(KEY, dtype="float32")))
    assert 0 < len(small) < len(list(tune.candidates(KEY)))


# ---- the search ------------------------------------------------------------------------------------------------------


class Stopwatch:
    """A GPU whose times are given by a formula."""

    def __init__(self, seconds: Any, wrong: Any = lambda choice: None) -> None:
        self.seconds, self.wrong = seconds, wrong

    def measure(self, turns: list[Choice]) -> list[list[float]]:
        distinct = list({tune.describe(c): c for c in turns}.values())
        return [[self.seconds(c) for c in turns if c == choice] for choice in distinct]


def find(watch: Stopwatch, seconds: float = 60.0) -> tune.Outcome:
    others = list(tune.candidates(KEY))
    return tune.search(
        tune.Work(KEY, (1, 1), 64, 64), BEFORE, others, measure=watch.measure, wrong=watch.wrong, seconds=seconds
    )  # fmt: skip


def cost(choice: Choice) -> float:
    s = choice.schedule
    best = (s.num_warps, s.num_stages, s.tensor_descriptors, s.warp_specialize) == (8, 3, True, False)
    return 1.0 if best and choice.blocks == {"BR": 128, "BK": 64} else 2.0


def test_the_fastest_is_found() -> None:
    outcome = find(Stopwatch(cost))
    assert outcome.kept and outcome.gain == 1.0 and outcome.before_s == 2.0
    assert outcome.best == Choice({"BR": 128, "BK": 64}, Schedule(8, 3, tensor_descriptors=True))


def test_a_wrong_candidate_is_out_however_fast() -> None:
    outcome = find(Stopwatch(cost, lambda c: "the error is 1" if cost(c) == 1.0 else None))
    assert not outcome.kept and outcome.best_s == 2.0 and list(outcome.refused.values()) == ["the error is 1"]


def test_what_gains_little_is_not_kept() -> None:
    outcome = find(Stopwatch(lambda c: 1.0 if c == BEFORE else 0.99))
    assert outcome.best != BEFORE and not outcome.kept


def test_the_time_is_up() -> None:
    outcome = find(Stopwatch(cost), seconds=-1.0)
    assert outcome.tried == 0 and outcome.best == BEFORE and not outcome.kept


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_later_call_finds_what_was_kept() -> None:
    choice = Choice({"BR": 64, "BK": 32}, Schedule(4, 3, tensor_descriptors=True))
    assert tuning.lookup("attention", 128, "bfloat16", "cuda:0") is None
    path = tuning.save(GPU, {KEY: choice})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert tuning.lookup("attention", 128, "bfloat16", "cuda:0") == choice
    tuning.save(GPU, {replace(KEY, head_size=64): BEFORE})
    assert tuning.lookup("attention", 128, "bfloat16", "cuda") == choice
    assert tuning.lookup("attention", 64, "bfloat16", "cuda") == BEFORE
    for other in (("decode", 128, "bfloat16", "cuda"), ("attention", 128, "float16", "cuda")):
        assert tuning.lookup(*other) is None
    assert tuning.lookup("attention", 128, "bfloat16", "cpu") is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("change", ["triton", "monotile", "gpu", "architecture", "format"])
def test_what_others_measured_does_not_count(change: str) -> None:
    path = tuning.save(GPU, {KEY: BEFORE})
    path.write_text(json.dumps({**json.loads(path.read_text()), change: "another"}))
    tuning.forget()
    assert tuning.lookup("attention", 128, "bfloat16", "cuda") is None


@pytest.mark.parametrize(
    "entry",
    [
        {"schedule": {"num_warps": "8"}},
        {"schedule": {"unknown": 1}},
        {"blocks": {"BR": 0}},
        {"blocks": {}},
        {"blocks": 3},
        {"head_size": "many"},
    ],
)
def test_a_damaged_file_is_as_good_as_absent(entry: dict[str, Any]) -> None:
    path = tuning.save(GPU, {KEY: BEFORE})
    found = json.loads(path.read_text())
    found["choices"][0] |= entry
    for text in (json.dumps(found), "{", "3", ""):
        path.write_text(text)
        tuning.forget()
        assert tuning.lookup("attention", 128, "bfloat16", "cuda") is None


# ---- the command -----------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    def said(*words: str) -> str:
        result = CliRunner().invoke(commands.app, ["tune", *words])
        assert result.exit_code == 1 and isinstance(result.exception, errors.MonotileError)
        return str(result.exception)

    assert "float32, found 'int8'" in said("--dtype", "int8")
    assert "words that begin as those of 'nothing'" in said("--filter", "nothing")
    assert "cannot run here" in said() or "sees no NVIDIA GPU" in said()


@pytest.mark.skipif(not interpreting, reason="needs TRITON_INTERPRET=1 and torch")
def test_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_bench_nvidia import Clock

    class Quick(Clock):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "name": GPU.name}

        def timings(self, turns: list[Any], *, cold: bool) -> list[float]:
            return [1.0 if n % 2 else 2.0 for n, _ in enumerate(turns)]

    works = [
        tune.Work(Key("attention", 16, "bfloat16"), (2, 2), 40, 40),
        tune.Work(Key("decode", 16, "bfloat16"), (4, 2), 1, 700),
    ]
    monkeypatch.setattr(tune, "works", lambda only, dtype: works)
    for name in ("ROWS", "KEYS", "DECODE_KEYS"):
        monkeypatch.setattr(tune, name, (16,) if name != "DECODE_KEYS" else (16, 32))
    for name in ("STAGES", "WARPS", "DECODE_WARPS"):
        monkeypatch.setattr(tune, name, (2,))
    monkeypatch.setattr(tune, "CONSUMERS", (1,))
    written = io.StringIO()
    for outcome in tune.run(Console(file=written, width=200), gpu=Quick()):  # type: ignore[arg-type]
        key = outcome.work.key
        assert outcome.tried > 1 and outcome.refused == {} and outcome.work.name in written.getvalue()
        assert tuning.lookup(key.kernel, 16, "bfloat16", "cuda") == (outcome.best if outcome.kept else None)


def test_tuned_choices_are_not_for_kernels_that_need_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning measures a kernel that makes no copies of tiles; with a mask the same blocks may not fit."""
    found = Choice({"BR": 64, "BK": 128}, Schedule(4, 2, consumers=2))
    monkeypatch.setattr(tuning, "lookup", lambda *key: found)
    assert NvidiaChoices().row_blocks(problem(128, device="sm_90")) is found
    assert NvidiaChoices().row_blocks(problem(128, device="sm_90", mask=bool_)) is not found


@pytest.mark.parametrize(
    ("keys", "causal", "persistent"),
    [(1024, None, True), (4096, None, True), (8192, None, False), (8192, "lower_right", True),
     (16384, "lower_right", False), (2**20, None, False)],
)  # fmt: skip
def test_ctas_are_persistent_for_few_keys(keys: int, causal: str | None, persistent: bool) -> None:
    choices, facts = NvidiaChoices(), {"device": "sm_90", "keys": keys, "causal": causal}
    assert choices.row_blocks(problem(128, **facts)).schedule.persistent is persistent
    assert choices.row_blocks(problem(128, **facts, softcap=30.0)).schedule.persistent
    assert choices.row_blocks(problem(64, **facts)).schedule.persistent or keys == 1024  # plain Triton
    near = choices.row_blocks(problem(128, **facts, left=4)).schedule
    assert near.persistent is (causal is not None)  # a window with two ends
    assert not choices.row_blocks(problem(128, **facts, left=2000)).schedule.persistent
