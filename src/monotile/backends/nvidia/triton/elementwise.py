"""Elementwise ops and casts as Triton expressions."""

from __future__ import annotations

from ....dtypes import DType, bfloat16, bool_, float32
from ....ir import Op
from .text import triton_type

FLOAT_FORMS = {
    "neg": "{0} * -1.0",  # Triton before 3.4 subtracts from zero, which loses the sign of a zero
    "abs": "tl.abs({0})",
    "exp": "exp_f32({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "tanh": "tanh_f32({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "reciprocal": "reciprocal_f32({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "tl.div_rn({0}, {1})",
}
INT_FORMS = {
    "neg": "0 - {0}",
    "abs": "tl.where({0} < 0, 0 - {0}, {0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "floordiv": "floordiv({0}, {1})",
    "mod": "modulo({0}, {1})",
}
FORMS = {
    "not": "{0} == 0",
    "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "where": "tl.where({0}, {1}, {2})",
    "fma": "tl.fma({0}, {1}, {2})",
}


# Before 3.7 Triton's interpreter gives NaN where one operand is NaN; it runs no assembly, and fuses nothing.
EMULATED = {
    "max": "tl.where({0} != {0}, {1}, tl.where({1} != {1}, {0}, tl.maximum({0}, {1})))",
    "min": "tl.where({0} != {0}, {1}, tl.where({1} != {1}, {0}, tl.minimum({0}, {1})))",
    "reciprocal": "1.0 / {0}",
    "fma": "({0}.to(tl.float64) * {1}.to(tl.float64) + {2}.to(tl.float64)).to(tl.float32)",
}


def form(op: Op, *, emulate: bool = False) -> str:
    dtype = op.operands[-1].dtype
    if emulate and dtype.is_float and op.kind in EMULATED:
        return EMULATED[op.kind]
    if op.kind in FORMS:
        return FORMS[op.kind]
    return (FLOAT_FORMS if dtype.is_float else INT_FORMS)[op.kind]


def power_of_two(kind: str, divisor: object) -> str | None:
    """Division by a power of two: a shift rounds down, and a mask has the sign of a positive divisor."""
    if type(divisor) is not int or divisor < 1 or divisor & (divisor - 1):
        return None
    return f"{{0}} >> {divisor.bit_length() - 1}" if kind == "floordiv" else f"{{0}} & {divisor - 1}"


def cast(source: DType, target: DType, *, emulate: bool = False) -> str:
    """A cast as a form with one place. `emulate`: bfloat16 by its bits, as Triton's interpreter needs it."""
    if source is target:
        return "{0}"
    wide = "{0}"
    if source.is_narrow and source.is_float:
        wide = "from_bf16({0})" if emulate and source is bfloat16 else "{0}.to(tl.float32)"
    if target is bool_:
        return f"{wide} != 0.0" if source.is_float else "{0} != 0"
    if target.is_float:
        single = wide if source.is_float else "{0}.to(tl.float32)"
        if target is float32:
            return single
        return f"to_bf16({single})" if emulate and target is bfloat16 else f"{single}.to({triton_type(target)})"
    if source.is_float:
        least, most = target.limits
        via = "tl.int64" if target.bits == 64 else "tl.int32"
        return f"float_to_int({wide}, {least}, {most}, {via}, {triton_type(target)})"
    return f"{{0}}.to({triton_type(target)})"
