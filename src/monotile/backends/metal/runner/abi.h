// The interface between a shader compiled as C++, the runtime, and Python. No standard headers: the shader must see no
// names but Metal's.
#pragma once

namespace mt {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

constexpr int LANES = 32, SLOT_BYTES = 64, MOST_BUFFERS = 32, MOST_FINDINGS = 64, MOST_THREADS = 1024;

enum Counter {
  DEVICE_READ, DEVICE_WRITTEN, CONSTANT_READ, THREADGROUP_READ, THREADGROUP_WRITTEN, BARRIERS, SIMDGROUP_BARRIERS,
  MULTIPLIES, SHUFFLES, REDUCTIONS, EXPONENTIALS, ATOMICS, THREADGROUP_MEMORY, COUNTERS
};

enum FindingKind {
  OUT_OF_BOUNDS, RACE, DIVERGENCE, TOO_MUCH_MEMORY, UNWRITTEN, MISALIGNED, ARRAY_BOUNDS, DIVISION, READ_ONLY, FAULT,
  INACTIVE_LANE
};

// What a thread waits for. Collectives are distinguished by their kind as well as by their line.
enum Wait { RUNNING, FINISHED, THREADGROUP_BARRIER, SIMDGROUP_BARRIER, SHUFFLE, REDUCTION, MULTIPLY };

enum Space { DEVICE, THREADGROUP, SPACES };

struct Finding {
  int kind, line, other_line, place;        // place: a buffer's index, or -1 - the index of a threadgroup allocation
  int write, other_write, thread, other_thread;
  u32 group[3], count;
  long offset, bytes;
};

struct Thread {
  u32 index, lane, simdgroup;
  u32 position[3];                          // in the threadgroup
};

struct Launch {
  u32 group[3], groups[3], threads[3], thread_count;
};

extern "C" {
extern Thread *mt_thread;                   // the running thread
extern Launch mt_launch_state;
void *mt_buffer(int index);
void *mt_threadgroup_argument(int index);
void *mt_threadgroup_variable(int index, u64 bytes, u64 alignment);
void mt_barrier(int kind, u32 flags, int line);
// Gives every lane's value to every lane of the simdgroup: 32 slots of 64 bytes; *active gets the participating lanes.
const char *mt_exchange(int kind, const void *value, u32 bytes, int line, u32 *active);
void mt_count(int counter, u64 amount);
void mt_report(int kind, int line, long detail);
void mt_atomic(const void *address, u32 bytes, int line);
void mt_copy(void *to, const void *from, u32 bytes);  // not checked or counted
void mt_entry();                            // generated for each kernel: calls it with its arguments
}

}  // namespace mt
