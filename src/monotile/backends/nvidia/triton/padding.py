"""Tiles of any shape in a language whose tiles have powers of two.

A side of 1 stays 1 (it broadcasts); every other side becomes a power of two of at least 16, which is what a matrix unit
takes. The elements between a tile's own side and the padded one are *padding*. Padding may hold anything, except where
`holds_zero` says that it is zero; therefore reductions replace it by their identity, and stores mask it.
"""

from __future__ import annotations

from ....dtypes import FP8, DType
from ....ir import Value, constant

LEAST = 16


def padded(side: int) -> int:
    return 1 if side == 1 else max(LEAST, 1 << (side - 1).bit_length())


def padded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([padded(side) for side in shape])


def holds_zero(value: Value, axis: int) -> bool:
    """Return True if a value's padding along an axis is known to be zero. A product's is not: zero times infinity is
    NaN."""
    op = value.op
    if op is None:
        return False
    if op.kind in ("load", "gather"):
        return True
    if op.kind in ("cast", "neg"):
        return bool(op.operands[0].shape) and holds_zero(op.operands[0], axis)
    if op.kind == "trans":
        return holds_zero(op.operands[0], 1 - axis)
    if op.kind == "broadcast":
        return constant(value) == 0
    if op.kind == "where":
        return all(constant(v) == 0 or (v.shape == value.shape and holds_zero(v, axis)) for v in op.operands[1:])
    if op.kind == "expand":
        at = op.attrs["position"]
        return axis != at and holds_zero(op.operands[0], axis - (axis > at))
    return False


def identity(fold: str, dtype: DType) -> str:
    """Return the identity of a reduction, as Triton writes it."""
    if fold == "sum":
        return "0.0" if dtype.is_float and dtype not in FP8 else "0"
    if dtype.is_float:
        return 'float("-inf")' if fold == "max" else 'float("inf")'
    if dtype.kind == "bool":
        return "0" if fold == "max" else "1"
    return str(dtype.limits[0] if fold == "max" else dtype.limits[1])
