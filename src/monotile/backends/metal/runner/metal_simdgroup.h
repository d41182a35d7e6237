// Barriers, simdgroup collectives, 8x8 simdgroup matrices, and atomics. Each gets the line of the shader it is called
// from.
#pragma once
#include "metal_math.h"

#define MT_LINE int line = __builtin_LINE()

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

METAL_FUNC void threadgroup_barrier(mem_flags flags, MT_LINE) { mt::mt_barrier(mt::THREADGROUP_BARRIER, uint(flags), line); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, MT_LINE) { mt::mt_barrier(mt::SIMDGROUP_BARRIER, uint(flags), line); }

// ---- the values of all lanes -----------------------------------------------------------------------------------------

template <class T> struct Lanes {
  const char *slots;
  uint active;
  Lanes(int kind, const T &mine, int line) { slots = mt::mt_exchange(kind, &mine, sizeof(T), line, &active); }
  bool has(uint lane) const { return lane < mt::LANES && active >> lane & 1; }
  T operator[](uint lane) const { T out; __builtin_memcpy(&out, slots + lane * mt::SLOT_BYTES, sizeof(T)); return out; }
  // The value of a lane that does not participate is undefined: return one that shows.
  T at(uint lane) const {
    if (has(lane)) return (*this)[lane];
    T out;
    __builtin_memset(&out, 0xFF, sizeof(T));
    return out;
  }
};

// Combines adjacent lanes first, as a butterfly reduction does; lanes that do not participate are left out.
template <class T, class F> inline T fold_lanes(const T &mine, F f, int line, uint first = 0, uint count = mt::LANES) {
  Lanes<T> lanes(mt::REDUCTION, mine, line);
  T values[mt::LANES];
  bool there[mt::LANES];
  for (uint i = 0; i < count; ++i) values[i] = lanes.at(first + i), there[i] = lanes.has(first + i);
  for (uint step = 1; step < count; step *= 2)
    for (uint i = 0; i + step < count; i += 2 * step)
      if (there[i + step]) values[i] = there[i] ? f(values[i], values[i + step]) : values[i + step], there[i] = true;
  return values[0];
}

#define MT_FOLD(name, expression)                                                                     \
  template <class T> METAL_FUNC T simd_##name(T x, MT_LINE) {                                         \
    return fold_lanes(x, [](T a, T b) -> T { return T(expression); }, line);                          \
  }                                                                                                   \
  template <class T> METAL_FUNC T quad_##name(T x, MT_LINE) {                                         \
    return fold_lanes(x, [](T a, T b) -> T { return T(expression); }, line, mt::mt_thread->lane & ~3u, 4);   \
  }
MT_FOLD(sum, a + b) MT_FOLD(product, a *b) MT_FOLD(max, metal::max(a, b)) MT_FOLD(min, metal::min(a, b))
MT_FOLD(and, a &b) MT_FOLD(or, a | b) MT_FOLD(xor, a ^ b)
#undef MT_FOLD

template <class T> METAL_FUNC T simd_prefix_inclusive_sum(T x, MT_LINE) {
  Lanes<T> lanes(mt::REDUCTION, x, line);
  T sum = T(0);
  for (uint i = 0; i <= mt::mt_thread->lane; ++i) if (lanes.has(i)) sum = T(sum + lanes[i]);
  return sum;
}
template <class T> METAL_FUNC T simd_prefix_exclusive_sum(T x, MT_LINE) {
  Lanes<T> lanes(mt::REDUCTION, x, line);
  T sum = T(0);
  for (uint i = 0; i < mt::mt_thread->lane; ++i) if (lanes.has(i)) sum = T(sum + lanes[i]);
  return sum;
}

template <class T> METAL_FUNC T shuffle_lanes(T x, uint from, bool defined, int line) {
  Lanes<T> lanes(mt::SHUFFLE, x, line);
  if (defined && !lanes.has(from)) mt::mt_report(mt::INACTIVE_LANE, line, from);
  return lanes.at(from);
}
// Shuffles up and down past the ends return an undefined value, which is not an error.
template <class T> METAL_FUNC T simd_shuffle(T x, ushort lane, MT_LINE) { return shuffle_lanes(x, lane, true, line); }
template <class T> METAL_FUNC T simd_broadcast(T x, ushort lane, MT_LINE) { return shuffle_lanes(x, lane, true, line); }
template <class T> METAL_FUNC T simd_shuffle_xor(T x, ushort mask, MT_LINE) {
  return shuffle_lanes(x, mt::mt_thread->lane ^ mask, true, line);
}
template <class T> METAL_FUNC T simd_shuffle_up(T x, ushort n, MT_LINE) {
  return shuffle_lanes(x, mt::mt_thread->lane - n, false, line);
}
template <class T> METAL_FUNC T simd_shuffle_down(T x, ushort n, MT_LINE) {
  return shuffle_lanes(x, mt::mt_thread->lane + n, false, line);
}
template <class T> METAL_FUNC T simd_shuffle_rotate_up(T x, ushort n, MT_LINE) {
  return shuffle_lanes(x, (mt::mt_thread->lane - n) % mt::LANES, true, line);
}
template <class T> METAL_FUNC T simd_shuffle_rotate_down(T x, ushort n, MT_LINE) {
  return shuffle_lanes(x, (mt::mt_thread->lane + n) % mt::LANES, true, line);
}
template <class T> METAL_FUNC T simd_broadcast_first(T x, MT_LINE) {
  Lanes<T> lanes(mt::SHUFFLE, x, line);
  return lanes[__builtin_ctz(lanes.active)];
}
template <class T> METAL_FUNC T quad_shuffle(T x, ushort lane, MT_LINE) {
  return shuffle_lanes(x, (mt::mt_thread->lane & ~3u) + lane, true, line);
}
template <class T> METAL_FUNC T quad_broadcast(T x, ushort lane, MT_LINE) { return quad_shuffle(x, lane, line); }
template <class T> METAL_FUNC T quad_shuffle_xor(T x, ushort mask, MT_LINE) {
  return shuffle_lanes(x, mt::mt_thread->lane ^ mask, true, line);
}

struct simd_vote {
  typedef ulong vote_t;
  ulong bits, whole;
  explicit operator vote_t() const { return bits; }
  bool any() const { return bits; }
  bool all() const { return bits == whole; }
};
METAL_FUNC simd_vote simd_ballot(bool x, MT_LINE) {
  Lanes<bool> lanes(mt::REDUCTION, x, line);
  ulong bits = 0;
  for (uint i = 0; i < mt::LANES; ++i) if (lanes.has(i) && lanes[i]) bits |= 1ul << i;
  return {bits, lanes.active};
}
METAL_FUNC bool simd_any(bool x, MT_LINE) { return simd_ballot(x, line).any(); }
METAL_FUNC bool simd_all(bool x, MT_LINE) { return simd_ballot(x, line).all(); }
METAL_FUNC simd_vote simd_active_threads_mask(MT_LINE) { return simd_ballot(true, line); }
METAL_FUNC bool simd_is_first(MT_LINE) {
  Lanes<bool> lanes(mt::REDUCTION, true, line);
  return uint(__builtin_ctz(lanes.active)) == mt::mt_thread->lane;
}

// ---- matrices --------------------------------------------------------------------------------------------------------

// The two adjacent elements of a row that each lane holds, as on Apple GPUs.
METAL_FUNC uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_FUNC uint matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <class T, int Columns = 8, int Rows = Columns> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8 by 8");
  static_assert(is_floating_point_v<T>, "simdgroup matrices hold float, half or bfloat");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) : elements(T(0)) {
    uint lane = mt::mt_thread->lane, row = matrix_row(lane), column = matrix_column(lane);
    if (row / 2 == column / 2) elements[row % 2] = diagonal;
  }
  vec<T, 2> &thread_elements() { return elements; }
  const vec<T, 2> &thread_elements() const { return elements; }
};

template <class T, int Columns = 8, int Rows = Columns>
METAL_FUNC simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> out;
  out.elements = value;
  return out;
}

METAL_FUNC ulong matrix_offset(ulong per_row, ulong2 origin, bool transposed, int i) {
  ulong row = matrix_row(mt::mt_thread->lane), column = matrix_column(mt::mt_thread->lane) + i;
  if (transposed) { ulong other = row; row = column, column = other; }
  return (origin.y + row) * per_row + origin.x + column;
}
template <class T, class P>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8> &out, P source, ulong per_row = 8, ulong2 origin = 0,
                               bool transposed = false) {
  for (int i = 0; i < 2; ++i) out.elements[i] = T(source[matrix_offset(per_row, origin, transposed, i)]);
}
template <class T, class P>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8> &from, P target, ulong per_row = 8, ulong2 origin = 0,
                                bool transposed = false) {
  for (int i = 0; i < 2; ++i) target[matrix_offset(per_row, origin, transposed, i)] = from.elements[i];
}

struct MatrixParts { float a[2], b[2]; };

template <class D, class A, class B>
inline void multiply_lanes(simdgroup_matrix<D, 8, 8> &out, const simdgroup_matrix<A, 8, 8> &a,
                           const simdgroup_matrix<B, 8, 8> &b, vec<float, 2> sum, int line) {
  MatrixParts mine = {{float(a.elements[0]), float(a.elements[1])}, {float(b.elements[0]), float(b.elements[1])}};
  Lanes<MatrixParts> lanes(mt::MULTIPLY, mine, line);
  uint row = matrix_row(mt::mt_thread->lane), column = matrix_column(mt::mt_thread->lane);
  const auto lane_at = [](uint r, uint c) { return (r & 4) * 4 + (c & 4) * 2 + (r & 3) * 2 + (c >> 1 & 1); };
  const auto parts = [&](uint lane) { return (const MatrixParts *)(lanes.slots + lane * mt::SLOT_BYTES); };
  for (uint k = 0; k < 8; ++k) {
    float left = parts(lane_at(row, k))->a[k & 1];
    const MatrixParts *right = parts(lane_at(k, column));
    for (int i = 0; i < 2; ++i) sum[i] = __builtin_fmaf(left, right->b[i], sum[i]);
  }
  for (int i = 0; i < 2; ++i) out.elements[i] = D(sum[i]);
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &out, const simdgroup_matrix<A, 8, 8> &a,
                                              const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c,
                                              MT_LINE) {
  multiply_lanes(out, a, b, vec<float, 2>(float(c.elements[0]), float(c.elements[1])), line);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &out, const simdgroup_matrix<A, 8, 8> &a,
                                   const simdgroup_matrix<B, 8, 8> &b, MT_LINE) {
  multiply_lanes(out, a, b, vec<float, 2>(0.0f), line);
}

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// ---- atomics ---------------------------------------------------------------------------------------------------------

enum memory_order { memory_order_relaxed };

template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

// One OS thread runs everything, so a load and a store are atomic together; the runtime counts them once.
template <class T, class F> inline T change(const volatile atomic<T> *object, int line, F f) {
  mt::mt_atomic((const void *)object, sizeof(T), line);
  T old;
  mt::mt_copy(&old, (const void *)object, sizeof(T));
  T now = T(f(old));
  mt::mt_copy((void *)object, &now, sizeof(T));
  return old;
}

#define MT_ATOMIC(name, expression)                                                                          \
  template <class T, class U>                                                                                \
  METAL_FUNC T atomic_##name##_explicit(volatile atomic<T> *object, U x, memory_order, MT_LINE) {            \
    T b = T(x);                                                                                              \
    return change(object, line, [b](T a) { return expression; });                                            \
  }
MT_ATOMIC(fetch_add, a + b) MT_ATOMIC(fetch_sub, a - b) MT_ATOMIC(fetch_and, a &b) MT_ATOMIC(fetch_or, a | b)
MT_ATOMIC(fetch_xor, a ^ b) MT_ATOMIC(fetch_max, a < b ? b : a) MT_ATOMIC(fetch_min, b < a ? b : a)
MT_ATOMIC(exchange, b) MT_ATOMIC(store, b)
#undef MT_ATOMIC
template <class T> METAL_FUNC T atomic_load_explicit(const volatile atomic<T> *object, memory_order, MT_LINE) {
  return change(object, line, [](T a) { return a; });
}
template <class T>
METAL_FUNC bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *object, T *expected, T desired, memory_order,
                                                      memory_order, MT_LINE) {
  T wanted = *expected;
  *expected = change(object, line, [=](T a) { return a == wanted ? desired : a; });
  return *expected == wanted;
}

}  // namespace metal
