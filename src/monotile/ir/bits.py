"""Construction of shifts, lookups and folds of unsigned integers, each with its errors. `b` is the builder."""

from __future__ import annotations

from typing import Any

from .. import dtypes
from ..dtypes import DType, float16, float32, int32, uint32
from ..errors import ConstantFailed, DTypeMismatch, ShapeNotConstant, UndefinedForDType
from . import ops
from .ops import Type, Value

Number = Value | int | float | bool
SYMBOLS = {"shl": "<<", "shr": ">>"}


def shift(b: Any, kind: str, left: Number, right: Number) -> Value:
    """Emit a shift. The result has the type of what is shifted; the count may be a narrower integer."""
    like = right.dtype if isinstance(right, Value) and not isinstance(left, Value) else None
    value = b.value(left, like if like is not None and like.is_int else None)
    value = b.cast(value, dtypes.computed(value.dtype))
    dtype = value.dtype
    count = b.value(right)
    for item in (value, count):
        if not item.dtype.is_int:
            found = f"'{SYMBOLS[kind]}' is not defined for {item.dtype}"
            raise b.fail(UndefinedForDType, found, "cast to an integer type first: .astype(int32)")
    known = ops.constant(count)
    if known is not None and not 0 <= known < dtype.bits:
        found = f"'{SYMBOLS[kind]}' by {known} positions moves every bit of {dtype} out"
        raise b.fail(ConstantFailed, found, f"shift by 0 to {dtype.bits - 1} positions")
    if count.dtype.bits > dtype.bits:
        found = f"the count of '{SYMBOLS[kind]}' is {count.dtype}, wider than the {dtype} it shifts"
        raise b.fail(DTypeMismatch, found, f"cast the count: .astype({dtype})")
    result: Value = b.elementwise(kind, (value, b.cast(count, dtype)), dtype)
    return result


def lookup(b: Any, table: tuple[Any, ...], index: Value) -> Value:
    """Look a compile-time table of numbers up at run-time positions; positions outside of it give 0."""
    numbers = bool(table) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in table)
    if not numbers or len(table) > ops.MAX_TABLE:
        cure = f"use a constant position, or a table of 1 to {ops.MAX_TABLE} numbers"
        raise b.fail(ShapeNotConstant, f"a tuple of {len(table)} is indexed by a run-time value", cure)
    if not index.dtype.is_int:
        cure = "use whole numbers: .astype(int32)"
        raise b.fail(UndefinedForDType, f"a table is indexed by {index.type}", cure)
    dtype = int32 if all(isinstance(x, int) for x in table) else float32
    for number in table:
        b.check_range(number, dtype)
    held = tuple(int(x) if dtype is int32 else float(x) for x in table)
    limits = int32.limits
    if index.dtype.bits == 64 or index.dtype is uint32:  # low bits of a position far outside might be inside
        index = b.binary("min", index if index.dtype is uint32 else b.binary("max", index, -1), limits[1])
    index = b.cast(index, int32)
    result: Value = b.emit("lookup", (index,), Type(dtype, index.shape), table=held).result
    return result


def reduce_unsigned(b: Any, fold: str, value: Value, axis: int) -> Value:
    """Reduce as int32: a sum has the same bits, and with the top bit flipped the order is the same."""
    top = 0 if fold == "sum" else 2**31
    signed = b.cast(b.binary("xor", value, top), int32)
    result: Value = b.binary("xor", b.cast(b.reduce(fold, signed, axis), uint32), top)
    return result


def dot_type(x: Value, other: Value) -> DType:
    """Return the type that an operand of a dot is cast to. Every fp8 number is a float16 and a bfloat16."""
    if x.dtype in dtypes.FP8:
        return float16 if other.dtype in dtypes.FP8 else other.dtype
    return x.dtype if other.dtype is x.dtype or other.dtype in dtypes.FP8 else float32
