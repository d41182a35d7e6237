"""Run the programs of a kernel on native threads, each with private scratch memory.

A team is one calling thread and its workers. They communicate through a block of memory, whose layout the native code
(pool_native.py) and the `_Team` structure both declare. A worker's slot has three states:

    idle -> posted    by the caller, who offers it a share of a launch
    posted -> running by the worker, which then takes programs until none is left, and goes back to idle
    posted -> idle    by the caller, who finished before the worker woke up and does not wait for it

A worker to which nothing was offered for a while sleeps. The caller wakes the first few, and each of them the next. A
small launch wakes none, unless launches follow each other closely: those that are awake take part.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from functools import cache
from typing import Any, NamedTuple

from ...errors import BadThreadCount
from ...runtime import cache as disk
from . import loader, machine_code, memory
from .host import host
from .pool_native import LONGEST_FIRST, SMALL
from .processors import MAX_THREADS, FewThreads, available, default_threads

# Workers spin for about as long as it takes to wake one (60 us): then neither spinning in vain nor sleeping too soon
# costs more than twice the best. A worker beyond the number of processors only takes time from the others.
_SPIN_SHIFT, _SPIN_SHIFT_WITHOUT_PROCESSOR = 10, 18  # of the ticks of a sixteenth of a second
_HUGE_PAGE = 1 << 21

# Status of the native `launch` and `drive`; a negative one is minus the number of threads that must be made ready.
_DONE, _UNFINISHED, _BUSY = 0, 1, 2


def run(
    kernel: int,
    programs: int,
    args: int | bytes,
    scratch_bytes: int,
    threads: int | None = None,
    longest_first: bool = False,
) -> None:
    """Run every program of one launch and return when all are done.

    `kernel` and `programs` are addresses of `void (ptr args, i64 program, ptr scratch)` and `i64 (ptr args)`. Each
    thread has a range of the programs and helps the others when it is done; programs that come `longest_first` are
    taken one by one instead, in their order. FewThreads are no more than by default. Exceptions raised by signal
    handlers, such as KeyboardInterrupt, stop the launch between two programs.
    """
    flags = LONGEST_FIRST if longest_first else 0
    if threads is None:
        threads = default_threads()
    elif type(threads) is FewThreads:
        threads, flags = min(threads, default_threads()), flags | SMALL
    elif not 1 <= threads <= MAX_THREADS:
        raise BadThreadCount(f"threads is {threads}: expected a whole number from 1 to {MAX_THREADS}")
    teams = _teams
    if threads > 1 and teams.with_workers().launch(kernel, programs, args, scratch_bytes, threads, flags):
        return
    for team in teams.without_workers:
        if team.launch(kernel, programs, args, scratch_bytes, 1):
            return
    team = Team()
    team.launch(kernel, programs, args, scratch_bytes, 1)
    teams.without_workers.append(team)


# ---- teams -----------------------------------------------------------------------------------------------------------


class _Slot(ctypes.Structure):
    """One thread's cache line. `thread` is its id in the system, `next` to `end` are the programs it has taken,
    `sleeper` is what it sleeps with, and `range_next` to `range_end` are programs of its range still to be taken."""

    _fields_ = (
        ("state", ctypes.c_int32),
        ("asleep", ctypes.c_int32),
        ("scratch", ctypes.c_void_p),
        ("thread", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("sleeper", ctypes.c_void_p),
        ("range_next", ctypes.c_int64),
        ("range_end", ctypes.c_int64),
    )


class _Team(ctypes.Structure):
    """The memory that the threads of a team share."""

    _fields_ = (
        ("cancelled", ctypes.c_int64),
        ("ended", ctypes.c_int64),
        ("_padding", ctypes.c_int64 * 6),
        ("owner", ctypes.c_int64),
        ("programs", ctypes.c_int64),
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("ranges", ctypes.c_int64),
        ("slots", _Slot * MAX_THREADS),
    )


class Team:
    """A caller at a time, its workers, and scratch for each of them. Threads and memory are added when needed."""

    _tokens = itertools.count(1)

    def __init__(self) -> None:
        self._native = _native()
        self._address = memory.map_pages(ctypes.sizeof(_Team))
        self._shared = _Team.from_address(self._address)
        self._arenas: list[Arena] = []
        self._workers = 0

    def launch(
        self,
        kernel: int,
        programs: int,
        args: int | bytes,
        scratch_bytes: int,
        threads: int,
        flags: int = 0,
    ) -> bool:
        """Run a launch to its end. Return False, with nothing done, if another caller owns the team."""
        # The owner is a token in native memory, because an interrupt can arrive between any two steps here: whatever
        # happened before it, cancelling stops this launch if it is running and does nothing otherwise.
        native, team, token = self._native, self._address, next(self._tokens)
        try:
            status = native.launch(team, kernel, programs, args, scratch_bytes, threads, flags, token)
            while status != _DONE:
                if status == _BUSY:
                    return False
                if status == _UNFINISHED:
                    status = native.drive(team)
                else:
                    threads = min(threads, self._grow(-status, scratch_bytes))
                    status = native.launch(team, kernel, programs, args, scratch_bytes, threads, flags, token)
        except BaseException:
            native.cancel(team, token)
            raise
        return True

    def _grow(self, threads: int, scratch_bytes: int) -> int:
        """Make `threads` threads ready and return how many are. Only the owner calls it, while no worker is running."""
        shared = self._shared
        if scratch_bytes > shared.scratch_bytes:
            shared.ready = 0
            while self._arenas:
                self._arenas.pop().free()
            shared.scratch_bytes = scratch_bytes
        for slot in range(len(self._arenas), threads):
            arena = Arena(shared.scratch_bytes)
            shared.slots[slot].scratch = arena.address
            self._arenas.append(arena)
        while self._workers < threads - 1 and self._start_worker(self._workers + 1):
            self._workers += 1
        shared.ready = min(len(self._arenas), self._workers + 1)
        return int(shared.ready)

    def _start_worker(self, slot: int) -> bool:
        """Start the worker of a slot. Return False if the system gives this process no more threads."""
        # A daemon thread inside a native call does not hold the GIL, and the interpreter does not wait for it at exit.
        shift = _SPIN_SHIFT if slot < len(available()) else _SPIN_SHIFT_WITHOUT_PROCESSOR
        arguments = (self._address, slot, shift)
        worker = threading.Thread(target=self._native.work, args=arguments, name=f"monotile-{slot}", daemon=True)
        try:
            worker.start()
        except RuntimeError:
            return False
        self._shared.slots[slot].thread = worker.native_id or 0
        return True


class _Teams:
    """The teams of this process: one with workers, and one without workers for each further simultaneous caller."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may launch while this thread makes the team
        self._with_workers: Team | None = None
        self.without_workers: list[Team] = []

    def with_workers(self) -> Team:
        if self._with_workers is None:
            with self._lock:
                made = self._with_workers or Team()
                self._with_workers = self._with_workers or made  # that of a signal handler, if it launched meanwhile
        return self._with_workers


_teams = _Teams()


def _forget_teams() -> None:
    """Start afresh in a forked child, which has none of the workers, and locks and launches in any state."""
    global _teams
    _teams = _Teams()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_teams)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Arena:
    """Scratch for one thread: aligned to a page, or to a huge page if it fills one, and readable one page further."""

    def __init__(self, size: int) -> None:
        huge = size >= _HUGE_PAGE
        unit = _HUGE_PAGE if huge else memory.PAGE
        whole = -(-max(size, 1) // unit) * unit
        self._length = whole + memory.PAGE + (unit if huge else 0)
        self._mapping = memory.map_pages(self._length)
        self.address = -(-self._mapping // unit) * unit
        if huge:
            # Caches are indexed by physical address: scattered small pages cost a few percent and make times vary.
            memory.advise_huge_pages(self.address, whole)

    def free(self) -> None:
        memory.unmap_pages(self._mapping, self._length)


# ---- native code -----------------------------------------------------------------------------------------------------


class _Native(NamedTuple):
    code: Any  # keeps the functions in memory
    launch: Any
    drive: Any
    cancel: Any
    work: Any


def native_code() -> bytes:
    """Return the native code of the pool, from the disk cache if it is there."""
    key = disk.fingerprint(disk.compiler_fingerprint(), repr(host()), str(loader.takes_images()))
    data = disk.load(key, "pool")
    if data is None:
        from . import jit
        from .pool_native import native_text

        data = jit.compile_code(native_text(host().triple))
        disk.store_compiled(key, "pool", data)
    return data


@cache
def _native() -> _Native:
    code = machine_code.load(native_code())
    address, number = ctypes.c_void_p, ctypes.c_int64

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))

    return _Native(
        code,
        function("launch", number, *[address] * 8),  # integers too: ctypes converts an address twice as fast
        function("drive", number, address),
        function("cancel", None, address, number),
        function("work", None, address, number, number),
    )
