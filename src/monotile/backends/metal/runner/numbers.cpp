// Conversions that compiled code calls. They are in the compiler's runtime library, which is not linked.
#include <string.h>

typedef unsigned int u32;
typedef unsigned short u16;

static u32 bits_of(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static float float_of(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static u16 to_bfloat(float x) {
  u32 bits = bits_of(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (u16)(bits >> 16 | 0x40);  // NaN stays NaN
  return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static u16 to_half(float x) {
  u32 bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return (u16)(sign | 0x7E00);
  if (size >= 0x477FF000) return (u16)(sign | 0x7C00);  // 65520 and above round to infinity
  if (size < 0x38800000)                                // subnormal halves are multiples of 2^-24
    return (u16)(sign | (bits_of(float_of(size) + 0.5f) - 0x3F000000));
  return (u16)(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

static float from_half(u16 half) {
  u32 sign = (u32)(half & 0x8000) << 16, size = half & 0x7FFF;
  if (size >= 0x7C00) return float_of(sign | 0x7F800000 | (size & 0x3FF) << 13);
  if (size < 0x400) return float_of(sign | bits_of((float)size * 0x1p-24f));
  return float_of(sign | ((size << 13) + 0x38000000));
}

// Rounds to odd, so that the float rounds to the same half or bfloat as the double does.
static float to_odd(double x) {
  float near = (float)x;
  if ((double)near == x || x != x || __builtin_isinf(near)) return near;
  u32 bits = bits_of(near);
  bool above = near > 0 ? (double)near > x : (double)near < x;
  return float_of((above ? bits - 1 : bits) | 1);
}

template <class T>
static T as(u16 bits) {
  T x;
  memcpy(&x, &bits, 2);
  return x;
}

extern "C" {
__bf16 __truncsfbf2(float x) { return as<__bf16>(to_bfloat(x)); }
__bf16 __truncdfbf2(double x) { return as<__bf16>(to_bfloat(to_odd(x))); }
_Float16 __truncsfhf2(float x) { return as<_Float16>(to_half(x)); }
_Float16 __truncdfhf2(double x) { return as<_Float16>(to_half(to_odd(x))); }
float __extendhfsf2(_Float16 x) {
  u16 bits;
  memcpy(&bits, &x, 2);
  return from_half(bits);
}
}
