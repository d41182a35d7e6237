"""Sine and cosine of any float32, within 2.5 ulp: the angle modulo pi / 2, then a polynomial."""

from __future__ import annotations

import itertools
import math

from .bool_reductions import any_or_all
from .emit import Emitter, Reg
from .float_steps import compare, number, polynomial

# (sin r - r) / r^3 and (cos r - 1) / r^2 in r^2 for r in [0, pi / 4]: 0.003 * 2^-24 of the sine, of the cosine.
_SIN = (-0.1666666716337204, 0.008333378471434116, -0.00019852571131195873, 2.826515583365108e-06)
_COS = (-0.5, 0.04166664555668831, -0.0013887297827750444, 2.443008816044312e-05)
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)  # floats that add up to pi / 2
_TWO_OVER_PI = 0.6366197723675814
_ROUND = 1.5 * 2**23  # added to a float below 2^22 it rounds it to a whole number, which is in its low bits
_LARGE = 2.0**17  # from here on three floats do not hold pi / 2 well enough
# Nine zeros, then the bits of 2 / pi.
_BITS = (0x00517CC1, 0xB727220A, 0x94FE13AB, 0xE8FA9A6E, 0xE06DB14A, 0xCC9E21C8, 0x20FF28B1)
_EXPONENT_OF_BIT_0 = 143  # of a float, as it is stored: angle * 2 / pi modulo 4 then begins at bit 0


def sin(e: Emitter, x: Reg) -> Reg:
    sign = e.binary("and", e.convert("bitcast", x, "i32"), e.number(-(2**31), "i32"))
    return _wave(e, e.intrinsic("fabs", x), 0, sign)


def cos(e: Emitter, x: Reg) -> Reg:
    return _wave(e, e.intrinsic("fabs", x), 1, e.number(0, "i32"))


def _wave(e: Emitter, angle: Reg, quarters: int, sign: Reg) -> Reg:
    """Return the sine of an angle that is not negative, plus some quarter turns; its sign bit is flipped by `sign`."""
    quadrant, r = _reduced(e, angle)
    quadrant = e.binary("add", quadrant, e.number(quarters, "i32"))
    square = e.binary("fmul", r, r)
    sine = e.fma(e.binary("fmul", r, square), polynomial(e, square, _SIN), r)
    cosine = e.fma(square, polynomial(e, square, _COS), number(e, 1.0))
    odd = e.binary("icmp ne", e.binary("and", quadrant, e.number(1, "i32")), e.number(0, "i32"), "i1")
    bits = e.convert("bitcast", e.select(odd, cosine, sine), "i32")
    half_turn = e.binary("shl", e.binary("and", quadrant, e.number(2, "i32")), e.number(30, "i32"))
    result = e.convert("bitcast", e.binary("xor", bits, e.binary("xor", half_turn, sign)), "float")
    return e.select(compare(e, "olt", angle, number(e, math.inf)), result, number(e, math.nan))


def _reduced(e: Emitter, angle: Reg) -> tuple[Reg, Reg]:
    """Return the nearest number of quarter turns, modulo 4 at least, and the rest in radians."""
    large = compare(e, "oge", angle, number(e, _LARGE))
    small = e.select(large, number(e, 0.0), angle)
    rounded = e.binary("fadd", e.binary("fmul", small, number(e, _TWO_OVER_PI)), number(e, _ROUND))
    quadrant, n = e.convert("bitcast", rounded, "i32"), e.binary("fsub", rounded, number(e, _ROUND))
    r = small
    for part in _HALF_PI:
        r = e.fma(n, number(e, -part), r)
    first, second = e.var(e.type_of(quadrant), quadrant.text), e.var(e.type_of(r), r.text)

    def reduce_large() -> None:
        far, rest = _reduced_large(e, angle)
        e.set(first, e.select(large, far, quadrant).text)
        e.set(second, e.select(large, rest, r).text)

    e.when((any_or_all(e, "max", large) if large.vector else large).text, reduce_large)
    return Reg(e.get(first), "i32", quadrant.vector), Reg(e.get(second), "float", r.vector)


def _reduced_large(e: Emitter, angle: Reg) -> tuple[Reg, Reg]:
    """Multiply the 24 bits of an angle by 96 bits of 2 / pi, those that its exponent makes matter, modulo 4 in fixed
    point (Payne and Hanek). One unit is 2^-62 of a quarter turn, so int64 wraps at 4."""

    def mask(a: Reg, number: int) -> Reg:
        return e.binary("and", a, e.number(number, "i32"))

    def is_set(bit: int) -> Reg:
        return e.binary("icmp ne", mask(at, bit), e.number(0, "i32"), "i1")

    def word(n: int) -> Reg:
        lower, upper = (
            e.select(is_set(32), *(e.number(w - 2**32 if w >= 2**31 else w, "i32") for w in (b, a)))
            for a, b in (_BITS[n : n + 2], _BITS[n + 2 : n + 4])
        )
        return e.select(is_set(64), upper, lower)

    bits = e.convert("bitcast", angle, "i32")
    mantissa = e.binary("or", mask(bits, 2**23 - 1), e.number(2**23, "i32"))
    mantissa = e.convert("zext", mantissa, "i64")
    exponent = e.binary("lshr", bits, e.number(23, "i32"))
    at = e.binary("sub", exponent, e.number(_EXPONENT_OF_BIT_0, "i32"))
    words = [word(n) for n in range(4)]
    products = []
    for upper, lower in itertools.pairwise(words):
        part = e.intrinsic("fshl", upper, lower, mask(at, 31))
        products.append(e.binary("mul", mantissa, e.convert("zext", part, "i64")))
    high = e.binary("shl", products[0], e.number(32, "i64"))
    low = e.binary("lshr", products[2], e.number(32, "i64"))
    turns = e.binary("add", e.binary("add", high, products[1]), low)
    quadrant = e.binary("lshr", e.binary("add", turns, e.number(2**61, "i64")), e.number(62, "i64"))
    rest = e.binary("sub", turns, e.binary("shl", quadrant, e.number(62, "i64")))
    rest = e.convert("sitofp", rest, "float")
    high, low = (number(e, part * 2.0**-62) for part in _HALF_PI[:2])
    return e.convert("trunc", quadrant, "i32"), e.fma(rest, high, e.binary("fmul", rest, low))
