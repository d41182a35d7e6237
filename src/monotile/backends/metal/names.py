"""Names and comments of the generated text: an author's words, as ASCII, that mean nothing else in Metal."""

from __future__ import annotations

import re

from ...ir import Kernel

# Thread position attributes. MLX adds a parameter for each one whose name occurs in the source.
POSITIONS = (
    "dispatch_quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup", "dispatch_threads_per_threadgroup",
    "grid_origin", "grid_size", "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "thread_execution_width",
    "thread_index_in_quadgroup", "thread_index_in_simdgroup", "thread_index_in_threadgroup", "thread_position_in_grid",
    "thread_position_in_threadgroup", "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid",
    "threads_per_simdgroup", "threads_per_threadgroup",
)  # fmt: skip

# Keywords of C++ up to C++20, of which Metal is a dialect, and the spellings of its operators.
CPP = """
alignas alignof and and_eq asm atomic_cancel atomic_commit atomic_noexcept auto bitand bitor bool break case catch char
char8_t char16_t char32_t class compl concept const consteval constexpr constinit const_cast continue co_await co_return
co_yield decltype default delete do double dynamic_cast else enum explicit export extern false final float for friend
goto if import inline int long main module mutable namespace new noexcept not not_eq nullptr operator or or_eq override
private protected public register reinterpret_cast requires return short signed sizeof static static_assert static_cast
struct switch template this thread_local throw true try typedef typeid typename typeof union unsigned using virtual void
volatile wchar_t while xor xor_eq NULL
"""

# Metal's own words: address spaces, qualifiers, types and namespaces.
METAL = """
access array array_ref bfloat buffer constant coherent common_type conditional device fast fragment function half
imageblock imageblock_data interpolant intersector kernel mem_flags memory_order mesh metal metal_stdlib object
object_data patch_control_point precise ptrdiff_t quadgroup ray_data sampler simd simdgroup size_t std texture thread
thread_scope threadgroup threadgroup_imageblock uchar uint ulong uniform ushort vec vertex visible
visible_function_table
"""

# Functions of Metal's library, which a variable of that name would hide from the text after it.
FUNCTIONS = """
abs absdiff acos acosh addsat all any as_type asin asinh assert atan atan2 atanh ceil clamp clz copysign cos cosh
cospi cross ctz determinant discard_fragment distance distance_squared divide dot exp exp10 exp2 extract_bits fabs
faceforward fdim floor fma fmax fmax3 fmedian3 fmin fmin3 fmod forward fract frexp fwidth hadd ilogb insert_bits
isfinite isinf isnan isnormal isordered isunordered ldexp length length_squared log log10 log2 mad24 madhi madsat
make_filter max max3 median3 min min3 mix modf move mul24 mulhi nan nextafter normalize popcount pow powr reflect
refract reverse_bits rhadd rint rotate round rsqrt saturate select sign signbit sin sincos sinh sinpi smoothstep sqrt
step subsat swap tan tanh tanpi transpose trunc wait make_filled_simdgroup_matrix make_unsigned_t make_signed_t
enable_if is_same is_function_constant_defined
"""

# Names of the generated code itself: registers, loop variables, helper functions, macros.
GENERATED = """
c e fm fn gid i integers j k0 kb ke kk lane lane_u left meta floats parts r right scratch sg sg_u sum sums tid u x
floordiv floormod from_lane is_highest is_lowest load_matrix narrowed rounded saturated shuffle_xor sums_over_lanes
logistic error_function narrowed_e4m3 narrowed_e5m2 widened_e4m3 widened_e5m2 shifted_left shifted_right
widened with_infinities with_lowest with_highest UNROLL METAL_FUNC INFINITY NAN MAXFLOAT MAXHALF HUGE_VALF HUGE_VALH
"""

RESERVED = frozenset(" ".join((CPP, METAL, FUNCTIONS, GENERATED)).split()) | {*POSITIONS}

# Families of Metal's names, of elements of other lanes, and of the parameters of an MLX kernel.
SCALARS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|double"
FAMILIES = re.compile(
    rf"(packed_)?({SCALARS})[1-9](x\d)?|u?int(8|16|32|64)_t|float\d+_t|bfloat\d+_t"
    r"|(simd|simdgroup|quad|quadgroup|threadgroup|atomic|texture|depth|os_log|mt|memory_order|metal)(_\w+|\d\w*)"
    r"|METAL_\w+|U?INT(8|16|32|64|PTR|MAX|(_LEAST|_FAST)(8|16|32|64))_(MIN|MAX|C)"
    r"|(SIZE|PTRDIFF|WCHAR|WINT|SIG_ATOMIC)_(MIN|MAX)"
    r"|M_\w+|(FLT|HALF|BFLT|DBL|LDBL|CHAR|SCHAR|UCHAR|SHRT|USHRT|INT|UINT|LONG|ULONG|LLONG|FP|MTL)_\w+|\w*_[rc]\d+|table_\d+|buffer_\d\w*"
)


def comment(text: str) -> str:
    """Return an author's line as a comment: ASCII, and no backslash (or its trigraph) continues it on the next line."""
    plain = text.strip().encode("ascii", "backslashreplace").decode()
    return "// " + "".join(c if c.isprintable() else " " for c in plain).rstrip("\\/? ")


def is_reserved(name: str) -> bool:
    """True for a name with a meaning in C++, in Metal or in the generated code."""
    return name in RESERVED or FAMILIES.fullmatch(name) is not None


def safe(name: str) -> str:
    """Return an author's name as an ASCII identifier that means nothing else."""
    plain = "".join(c if c.isascii() else f"u{ord(c):04x}" for c in name if c.isalnum() or c == "_")
    plain = re.sub("__+", "_", plain)  # two underscores, and one at the start, are the compiler's
    plain = plain if plain[:1].isalpha() else f"t{plain}"
    if not is_reserved(plain):
        return plain
    return f"{plain}0" if not is_reserved(f"{plain}0") else f"t_{plain}t"


def tensor_names(kernel: Kernel) -> dict[int, str]:
    """Return the name of each tensor in the text, by its index. NAME_p is the parameter, NAME its first element."""
    found: dict[int, str] = {}
    taken: set[str] = set()
    for tensor in kernel.tensors:
        name, n = safe(tensor.name), 1
        while {name, f"{name}_p"} & taken:
            n += 1
            name = f"{safe(tensor.name)}_{n}"
        taken |= {name, f"{name}_p"}
        found[tensor.index] = name
    return found
