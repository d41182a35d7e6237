"""Rows that are looked up: tiles whose rows lie anywhere in a tensor, each of them contiguous, such as keys in pages of
a few positions.

The addresses of such a tile's rows are computed together, a vector of rows at a time, and kept in scratch; then a dot
streams the tile like any other (streamed_dots.py), or it is copied row by row. A row outside the tensor has the address
of a row of zeros."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir import ELEMENTWISE, SHAPE_ONLY, Kernel, Op, Value, starts, view_of
from ...ir.affine import linear
from .axes import Axes, Axis
from .emit import Index, Reg
from .evaluate import Evaluator
from .point import Point
from .scratch import Buffer
from .vectors import BYTES, STORED


@dataclass(frozen=True)
class RowGather:
    """A gather of whole rows: the axes of its tile, and the ops that its rows' positions are computed by."""

    rows: Axis
    columns: Axis
    ops: frozenset[Op]


def find_row_gathers(ops: Iterable[Op], axes: Axes, kernel: Kernel) -> dict[Op, RowGather]:
    """Return the gathers of a kernel that read whole rows."""
    found = {op: _row_gather(op, axes, kernel) for op in ops if op.kind == "gather"}
    return {op: gather for op, gather in found.items() if gather is not None}


def _row_gather(op: Op, axes: Axes, kernel: Kernel) -> RowGather | None:
    """Match a gather whose columns are the first ones of a contiguous dimension, as many as there are for certain, and
    whose other positions depend on the row alone. These are computed where they are used, from memory that the kernel
    does not write."""
    tensor, dims = op.attrs["tensor"], axes.dims(op.result)
    if len(dims) != 2 or None in dims or tensor.unit is None or tensor.index in kernel.written:
        return None
    rows, columns = dims
    places = starts(op)
    along = linear(places[tensor.unit])
    length, width = tensor.dims[tensor.unit], op.result.shape[1]
    whole = along is not None and (along.const, along.terms, along.iotas, along.remainders) == (0, {}, {1: 1}, {})
    if not whole or not isinstance(length, int) or length < width or view_of(op, tensor.unit) is not None:
        return None
    others = [value for n, value in enumerate(places) if n != tensor.unit and value.shape]
    if any(value.shape[1] != 1 for value in others) or not any(value.shape[0] != 1 for value in others):
        return None
    ops = _computed_by(others, kernel)
    assert rows is not None and columns is not None
    return RowGather(rows, columns, ops) if ops is not None else None


def _computed_by(values: list[Value], kernel: Kernel) -> frozenset[Op] | None:
    """Return the ops on tiles that integers are computed by; None if there are others than arithmetic and reading."""
    found: set[Op] = set()
    todo = list(values)
    while todo:
        value = todo.pop()
        if not value.shape or value.op in found:
            continue
        op = value.op
        if op is None:
            return None
        plain = op.kind in ELEMENTWISE or op.kind in SHAPE_ONLY or op.kind in ("arange", "const")
        read = op.kind == "gather" and op.attrs["tensor"].index not in kernel.written
        if not (plain or read):
            return None
        found.add(op)
        todo += op.operands
    return frozenset(found)


def scalars_of(op: Op, ops: frozenset[Op]) -> list[Value]:
    """Return the scalars that a gather's positions are made of."""
    return [value for each in (op, *ops) for value in each.operands if not value.shape]


def emit_row_table(ev: Evaluator, op: Op, gather: RowGather) -> Buffer:
    """Emit the addresses of a gather's rows; return where they are kept."""
    e, tensor, width = ev.e, op.attrs["tensor"], op.result.shape[1]
    element, lanes = STORED[tensor.dtype.name], e.lanes
    table = ev.scratch.new("i64", {gather.rows: 1}, gather.rows, -(-gather.rows.extent // lanes) * lanes)
    zeros = e.constant(f"[{width * BYTES[element]} x i8] zeroinitializer, align 64")
    base, nothing = (Reg(e.op(f"ptrtoint ptr {p} to i64"), "i64") for p in (ev.tensors.pointer[tensor.index], zeros))
    spans = ev.tensors.spans(op, ev.index)

    def group(first: Index, valid: int | None = None) -> None:
        pt = Point({gather.rows: first, gather.columns: 0}, gather.rows, valid)
        offset, inside = ev.tensors.offset(tensor, ev.positions(op, pt), spans)
        address = e.binary("add", base, e.binary("mul", offset, e.number(BYTES[element], "i64")))
        ev.scratch.write(table, pt, e.select(e.splat(inside), address, nothing))

    whole = gather.rows.extent // lanes * lanes
    e.loop(0, whole, lanes, group)
    if gather.rows.extent > whole:
        group(whole, gather.rows.extent - whole)
    return table
