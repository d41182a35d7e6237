// The memory of a kernel, between guard pages. Every access is counted, checked against the bounds of the buffers, and
// compared with the accesses of other threads since the last fence.
#include "memory.h"

#include <string.h>
#include <sys/mman.h>

using namespace mt;

constexpr u64 PAGE = 16 << 10, GUARD = 256ul << 20;
constexpr u64 THREADGROUP_SPAN = 1 << 20, RED_ZONE = 64;  // larger than the limit, to report an excess
constexpr u64 THREADGROUP_LIMIT = 32 << 10;
constexpr int MOST_VARIABLES = 64, POISON = 0xFF;         // NaN in every floating type

// ---- shadow memory ---------------------------------------------------------------------------------------------------

// The last access to a byte. Epochs count the fences of the group and of the simdgroup; group numbers are never reused,
// and 0 means no access.
struct Access {
  u32 group, epoch, simdgroup_epoch;
  u16 thread, other;                                      // other: another lane of the simdgroup since its last fence
  int line;
};

// `near` is the last reader, `far` the last reader outside the simdgroup of `near`.
struct Cell {
  Access writer, near, far;
};

struct Buffer {
  char *base;
  u64 bytes;
  u32 granule;
  bool writable, constant;
  Cell *shadow;
};

struct Variable {
  char *base;
  u64 bytes;
};

constexpr u16 NOBODY = 0xFFFF;

static char *arena;
static u64 arena_bytes, shadow_bytes[MOST_BUFFERS], first_bytes[MOST_BUFFERS];
static Buffer buffers[MOST_BUFFERS];
static int buffer_count;
static Variable arguments[MOST_VARIABLES], variables[MOST_VARIABLES];
static char *threadgroup_memory;
static u64 threadgroup_used, threadgroup_counted, dynamic_bytes[MOST_VARIABLES];
static Cell *threadgroup_shadow;
static u32 group_number, epoch[SPACES], simdgroup_epoch[SPACES][MOST_THREADS / LANES];
static int watch_races, last_line;

extern "C" {
u64 mt_counters[COUNTERS], mt_buffer_read[MOST_BUFFERS], mt_buffer_written[MOST_BUFFERS];
Finding mt_findings[MOST_FINDINGS];
int mt_finding_count;
}

// ---- findings --------------------------------------------------------------------------------------------------------

extern "C" void mt_add_finding(Finding *finding) {
  for (int i = 0; i < mt_finding_count; ++i) {
    Finding &known = mt_findings[i];
    if (known.kind == finding->kind && known.line == finding->line && known.other_line == finding->other_line &&
        known.place == finding->place && known.write == finding->write) {
      known.count++;
      return;
    }
  }
  if (mt_finding_count == MOST_FINDINGS) return;
  finding->count = 1;
  memcpy(finding->group, mt_launch_state.group, sizeof finding->group);
  mt_findings[mt_finding_count++] = *finding;
}

static Finding found(int kind, int line, int place, long offset, long bytes, bool write) {
  Finding finding = {};
  finding.kind = kind, finding.line = line, finding.place = place, finding.offset = offset, finding.bytes = bytes;
  finding.write = write, finding.thread = mt_thread->index;
  return finding;
}

extern "C" void mt_report(int kind, int line, long detail) {
  Finding finding = found(kind, line, 0, detail, 0, false);
  mt_add_finding(&finding);
  if (kind != INACTIVE_LANE) mt_stop();
}

static int nearest(const char *address, long *offset) {
  int best = -1 - MOST_VARIABLES;
  long distance = (long)(~0ul >> 1);
  auto consider = [&](int place, const char *base, u64 bytes) {
    long away = address < base ? base - address : address - (base + bytes) + 1;
    if (base && away < distance) distance = away, best = place, *offset = address - base;
  };
  for (int i = 0; i < MOST_BUFFERS; ++i) consider(i, buffers[i].base, buffers[i].bytes);
  for (int i = 0; i < MOST_VARIABLES; ++i) consider(-1 - i, arguments[i].base, arguments[i].bytes);
  for (int i = 0; i < MOST_VARIABLES; ++i) consider(-1 - MOST_VARIABLES - i, variables[i].base, variables[i].bytes);
  return best;
}

extern "C" void mt_fault(const char *address, int kind, bool on_stack) {
  long offset = 0;
  bool known = !on_stack && address >= arena && address < arena + arena_bytes;
  int place = known ? nearest(address, &offset) : 0;
  Finding finding = found(known ? (int)OUT_OF_BOUNDS : kind, last_line, place, known ? offset : on_stack, 0, false);
  mt_add_finding(&finding);
}

// ---- races -----------------------------------------------------------------------------------------------------------

// The access that the running thread makes.
struct Operation {
  int space;
  bool write;
  int line, place;
};

// Returns 0 if a fence orders an earlier access before one that the running thread makes now; otherwise 1 if the earlier
// access was made by `thread`, and 2 if it was made by `other`.
static int unordered(const Access &then, int space) {
  if (!then.group) return 0;
  if (then.group != group_number) return space == DEVICE;  // groups are never ordered in one launch
  if (then.epoch != epoch[space]) return 0;
  u32 simdgroup = mt_thread->simdgroup;
  if (then.thread / LANES != simdgroup) return 1;
  if (then.simdgroup_epoch != simdgroup_epoch[space][simdgroup]) return 0;
  if (then.thread != mt_thread->index) return 1;
  return then.other != NOBODY && then.other != mt_thread->index ? 2 : 0;
}

static bool race(const Access &then, bool then_write, const Operation &now, long offset) {
  int who = unordered(then, now.space);
  if (!who) return false;
  Finding finding = found(RACE, now.line, now.place, offset, then.group != group_number, now.write);
  finding.other_line = then.line, finding.other_write = then_write;
  finding.other_thread = who == 2 ? then.other : then.thread;
  mt_add_finding(&finding);
  return true;
}

static Access access_now(int space, int line) {
  u32 simdgroup = mt_thread->simdgroup;
  return {group_number, epoch[space], simdgroup_epoch[space][simdgroup], (u16)mt_thread->index, NOBODY, line};
}

static void note_read(Cell &cell, int space, int line) {
  Access now = access_now(space, line), &last = cell.near;
  if (last.group == now.group && last.epoch == now.epoch) {
    if (last.thread / LANES != now.thread / LANES)
      cell.far = last;
    else if (last.simdgroup_epoch == now.simdgroup_epoch)
      now.other = last.thread != now.thread ? last.thread : last.other;
  } else if (space == DEVICE && last.group) {
    cell.far = last;
  }
  last = now;
}

// Checks and records an access to cells `first` to `last`; `base` is where the variable starts.
static void watch(Cell *cells, u64 first, u64 last, const Operation &now, u64 granule, u64 base) {
  for (u64 i = first; i <= last; ++i) {
    Cell &cell = cells[i];
    long offset = (long)(i * granule - base);
    race(cell.writer, true, now, offset);
    if (now.write) {
      if (!race(cell.near, false, now, offset)) race(cell.far, false, now, offset);
      cell.writer = access_now(now.space, now.line);
    } else {
      note_read(cell, now.space, now.line);
    }
  }
}

// ---- accesses --------------------------------------------------------------------------------------------------------

[[noreturn]] static void out_of_bounds(const char *address, u64 bytes, bool write, int line) {
  long offset = 0;
  int place = nearest(address, &offset);
  Finding finding = found(OUT_OF_BOUNDS, line, place, offset, (long)bytes, write);
  mt_add_finding(&finding);
  mt_stop();
}

static int variable_at(const char *address, u64 bytes) {
  auto inside = [&](const Variable &v) { return v.base && address >= v.base && address + bytes <= v.base + v.bytes; };
  for (int i = 0; i < MOST_VARIABLES; ++i)
    if (inside(arguments[i])) return -1 - i;
  for (int i = 0; i < MOST_VARIABLES; ++i)
    if (inside(variables[i])) return -1 - MOST_VARIABLES - i;
  return 0;
}

static void touch_threadgroup(const char *address, u64 bytes, bool write, int line) {
  static int recent = -1;
  const Variable &guess = recent > -1 - MOST_VARIABLES ? arguments[-1 - recent] : variables[-1 - MOST_VARIABLES - recent];
  if (!guess.base || address < guess.base || address + bytes > guess.base + guess.bytes) {
    int place = variable_at(address, bytes);
    if (!place) out_of_bounds(address, bytes, write, line);
    recent = place;
  }
  mt_counters[write ? THREADGROUP_WRITTEN : THREADGROUP_READ] += bytes;
  u64 first = address - threadgroup_memory, last = first + bytes - 1;
  const Variable &home = recent > -1 - MOST_VARIABLES ? arguments[-1 - recent] : variables[-1 - MOST_VARIABLES - recent];
  if (!write)
    for (u64 i = first; i <= last; ++i)
      if (threadgroup_shadow[i].writer.group != group_number) {
        Finding finding = found(UNWRITTEN, line, recent, address - home.base, (long)bytes, false);
        mt_add_finding(&finding);
        break;
      }
  if (watch_races)
    watch(threadgroup_shadow, first, last, {THREADGROUP, write, line, recent}, 1, home.base - threadgroup_memory);
  else if (write)
    for (u64 i = first; i <= last; ++i) threadgroup_shadow[i].writer.group = group_number;
}

static void touch_device(const char *address, u64 bytes, bool write, int line) {
  static int recent = 0;
  auto holds = [&](int i) {
    return buffers[i].base && address >= buffers[i].base && address + bytes <= buffers[i].base + buffers[i].bytes;
  };
  if (!holds(recent)) {
    int i = 0;
    while (i < MOST_BUFFERS && !holds(i)) ++i;
    if (i == MOST_BUFFERS) out_of_bounds(address, bytes, write, line);
    recent = i;
  }
  const Buffer &buffer = buffers[recent];
  if (write && !buffer.writable) {
    Finding finding = found(READ_ONLY, line, recent, address - buffer.base, (long)bytes, true);
    mt_add_finding(&finding);
    mt_stop();
  }
  mt_counters[write ? DEVICE_WRITTEN : buffer.constant ? CONSTANT_READ : DEVICE_READ] += bytes;
  (write ? mt_buffer_written : mt_buffer_read)[recent] += bytes;
  if (!watch_races || !buffer.shadow) return;
  u64 offset = address - buffer.base, granule = buffer.granule;
  watch(buffer.shadow, offset / granule, (offset + bytes - 1) / granule, {DEVICE, write, line, recent}, granule, 0);
}

static inline void touch(u64 address, u64 bytes, bool write, int line) {
  last_line = line;
  if (address - (u64)arena >= arena_bytes || !bytes) return;  // private memory of the thread
  if (address - (u64)threadgroup_memory < THREADGROUP_SPAN)
    touch_threadgroup((const char *)address, bytes, write, line);
  else
    touch_device((const char *)address, bytes, write, line);
}

extern "C" {
void mt_load(u64 address, u64 bytes, int line) { touch(address, bytes, false, line); }
void mt_store(u64 address, u64 bytes, int line) { touch(address, bytes, true, line); }

void *mt_memcpy(void *to, const void *from, u64 bytes, int line) {
  touch((u64)from, bytes, false, line), touch((u64)to, bytes, true, line);
  return memmove(to, from, bytes);
}

void *mt_memset(void *to, int value, u64 bytes, int line) {
  touch((u64)to, bytes, true, line);
  return memset(to, value, bytes);
}

// An atomic is checked against the bounds, and never races with another one.
void mt_atomic(const void *address, u32 bytes, int line) {
  int saved = watch_races;
  watch_races = 0;
  touch((u64)address, bytes, true, line);
  watch_races = saved;
  mt_counters[ATOMICS]++;
}

void mt_copy(void *to, const void *from, u32 bytes) { memcpy(to, from, bytes); }
void mt_count(int counter, u64 amount) { mt_counters[counter] += amount; }

// Called by the compiler's own checks; their argument starts with the place in the source.
struct Place {
  const char *file;
  u32 line, column;
};
void __ubsan_handle_type_mismatch_v1(Place *place, u64 address) { mt_report(MISALIGNED, place->line, (long)address % 64); }
void __ubsan_handle_out_of_bounds(Place *place, u64 index) { mt_report(ARRAY_BOUNDS, place->line, (long)index); }
void __ubsan_handle_divrem_overflow(Place *place, u64, u64) { mt_report(DIVISION, place->line, 0); }

// ---- groups and fences -----------------------------------------------------------------------------------------------

static char *take_threadgroup(u64 bytes, u64 alignment, Variable *variable) {
  u64 start = (threadgroup_used + RED_ZONE + alignment - 1) / alignment * alignment;
  threadgroup_counted += (bytes + 15) / 16 * 16;
  if (threadgroup_counted > mt_counters[THREADGROUP_MEMORY]) mt_counters[THREADGROUP_MEMORY] = threadgroup_counted;
  if (threadgroup_counted > THREADGROUP_LIMIT) {
    Finding finding = found(TOO_MUCH_MEMORY, 0, 0, (long)threadgroup_counted, (long)THREADGROUP_LIMIT, false);
    mt_add_finding(&finding);
    return nullptr;
  }
  threadgroup_used = start + bytes;
  variable->base = threadgroup_memory + start, variable->bytes = bytes;
  return variable->base;
}

void mt_start_group() {
  static Thread nobody;
  mt_thread = &nobody;
  group_number++, epoch[DEVICE]++, epoch[THREADGROUP]++;
  if (threadgroup_used) memset(threadgroup_memory, POISON, threadgroup_used + RED_ZONE);
  threadgroup_used = threadgroup_counted = 0;
  memset(variables, 0, sizeof variables);
  memset(arguments, 0, sizeof arguments);
  for (int i = 0; i < MOST_VARIABLES; ++i)
    if (dynamic_bytes[i]) take_threadgroup(dynamic_bytes[i], 16, &arguments[i]);
}

constexpr u32 MEM_DEVICE = 1, MEM_THREADGROUP = 2;

void mt_advance_group(u32 flags) {
  if (flags & MEM_DEVICE) epoch[DEVICE]++;
  if (flags & MEM_THREADGROUP) epoch[THREADGROUP]++;
}

void mt_advance_simdgroup(u32 simdgroup, u32 flags) {
  if (flags & MEM_DEVICE) simdgroup_epoch[DEVICE][simdgroup]++;
  if (flags & MEM_THREADGROUP) simdgroup_epoch[THREADGROUP][simdgroup]++;
}

void *mt_buffer(int index) { return buffers[index].base + first_bytes[index]; }
void *mt_threadgroup_argument(int index) { return arguments[index].base; }
void *mt_threadgroup_variable(int index, u64 bytes, u64 alignment) {
  Variable &variable = variables[index];
  if (!variable.base && !take_threadgroup(bytes, alignment < 16 ? 16 : alignment, &variable)) mt_stop();
  return variable.base;
}

// ---- set up from Python ----------------------------------------------------------------------------------------------

static u64 pages(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static char *map(u64 bytes, int protection) {
  void *memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : (char *)memory;
}

// Places threadgroup memory and the buffers, each ending right before a guard. Bytes of ~0: no such buffer.
// alias: the index of an earlier buffer with the memory that this one begins `starts` bytes into, or its own index.
int mt_open(const u64 *bytes, const u32 *granules, const u8 *writable, const u8 *constant, const u8 *alias,
            const u64 *starts, const u64 *dynamic, int races) {
  u64 total = THREADGROUP_SPAN + 2 * GUARD;
  for (int i = 0; i < MOST_BUFFERS; ++i)
    if (bytes[i] != ~0ul) total += pages(bytes[i]) + GUARD;
  if (!(arena = map(total, PROT_NONE))) return 1;
  arena_bytes = total, watch_races = races;
  if (!threadgroup_shadow) threadgroup_shadow = (Cell *)map(THREADGROUP_SPAN * sizeof(Cell), PROT_READ | PROT_WRITE);
  if (!threadgroup_shadow) return 1;
  threadgroup_memory = arena + GUARD;
  mprotect(threadgroup_memory, THREADGROUP_SPAN, PROT_READ | PROT_WRITE);
  memset(threadgroup_memory, POISON, THREADGROUP_LIMIT * 2);
  memcpy(dynamic_bytes, dynamic, sizeof dynamic_bytes);
  char *next = threadgroup_memory + THREADGROUP_SPAN + GUARD;
  for (int i = 0; i < MOST_BUFFERS; ++i) {
    buffers[i] = {};
    first_bytes[i] = starts[i];
    if (bytes[i] == ~0ul) continue;
    if (alias[i] != i) {
      buffers[i].base = buffers[alias[i]].base;
      continue;
    }
    u64 mapped = pages(bytes[i]);
    if (mapped && mprotect(next, mapped, PROT_READ | PROT_WRITE)) return 1;
    u64 cells = (bytes[i] + granules[i] - 1) / granules[i];
    Cell *shadow = nullptr;
    if (races && writable[i] && cells) {
      shadow_bytes[i] = pages(cells * sizeof(Cell));
      if (!(shadow = (Cell *)map(shadow_bytes[i], PROT_READ | PROT_WRITE))) return 1;
    }
    buffers[i] = {next + mapped - (bytes[i] + 15) / 16 * 16, bytes[i], granules[i], (bool)writable[i], (bool)constant[i], shadow};
    next += mapped + GUARD;
  }
  memset(mt_counters, 0, sizeof mt_counters);
  memset(mt_buffer_read, 0, sizeof mt_buffer_read);
  memset(mt_buffer_written, 0, sizeof mt_buffer_written);
  mt_finding_count = last_line = 0;
  return 0;
}

void mt_close() {
  for (int i = 0; i < MOST_BUFFERS; ++i)
    if (buffers[i].shadow) munmap(buffers[i].shadow, shadow_bytes[i]), buffers[i].shadow = nullptr;
  munmap(arena, arena_bytes);
  arena = nullptr, arena_bytes = 0;
}
}
