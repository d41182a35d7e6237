"""Reshapes and running sums, from where a tile is to the storage of the result: vectors along its lanes."""

from __future__ import annotations

import math

from ...ir import Op, Value
from .emit import Index, Reg, Var
from .evaluate import Evaluator
from .point import Point
from .vectors import register_type

CHAINS = 4  # running sums across the lanes that are added side by side


def emit_move(ev: Evaluator, op: Op, edge: bool) -> None:
    """Emit a reshape or scan, whose result has a buffer."""
    if op.kind == "reshape":
        _emit_reshape(ev, op, edge)
        return
    lane, dims = ev.buffers[op.result].lane, ev.axes.dims(op.result)
    along = dims.index(lane) if lane is not None else None
    if along is None or along == op.attrs["axis"]:
        _emit_scan_along(ev, op, edge, along)
    else:
        _emit_scan_across(ev, op, edge, along)


# ---- reshapes --------------------------------------------------------------------------------------------------------


def _emit_reshape(ev: Evaluator, op: Op, edge: bool) -> None:
    """Copy vectors if rows of both shapes consist of whole ones, else one element after the other."""
    (source,) = op.operands
    run = math.gcd(source.shape[-1], op.result.shape[-1])
    lanes = [ev.axes.dims(v)[-1] for v in (source, op.result)]
    whole = run % ev.e.lanes == 0 and ev.buffers[op.result].lane is lanes[1]

    def elements(flat: Index) -> None:
        place, there = (_unravelled(ev, flat, v.shape) for v in (source, op.result))
        last = (len(place) - 1, len(there) - 1) if whole else (None, None)
        x = ev.value(source, _point(ev, source, place, edge, last[0]))
        ev.scratch.write(ev.buffers[op.result], _point(ev, op.result, there, edge, last[1]), x)

    ev.e.loop(0, math.prod(source.shape), ev.e.lanes if whole else 1, elements)


def _unravelled(ev: Evaluator, flat: Index, shape: tuple[int, ...]) -> list[Index]:
    """Return the position of an element that is counted rows first."""
    if len(shape) == 1:
        return [flat]
    if isinstance(flat, int):
        return [flat // shape[1], flat % shape[1]]
    return [ev.e.op(f"udiv i64 {flat}, {shape[1]}"), ev.e.op(f"urem i64 {flat}, {shape[1]}")]


# ---- running sums ----------------------------------------------------------------------------------------------------


def _emit_scan_across(ev: Evaluator, op: Op, edge: bool, along: int) -> None:
    """Sum rows of vectors, a few columns of vectors side by side."""
    e, (source,), axis = ev.e, op.operands, op.attrs["axis"]
    kind, side = register_type(op.result.dtype), source.shape[along]

    def columns(starts: list[Index], valid: int | None) -> None:
        totals = [e.var(e.vector_type(kind), "zeroinitializer") for _ in starts]

        def row(n: Index) -> None:
            for start, total in zip(starts, totals, strict=True):
                place = [n, start] if axis == 0 else [start, n]
                _add_next(ev, op, _point(ev, source, place, edge, along, valid), total, place, edge)

        e.loop(0, source.shape[axis], 1, row)

    step = CHAINS * e.lanes
    whole = side // step * step
    e.loop(0, whole, step, lambda first: columns([e.add(first, n * e.lanes) for n in range(CHAINS)], None))
    for first in range(whole, side, e.lanes):
        columns([first], side - first if side - first < e.lanes else None)


def _add_next(ev: Evaluator, op: Op, pt: Point, total: Var, place: list[Index], edge: bool) -> None:
    """Add a vector to the running sums, and write them."""
    e, kind = ev.e, register_type(op.result.dtype)
    x = e.splat(ev.value(op.operands[0], pt))
    text = ev.combine("sum", Reg(e.get(total), kind, True), x).text
    e.set(total, text)
    assert pt.lane is not None
    along = ev.axes.dims(op.operands[0]).index(pt.lane)
    there = _point(ev, op.result, place, edge, along, pt.valid)
    ev.scratch.write(ev.buffers[op.result], there, Reg(text, kind, True))


def _emit_scan_along(ev: Evaluator, op: Op, edge: bool, along: int | None) -> None:
    """Sum the lanes of each vector in log2 steps, and add the last sum of the vector before."""
    e, (source,), axis = ev.e, op.operands, op.attrs["axis"]
    kind, side, width = register_type(op.result.dtype), source.shape[axis], e.lanes

    def line(across: Index) -> None:
        before = e.var(e.vector_type(kind), "zeroinitializer")

        def vector(first: Index, valid: int | None) -> None:
            place = [first] if len(source.shape) == 1 else [first, across] if axis == 0 else [across, first]
            x = e.splat(ev.value(source, _point(ev, source, place, edge, along, valid)))
            step = 1
            while step < width and along is not None:
                behind = e.shuffle(
                    "zeroinitializer", x.text, kind, [i if i < step else width + i - step for i in range(width)]
                )
                x = ev.combine("sum", x, Reg(behind, kind, True))
                step *= 2
            x = ev.combine("sum", x, Reg(e.get(before), kind, True))
            e.set(before, e.shuffle(x.text, x.text, kind, [width - 1] * width))
            there = _point(ev, op.result, place, edge, along, valid)
            ev.scratch.write(ev.buffers[op.result], there, x if along is not None else _first(ev, x))

        whole = side // width * width
        e.loop(0, whole, width, lambda first: vector(first, None))
        if side - whole:
            vector(whole, side - whole)

    e.loop(0, 1 if len(source.shape) == 1 else source.shape[1 - axis], 1, line)


def _first(ev: Evaluator, x: Reg) -> Reg:
    return Reg(ev.e.op(f"extractelement {ev.e.type_of(x)} {x.text}, i64 0"), x.type)


def _point(
    ev: Evaluator, value: Value, place: list[Index], edge: bool, along: int | None = None, valid: int | None = None
) -> Point:
    """Return the point of a place, or of a vector of lanes along a dimension from there on."""
    dims = ev.axes.dims(value)
    at = {axis: n for axis, n in zip(dims, place, strict=True) if axis is not None}
    return Point(at, dims[along] if along is not None else None, valid, edge)
