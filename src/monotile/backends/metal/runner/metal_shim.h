// Included before a shader that is compiled as C++: Metal's library, its keywords, and kernel arguments.
#pragma once
#include "metal_simdgroup.h"

namespace mt {

// A buffer or threadgroup argument becomes the pointer or reference the kernel declares.
struct Pointer {
  void *at;
  template <class T> operator T *() const { return (T *)at; }
};
struct Reference {
  void *at;
  template <class T> operator T &() const { return *(T *)at; }
};
// A thread's position or a size becomes the scalar or vector the kernel declares.
struct Position {
  u32 x, y, z;
  template <metal::Scalar T> operator T() const { return T(x); }
  template <class T> operator metal::vec<T, 2>() const { return {T(x), T(y)}; }
  template <class T> operator metal::vec<T, 3>() const { return {T(x), T(y), T(z)}; }
};

inline Position position(const u32 *v) { return {v[0], v[1], v[2]}; }
inline u32 simdgroups() { return (mt_launch_state.thread_count + LANES - 1) / LANES; }
inline Position threadgroup_position_in_grid() { return position(mt_launch_state.group); }
inline Position threadgroups_per_grid() { return position(mt_launch_state.groups); }
inline Position threads_per_threadgroup() { return position(mt_launch_state.threads); }
inline Position dispatch_threads_per_threadgroup() { return position(mt_launch_state.threads); }
inline Position thread_position_in_threadgroup() { return position(mt_thread->position); }
inline Position thread_index_in_threadgroup() { return {mt_thread->index, 0, 0}; }
inline Position thread_index_in_simdgroup() { return {mt_thread->lane, 0, 0}; }
inline Position simdgroup_index_in_threadgroup() { return {mt_thread->simdgroup, 0, 0}; }
inline Position thread_index_in_quadgroup() { return {mt_thread->lane % 4, 0, 0}; }
inline Position quadgroup_index_in_threadgroup() { return {mt_thread->index / 4, 0, 0}; }
inline Position threads_per_simdgroup() { return {LANES, 0, 0}; }
inline Position thread_execution_width() { return {LANES, 0, 0}; }
inline Position simdgroups_per_threadgroup() { return {simdgroups(), 0, 0}; }
inline Position dispatch_simdgroups_per_threadgroup() { return {simdgroups(), 0, 0}; }
inline Position threads_per_grid() {
  const Launch &l = mt_launch_state;
  return {l.groups[0] * l.threads[0], l.groups[1] * l.threads[1], l.groups[2] * l.threads[2]};
}
inline Position thread_position_in_grid() {
  const Launch &l = mt_launch_state;
  const u32 *in = mt_thread->position;
  return {l.group[0] * l.threads[0] + in[0], l.group[1] * l.threads[1] + in[1], l.group[2] * l.threads[2] + in[2]};
}

template <class T> inline __attribute__((always_inline)) T &threadgroup_variable(int index) {
  return *(T *)mt_threadgroup_variable(index, sizeof(T), alignof(T));
}

}  // namespace mt

#define kernel
#define device
#define thread
#define threadgroup
#define constant const
#define threadgroup_imageblock
#define is_function_constant_defined(name) mt_defined_##name
