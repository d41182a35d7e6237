"""Spread loads: a gather whose positions repeat the elements of a slice becomes a load of the slice.

`t[rows[:, None], (columns // 2)[None, :]]` reads each element for two columns, as an author writes codes that share a
byte or a word, or scales that a group shares. A gather has a position for every element; a load is contiguous."""

from __future__ import annotations

from typing import NamedTuple

from ..dtypes import int32
from ..ir import Block, Kernel, Op, Spread, Value, constant, replace, starts
from ..ir.affine import Linear, linear, to_scalar
from ..ir.builder import Builder

NO_SPREAD = (1, 0, 1)


class _Side(NamedTuple):
    """Positions along one dimension of a tensor: `start + (i * factor + offset) // divisor`, where i runs along a
    dimension of the tile; None for one position."""

    start: Linear
    dim: int | None = None
    factor: int = 1
    offset: int = 0
    divisor: int = 1


def spread(kernel: Kernel) -> None:
    """Replace gathers of slices, with or without repeated elements, by loads."""
    _replace(kernel, plain=True)


def spread_repeated(kernel: Kernel) -> None:
    """Replace gathers of slices with repeated elements by loads."""
    _replace(kernel, plain=False)


def _replace(kernel: Kernel, *, plain: bool) -> None:
    renamed: dict[Value, Value] = {}
    _block(kernel.body, renamed, plain)
    replace(kernel.body, renamed)


def _block(block: Block, renamed: dict[Value, Value], plain: bool) -> None:
    ops, block.ops = block.ops, []
    builder = Builder(block)
    for op in ops:
        for inner in op.blocks:
            _block(inner, renamed, plain)
        sides = _sides(op) if op.kind == "gather" else None
        if sides is None or not (plain or any(_spread(side, op.result.shape) for side in sides)):
            block.ops.append(op)
            continue
        builder.loc = op.loc
        renamed[op.result] = _load(builder, op, sides)


def _load(b: Builder, op: Op, sides: list[_Side]) -> Value:
    spreads = tuple(_spread(side, op.result.shape) for side in sides)
    extents = tuple(s.memory if s else op.result.shape[d.dim] if d.dim is not None else None
                    for s, d in zip(spreads, sides, strict=True))  # fmt: skip
    attrs = {"tensor": op.attrs["tensor"], "extents": extents, "checked": (True,) * len(sides)}
    attrs |= {"view": op.attrs["view"]} if "view" in op.attrs else {}
    attrs |= {"spread": spreads} if any(spreads) else {}
    positions = (v if d.dim is None else to_scalar(b, d.start) for v, d in zip(starts(op), sides, strict=True))
    new = b.emit("load", (*positions, *op.operands[len(sides) :]), op.result.type, **attrs)
    new.result.hint = op.result.hint
    return new.result


def _spread(side: _Side, shape: tuple[int, ...]) -> Spread | None:
    if side.dim is None or side[2:] == NO_SPREAD:
        return None
    return Spread(shape[side.dim], *side[2:])


def _sides(op: Op) -> list[_Side] | None:
    """Return how each dimension of the tensor is read; None if not every side of the tile runs along one of them, in
    their order. A dimension that repeats elements must be known to hold all of them."""
    found: list[_Side] = []
    tensor = op.attrs["tensor"]
    for axis, index in enumerate(starts(op)):
        side = _side(index)
        if side is None:
            return None
        repeated = _spread(side, op.result.shape)
        if repeated is not None:
            length, inside = tensor.dims[axis], side.start.is_const and side.start.const >= 0
            if not inside or not isinstance(length, int) or side.start.const + repeated.memory > length:
                return None
            if axis in op.attrs.get("view", ()):
                return None
        found.append(side)
    dims = [side.dim for side in found if side.dim is not None]
    return found if dims == list(range(len(op.result.shape))) else None


def _side(index: Value) -> _Side | None:
    form = linear(index)
    if form is not None:
        if not form.iotas:
            return _Side(form)
        ((dim, factor), *more) = form.iotas.items()
        rest = Linear(form.const, form.terms)
        return _Side(rest, dim) if factor == 1 and not more and index.dtype is int32 else None
    return _quotient(index)


def _quotient(index: Value) -> _Side | None:
    """Match (i * factor + offset) // divisor, seen through views."""
    op = index.op
    if op is None or op.kind not in ("expand", "broadcast", "trans", "floordiv"):
        return None
    if op.kind == "floordiv":
        form, divisor = linear(op.operands[0]), constant(op.operands[1])
        if form is None or form.terms or len(form.iotas) != 1 or not isinstance(divisor, int) or divisor < 1:
            return None
        ((dim, factor),) = form.iotas.items()
        if factor < 1 or form.const < 0:
            return None
        whole, offset = divmod(form.const, divisor)
        return _Side(Linear(whole), dim, factor, offset, divisor)
    side = _quotient(op.operands[0])
    if side is None or side.dim is None or op.kind == "broadcast":
        return side
    dim = 1 - side.dim if op.kind == "trans" else side.dim + (side.dim >= op.attrs["position"])
    return side._replace(dim=dim)
