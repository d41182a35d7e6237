"""The native code of the thread pool, as LLVM IR text; pool.py describes it and the memory that both share."""

from __future__ import annotations

# Neighbouring programs read neighbouring memory, and a streamed tile is prefetched while the tile before it is read,
# often by another program. So a thread takes runs of programs: its share of the remaining ones divided by this, down to
# single programs at the end, so that all threads finish at about the same time (guided scheduling).
RUNS = 2


def native_text(triple: str) -> str:
    """Return the LLVM IR of the pool for a machine."""
    arm = triple.startswith(("aarch64", "arm64"))
    if "linux" in triple:
        numbers = (
            {"FUTEX": 98, "SET_MASK": 122, "GET_MASK": 123} if arm else {"FUTEX": 202, "SET_MASK": 203, "GET_MASK": 204}
        )
        sleep = _FUTEX + _AFFINITY
        for name, number in numbers.items():
            sleep = sleep.replace(f"i64 {name}", f"i64 {number}")
    else:
        sleep = (_ULOCK if "apple" in triple else _POLL) + _NO_AFFINITY
    return (_ARM if arm else _X86) + sleep + _POOL.replace("RUNS", str(RUNS))


# A launch returns to Python after about a sixteenth of a second, so that signal handlers run: `slice` in ticks.
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

# @wait sleeps while the slot is 3 (sleeping) and may return early; @wake wakes its one worker.
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

# On which processor a worker wakes up. Under a hypervisor idle processors look busy, and Linux then wakes a worker on
# the caller's processor, where it waits for the caller to pause. So the caller saves the affinity mask of a sleeping
# worker and removes its own processor from it (@avoid_caller; the system refuses to remove the last one) before it
# wakes the worker; once awake, the worker restores the mask (@restore_affinity). If none was saved, the empty mask is
# refused.
_AFFINITY = """
define internal void @restore_affinity(ptr %affinity) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 SET_MASK, i64 0, i64 128, ptr %affinity)
  store <16 x i64> zeroinitializer, ptr %affinity, align 8
  ret void
}
define internal void @avoid_caller(i64 %thread, ptr %affinity) nounwind {
  %others = alloca [128 x i8], align 8
  %size = call i64 (i64, ...) @syscall(i64 GET_MASK, i64 %thread, i64 128, ptr %affinity)
  %mine = call i32 @sched_getcpu()
  %number = zext i32 %mine to i64
  %byte = lshr i64 %number, 3
  %inside = icmp slt i64 %byte, %size
  br i1 %inside, label %narrow, label %end
narrow:
  %all = load <16 x i64>, ptr %affinity, align 8
  store <16 x i64> %all, ptr %others, align 8
  %place = getelementptr i8, ptr %others, i64 %byte
  %eight = load i8, ptr %place
  %low = trunc i64 %number to i8
  %shift = and i8 %low, 7
  %bit = shl i8 1, %shift
  %rest = xor i8 %bit, -1
  %left = and i8 %eight, %rest
  store i8 %left, ptr %place
  %r = call i64 (i64, ...) @syscall(i64 SET_MASK, i64 %thread, i64 128, ptr %others)
  br label %end
end:
  ret void
}
declare i32 @sched_getcpu()
"""
_NO_AFFINITY = """
define internal void @restore_affinity(ptr %affinity) nounwind { ret void }
define internal void @avoid_caller(i64 %thread, ptr %affinity) nounwind { ret void }
"""

# Slot states: 0 idle, 1 posted, 2 running, 3 sleeping. Plain fields are written by the owner before it posts a slot and
# read by a worker after it saw its slot posted; results travel back with the release store that makes the slot idle.
_POOL = """
%slot = type { i32, ptr, i64, i64, i64, ptr, [2 x i64] }
%team = type { i64, [7 x i64], i64, i64, ptr, ptr, i64, i64, i64, i64, [1024 x %slot] }
declare i32 @sched_yield()

; Return the next program for a thread, or -1: the next of its run, or the first of a new run.
define internal i64 @take(ptr %team, ptr %slot, i64 %n, i64 %size) nounwind {
  %p.next = getelementptr %slot, ptr %slot, i32 0, i32 3
  %p.end = getelementptr %slot, ptr %slot, i32 0, i32 4
  %counter = load atomic i64, ptr %team monotonic, align 8
  %cancelled = icmp sgt i64 %counter, %n
  br i1 %cancelled, label %none, label %have
have:
  %next = load i64, ptr %p.next
  %end = load i64, ptr %p.end
  %inside = icmp slt i64 %next, %end
  br i1 %inside, label %go_on, label %look
go_on:
  %after = add i64 %next, 1
  store i64 %after, ptr %p.next
  ret i64 %next
look:
  %first = load atomic i64, ptr %team monotonic, align 8
  %left = sub i64 %n, %first
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %begin, label %none
begin:
  %parts = mul i64 %size, RUNS
  %share = udiv i64 %left, %parts
  %many = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %last = add i64 %first, %many
  %taken = cmpxchg ptr %team, i64 %first, i64 %last monotonic monotonic
  %mine = extractvalue { i64, i1 } %taken, 1
  br i1 %mine, label %keep, label %look
keep:
  %second = add i64 %first, 1
  store i64 %second, ptr %p.next
  store i64 %last, ptr %p.end
  ret i64 %first
none:
  ret i64 -1
}
declare i64 @llvm.umax.i64(i64, i64)

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
  %p.mine = getelementptr %team, ptr %team, i32 0, i32 10, i64 0, i32 4
  store i64 0, ptr %p.mine
  br label %next
next:
  %i = phi i64 [ 1, %post ], [ %i1, %offered ]
  %another = icmp slt i64 %i, %wanted
  br i1 %another, label %offer, label %go
offer:
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %i
  %p.end = getelementptr %slot, ptr %slot, i32 0, i32 4
  store i64 0, ptr %p.end
  %now = load atomic i32, ptr %slot acquire, align 4
  %sleeps = icmp eq i32 %now, 3
  %p.thread = getelementptr %slot, ptr %slot, i32 0, i32 2
  %thread = load i64, ptr %p.thread
  %known = icmp ne i64 %thread, 0
  %moves = and i1 %sleeps, %known
  br i1 %moves, label %aside, label %post_it
aside:
  %p.affinity = getelementptr %slot, ptr %slot, i32 0, i32 5
  %affinity = load ptr, ptr %p.affinity
  call void @avoid_caller(i64 %thread, ptr %affinity)
  br label %post_it
post_it:
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
  %me = getelementptr %team, ptr %team, i32 0, i32 10, i64 0
  %p.scratch = getelementptr %slot, ptr %me, i32 0, i32 1
  %scratch = load ptr, ptr %p.scratch
  %slice = call i64 @slice()
  %start = call i64 @ticks()
  br label %take
take:
  %program = call i64 @take(ptr %team, ptr %me, i64 %n, i64 %size)
  %left = icmp sge i64 %program, 0
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
  %beyond = add i64 %n, 1
  store atomic i64 %beyond, ptr %team monotonic, align 8
  br label %finish
finish:
  %status = call i64 @drive(ptr %team)
  %unfinished = icmp ne i64 %status, 0
  br i1 %unfinished, label %finish, label %end
end:
  ret void
}

define void @work(ptr %team, i64 %me, i64 %patience) nounwind {
  %affinity = alloca [16 x i64], align 8
  store <16 x i64> zeroinitializer, ptr %affinity, align 8
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %me
  %p.affinity = getelementptr %slot, ptr %slot, i32 0, i32 5
  store ptr %affinity, ptr %p.affinity
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
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
  br i1 %asleep, label %sleep, label %awake
awake:
  call void @restore_affinity(ptr %affinity)
  br label %idle
join:
  %joined = cmpxchg ptr %slot, i32 1, i32 2 acquire monotonic
  %joining = extractvalue { i32, i1 } %joined, 1
  br i1 %joining, label %begin, label %idle
begin:
  %n = load i64, ptr %p.n
  %size = load i64, ptr %p.size
  %kernel = load ptr, ptr %p.kernel
  %args = load ptr, ptr %p.args
  %scratch = load ptr, ptr %p.scratch
  br label %take
take:
  %program = call i64 @take(ptr %team, ptr %slot, i64 %n, i64 %size)
  %left = icmp sge i64 %program, 0
  br i1 %left, label %compute, label %finish
compute:
  call void %kernel(ptr %args, i64 %program, ptr %scratch)
  br label %take
finish:
  store atomic i32 0, ptr %slot release, align 4
  br label %idle
}
"""
