"""Layout: along which axis the vectors of each tile run, and which tiles are copied, streamed or read in place.

If no op folds some axis, and every dot result and every loop-carried tile has it, all work is pointwise in it: it
becomes the *panel axis*. Tiles that have it are stored as [panel][row][lane], and everything that has it is computed
panel by panel, so that each nest finds the results of the one before in the L1 cache. Otherwise the lanes of a tile run
along the axis that is contiguous in memory.
"""

from __future__ import annotations

from collections import Counter

from ...ir import ELEMENTWISE, MOVES, Kernel, Op, Value, uses, walk
from .axes import Axes, Axis
from .bf16_dots import paired_dots, tiled_dots
from .fuse import unviewed
from .memory_sums import dots_added_to_memory, is_loaded
from .moving_tiles import (
    block_with,
    blocks,
    bytes_read,
    order_streamed_loads,
    places_ahead,
    shift_per_iteration,
    strips,
    transposed_loads,
)
from .row_tables import RowGather, find_row_gathers
from .target import STREAMED_ROWS, Target


class Layout:
    def __init__(self, kernel: Kernel, axes: Axes, target: Target) -> None:
        self.axes, self.target = axes, target
        self._ops = list(walk(kernel.body))
        self._dots = [op for op in self._ops if op.kind == "dot"]
        self._users = uses(kernel.body)
        self._required: dict[Value, Axis] = {}
        self._preferred = self._vote()
        self.row_gathers = find_row_gathers(self._ops, axes, kernel)  # later those whose rows have a table
        self.panel_axis: Axis | None = None
        self._memory_sums = {dot for dot in dots_added_to_memory(kernel) if self._is_panel_sum(dot)}
        self.panel_axis = self._choose_panel_axis(kernel)
        self.panel = self._panel_lanes()
        self.panel_sums = {dot for dot in self._dots if self.axes.dots[dot][1] is self.panel_axis is not None}
        self.streamed: dict[Op, Op] = {}  # dots whose tile with the lanes is streamed, and its load or gather of rows
        self.stream_ops: set[Op] = set()  # elementwise ops between such a load and its dot
        self.stream_loads: set[Op] = set()  # such loads, and spread loads that these ops read as well
        for dot in self._dots:
            lane = self.lane(dot.result)
            loads, ops = self._streamable(dot, lane, kernel)
            load = loads[0] if loads else None
            if load is not None:
                self.streamed[dot] = load
                self.stream_ops |= set(ops)
                self.stream_loads |= set(loads)
            for operand in dot.operands:
                base = unviewed(operand)
                if base.op in self.stream_ops:
                    continue
                contracted = self.contiguous_axis(load) if load is not None else None
                if load is not None and base is not load.result and contracted is not lane:
                    # An inner product: the lanes of both operands run along the contraction.
                    if contracted is not None:
                        self._required[base] = contracted
                elif lane is not None and lane in axes.of(base):
                    self._require(base, lane)
        loops = [op for op in self._ops if op.kind == "for"]
        self.next_streamed, self.ahead = order_streamed_loads(loops, self.streamed, kernel)
        self.eager = {op for op in self._ops if op.kind == "load" and op.result.shape and self._needs_copy(op, kernel)}
        self.next_iteration = transposed_loads(loops, self._unit_sides(self.eager, along_lanes=False))
        others = {op for op in self._ops if op.kind == "load" and len(op.result.shape) > 1} - self.eager
        self.next_iteration |= strips(loops, self._unit_sides(others - self.stream_loads, along_lanes=True))
        self.shared = self._shared_tiles(kernel)
        in_panels = [dot for dot in self._dots if self.panel_axis not in (None, axes.dots[dot][1])]
        self.tiled = tiled_dots(in_panels, axes, target, self.panel_axis)
        self.paired = paired_dots(in_panels, axes, target) - self.tiled.keys()
        self.paired_sums = set() if target.amx else paired_dots(self.panel_sums, axes, target)
        self.narrow = {op for op in self.eager if self._stays_bfloat16(op)}
        self.in_place = {op for op in self.eager if self._may_stay_in_place(op, kernel)}
        self.stepped = {op for op in self.in_place if self._contracted_by_rows(op)}
        gathers = {op for op in self._ops if op.kind == "gather" and op.result.shape} - self.stream_loads
        self.eager |= {op for op in gathers if self._keep_gather(op, kernel)}
        self.row_gathers = {op: g for op, g in self.row_gathers.items() if self._has_table(op, g)}
        self.narrow |= {op for op in self.row_gathers.keys() & self.eager if self._stays_bfloat16(op)}
        self.ahead |= places_ahead(loops, self.row_gathers.keys() - self.stream_loads, kernel)
        self.inlined = self.stream_ops.union(*(gather.ops for gather in self.row_gathers.values()))
        self.isolated = {op for op in self._ops if op.kind == "store" and self._stores_transposed(op)}
        self.isolated |= {op for op in self._ops if op.kind in MOVES}

    def lane(self, value: Value) -> Axis | None:
        found = self.axes.of(value)
        if not found:
            return None
        if value in self._required:
            return self._required[value]
        if self.panel_axis in found:
            return self.panel_axis
        return self._preferred.get(frozenset(found)) or self._default(value)

    def _require(self, value: Value, lane: Axis) -> None:
        """Let the lanes of a dot's operand, and of the tiles it is computed from, run along an axis."""
        if value in self._required:
            return
        self._required[value] = lane
        if lane is not self.panel_axis and self.panel_axis in self.axes.of(value) and value.op is not None:
            for operand in value.op.operands if value.op.kind in ELEMENTWISE else ():
                if operand.shape == value.shape and not self.axes.index_like(operand):
                    self._require(operand, lane)

    # ---- the panel axis ----------------------------------------------------------------------------------------------

    def _choose_panel_axis(self, kernel: Kernel) -> Axis | None:
        if not self._dots or self.axes.split or any(op.kind in MOVES for op in self._ops):
            return None
        carried = [v for op in self._ops if op.kind in ("for", "if") for v in op.results if len(self.axes.of(v)) > 0]
        candidates = []
        for a in self.axes.of(self._dots[0].result):
            through = [d.result for d in self._dots if self.axes.dots[d][1] is not a or d not in self._memory_sums]
            if a.extent > STREAMED_ROWS and all(a in self.axes.of(v) for v in (*through, *carried)):
                candidates.append(a)
        reduced = {self.axes.dims(op.operands[0])[op.attrs["axis"]] for op in self._ops if op.kind == "reduce"}
        candidates = [a for a in candidates if not a.folded] or [a for a in candidates if a not in reduced]
        units = Counter(self.contiguous_axis(op) for op in self._ops if op.kind in ("load", "store"))
        chosen = max(candidates, key=lambda a: (units[a], a.extent), default=None)
        return None if all(self._read_once(dot, chosen, kernel) for dot in self._dots) else chosen

    def _is_panel_sum(self, dot: Op) -> bool:
        """True if a dot may be summed panel by panel: the operand with the lanes is loaded, so that they are free."""
        m, k, n = self.axes.dots[dot]
        lanes_second = self.lane(dot.result) is n
        return None not in (m, k, n) and is_loaded(dot.operands[1 if lanes_second else 0])

    def _panel_lanes(self) -> int:
        """Return the lanes of a panel: as many whole vectors as hold the panel axis, if a register block can have as
        many, or else those of the usual register block."""
        extent = self.panel_axis.extent if self.panel_axis is not None else self.target.lanes
        vectors = -(-extent // self.target.lanes)
        return self.target.lanes * (vectors if vectors <= len(self.target.heights) else self.target.vectors)

    def _read_once(self, dot: Op, lane: Axis | None, kernel: Kernel) -> bool:
        """True if a dot has few rows and its tile with the lanes can be streamed, which beats a copy in panels."""
        m, _, n = self.axes.dots[dot]
        rows = m if lane is n else n
        found = self._loads(unviewed(dot.operands[1 if lane is n else 0]), block_with(kernel, dot))
        few = rows is None or rows.extent <= STREAMED_ROWS
        return few and found is not None and self.contiguous_axis(found[0][0]) is lane

    def contiguous_axis(self, op: Op) -> Axis | None:
        """Return the axis of a load's, store's or row gather's tile that is contiguous in its tensor."""
        if op.kind == "gather":
            return self.row_gathers[op].columns
        value = op.result if op.kind == "load" else op.operands[0]
        tiled = [d for d, extent in enumerate(op.attrs["extents"]) if extent is not None]
        unit = op.attrs["tensor"].unit
        return self.axes.dims(value)[tiled.index(unit)] if unit in tiled else None

    # ---- everything else ---------------------------------------------------------------------------------------------

    def _vote(self) -> dict[frozenset[Axis], Axis]:
        """Return, for each set of axes, the one that is contiguous for most loads and stores."""
        votes: dict[frozenset[Axis], Counter[Axis]] = {}
        for op in self._ops:
            if op.kind in ("load", "store"):
                value, unit = (op.result if op.kind == "load" else op.operands[0]), self.contiguous_axis(op)
                if unit is not None:
                    votes.setdefault(frozenset(self.axes.of(value)), Counter())[unit] += 1
        return {domain: count.most_common(1)[0][0] for domain, count in votes.items()}

    def _default(self, value: Value) -> Axis:
        """Return the last axis, unless it is shorter than a vector and the other is not."""
        found = self.axes.of(value)
        long = [a for a in found if a.extent >= self.target.lanes]
        return (long or found)[-1]

    # ---- streamed, shared and in-place tiles -------------------------------------------------------------------------

    def _streamable(self, dot: Op, lane: Axis | None, kernel: Kernel) -> tuple[list[Op], list[Op]]:
        """Return the load that a dot can stream, because only this dot uses it and for few rows, with the spread loads
        that are read beside it, and the elementwise ops between them and the dot."""
        m, k, n = self.axes.dots[dot]
        if self.panel_axis is not None or lane is None or self.axes.split or k is None:
            return [], []
        rows = m if lane is n else n
        height = rows.extent if rows is not None else 1
        found = self._loads(unviewed(dot.operands[1 if lane is n else 0]), block_with(kernel, dot))
        if found is None or height > STREAMED_ROWS:
            return [], []
        loads, ops = found
        if any(load.attrs["tensor"].index in kernel.written for load in loads):
            return [], []
        return (loads, ops) if self.contiguous_axis(loads[0]) in (lane, k) else ([], [])

    def _loads(self, value: Value, home: set[Op]) -> tuple[list[Op], list[Op]] | None:
        """Return the load a tile is computed from element by element, and the ops between; its other inputs have fewer
        axes or are spread loads, which come behind the one that reads most. None if one of these values has another
        use."""
        loads: dict[Op, None] = {}
        ops: dict[Op, None] = {}
        whole = set(self.axes.of(value))

        def visit(value: Value) -> bool:
            op = value.op
            if not value.shape or set(self.axes.of(value)) < whole or self.axes.index_like(value):
                return True
            if op is None or op not in home or len(self._users[value]) != 1:
                return False
            if op.kind == "load" or op in self.row_gathers:
                loads[op] = None
                return True
            ops[op] = None
            return (op.kind in ELEMENTWISE or op.kind in ("expand", "trans")) and all(visit(v) for v in op.operands)

        if not visit(value) or not loads or sum("spread" not in load.attrs for load in loads) > 1:
            return None
        return sorted(loads, key=bytes_read, reverse=True), list(ops)

    def _shared_tiles(self, kernel: Kernel) -> dict[Value, tuple[Op, tuple[int, ...]]]:
        """Return the tiles that every panel of a dot reads and that move from iteration to iteration: for each its load
        and the distance along each dimension."""
        found: dict[Value, tuple[Op, tuple[int, ...]]] = {}
        for loop in (op for op in self._ops if op.kind == "for" and self.panel_axis is not None):
            (body,) = loop.blocks
            for dot in (op for op in walk(body) if op.kind == "dot"):
                for tile in (unviewed(v) for v in dot.operands if self.panel_axis not in self.axes.of(v)):
                    source = self._loads(tile, block_with(kernel, dot))
                    if source is None:
                        continue
                    load = source[0][0]
                    shift = shift_per_iteration(load, body.params[0], loop.attrs["step"])
                    if len(shift) == 2 and any(shift):
                        found[tile] = (load, shift)
        return found

    def _may_stay_in_place(self, op: Op, kernel: Kernel) -> bool:
        """True if memory may hold a load's tile as scratch would, so that dots can read it in place: in whole vectors
        along the lanes, and not converted. The kernel tests strides and bounds when it runs."""
        value, tensor, lane = op.result, op.attrs["tensor"], self.lane(op.result)
        as_scratch = (tensor.dtype.name == "float32" or op in self.narrow) and "spread" not in op.attrs
        if len(self.axes.of(value)) != 2 or not as_scratch or tensor.index in kernel.written:
            return False
        if lane in (None, self.panel_axis) or lane is not self.contiguous_axis(op):
            return False
        return lane.extent % self.target.lanes == 0 and self._only_dots(value)

    @property
    def skipped_rows(self) -> int:
        """Return the rows that are skipped together: those of a register block, or the steps of a tile of AMX."""
        return max((product.steps for product in self.tiled.values()), default=self.target.rows)

    def only_read_by(self, value: Value, dots: set[Op]) -> bool:
        """True if some of the given dots read a tile, and nothing else does."""
        readers = {dot for dot in self._dots if any(unviewed(v) is value for v in dot.operands)}
        return bool(readers) and readers <= dots and self._only_dots(value)

    def _stays_bfloat16(self, op: Op) -> bool:
        """True if scratch holds a load's tile as bfloat16: only pair products or AMX read it."""
        lane, narrow = self.lane(op.result), op.attrs["tensor"].dtype.name == "bfloat16" and "spread" not in op.attrs
        if not narrow or not self.only_read_by(op.result, self.paired | self.tiled.keys()):
            return False
        return lane is not None and lane is not self.panel_axis and lane is self.contiguous_axis(op)

    def _contracted_by_rows(self, op: Op) -> bool:
        """True if dots contract a load's tile over its rows, one after the other: then a stride known when the kernel
        runs costs no more than a constant."""
        readers = [dot for dot in self._dots if any(unviewed(v) is op.result for v in dot.operands)]
        return all(self.axes.dots[dot][1] is not self.lane(op.result) for dot in readers)

    def _only_dots(self, value: Value) -> bool:
        users = self._users.get(value, [])
        return all(u.kind == "dot" or (u.kind in ("trans", "expand") and self._only_dots(u.result)) for u in users)

    def _unit_sides(self, loads: set[Op], *, along_lanes: bool) -> dict[Op, int]:
        """Return the dimension along which each load is contiguous, of those whose lanes run along it, or do not."""
        units = ((op, self.contiguous_axis(op)) for op in loads)
        found = ((op, unit) for op, unit in units if unit is not None and (unit is self.lane(op.result)) == along_lanes)
        return {op: self.axes.dims(op.result).index(unit) for op, unit in found}

    def _needs_copy(self, op: Op, kernel: Kernel) -> bool:
        if op in self.stream_loads:
            return False
        value, users = op.result, self._users.get(op.result, [])
        home = next(b for b in blocks(kernel) if op in b)
        elsewhere = any(user not in home or user.kind in MOVES for user in users)
        if op.attrs["tensor"].index in kernel.written or elsewhere or self._feeds_dot(value):
            return True
        if "spread" in op.attrs:  # a copy would be larger than what it is read from
            return False
        if self.panel_axis is not None and self.panel_axis not in self.axes.of(value):
            return True
        unit = self.contiguous_axis(op)
        return unit is not None and unit is not self.lane(value)

    def _keep_gather(self, op: Op, kernel: Kernel) -> bool:
        return op.attrs["tensor"].index in kernel.written or self._feeds_dot(op.result)

    def _has_table(self, op: Op, gather: RowGather) -> bool:
        """True if the addresses of a gather's rows are kept: it is streamed, or copied row by row."""
        return op in self.stream_loads or (op in self.eager and self.lane(op.result) is gather.columns)

    def _feeds_dot(self, value: Value) -> bool:
        return any(unviewed(v) is value for dot in self._dots for v in dot.operands)

    def _stores_transposed(self, op: Op) -> bool:
        value, unit = op.operands[0], self.contiguous_axis(op)
        return unit is not None and unit is not self.lane(value)
