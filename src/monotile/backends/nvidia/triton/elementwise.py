"""Elementwise ops and casts as Triton expressions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....dtypes import FP8, DType, bfloat16, bool_, float32, int32
from ....ir import Op
from ....ir.intervals import shifts_in_range


@dataclass(frozen=True)
class Form:
    """An expression with places for its operands, and {tl} for the dialect's module."""

    text: str
    helpers: tuple[str, ...] = ()  # functions of functions.py that it calls
    typed: bool = False  # no operand may be a bare number

    def of(self, inner: Form) -> Form:
        """Put another form in the first place."""
        text = self.text.replace("{0}", inner.text)
        return Form(text, (*inner.helpers, *self.helpers), self.typed or inner.typed)


FLOAT_FORMS = {
    "neg": Form("{0} * -1.0"),  # Triton before 3.4 subtracts from zero, which loses the sign of a zero
    "abs": Form("{tl}.abs({0})"),
    "exp": Form("exp_f32({0})", ("exp_f32",)),
    "exp2": Form("{tl}.exp2({0})"),
    "log": Form("{tl}.log({0})"),
    "log2": Form("{tl}.log2({0})"),
    "tanh": Form("tanh_f32({0})", ("tanh_f32",)),
    "sigmoid": Form("sigmoid_f32({0})", ("exp_f32", "sigmoid_f32")),
    "erf": Form("{tl}.erf({0})"),  # the last three are libdevice's, within 2 ulp
    "sin": Form("{tl}.sin({0})"),
    "cos": Form("{tl}.cos({0})"),
    "sqrt": Form("{tl}.sqrt_rn({0})"),
    "reciprocal": Form("reciprocal_f32({0})", ("reciprocal_f32",)),
    "add": Form("{0} + {1}"),
    "sub": Form("{0} - {1}"),
    "mul": Form("{0} * {1}"),
    "div": Form("{tl}.div_rn({0}, {1})"),
}
INT_FORMS = {
    "neg": Form("0 - {0}"),
    "abs": Form("{tl}.where({0} < 0, 0 - {0}, {0})"),
    "add": Form("{0} + {1}"),
    "sub": Form("{0} - {1}"),
    "mul": Form("{0} * {1}"),
    "floordiv": Form("floordiv({0}, {1})", ("floordiv",), typed=True),
    "mod": Form("modulo({0}, {1})", ("modulo",), typed=True),
    "bitand": Form("{0} & {1}"),
    "bitor": Form("{0} | {1}"),
    "bitxor": Form("{0} ^ {1}"),
    "shl": Form("shift_left({0}, {1}, {bits})", ("shift_left",), typed=True),
    "shr": Form("shift_right({0}, {1}, {bits})", ("shift_right",), typed=True),
}
UNSIGNED_FORMS = INT_FORMS | {
    "neg": Form("{0} * 0 - {0}"),
    "abs": Form("{0}"),
    "shr": Form("shift_right_unsigned({0}, {1}, {bits})", ("shift_right_unsigned",), typed=True),
    "floordiv": Form("{tl}.where({1} == 0, {1}, {0} // {tl}.where({1} == 0, {1} + 1, {1}))", typed=True),
    "mod": Form("{tl}.where({1} == 0, {1}, {0} % {tl}.where({1} == 0, {1} + 1, {1}))", typed=True),
}
SHIFTS = {"shl": Form("{0} << {1}"), "shr": Form("{0} >> {1}")}  # by counts in range
FORMS = {
    "not": Form("{0} == 0"),
    "max": Form("{tl}.maximum({0}, {1})"),
    "min": Form("{tl}.minimum({0}, {1})"),
    "and": Form("{0} & {1}"),
    "or": Form("{0} | {1}"),
    "lt": Form("{0} < {1}"),
    "le": Form("{0} <= {1}"),
    "eq": Form("{0} == {1}"),
    "ne": Form("{0} != {1}"),
    "where": Form("{tl}.where({0}, {1}, {2})"),
    "fma": Form("{tl}.fma({0}, {1}, {2})"),
}
# Of numbers that are not negative, Triton's own division rounds as the language's does.
TRUNCATED = {"floordiv": Form("{0} // {1}"), "mod": Form("{0} % {1}")}
# Before 3.7 Triton's interpreter gives NaN where one operand is NaN; it runs no assembly, and fuses nothing.
EMULATED = {
    "max": Form("{tl}.where({0} != {0}, {1}, {tl}.where({1} != {1}, {0}, {tl}.maximum({0}, {1})))", typed=True),
    "min": Form("{tl}.where({0} != {0}, {1}, {tl}.where({1} != {1}, {0}, {tl}.minimum({0}, {1})))", typed=True),
    "reciprocal": Form("1.0 / {0}"),
    "fma": Form("({0}.to({tl}.float64) * {1}.to({tl}.float64) + {2}.to({tl}.float64)).to({tl}.float32)", typed=True),
}
SAME = Form("{0}")


def form(op: Op, *, emulate: bool = False) -> Form:
    dtype = op.operands[-1].dtype
    if emulate and dtype.is_float and op.kind in EMULATED:
        return EMULATED[op.kind]
    if op.kind in FORMS:
        return FORMS[op.kind]
    if op.kind in SHIFTS and shifts_in_range(op):
        return SHIFTS[op.kind]
    found = (FLOAT_FORMS if dtype.is_float else UNSIGNED_FORMS if dtype.is_unsigned else INT_FORMS)[op.kind]
    return replace(found, text=found.text.replace("{bits}", str(dtype.bits)))


def power_of_two(kind: str, divisor: object) -> Form | None:
    """Divide by a power of two: a shift rounds down, and a mask has the sign of a positive divisor."""
    if type(divisor) is not int or divisor < 1 or divisor & (divisor - 1):
        return None
    return Form(f"{{0}} >> {divisor.bit_length() - 1}" if kind == "floordiv" else f"{{0}} & {divisor - 1}")


def cast(source: DType, target: DType, *, emulate: bool = False) -> Form:
    """Write a cast. `emulate`: bfloat16 by its bits, as Triton's interpreter needs it."""
    if source is target:
        return SAME
    wide = SAME
    if source in FP8:
        wide = Form(f"from_{source.name}({{0}})", (f"from_{source.name}",))
    elif source.is_narrow and source.is_float:
        wide = Form("from_bf16({0})", ("from_bf16",)) if emulate and source is bfloat16 else _to(float32)
    if target is bool_:
        return Form("{0} != 0.0").of(wide) if source.is_float else Form("{0} != 0")
    if target.is_float:
        single = wide if source.is_float else _to(float32)
        if target is float32:
            return single
        if target in FP8:
            return Form(f"to_{target.name}({{0}})", (f"to_{target.name}",)).of(single)
        return (Form("to_bf16({0})", ("to_bf16",)) if emulate and target is bfloat16 else _to(target)).of(single)
    if source.is_float:
        least, most = target.limits
        via = "{tl}.int64" if most > int32.limits[1] else "{tl}.int32"
        kind = "{tl}." + target.name
        return Form(f"float_to_int({{0}}, {least}, {most}, {via}, {kind})", ("float_to_int",)).of(wide)
    return _to(target)


def _to(dtype: DType) -> Form:
    return Form("{0}.to({tl}." + dtype.name + ")")
