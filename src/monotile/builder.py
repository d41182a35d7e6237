"""Typed construction of IR: the rules of promotion, broadcasting and shapes, each with its error."""

from __future__ import annotations

import math
from typing import Any

from . import dtypes, ir
from .dtypes import DType, bool_, float32, int32
from .errors import DTypeMismatch, KernelError, RankTooHigh, ShapeMismatch, ShapeNotConstant
from .ir import Block, Loc, Op, Type, Value

Number = int | float | bool
Operand = Value | int | float | bool

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "max": "maximum", "min": "minimum",
}  # fmt: skip


class Builder:
    """Appends ops to the current block. `loc` is the place every new op and every error points at."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.loc: Loc | None = None

    def fail(self, kind: type[KernelError], found: str, cure: str) -> KernelError:
        return kind(found, cure, self.loc)

    def emit(self, kind: str, operands: tuple[Value, ...], *types: Type, **attrs: Any) -> Op:
        op = Op(kind, operands, attrs, types, loc=self.loc)
        self.block.ops.append(op)
        return op

    # ---- constants -----------------------------------------------------------------------------------------------------

    def const(self, value: Number, dtype: DType) -> Value:
        if dtype.is_float:
            value = float(value)
        elif dtype is bool_:
            value = bool(value)
        elif not -(2 ** (dtype.bits - 1)) <= value < 2 ** (dtype.bits - 1):
            raise self.fail(DTypeMismatch, f"{value} does not fit {dtype}", "cast the other operand: .astype(int64)")
        return self.emit("const", (), Type(dtype), value=value).result

    def value(self, operand: Operand, like: DType | None = None) -> Value:
        """A number becomes a constant of the type it meets; on its own an int is int32 and a float is float32."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, bool):
            found, natural = "bool", bool_
        elif isinstance(operand, int):
            found, natural = "int", int32
        else:
            found, natural = "float", float32
        if like is None:
            return self.const(operand, natural)
        like = dtypes.computed(like)
        fits = like.kind == found or (found == "int" and like.is_float)
        if not fits:
            cure = "cast the tile first: .astype(float32)" if found == "float" else f"write a {like.kind} here"
            raise self.fail(DTypeMismatch, f"the number {operand} does not promote with {like}", cure)
        return self.const(operand, like)

    # ---- elementwise ---------------------------------------------------------------------------------------------------

    def binary(self, kind: str, left: Operand, right: Operand) -> Value:
        if kind in ("gt", "ge"):
            kind, left, right = {"gt": "lt", "ge": "le"}[kind], right, left
        a, b = self._pair(kind, left, right)
        dtype = a.dtype
        cures = {
            "div": (dtype.is_float, "use // for whole numbers, or cast: .astype(float32)"),
            "floordiv": (dtype.is_int, "use / for floats"),
            "mod": (dtype.is_int, "cast to an integer type first"),
            "and": (dtype is bool_, "compare first: (x != 0) & ..."),
            "or": (dtype is bool_, "compare first: (x != 0) | ..."),
        }
        allowed, cure = cures.get(kind, (dtype is not bool_ or kind in ("eq", "ne"), "cast the bool: .astype(int32)"))
        if not allowed:
            raise self.fail(DTypeMismatch, f"'{SYMBOLS[kind]}' is not defined for {dtype}", cure)
        return self._elementwise(kind, (a, b), bool_ if kind in ir.COMPARE else dtype)

    def unary(self, kind: str, operand: Operand) -> Value:
        value = self.value(operand)
        value = self.cast(value, dtypes.computed(value.dtype))
        if kind == "not":
            allowed, cure = value.dtype is bool_, "~ is for bool; compare first: x == 0"
        elif kind in ("neg", "abs"):
            allowed, cure = value.dtype is not bool_, "cast the bool: .astype(int32)"
        else:
            allowed, cure = value.dtype.is_float, "cast first: .astype(float32)"
        if not allowed:
            raise self.fail(DTypeMismatch, f"{kind} is not defined for {value.dtype}", cure)
        return self._elementwise(kind, (value,), value.dtype)

    def where(self, condition: Operand, yes: Operand, no: Operand) -> Value:
        c = self.value(condition)
        if c.dtype is not bool_:
            raise self.fail(DTypeMismatch, f"where needs a bool condition, found {c.dtype}", "compare: where(x != 0, ...)")
        a, b = self._pair("where", yes, no)
        return self._elementwise("where", (c, a, b), a.dtype)

    def cast(self, operand: Operand, dtype: DType) -> Value:
        value = self.value(operand)
        return value if value.dtype is dtype else self._elementwise("cast", (value,), dtype)

    def _pair(self, kind: str, left: Operand, right: Operand) -> tuple[Value, Value]:
        like_left = right.dtype if isinstance(right, Value) else None
        like_right = left.dtype if isinstance(left, Value) else None
        if like_left is None and like_right is None and isinstance(left, float) != isinstance(right, float):
            left, right = float(left), float(right)  # type: ignore[arg-type]
        a, b = self.value(left, like_left), self.value(right, like_right)
        dtype = dtypes.promote(a.dtype, b.dtype)
        if dtype is None:
            word = SYMBOLS.get(kind, kind)
            raise self.fail(
                DTypeMismatch,
                f"{a.type} and {b.type} do not promote to a common type in '{word}'",
                "cast one of them, for example .astype(float32)",
            )
        return self.cast(a, dtype), self.cast(b, dtype)

    def _elementwise(self, kind: str, operands: tuple[Value, ...], dtype: DType) -> Value:
        shape = self.broadcast_shape(operands)
        return self.emit(kind, tuple(self._lift(v, len(shape)) for v in operands), Type(dtype, shape)).result

    def _lift(self, value: Value, rank: int) -> Value:
        """NumPy's rule: missing leading dimensions count as 1. Scalars stay scalars."""
        return self.expand(value, 0) if len(value.shape) == 1 and rank == 2 else value

    def broadcast_shape(self, operands: tuple[Value, ...]) -> tuple[int, ...]:
        rank = max(len(v.shape) for v in operands)
        shape = []
        for axis in range(-rank, 0):
            sides = {v.shape[axis] for v in operands if len(v.shape) >= -axis}
            if len(sides - {1}) > 1:
                shapes = " and ".join(str(v.shape) for v in operands if v.shape)
                cure = "make the sides equal, or add one with x[:, None] or x[None, :]"
                raise self.fail(ShapeMismatch, f"shapes {shapes} do not broadcast", cure)
            shape.append(max(sides - {1}, default=1))
        return tuple(shape)

    # ---- shapes --------------------------------------------------------------------------------------------------------

    def arange(self, count: int) -> Value:
        self.side(count)
        return self.emit("arange", (), Type(int32, (count,))).result

    def side(self, count: Any) -> int:
        if isinstance(count, Value):
            cure = "tile sides are compile-time: use a Const parameter, or name the dimension after a Const"
            raise self.fail(ShapeNotConstant, "a tile side is only known at run time", cure)
        if isinstance(count, bool) or not isinstance(count, int):
            raise self.fail(ShapeNotConstant, f"a tile side must be a whole number, found {count!r}", "use an int")
        if count < 1:
            raise self.fail(ShapeMismatch, f"a tile side must be at least 1, found {count}", "use a side from 1 up")
        return count

    def full(self, operand: Operand, shape: tuple[int, ...]) -> Value:
        self.rank(len(shape))
        value = self.value(operand)
        if value.shape:
            raise self.fail(ShapeMismatch, f"full takes one number, found a tile {value.type}", "use broadcasting instead")
        for side in shape:
            self.side(side)
        return self.broadcast(value, shape)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """The value stretched to a shape it is known to broadcast to."""
        value = self._lift(value, len(shape))
        return value if value.shape == shape else self.emit("broadcast", (value,), Type(value.dtype, shape)).result

    def rank(self, rank: int) -> None:
        if rank > 2:
            cure = "index one dimension with a single position, or work on one slice per program"
            raise self.fail(RankTooHigh, f"this would be a tile of rank {rank}; tiles have at most two dimensions", cure)

    def expand(self, value: Value, position: int) -> Value:
        self.rank(len(value.shape) + 1)
        shape = (*value.shape[:position], 1, *value.shape[position:])
        return self.emit("expand", (value,), Type(value.dtype, shape), position=position).result

    def trans(self, value: Value) -> Value:
        if len(value.shape) != 2:
            cure = "transpose tiles of two dimensions; add one with x[:, None]"
            raise self.fail(ShapeMismatch, f".T needs a tile of rank 2, found {value.type}", cure)
        return self.emit("trans", (value,), Type(value.dtype, value.shape[::-1])).result

    # ---- folds ---------------------------------------------------------------------------------------------------------

    def reduce(self, fold: str, value: Value, axis: int) -> Value:
        rank = len(value.shape)
        if not -rank <= axis < rank:
            cure = "give an axis the tile has, counted from 0" if rank else "scalars cannot be reduced"
            raise self.fail(ShapeMismatch, f"axis {axis} does not exist in {value.type}", cure)
        axis %= rank
        if value.dtype is bool_ and fold == "sum":
            raise self.fail(DTypeMismatch, "sum is not defined for bool", "cast first: .astype(int32)")
        value = self.cast(value, dtypes.computed(value.dtype))
        shape = value.shape[:axis] + value.shape[axis + 1 :]
        return self.emit("reduce", (value,), Type(value.dtype, shape), fold=fold, axis=axis).result

    def dot(self, a: Value, b: Value) -> Value:
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
            fits = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1]
            cure = "transpose the second operand: dot(a, b.T)" if fits else "dot takes (m, k) and (k, n)"
            raise self.fail(ShapeMismatch, f"dot of shapes {a.shape} and {b.shape} does not fit", cure)
        for operand in (a, b):
            if not operand.dtype.is_float:
                found = f"dot is not defined for {operand.dtype}"
                raise self.fail(DTypeMismatch, found, "cast first: .astype(float32)")
        if a.dtype is not b.dtype:
            a, b = self.cast(a, float32), self.cast(b, float32)
        return self.emit("dot", (a, b), Type(float32, (a.shape[0], b.shape[1]))).result

    def program_id(self, counts: list[Operand]) -> tuple[Value, ...]:
        sizes = tuple(self.cast(self.value(c), int32) for c in counts)
        return self.emit("program_id", sizes, *(Type(int32) for _ in sizes)).results

    def cdiv(self, a: Operand, b: Operand) -> Operand:
        if not isinstance(a, Value) and not isinstance(b, Value):
            return math.ceil(a / b) if isinstance(a, float) else -(-a // b)
        return self.binary("floordiv", self.binary("add", a, self.binary("sub", b, 1) if isinstance(b, Value) else b - 1), b)
