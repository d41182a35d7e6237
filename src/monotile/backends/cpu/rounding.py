"""Round a float32 register to a narrower float: to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...dtypes import FP8, DType, to_numpy
from ...ir import Op
from ...ir.intervals import interval
from . import fp8
from .emit import Emitter, Reg

EXACT = {"float16": 2**11, "bfloat16": 2**8}  # whole numbers up to here need no rounding


def is_exact_cast(op: Op) -> bool:
    """True if a cast to a narrow float keeps every number: of fp8, of small integers and of tables of such numbers."""
    (value,), target = op.operands, op.result.dtype.name
    if target not in EXACT:
        return False
    if value.dtype in FP8:
        return True
    if value.op is not None and value.op.kind == "lookup" and value.dtype.is_float:
        table = np.asarray(value.op.attrs["table"], np.float32)
        return np.array_equal(table, table.astype(to_numpy(op.result.dtype)).astype(np.float32))
    low, high = interval(value)
    return value.dtype.is_int and -EXACT[target] <= low and high <= EXACT[target]


def _round_half(e: Emitter, x: Reg) -> Reg:
    return e.convert("fpext", e.convert("fptrunc", x, "half"), "float")


def _round_bfloat(e: Emitter, x: Reg) -> Reg:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = e.convert("bitcast", x, "i32")
    odd = e.binary("and", e.binary("lshr", bits, e.number(16, "i32")), e.number(1, "i32"))
    rounded = e.binary("add", bits, e.binary("add", odd, e.number(0x7FFF, "i32")))
    quiet = e.binary("or", bits, e.number(0x400000, "i32"))
    chosen = e.select(e.binary("fcmp uno", x, x, "i1"), quiet, rounded)
    return e.convert("bitcast", e.binary("and", chosen, e.number(-65536, "i32")), "float")


def _round_fp8(dtype: DType, e: Emitter, x: Reg) -> Reg:
    return fp8.decode(e, dtype, fp8.encode(e, dtype, x))


ROUND: dict[str, Callable[[Emitter, Reg], Reg]] = {
    "float32": lambda e, x: x,
    "float16": _round_half,
    "bfloat16": _round_bfloat,
    **{dtype.name: partial(_round_fp8, dtype) for dtype in FP8},
}
