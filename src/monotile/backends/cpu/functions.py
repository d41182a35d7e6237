"""Elementary functions on float registers, uniform or vector, without libm: within 2 ulp; sigmoid,
sine and cosine within 2.5.

A result below 2^-126, the least normal number, may be off by that much. The coefficients are our own minimax fits
(iteratively reweighted least squares on Chebyshev points), made float by rounding the lowest order first and fitting
the rest again. The error stated with each is of the polynomial alone; tests/backends/test_functions.py measures the
code. Every step is exact or correctly rounded, so a result has the same bits on every processor and vector width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..polynomials import ERF_NEAR, ERFC_EXPONENT
from .angles import cos, sin
from .emit import Emitter, Reg
from .float_steps import at_least, at_most, compare, number, polynomial

# 2^r on [0, 1]: 1.32 * 2^-23, but 0.74 * 2^-23 towards 1, where the code rounds most.
_EXP2 = (1.0, 0.6931537985801697, 0.24013981223106384, 0.05587470531463623, 0.008927877992391586, 0.0019037228776142001)
# e^r on [0, ln 2]: 0.025 * 2^-23.
_EXP = (
    1.0,
    0.9999997615814209,
    0.5000067949295044,
    0.1666032373905182,
    0.04193588346242905,
    0.007763887755572796,
    0.001963007962331176,
)
# log2(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1]: 0.47 * 2^-24 of it.
_LOG2 = (
    1.4426950216293335,
    -0.7213473916053772,
    0.48090896010398865,
    -0.3607005774974823,
    0.2879534959793091,
    -0.23901484906673431,
    0.2154807597398758,
    -0.20678748190402985,
    0.12584345042705536,
)
# (log(1 + f) - f) / f^2 there: 0.51 * 2^-24 of log(1 + f).
_LOG = (
    -0.49999991059303284,
    0.33333948254585266,
    -0.25001785159111023,
    0.1996215581893921,
    -0.16570048034191132,
    0.1491681933403015,
    -0.14309664070606232,
    0.08740008622407913,
)
# (tanh(x) - x) / x^3 in x^2, for x in [0, 0.55]: 0.62 * 2^-24 of tanh(x).
_TANH = (-0.3333294689655304, 0.1332072913646698, -0.05267200991511345, 0.01643787883222103)
_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471824645996  # the float nearest to ln 2
_LN2_REST = -1.904654299957768e-09  # ln 2 - _LN2
_SQRT_HALF_BITS = 0x3F3504F3
_LEAST_NORMAL = 2.0**-126


def exp2(e: Emitter, x: Reg) -> Reg:
    """2^x = 2^n * 2^r, n = floor(x). Infinity and 0 come out of the scale: 2^128 is infinity and 2^-127 is 0."""
    if e.has_scalef and x.vector and e.lanes == 16:
        return _exp2_avx512(e, x)
    x = at_most(e, at_least(e, x, -127.0), 128.0)
    n = e.intrinsic("floor", x)
    power = polynomial(e, e.binary("fsub", x, n), _EXP2)
    return e.binary("fmul", power, _power_of_two(e, n))


def exp(e: Emitter, x: Reg) -> Reg:
    """e^x = 2^n * e^r, n = floor(x / ln 2)."""
    return _exp(e, at_most(e, at_least(e, x, -88.0), 89.0))  # n is -127 and 128 there, as in exp2


def log2(e: Emitter, x: Reg) -> Reg:
    """log2(x) = k + log2(1 + f)."""
    k, f = _split(e, x)
    return _log_specials(e, x, e.fma(f, polynomial(e, f, _LOG2), k))


def log(e: Emitter, x: Reg) -> Reg:
    """log(x) = k * ln 2 + log(1 + f)."""
    k, f = _split(e, x)
    near = e.fma(e.binary("fmul", f, f), polynomial(e, f, _LOG), f)
    return _log_specials(e, x, e.fma(k, number(e, _LN2), near))


def tanh(e: Emitter, x: Reg) -> Reg:
    """tanh|x| = 1 - 2 / (e^2|x| + 1); below 0.55, where that loses too many bits, a polynomial."""
    size = e.intrinsic("fabs", x)
    square = e.binary("fmul", size, size)
    near = e.fma(e.binary("fmul", size, square), polynomial(e, square, _TANH), size)
    power = _exp(e, at_most(e, e.binary("fadd", size, size), 89.0))
    far = e.binary("fdiv", number(e, 2.0), e.binary("fadd", power, number(e, 1.0)))
    far = e.binary("fsub", number(e, 1.0), far)
    return e.intrinsic("copysign", e.select(compare(e, "olt", size, number(e, 0.55)), near, far), x)


def sigmoid(e: Emitter, x: Reg) -> Reg:
    """1 / (1 + e^-|x|), and e^-|x| times that for a negative x: nothing overflows."""
    power = _exp(e, at_least(e, e.unary("fneg", e.intrinsic("fabs", x)), -88.0))
    above = e.select(compare(e, "olt", x, number(e, 0.0)), power, number(e, 1.0))
    return e.binary("fdiv", above, e.binary("fadd", power, number(e, 1.0)))


def erf(e: Emitter, x: Reg) -> Reg:
    """A polynomial up to 1, and 1 - erfc(x) from there, where erfc(x) is the exponential of a polynomial."""
    size = e.intrinsic("fabs", x)
    near = e.fma(size, polynomial(e, e.binary("fmul", size, size), ERF_NEAR), size)
    exponent = polynomial(e, at_most(e, size, 4.0), ERFC_EXPONENT)
    far = e.binary("fsub", number(e, 1.0), _exp(e, e.unary("fneg", exponent)))
    return e.intrinsic("copysign", e.select(compare(e, "olt", size, number(e, 1.0)), near, far), x)


def sqrt(e: Emitter, x: Reg) -> Reg:
    return e.intrinsic("sqrt", x)


def reciprocal(e: Emitter, x: Reg) -> Reg:
    return e.binary("fdiv", number(e, 1.0), x)


def absolute(e: Emitter, x: Reg) -> Reg:
    return e.intrinsic("fabs", x)


FUNCTIONS: dict[str, Callable[[Emitter, Reg], Reg]] = {
    "exp2": exp2,
    "exp": exp,
    "log2": log2,
    "log": log,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "erf": erf,
    "sin": sin,
    "cos": cos,
    "sqrt": sqrt,
    "reciprocal": reciprocal,
    "abs": absolute,
}


# ---- parts -----------------------------------------------------------------------------------------------------------


def _power_of_two(e: Emitter, n: Reg) -> Reg:
    """2^n for a whole n in [-127, 128], the ends being 0 and infinity; any value for NaN.

    1.5 * 2^23 + 127 + n is a float whose low bits are 127 + n, the exponent field of the result.
    """
    bits = e.convert("bitcast", e.binary("fadd", n, number(e, 1.5 * 2**23 + 127)), "i32")
    return e.convert("bitcast", e.binary("shl", bits, e.number(23, "i32")), "float")


def _exp(e: Emitter, x: Reg) -> Reg:
    """exp within [-88, 89]."""
    n = e.intrinsic("floor", e.binary("fmul", x, number(e, _LOG2_E)))
    r = e.fma(n, number(e, -_LN2_REST), e.fma(n, number(e, -_LN2), x))
    return e.binary("fmul", polynomial(e, r, _EXP), _power_of_two(e, n))


def _exp2_avx512(e: Emitter, x: Reg) -> Reg:
    """The same bits in 10 instructions instead of 13: VSCALEFPS multiplies by 2^floor(x). Results below the normal
    numbers are made 0, as elsewhere."""
    kind, zero, as_set = e.vector_type("float"), "zeroinitializer", ("i32", "4")  # the rounding in force: to nearest
    x = at_most(e, x, 128.0)  # infinity minus infinity would be NaN
    power = polynomial(e, e.binary("fsub", x, e.intrinsic("floor", x)), _EXP2)
    normal = compare(e, "uge", x, number(e, -126.0))
    mask = e.op(f"bitcast {e.type_of(normal)} {normal.text} to i16")
    name, operands = "llvm.x86.avx512.mask.scalef.ps.512", ((kind, power.text), (kind, x.text), (kind, zero))
    return Reg(e.call(kind, name, *operands, ("i16", mask), as_set), "float", True)


def _split(e: Emitter, x: Reg) -> tuple[Reg, Reg]:
    """x = 2^k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); what is no positive finite number gives any k and f."""
    small = compare(e, "olt", x, number(e, _LEAST_NORMAL))
    normal = e.select(small, e.binary("fmul", x, number(e, 2.0**23)), x)
    bits = e.convert("bitcast", normal, "i32")
    above = e.binary("sub", bits, e.number(_SQRT_HALF_BITS, "i32"))
    exponent = e.binary("and", above, e.number(-(1 << 23), "i32"))
    mantissa = e.convert("bitcast", e.binary("sub", bits, exponent), "float")
    k = e.convert("sitofp", e.binary("ashr", above, e.number(23, "i32")), "float")
    k = e.binary("fadd", k, e.select(small, number(e, -23.0), number(e, 0.0)))
    return k, e.binary("fadd", mantissa, number(e, -1.0))


def _log_specials(e: Emitter, x: Reg, result: Reg) -> Reg:
    """The logarithm where it is no number or x is none; infinity and NaN are their own."""
    zero = number(e, 0.0)
    result = e.select(compare(e, "olt", x, number(e, math.inf)), result, x)
    result = e.select(compare(e, "oeq", x, zero), number(e, -math.inf), result)
    return e.select(compare(e, "olt", x, zero), number(e, math.nan), result)
