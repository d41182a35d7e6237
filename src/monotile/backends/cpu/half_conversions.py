"""Conversions between float16 and float32 for processors without F16C, as LLVM IR text.

LLVM calls functions of these names for them. Linux has them in libgcc and macOS in its system library, with a calling
convention of its own; Windows has none.
"""

from __future__ import annotations

from .target import Target


def half_conversions(target: Target, triple: str, text: str) -> str:
    """Return the functions, if this text needs them."""
    return _TEXT if target.name == "baseline" and "half" in text and "apple" not in triple else ""


# To float32: an exponent that is 112 too small is mended by a product, which is exact and makes subnormal numbers
# normal. To float16: below 2^-14 adding 0.5 rounds to the steps of subnormal numbers; else the half of a step is added,
# or a little less if the number is even.
_TEXT = """
define internal float @__extendhfsf2(half %h) nounwind {
  %bits = bitcast half %h to i16
  %x = zext i16 %bits to i32
  %high = shl i32 %x, 16
  %sign = and i32 %high, -2147483648
  %body = and i32 %x, 32767
  %shifted = shl i32 %body, 13
  %small = bitcast i32 %shifted to float
  %scaled = fmul float %small, 0x46F0000000000000
  %finite = bitcast float %scaled to i32
  %special = or i32 %shifted, 2139095040
  %is_special = icmp uge i32 %body, 31744
  %magnitude = select i1 %is_special, i32 %special, i32 %finite
  %all = or i32 %magnitude, %sign
  %r = bitcast i32 %all to float
  ret float %r
}
define internal half @__truncsfhf2(float %f) nounwind {
  %x = bitcast float %f to i32
  %high = lshr i32 %x, 16
  %sign = and i32 %high, 32768
  %a = and i32 %x, 2147483647
  %magnitude = bitcast i32 %a to float
  %moved = fadd float %magnitude, 5.0e-01
  %steps = bitcast float %moved to i32
  %subnormal = sub i32 %steps, 1056964608
  %last = lshr i32 %a, 13
  %odd = and i32 %last, 1
  %less = add i32 %a, -939520001
  %rounded = add i32 %less, %odd
  %normal = lshr i32 %rounded, 13
  %is_nan = icmp ugt i32 %a, 2139095040
  %special = select i1 %is_nan, i32 32256, i32 31744
  %is_small = icmp ult i32 %a, 947912704
  %finite = select i1 %is_small, i32 %subnormal, i32 %normal
  %is_large = icmp uge i32 %a, 1199570944
  %body = select i1 %is_large, i32 %special, i32 %finite
  %all = or i32 %body, %sign
  %low = trunc i32 %all to i16
  %r = bitcast i16 %low to half
  ret half %r
}
"""
