"""The registry and `monotile check`: the rule, its cases on every backend, and what is said where one fails."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import monotile
from kernels.cases import normal
from monotile.library import check, registry

BROKEN = registry.Case("attention", registry.Sizes(1, 3, 2, 4, 5, 8, 8))


@pytest.mark.parametrize("case", registry.CHECKS, ids=lambda c: c.name)
def test_registered_cases(case: registry.Case, backend: str) -> None:
    assert [v for v in registry.verdicts(case, backend) if not v.ok] == []


def test_cases_of_metal_run_on_the_gpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    from monotile.backends.metal import on_mps

    assert registry.gpu_of("cpu") is None and registry.gpu_of("metal") is None
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(on_mps, "why_not", lambda: None)
    assert registry.gpu_of("metal") == "mps" and registry.gpu_of("cpu") is None


def test_a_wrong_result_is_found() -> None:
    """A wrong digit, a misplaced NaN or infinity, a wrong shape."""
    exact = normal(4, 5).astype(np.float64)
    right = exact.astype(np.float32)
    wrong = []
    for value in (right[1, 2] + 1e-4, np.nan, np.inf, -np.inf):
        wrong.append(right.copy())
        wrong[-1][1, 2] = value
    assert registry.judge("out", right, exact, right).ok
    assert not any(registry.judge("out", w, exact, right).ok for w in [*wrong, right[:3], right[None]])
    assert not registry.judge("block_map", np.ones(3, np.uint8), np.zeros(3, np.uint8), np.zeros(3, np.uint8)).ok
    lower = np.array([-np.inf, 1.0])
    assert registry.judge("lse", lower.astype(np.float32), lower, lower).ok
    assert not registry.judge("lse", -lower.astype(np.float32), lower, lower).ok


def test_every_op_has_cases_to_check_and_to_time() -> None:
    public = {n for n in monotile.__all__ if n[0].islower() and n not in ("recommended_splits", "block_mask")}
    public |= {"quantize_pages", "attention_paged_rows"}  # attention_paged on what quantize made, and with q_offsets
    assert set(registry.OPS) == public
    assert {c.op for c in registry.CHECKS} == public
    assert public - {"merge_lse", "quantize", "quantize_pages", "attention_paged_rows"} <= {
        c.op for c in registry.BENCHMARKS
    }
    for cases in (registry.CHECKS, registry.BENCHMARKS):
        assert len({c.name for c in cases}) == len(cases)


def test_inputs_are_the_same_every_time() -> None:
    first, second = registry.CHECKS[0].inputs(), registry.CHECKS[0].inputs()
    for name in "qkv":
        np.testing.assert_array_equal(first[name], second[name])


def test_values_may_lie_in_the_keys() -> None:
    """A view, as in MLA, that a copy of each array to a device would lose."""
    case = next(case for case in registry.CHECKS if case.values_in_keys)
    inputs = case.inputs()
    assert inputs["v"].base is inputs["k"] and inputs["v"].shape[-1] == case.sizes.Dv < case.sizes.D
    moved = case.with_view({name: value.copy() for name, value in inputs.items()})
    assert moved["v"].base is moved["k"]


def test_a_failure_is_shown_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CHECKS", (BROKEN, registry.CHECKS[-1]))
    console = Console(file=io.StringIO(), width=200)
    assert not check.run(console, backend="interpreter")
    text = console.file.getvalue()
    assert "1 of 2 cases hold" in text and "worst: attention" in text and "HeadsDoNotDivide" in text and "FAILS" in text


def test_a_wrong_kernel_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = registry.OPS["merge"]
    wrong = lambda inputs, **run: {n: a * 1.01 for n, a in plain.run(inputs, **run).items()}  # noqa: E731
    monkeypatch.setitem(registry.OPS, "merge", replace(plain, run=wrong))
    results = list(check.results(check.cases("merge float32"), "interpreter"))
    assert results and not any(r.ok for r in results) and all(r.share > 1 for r in results)


@pytest.mark.parametrize("words, code, phrase", [
    (("--backend", "interpreter", "--filter", "MERGE_LSE"), 0, "2 of 2 cases hold on interpreter"),
    (("--filter", "no such case"), 1, "no case's name holds"),
    (("--backend", "abacus"), 1, "there is no backend 'abacus'"),
])  # fmt: skip
def test_command(words: tuple[str, ...], code: int, phrase: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(monotile.__file__).parents[1])}
    command = [sys.executable, "-m", "monotile", "check", *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == code and phrase in result.stdout + result.stderr and "Traceback" not in result.stderr
