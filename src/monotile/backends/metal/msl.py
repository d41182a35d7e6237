"""Helper functions of the generated Metal Shading Language."""

from __future__ import annotations

from ..polynomials import ERF_NEAR, ERFC_EXPONENT

# bfloat16 before Metal 3.1: its bits in memory, its value as a float in registers.
BFLOAT_BITS = """METAL_FUNC float widened(ushort bits) { return as_type<float>(uint(bits) << 16); }
METAL_FUNC ushort narrowed(float x) {
  const uint bits = as_type<uint>(x);
  return bits << 1 > 0xFF000000u ? ushort(bits >> 16 | 64) : ushort((bits + 32767 + (bits >> 16 & 1)) >> 16);
}
METAL_FUNC float rounded(float x) { return widened(narrowed(x)); }"""

# The overload of `from_lane` for the type that Metal has from 3.1 on.
BFLOAT_FROM_LANE = (
    "METAL_FUNC bfloat from_lane(bfloat x, int lane) { return bfloat(simd_shuffle(float(x), ushort(lane))); }\n"
)

UINT_OVERLOADS = {
    "shuffle_xor": "\nMETAL_FUNC uint shuffle_xor(uint x, ushort mask) { return simd_shuffle_xor(x, mask); }",
    "from_lane": "\nMETAL_FUNC uint from_lane(uint x, int lane) { return simd_shuffle(x, ushort(lane)); }",
}

# The two fp8 formats. Subnormal float32 numbers, which a GPU takes for zero, are avoided.
FP8_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def _narrowed(name: str, mantissa: int, bias: int, greatest: int, beyond: int, nan: int) -> str:
    """Return the function that rounds to an fp8 format, ties to even: normal numbers by their bits, smaller ones, whose
    codes are equal steps, by adding a number of that precision."""
    drop, magic = 23 - mantissa, 2.0 ** (24 - bias - mantissa)
    return f"""METAL_FUNC uchar narrowed_{name}(float x) {{
  const uint bits = as_type<uint>(x), size = bits & 0x7FFFFFFFu, sign = bits >> 24 & 128u;
  if (size > 0x7F800000u) return uchar({nan}u | sign);
  uint code = ((size + (size >> {drop} & 1u) + {2 ** (drop - 1) - 1}u) >> {drop}) - {(127 - bias) << mantissa}u;
  const uint small = as_type<uint>(as_type<float>(size) + {magic}f) - {(151 - bias - mantissa) << 23}u;
  if (size < {(128 - bias) << 23}u) code = small;
  return uchar((code > {greatest}u ? {beyond}u : code) | sign);
}}"""


# Reduce 32 partial sums over 32 lanes by recursive halving; lane n returns sum n. 31 shuffles. Every stage has constant
# bounds, so that the parts stay in registers.
_SUMS_OVER_LANES = "\n".join(
    [
        "METAL_FUNC float sums_over_lanes(thread float *parts, int lane) {",
        *(
            f"""  UNROLL for (int n = 0; n < {half}; ++n) {{
    const bool upper = (lane & {half}) != 0;
    const float other = simd_shuffle_xor(upper ? parts[n] : parts[n + {half}], ushort({half}));
    parts[n] = (upper ? parts[n + {half}] : parts[n]) + other;
  }}"""
            for half in (16, 8, 4, 2, 1)
        ),
        "  return parts[0];\n}",
    ]
)


def _horner(coefficients: tuple[float, ...], name: str) -> str:
    """Return a polynomial of a variable by Horner's rule; the coefficients begin with the constant term."""
    *rest, text = (f"{c!r}f" for c in coefficients)
    for coefficient in reversed(rest):
        text = f"fma({text}, {name}, {coefficient})"
    return text


HELPERS = {
    # Comparisons with the infinities and the numbers that stand for them. Fast math leaves bits alone.
    "is_lowest": "METAL_FUNC bool is_lowest(uint bits) { return bits - 0xFF7FFFFFu < 2u; }",
    "is_highest": "METAL_FUNC bool is_highest(uint bits) { return bits - 0x7F7FFFFFu < 2u; }",
    "with_lowest": "METAL_FUNC uint with_lowest(uint bits) { return bits == 0xFF7FFFFFu ? bits + 1 : bits; }",
    "with_highest": "METAL_FUNC uint with_highest(uint bits) { return bits == 0x7F7FFFFFu ? bits + 1 : bits; }",
    "with_infinities": """METAL_FUNC uint with_infinities(uint bits) {
  return bits << 1 == 0xFEFFFFFEu ? bits + 1 : bits;
}""",
    "floordiv": """template <typename T> METAL_FUNC T floordiv(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return as_type<T>(0 - as_type<make_unsigned_t<T>>(a));
  return a / b - T(a % b != 0 && (a < 0) != (b < 0));
}""",
    "floormod": """template <typename T> METAL_FUNC T floormod(T a, T b) {
  if (b == 0 || b == -1) return 0;
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : T(0));
}""",
    # Float to integer: truncates, saturates at the limits of the type, and maps NaN to 0.
    "saturated": """template <typename T> METAL_FUNC T saturated(float x, float low, float high, T least, T most) {
  return as_type<uint>(x) << 1 > 0xFF000000u ? T(0) : x <= low ? least : x >= high ? most : T(x);
}""",
    "logistic": """METAL_FUNC float logistic(float x) {
  const float e = exp(-fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}""",
    # A polynomial up to 1, and 1 - erfc(x) from there, where erfc(x) is the exponential of a polynomial.
    "error_function": f"""METAL_FUNC float error_function(float x) {{
  const float size = fabs(x), square = size * size;
  const float near = fma(x, {_horner(ERF_NEAR, "square")}, x), held = size < 4.0f ? size : 4.0f;
  const float far = 1.0f - exp(-{_horner(ERFC_EXPONENT, "held")});
  return size < 1.0f ? near : size >= 1.0f ? copysign(far, x) : x;
}}""",
    "shuffle_xor": """METAL_FUNC float shuffle_xor(float x, ushort mask) { return simd_shuffle_xor(x, mask); }
METAL_FUNC int shuffle_xor(int x, ushort mask) { return simd_shuffle_xor(x, mask); }
METAL_FUNC bool shuffle_xor(bool x, ushort mask) { return simd_shuffle_xor(ushort(x), mask) != 0; }
METAL_FUNC long shuffle_xor(long x, ushort mask) { return as_type<long>(simd_shuffle_xor(as_type<int2>(x), mask)); }""",
    "from_lane": """METAL_FUNC float from_lane(float x, int lane) { return simd_shuffle(x, ushort(lane)); }
METAL_FUNC half from_lane(half x, int lane) { return simd_shuffle(x, ushort(lane)); }
{bfloat}METAL_FUNC int from_lane(int x, int lane) { return simd_shuffle(x, ushort(lane)); }
METAL_FUNC bool from_lane(bool x, int lane) { return simd_shuffle(ushort(x), ushort(lane)) != 0; }
METAL_FUNC long from_lane(long x, int lane) { return as_type<long>(simd_shuffle(as_type<int2>(x), ushort(lane))); }""",
    "load_matrix": """template <typename P>
METAL_FUNC void load_matrix(thread simdgroup_float8x8 &matrix, P source, long stride, int lane, bool transposed) {
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  UNROLL for (int e = 0; e < 2; ++e) {
    const long offset = transposed ? (column + e) * stride + row : row * stride + column + e;
    matrix.thread_elements()[e] = widened(source[offset]);
  }
}""",
    # A count out of range moves every bit out.
    "shifted_left": """template <typename T> METAL_FUNC T shifted_left(T a, T n) {
  return n >= 0 && n < T(8 * sizeof(T)) ? T(as_type<make_unsigned_t<T>>(a) << n) : T(0);
}""",
    "shifted_right": """template <typename T> METAL_FUNC T shifted_right(T a, T n) {
  return n >= 0 && n < T(8 * sizeof(T)) ? a >> n : a < 0 ? T(-1) : T(0);
}""",
    "widened_e4m3": """METAL_FUNC float widened_e4m3(uchar x) {
  const uint size = x & 127u, normal = (size << 20) + 0x3C000000u, least = as_type<uint>(float(size) * 0.001953125f);
  return as_type<float>((size == 127u ? 0x7FC00000u : size < 8u ? least : normal) | uint(x & 128u) << 24);
}""",
    "widened_e5m2": "METAL_FUNC float widened_e5m2(uchar x) { return float(as_type<half>(ushort(x << 8))); }",
    "narrowed_e4m3": _narrowed("e4m3", 3, 7, 0x7E, 0x7F, 0x7F),
    "narrowed_e5m2": _narrowed("e5m2", 2, 15, 0x7B, 0x7C, 0x7E),
    "sums_over_lanes": _SUMS_OVER_LANES,
}


def helper_source(name: str, *, bfloat: bool, uint: bool) -> str:
    """Return the text of a helper, with its overloads for `bfloat` and `uint` where they are asked for."""
    text = HELPERS[name].replace("{bfloat}", BFLOAT_FROM_LANE if bfloat else "")
    return text + UINT_OVERLOADS[name] if uint and name in UINT_OVERLOADS else text
