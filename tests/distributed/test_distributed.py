"""Attention across ranks, with Gloo on the CPU: one run of worker.py for each number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from monotile.distributed.layouts import Rows, RowSpan, part
from monotile.distributed.schedule import Sight, schedule

sys.path.insert(0, str(Path(__file__).parent))
import checks

WORKER = Path(__file__).parent / "worker.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"
LIMIT_S = 900


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_in_a_group(ranks: int, tmp_path: Path) -> None:
    """Every check of checks.py that is meant for this number of ranks."""
    path = tmp_path / "results.json"
    command = [sys.executable, str(WORKER), str(path), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert path.exists(), found.stderr[-4000:]
    results = json.loads(path.read_text())
    assert {name: result["problems"] for name, result in results.items() if result["problems"]} == {}
    assert results.keys() == {name for name in checks.CHECKS if ranks in checks.worlds(name)}


# What a rank of torch 2.13 says when it aborts at its exit, with everything done and printed: one run in five on a busy
# machine, with or without a barrier before the group is destroyed.
TEARDOWN = "terminate called without an active exception"


def test_the_example_runs() -> None:
    """It checks every method against one process and prints what was sent."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, str(EXAMPLE), "--length", "96", "--size", "16", "--repeats", "1"]
    for _ in range(4):
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if TEARDOWN not in found.stderr:
            break
    rows = [line.split() for line in found.stdout.splitlines()[2:]]
    assert found.returncode == 0 and len(rows) == 6, found.stdout + found.stderr[-3000:]
    assert all(row[2] == row[3] for row in rows), found.stdout


def test_every_position_has_one_rank() -> None:
    for layout in ("zigzag", "contiguous"):
        for length in (0, 1, 7, 24, 25):
            spans = sorted(s for rank in range(4) for s in part(length, 4, rank, layout).spans if s.length)
            assert [i for span in spans for i in range(*span)] == list(range(length))


def test_pieces_are_the_visible_scores() -> None:
    """Each visible score lies in exactly one piece, for steps and for gathered keys, by the rules of attention."""
    for sight in (Sight(23, True), Sight(23), Sight(23, True, documents=(0, 4, 17, 23))):
        for rank in range(3):
            plan = schedule(sight, 3, rank, "zigzag")
            steps = [plan.own, *(plan.received((rank - step) % 3) for step in (1, 2))]
            for at_hand in (steps, [plan.needed]):
                assert sorted(_scores(plan, at_hand)) == _visible(sight, plan.own)


def _scores(plan: Any, at_hand: list[Rows]) -> list[tuple[int, int]]:
    queries = [i for span in plan.own.spans for i in range(*span)]
    found = []
    for rows in at_hand:
        keys = [j for span in rows.spans for j in range(*span)]
        for piece in plan.pieces(rows):
            shift = piece.keys.length - piece.queries.length
            for a, i in enumerate(queries[piece.queries.rows]):
                for b, j in enumerate(keys[piece.keys.rows]):
                    if (not piece.causal or b <= a + shift) and _same_document(plan.sight, i, j):
                        found.append((i, j))
    return found


def _visible(sight: Sight, own: Rows) -> list[tuple[int, int]]:
    rows = [i for span in own.spans for i in range(*span)]
    every = [(i, j) for i in rows for j in range(sight.length) if j <= i or not sight.causal]
    return sorted((i, j) for i, j in every if _same_document(sight, i, j))


def _same_document(sight: Sight, i: int, j: int) -> bool:
    return sight.documents is None or not any(min(i, j) < start <= max(i, j) for start in sight.documents)


def test_rows_are_found_by_position() -> None:
    rows = Rows((RowSpan(4, 8), RowSpan(20, 23)))
    assert (
        rows.find(RowSpan(0, 30)) == (0, 7)
        and rows.find(RowSpan(6, 21)) == (2, 5)
        and rows.find(RowSpan(9, 12)) == (4, 4)
    )
