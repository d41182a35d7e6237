"""Helper functions for what Triton does not have as the language wants it; a module gets those it calls.

`exp`: Triton's own multiplies by log2(e) and rounds, which far from zero costs dozens of units in the last place.
Here the whole powers of two are split off first (Cody and Waite). `to_bf16`, `from_bf16` and `python_int` are for
Triton's interpreter only: its own conversion truncates, it multiplies the bits of bfloat16, and before Triton 3.7 its
numbers cannot be bounds of a loop with NumPy 2.4.

`tanh` is y = s / sqrt(1 + s^2) where s stands for sinh: 16 instructions for sm_90 without a branch, one of them on the
unit for special functions. An error of s counts for 1 / (1 + s^2) of itself in the result, so a polynomial of degree
13 does for sinh: its coefficients are a minimax fit of the result, good to 2^-27. With r = 1 / sqrt(1 + s^2), y^2 + r^2
would be 1; half of the difference, times y, removes the error of the hardware's rsqrt and most of the rounding. NaN has
to pass the clamp, which is written with Triton's own module: Gluon has no PropagateNan.

`bool_or` and `bool_and` reduce bools as bytes: Triton's own reductions widen them to 32 bits, and the warps of a
program exchange them in shared memory.
"""

from __future__ import annotations

from collections.abc import Collection
from string import Template

from .text import Dialect

_FROM_E4M3 = """\
@$jit
def from_float8_e4m3fn(x):
    byte = x.to($tl.int32)
    size = byte & 0x7F
    small = (size.to($tl.float32) * 0.001953125).to($tl.int32, bitcast=True)
    bits = $tl.where(size < 8, small, (size << 20) + 0x3C000000)
    return $tl.where(size == 0x7F, 0x7FC00000, bits | ((byte & 0x80) << 24)).to($tl.float32, bitcast=True)
"""
_FROM_E5M2 = """\
@$jit
def from_float8_e5m2(x):
    return (x.to($tl.int16) << 8).to($tl.float16, bitcast=True).to($tl.float32)
"""


def _to_fp8(name: str, mantissa: int, bias: int, greatest: int, beyond: int, nan: int) -> str:
    """Return the function that rounds a float32 to an fp8 format, ties to even: normal numbers by their bits, smaller
    ones, whose codes are equal steps, by adding a number of that precision."""
    drop, magic = 23 - mantissa, 2.0 ** (24 - bias - mantissa)
    return f"""\
@$jit
def to_{name}(x):
    bits = x.to($tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((size >> {drop}) & 1) + {2 ** (drop - 1) - 1}) >> {drop}) - {(127 - bias) << mantissa}
    small = (size.to($tl.float32, bitcast=True) + {magic}).to($tl.int32, bitcast=True) - {(151 - bias - mantissa) << 23}
    code = $tl.where(size < {(128 - bias) << 23}, small, normal)
    code = $tl.where(size > 0x7F800000, {nan}, $tl.where(code > {greatest}, {beyond}, code))
    return (code | ((bits >> 24) & 0x80)).to($tl.uint8)
"""


# $jit and $tl are the dialect's. Of an assembly text, $0 and the like stay.
FUNCTIONS = {
    "exp_f32": """\
@$jit
def exp_f32(x):
    n = $tl.minimum($tl.maximum($tl.floor(x * 1.4426950408889634), -150.0), 128.0)
    rest = (x - n * 0.693359375) + n * 2.12194440e-4
    return $tl.exp2(n) * $tl.exp2(rest * 1.4426950408889634)
""",
    "tanh_f32": """\
@$jit
def tanh_f32(x):
    z = x * x
    p = $tl.fma($tl.fma(z, 2.2785696e-10, 2.3345837e-08), z, 2.7729384e-06)
    p = $tl.fma($tl.fma($tl.fma(p, z, 1.9834159e-04), z, 8.333441e-03), z, 0.16666663)
    s = $tl.fma(x * z, p, x)
    s = triton.language.clamp(s, -16384.0, 16384.0, propagate_nan=triton.language.PropagateNan.ALL)
    r = $tl.rsqrt($tl.fma(s, s, 1.0))
    y = s * r
    rest = $tl.fma(-y, y, $tl.fma(-r, r, 1.0))
    return $tl.fma(y * rest, 0.5, y)
""",
    "sigmoid_f32": """\
@$jit
def sigmoid_f32(x):
    e = exp_f32(-$tl.abs(x))
    return $tl.div_rn($tl.where(x < 0.0, e, 1.0), 1.0 + e)
""",
    "bool_or": """\
@$jit
def bool_or(a, b):
    return a | b
""",
    "bool_and": """\
@$jit
def bool_and(a, b):
    return a & b
""",
    "reciprocal_f32": """\
@$jit
def reciprocal_f32(x):
    return $tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], $tl.float32, is_pure=True, pack=1)
""",
    "floordiv": '''\
@$jit
def floordiv(a, b):
    """Rounded down; 0 when b is 0. Division by -1 is negation, so that the least integer wraps."""
    plain = (b != 0) & (b != -1)
    divisor = $tl.where(plain, b, 1)
    q = a // divisor
    r = a - q * divisor
    q = $tl.where((r != 0) & ((r < 0) != (divisor < 0)), q - 1, q)
    return $tl.where(plain, q, $tl.where(b == 0, 0, 0 - a))
''',
    "modulo": '''\
@$jit
def modulo(a, b):
    """The remainder with the sign of b; 0 when b is 0."""
    plain = (b != 0) & (b != -1)
    divisor = $tl.where(plain, b, 1)
    r = a - (a // divisor) * divisor
    r = $tl.where((r != 0) & ((r < 0) != (divisor < 0)), r + divisor, r)
    return $tl.where(plain, r, 0)
''',
    "float_to_int": '''\
@$jit
def float_to_int(x, least: $tl.constexpr, most: $tl.constexpr, via: $tl.constexpr, dtype: $tl.constexpr):
    """Drops the fraction, stops at the ends of the type, NaN is 0."""
    below = x <= least * 1.0
    above = x >= most + 1.0
    inside = $tl.where((x == x) & ~(below | above), x, 0.0).to(via)
    return $tl.where(below, least, $tl.where(above, most, inside)).to(dtype)
''',
    "mask_by_bytes": '''\
@$jit
def mask_by_bytes(x, seen):
    """-inf where a byte is zero, two at a time."""
    one: $tl.constexpr = "and.b32 t, $4, 0xff; setp.ne.u32 p, t, 0; selp.b32 $0, $2, 0xff800000, p;"
    other: $tl.constexpr = "and.b32 t, $4, 0xff00; setp.ne.u32 p, t, 0; selp.b32 $1, $3, 0xff800000, p;"
    asm: $tl.constexpr = "{ .reg .pred p; .reg .b32 t; " + one + other + " }"
    return $tl.inline_asm_elementwise(asm, "=r,=r,r,r,r", [x, seen], $tl.float32, is_pure=True, pack=2)
''',
    "mask_by_numbers": '''\
@$jit
def mask_by_numbers(x, mask):
    """-inf where the mask is."""
    asm: $tl.constexpr = "{ .reg .pred p; setp.neu.f32 p, $2, 0fFF800000; selp.b32 $0, $1, 0xff800000, p; }"
    return $tl.inline_asm_elementwise(asm, "=r,r,r", [x, mask], $tl.float32, is_pure=True, pack=1)
''',
    "to_bf16": """\
@$jit
def to_bf16(x):
    bits = x.to($tl.int32, bitcast=True)
    rounded = $tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return rounded.to($tl.int16).to($tl.bfloat16, bitcast=True)
""",
    "from_bf16": """\
@$jit
def from_bf16(x):
    return (x.to($tl.int16, bitcast=True).to($tl.int32) << 16).to($tl.float32, bitcast=True)
""",
    "shift_left": '''\
@$jit
def shift_left(x, n, bits: $tl.constexpr):
    """A count out of range moves every bit out."""
    inside = (n >= 0) & (n < bits)
    return $tl.where(inside, x << $tl.where(inside, n, 0), 0)
''',
    "shift_right": """\
@$jit
def shift_right(x, n, bits: $tl.constexpr):
    inside = (n >= 0) & (n < bits)
    return x >> $tl.where(inside, n, bits - 1)
""",
    "shift_right_unsigned": """\
@$jit
def shift_right_unsigned(x, n, bits: $tl.constexpr):
    return $tl.where(n < bits, x >> $tl.where(n < bits, n, 0), 0)
""",
    "from_float8_e4m3fn": _FROM_E4M3,
    "from_float8_e5m2": _FROM_E5M2,
    "to_float8_e4m3fn": _to_fp8("float8_e4m3fn", 3, 7, 0x7E, 0x7F, 0x7F),
    "to_float8_e5m2": _to_fp8("float8_e5m2", 2, 15, 0x7B, 0x7C, 0x7E),
    "python_int": """\
def python_int(x):
    return int(x.handle.data.item()) if isinstance(x, $tl.tensor) else x
""",
}


def sources(names: Collection[str], dialect: Dialect) -> list[str]:
    """Return the text of the functions that a module calls."""
    return [
        Template(source).safe_substitute(jit=dialect.jit, tl=dialect.module)
        for name, source in FUNCTIONS.items()
        if name in names
    ]
