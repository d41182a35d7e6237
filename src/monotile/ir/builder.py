"""Typed construction of IR: promotion, broadcasting and shape rules, each with its error."""

from __future__ import annotations

import math
from typing import Any

from .. import dtypes
from ..dtypes import DType, bool_, float32, int32, uint32
from ..errors import (
    BadAxis,
    BadGrid,
    BadSide,
    ConstantFailed,
    DTypeMismatch,
    KernelError,
    Loc,
    NumberDoesNotFit,
    RankTooHigh,
    ShapeMismatch,
    ShapeNotConstant,
    UndefinedForDType,
)
from . import bits, composed, ops
from .ops import Block, Op, Tensor, Type, Value

Number = int | float | bool
ValueOrNumber = Value | int | float | bool
GlobalRead = tuple[dict[str, Any], str, Any]  # a namespace, a name in it, and the value that was compiled in

SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "lt": "<", "le": "<=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>", "max": "maximum", "min": "minimum",
    "neg": "-", "not": "~",
}  # fmt: skip


LOGICAL = ("and", "or", "xor")  # of bools, and of the bits of integers
LARGEST = float.fromhex("0x1.ffffffp127")  # smaller magnitudes round to a finite float32
MAX_SIDE = 2**16  # of a tile; ops.MAX_LENGTH leaves this margin below 2**31
GRID_SIZE_OPS = ops.ELEMENTWISE - {"lookup"} | {"const", "dim", "param"}


class Builder:
    """Append ops to the current block. Every new op and every error gets the source location `loc`."""

    def __init__(self, block: Block) -> None:
        self.entry = self.block = block
        self.loc: Loc | None = None
        self._dims: dict[str | int, Value] = {}
        self._has_grid = False
        self.globals_read: list[GlobalRead] = []
        self.captured: dict[int, Tensor] = {}  # tensors that stand for captured arrays, by the array's id
        self.counts_bools = False  # in a mod: a bool beside a number is 0 or 1
        self.flat: set[Value] = set()  # results of piecewise constant functions: their derivative is zero
        self.numbers: dict[Any, Value] = {}  # scalars that stand for captured numbers, by where these are bound

    def fail(self, kind: type[KernelError], found: str, cure: str) -> KernelError:
        return kind(found, cure, self.loc)

    def emit(self, kind: str, operands: tuple[Value, ...], *types: Type, **attrs: Any) -> Op:
        op = Op(kind, operands, attrs, types, loc=self.loc)
        self.block.ops.append(op)
        return op

    # ---- constants ---------------------------------------------------------------------------------------------------

    def const(self, value: Number, dtype: DType) -> Value:
        """Emit a scalar constant."""
        self.check_range(value, dtype)
        value = float(value) if dtype.is_float else bool(value) if dtype is bool_ else int(value)
        return self.emit("const", (), Type(dtype), value=value).result

    def check_range(self, value: Number, dtype: DType) -> None:
        """Raise NumberDoesNotFit for a number outside the range of its type."""
        if dtype.is_int:
            low, high = dtype.limits
            if not low <= value <= high:
                cure = "use a smaller number" if dtype.bits == 64 else "use a wider type: .astype(int64)"
                raise self.fail(NumberDoesNotFit, f"{_digits(value)} does not fit {dtype} ({low} to {high})", cure)
        elif dtype.is_float and abs(value) >= LARGEST and not (isinstance(value, float) and math.isinf(value)):
            raise self.fail(NumberDoesNotFit, f"{_digits(value)} does not fit {dtype}", "use a smaller number, or inf")

    def value(self, operand: ValueOrNumber, like: DType | None = None) -> Value:
        """Convert a number to a constant of the type `like`; by default an int is int32 and a float is float32."""
        if isinstance(operand, Value):
            return operand
        natural = bool_ if isinstance(operand, bool) else int32 if isinstance(operand, int) else float32
        if like is None:
            return self.const(operand, natural)
        if like.kind != natural.kind and not (natural is int32 and like.is_float):
            what = {"float": "the tile first: .astype(float32)", "bool": "the bool: int(x)"}.get(natural.kind)
            cure = f"cast {what}" if what else "compare first: x != 0"
            raise self.fail(DTypeMismatch, f"the number {_digits(operand)} does not promote with {like}", cure)
        self.check_range(operand, like)
        return self.const(operand, dtypes.computed(like))

    def dim(self, tensor: Tensor, axis: int) -> ValueOrNumber:
        """Return a tensor's length. Run-time lengths are read once, at the kernel's top; equal names share a value."""
        length = tensor.dims[axis]
        if isinstance(length, int):
            return length
        if length not in self._dims:
            op = Op("dim", (), {"tensor": tensor, "axis": axis}, (Type(int32),), loc=self.loc)
            op.result.hint = f"{tensor.name}_{axis}"
            self.entry.ops.insert(len(self._dims), op)
            self._dims[length] = op.result
        return self._dims[length]

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def binary(self, kind: str, left: ValueOrNumber, right: ValueOrNumber) -> Value:
        if kind in ("gt", "ge"):
            kind, left, right = {"gt": "lt", "ge": "le"}[kind], right, left
        if kind in ("shl", "shr"):
            return bits.shift(self, kind, left, right)
        if self.counts_bools and kind in composed.COUNTING:
            left, right = composed.counted(self, left, right), composed.counted(self, right, left)
        if kind == "div":  # true division: a quotient of integers is a float32, as in Python
            left, right = self._fractional(left), self._fractional(right)
        a, b = self._pair(kind, left, right)
        dtype = a.dtype
        if kind in LOGICAL and dtype.is_int:
            return self.elementwise(f"bit{kind}", (a, b), dtype)
        cures = {
            "div": (dtype.is_float, "cast the bool: .astype(float32)"),
            "floordiv": (dtype.is_int, "use floor(x / y) for floats"),
            "mod": (dtype.is_int, "cast to an integer type first"),
            "and": (dtype is bool_, "compare first: (x != 0) & ..., or cast to an integer type"),
            "or": (dtype is bool_, "compare first: (x != 0) | ..., or cast to an integer type"),
            "xor": (dtype is bool_, "cast to an integer type first"),
        }
        allowed, cure = cures.get(kind, (dtype is not bool_ or kind in ("eq", "ne"), "cast the bool: .astype(int32)"))
        if not allowed:
            raise self.fail(UndefinedForDType, f"'{SYMBOLS[kind]}' is not defined for {dtype}", cure)
        if kind in ("floordiv", "mod") and ops.constant(b) == 0:
            raise self.fail(ConstantFailed, f"'{SYMBOLS[kind]}' divides by zero", "correct the constants")
        kind = "ne" if kind == "xor" else kind
        return self.elementwise(kind, (a, b), bool_ if kind in ops.COMPARE else dtype)

    def _fractional(self, operand: ValueOrNumber) -> ValueOrNumber:
        """Convert an integer to float32; leave floats and bools as they are."""
        if isinstance(operand, Value):
            return self.cast(operand, float32) if operand.dtype.is_int else operand
        return self.const(operand, float32) if type(operand) is int else operand

    def unary(self, kind: str, operand: ValueOrNumber) -> Value:
        value = self.value(operand)
        value = self.cast(value, dtypes.computed(value.dtype))
        if kind == "not" and value.dtype.is_int:
            every = value.dtype.limits[1] if value.dtype.is_unsigned else -1
            return self.binary("xor", value, every)
        if kind == "not":
            allowed, cure = value.dtype is bool_, "~ is for bool and integers; compare first: x == 0"
        elif kind in ("neg", "abs"):
            allowed, cure = value.dtype is not bool_, "cast the bool: .astype(int32)"
        else:
            allowed, cure = value.dtype.is_float, "cast first: .astype(float32)"
        if not allowed:
            raise self.fail(UndefinedForDType, f"'{SYMBOLS.get(kind, kind)}' is not defined for {value.dtype}", cure)
        return self.elementwise(kind, (value,), value.dtype)

    def fma(self, *operands: ValueOrNumber) -> Value:
        values = [self.value(x, float32) for x in operands]
        for value in values:
            if not value.dtype.is_float:
                found = f"'fma' is not defined for {value.dtype}"
                raise self.fail(UndefinedForDType, found, "cast first: .astype(float32)")
        a, b, c = (self.cast(value, dtypes.computed(value.dtype)) for value in values)
        return self.elementwise("fma", (a, b, c), a.dtype)

    def where(self, condition: ValueOrNumber, yes: ValueOrNumber, no: ValueOrNumber) -> Value:
        c = self.value(condition)
        if c.dtype is not bool_:
            found = f"where needs a bool condition, found {c.type}"
            raise self.fail(UndefinedForDType, found, "compare: where(x != 0, ...)")
        a, b = self._pair("where", yes, no)
        return self.elementwise("where", (c, a, b), a.dtype)

    def choose(self, first: bool, yes: ValueOrNumber, no: ValueOrNumber) -> ValueOrNumber:
        """Lower where() with a compile-time condition. Type and shape do not depend on which side is taken."""
        if not isinstance(yes, Value) and not isinstance(no, Value):
            return yes if first else no
        a, b = self._pair("where", yes, no)
        return self.broadcast(a if first else b, self.broadcast_shape((a, b)))

    def cast(self, operand: ValueOrNumber, dtype: DType) -> Value:
        value = self.value(operand)
        return value if value.dtype is dtype else self.elementwise("cast", (value,), dtype)

    def _pair(self, kind: str, left: ValueOrNumber, right: ValueOrNumber) -> tuple[Value, Value]:
        like_left = right.dtype if isinstance(right, Value) else None
        like_right = left.dtype if isinstance(left, Value) else None
        if isinstance(left, float) and like_left is not None and like_left.is_int:
            like_left = float32
        if isinstance(right, float) and like_right is not None and like_right.is_int:
            like_right = float32
        if not isinstance(left, Value) and not isinstance(right, Value):
            like_left = like_right = float32 if {type(left), type(right)} == {int, float} else None
        a, b = self.value(left, like_left), self.value(right, like_right)
        dtype = dtypes.promote(a.dtype, b.dtype)
        if dtype is None:
            word = SYMBOLS.get(kind, kind)
            raise self.fail(
                DTypeMismatch,
                f"{a.type} and {b.type} do not promote to a common type in '{word}'",
                f"cast one of them, for example .astype({'int64' if a.dtype.is_int and b.dtype.is_int else 'float32'})",
            )
        if kind == "where":  # choosing computes nothing, so a narrow type stays
            tiles = {v.dtype for v in (left, right) if isinstance(v, Value)}
            dtype = tiles.pop() if len(tiles) == 1 else dtype
        return self.cast(a, dtype), self.cast(b, dtype)

    def elementwise(self, kind: str, operands: tuple[Value, ...], dtype: DType) -> Value:
        shape = self.broadcast_shape(operands)
        return self.emit(kind, tuple(self._lift(v, len(shape)) for v in operands), Type(dtype, shape)).result

    def _lift(self, value: Value, rank: int) -> Value:
        """Add a leading dimension of 1 to a tile of lower rank, as NumPy does. Scalars stay scalars."""
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

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def arange(self, count: int) -> Value:
        self.side(count)
        return self.emit("arange", (), Type(int32, (count,))).result

    def side(self, count: Any) -> int:
        if isinstance(count, Value):
            cure = "tile sides are compile-time: use a Const parameter, or name the dimension after a Const"
            raise self.fail(ShapeNotConstant, "a tile side is only known at run time", cure)
        if isinstance(count, bool) or not isinstance(count, int):
            found = f"a tile side must be a whole number, found {type(count).__name__}"
            raise self.fail(BadSide, found, "use an int, or a tuple of one or two for a shape")
        if not 1 <= count <= MAX_SIDE:
            found = f"a tile side must be from 1 to {MAX_SIDE}, found {_digits(count)}"
            raise self.fail(BadSide, found, "use a side from 1 up; loop over the rest")
        return count

    def full(self, operand: ValueOrNumber, shape: tuple[int, ...]) -> Value:
        self.rank(len(shape))
        value = self.value(operand)
        if value.shape:
            found = f"full takes one number, found a tile {value.type}"
            raise self.fail(ShapeMismatch, found, "let the tile broadcast instead: x + zeros(shape)")
        for side in shape:
            self.side(side)
        return self.broadcast(value, shape)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Broadcast a value to a shape it is known to fit."""
        value = self._lift(value, len(shape))
        return value if value.shape == shape else self.emit("broadcast", (value,), Type(value.dtype, shape)).result

    def rank(self, rank: int) -> None:
        if rank > 2:
            cure = "index one dimension with a single position, or work on one slice per program"
            found = f"this would be a tile of rank {rank}; tiles have at most two dimensions"
            raise self.fail(RankTooHigh, found, cure)

    def expand(self, value: Value, position: int) -> Value:
        self.rank(len(value.shape) + 1)
        shape = (*value.shape[:position], 1, *value.shape[position:])
        return self.emit("expand", (value,), Type(value.dtype, shape), position=position).result

    def trans(self, value: Value) -> Value:
        if len(value.shape) != 2:
            cure = "transpose tiles of two dimensions; add one with x[:, None]"
            raise self.fail(ShapeMismatch, f".T needs a tile of rank 2, found {value.type}", cure)
        return self.emit("trans", (value,), Type(value.dtype, value.shape[::-1])).result

    # ---- folds -------------------------------------------------------------------------------------------------------

    def reduce(self, fold: str, value: Value, axis: int) -> Value:
        value, axis = self._folded(fold, value, axis)
        if value.dtype is uint32:
            return bits.reduce_unsigned(self, fold, value, axis)
        shape = value.shape[:axis] + value.shape[axis + 1 :]
        return self.emit("reduce", (value,), Type(value.dtype, shape), fold=fold, axis=axis).result

    def cumsum(self, value: Value, axis: int) -> Value:
        value, axis = self._folded("sum", value, axis)
        if value.dtype is uint32:
            return self.cast(self.cumsum(self.cast(value, int32), axis), uint32)
        return self.emit("scan", (value,), value.type, axis=axis).result

    def _folded(self, fold: str, value: Value, axis: int) -> tuple[Value, int]:
        """Check what is folded along an axis, and return it in the type in which that happens."""
        rank = len(value.shape)
        if not -rank <= axis < rank:
            cure = "give an axis the tile has, counted from 0" if rank else "scalars cannot be reduced"
            raise self.fail(BadAxis, f"axis {_digits(axis)} does not exist in {value.type}", cure)
        if value.dtype is bool_ and fold == "sum":
            raise self.fail(UndefinedForDType, "sum is not defined for bool", "cast first: .astype(int32)")
        return self.cast(value, dtypes.computed(value.dtype)), axis % rank

    def dot(self, a: Value, b: Value) -> Value:
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
            fits = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1]
            cure = "transpose the second operand: dot(a, b.T)" if fits else "dot takes (m, k) and (k, n)"
            raise self.fail(ShapeMismatch, f"dot of shapes {a.shape} and {b.shape} does not fit", cure)
        if composed.multiplies_integers(a, b):
            return composed.integer_dot(self, a, b)
        for operand in (a, b):
            if not operand.dtype.is_float:
                found = f"dot of {a.dtype} and {b.dtype} is not defined"
                raise self.fail(UndefinedForDType, found, "dot takes two floats, or two of int8 and uint8: cast first")
        a, b = (self.cast(x, bits.dot_type(x, y)) for x, y in ((a, b), (b, a)))
        return self.emit("dot", (a, b), Type(float32, (a.shape[0], b.shape[1]))).result

    def program_id(self, counts: list[ValueOrNumber]) -> tuple[Value, ...]:
        """Declare the kernel's one grid, sized before the launch, and return this program's position in it."""
        if self._has_grid or self.block is not self.entry:
            found = "program_id is called twice" if self._has_grid else "program_id inside a run-time loop or branch"
            raise self.fail(BadGrid, found, "call it once, at the top: i, j = program_id(cdiv(m, BM), cdiv(n, BN))")
        for count in counts:
            if not isinstance(count, Value) and count < 0:
                raise self.fail(BadGrid, f"a grid of {_digits(count)} programs", "use a count from 0 up")
        sizes = tuple(self.cast(c, int32) for c in counts)
        if not all(_computable_before_launch(size) for size in sizes):
            cure = "compute it from lengths, scalars and constants"
            raise self.fail(BadGrid, "the size of the grid depends on what a tensor holds", cure)
        self._has_grid = True
        return self.emit("program_id", sizes, *(Type(int32) for _ in sizes)).results

    def cdiv(self, a: ValueOrNumber, b: ValueOrNumber) -> ValueOrNumber:
        if not isinstance(b, Value) and b < 1:
            raise self.fail(ConstantFailed, f"cdiv divides by {_digits(b)}", "divide by a number from 1 up")
        if not isinstance(a, Value) and not isinstance(b, Value):
            return -(-a // b)
        less = self.binary("sub", b, 1) if isinstance(b, Value) else b - 1
        return self.binary("floordiv", self.binary("add", a, less), b)


def _computable_before_launch(size: Value) -> bool:
    """Return True if a value is computed from lengths, scalars and constants alone."""
    seen, stack = {size}, [size]
    while stack:
        op = stack.pop().op
        if op is None or op.kind not in GRID_SIZE_OPS:
            return False
        fresh = [v for v in op.operands if v not in seen]
        seen.update(fresh)
        stack += fresh
    return True


def _digits(value: Number) -> str:
    """Format a number for a message; Python refuses to print very long ones."""
    return str(value) if isinstance(value, float) or abs(value) < 10**40 else "a number of more than 40 digits"
