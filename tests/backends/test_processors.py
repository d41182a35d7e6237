"""The default number of threads: cores that the process may use, its CPU quota, and what other pools were told."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from monotile.backends.cpu import macos, processors, windows
from monotile.backends.cpu.choices import CpuChoices
from monotile.runtime import machine as this_machine

ON_WINDOWS = sys.platform == "win32"
SOURCES = str(Path(processors.__file__).parents[3])


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Linux with eight processors, no control groups and no topology; nothing chosen by environment or torch."""
    monkeypatch.delenv("MONOTILE_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(processors, "_MOUNTS", str(tmp_path / "mountinfo"))
    monkeypatch.setattr(processors, "_GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(processors, "_TOPOLOGY", str(tmp_path / "cpu"))
    processors._chosen_threads.cache_clear()
    yield tmp_path
    processors._chosen_threads.cache_clear()


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    processors._chosen_threads.cache_clear()


def test_processors_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processors.default_threads() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    processors._chosen_threads.cache_clear()
    assert processors.default_threads() == 3


# ---- cores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_hyperthreads_of_a_core_are_one(machine: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    write(machine, {f"cpu/cpu{n}/topology/{file}": f"{n % 4},{n % 4 + 4}\n" for n in range(8)})
    assert processors.default_threads() == 8, "the system does not say that cores have two threads"
    write(machine, {"cpu/smt/active": "0\n"})
    assert processors.default_threads() == 8
    write(machine, {"cpu/smt/active": "1\n"})
    assert processors.default_threads() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 1})
    processors._chosen_threads.cache_clear()
    assert processors.default_threads() == 2


def test_an_unknown_topology_counts_every_processor(machine: Path) -> None:
    write(machine, {"cpu/smt/active": "1\n"})
    assert processors.default_threads() == 8


@pytest.mark.skipif(not ON_WINDOWS, reason="asks Windows")
def test_windows_describes_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert len(windows.processors()) == os.cpu_count()
    assert windows.process_affinity() <= windows.processors() == frozenset().union(*windows.cores())
    assert 128 << 10 <= (windows.l2_bytes() or 0) <= 64 << 20
    assert " Family " not in this_machine.processor.__wrapped__()


# ---- quotas ----------------------------------------------------------------------------------------------------------

V2 = "31 23 0:28 / {root}/unified rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 {mounted} {root}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = "25 1 8:1 / / rw,relatime - ext4 /dev/root rw\n33 31 0:30 / {root}/memory rw - cgroup cgroup rw,memory\n"


def mounts(machine: Path, *lines: str, mounted: str = "/") -> dict[str, str]:
    return {"mountinfo": "".join(line.format(root=machine, mounted=mounted) for line in lines)}


@pytest.mark.parametrize(
    ("limit", "threads"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("junk", 8),
        ("", 8),
        ("0 0", 8),
    ],
)
def test_quota_of_version_2(machine: Path, limit: str, threads: int) -> None:
    write(machine, {"cgroup": "junk\n\n0::/user/task\n", "unified/user/task/cpu.max": limit + "\n"})
    write(machine, mounts(machine, "junk\n", OTHERS, V2))
    assert processors.default_threads() == threads


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("300000", 3), ("10000", 1)])
def test_quota_of_version_1(machine: Path, quota: str, threads: int) -> None:
    folder = "cpu,cpuacct/user/task"
    write(machine, {"cgroup": "9:memory:/other\n4:cpu,cpuacct:/user/task\n0::/\n"})
    write(machine, {f"{folder}/cpu.cfs_quota_us": quota + "\n", f"{folder}/cpu.cfs_period_us": "100000\n"})
    write(machine, mounts(machine, OTHERS, V1))
    assert processors.default_threads() == threads


def test_quota_of_a_group_around(machine: Path) -> None:
    write(machine, {"cgroup": "0::/user/task\n", "unified/user/task/cpu.max": "700000 100000\n"})
    write(machine, {"unified/user/cpu.max": "500000 100000\n", **mounts(machine, V2)})
    assert processors.default_threads() == 5


def test_quota_inside_a_container(machine: Path) -> None:
    """The path is that outside, and what is mounted is the container's own group."""
    write(machine, {"cgroup": "4:cpu,cpuacct:/docker/12ab\n"})
    write(machine, {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"})
    for mounted in ("/docker/12ab", "/"):
        write(machine, mounts(machine, V1, mounted=mounted))
        assert processors.default_threads() == 2


def test_no_quota_elsewhere(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, {"cgroup": "0::/\n", "unified/cpu.max": "100000 100000\n", **mounts(machine, V2)})
    assert processors.default_threads() == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(macos, "number", lambda name: None)
    processors._chosen_threads.cache_clear()
    assert processors.default_threads() == 8


# ---- other pools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), (" 2 ", 2), ("4,2", 4), ("100", 8), ("0", 1), ("", 8), ("many", 8)]
)
def test_openmp(value: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert processors.default_threads() == threads


def test_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number of threads counts in every call, and never raises the default."""
    torch = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert processors.default_threads() == 8, "torch is being imported"
    for number, threads in ((1, 1), (5, 5), (64, 8)):
        torch.get_num_threads = lambda number=number: number
        assert processors.default_threads() == threads


def test_our_own_variable_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, {"cgroup": "0::/\n", "unified/cpu.max": "100000 100000\n", **mounts(machine, V2)})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(get_num_threads=lambda: 3))
    monkeypatch.setenv("MONOTILE_THREADS", "6")
    processors._chosen_threads.cache_clear()
    assert processors.default_threads() == 6


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_small_work_stays_on_one_thread() -> None:
    threads = CpuChoices().threads
    assert threads(1000, 1000) == 1
    assert threads(3_900_000, 500_000) == 1
    assert threads(8_000_000, 0) == 4
    assert threads(0, 1_100_000) == 4
    assert threads(10**9, 0) is None, "as many as there are when the call is made"


def test_a_call_follows_torch() -> None:
    """A prepared call has the number of threads that torch has when it is repeated."""
    script = """
import threading, types, sys
import numpy as np
import monotile
sys.modules["torch"] = torch = types.SimpleNamespace(Tensor=type("Tensor", (), {}))
q, k, v = (np.ones((1, 8, 600, 64), np.float32) for _ in "qkv")
from monotile.backends.cpu import macos, processors, windows
processors._chosen_threads = lambda: (4, False)
for number, workers in ((1, 0), (3, 2), (4, 3)):
    torch.get_num_threads = lambda: number
    monotile.attention(q, k, v)
    found = sum(t.name.startswith("monotile-") for t in threading.enumerate())
    assert found == workers, (number, found)
"""
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
