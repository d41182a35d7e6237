"""The native thread pool: every program exactly once, whatever the threads, callers, forks and interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

import monotile
from backends import alarm
from monotile.backends.cpu import jit, machine_code, pool, processors
from monotile.backends.cpu.host import host
from monotile.backends.cpu.pool_native import FAN_OUT, native_text
from monotile.errors import BadThreadCount, InternalError

SOURCES = str(Path(pool.__file__).parents[3])
can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# args: [0] programs, [1] loop iterations per program, [2] scratch bytes, [8 + p] what program p leaves.
# `count` adds one to its place; `mark` leaves its scratch address if what it wrote there is still there after a while.
KERNELS = """
define i64 @programs(ptr %args) nounwind {
  %n = load i64, ptr %args
  ret i64 %n
}
define internal void @linger(ptr %args) nounwind {
  %p = getelementptr i64, ptr %args, i64 1
  %spins = load i64, ptr %p
  br label %loop
loop:
  %i = phi i64 [ 0, %0 ], [ %i1, %loop ]
  %seen = load volatile i64, ptr %p
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %spins
  br i1 %more, label %loop, label %end
end:
  ret void
}
define void @count(ptr %args, i64 %program, ptr %scratch) nounwind {
  call void @linger(ptr %args)
  %places = getelementptr i64, ptr %args, i64 8
  %place = getelementptr i64, ptr %places, i64 %program
  %old = atomicrmw add ptr %place, i64 1 monotonic
  ret void
}
define void @mark(ptr %args, i64 %program, ptr %scratch) nounwind {
  %p.bytes = getelementptr i64, ptr %args, i64 2
  %bytes = load i64, ptr %p.bytes
  %end = getelementptr i8, ptr %scratch, i64 %bytes
  %last = getelementptr i64, ptr %end, i64 -1
  store volatile i64 %program, ptr %scratch
  store volatile i64 %program, ptr %last
  call void @linger(ptr %args)
  %first.now = load volatile i64, ptr %scratch
  %last.now = load volatile i64, ptr %last
  %beyond = getelementptr i8, ptr %end, i64 4088
  %readable = load volatile i64, ptr %beyond
  %a = icmp eq i64 %first.now, %program
  %b = icmp eq i64 %last.now, %program
  %kept = and i1 %a, %b
  %address = ptrtoint ptr %scratch to i64
  %result = select i1 %kept, i64 %address, i64 -1
  %places = getelementptr i64, ptr %args, i64 8
  %place = getelementptr i64, ptr %places, i64 %program
  store i64 %result, ptr %place
  ret void
}
"""
UNLOADED_NEVER: list[object] = []  # code that workers of a test still run when it is over
MILLISECOND = 1_000_000  # loop iterations: between half a millisecond and a few


@cache
def code() -> Any:
    return machine_code.load(jit.compile_code(KERNELS))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Threads that all found `code` missing would each load it, and all but one copy would be unloaded under them."""
    code()


def arguments(programs: int, spins: int = 0, scratch_bytes: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    args = np.zeros(8 + max(programs, 0), np.int64)
    args[:3] = programs, spins, scratch_bytes
    return args


def launch(
    name: str, args: np.ndarray[Any, np.dtype[np.int64]], threads: int | None, longest_first: bool = False
) -> list[int]:
    pool.run(code().address(name), code().address("programs"), args.ctypes.data, int(args[2]), threads, longest_first)
    return [int(value) for value in args[8:]]


def worker_threads() -> int:
    return sum(thread.name.startswith("monotile-") for thread in threading.enumerate())


@pytest.fixture
def fresh_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_teams", pool._Teams())


@pytest.fixture
def fresh_default() -> Iterator[None]:
    processors._chosen_threads.cache_clear()
    yield
    processors._chosen_threads.cache_clear()


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 4, None])
@pytest.mark.parametrize("programs", [0, 1, 2, 1000])
def test_every_program_runs_once(programs: int, threads: int | None, longest_first: bool) -> None:
    for spins in (0, 200):
        for _ in range(20):
            assert launch("count", arguments(programs, spins), threads, longest_first) == [1] * programs


@pytest.mark.usefixtures("fresh_teams")
@pytest.mark.parametrize("threads", [16, 64])
def test_many_more_threads_than_processors(threads: int) -> None:
    """Workers are met asleep, awake and on their way; some wake after the launch is over."""
    for programs in (threads, threads + 1, 3 * threads - 1, 2000):
        for longest_first in (False, True):
            for pause_us in (0, 100, 2000):
                time.sleep(pause_us * 1e-6)
                assert launch("count", arguments(programs, 2000), threads, longest_first) == [1] * programs
    assert -1 not in launch("mark", arguments(500, 2000, 4096), threads)


@pytest.mark.usefixtures("fresh_teams")
def test_a_worker_wakes_those_behind_it() -> None:
    """The caller wakes FAN_OUT workers; all the others must be woken by these."""
    threads = 1 + FAN_OUT + FAN_OUT**2
    launch("count", arguments(threads, 0), threads)
    slots = pool._teams.with_workers()._shared.slots
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        while not all(slots[n].asleep for n in range(1, threads)) and time.monotonic() < deadline:
            time.sleep(0.002)
        scratch = launch("mark", arguments(40 * threads, MILLISECOND // 2, 64), threads)
        if len(set(scratch)) == threads:
            return
    raise AssertionError(f"of {threads} threads {len(set(scratch))} took part")


def test_launches_after_pauses_of_every_length() -> None:
    """Workers are met spinning, on their way to sleep, and asleep."""
    for pause_us in (0, 20, 50, 100, 200, 300, 500, 1000, 3000) * 15:
        time.sleep(pause_us * 1e-6)
        assert launch("count", arguments(7, 50), 3) == [1] * 7


def wait_until_asleep() -> None:
    """Wait until the first worker sleeps, with its own affinity mask; a busy machine takes a while to get there."""
    slot = pool._teams.with_workers()._shared.slots[1]
    deadline = time.monotonic() + 10
    while not slot.asleep and time.monotonic() < deadline:
        time.sleep(0.005)
    assert slot.asleep


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not say where threads may run")
@pytest.mark.usefixtures("fresh_teams")
def test_waking_a_worker_leaves_it_every_processor() -> None:
    """It is woken on another processor than the caller's, if there is one, and may then run where it could before."""
    mine = os.sched_getaffinity(0)
    for allowed in (mine, {min(mine)}):
        os.sched_setaffinity(0, allowed)
        try:
            before = set(threading.enumerate())
            pool._teams = pool._Teams()
            assert launch("count", arguments(40, 2000), 2) == [1] * 40
            (worker,) = set(threading.enumerate()) - before
            for _ in range(5):
                wait_until_asleep()
                assert launch("count", arguments(40, MILLISECOND // 20), 2) == [1] * 40
            wait_until_asleep()
            assert worker.native_id is not None and os.sched_getaffinity(worker.native_id) == allowed
            assert os.sched_getaffinity(0) == allowed
        finally:
            os.sched_setaffinity(0, mine)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not say where threads may run")
@pytest.mark.usefixtures("fresh_teams")
def test_a_worker_stays_where_it_was_put_while_it_slept() -> None:
    before = set(threading.enumerate())
    pool._teams = pool._Teams()
    assert launch("count", arguments(40, 2000), 2) == [1] * 40
    (worker,) = set(threading.enumerate()) - before
    assert worker.native_id is not None
    for allowed in ({max(os.sched_getaffinity(0))}, {min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)):
        wait_until_asleep()
        os.sched_setaffinity(worker.native_id, allowed)
        assert launch("count", arguments(40, MILLISECOND // 20), 2) == [1] * 40
        wait_until_asleep()
        assert os.sched_getaffinity(worker.native_id) == allowed


# Semaphores of Grand Central Dispatch, by those of POSIX.
SEMAPHORES = """
define ptr @dispatch_semaphore_create(i64 %value) nounwind {
  %semaphore = call ptr @calloc(i64 1, i64 64)
  %r = call i32 @sem_init(ptr %semaphore, i32 0, i32 0)
  ret ptr %semaphore
}
define i64 @dispatch_semaphore_signal(ptr %semaphore) nounwind { %r = call i32 @sem_post(ptr %semaphore) ret i64 0 }
define i64 @dispatch_semaphore_wait(ptr %semaphore, i64 %until) nounwind {
  %r = call i32 @sem_wait(ptr %semaphore)
  ret i64 0
}
declare ptr @calloc(i64, i64)
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_post(ptr)
declare i32 @sem_wait(ptr)
"""


def other_sleep(system: str) -> str:
    """The pool for this processor, and for a system that has no futex."""
    text = native_text(f"{host().triple.partition('-')[0]}-{system}")
    kept = [line for line in text.splitlines() if not (line.startswith("declare") and "dispatch" in line)]
    return "\n".join(kept) + (SEMAPHORES if "apple" in system else "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stand-in for semaphores is that of Linux")
@pytest.mark.parametrize("system", ["apple-darwin", "other"])
def test_workers_of_other_systems_take_part(system: str, fresh_teams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleep of systems without a futex, which this one can run as well."""
    data = jit.compile_code(other_sleep(system))
    monkeypatch.setattr(pool, "native_code", lambda: data)
    native = pool._native.__wrapped__()
    UNLOADED_NEVER.append(native)
    monkeypatch.setattr(pool, "_native", lambda: native)
    for pause_us in (0, 1000, 3000) * 5:
        time.sleep(pause_us * 1e-6)
        assert launch("count", arguments(40, 2000), 3) == [1] * 40
    slots = pool._teams.with_workers()._shared.slots
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        while not (slots[1].asleep and slots[2].asleep) and time.monotonic() < deadline:
            time.sleep(0.002)
        if len(set(launch("mark", arguments(100, MILLISECOND // 2, 64), 3))) == 3:
            return
    raise AssertionError("a sleeping worker did not wake up")


@pytest.mark.usefixtures("fresh_teams")
def test_one_thread_or_one_program_starts_no_worker() -> None:
    before = worker_threads()
    launch("count", arguments(1000), 1)
    launch("count", arguments(1), 4)
    launch("count", arguments(0), 4)
    assert worker_threads() == before
    launch("count", arguments(2), 4)
    assert worker_threads() == before + 1
    launch("count", arguments(100), 3)
    assert worker_threads() == before + 2


@pytest.mark.usefixtures("fresh_teams")
def test_no_more_threads_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    launch("count", arguments(10), 2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert launch("count", arguments(100), 4) == [1] * 100


def test_more_than_one_thread_works() -> None:
    """Long programs are shared: with two workers awake or asleep, one caller never has to do them all."""
    args = arguments(400, MILLISECOND, 64)
    assert len(set(launch("mark", args, 2))) == 2


def test_threads_take_runs_of_programs() -> None:
    """Programs next to each other are mostly run by one thread: what they read lies next to each other, too."""
    owners = launch("mark", arguments(400, MILLISECOND // 50, 64), 2)
    assert sum(a != b for a, b in pairwise(owners)) < 50


def test_a_thread_has_the_same_range_in_every_launch() -> None:
    """So it finds what it read before in its caches, and memory that it touched first on its node."""
    for _ in range(50):
        owners = [launch("mark", arguments(64, MILLISECOND // 20, 64), 2) for _ in range(4)]
        shared = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairwise(owners)]
        if min(shared) >= 48:
            return
    raise AssertionError(f"of 64 programs only {min(shared)} had the same thread twice")


@pytest.mark.skipif(processors.default_threads() < 2, reason="needs two processors")
@pytest.mark.usefixtures("fresh_teams")
def test_a_small_launch_wakes_workers_only_where_others_follow_closely() -> None:
    """Far from others it is computed by those who are awake: here by the caller alone. Launches without a pause wake
    the worker, which then takes part."""
    few = processors.FewThreads(2)
    assert launch("count", arguments(40, 2000), few) == [1] * 40
    for _ in range(5):
        time.sleep(0.002)
        wait_until_asleep()
        owners = launch("mark", arguments(40, MILLISECOND // 20, 64), few)
        assert len(set(owners)) == 1
        assert pool._teams.with_workers()._shared.slots[1].asleep
    patience = time.monotonic() + 20
    while time.monotonic() < patience:
        if len(set(launch("mark", arguments(40, MILLISECOND // 20, 64), few))) == 2:
            return
    raise AssertionError("the worker slept on")


def test_a_small_launch_has_no_more_threads_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pool, "default_threads", lambda: 2)
    monkeypatch.setattr(pool.Team, "launch", lambda self, *given: asked.append(given[4]) or True)
    launch("count", arguments(40), processors.FewThreads(4))
    launch("count", arguments(40), processors.FewThreads(1))
    assert asked == [2, 1]


@pytest.mark.skipif(processors.default_threads() < 2, reason="needs two processors")
def test_longest_first_is_taken_one_by_one() -> None:
    """Two threads at work alternate, so that neither is left with a run of long programs."""
    patience = time.monotonic() + 20  # other work may have one of two processors for a while
    while time.monotonic() < patience:
        owners = launch("mark", arguments(400, MILLISECOND // 50, 64), 2, longest_first=True)
        if sum(a != b for a, b in pairwise(owners)) > 50:
            return
    raise AssertionError("one thread took runs of programs")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_scratch_is_private_aligned_and_grows(threads: int, fresh_teams: None) -> None:
    for scratch_bytes in (64, 4096, 100_000, 3 << 20, 64, 5 << 20):
        found = launch("mark", arguments(64, 2000, scratch_bytes), threads)
        assert -1 not in found, "another program wrote to this scratch"
        assert len(set(found)) <= threads
        alignment = 1 << 21 if scratch_bytes >= 1 << 21 else 64
        assert all(address % alignment == 0 for address in found)


def test_simultaneous_callers() -> None:
    failures: list[object] = []

    def call(seed: int) -> None:
        for i in range(60):
            counted = launch("count", arguments(30, 100), 1 + (seed + i) % 3)
            marked = launch("mark", arguments(30, 100, 64 << (i % 8)), 2)
            if counted != [1] * 30 or -1 in marked:
                failures.append((counted, marked))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert not failures


def test_simultaneous_first_calls() -> None:
    """The pool itself is compiled, loaded and started by whoever comes first."""
    ending = """
barrier = threading.Barrier(6)
def call():
    barrier.wait()
    for _ in range(50): pool.run(kernel, few, 0, 4096, 3)
callers = [threading.Thread(target=call) for _ in range(6)]
for caller in callers: caller.start()
for caller in callers: caller.join()
"""
    exits_cleanly(LOADING + ending)


def interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_interrupt_stops_a_long_launch(threads: int) -> None:
    args = arguments(100_000, MILLISECOND)
    previous = signal.signal(alarm.SIGNAL, interrupt)
    try:
        alarm.set_alarm(0.15)
        with pytest.raises(KeyboardInterrupt):
            launch("count", args, threads)
    finally:
        alarm.set_alarm(0)
        signal.signal(alarm.SIGNAL, previous)
    done = int(args[8:].sum())
    assert 0 < done < 100_000
    time.sleep(0.05)
    assert int(args[8:].sum()) == done, "a worker went on after the launch was stopped"
    assert launch("count", arguments(100), threads) == [1] * 100


@pytest.mark.parametrize("threads", [1, 2])
def test_interrupts_at_every_moment(threads: int) -> None:
    """Whatever an interrupt hits, ownership of the team is given back and nothing runs on."""
    previous = signal.signal(alarm.SIGNAL, interrupt)
    try:
        for delay_us in range(1, 400, 7):
            args = arguments(200, 300)
            try:
                alarm.set_alarm(delay_us * 1e-6)
                launch("count", args, threads)
                alarm.set_alarm(0)
            except KeyboardInterrupt:
                pass
            assert set(args[8:].tolist()) <= {0, 1}
    finally:
        alarm.set_alarm(0)
        signal.signal(alarm.SIGNAL, previous)
    owners = [team._shared.owner for team in (pool._teams.with_workers(), *pool._teams.without_workers)]
    assert not any(owners)


def test_launch_within_an_interrupted_launch() -> None:
    """A signal handler may itself launch, on the thread whose launch it interrupts."""
    inner: list[list[int]] = []
    previous = signal.signal(alarm.SIGNAL, lambda *_: inner.append(launch("count", arguments(10), 2)))
    try:
        alarm.set_alarm(0.02)
        assert launch("count", arguments(400, MILLISECOND), 2) == [1] * 400
    finally:
        alarm.set_alarm(0)
        signal.signal(alarm.SIGNAL, previous)
    assert inner == [[1] * 10]


def child_works() -> bool:
    """Fork; whether the child, left with none of the workers, can launch."""
    child = os.fork()
    if child == 0:
        try:
            right = all(launch("count", arguments(50, 100), threads) == [1] * 50 for threads in (2, 1, 3))
            fresh = machine_code.load(jit.compile_code(KERNELS)).address("count") != 0
            os._exit(0 if right and fresh else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@can_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn about any fork beside threads
def test_fork() -> None:
    launch("count", arguments(10), 3)
    assert child_works()
    assert launch("count", arguments(100), 3) == [1] * 100


@can_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_another_thread_launches() -> None:
    args = arguments(300, MILLISECOND)
    other = threading.Thread(target=launch, args=("count", args, 2))
    other.start()
    assert child_works()
    other.join(timeout=60)
    assert args[8:].tolist() == [1] * 300


LOADING = """
import threading, time
from monotile.backends.cpu import jit, loader, pool, machine_code
code = machine_code.load(jit.compile_code('''
define i64 @programs(ptr %args) nounwind { ret i64 1000000000 }
define i64 @few(ptr %args) nounwind { ret i64 20 }
define void @kernel(ptr %args, i64 %program, ptr %scratch) nounwind { store i64 %program, ptr %scratch ret void }
'''))
kernel, few, many = code.address("kernel"), code.address("few"), code.address("programs")
"""


def exits_cleanly(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    result = subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="spinning"),
        pytest.param("time.sleep(0.1)", id="sleeping"),
        pytest.param(
            "threading.Thread(target=pool.run, args=(kernel, many, 0, 64, 2), daemon=True).start(); time.sleep(0.1)",
            id="launching",
        ),
    ],
)
def test_interpreter_exit(ending: str) -> None:
    exits_cleanly(LOADING + "pool.run(kernel, few, 0, 3 << 20, 3)\n" + ending)


@pytest.mark.parametrize("threads", [0, -1, pool.MAX_THREADS + 1])
def test_bad_thread_argument(threads: int) -> None:
    with pytest.raises(BadThreadCount, match="expected a whole number from 1"):
        launch("count", arguments(2), threads)


@can_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attention_in_a_forked_child() -> None:
    """As in a worker process of a data loader: prepared calls are inherited, threads are not."""
    q, k, v = (np.ones((1, 8, 300, 64), np.float32) for _ in "qkv")
    before = monotile.attention(q, k, v, causal=True, threads=3)
    child = os.fork()
    if child == 0:
        try:
            same = np.array_equal(monotile.attention(q, k, v, causal=True, threads=3), before)
            new = monotile.attention(q[..., :32], k[..., :32], v, threads=2)
            os._exit(0 if same and np.array_equal(new, np.ones_like(new)) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(monotile.attention(q, k, v, causal=True, threads=3), before)


@pytest.mark.usefixtures("fresh_default")
@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5", "²", "99999999999999999999"])
def test_bad_thread_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTILE_THREADS", value)
    with pytest.raises(BadThreadCount, match="MONOTILE_THREADS"):
        launch("count", arguments(2), None)


@pytest.mark.usefixtures("fresh_default")
def test_thread_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOTILE_THREADS", " 3 ")
    assert pool.default_threads() == 3
    processors._chosen_threads.cache_clear()
    monkeypatch.setenv("MONOTILE_THREADS", "")
    assert 1 <= pool.default_threads() <= (os.cpu_count() or 1)


SLEEPS = {
    "aarch64-unknown-linux-gnu": "syscall",
    "arm64-apple-darwin": "dispatch_semaphore_wait",
    "x86_64-apple-darwin": "dispatch_semaphore_wait",
    "x86_64-pc-windows-msvc": "WaitOnAddress",
    "x86_64-unknown-freebsd": "usleep",
}


@pytest.mark.parametrize("triple", SLEEPS)
def test_pool_compiles_for_other_machines(triple: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc="pic", codemodel="small")
    assembly = machine.emit_assembly(llvm.parse_assembly(native_text(triple)))
    assert SLEEPS[triple] in assembly


def test_wrong_code_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="LLVM rejects"):
        jit.compile_object("define void @f() { ret i64 0 }")
    with pytest.raises(InternalError, match="cannot load"):
        jit.load_object(b"not an object").address("f")
    with pytest.raises(InternalError, match="nothing_here"):
        code().address("nothing_here")


def test_stages_can_be_read() -> None:
    assert "alloca" not in jit.optimise("define i64 @f(i64 %x) { %a = alloca i64 store i64 %x, ptr %a ret i64 %x }")
    assert "programs" in jit.assembly(KERNELS)
