"""The native code of the thread pool, as LLVM IR text; pool.py describes it and the memory that both share."""

from __future__ import annotations

from .pool_system import system_text

# A sleeping worker is woken by the thread before it in a tree, and a thread has this many behind it: to wake one takes
# a few microseconds, which the caller cannot spend on each of 63.
FAN_OUT = 4
# Flags of a launch.
LONGEST_FIRST, SMALL = 1, 2
# A small launch wakes workers if the one before it ended at most this part of a sixteenth of a second ago, about 60 us.
SOON_SHIFT = 10


def native_text(triple: str) -> str:
    """Return the LLVM IR of the pool for a machine."""
    numbers = {"FAN_OUT": FAN_OUT, "LONGEST_FIRST": LONGEST_FIRST, "SMALL": SMALL, "SOON_SHIFT": SOON_SHIFT}
    text = _POOL
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    return _TYPES + system_text(triple) + text


# Fields of a slot: state, asleep, scratch, thread, next and end of the run it has taken, sleeper, next and end of its
# range. Fields of a team: cancelled, padding that begins with the time when the last launch ended, owner, programs,
# kernel, args, size, ready, scratch_bytes, ranges, slots.
_TYPES = """
%slot = type { i32, i32, ptr, i64, i64, i64, ptr, i64, i64 }
%team = type { i64, [7 x i64], i64, i64, ptr, ptr, i64, i64, i64, i64, [1024 x %slot] }
"""

# Slot states: 0 idle, 1 posted, 2 running. `asleep` is 1 while the worker sleeps or is about to, 2 while another thread
# wakes it. Plain fields are written by the owner before it posts a slot and read by a worker after it saw its slot
# posted; results travel back with the release store that makes the slot idle.
_POOL = """
; Return the next program for a thread, or -1: the next of its run, or the first of a new run. Runs are taken from the
; thread's own range, then from those of the others: half of what is left, or one program if there is one range for all.
define internal i64 @take(ptr %team, i64 %me) nounwind {
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %me
  %p.next = getelementptr %slot, ptr %slot, i32 0, i32 4
  %p.end = getelementptr %slot, ptr %slot, i32 0, i32 5
  %stop = load atomic i64, ptr %team monotonic, align 8
  %cancelled = icmp ne i64 %stop, 0
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
  %p.ranges = getelementptr %team, ptr %team, i32 0, i32 9
  %ranges = load i64, ptr %p.ranges
  %one = icmp eq i64 %ranges, 1
  br label %range
range:
  %k = phi i64 [ 0, %look ], [ %k1, %empty ]
  %more = icmp slt i64 %k, %ranges
  br i1 %more, label %visit, label %none
visit:
  %at = add i64 %me, %k
  %number = urem i64 %at, %ranges
  %p.first = getelementptr %team, ptr %team, i32 0, i32 10, i64 %number, i32 7
  %p.last = getelementptr %team, ptr %team, i32 0, i32 10, i64 %number, i32 8
  %last = load i64, ptr %p.last
  br label %claim
claim:
  %first = load atomic i64, ptr %p.first monotonic, align 8
  %left = sub i64 %last, %first
  %some = icmp sgt i64 %left, 0
  br i1 %some, label %begin, label %empty
begin:
  %half = lshr i64 %left, 1
  %share = select i1 %one, i64 1, i64 %half
  %many = call i64 @llvm.umax.i64(i64 %share, i64 1)
  %behind = add i64 %first, %many
  %taken = cmpxchg ptr %p.first, i64 %first, i64 %behind monotonic monotonic
  %mine = extractvalue { i64, i1 } %taken, 1
  br i1 %mine, label %keep, label %claim
keep:
  %second = add i64 %first, 1
  store i64 %second, ptr %p.next
  store i64 %behind, ptr %p.end
  ret i64 %first
empty:
  %k1 = add i64 %k, 1
  br label %range
none:
  ret i64 -1
}
declare i64 @llvm.umax.i64(i64, i64)

; Wake those of the threads behind this one in the tree that sleep.
define internal void @wake_others(ptr %team, i64 %me) nounwind {
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
  %size = load i64, ptr %p.size
  %before = mul i64 %me, FAN_OUT
  %beyond = add i64 %before, FAN_OUT
  br label %next
next:
  %i = phi i64 [ %before, %0 ], [ %other, %done ]
  %other = add i64 %i, 1
  %behind = icmp sle i64 %other, %beyond
  %exists = icmp slt i64 %other, %size
  %both = and i1 %behind, %exists
  br i1 %both, label %look, label %end
look:
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %other
  %p.asleep = getelementptr %slot, ptr %slot, i32 0, i32 1
  %asleep = load atomic i32, ptr %p.asleep seq_cst, align 4
  %sleeps = icmp eq i32 %asleep, 1
  br i1 %sleeps, label %claim, label %done
claim:
  %claimed = cmpxchg ptr %p.asleep, i32 1, i32 2 seq_cst monotonic
  %mine = extractvalue { i32, i1 } %claimed, 1
  br i1 %mine, label %rouse, label %done
rouse:
  %p.thread = getelementptr %slot, ptr %slot, i32 0, i32 3
  %thread = load i64, ptr %p.thread
  %known = icmp ne i64 %thread, 0
  br i1 %known, label %aside, label %up
aside:
  %p.sleeper = getelementptr %slot, ptr %slot, i32 0, i32 6
  %sleeper = load ptr, ptr %p.sleeper
  call void @avoid_waker(i64 %thread, ptr %sleeper)
  br label %up
up:
  store atomic i32 0, ptr %p.asleep release, align 4
  call void @wake(ptr %slot)
  br label %done
done:
  br label %next
end:
  ret void
}

define i64 @launch(
    ptr %team, ptr %kernel, ptr %programs, ptr %args, i64 %bytes, i64 %threads, i64 %flags, i64 %token
) nounwind {
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
  br i1 %grow, label %small, label %prepare
prepare:
  store atomic i64 0, ptr %team monotonic, align 8
  %p.n = getelementptr %team, ptr %team, i32 0, i32 3
  store i64 %n, ptr %p.n
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  store ptr %kernel, ptr %p.kernel
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  store ptr %args, ptr %p.args
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
  store i64 %wanted, ptr %p.size
  %p.ranges = getelementptr %team, ptr %team, i32 0, i32 9
  %longest_first = and i64 %flags, LONGEST_FIRST
  %shared = icmp ne i64 %longest_first, 0
  %parts = select i1 %shared, i64 1, i64 %wanted
  %ranges = call i64 @llvm.umax.i64(i64 %parts, i64 1)
  store i64 %ranges, ptr %p.ranges
  br label %divide
divide:
  %i = phi i64 [ 0, %prepare ], [ %i1, %divide ]
  %from = phi i64 [ 0, %prepare ], [ %to, %divide ]
  %i1 = add i64 %i, 1
  %product = mul i64 %n, %i1
  %portion = udiv i64 %product, %ranges
  %inside = icmp sle i64 %i1, %ranges
  %to = select i1 %inside, i64 %portion, i64 %n
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %i
  %p.first = getelementptr %slot, ptr %slot, i32 0, i32 7
  store atomic i64 %from, ptr %p.first monotonic, align 8
  %p.last = getelementptr %slot, ptr %slot, i32 0, i32 8
  store i64 %to, ptr %p.last
  %p.end = getelementptr %slot, ptr %slot, i32 0, i32 5
  store i64 0, ptr %p.end
  %p.next = getelementptr %slot, ptr %slot, i32 0, i32 4
  store i64 0, ptr %p.next
  %another = icmp slt i64 %i1, %wanted
  br i1 %another, label %divide, label %post
post:
  ; The last first: whoever is posted finds those behind it posted, and either they see that or it sees them asleep.
  %j = phi i64 [ %wanted, %divide ], [ %worker, %offer ]
  %worker = sub i64 %j, 1
  %some = icmp sgt i64 %worker, 0
  br i1 %some, label %offer, label %go
offer:
  %p.state = getelementptr %team, ptr %team, i32 0, i32 10, i64 %worker
  %was = atomicrmw xchg ptr %p.state, i32 1 seq_cst
  br label %post
go:
  %saving = and i64 %flags, SMALL
  %is_small = icmp ne i64 %saving, 0
  br i1 %is_small, label %consider, label %rouse
consider:
  ; Waking a worker would take longer than a small launch gains by it, unless the worker stays awake for the next ones.
  %p.ended = getelementptr %team, ptr %team, i32 0, i32 1, i64 0
  %ended = load i64, ptr %p.ended
  %now = call i64 @ticks()
  %since = sub i64 %now, %ended
  %slice = call i64 @slice()
  %soon = lshr i64 %slice, SOON_SHIFT
  %recent = icmp ult i64 %since, %soon
  br i1 %recent, label %rouse, label %begin
rouse:
  call void @wake_others(ptr %team, i64 0)
  br label %begin
begin:
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
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  %kernel = load ptr, ptr %p.kernel
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  %args = load ptr, ptr %p.args
  %p.size = getelementptr %team, ptr %team, i32 0, i32 6
  %size = load i64, ptr %p.size
  %p.scratch = getelementptr %team, ptr %team, i32 0, i32 10, i64 0, i32 2
  %scratch = load ptr, ptr %p.scratch
  %slice = call i64 @slice()
  %start = call i64 @ticks()
  br label %take
take:
  %program = call i64 @take(ptr %team, i64 0)
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
  call void @yield()
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
  %p.ended = getelementptr %team, ptr %team, i32 0, i32 1, i64 0
  %ended = call i64 @ticks()
  store i64 %ended, ptr %p.ended
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
  store atomic i64 1, ptr %team monotonic, align 8
  br label %finish
finish:
  %status = call i64 @drive(ptr %team)
  %unfinished = icmp ne i64 %status, 0
  br i1 %unfinished, label %finish, label %end
end:
  ret void
}

define void @work(ptr %team, i64 %me, i64 %shift) nounwind {
  %affinity = alloca [16 x i64], align 8
  store <16 x i64> zeroinitializer, ptr %affinity, align 8
  %slot = getelementptr %team, ptr %team, i32 0, i32 10, i64 %me
  %p.asleep = getelementptr %slot, ptr %slot, i32 0, i32 1
  %p.sleeper = getelementptr %slot, ptr %slot, i32 0, i32 6
  %sleeper = call ptr @make_sleeper(ptr %affinity)
  store ptr %sleeper, ptr %p.sleeper
  %p.kernel = getelementptr %team, ptr %team, i32 0, i32 4
  %p.args = getelementptr %team, ptr %team, i32 0, i32 5
  %p.scratch = getelementptr %slot, ptr %slot, i32 0, i32 2
  %slice = call i64 @slice()
  %patience = lshr i64 %slice, %shift
  br label %idle
idle:
  %start = call i64 @ticks()
  br label %look
look:
  %state = load atomic i32, ptr %slot monotonic, align 4
  %posted = icmp eq i32 %state, 1
  br i1 %posted, label %join, label %pause
pause:
  call void @relax()
  %now = call i64 @ticks()
  %spent = sub i64 %now, %start
  %patient = icmp ult i64 %spent, %patience
  br i1 %patient, label %look, label %doze
doze:
  store atomic i32 1, ptr %p.asleep seq_cst, align 4
  br label %sleep
sleep:
  %offered = load atomic i32, ptr %slot seq_cst, align 4
  %called = icmp eq i32 %offered, 1
  br i1 %called, label %rise, label %rest
rise:
  %risen = cmpxchg ptr %p.asleep, i32 1, i32 0 seq_cst seq_cst
  br label %check
rest:
  call void @wait(ptr %slot)
  br label %check
check:
  %asleep = load atomic i32, ptr %p.asleep acquire, align 4
  %awake = icmp eq i32 %asleep, 0
  br i1 %awake, label %up, label %sleep
up:
  call void @restore_affinity(ptr %affinity)
  br label %idle
join:
  %joined = cmpxchg ptr %slot, i32 1, i32 2 acquire monotonic
  %joining = extractvalue { i32, i1 } %joined, 1
  br i1 %joining, label %begin, label %idle
begin:
  call void @wake_others(ptr %team, i64 %me)
  %kernel = load ptr, ptr %p.kernel
  %args = load ptr, ptr %p.args
  %scratch = load ptr, ptr %p.scratch
  br label %take
take:
  %program = call i64 @take(ptr %team, i64 %me)
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
