"""Tiles that move from iteration to iteration of a loop: which one is read next, and how far away it is. Prefetching
(prefetch.py) asks for them where no hardware predicts them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from ...ir import Kernel, Op, Value, starts, walk
from ...ir.affine import linear
from .places_ahead import PlaceAhead, find_place_ahead

Shift = tuple[int, ...]  # the distance along each dimension of a tile


def order_streamed_loads(
    loops: Sequence[Op], streamed: Mapping[Op, Op], kernel: Kernel
) -> tuple[dict[Op, tuple[Op, Shift]], dict[Op, PlaceAhead]]:
    """Return, for each streamed load, the next one in its loop and how far its tile has moved by then; and the loads
    whose next place must be looked up. Behind a branch the next iteration is taken to go the same way."""
    following: dict[Op, tuple[Op, Shift]] = {}
    ahead: dict[Op, PlaceAhead] = {}
    for loop in loops:
        (body,) = loop.blocks
        for ops, known in _paths(body.ops, []):
            loads = [streamed[op] for op in ops if op in streamed]
            for here, there in pairwise(loads):
                following[here] = (there, (0,) * len(there.result.shape))
            if loads:
                place = find_place_ahead(loads[0], loop, [*known, *ops], kernel)
                if place is not None:
                    ahead[loads[0]] = place
                if place is not None or loads[0].kind == "load":
                    shift = shift_per_iteration(loads[0], body.params[0], loop.attrs["step"])
                    following[loads[-1]] = loads[0], shift
    return following, ahead


def places_ahead(loops: Sequence[Op], gathers: Collection[Op], kernel: Kernel) -> dict[Op, PlaceAhead]:
    """Return how the rows of gathers that are copied follow from the counter of the loop around them."""
    found: dict[Op, PlaceAhead] = {}
    for loop in loops:
        for ops, known in _paths(loop.blocks[0].ops, []):
            for op in (o for o in ops if o in gathers):
                place = find_place_ahead(op, loop, [*known, *ops], kernel)
                if place is not None:
                    found[op] = place
    return found


def _paths(ops: list[Op], known: list[Op]) -> Iterator[tuple[list[Op], list[Op]]]:
    """Yield the ops of a loop's body, and those behind each branch of it with the ones that they may read besides."""
    yield ops, known
    for op in ops:
        if op.kind == "if":
            for block in op.blocks:
                yield from _paths(block.ops, [*known, *ops])


def transposed_loads(loops: Sequence[Op], rows: Mapping[Op, int]) -> dict[Op, Shift]:
    """Return the loads whose tile is transposed and moves along its rows from iteration to iteration, with the distance
    along each dimension. No hardware prefetcher follows such a tile: its rows are far apart. `rows` has the dimension
    of the rows of each transposed load."""
    found = {}
    for loop in loops:
        (body,) = loop.blocks
        for op in walk(body):
            shift = shift_per_iteration(op, body.params[0], loop.attrs["step"]) if op in rows else ()
            if shift and shift[rows[op]]:
                found[op] = shift
    return found


def strips(loops: Sequence[Op], rows: Mapping[Op, int]) -> dict[Op, Shift]:
    """Return the loads whose tile moves along its rows in one loop, and from strip to strip of rows in the loop around
    it, with the distance to the next strip. Hardware prefetchers do not follow as many rows at once."""
    found = {}
    for around in loops:
        for loop in (op for op in walk(around.blocks[0]) if op.kind == "for"):
            for op in (o for o in loop.blocks[0].ops if o in rows):
                along, across = (
                    shift_per_iteration(op, x.blocks[0].params[0], x.attrs["step"]) for x in (loop, around)
                )
                if along[rows[op]] and any(across) and not across[rows[op]]:
                    found[op] = across
    return found


def shift_per_iteration(load: Op, counter: Value, step: int) -> Shift:
    """Return how far a load's tile moves along each of its dimensions in one iteration of a loop; zeros for a gather,
    whose rows move each by itself."""
    if load.kind == "gather":
        return (0,) * len(load.result.shape)
    distances = []
    for start, extent in zip(starts(load), load.attrs["extents"], strict=True):
        if extent is not None:
            form = linear(start)
            distances.append(form.terms.get(counter, 0) * step if form is not None else 0)
    return tuple(distances)


def bytes_read(load: Op) -> int:
    """Return the bytes of memory that a load's tile is read from."""
    count: int = prod(load.result.shape if load.kind == "gather" else (n or 1 for n in load.attrs["extents"]))
    return count * int(load.attrs["tensor"].dtype.bytes)


def block_with(kernel: Kernel, op: Op) -> set[Op]:
    return next(ops for ops in blocks(kernel) if op in ops)


def blocks(kernel: Kernel) -> list[set[Op]]:
    found = [set(kernel.body.ops)]
    for op in walk(kernel.body):
        found += [set(block.ops) for block in op.blocks]
    return found
