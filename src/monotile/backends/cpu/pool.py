"""Runs the programs of a kernel on native threads, each with scratch memory of its own.

A team is one calling thread and its workers. Everything between them happens in a block of memory that the native
code below and the `_Team` structure describe in the same order. A worker's slot moves through four states:

    idle -> posted    by the caller, who offers it a share of a launch
    posted -> running by the worker, which then takes programs until none is left, and goes back to idle
    posted -> idle    by the caller, who finished before the worker woke up and does not wait for it
    idle -> sleeping  by the worker, when nothing was offered for a while
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from functools import cache
from typing import Any, NamedTuple

from ... import cache as disk
from ...errors import BadThreadCount
from . import jit

MAX_THREADS = 1024
_SPINS = 20_000  # a fraction of a millisecond: back-to-back launches find the workers awake
_SPINS_WITHOUT_CORE = 200  # a worker beyond the number of cores only takes time from the others
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 1 << 21

# What the native `launch` and `drive` answer; a negative answer is the number of threads that are not ready yet.
_DONE, _UNFINISHED, _BUSY = 0, 1, 2


def run(kernel: int, programs: int, args: int, scratch_bytes: int, threads: int | None = None) -> None:
    """Run every program of one launch and return when all are done.

    `kernel` and `programs` are addresses of `void (ptr args, i64 program, ptr scratch)` and `i64 (ptr args)`.
    Exceptions raised by signal handlers, such as KeyboardInterrupt, stop the launch between two programs.
    """
    if threads is None:
        threads = default_threads()
    elif not 1 <= threads <= MAX_THREADS:
        raise BadThreadCount(f"threads is {threads}: expected a whole number from 1 to {MAX_THREADS}")
    teams = _teams
    if threads > 1 and teams.crew().launch(kernel, programs, args, scratch_bytes, threads):
        return
    for team in teams.soloists:
        if team.launch(kernel, programs, args, scratch_bytes, 1):
            return
    team = Team()
    team.launch(kernel, programs, args, scratch_bytes, 1)
    teams.soloists.append(team)


@cache
def default_threads() -> int:
    """MONOTILE_THREADS, or else the number of processors this process may use; read once."""
    chosen = os.environ.get("MONOTILE_THREADS", "").strip()
    if not chosen:
        return min(_processors(), MAX_THREADS)
    if not (chosen.isascii() and chosen.isdigit()) or not 1 <= int(chosen) <= MAX_THREADS:
        raise BadThreadCount(
            f"MONOTILE_THREADS is {chosen!r}: expected a whole number from 1 to {MAX_THREADS}; "
            "unset it to use every processor"
        )
    return int(chosen)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- teams -----------------------------------------------------------------------------------------------------------


class _Slot(ctypes.Structure):
    """One thread's cache line."""

    _fields_ = (("state", ctypes.c_int32), ("scratch", ctypes.c_void_p), ("_padding", ctypes.c_int64 * 6))


class _Team(ctypes.Structure):
    """What the threads of a team share. The program counter, which all of them write, has a cache line to itself."""

    _fields_ = (
        ("next", ctypes.c_int64),
        ("_padding", ctypes.c_int64 * 7),
        ("owner", ctypes.c_int64),
        ("programs", ctypes.c_int64),
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("ready", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("_reserved", ctypes.c_int64),
        ("slots", _Slot * MAX_THREADS),
    )


class Team:
    """One caller at a time, its workers, and scratch for each of them. Threads and memory are added when needed."""

    _tokens = itertools.count(1)

    def __init__(self) -> None:
        self._native = _native()
        self._address = _map_memory(ctypes.sizeof(_Team))
        self._shared = _Team.from_address(self._address)
        self._arenas: list[Arena] = []
        self._workers = 0

    def launch(self, kernel: int, programs: int, args: int, scratch_bytes: int, threads: int) -> bool:
        """Run a launch to its end; False, with nothing done, when another caller has the team."""
        # Ownership lives in native memory under a token, because an interrupt can arrive between any two steps here:
        # whatever happened before it, cancelling stops this launch if it is running and does nothing otherwise.
        native, team, token = self._native, self._address, next(self._tokens)
        try:
            status = native.launch(team, kernel, programs, args, scratch_bytes, threads, token)
            while status != _DONE:
                if status == _BUSY:
                    return False
                if status == _UNFINISHED:
                    status = native.drive(team)
                else:
                    threads = min(threads, self._grow(-status, scratch_bytes))
                    status = native.launch(team, kernel, programs, args, scratch_bytes, threads, token)
        except BaseException:
            native.cancel(team, token)
            raise
        return True

    def _grow(self, threads: int, scratch_bytes: int) -> int:
        """Make `threads` threads ready and say how many are. Only the owner comes here, while no worker is running."""
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
        """Start the worker of a slot; False when the system gives this process no more threads."""
        # A daemon inside a native call holds no lock of the interpreter and is not waited for when it exits.
        spins = _SPINS if slot < _processors() else _SPINS_WITHOUT_CORE
        arguments = (self._address, slot, spins)
        worker = threading.Thread(target=self._native.work, args=arguments, name=f"monotile-{slot}", daemon=True)
        try:
            worker.start()
        except RuntimeError:
            return False
        return True


class _Teams:
    """The teams of this process: one with workers, and one without for each further simultaneous caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._crew: Team | None = None
        self.soloists: list[Team] = []

    def crew(self) -> Team:
        if self._crew is None:
            with self._lock:
                self._crew = self._crew or Team()
        return self._crew


_teams = _Teams()


def _forget_teams() -> None:
    """A forked child has none of the workers, and locks and launches in whatever state they were."""
    global _teams
    _teams = _Teams()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_teams)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Arena:
    """Scratch for one thread: aligned to a page, or to huge pages when it fills one, and readable one page further."""

    def __init__(self, size: int) -> None:
        huge = size >= _HUGE_PAGE
        unit = _HUGE_PAGE if huge else _PAGE
        whole = -(-max(size, 1) // unit) * unit
        self._length = whole + _PAGE + (unit if huge else 0)
        self._mapping = _map_memory(self._length)
        self.address = -(-self._mapping // unit) * unit
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            # Caches are indexed by physical address: scattered small pages cost a few percent and make times vary.
            # It is advice; a kernel built without huge pages refuses it and nothing is lost.
            _libc().madvise(self.address, whole, mmap.MADV_HUGEPAGE)

    def free(self) -> None:
        _libc().munmap(self._mapping, self._length)


def _map_memory(size: int) -> int:
    """Zeroed pages that no finaliser of the interpreter takes away from threads that outlive it."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc().mmap(None, size, protection, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"the system has no {size} bytes for scratch memory")
    return int(address)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc


# ---- native code -----------------------------------------------------------------------------------------------------


class _Native(NamedTuple):
    code: jit.Loaded  # keeps the functions in memory
    launch: Any
    drive: Any
    cancel: Any
    work: Any


@cache
def _native() -> _Native:
    machine = jit.host()
    text = native_text(machine.triple)
    key = disk.fingerprint(
        disk.compiler_fingerprint(), text, machine.triple, machine.cpu, machine.features, machine.llvm
    )
    data = disk.load(key, "pool")
    if data is None:
        data = jit.compile_object(text)
        disk.store(key, "pool", data)
    code = jit.load_object(data)
    address, number = ctypes.c_void_p, ctypes.c_int64

    def function(name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)(code.address(name))

    return _Native(
        code,
        function("launch", number, address, address, address, address, number, number, number),
        function("drive", number, address),
        function("cancel", None, address, number),
        function("work", None, address, number, number),
    )


def native_text(triple: str) -> str:
    """The pool in LLVM IR for one kind of machine."""
    arm = triple.startswith(("aarch64", "arm64"))
    if "linux" in triple:
        sleep = _FUTEX.replace("FUTEX", "98" if arm else "202")
    else:
        sleep = _ULOCK if "apple" in triple else _POLL
    return (_ARM if arm else _X86) + sleep + _POOL


# A launch comes back to Python after about a sixteenth of a second to let signal handlers run: `slice` in ticks.
_X86 = """
define internal void @relax() nounwind { call void @llvm.x86.sse2.pause() ret void }
define internal i64 @ticks() nounwind { %t = call i64 @llvm.readcyclecounter() ret i64 %t }
define internal i64 @slice() nounwind { ret i64 200000000 }
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.readcyclecounter()
"""
# `yield` is a no-op on most Arm cores; a barrier takes about as long as the pause of x86.
_ARM = """
define internal void @relax() nounwind { call void @llvm.aarch64.isb(i32 15) ret void }
define internal i64 @ticks() nounwind { %t = call i64 @llvm.readsteadycounter() ret i64 %t }
define internal i64 @slice() nounwind {
  %frequency = call i64 @llvm.read_register.i64(metadata !0)
  %ticks = lshr i64 %frequency, 4
  ret i64 %ticks
}
!0 = !{!"cntfrq_el0"}
declare i64 @llvm.read_register.i64(metadata)
declare void @llvm.aarch64.isb(i32)
declare i64 @llvm.readsteadycounter()
"""

# @wait sleeps if the slot still says 3 (sleeping) and may return early; @wake ends the sleep of its one worker.
_FUTEX = """
define internal void @wait(ptr %slot) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %slot, i64 128, i64 3, ptr null)
  ret void
}
define internal void @wake(ptr %slot) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %slot, i64 129, i64 1)
  ret void
}
declare i64 @syscall(i64, ...)
"""
_ULOCK = """
define internal void @wait(ptr %slot) nounwind {
  %r = call i32 @__ulock_wait(i32 1, ptr %slot, i64 3, i32 0)
  ret void
}
define internal void @wake(ptr %slot) nounwind {
  %r = call i32 @__ulock_wake(i32 1, ptr %slot, i64 0)
  ret void
}
declare i32 @__ulock_wait(i32, ptr, i64, i32)
declare i32 @__ulock_wake(i32, ptr, i64)
"""
_POLL = """
define internal void @wait(ptr %slot) nounwind { %r = call i32 @usleep(i32 500) ret void }
define internal void @wake(ptr %slot) nounwind { ret void }
declare i32 @usleep(i32)
"""

# Slot states: 0 idle, 1 posted, 2 running, 3 sleeping. Plain fields are written by the owner before it posts a slot and
# read by a worker after it saw its slot posted; results travel back with the release store that makes the slot idle.
_POOL = """
%slot = type { i32, ptr, [6 x i64] }
%team = type { i64, [7 x i64], i64, i64, ptr, ptr, i64, i64, i64, i64, [1024 x %slot] }
declare i32 @sched_yield()

define i64 @launch(ptr %team, ptr %kernel, ptr %programs, ptr %args, i64 %bytes, i64 %threads, i64 %token) nounwind {
  %owner = getelementptr %team, ptr %team, i32 0, i32 2
  %claim = cmpxchg ptr %owner, i64 0, i64 %token acquire monotonic
  %before = extractvalue { i64, i1 } %claim, 0
  %free = extractvalue { i64, i1 } %claim, 1
  %mine = icmp eq i64 %before, %token
  %owned = or i1 %free, %mine
  br i1 %owned, label %size, label %busy
size:
  %n = call i64 %programs(ptr %args)
  %fewer = icmp slt i64 %n, %threads
  %wanted = select i1 %fewer, i64 %n, i64 %threads
  %p.ready = getelementptr %team, ptr %team, i32 0, i32 7
  %ready = load i64, ptr %p.ready
  %p.bytes = getelementptr %team, ptr %team, i32 0, i32 8
  %have = load i64, ptr %p.bytes
  %many = icmp sgt i64 %wanted, %ready
  %large = icmp sgt i64 %bytes, %have
  %grow = or i1 %many, %large
  br i1 %grow, label %small, label %post
post:
  store atomic i64 0, ptr %team monotonic, align 8
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  store i64 %n, ptr %p.n
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  store ptr %kernel, ptr %p.kernel
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  store ptr %args, ptr %p.args
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
  store i64 %wanted, ptr %p.size
  br label %next
next:
  %i = phi i64 [ 1, %post ], [ %i1, %offered ]
  %another = icmp slt i64 %i, %wanted
  br i1 %another, label %offer, label %go
offer:
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %i
  %was = atomicrmw xchg ptr %slot, i32 1 seq_cst
  %asleep = icmp eq i32 %was, 3
  br i1 %asleep, label %rouse, label %offered
rouse:
  call void @wake(ptr %slot)
  br label %offered
offered:
  %i1 = add i64 %i, 1
  br label %next
go:
  %status = call i64 @drive(ptr %team)
  ret i64 %status
small:
  %one = icmp slt i64 %wanted, 1
  %atleast = select i1 %one, i64 1, i64 %wanted
  %missing = sub i64 0, %atleast
  ret i64 %missing
busy:
  ret i64 2
}

define i64 @drive(ptr %team) nounwind {
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  %n = load i64, ptr %p.n
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  %kernel = load ptr, ptr %p.kernel
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  %args = load ptr, ptr %p.args
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
  %size = load i64, ptr %p.size
  %p.scratch = getelementptr %team, ptr %team, i32 0, i32 10, i64 0, i32 1
  %scratch = load ptr, ptr %p.scratch
  %slice = call i64 @slice()
  %start = call i64 @ticks()
  br label %take
take:
  %program = atomicrmw add ptr %team, i64 1 monotonic
  %left = icmp slt i64 %program, %n
  br i1 %left, label %compute, label %next
compute:
  call void %kernel(ptr %args, i64 %program, ptr %scratch)
  %now = call i64 @ticks()
  %spent = sub i64 %now, %start
  %late = icmp ugt i64 %spent, %slice
  br i1 %late, label %unfinished, label %take
next:
  %i = phi i64 [ 1, %take ], [ %i1, %withdrawn ]
  %another = icmp slt i64 %i, %size
  br i1 %another, label %withdraw, label %release
withdraw:
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %i
  %offer = cmpxchg ptr %slot, i32 1, i32 0 acquire acquire
  br label %look
look:
  %spins = phi i64 [ 0, %withdraw ], [ %spins1, %again ]
  %state = load atomic i32, ptr %slot acquire, align 4
  %running = icmp eq i32 %state, 2
  br i1 %running, label %hold, label %withdrawn
hold:
  %spins1 = add i64 %spins, 1
  %patient = icmp ult i64 %spins, 5000
  br i1 %patient, label %pause, label %yield
pause:
  call void @relax()
  br label %again
yield:
  %r = call i32 @sched_yield()
  %then = call i64 @ticks()
  %waited = sub i64 %then, %start
  %long = icmp ugt i64 %waited, %slice
  br i1 %long, label %unfinished, label %again
again:
  br label %look
withdrawn:
  %i1 = add i64 %i, 1
  br label %next
release:
  %owner = getelementptr %team, ptr %team, i32 0, i32 2
  store atomic i64 0, ptr %owner release, align 8
  ret i64 0
unfinished:
  ret i64 1
}

define void @cancel(ptr %team, i64 %token) nounwind {
  %p.owner = getelementptr %team, ptr %team, i32 0, i32 2
  %owner = load atomic i64, ptr %p.owner monotonic, align 8
  %mine = icmp eq i64 %owner, %token
  br i1 %mine, label %stop, label %end
stop:
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  %n = load i64, ptr %p.n
  store atomic i64 %n, ptr %team monotonic, align 8
  br label %finish
finish:
  %status = call i64 @drive(ptr %team)
  %unfinished = icmp ne i64 %status, 0
  br i1 %unfinished, label %finish, label %end
end:
  ret void
}

define void @work(ptr %team, i64 %me, i64 %patience) nounwind {
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %me
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  %p.scratch = getelementptr %slot, ptr %slot, i32 0, i32 1
  br label %idle
idle:
  br label %look
look:
  %spins = phi i64 [ 0, %idle ], [ %spins1, %wait ]
  %state = load atomic i32, ptr %slot monotonic, align 4
  %posted = icmp eq i32 %state, 1
  br i1 %posted, label %join, label %wait
wait:
  call void @relax()
  %spins1 = add i64 %spins, 1
  %patient = icmp ult i64 %spins1, %patience
  br i1 %patient, label %look, label %doze
doze:
  %dozed = cmpxchg ptr %slot, i32 0, i32 3 seq_cst monotonic
  %quiet = extractvalue { i32, i1 } %dozed, 1
  br i1 %quiet, label %sleep, label %idle
sleep:
  call void @wait(ptr %slot)
  %woken = load atomic i32, ptr %slot monotonic, align 4
  %asleep = icmp eq i32 %woken, 3
  br i1 %asleep, label %sleep, label %idle
join:
  %joined = cmpxchg ptr %slot, i32 1, i32 2 acquire monotonic
  %joining = extractvalue { i32, i1 } %joined, 1
  br i1 %joining, label %begin, label %idle
begin:
  %n = load i64, ptr %p.n
  %kernel = load ptr, ptr %p.kernel
  %args = load ptr, ptr %p.args
  %scratch = load ptr, ptr %p.scratch
  br label %take
take:
  %program = atomicrmw add ptr %team, i64 1 monotonic
  %left = icmp slt i64 %program, %n
  br i1 %left, label %compute, label %finish
compute:
  call void %kernel(ptr %args, i64 %program, ptr %scratch)
  br label %take
finish:
  store atomic i32 0, ptr %slot release, align 4
  br label %idle
}
"""
