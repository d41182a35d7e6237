"""What the thread pool's native code needs from the processor and the operating system, as LLVM IR text: a clock, a
pause, and how a worker sleeps and is woken."""

from __future__ import annotations


def system_text(triple: str) -> str:
    """Return the LLVM IR of these functions for a machine."""
    arm = triple.startswith(("aarch64", "arm64"))
    processor = _ARM if arm else _X86
    if "linux" in triple:
        names = ("FUTEX", "SET_MASK", "GET_MASK")
        system = _FUTEX + _AFFINITY
        for name, number in zip(names, (98, 122, 123) if arm else (202, 203, 204), strict=True):
            system = system.replace(f"i64 {name}", f"i64 {number}")
        return processor + system
    if "windows" in triple:
        return processor + _WAIT_ON_ADDRESS + _NO_AFFINITY
    return processor + (_SEMAPHORE if "apple" in triple else _POLL) + _NO_AFFINITY


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

# @wait sleeps while `asleep` of the slot is 1 and may return early, @wake wakes its one worker, @yield lets another
# thread run, and @make_sleeper prepares what the worker of a slot sleeps with.
_FUTEX = """
define internal void @wait(ptr %slot) nounwind {
  %word = getelementptr %slot, ptr %slot, i32 0, i32 1
  %r = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i64 128, i64 1, ptr null)
  ret void
}
define internal void @wake(ptr %slot) nounwind {
  %word = getelementptr %slot, ptr %slot, i32 0, i32 1
  %r = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i64 129, i64 1)
  ret void
}
define internal void @yield() nounwind { %r = call i32 @sched_yield() ret void }
define internal ptr @make_sleeper(ptr %affinity) nounwind { ret ptr %affinity }
declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
"""
_WAIT_ON_ADDRESS = """
@asleep = internal constant i32 1
define internal void @wait(ptr %slot) nounwind {
  %word = getelementptr %slot, ptr %slot, i32 0, i32 1
  %r = call i32 @WaitOnAddress(ptr %word, ptr @asleep, i64 4, i32 -1)
  ret void
}
define internal void @wake(ptr %slot) nounwind {
  %word = getelementptr %slot, ptr %slot, i32 0, i32 1
  call void @WakeByAddressSingle(ptr %word)
  ret void
}
define internal void @yield() nounwind { %r = call i32 @SwitchToThread() ret void }
define internal ptr @make_sleeper(ptr %affinity) nounwind { ret ptr null }
declare i32 @WaitOnAddress(ptr, ptr, i64, i32)
declare void @WakeByAddressSingle(ptr)
declare i32 @SwitchToThread()
"""
# A semaphore of Grand Central Dispatch: `os_sync_wait_on_address`, which is like a futex, came with macOS 14.4.
_SEMAPHORE = """
define internal void @wait(ptr %slot) nounwind {
  %p.semaphore = getelementptr %slot, ptr %slot, i32 0, i32 6
  %semaphore = load ptr, ptr %p.semaphore
  %r = call i64 @dispatch_semaphore_wait(ptr %semaphore, i64 -1)
  ret void
}
define internal void @wake(ptr %slot) nounwind {
  %p.semaphore = getelementptr %slot, ptr %slot, i32 0, i32 6
  %semaphore = load ptr, ptr %p.semaphore
  %r = call i64 @dispatch_semaphore_signal(ptr %semaphore)
  ret void
}
define internal void @yield() nounwind { %r = call i32 @sched_yield() ret void }
define internal ptr @make_sleeper(ptr %affinity) nounwind {
  %semaphore = call ptr @dispatch_semaphore_create(i64 0)
  ret ptr %semaphore
}
declare ptr @dispatch_semaphore_create(i64)
declare i64 @dispatch_semaphore_signal(ptr)
declare i64 @dispatch_semaphore_wait(ptr, i64)
declare i32 @sched_yield()
"""
_POLL = """
define internal void @wait(ptr %slot) nounwind { %r = call i32 @usleep(i32 500) ret void }
define internal void @wake(ptr %slot) nounwind { ret void }
define internal void @yield() nounwind { %r = call i32 @sched_yield() ret void }
define internal ptr @make_sleeper(ptr %affinity) nounwind { ret ptr null }
declare i32 @usleep(i32)
declare i32 @sched_yield()
"""

# On which processor a worker wakes up. Under a hypervisor idle processors look busy, and Linux then wakes a worker on
# the waking thread's processor, where it waits for that thread to pause. So the thread that wakes a worker first saves
# its affinity mask and removes its own processor from it (@avoid_waker; the system refuses to remove the last one);
# once awake, the worker restores the mask (@restore_affinity). If none was saved, the empty mask is refused.
_AFFINITY = """
define internal void @restore_affinity(ptr %affinity) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 SET_MASK, i64 0, i64 128, ptr %affinity)
  store <16 x i64> zeroinitializer, ptr %affinity, align 8
  ret void
}
define internal void @avoid_waker(i64 %thread, ptr %affinity) nounwind {
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
define internal void @avoid_waker(i64 %thread, ptr %affinity) nounwind { ret void }
"""
