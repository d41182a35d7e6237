// Metal's scalar and vector types and its type traits, in C++20. Address spaces are not types here: the same code is used
// for all of them, and the runtime distinguishes them by address.
#pragma once
#include "abi.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define MAXFLOAT FLT_MAX
#define HALF_MAX half(65504.0f)
#define MAXHALF half(65504.0f)
#define HALF_MIN half(6.103515625e-05f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159274101257f
#define M_E_F 2.71828174591064f
#define M_LN2_F 0.693147182464600f
#define M_LN10_F 2.30258512496948f
#define M_LOG2E_F 1.44269502162933f
#define M_LOG10E_F 0.434294492006302f
#define M_SQRT2_F 1.41421353816986f


namespace metal {

// ---- traits ----------------------------------------------------------------------------------------------------------

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_const_t = __remove_const(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using decay_t = __decay(T);
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> using make_signed_t = __make_signed(T);
template <class T> struct remove_cv { using type = remove_cv_t<T>; };
template <class T> struct remove_reference { using type = remove_reference_t<T>; };
template <class A, class B> inline constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> inline constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T> inline constexpr bool is_floating_point_v =
    is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> || is_same_v<remove_cv_t<T>, bfloat> ||
    is_same_v<remove_cv_t<T>, double>;
template <class T> inline constexpr bool is_integral_v = __is_integral(T);
template <class T> inline constexpr bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <class T> inline constexpr bool is_signed_v = is_floating_point_v<T> || __is_signed(T);
template <class T> inline constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T> inline constexpr bool is_pointer_v = __is_pointer(T);
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T> concept Scalar = is_arithmetic_v<T> || __is_enum(T);

template <class T> struct numeric_limits {
  static constexpr T max() { return is_signed_v<T> ? T((1ul << (8 * sizeof(T) - 1)) - 1) : T(~T(0)); }
  static constexpr T lowest() { return is_signed_v<T> ? T(-max() - 1) : T(0); }
  static constexpr T min() { return lowest(); }
};
template <class T, int largest_high, int least_log2, int epsilon_log2> struct floating_limits {
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
  static constexpr T power(int n) { float x = 1; for (; n < 0; ++n) x /= 2; for (; n > 0; --n) x *= 2; return T(x); }
  static constexpr T epsilon() { return power(epsilon_log2); }
  static constexpr T min() { return power(least_log2); }
  static constexpr T max() { return T((2.0f - float(epsilon())) * float(power(largest_high))); }
  static constexpr T lowest() { return T(-max()); }
};
template <> struct numeric_limits<float> : floating_limits<float, 127, -126, -23> {};
template <> struct numeric_limits<half> : floating_limits<half, 15, -14, -10> {};
template <> struct numeric_limits<bfloat> : floating_limits<bfloat, 127, -126, -7> {};

// ---- vectors ---------------------------------------------------------------------------------------------------------

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;
template <class T, int... I> struct swizzle;

template <class A> struct shape_of { static constexpr int length = 0; using element = A; };
template <class T, int N> struct shape_of<vec<T, N>> { static constexpr int length = N; using element = T; };
template <class T, int N> struct shape_of<packed_vec<T, N>> { static constexpr int length = N; using element = T; };
template <class T, int... I> struct shape_of<swizzle<T, I...>> {
  static constexpr int length = sizeof...(I);
  using element = T;
};
template <class A> inline constexpr int length_of = shape_of<remove_cv_t<remove_reference_t<A>>>::length;
template <class A> using element_of = typename shape_of<remove_cv_t<remove_reference_t<A>>>::element;
template <class A> concept Vector = length_of<A> > 0;
template <class A> concept Part = Scalar<A> || Vector<A>;

template <class A> constexpr auto part(const A &a, int i) {
  if constexpr (Vector<A>) return element_of<A>(a[i]);
  else return a;
}

// A swizzle of a vector: reads as a vector, and writes to its components.
template <class T, int... I> struct swizzle {
  T *at;
  static constexpr int places[] = {I...};
  constexpr T operator[](int i) const { return at[places[i]]; }
  constexpr operator vec<T, sizeof...(I)>() const { return vec<T, sizeof...(I)>(at[I]...); }
  template <class A> constexpr void operator=(const A &a) {
    vec<T, sizeof...(I)> from(a);
    for (int i = 0; i < int(sizeof...(I)); ++i) at[places[i]] = from[i];
  }
  constexpr void operator=(const swizzle &a) { *this = vec<T, sizeof...(I)>(a); }
  template <class A> constexpr void operator+=(const A &a) { *this = *this + a; }
  template <class A> constexpr void operator-=(const A &a) { *this = *this - a; }
  template <class A> constexpr void operator*=(const A &a) { *this = *this * a; }
  template <class A> constexpr void operator/=(const A &a) { *this = *this / a; }
};

#define MT_VECTOR_BODY(N)                                                                                         \
  constexpr vec() = default;                                                                                      \
  template <Scalar S> constexpr vec(S s) { for (int i = 0; i < N; ++i) (*this)[i] = T(s); }                       \
  template <Vector A> requires (length_of<A> == N && !is_same_v<A, vec>)                                          \
  explicit((!is_same_v<element_of<A>, T>)) constexpr vec(const A &a) {                                              \
    for (int i = 0; i < N; ++i) (*this)[i] = T(a[i]);                                                             \
  }                                                                                                               \
  template <Part A, Part B, Part... C>                                                                            \
  requires ((length_of<A> ? length_of<A> : 1) + (length_of<B> ? length_of<B> : 1) +                               \
            (0 + ... + (length_of<C> ? length_of<C> : 1)) == N)                                                   \
  constexpr vec(const A &a, const B &b, const C &...c) { int i = 0; put(i, a), put(i, b), (put(i, c), ...); }     \
  template <class A> constexpr void put(int &i, const A &a) {                                                     \
    if constexpr (Scalar<A>) (*this)[i++] = T(a);                                                                 \
    else for (int j = 0; j < length_of<A>; ++j) (*this)[i++] = T(a[j]);                                           \
  }                                                                                                               \
  constexpr T &operator[](int i) { return (&x)[i]; }                                                              \
  constexpr const T &operator[](int i) const { return (&x)[i]; }                                                  \
  template <int... I> constexpr swizzle<T, I...> mt_swizzle() { return {&x}; }                                    \
  template <int... I> constexpr vec<T, sizeof...(I)> mt_swizzle() const { return vec<T, sizeof...(I)>((&x)[I]...); }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union { struct { T x, y; }; struct { T r, g; }; };
  MT_VECTOR_BODY(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union { struct { T x, y, z; }; struct { T r, g, b; }; };
  MT_VECTOR_BODY(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union { struct { T x, y, z, w; }; struct { T r, g, b, a; }; };
  MT_VECTOR_BODY(4)
};

template <class T, int N> struct packed_vec {
  T items[N];
  constexpr packed_vec() = default;
  template <Part A> constexpr packed_vec(const A &a) { for (int i = 0; i < N; ++i) items[i] = T(part(a, i)); }
  constexpr T &operator[](int i) { return items[i]; }
  constexpr const T &operator[](int i) const { return items[i]; }
};

template <class A, class B> inline constexpr int common_length = length_of<A> ? length_of<A> : length_of<B>;
template <class A, class B> using common_element = conditional_t<(length_of<A> > 0), element_of<A>, element_of<B>>;

// An operator on vectors, or on a vector and a scalar, which takes the vector's element type as in Metal.
#define MT_OPERATOR(op)                                                                                 \
  template <Part A, Part B> requires (Vector<A> || Vector<B>)                                           \
  constexpr auto operator op(const A &a, const B &b) {                                                  \
    using T = common_element<A, B>;                                                                     \
    vec<T, common_length<A, B>> out;                                                                    \
    for (int i = 0; i < common_length<A, B>; ++i) out[i] = T(T(part(a, i)) op T(part(b, i)));           \
    return out;                                                                                         \
  }                                                                                                     \
  template <class T, int N, Part B> constexpr vec<T, N> &operator op##=(vec<T, N> &a, const B &b) {     \
    return a = a op b;                                                                                  \
  }
#define MT_COMPARISON(op)                                                                               \
  template <Part A, Part B> requires (Vector<A> || Vector<B>)                                           \
  constexpr auto operator op(const A &a, const B &b) {                                                  \
    using T = common_element<A, B>;                                                                     \
    vec<bool, common_length<A, B>> out;                                                                 \
    for (int i = 0; i < common_length<A, B>; ++i) out[i] = T(part(a, i)) op T(part(b, i));              \
    return out;                                                                                         \
  }
MT_OPERATOR(+) MT_OPERATOR(-) MT_OPERATOR(*) MT_OPERATOR(/) MT_OPERATOR(%) MT_OPERATOR(&) MT_OPERATOR(|) MT_OPERATOR(^)
MT_OPERATOR(<<) MT_OPERATOR(>>)
MT_COMPARISON(==) MT_COMPARISON(!=) MT_COMPARISON(<) MT_COMPARISON(>) MT_COMPARISON(<=) MT_COMPARISON(>=)
MT_COMPARISON(&&) MT_COMPARISON(||)
#undef MT_OPERATOR
#undef MT_COMPARISON

template <Vector A> constexpr auto operator-(const A &a) { return vec<element_of<A>, length_of<A>>(element_of<A>(0)) - a; }
template <Vector A> constexpr auto operator!(const A &a) { return a == vec<element_of<A>, length_of<A>>(element_of<A>(0)); }
template <Vector A> constexpr auto operator~(const A &a) { return a ^ element_of<A>(-1); }

template <class To, class From> METAL_FUNC constexpr To as_type(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}

}  // namespace metal

#define MT_NAMES(name, T)                                                                             \
  typedef metal::vec<T, 2> name##2;                                                                   \
  typedef metal::vec<T, 3> name##3;                                                                   \
  typedef metal::vec<T, 4> name##4;                                                                   \
  typedef metal::packed_vec<T, 2> packed_##name##2;                                                   \
  typedef metal::packed_vec<T, 3> packed_##name##3;                                                   \
  typedef metal::packed_vec<T, 4> packed_##name##4;
MT_NAMES(bool, bool) MT_NAMES(char, signed char) MT_NAMES(uchar, uchar) MT_NAMES(short, short) MT_NAMES(ushort, ushort)
MT_NAMES(int, int) MT_NAMES(uint, uint) MT_NAMES(long, long) MT_NAMES(ulong, ulong) MT_NAMES(half, half)
MT_NAMES(float, float) MT_NAMES(bfloat, bfloat)
#undef MT_NAMES
