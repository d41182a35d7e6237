"""Scalars of the tile language as Metal text: types, numbers, elementwise operations."""

from __future__ import annotations

import math
import re

from ... import ir
from ...dtypes import DType
from ...errors import InternalError
from ...ir import Op, Value
from ...ir.intervals import is_exact

TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat",
    "int64": "long",
    "int32": "int",
    "int8": "char",
    "uint8": "uchar",
    "bool": "bool",
}
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "lt": "<", "le": "<=", "eq": "=="}
SYMBOLS |= {"ne": "!="}
UNSIGNED = {"int32": "uint", "int64": "ulong"}
POSITIONAL = ir.SHAPE_ONLY | {"const", "dim", "arange", "program_id", "add", "sub", "mul", "floordiv", "mod"}
POSITIONAL |= {"min", "max", "cast"}

# What a thread can ask of its position. MLX makes parameters of those that occur in a text.
POSITIONS = (
    "dispatch_quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "dispatch_threads_per_threadgroup",
    "grid_origin", "grid_size", "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "thread_execution_width",
    "thread_index_in_quadgroup", "thread_index_in_simdgroup", "thread_index_in_threadgroup", "thread_position_in_grid",
    "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid",
    "threads_per_simdgroup", "threads_per_threadgroup",
)  # fmt: skip

# Names that mean something in the text around an author's: they get an underscore more.
TAKEN = frozenset({
    "kernel", "device", "constant", "thread", "threadgroup", "half", "bfloat", "float", "int", "uint", "short",
    "ushort", "char", "uchar", "long", "ulong", "bool", "void", "auto", "const", "constexpr", "static", "struct",
    "union", "enum", "class", "template", "typename", "using", "namespace", "operator", "new", "delete", "this",
    "true", "false", "if", "else", "for", "while", "do", "switch", "case", "default", "break", "continue",
    "return", "goto", "sizeof", "alignas", "signed", "unsigned", "double", "volatile", "inline", "extern",
    "register", "friend", "public", "private", "protected", "virtual", "try", "catch", "throw", "vertex",
    "fragment", "main", "metal", "min", "max", "abs", "exp", "log", "select", "clamp", "dot", "sum", "step", "fma",
    "mix", "length", "sign", "fm", "fn", "sg", "lane", "tid", "gid", "meta", "room", "parts", "sums", "left",
    "right", "integers", "floats", "c", "e", "i", "j", "r", "u", "x", "kb", "ke", "kk", "k0", "sg_u", "lane_u",
    "floordiv", "floormod", "held", "shuffled", "from_lane", "sums_over_lanes", "widened", "narrowed",
    "rounded", "load_square", *POSITIONS, "and", "or", "not", "xor",
    "INFINITY", "UNROLL", "NAN",
})  # fmt: skip

# A bfloat where the language has none: its bits in memory, its value in registers.
BITS = """METAL_FUNC float widened(ushort bits) { return as_type<float>(uint(bits) << 16); }
METAL_FUNC ushort narrowed(float x) {
  const uint bits = as_type<uint>(x);
  return isnan(x) ? ushort(bits >> 16 | 64) : ushort((bits + 32767 + (bits >> 16 & 1)) >> 16);
}
METAL_FUNC float rounded(float x) { return widened(narrowed(x)); }"""

HELPERS = {
    "floordiv": """template <typename T> METAL_FUNC T floordiv(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return as_type<T>(0 - as_type<make_unsigned_t<T>>(a));
  return a / b - T(a % b != 0 && (a < 0) != (b < 0));
}""",
    "floormod": """template <typename T> METAL_FUNC T floormod(T a, T b) {
  if (b == 0 || b == -1) return 0;
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : T(0));
}""",
    # Towards zero, held at the ends of the type; NaN is 0.
    "held": """template <typename T> METAL_FUNC T held(float x, float low, float high, T least, T most) {
  return isnan(x) ? T(0) : x <= low ? least : x >= high ? most : T(x);
}""",
    "shuffled": """METAL_FUNC float shuffled(float x, ushort mask) { return simd_shuffle_xor(x, mask); }
METAL_FUNC int shuffled(int x, ushort mask) { return simd_shuffle_xor(x, mask); }
METAL_FUNC bool shuffled(bool x, ushort mask) { return simd_shuffle_xor(ushort(x), mask) != 0; }
METAL_FUNC long shuffled(long x, ushort mask) { return as_type<long>(simd_shuffle_xor(as_type<int2>(x), mask)); }""",
    "from_lane": """METAL_FUNC float from_lane(float x, int lane) { return simd_shuffle(x, ushort(lane)); }
METAL_FUNC half from_lane(half x, int lane) { return simd_shuffle(x, ushort(lane)); }
METAL_FUNC bfloat from_lane(bfloat x, int lane) { return bfloat(simd_shuffle(float(x), ushort(lane))); }
METAL_FUNC int from_lane(int x, int lane) { return simd_shuffle(x, ushort(lane)); }
METAL_FUNC bool from_lane(bool x, int lane) { return simd_shuffle(ushort(x), ushort(lane)) != 0; }
METAL_FUNC long from_lane(long x, int lane) { return as_type<long>(simd_shuffle(as_type<int2>(x), ushort(lane))); }""",
    "load_square": """template <typename P>
METAL_FUNC void load_square(thread simdgroup_float8x8 &square, P source, long stride, int lane, bool turned) {
  const int row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  UNROLL for (int e = 0; e < 2; ++e) {
    const long place = turned ? (column + e) * stride + row : row * stride + column + e;
    square.thread_elements()[e] = widened(source[place]);
  }
}""",
    # Halves the number of sums and doubles the lanes that make one, until each lane has its own.
    "sums_over_lanes": """METAL_FUNC float sums_over_lanes(thread float *parts, int lane) {
  UNROLL for (int half_ = 16; half_ > 0; half_ /= 2) {
    UNROLL for (int n = 0; n < half_; ++n) {
      const bool upper = (lane & half_) != 0;
      const float given = simd_shuffle_xor(upper ? parts[n] : parts[n + half_], ushort(half_));
      parts[n] = (upper ? parts[n + half_] : parts[n]) + given;
    }
  }
  return parts[0];
}""",
}


def without_bfloat(text: str) -> str:
    """A text in which registers hold the values of bfloats as floats."""
    lines = [line for line in text.splitlines() if not line.startswith("METAL_FUNC bfloat")]
    text = "\n".join(lines).replace("simdgroup_bfloat8x8", "simdgroup_float8x8")
    return re.sub(r"\bbfloat\b", "float", re.sub(r"\bbfloat\(", "rounded(", text))


def type_of(value: Value) -> str:
    return TYPES[value.dtype.name]


def number(value: bool | int | float, dtype: DType) -> str:
    if dtype.name == "bool":
        return "true" if value else "false"
    if dtype.is_int:
        if dtype.name == "int64":
            return f"{value}L" if value != -(2**63) else "(-9223372036854775807L - 1)"
        return str(value) if value != -(2**31) else "(-2147483647 - 1)"
    value = float(value)
    if math.isnan(value):
        text = "NAN"
    elif math.isinf(value):
        text = "INFINITY" if value > 0 else "-INFINITY"
    else:
        text = f"{value!r}f"
    return text if dtype.name == "float32" else f"{TYPES[dtype.name]}({text})"


def is_position(value: Value, depth: int = 12) -> bool:
    """Whether an integer is made of positions and lengths, which do not wrap."""
    op = value.op
    if op is None:
        return True
    if op.kind not in POSITIONAL or depth == 0 or not value.dtype.is_int:
        return False
    return all(is_position(v, depth - 1) for v in op.operands)


def elementwise(op: Op, operands: list[str], used: set[str]) -> str:
    """One element of an elementwise op. `used` gathers the helper functions it needs."""
    kind, dtype = op.kind, op.operands[-1].dtype
    a, b = (*operands, "", "")[:2]
    if kind == "where":
        return f"({a} ? {b} : {operands[2]})"
    if kind == "fma":
        return f"fma({a}, {b}, {operands[2]})"
    if kind == "cast":
        return cast(a, op.operands[0].dtype, op.result.dtype, used)
    if kind == "not":
        return f"!{a}"
    if kind in ("floordiv", "mod"):
        if is_exact(op):
            return f"({a} {'/' if kind == 'floordiv' else '%'} {b})"
        name = "floordiv" if kind == "floordiv" else "floormod"
        used.add(name)
        return f"{name}({a}, {b})"
    if dtype.is_int and kind in ("add", "sub", "mul", "neg", "abs") and not (is_position(op.result) or is_exact(op)):
        return _wrapping(kind, a, b, dtype)
    if kind in SYMBOLS:
        return f"({a} {SYMBOLS[kind]} {b})"
    if kind == "neg":
        return f"(-{a})"
    if kind == "abs":
        return f"abs({a})" if dtype.is_int else f"fabs({a})"
    if kind == "reciprocal":
        return f"(1.0f / {a})"
    if kind in ("max", "min"):
        return f"{'' if dtype.is_int else 'f'}{kind}({a}, {b})"
    if kind in ir.UNARY:
        return f"{kind}({a})"
    raise InternalError(f"the metal backend has no text for {kind!r}")


def _wrapping(kind: str, a: str, b: str, dtype: DType) -> str:
    signed, unsigned = TYPES[dtype.name], UNSIGNED[dtype.name]
    if kind in SYMBOLS:
        return f"{signed}({unsigned}({a}) {SYMBOLS[kind]} {unsigned}({b}))"
    negated = f"{signed}(0 - {unsigned}({a}))"
    return negated if kind == "neg" else f"({a} < 0 ? {negated} : {a})"


def cast(text: str, source: DType, target: DType, used: set[str]) -> str:
    name = TYPES[target.name]
    if source == target:
        return text
    if target.name == "bool":
        return f"({text} != {TYPES[source.name]}(0))"
    if target.is_int and source.is_float:
        used.add("held")
        least, most = target.limits
        ends = f"{float(least)!r}f, {float(most)!r}f, {name}({number(least, target)}), {name}({number(most, target)})"
        return f"held<{name}>(float({text}), {ends})"
    if target.is_float and "float32" not in (target.name, source.name):
        return f"{name}(float({text}))"
    return f"{name}({text})"


def identity(fold: str, dtype: DType) -> str:
    """What a fold of nothing gives."""
    if fold == "sum":
        return number(0, dtype)
    if dtype.name == "bool":
        return "false" if fold == "max" else "true"
    if dtype.is_int:
        least, most = dtype.limits
        return number(least if fold == "max" else most, dtype)
    return "-INFINITY" if fold == "max" else "INFINITY"


def folded(fold: str, dtype: DType, a: str, b: str) -> str:
    if dtype.name == "bool":
        return f"bool({a} | {b})" if fold == "max" else f"bool({a} & {b})"  # both are computed: lanes stay together
    if fold == "sum":
        return f"({a} + {b})" if dtype.is_float else _wrapping("add", a, b, dtype)
    return f"{'f' if dtype.is_float else ''}{fold}({a}, {b})"


def author_name(name: str) -> str:
    """A name of the author's that collides with nothing."""
    return f"{name}_" if name in TAKEN or re.search(r"_\d*$|_[ns]\d+$|_p$", name) else name
