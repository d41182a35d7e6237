"""Constant folding: constants, identities, decided comparisons and branches, bounds that hold by construction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import bool_, float32, to_numpy
from ..ir import ELEMENTWISE, Block, Kernel, Op, Tensor, Value, constant, replace, starts, view_of
from ..ir.affine import Linear, linear
from ..ir.builder import Builder
from ..ir.fused import fma

Number = int | float | bool


def fold(kernel: Kernel) -> None:
    """Simplify ops until nothing changes. Every identity holds for all values, NaN and -0.0 included."""
    while True:
        renamed: dict[Value, Value] = {}
        _block(kernel.body, renamed)
        if not renamed:
            break
        replace(kernel.body, renamed)


def _block(block: Block, renamed: dict[Value, Value]) -> None:
    ops, block.ops = block.ops, []
    builder = Builder(block)
    for op in ops:
        op.operands = tuple(_current(v, renamed) for v in op.operands)
        for inner in op.blocks:
            _block(inner, renamed)
        builder.loc = op.loc
        if op.kind == "if" and constant(op.operands[0]) is not None:
            chosen = op.blocks[0 if constant(op.operands[0]) else 1]
            block.ops.extend(chosen.ops[:-1])
            renamed.update(zip(op.results, (_current(v, renamed) for v in chosen.terminator.operands), strict=True))
            continue
        if op.kind == "for" and _never_runs(op):
            renamed.update(zip(op.results, op.operands[2:], strict=True))
            continue
        if op.kind == "visible" and constant(op.operands[0]):
            continue
        if op.kind in ("load", "store"):
            _relax_bounds(op)
        new = _simplify(builder, op) if len(op.results) == 1 and not op.blocks else None
        if new is None:
            block.ops.append(op)
        else:
            new.hint = new.hint or op.result.hint
            renamed[op.result] = new


def _current(value: Value, renamed: dict[Value, Value]) -> Value:
    while value in renamed:
        value = renamed[value]
    return value


def _never_runs(op: Op) -> bool:
    low, high = (constant(v) for v in op.operands[:2])
    return low is not None and high is not None and low >= high


# ---- values ----------------------------------------------------------------------------------------------------------


def _simplify(b: Builder, op: Op) -> Value | None:
    """Return a simpler value equal to the op's result, or None."""
    if op.kind in ELEMENTWISE:
        known = [constant(v) for v in op.operands]
        if all(k is not None for k in known):
            value = _evaluate(op, known)
            if value is not None:
                return b.broadcast(b.const(value, op.result.dtype), op.result.shape)
        rule = RULES.get(op.kind)
        value_ = rule(b, op, known) if rule else None
        return b.broadcast(value_, op.result.shape) if value_ is not None else None
    if op.kind == "reduce":
        return _reduce(b, op)
    source = op.operands[0].op if op.operands else None
    if op.kind == "trans" and source is not None and source.kind == "trans":
        return source.operands[0]
    stretched = source is not None and source.kind == "broadcast" and not source.operands[0].shape
    if stretched and source is not None and op.kind in ("expand", "trans", "broadcast"):
        return b.broadcast(source.operands[0], op.result.shape)
    return None


def _reduce(b: Builder, op: Op) -> Value | None:
    """Reduce a constant tile. NaN is left alone, since max and min ignore it, and so are sums, which may round."""
    value = constant(op.operands[0])
    if value is None or value != value or (op.attrs["fold"] == "sum" and value != 0):
        return None
    return b.broadcast(b.const(value, op.result.dtype), op.result.shape)


def _evaluate(op: Op, known: list[Any]) -> Number | None:
    """Evaluate the op on constants with the language's rounding; None when it is left to the backend."""
    dtype = op.result.dtype
    if "restored" in op.attrs:
        return None
    if op.kind == "cast":
        if dtype is float32 or dtype is bool_:
            return float(np.float32(known[0])) if dtype is float32 else bool(known[0])
        fits = dtype.is_int and not dtype.is_narrow and isinstance(known[0], int) and abs(known[0]) < 2**31
        fits = fits and known[0] >= dtype.limits[0]
        return int(known[0]) if fits else None
    function = EVALUATE.get(op.kind)
    if function is None:
        return None
    with np.errstate(all="ignore"):
        result = function(*(to_numpy(v.dtype).type(k) for v, k in zip(op.operands, known, strict=True)))
    number = result.item()
    if dtype.is_int and not dtype.limits[0] <= number <= dtype.limits[1]:
        return None
    return bool(number) if dtype is bool_ else int(number) if dtype.is_int else float(number)


EVALUATE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b if b else type(a)(0), "mod": lambda a, b: a % b if b else type(a)(0),
    "max": np.fmax, "min": np.fmin, "neg": lambda a: -a, "abs": np.abs, "reciprocal": np.reciprocal,
    "and": np.logical_and, "or": np.logical_or, "bitand": np.bitwise_and, "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "not": np.logical_not, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b, "where": lambda c, a, b: a if c else b, "fma": fma,
}  # fmt: skip


def _add(b: Builder, op: Op, known: list[Any]) -> Value | None:
    x, y = op.operands
    if op.result.dtype.is_int:  # for floats x + 0.0 is not x when x is -0.0
        if known[1] == 0:
            return x
        if known[0] == 0 and op.kind == "add":
            return y
    elif op.kind == "sub" and known[1] == 0.0 and math.copysign(1.0, known[1]) > 0:
        return x
    return None


def _mul(b: Builder, op: Op, known: list[Any]) -> Value | None:
    x, y = op.operands
    if known[1] == 1:
        return x
    if known[0] == 1 and op.kind == "mul":
        return y
    if op.result.dtype.is_int and op.kind == "mul" and 0 in (k for k in known if k is not None):
        return b.const(0, op.result.dtype)
    return None


def _bits(b: Builder, op: Op, known: list[Any]) -> Value | None:
    """A shift by 0, and `|` or `^` with 0, change nothing."""
    return op.operands[0] if known[1] == 0 else None


def _mod(b: Builder, op: Op, known: list[Any]) -> Value | None:
    return b.const(0, op.result.dtype) if known[1] == 1 else None


def _and(b: Builder, op: Op, known: list[Any]) -> Value | None:
    neutral = op.kind == "and"
    for i in (0, 1):
        if known[i] is not None:
            return op.operands[1 - i] if bool(known[i]) == neutral else b.const(not neutral, bool_)
    return op.operands[0] if op.operands[0] is op.operands[1] else None


def _not(b: Builder, op: Op, known: list[Any]) -> Value | None:
    inner = op.operands[0].op
    return inner.operands[0] if inner is not None and inner.kind == "not" else None


def _where(b: Builder, op: Op, known: list[Any]) -> Value | None:
    seen, yes, no = op.operands
    if known[0] is not None:
        return yes if known[0] else no
    if is_zero(no) and yes.op is not None and yes.op.kind == "load" and _tests_only_bounds(seen, yes.op):
        return yes
    return yes if yes is no else None


def is_zero(value: Value) -> bool:
    """Prove that a value is 0, and not -0.0, everywhere."""
    op = value.op
    while op is not None and op.kind in ("cast", "broadcast"):
        value, op = op.operands[0], op.operands[0].op
    number = constant(value)
    return number == 0 and math.copysign(1.0, float(number)) > 0


def _tests_only_bounds(seen: Value, load: Op) -> bool:
    """Prove that a test of a load's tile is false only outside the tensor, where the load gives 0 anyway."""
    test, shift = seen.op, 0
    if test is not None and test.kind == "expand":
        shift = int(test.attrs["position"] == 0)
        test = test.operands[0].op
    if test is None or test.kind != "lt" or not test.operands[0].dtype.is_int:
        return False
    place, end = linear(test.operands[0]), test.operands[1]
    if place is None or len(place.iotas) != 1:
        return False
    (dim, factor), tensor = next(iter(place.iotas.items())), load.attrs["tensor"]
    axes = [axis for axis, extent in enumerate(load.attrs["extents"]) if extent is not None]
    axis = axes[dim + shift]
    start = linear(load.operands[axis])
    if factor != 1 or start != Linear(place.const, place.terms):
        return False
    view = view_of(load, axis)
    if view is not None:
        return end is view[1]
    length = end.op
    return length is not None and length.kind == "dim" and _length_of(length) == tensor.dims[axis]


def _length_of(dim: Op) -> str | int:
    """Return the length that a `dim` reads, as its tensor names it."""
    found: str | int = dim.attrs["tensor"].dims[dim.attrs["axis"]]
    return found


def _cast(b: Builder, op: Op, known: list[Any]) -> Value | None:
    value = op.operands[0]
    if value.dtype is op.result.dtype and "restored" not in op.attrs:  # a cast of the metal backend
        return value
    inner = value.op
    if inner is not None and inner.kind == "cast" and value.dtype is float32 and op.result.dtype.is_float:
        source = inner.operands[0]
        return source if source.dtype is op.result.dtype else None  # widening and back loses nothing
    return None


def _compare(b: Builder, op: Op, known: list[Any]) -> Value | None:
    """Decide a comparison of positions that has one answer for the whole tile."""
    x, y = op.operands
    if not x.dtype.is_int or op.kind not in ("lt", "le"):
        return None
    left, right = linear(x), linear(y)
    if left is None or right is None:
        return None
    difference = left - right
    if difference.terms or not all(_far_from_wrapping(v) for v in left.terms):
        return None
    low, high = difference.offset_range(op.result.shape or (1, 1))
    limit = 0 if op.kind == "le" else -1
    if high <= limit:
        return b.const(True, bool_)
    return b.const(False, bool_) if low > limit else None


def _far_from_wrapping(value: Value) -> bool:
    """Return True for lengths, loop counters and program ids. For other integers `n + 1 < n` may hold: they wrap."""
    return isinstance(value.owner, Block) or value.kind in ("dim", "program_id")


RULES: dict[str, Callable[[Builder, Op, list[Any]], Value | None]] = {
    "add": _add, "sub": _add, "mul": _mul, "div": _mul, "floordiv": _mul, "mod": _mod, "shl": _bits, "shr": _bits,
    "bitor": _bits, "bitxor": _bits, "and": _and, "or": _and, "not":
    _not, "where": _where, "cast": _cast, "lt": _compare, "le": _compare,
}  # fmt: skip


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _relax_bounds(op: Op) -> None:
    """Clear `checked` for dimensions in which the access cannot leave the tensor."""
    tensor: Tensor = op.attrs["tensor"]
    checked = list(op.attrs["checked"])
    for axis, (start, extent) in enumerate(zip(starts(op), op.attrs["extents"], strict=True)):
        if checked[axis] and view_of(op, axis) is None and _inside(tensor, axis, start, extent or 1):
            checked[axis] = False
    op.attrs["checked"] = tuple(checked)


def _inside(tensor: Tensor, axis: int, start: Value, extent: int) -> bool:
    length = tensor.dims[axis]
    known = constant(start)
    if isinstance(length, int) and known is not None:
        return known >= 0 and known + extent <= length
    # A program id of a grid whose size is the dimension's own length.
    grid = start.op
    if extent == 1 and grid is not None and grid.kind == "program_id":
        size = grid.operands[grid.results.index(start)].op
        if size is not None and size.kind == "dim":
            return _length_of(size) == length
        return size is not None and size.kind == "const" and size.attrs["value"] == length
    return False
