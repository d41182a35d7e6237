"""Nests without a dot: elementwise work, folds, copies and stores.

A nest runs over a lane axis and at most one other, its rows. If the lanes run along the panel axis, the caller loops
over the panels and this module emits the rows of one panel. Otherwise a fold over the rows keeps one group of lanes in
registers and loops over the rows; everything else goes row by row. Loop-invariant values are computed before the inner
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import MOVES, Op, Value
from .axes import Axis
from .bool_reductions import BYTES_PER_LANE, count_true, counted_bools, reduces_only_bools
from .emit import Emitter, Index, Reg, Var
from .evaluate import Evaluator
from .fuse import Fusion, Nest, stored_values
from .long_sums import CHUNK, LEVEL, float_sums, is_float_sum, sum_loop
from .moves import emit_move
from .pair_storage import end_pairs, pair_buffers, value_to_store
from .point import Panel, Point, partly_filled
from .strided import groups as scatter_groups
from .target import Target
from .transposed_nests import emit_transposed, needs_transpose
from .vectors import lane_mask
from .weights import MOST, weight


class NestEmitter:
    def __init__(self, emitter: Emitter, target: Target, fusion: Fusion, evaluator: Evaluator) -> None:
        self.e, self.target, self.fusion, self.ev = emitter, target, fusion, evaluator
        self.axes = fusion.axes
        self.vectors = target.vectors  # of a register group
        self.height: int | None = None  # rows of a register block, where its vectors do not decide
        self.stored_total = False  # the total of a dot is in its storage already
        self.active_rows: tuple[Axis, Index, Index] | None = None  # an axis and its rows that are not skipped

    def emit(self, nest: Nest, panel: Panel) -> None:
        """Emit a nest: without bounds checks, and if its tensors may end inside it once more with them."""
        self.ev.making = set(nest.values)
        tiles = [self.ev.tensors.tiles[op] for op in self.lazy_loads(nest)]
        self.e.lanes = self.target.lanes
        if panel is None and reduces_only_bools(nest, tiles, self.target.lanes * BYTES_PER_LANE):
            self.e.lanes *= BYTES_PER_LANE
        scalars = [op for op in (*nest.folds, *nest.made, *nest.completed_by.values()) if not op.result.shape]
        self._scalar_folds = {op.result: self._scalar_variable(op) for op in scalars}
        inside = self._inside(nest)

        def part(edge: bool) -> None:
            self.e.part(lambda: self._body(nest, panel, edge))

        def body() -> None:
            if inside is None:
                part(False)
            else:
                self.e.when(inside, lambda: part(False), lambda: part(True))

        if not self.read_in_place(nest, inside, body):
            body()
        for value, variable in self._scalar_folds.items():
            self.ev.scalars[value] = Reg(self.e.get(variable), variable.type)
        self.ev.making = set()
        self.e.lanes = self.target.lanes
        self.ev.scratch.clock += 1

    def _body(self, nest: Nest, panel: Panel, edge: bool) -> None:
        if nest.made and nest.made[0].kind in MOVES:
            if nest.made[0].result in self.ev.buffers:
                emit_move(self.ev, nest.made[0], edge)
            return
        transposed = next(
            (op for op in (*nest.made, *nest.stores) if op in self.fusion.isolated and needs_transpose(self, op, nest)),
            None,
        )
        if transposed is not None:
            emit_transposed(self, nest, transposed, panel, edge)
            return
        rows = next((a for a in nest.axes if a is not nest.lane), None)
        along_rows = nest.fold_axis is not None and nest.fold_axis is rows
        if panel is not None or along_rows or (rows is None and nest.fold_axis is None):
            self._lane_groups(nest, rows, panel, edge)
        else:
            self._row_by_row(nest, rows, edge)

    # ---- bounds ------------------------------------------------------------------------------------------------------

    def _inside(self, nest: Nest) -> str | None:
        accesses = [*(op for op in nest.stores if op.kind == "store"), *self.lazy_loads(nest)]
        tests = [self.ev.tensors.tiles[op].inside for op in accesses]
        return self.e.all([t for t in tests if t is not None])

    def lazy_loads(self, nest: Nest) -> list[Op]:
        """Return the loads that a nest reads from their tensors."""
        return self.loads_of(self.roots(nest))

    def loads_of(self, roots: list[Value]) -> list[Op]:
        """Return the loads that are read where the given values are computed."""
        found: dict[Op, None] = {}
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            op = value.op
            if (
                op is None
                or value in seen
                or not value.shape
                or (value in self.ev.buffers and value not in self.ev.making)
            ):
                return
            seen.add(value)
            if op.kind == "load" or op in self.ev.tensors.tiles:
                found[op] = None
            else:
                for operand in op.operands:
                    visit(operand)

        for root in roots:
            visit(root)
        return list(found)

    def roots(self, nest: Nest) -> list[Value]:
        """Return the values that must be computed at each point."""
        outputs = [v for v in nest.values if v in self.ev.buffers and v is not nest.total]
        outputs += [op.operands[0] for op in nest.made if not op.result.shape]  # a reduce of one element
        outputs += [op.operands[0] for op in nest.folds] + [source for source, _ in nest.moves]
        outputs += [v for op in nest.stores for v in stored_values(op)]
        if nest.total is not None and nest.addend is not None:
            outputs.append(nest.addend)
        return outputs

    # ---- loops -------------------------------------------------------------------------------------------------------

    def _lane_groups(self, nest: Nest, rows: Axis | None, panel: Panel, edge: bool) -> None:
        """Loop over groups of lanes, and over the rows inside."""

        def group(points: list[Point]) -> None:
            totals = self.open_folds(nest, len(points))
            if rows is None:
                for n, pt in enumerate(points):
                    self.finish(nest, pt, [t[n] for t in totals])
            else:
                self.prepare(nest, points, {nest.lane})
                low, high = self.row_range(rows)
                steps = [s for s in (4, 2, 1) if rows.extent % s == 0 and self.target.rows % s == 0]
                pairs = bool(pair_buffers(self.ev, nest))
                step = steps[0] if pairs else self.rows_at_once(nest, len(points), steps)
                if edge:
                    step = 2 if pairs else 1

                def body(row: Index) -> None:
                    for i in range(step):
                        for n, pt in enumerate(points):
                            here = Point(
                                pt.at | {rows: self.e.add(row, i)}, pt.lane, pt.valid, edge, pt.panel, dict(pt.memo)
                            )
                            self.finish(nest, here, [t[n] for t in totals])

                sum_loop(self.e, (low, high, rows.extent), step, CHUNK, body, float_sums(nest.folds, totals))
            for n, pt in enumerate(points):
                self.close_folds(nest, pt, [t[n] for t in totals])
            end_pairs(self.ev, nest, points)

        self.each_group(nest.lane, panel, edge, {}, group)

    def row_range(self, axis: Axis | None) -> tuple[Index, Index]:
        """Return the range of rows that is computed along an axis; the others are skipped."""
        if self.active_rows is not None and self.active_rows[0] is axis:
            return self.active_rows[1], self.active_rows[2]
        return 0, axis.extent if axis is not None else 1

    def rows_at_once(self, nest: Nest, vectors: int, counts: list[int]) -> int:
        """Return how many rows of some vectors are one iteration: the first of the counts, largest first, with which
        the elementwise work is not too large, or the last."""

        def made(value: Value) -> bool:
            return value is not nest.total and (value not in self.ev.buffers or value in self.ev.making)

        each = weight(self.roots(nest), made) * vectors
        return next((count for count in counts if count * each <= MOST), counts[-1])

    def _row_by_row(self, nest: Nest, rows: Axis | None, edge: bool) -> None:
        """Loop over the rows; folds run along the lanes, and those that another fold completes over the rows too."""
        loads = [] if edge else self.lazy_loads(nest)
        whole = (
            dict(zip(nest.folds, self.open_folds(nest, self.target.vectors), strict=True)) if nest.completed_by else {}
        )
        short = nest.lane is not None and nest.lane.extent <= self.e.lanes * self.target.vectors
        # Of the folds that another completes, sums of long rows are kept apart until the row ends.
        joined = [op for op in nest.completed_by if short or not is_float_sum(op)]

        def one(row: Index) -> None:
            outer = Point({rows: row} if rows is not None else {}, None, None, edge)
            self.prepare(nest, [outer], {rows})
            totals = self.open_folds(nest, self.target.vectors)
            totals = [whole[op] if op in joined else new for op, new in zip(nest.folds, totals, strict=True)]

            def group(points: list[Point]) -> None:
                for load in loads:
                    self.prefetch_next(load, points)
                for n, pt in enumerate(points):
                    pt.memo = dict(outer.memo)
                    self.finish(nest, pt, [t[n] for t in totals])

            self.each_group(nest.lane, None, edge, outer.at, group, float_sums(nest.folds, totals))
            for op, variables in zip(nest.folds, totals, strict=True):
                if op not in nest.completed_by:
                    self._keep(op.result, self._combined(nest, op, variables), outer)
                elif op not in joined:
                    for total, variable in zip(whole[op], variables, strict=True):
                        self.e.set(total, self.e.op(f"fadd {total.type} {self.e.get(total)}, {self.e.get(variable)}"))

        low, high = self.row_range(rows)
        aligned = short and not edge and isinstance(high, int)
        vectors = -(-nest.lane.extent // self.e.lanes) if nest.lane is not None else 1
        step = self.rows_at_once(nest, vectors, [s for s in (4, 2, 1) if high % s == 0]) if aligned else 1

        def several(row: Index) -> None:
            for i in range(step):
                one(self.e.add(row, i))

        bounds = low, high, rows.extent if rows is not None else 1
        sum_loop(self.e, bounds, step, CHUNK, several, float_sums(list(whole), list(whole.values())))
        for op, end in nest.completed_by.items():
            self._keep(end.result, self._combined(nest, op, whole[op]), Point({}))

    def _combined(self, nest: Nest, op: Op, variables: list[Var]) -> Reg:
        """Combine the accumulators of a fold along the lanes to one number."""
        counts = counted_bools(nest, op) is not None
        read = self._scalar if counts else self._vector
        total = read(op, variables[0])
        for other in variables[1:]:
            total = self.ev.combine(op.attrs["fold"], total, read(op, other))
        return total if counts else self.ev.across(op.attrs["fold"], total)

    def each_group(
        self,
        lane: Axis | None,
        panel: Panel,
        edge: bool,
        at: dict[Axis, Index],
        body: Callable[[list[Point]], None],
        sums: Sequence[Var] = (),
    ) -> None:
        """Call body with the points of every register group along the lanes; the last group may be smaller. `sums` are
        the float accumulators that body adds to."""
        e, width, group = self.e, self.e.lanes, self.e.lanes * self.vectors
        if lane is None:
            body([Point(dict(at), None, None, edge)])
            return
        if panel is not None:
            number, lanes = panel
            first = e.mul(number, group)
            parts = [(n, partly_filled(lanes - n * width, width)) for n in range(-(-lanes // width))]
            body([Point(at | {lane: e.add(first, n * width)}, lane, valid, edge, (number, n)) for n, valid in parts])
            return
        whole = lane.extent // group * group

        def full(start: Index) -> None:
            vectors = range(self.vectors)
            body([Point(at | {lane: e.add(start, n * width)}, lane, None, edge, group=n) for n in vectors])

        sum_loop(e, (0, whole, whole), group, LEVEL * group, full, list(sums))
        rest = lane.extent - whole
        if rest:
            starts = range(whole, lane.extent, width)
            body([Point(at | {lane: s}, lane, partly_filled(lane.extent - s, width), edge) for s in starts])

    def prepare(self, nest: Nest, points: list[Point], fixed: set[Axis | None]) -> None:
        """Compute at each point the values that depend on the fixed axes only, before the loop inside needs them."""
        for pt in points:
            seen: set[Value] = set()

            def visit(value: Value, pt: Point = pt, seen: set[Value] = seen) -> None:
                if value in seen or not value.shape:
                    return
                seen.add(value)
                made_here = any(v in self.ev.making for v in self.fusion.reads(value))
                stored = value in self.ev.buffers and not made_here
                axes = self.axes.of(value)
                if set(axes) <= fixed and (axes or stored) and not made_here:
                    self.ev.value(value, pt)
                elif not stored and value.op is not None and value.op.kind not in ("load", "dot"):
                    for operand in value.op.operands:
                        visit(operand)

            for root in self.roots(nest):
                visit(root)

    # ---- one point ---------------------------------------------------------------------------------------------------

    def finish(self, nest: Nest, pt: Point, totals: list[Var]) -> None:
        """Emit the folds and then the writes of a point. All values are computed before any is written, so a value may
        be updated in place."""
        for op, variable in zip(nest.folds, totals, strict=True):
            if counted_bools(nest, op) is not None:
                self._count(variable, op, pt)
                continue
            x = (
                self.e.splat(self.ev.value(op.operands[0], pt))
                if pt.lane is not None
                else self.ev.value(op.operands[0], pt)
            )
            before = self._vector(op, variable) if pt.lane is not None else self._scalar(op, variable)
            after = self.ev.combine(op.attrs["fold"], before, x)
            if pt.valid is not None and nest.fold_axis is nest.lane:
                mask = Reg(lane_mask(self.e, pt.valid), "i1", True)
                after = self.e.select(mask, after, before)
            self.e.set(variable, after.text)
        for op in nest.made:
            if not op.result.shape:
                self._keep(op.result, self.ev.only_element(op, pt), pt)
        made = [v for v in nest.values if v in self.ev.buffers and not (self.stored_total and v is nest.total)]
        kept = [(v, value_to_store(self.ev, v, pt)) for v in made]
        kept += [(target, self.ev.moved(source, target, pt)) for source, target in nest.moves]
        groups = [
            [(op, self.ev.value(op.operands[0], pt), self.ev.positions(op, pt)) for op in group]
            for group in scatter_groups([op for op in nest.stores if op.kind == "scatter"])
        ]
        stores = [(op, self.ev.value(op.operands[0], pt)) for op in nest.stores if op.kind == "store"]
        for value, reg in kept:
            self.ev.scratch.write(self.ev.buffers[value], pt, reg)
        for op, reg in stores:
            self.ev.tensors.write(op, pt, reg)
        for group in groups:
            self.ev.tensors.write_scatters(group, self.ev.tensors.spans(group[0][0], self.ev.index), pt)

    def _count(self, variable: Var, fold: Op, pt: Point) -> None:
        """Add the number of true lanes."""
        cast = fold.operands[0].op
        assert cast is not None
        mask = self.e.splat(self.ev.operand(cast, cast.operands[0], pt))
        if pt.valid is not None:
            mask = self.e.binary("and", mask, Reg(lane_mask(self.e, pt.valid), "i1", True))
        before = Reg(self.e.get(variable), variable.type)
        self.e.set(variable, self.e.binary("add", before, count_true(self.e, mask, variable.type)).text)

    def open_folds(self, nest: Nest, count: int) -> list[list[Var]]:
        variables = []
        for op in nest.folds:
            empty = self.ev.identity(op.attrs["fold"], op.operands[0].dtype)
            empty = self.e.splat(empty) if nest.lane is not None and counted_bools(nest, op) is None else empty
            variables.append([self.e.var(self.e.type_of(empty), empty.text) for _ in range(count)])
        return variables

    def close_folds(self, nest: Nest, pt: Point, totals: list[Var]) -> None:
        for op, variable in zip(nest.folds, totals, strict=True):
            total = self._vector(op, variable) if pt.lane is not None else self._scalar(op, variable)
            self._keep(op.result, total, pt)

    def _keep(self, value: Value, reg: Reg, pt: Point) -> None:
        if value.shape:
            self.ev.scratch.write(self.ev.buffers[value], pt, reg)
        else:
            self.e.set(self._scalar_folds[value], reg.text)

    def _scalar_variable(self, op: Op) -> Var:
        """Return the variable of a scalar result, which every copy of the nest writes."""
        empty = self.ev.identity(op.attrs["fold"], op.operands[0].dtype)
        return self.e.var(empty.type, empty.text)

    def _vector(self, op: Op, variable: Var) -> Reg:
        return Reg(self.e.get(variable), self.ev.identity(op.attrs["fold"], op.operands[0].dtype).type, True)

    def _scalar(self, op: Op, variable: Var) -> Reg:
        return Reg(self.e.get(variable), variable.type)

    def read_in_place(self, nest: Nest, inside: str | None, copy: Callable[[], None]) -> bool:
        """Emit a copy that is skipped if the tile can be read in place; False if the nest is no such copy."""
        return False

    def prefetch_next(self, load: Op, points: list[Point]) -> None:
        """Prefetch what a load reads at these points in the next iteration of a loop, if nothing else does."""
