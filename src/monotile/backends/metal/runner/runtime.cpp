// Runs a kernel thread by thread: one fiber per thread, one threadgroup after another, memory between guard pages.
// Uses only the C library: the C++ runtime is not linked.
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include "abi.h"
#include "memory.h"

using namespace mt;

// ---- switching between fibers ----------------------------------------------------------------------------------------

extern "C" void mt_switch(void **save, void *load) __asm__("mt_switch");
extern "C" void mt_begin() __asm__("mt_begin");
extern "C" void mt_fiber_main() __asm__("mt_fiber_main");

#if defined(__x86_64__)
constexpr int SAVED_WORDS = 6;
__asm__(
    ".text\n.globl mt_switch\nmt_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".globl mt_begin\nmt_begin:\n  xorl %ebp, %ebp\n  call mt_fiber_main\n  ud2\n");
static void *first_frame(char *top) {
  u64 *frame = (u64 *)top - 2 - SAVED_WORDS - 1;  // after the pops and the ret the stack is aligned for a call
  memset(frame, 0, SAVED_WORDS * 8);
  frame[SAVED_WORDS] = (u64)&mt_begin;
  return frame;
}
#elif defined(__aarch64__)
constexpr int SAVED_WORDS = 20;
__asm__(
    ".text\n.globl mt_switch\nmt_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n"
    ".globl mt_begin\nmt_begin:\n  bl mt_fiber_main\n  brk #1\n");
static void *first_frame(char *top) {
  u64 *frame = (u64 *)top - SAVED_WORDS;
  memset(frame, 0, SAVED_WORDS * 8);
  frame[11] = (u64)&mt_begin;  // x30
  return frame;
}
#else
#error "the Metal runner knows x86-64 and AArch64"
#endif

// ---- the threads of a group ------------------------------------------------------------------------------------------

constexpr u64 STACK_BYTES = 256 << 10, PAGE = 16 << 10;  // the largest page size in use

struct Fiber {
  void *sp;
  Thread thread;
  int waits, line;
  u32 flags;
};

static Fiber fibers[MOST_THREADS];
static Fiber *running;
static void *scheduler;
static char *stacks;
static u64 stacks_bytes;
static sigjmp_buf escape;
static volatile int inside, stopped;

// Two sets of slots per simdgroup, used alternately: a lane can be at most one collective ahead of another.
static char slots[MOST_THREADS / LANES][2][LANES][SLOT_BYTES] __attribute__((aligned(64)));
static u32 taking_part[MOST_THREADS / LANES][2];
static u8 parity[MOST_THREADS / LANES];

extern "C" {
Thread *mt_thread;
Launch mt_launch_state;

void mt_stop() {
  stopped = 1;
  void *dropped;
  mt_switch(&dropped, scheduler);
  __builtin_unreachable();
}

void mt_fiber_main() {
  mt_entry();
  running->waits = FINISHED;
  mt_switch(&running->sp, scheduler);
  __builtin_unreachable();
}
}

static void wait_for(int kind, int line, u32 flags) {
  Fiber *self = running;
  self->waits = kind, self->line = line, self->flags = flags;
  mt_switch(&self->sp, scheduler);
}

extern "C" void mt_barrier(int kind, u32 flags, int line) { wait_for(kind, line, flags); }

extern "C" const char *mt_exchange(int kind, const void *value, u32 bytes, int line, u32 *active) {
  u32 simdgroup = mt_thread->simdgroup, set = parity[simdgroup];
  memcpy(slots[simdgroup][set][mt_thread->lane], value, bytes);
  wait_for(kind, line, 0);
  *active = taking_part[simdgroup][set];
  return slots[simdgroup][set][0];
}

static void diverged(const Fiber *waiting, const Fiber *elsewhere) {
  Finding finding = {};
  finding.kind = DIVERGENCE, finding.line = waiting->line, finding.thread = waiting->thread.index;
  finding.other_thread = elsewhere->thread.index, finding.other_line = elsewhere->waits == FINISHED ? 0 : elsewhere->line;
  finding.offset = waiting->waits, finding.bytes = elsewhere->waits;
  mt_add_finding(&finding);
  stopped = 1;
}

// Resumes a simdgroup when all its lanes that have not returned wait for the same thing. Returns true if it does.
static bool release_simdgroup(u32 simdgroup, u32 first, u32 end) {
  const Fiber *leader = nullptr;
  u32 lanes = 0;
  for (u32 i = first; i < end; ++i) {
    const Fiber &fiber = fibers[i];
    if (fiber.waits == FINISHED) continue;
    if (fiber.waits < SIMDGROUP_BARRIER) return false;
    if (!leader) leader = &fiber;
    if (fiber.waits != leader->waits || fiber.line != leader->line) return false;
    lanes |= 1u << fiber.thread.lane;
  }
  if (!leader) return false;
  bool whole = (u32)__builtin_popcount(lanes) == end - first;
  if (!whole && (leader->waits == SIMDGROUP_BARRIER || leader->waits == MULTIPLY)) return false;
  taking_part[simdgroup][parity[simdgroup]] = lanes;
  if (leader->waits == SIMDGROUP_BARRIER) {
    mt_count(SIMDGROUP_BARRIERS, 1);
    mt_advance_simdgroup(simdgroup, leader->flags);
  } else {
    parity[simdgroup] ^= 1;
    mt_count(leader->waits == SHUFFLE ? SHUFFLES : leader->waits == REDUCTION ? REDUCTIONS : MULTIPLIES, 1);
  }
  for (u32 i = first; i < end; ++i)
    if (fibers[i].waits != FINISHED) fibers[i].waits = RUNNING;
  return true;
}

// Called when no thread can run: resumes the group after a barrier, or reports divergence. Returns false at the end.
static bool release_group(u32 count) {
  const Fiber *leader = nullptr, *elsewhere = nullptr;
  for (u32 i = 0; i < count && !leader; ++i)
    if (fibers[i].waits != FINISHED) leader = &fibers[i];
  if (!leader) return false;
  for (u32 i = 0; i < count && !elsewhere; ++i)
    if (fibers[i].waits != leader->waits || fibers[i].line != leader->line) elsewhere = &fibers[i];
  if (elsewhere || leader->waits != THREADGROUP_BARRIER) {
    // If lanes of one simdgroup diverge, report those: their lines are the most useful.
    for (u32 i = 0; i < count; ++i) {
      const Fiber &fiber = fibers[i], &head = fibers[i & ~(LANES - 1)];
      if (fiber.waits != head.waits || fiber.line != head.line)
        return diverged(head.waits == FINISHED ? &fiber : &head, head.waits == FINISHED ? &head : &fiber), false;
    }
    diverged(leader, elsewhere ? elsewhere : leader);
    return false;
  }
  mt_count(BARRIERS, 1);
  mt_advance_group(leader->flags);
  for (u32 i = 0; i < count; ++i) fibers[i].waits = RUNNING;
  return true;
}

enum Order { ASCENDING, DESCENDING, SHUFFLED };

static u64 random_state;

static void arrange(u16 *order, u32 count, int kind) {
  for (u32 i = 0; i < count; ++i) order[i] = kind == DESCENDING ? count - 1 - i : i;
  if (kind != SHUFFLED) return;
  for (u32 i = count - 1; i > 0; --i) {
    random_state = random_state * 6364136223846793005ul + 1442695040888963407ul;
    u32 j = (random_state >> 33) % (i + 1);
    u16 other = order[i];
    order[i] = order[j], order[j] = other;
  }
}

static void start_threads(u32 count) {
  const u32 *size = mt_launch_state.threads;
  for (u32 i = 0; i < count; ++i) {
    Fiber &fiber = fibers[i];
    fiber.waits = RUNNING;
    fiber.thread.index = i, fiber.thread.lane = i % LANES, fiber.thread.simdgroup = i / LANES;
    fiber.thread.position[0] = i % size[0];
    fiber.thread.position[1] = i / size[0] % size[1];
    fiber.thread.position[2] = i / (size[0] * size[1]);
    fiber.sp = first_frame(stacks + (i + 1) * (STACK_BYTES + PAGE));
  }
}

static void run_group(int kind) {
  u32 count = mt_launch_state.thread_count;
  u16 order[MOST_THREADS];
  start_threads(count);
  mt_start_group();
  do {
    bool progress = true;
    while (progress && !stopped) {
      arrange(order, count, kind);
      for (u32 i = 0; i < count && !stopped; ++i) {
        Fiber &fiber = fibers[order[i]];
        if (fiber.waits != RUNNING) continue;
        running = &fiber, mt_thread = &fiber.thread;
        mt_switch(&scheduler, fiber.sp);
      }
      progress = false;
      for (u32 first = 0; first < count && !stopped; first += LANES)
        progress |= release_simdgroup(first / LANES, first, first + LANES < count ? first + LANES : count);
    }
  } while (!stopped && release_group(count));
}

// ---- launching -------------------------------------------------------------------------------------------------------

static void on_fault(int signal, siginfo_t *info, void *) {
  if (!inside) {
    ::signal(signal, SIG_DFL);  // not in a kernel: let the signal end the process
    return;
  }
  char *address = (char *)info->si_addr;
  mt_fault(address, signal == SIGFPE ? DIVISION : FAULT, address >= stacks && address < stacks + stacks_bytes);
  siglongjmp(escape, 1);
}

// Mapped for one launch only: the number of mappings of a process is limited.
static bool make_stacks(u32 count) {
  u64 span = count * (STACK_BYTES + PAGE) + PAGE;
  void *memory = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  stacks = (char *)memory, stacks_bytes = span;
  for (u32 i = 0; i < count; ++i)
    if (mprotect(stacks + PAGE + i * (STACK_BYTES + PAGE), STACK_BYTES, PROT_READ | PROT_WRITE)) return false;
  return true;
}

extern "C" int mt_run(const u32 *groups, const u32 *threads, int order, u64 seed) {
  static char signal_stack[64 << 10];
  Launch &launch = mt_launch_state;
  memcpy(launch.groups, groups, sizeof launch.groups);
  memcpy(launch.threads, threads, sizeof launch.threads);
  launch.thread_count = threads[0] * threads[1] * threads[2];
  random_state = seed;
  stopped = 0;
  if (!make_stacks(launch.thread_count)) return 1;

  stack_t alternate = {}, old_alternate;
  alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
  struct sigaction action = {}, old[3];
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  sigaltstack(&alternate, &old_alternate);
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &old[i]);
  if (!sigsetjmp(escape, 1)) {
    inside = 1;
    u32 *group = launch.group;
    for (group[2] = 0; group[2] < groups[2]; ++group[2])
      for (group[1] = 0; group[1] < groups[1]; ++group[1])
        for (group[0] = 0; group[0] < groups[0]; ++group[0])
          if (!stopped) run_group(order);
  }
  inside = 0;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_alternate, nullptr);
  munmap(stacks, stacks_bytes);
  return 0;
}
