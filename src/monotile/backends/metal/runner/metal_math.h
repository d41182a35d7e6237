// Metal's mathematical functions on scalars and vectors. `fast` and `precise` are the same functions here, except
// for tanh: findings must not depend on how a GPU rounds.
#pragma once
#include "metal_types.h"

namespace metal {

namespace fast = ::metal;

template <class T> using float_for = conditional_t<is_floating_point_v<T>, T, float>;

// A function of one argument. Transcendental functions are computed in double, to be the same on every machine.
#define MT_UNARY(name, expression)                                                     \
  template <Scalar T> METAL_FUNC float_for<T> name(T a) {                              \
    float x = float(a);                                                                \
    return float_for<T>(expression);                                                   \
  }                                                                                    \
  template <Vector A> METAL_FUNC auto name(const A &a) {                               \
    vec<element_of<A>, length_of<A>> out;                                              \
    for (int i = 0; i < length_of<A>; ++i) out[i] = name(element_of<A>(a[i]));         \
    return out;                                                                        \
  }
MT_UNARY(exp, (mt::mt_count(mt::EXPONENTIALS, 1), __builtin_exp(x)))
MT_UNARY(exp2, (mt::mt_count(mt::EXPONENTIALS, 1), __builtin_exp2(x)))
MT_UNARY(exp10, (mt::mt_count(mt::EXPONENTIALS, 1), __builtin_pow(10.0, x)))
MT_UNARY(log, __builtin_log(x)) MT_UNARY(log2, __builtin_log2(x)) MT_UNARY(log10, __builtin_log10(x))
MT_UNARY(sin, __builtin_sin(x)) MT_UNARY(cos, __builtin_cos(x)) MT_UNARY(tan, __builtin_tan(x))
MT_UNARY(sinh, __builtin_sinh(x)) MT_UNARY(cosh, __builtin_cosh(x))
MT_UNARY(asin, __builtin_asin(x)) MT_UNARY(acos, __builtin_acos(x)) MT_UNARY(atan, __builtin_atan(x))
MT_UNARY(asinh, __builtin_asinh(x)) MT_UNARY(acosh, __builtin_acosh(x)) MT_UNARY(atanh, __builtin_atanh(x))
MT_UNARY(sqrt, __builtin_sqrtf(x)) MT_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) MT_UNARY(fabs, __builtin_fabsf(x))
MT_UNARY(floor, __builtin_floorf(x)) MT_UNARY(ceil, __builtin_ceilf(x)) MT_UNARY(round, __builtin_roundf(x))
MT_UNARY(rint, __builtin_rintf(x)) MT_UNARY(trunc, __builtin_truncf(x)) MT_UNARY(fract, x - __builtin_floorf(x))
MT_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MT_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
// Metal's fast tanh is a quotient of exponentials, which overflow above 44.
#ifdef __FAST_MATH__
MT_UNARY(tanh, ({ float e = float(__builtin_exp(2.0 * x)); (e - 1.0f) / (e + 1.0f); }))
namespace precise {
using namespace ::metal;
MT_UNARY(tanh, __builtin_tanh(x))
}
#else
MT_UNARY(tanh, __builtin_tanh(x))
namespace precise = ::metal;
#endif
#undef MT_UNARY

#define MT_PREDICATE(name, expression)                                                 \
  template <Scalar T> METAL_FUNC bool name(T a) {                                      \
    float x = float(a);                                                                \
    return expression;                                                                 \
  }                                                                                    \
  template <Vector A> METAL_FUNC auto name(const A &a) {                               \
    vec<bool, length_of<A>> out;                                                       \
    for (int i = 0; i < length_of<A>; ++i) out[i] = name(element_of<A>(a[i]));         \
    return out;                                                                        \
  }
MT_PREDICATE(isnan, __builtin_isnan(x)) MT_PREDICATE(isinf, __builtin_isinf(x))
MT_PREDICATE(isfinite, __builtin_isfinite(x)) MT_PREDICATE(signbit, __builtin_signbit(x))
#undef MT_PREDICATE

template <class A, class B> using result_of = decltype(A() + B());

// A function of two arguments; a vector and a scalar are combined element by element.
#define MT_BINARY(name, integers, floats)                                                                        \
  template <Scalar A, Scalar B> METAL_FUNC auto name(A left, B right) {                                          \
    if constexpr (is_integral_v<A> && is_integral_v<B>) {                                                        \
      using T = conditional_t<is_same_v<A, B>, A, result_of<A, B>>;                                              \
      T a = T(left), b = T(right);                                                                               \
      return T(integers);                                                                                        \
    } else {                                                                                                     \
      using T = conditional_t<is_integral_v<A>, B, conditional_t<is_integral_v<B>, A, result_of<A, B>>>;         \
      float a = float(left), b = float(right);                                                                   \
      return T(floats);                                                                                          \
    }                                                                                                            \
  }                                                                                                              \
  template <Part A, Part B> requires (Vector<A> || Vector<B>) METAL_FUNC auto name(const A &a, const B &b) {     \
    using T = common_element<A, B>;                                                                              \
    vec<T, common_length<A, B>> out;                                                                             \
    for (int i = 0; i < common_length<A, B>; ++i) out[i] = name(T(part(a, i)), T(part(b, i)));                   \
    return out;                                                                                                  \
  }
MT_BINARY(min, b < a ? b : a, __builtin_fminf(a, b))
MT_BINARY(max, a < b ? b : a, __builtin_fmaxf(a, b))
MT_BINARY(fmin, b < a ? b : a, __builtin_fminf(a, b))
MT_BINARY(fmax, a < b ? b : a, __builtin_fmaxf(a, b))
MT_BINARY(pow, __builtin_powf(a, b), __builtin_powf(a, b))
MT_BINARY(powr, __builtin_powf(a, b), __builtin_powf(a, b))
MT_BINARY(fmod, a % b, __builtin_fmodf(a, b))
MT_BINARY(atan2, __builtin_atan2f(a, b), __builtin_atan2f(a, b))
MT_BINARY(copysign, b < 0 ? -a : a, __builtin_copysignf(a, b))
MT_BINARY(fdim, a > b ? a - b : 0, __builtin_fdimf(a, b))
MT_BINARY(step, b < a ? 0 : 1, b < a ? 0.0f : 1.0f)
#undef MT_BINARY

template <Scalar T> METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : is_floating_point_v<T> && x == T(0) ? T(0) : x; }
template <Vector A> METAL_FUNC auto abs(const A &a) {
  vec<element_of<A>, length_of<A>> out;
  for (int i = 0; i < length_of<A>; ++i) out[i] = abs(element_of<A>(a[i]));
  return out;
}
template <Part A, Part B, Part C> METAL_FUNC auto clamp(const A &x, const B &low, const C &high) {
  return min(max(x, low), high);
}
template <Part A, Part B, Part C> METAL_FUNC auto mix(const A &x, const B &y, const C &t) { return x + (y - x) * t; }
template <Part A, Part B, Part C> METAL_FUNC auto smoothstep(const A &low, const B &high, const C &x) {
  auto t = saturate((x - low) / (high - low));
  return t * t * (3 - 2 * t);
}
template <Scalar T> METAL_FUNC T fma(T a, T b, T c) { return T(__builtin_fmaf(float(a), float(b), float(c))); }
template <Vector A, Part B, Part C> METAL_FUNC auto fma(const A &a, const B &b, const C &c) {
  using T = element_of<A>;
  vec<T, length_of<A>> out;
  for (int i = 0; i < length_of<A>; ++i) out[i] = fma(T(a[i]), T(part(b, i)), T(part(c, i)));
  return out;
}
template <Scalar T> METAL_FUNC T ldexp(T x, int n) { return T(__builtin_ldexpf(float(x), n)); }
template <Scalar T> METAL_FUNC T select(T no, T yes, bool c) { return c ? yes : no; }
template <class T, int N> METAL_FUNC vec<T, N> select(vec<T, N> no, vec<T, N> yes, vec<bool, N> c) {
  for (int i = 0; i < N; ++i) no[i] = c[i] ? yes[i] : no[i];
  return no;
}
template <int N> METAL_FUNC bool any(vec<bool, N> a) { for (int i = 0; i < N; ++i) if (a[i]) return true; return false; }
template <int N> METAL_FUNC bool all(vec<bool, N> a) { for (int i = 0; i < N; ++i) if (!a[i]) return false; return true; }
METAL_FUNC bool any(bool a) { return a; }
METAL_FUNC bool all(bool a) { return a; }

template <Vector A, Vector B> METAL_FUNC auto dot(const A &a, const B &b) {
  element_of<A> sum = a[0] * b[0];
  for (int i = 1; i < length_of<A>; ++i) sum += a[i] * b[i];
  return sum;
}
template <Vector A> METAL_FUNC auto length_squared(const A &a) { return dot(a, a); }
template <Vector A> METAL_FUNC auto length(const A &a) { return sqrt(dot(a, a)); }
template <Vector A, Vector B> METAL_FUNC auto distance(const A &a, const B &b) { return length(a - b); }
template <Vector A> METAL_FUNC auto normalize(const A &a) { return a * rsqrt(dot(a, a)); }
template <class T> METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

template <Scalar T> METAL_FUNC T popcount(T x) { return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T))))); }
template <Scalar T> METAL_FUNC T clz(T x) {
  ulong wide = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));
  return T(wide ? __builtin_clzl(wide) - (64 - 8 * sizeof(T)) : 8 * sizeof(T));
}
template <Scalar T> METAL_FUNC T ctz(T x) { return T(x ? __builtin_ctzl(ulong(x)) : 8 * sizeof(T)); }
template <Scalar T> METAL_FUNC T mulhi(T a, T b) {
  if constexpr (is_signed_v<T>) return T((__int128)a * b >> (8 * sizeof(T)));
  else return T((unsigned __int128)a * b >> (8 * sizeof(T)));
}
template <Scalar T> METAL_FUNC T rotate(T x, T n) {
  constexpr int bits = 8 * sizeof(T);
  return T(x << (n % bits) | x >> ((bits - n % bits) % bits));
}

}  // namespace metal
