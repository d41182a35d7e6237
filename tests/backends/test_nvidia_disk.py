"""Kernels of the nvidia backend on disk: a later process runs neither the front end nor the passes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="modules are written for Triton")

from golden.cases import cases
from golden.renderings import schedules
from monotile import ir
from monotile.backends.nvidia.backend import BACKEND
from monotile.backends.nvidia.schedule import Schedule

SOURCES = str(Path(ir.__file__).parents[2])

CALLS = """
import sys
import numpy as np
import monotile
from monotile.frontend import build
from monotile.passes import pipeline

if sys.argv[1] == "later":
    def refused(*args, **words):
        raise AssertionError("a kernel was not found on disk")
    build.build = pipeline.passes = refused
rng = np.random.default_rng(0)
q, k, v, do = (rng.normal(size=(1, 2, 20, 16)).astype(np.float16) for _ in range(4))
limit = 7
options = {"causal": True}, {"mask_mod": lambda b, h, i, j: j - i < limit}, {"mask": rng.random((20, 20)) < 0.7}
for given in options:
    o, lse = monotile.attention(q, k, v, return_lse=True, backend="nvidia", **given)
    found = monotile.attention_backward(do, q, k, v, o, lse, backend="nvidia", **given)
    print(*[float(np.abs(x.astype(np.float64)).sum()) for x in (o, lse, *found[:3])])
one = monotile.attention(q[:, :, :1], k, v, backend="nvidia")
print(float(np.abs(one.astype(np.float64)).sum()))
"""


def test_a_later_process_loads_the_ir(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": SOURCES,
        "MONOTILE_CACHE_DIR": str(tmp_path / "kernels"),
        "TRITON_INTERPRET": "1",
    }
    program, printed = tmp_path / "calls.py", []
    program.write_text(CALLS)
    for process in ("first", "later"):
        call = [sys.executable, str(program), process]
        run = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    assert printed[0] == printed[1]
    assert len(printed[0].split()) == 16


def test_stored_ir_gives_the_same_module() -> None:
    for case in islice(cases("nvidia"), 0, None, 3):
        for schedule in (None, *schedules(case).values()):
            program = BACKEND.compile_as(case.kernel, schedule)
            stored = BACKEND.cached(BACKEND.key(case.kernel, schedule), case.kernel, schedule)
            assert stored is not None
            assert ir.show(stored.kernel) == ir.show(program.kernel)
            assert stored.path.render(stored.kernel).text == program.path.render(program.kernel).text, case.name


def test_a_schedule_is_part_of_the_key() -> None:
    case = next(cases("nvidia"))
    keys = [BACKEND.key(case.kernel, schedule) for schedule in (None, Schedule(4, 2), Schedule(4, 3), Schedule(8, 2))]
    assert len(set(keys)) == 4
