"""Lanes: along which axis the vectors of each tile run, and which tiles need a copy in another order.

If some axis is folded by nothing and runs through every dot result and every carried tile, all work is pointwise in
it: it becomes the *panel axis*. Tiles that have it are kept as [panel][row][lane], and everything that has it is done
panel by panel, so that what one step makes the next still finds in cache. Otherwise every tile has its lanes along
the axis that is contiguous in memory.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from ...ir import ELEMENTWISE, Kernel, Op, Value, uses, walk
from ...ir.affine import linear
from .axes import Axes, Axis
from .fuse import unviewed
from .target import STREAMED_ROWS, Target


class Layout:
    def __init__(self, kernel: Kernel, axes: Axes, target: Target) -> None:
        self.axes, self.target = axes, target
        self._ops = list(walk(kernel.body))
        self._dots = [op for op in self._ops if op.kind == "dot"]
        self._users = uses(kernel.body)
        self.panel_axis = self._choose_panel_axis(kernel)
        self._required: dict[Value, Axis] = {}
        self._preferred = self._vote()
        self.streamed: dict[Op, Op] = {}  # dots whose tile with the lanes is read from its tensor as it is used
        self.stream_ops: set[Op] = set()  # what is done to such a tile between its tensor and the dot
        for dot in self._dots:
            lane = self.lane(dot.result)
            load, way = self._streamable(dot, lane, kernel)
            if load is not None:
                self.streamed[dot] = load
                self.stream_ops |= set(way)
            for operand in dot.operands:
                base = unviewed(operand)
                if base.op in self.stream_ops:
                    continue
                if load is not None and base is not load.result and self.unit(load) is not lane:
                    lane_ = self.unit(load)  # an inner product: both operands run along the contraction
                    if lane_ is not None:
                        self._required[base] = lane_
                elif lane is not None and lane in axes.of(base):
                    self._required.setdefault(base, lane)
        self.next_streamed = self._order_streamed_loads(kernel)
        self.eager = {op for op in self._ops if op.kind == "load" and op.result.shape and self._needs_copy(op, kernel)}
        self.next_iteration = self._transposed_loads() | self._strips()
        self.shared = self._shared_tiles(kernel)
        self.in_place = {op for op in self.eager if self._may_stay_in_place(op, kernel)}
        self.eager |= {o for o in self._ops if o.kind == "gather" and o.result.shape and self._keep_gather(o, kernel)}
        self.isolated = {op for op in self._ops if op.kind == "store" and self._stores_transposed(op)}

    def lane(self, value: Value) -> Axis | None:
        found = self.axes.of(value)
        if not found:
            return None
        if self.panel_axis in found:
            return self.panel_axis
        return self._required.get(value) or self._preferred.get(frozenset(found)) or self._default(value)

    # ---- the panel axis ----------------------------------------------------------------------------------------------

    def _choose_panel_axis(self, kernel: Kernel) -> Axis | None:
        if not self._dots or self.axes.split:
            return None
        carried = [v for op in self._ops if op.kind in ("for", "if") for v in op.results if len(self.axes.of(v)) > 0]
        through = [*(d.result for d in self._dots), *carried]
        least = max(self.target.panel, STREAMED_ROWS + 1)  # fewer rows are streamed, whatever the width of a panel
        candidates = [
            a
            for a in self.axes.of(self._dots[0].result)
            if not a.folded and a.extent >= least and all(a in self.axes.of(v) for v in through)
        ]
        units = Counter(self.unit(op) for op in self._ops if op.kind in ("load", "store"))
        chosen = max(candidates, key=lambda a: (units[a], a.extent), default=None)
        return None if all(self._read_once(dot, chosen, kernel) for dot in self._dots) else chosen

    def _read_once(self, dot: Op, lane: Axis | None, kernel: Kernel) -> bool:
        """Whether a dot meets its tile with the lanes in few rows only: streaming it then beats a copy in panels."""
        m, _, n = self.axes.dots[dot]
        rows = m if lane is n else n
        found = self._single_load(unviewed(dot.operands[1 if lane is n else 0]), _block_with(kernel, dot))
        few = rows is None or rows.extent <= STREAMED_ROWS
        return few and found is not None and self.unit(found[0]) is lane

    def unit(self, op: Op) -> Axis | None:
        """The axis of a load's or store's tile that is contiguous in its tensor."""
        value = op.result if op.kind == "load" else op.operands[0]
        tiled = [d for d, extent in enumerate(op.attrs["extents"]) if extent is not None]
        unit = op.attrs["tensor"].unit
        return self.axes.dims(value)[tiled.index(unit)] if unit in tiled else None

    # ---- everything else ---------------------------------------------------------------------------------------------

    def _vote(self) -> dict[frozenset[Axis], Axis]:
        """For each set of axes, the one most loads and stores find contiguous."""
        votes: dict[frozenset[Axis], Counter[Axis]] = {}
        for op in self._ops:
            if op.kind in ("load", "store"):
                value, unit = (op.result if op.kind == "load" else op.operands[0]), self.unit(op)
                if unit is not None:
                    votes.setdefault(frozenset(self.axes.of(value)), Counter())[unit] += 1
        return {domain: count.most_common(1)[0][0] for domain, count in votes.items()}

    def _default(self, value: Value) -> Axis:
        """The last axis, unless it is shorter than a vector and the other is not."""
        found = self.axes.of(value)
        long = [a for a in found if a.extent >= self.target.lanes]
        return (long or found)[-1]

    # ---- streams -----------------------------------------------------------------------------------------------------

    def _streamable(self, dot: Op, lane: Axis | None, kernel: Kernel) -> tuple[Op | None, list[Op]]:
        """The load whose tile a dot can stream: used by this dot alone, once for each of few rows. And what is done to
        it on the way."""
        m, k, n = self.axes.dots[dot]
        if self.panel_axis is not None or lane is None or self.axes.split or k is None:
            return None, []
        rows = m if lane is n else n
        height = rows.extent if rows is not None else 1
        found = self._single_load(unviewed(dot.operands[1 if lane is n else 0]), _block_with(kernel, dot))
        if found is None or height > STREAMED_ROWS:
            return None, []
        load, way = found
        if load.attrs["tensor"].index in kernel.written or load.attrs["tensor"].dtype.kind != "float":
            return None, []
        unit = self.unit(load)
        return (load, way) if unit is lane or (unit is k and not way) else (None, [])

    def _single_load(self, value: Value, home: set[Op]) -> tuple[Op, list[Op]] | None:
        """The one load a tile is made of element by element, and the ops on the way; everything else it is made of
        runs along fewer axes. None if anything on the way has another use."""
        loads: dict[Op, None] = {}
        way: dict[Op, None] = {}
        whole = set(self.axes.of(value))

        def visit(value: Value) -> bool:
            op = value.op
            if not value.shape or set(self.axes.of(value)) < whole or self.axes.index_like(value):
                return True
            if op is None or op not in home or len(self._users[value]) != 1:
                return False
            if op.kind == "load":
                loads[op] = None
                return True
            way[op] = None
            return (op.kind in ELEMENTWISE or op.kind in ("expand", "trans")) and all(visit(v) for v in op.operands)

        return (next(iter(loads)), list(way)) if visit(value) and len(loads) == 1 else None

    def _order_streamed_loads(self, kernel: Kernel) -> dict[Op, tuple[Op, tuple[int, ...]]]:
        """For each streamed load the one after it in its loop, and how far along each dimension of its tile that will
        be."""
        following: dict[Op, tuple[Op, tuple[int, ...]]] = {}
        for loop in (op for op in self._ops if op.kind == "for"):
            (body,) = loop.blocks
            loads = [self.streamed[op] for op in body.ops if op in self.streamed]
            for here, there in pairwise(loads):
                following[here] = (there, (0,) * len(there.result.shape))
            if loads:
                following[loads[-1]] = (loads[0], _shift_per_iteration(loads[0], body.params[0], loop.attrs["step"]))
        return following

    def _transposed_loads(self) -> dict[Op, tuple[int, ...]]:
        """For each load whose tile is turned on the way in, and moves along its rows from one turn of a loop to the
        next: how far along each dimension. Nothing else fetches such a tile: its rows lie far apart."""
        found = {}
        for loop in (op for op in self._ops if op.kind == "for"):
            (body,) = loop.blocks
            for op in walk(body):
                unit = self.unit(op) if op in self.eager else None
                if unit is not None and unit is not self.lane(op.result):
                    shift = _shift_per_iteration(op, body.params[0], loop.attrs["step"])
                    if shift[self.axes.dims(op.result).index(unit)]:
                        found[op] = shift
        return found

    def _shared_tiles(self, kernel: Kernel) -> dict[Value, tuple[Op, tuple[int, ...]]]:
        """For each tile that every panel of a dot reads, and that moves from one turn of a loop to the next: its load,
        and how far that moves along each dimension."""
        found: dict[Value, tuple[Op, tuple[int, ...]]] = {}
        for loop in (op for op in self._ops if op.kind == "for" and self.panel_axis is not None):
            (body,) = loop.blocks
            for dot in (op for op in walk(body) if op.kind == "dot"):
                for tile in (unviewed(v) for v in dot.operands if self.panel_axis not in self.axes.of(v)):
                    way = self._single_load(tile, _block_with(kernel, dot))
                    shift = _shift_per_iteration(way[0], body.params[0], loop.attrs["step"]) if way is not None else ()
                    if way is not None and len(shift) == 2 and any(shift):
                        found[tile] = (way[0], shift)
        return found

    def _may_stay_in_place(self, op: Op, kernel: Kernel) -> bool:
        """Whether memory may hold a load's tile as scratch would, so that dots can read it where it is: float32, in
        whole vectors along the lanes. Strides and bounds are known when the kernel runs."""
        value, tensor, lane = op.result, op.attrs["tensor"], self.lane(op.result)
        if len(self.axes.of(value)) != 2 or tensor.dtype.name != "float32" or tensor.index in kernel.written:
            return False
        if lane is None or lane is self.panel_axis or lane is not self.unit(op) or lane.extent % self.target.lanes:
            return False
        return self._only_dots(value)

    def _only_dots(self, value: Value) -> bool:
        users = self._users.get(value, [])
        return all(u.kind == "dot" or (u.kind in ("trans", "expand") and self._only_dots(u.result)) for u in users)

    def _strips(self) -> dict[Op, tuple[int, ...]]:
        """For each load whose tile moves along its rows in one loop, and from strip to strip of rows in the loop
        around: how far the next strip is along each dimension. So many rows at once are more than hardware follows."""
        found = {}
        loads = {op for op in self._ops if op.kind == "load" and len(op.result.shape) > 1} - self.eager
        for around in (op for op in self._ops if op.kind == "for"):
            for loop in (op for op in walk(around.blocks[0]) if op.kind == "for"):
                for op in (o for o in loop.blocks[0].ops if o in loads - set(self.streamed.values())):
                    along, across = (
                        _shift_per_iteration(op, x.blocks[0].params[0], x.attrs["step"]) for x in (loop, around)
                    )
                    unit = self.unit(op)
                    at = self.axes.dims(op.result).index(unit) if unit is not None else -1
                    if unit is self.lane(op.result) and at >= 0 and along[at] and any(across) and not across[at]:
                        found[op] = across
        return found

    def _needs_copy(self, op: Op, kernel: Kernel) -> bool:
        if op in self.streamed.values():
            return False
        value, users = op.result, self._users.get(op.result, [])
        home = next(b for b in _blocks(kernel) if op in b)
        elsewhere = any(user not in home for user in users)
        if op.attrs["tensor"].index in kernel.written or elsewhere or self._feeds_dot(value):
            return True
        if self.panel_axis is not None and self.panel_axis not in self.axes.of(value):
            return True
        unit = self.unit(op)
        return unit is not None and unit is not self.lane(value)

    def _keep_gather(self, op: Op, kernel: Kernel) -> bool:
        return op.attrs["tensor"].index in kernel.written or self._feeds_dot(op.result)

    def _feeds_dot(self, value: Value) -> bool:
        return any(unviewed(v) is value for dot in self._dots for v in dot.operands)

    def _stores_transposed(self, op: Op) -> bool:
        value, unit = op.operands[0], self.unit(op)
        return unit is not None and unit is not self.lane(value)


def _shift_per_iteration(load: Op, counter: Value, step: int) -> tuple[int, ...]:
    """How far a load's tile moves along each of its dimensions when the loop's counter takes one step."""
    moves = []
    for start, extent in zip(load.operands, load.attrs["extents"], strict=True):
        if extent is not None:
            form = linear(start)
            moves.append(form.terms.get(counter, 0) * step if form is not None else 0)
    return tuple(moves)


def _block_with(kernel: Kernel, op: Op) -> set[Op]:
    return next(ops for ops in _blocks(kernel) if op in ops)


def _blocks(kernel: Kernel) -> list[set[Op]]:
    found = [set(kernel.body.ops)]
    for op in walk(kernel.body):
        found += [set(block.ops) for block in op.blocks]
    return found
