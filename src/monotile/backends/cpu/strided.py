"""Gathers and scatters whose positions step by a small constant along the lanes: whole vectors of memory, shuffled.

A gather reads the vectors that its elements are in. Scatters of one nest that fill each other's gaps (even and odd
columns) are interleaved and written as whole vectors; one alone is a masked store."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...ir import Op, Value, starts
from ...ir.affine import linear
from .emit import Emitter, Reg
from .vectors import BYTES, lane_mask, masked_load, masked_store, scatter

MAX_STEP = 4  # beyond, an element at a time is as fast


class Positions(NamedTuple):
    """The positions of an access at a point: a register for each dimension, and the value it is of. Lanes that the
    mask leaves out are outside the tensor."""

    regs: list[Reg]
    values: list[Value]
    mask: Reg | None


class Walk(NamedTuple):
    """The one dimension along which positions change from lane to lane, and by how much."""

    dim: int
    step: int


def walk_along(positions: Positions, side: int) -> Walk | None:
    """Return how positions change along a side of the tile, if one does, by a small constant."""
    varying = [n for n, reg in enumerate(positions.regs) if reg.vector]
    form = linear(positions.values[varying[0]]) if len(varying) == 1 else None
    step = form.iotas.get(side, 0) if form is not None else 0
    return Walk(varying[0], step) if 1 <= abs(step) <= MAX_STEP else None


# ---- scatters side by side -------------------------------------------------------------------------------------------


class Distance(NamedTuple):
    """How far the positions of a scatter are behind those of another, and along which dimension."""

    dim: int
    behind: int


def distance(a: Op, b: Op) -> Distance | None:
    """Return the distance of scatter b from a, if they differ by a constant along one dimension and never meet."""
    if a.kind != "scatter" or b.kind != "scatter" or a.attrs != b.attrs or a.operands[0].shape != b.operands[0].shape:
        return None
    pairs = [(x, y) for x, y in zip(a.operands[1:], b.operands[1:], strict=True) if x is not y]
    if len(pairs) != 1 or pairs[0][0] not in starts(a):
        return None
    forms = [linear(value) for value in pairs[0]]
    if forms[0] is None or forms[1] is None or not (forms[1] - forms[0]).is_const:
        return None
    behind, factors = (forms[1] - forms[0]).const, forms[0].iotas.values()
    common = math.gcd(*factors)
    if not common or behind % common == 0 or max(map(abs, factors)) >= 2**12:
        return None
    return Distance(starts(a).index(pairs[0][0]), behind)


def groups(stores: list[Op]) -> list[list[Op]]:
    """Group scatters that differ along one dimension and never meet; every other one is alone."""
    found: list[list[Op]] = []
    for op in stores:
        group = next((g for g in found if all(distance(o, op) for o in g)), None)
        if group is None:
            found.append([op])
        else:
            group.append(op)
    return found


def places_in_walk(stores: list[Op], walk: Walk) -> list[int] | None:
    """Return where each scatter of a group begins, counted from the first, if together they fill gaps of the walk."""
    found = [0]
    for op in stores[1:]:
        apart = distance(stores[0], op)
        if apart is None or apart.dim != walk.dim:
            return None
        found.append(apart.behind)
    places = [n - min(found) for n in found]
    return places if max(places) < abs(walk.step) and len(set(places)) == len(places) else None


# ---- vectors ---------------------------------------------------------------------------------------------------------


def read_walk(e: Emitter, pointer: str, element: str, step: int, count: int) -> str:
    """Read `count` elements from the address of the first on: all of the vectors that they are in."""
    span = abs(step) * (count - 1) + 1
    if step < 0:
        pointer = e.element(pointer, 1 - span, element)
    places = [abs(step) * (i if step > 0 else count - 1 - i) for i in range(count)]
    if span < e.lanes:
        vector = masked_load(e, pointer, element, lane_mask(e, span))
        return _shuffled(e, element, vector, "poison", [*places, *[None] * (e.lanes - count)])
    begins = [*range(0, span - e.lanes, e.lanes), span - e.lanes]  # the last ends with the last element
    result = "poison"
    for begin in begins:
        vector = e.load(e.element(pointer, begin, element), e.vector_type(element), BYTES[element])
        inside = [begin <= p < begin + e.lanes for p in places] + [False] * (e.lanes - count)
        picks = [e.lanes + places[i] - begin if here else i for i, here in enumerate(inside)]
        result = _shuffled(e, element, result, vector, picks)
    return result


def write_walk(e: Emitter, raws: dict[int, str], pointer: str, element: str, step: int, count: int) -> None:
    """Write vectors of `count` elements that step through memory: each begins at its key behind the pointer, which is
    the address of the first lane."""
    size = abs(step)
    if step < 0:
        pointer = e.element(pointer, size * (1 - count), element)
    span = size * (count - 1) + max(raws) + 1
    if len(raws) < size and BYTES[element] < 4 and e.lanes < 16:  # no masked stores of these
        for behind, raw in raws.items():
            lanes = [raw] if step > 0 else [_shuffled(e, element, raw, "poison", _reversed(e, count))]
            scatter(e, lanes[0], e.element(pointer, behind, element), size, element, lane_mask(e, count))
        return
    for begin in range(0, span, e.lanes):
        taken = [divmod(p, size)[::-1] for p in range(begin, min(begin + e.lanes, span))]
        taken = [(r, i if step > 0 else count - 1 - i) for r, i in taken]
        result, known = "poison", list[int | None]([None] * len(taken))
        for behind, raw in raws.items():
            picks = [e.lanes + i if r == behind else None if k is None else n
                     for n, ((r, i), k) in enumerate(zip(taken, known, strict=True))]  # fmt: skip
            last = behind == list(raws)[-1]
            result = _shuffled(e, element, result, raw, picks if last else _padded(e, picks))
            known = [n if pick is not None else None for n, pick in enumerate(picks)]
        there = e.element(pointer, begin, element)
        if all(k is not None for k in known):
            e.store(result, there, f"<{len(taken)} x {element}>", BYTES[element])
        else:
            bits = ", ".join(f"i1 {str(k is not None).lower()}" for k in _padded(e, known))
            full = _shuffled(e, element, result, "poison", _padded(e, known), len(taken))
            masked_store(e, full, there, element, f"<{bits}>")


def _reversed(e: Emitter, count: int) -> list[int | None]:
    return _padded(e, [count - 1 - i for i in range(count)])


def _padded(e: Emitter, picks: list[int | None]) -> list[int | None]:
    return [*picks, *[None] * (e.lanes - len(picks))]


def _shuffled(e: Emitter, element: str, a: str, b: str, picks: list[int | None], width: int | None = None) -> str:
    """Shuffle two vectors to as many elements as there are picks; None is any element."""
    kind = f"<{width or e.lanes} x {element}>"
    text = ", ".join("i32 poison" if p is None else f"i32 {p}" for p in picks)
    return e.op(f"shufflevector {kind} {a}, {kind} {b}, <{len(picks)} x i32> <{text}>")
