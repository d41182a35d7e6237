"""Reshapes and running sums: one element after the other, from where it is to its place in scratch."""

from __future__ import annotations

import math

from ...ir import Op, Value
from .emit import Index, Reg
from .evaluate import Evaluator
from .point import Point
from .vectors import register_type


def emit_move(ev: Evaluator, op: Op, edge: bool) -> None:
    """Emit a reshape or scan, whose result has a buffer."""
    (_emit_scan if op.kind == "scan" else _emit_reshape)(ev, op, edge)


def _emit_reshape(ev: Evaluator, op: Op, edge: bool) -> None:
    (source,) = op.operands

    def element(flat: Index) -> None:
        x = ev.value(source, _point(ev, source, _unravelled(ev, flat, source.shape), edge))
        there = _point(ev, op.result, _unravelled(ev, flat, op.result.shape), edge)
        ev.scratch.write(ev.buffers[op.result], there, x)

    ev.e.loop(0, math.prod(source.shape), 1, element)


def _emit_scan(ev: Evaluator, op: Op, edge: bool) -> None:
    e, (source,), axis = ev.e, op.operands, op.attrs["axis"]
    kind = register_type(op.result.dtype)

    def line(across: Index) -> None:
        total = e.var(kind, e.number(0, kind).text)

        def element(along: Index) -> None:
            place = [along] if len(source.shape) == 1 else [along, across] if axis == 0 else [across, along]
            x = ev.value(source, _point(ev, source, place, edge))
            e.set(total, ev.combine("sum", Reg(e.get(total), kind), x).text)
            ev.scratch.write(ev.buffers[op.result], _point(ev, op.result, place, edge), Reg(e.get(total), kind))

        e.loop(0, source.shape[axis], 1, element)

    e.loop(0, 1 if len(source.shape) == 1 else source.shape[1 - axis], 1, line)


def _point(ev: Evaluator, value: Value, place: list[Index], edge: bool) -> Point:
    dims = ev.axes.dims(value)
    return Point({axis: at for axis, at in zip(dims, place, strict=True) if axis is not None}, edge=edge)


def _unravelled(ev: Evaluator, flat: Index, shape: tuple[int, ...]) -> list[Index]:
    """Return the position of an element that is counted rows first."""
    if len(shape) == 1:
        return [flat]
    if isinstance(flat, int):
        return [flat // shape[1], flat % shape[1]]
    return [ev.e.op(f"udiv i64 {flat}, {shape[1]}"), ev.e.op(f"urem i64 {flat}, {shape[1]}")]
