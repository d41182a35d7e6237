"""Fusion: group the tile ops of a kernel into *nests*, loops over the axes of one domain.

A value is of one of three kinds. *Virtual* values (constants, positions and what follows from them, changes of shape)
are recomputed wherever they are read. *Lazy* values (loads that need no copy) are read from their tensor where they are
used. All others are *made* in one nest: an op joins the newest nest over its own domain that has its inputs; a reduce
joins the nest of its operand, and its result is ready when that nest ends; a dot opens a nest, and elementwise work on
its result follows in it; in `x + dot(...)` the nest of the dot adds x. A value gets storage only if another nest reads
it.

The layout decides along which axis the lanes of a value run (`lane`), which loads are copied (`eager`), which ops share
no nest with others (`isolated`), and which are computed where they are read (`inlined`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...ir import ELEMENTWISE, MEMORY, WRITES, Block, Kernel, Op, Value, uses, walk
from ...ir.matchers import Accumulation, accumulation
from .axes import Axes, Axis
from .strided import distance

POINTWISE = ELEMENTWISE | {"expand", "trans", "broadcast", "gather", "scatter"}
Lane = Callable[[Value], "Axis | None"]


@dataclass(eq=False)
class Nest:
    """Loops over `axes`, with everything that happens at each point of them."""

    axes: frozenset[Axis]
    lane: Axis | None
    made: list[Op] = field(default_factory=list)  # elementwise ops and copied loads
    folds: list[Op] = field(default_factory=list)
    stores: list[Op] = field(default_factory=list)
    moves: list[tuple[Value, Value]] = field(default_factory=list)  # (source, target) of loop-carried values
    dot: Op | None = None
    addend: Value | None = None  # the x of `x + dot(...)`
    total: Value | None = None  # the sum: the dot, or `x + dot(...)`
    sums_panels: bool = False  # the dot contracts the panel axis: each panel adds to what x holds (panel_sums.py)
    fold_axis: Axis | None = None
    completed_by: dict[Op, Op] = field(default_factory=dict)  # folds along the lanes, and the fold over the rows

    @property
    def values(self) -> list[Value]:
        """Return everything made here but reductions."""
        return [op.result for op in self.made] + ([self.total] if self.total is not None else [])


@dataclass(eq=False)
class Segment:
    """The ops between two loops or branches, in order, and their nests."""

    ops: list[Op]
    nests: list[Nest] = field(default_factory=list)


def unviewed(value: Value) -> Value:
    """Return what a value is before transposes and added dimensions."""
    while value.op is not None and value.op.kind in ("expand", "trans"):
        value = value.op.operands[0]
    return value


def stored_values(op: Op) -> list[Value]:
    """Return the tiles that a store or scatter reads: its value, and the positions of a scatter."""
    return [v for v in op.operands if v.shape] or [op.operands[0]]


def _must_follow(op: Op, before: list[Op]) -> bool:
    """True if an access must wait for all of the given ops: one of the two writes a tensor that the other touches, and
    they are not scatters that never meet."""
    if op.kind not in MEMORY:
        return False
    same = [
        o for o in before if o.kind in MEMORY and o.attrs["tensor"] is op.attrs["tensor"] and distance(o, op) is None
    ]
    return bool(same) and (op.kind in WRITES or any(o.kind in WRITES for o in same))


class Fusion:
    """The nests of a whole kernel: for each block its segments and the loops and branches between them."""

    def __init__(
        self, kernel: Kernel, axes: Axes, lane: Lane, eager: set[Op], isolated: set[Op],
        inlined: set[Op] | None = None, panel_sums: set[Op] | None = None,
    ) -> None:  # fmt: skip
        self.axes, self.lane, self.eager, self.isolated = axes, lane, eager, eager | isolated
        self.panel_sums = panel_sums or set()
        self.users = uses(kernel.body)
        self.home: dict[Value, Nest] = {}
        self.inlined: set[Op] = set(inlined or ())
        operands = (unviewed(v) for op in walk(kernel.body) if op.kind == "dot" for v in op.operands)
        self.operands = {v for v in operands if v.op not in self.inlined}
        self.plan: dict[Block, list[Segment | Op]] = {}
        self._block(kernel.body)
        self.stored = self._stored()

    # ---- kinds of values ---------------------------------------------------------------------------------------------

    def virtual(self, value: Value) -> bool:
        op = value.op
        if not value.shape or op is None:
            return not value.shape
        if value in self.operands and op.kind != "load":
            return False  # a dot reads its operands from storage, whatever they are
        if op.kind in ("arange", "expand", "trans", "broadcast"):
            return True
        return self.axes.index_like(value) and not value.dtype.is_float

    def lazy(self, value: Value) -> bool:
        return value.op is not None and value.op.kind in ("load", "gather") and value.op not in self.eager

    def reads(self, value: Value) -> Iterator[Value]:
        """Yield the made values that a value is computed from, looking through virtual, lazy and inlined ones."""
        op = value.op
        if op is None or op.kind == "reduce" or not (self.virtual(value) or self.lazy(value) or op in self.inlined):
            if value.shape or (op is not None and op.kind == "reduce"):
                yield value
            return
        for operand in op.operands:
            yield from self.reads(operand)

    def misaligned(self, op: Op) -> set[Value]:
        """Return the made values that an op reads at another position than its own, through a view with other axes."""
        found: set[Value] = set()

        def visit(op: Op, across: bool) -> None:
            for operand in op.operands:
                if not operand.shape:
                    continue
                there = across or (op.kind in POINTWISE and not self.axes.aligned(op, operand))
                source = operand.op
                if (
                    source is None
                    or source.kind == "reduce"
                    or not (self.virtual(operand) or self.lazy(operand) or source in self.inlined)
                ):
                    found.update({operand} if there else ())
                else:
                    visit(source, there)

        if self.axes.split:
            visit(op, False)
        return found

    # ---- building ----------------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        items: list[Segment | Op] = []
        segment = Segment([])
        for op in block.ops:
            if op.kind in ("for", "if"):
                items += [segment, op]
                segment = Segment([])
                for inner in op.blocks:
                    self._block(inner)
            elif op.kind != "yield":
                if _must_follow(op, segment.ops):
                    items.append(segment)
                    segment = Segment([])
                segment.ops.append(op)
        items.append(segment)
        self.plan[block] = items
        for item in items:
            if isinstance(item, Segment):
                self._segment(item)

    def _segment(self, segment: Segment) -> None:
        sums = self._accumulations(segment.ops)
        accumulated = {found.dot for found in sums.values()}
        for op in segment.ops:
            if op.kind in WRITES:
                self._place_store(segment, op)
                continue
            if not op.results or op.kind == "program_id" or op in accumulated or op in self.inlined:
                continue
            if op.kind == "reduce":
                self._place_reduce(segment, op)
            elif op.result.shape == () or self.virtual(op.result) or self.lazy(op.result):
                continue
            elif op in sums:
                dot, addend = sums[op]
                self._open(segment, op.result, dot=dot, addend=addend, total=op.result)
            elif op.kind == "dot":
                self._open(segment, op.result, dot=op, total=op.result)
            else:
                nest = self._find(segment, op, op.result) or self._open(segment, op.result)
                nest.made.append(op)
                self.home[op.result] = nest

    def _accumulations(self, ops: list[Op]) -> dict[Op, Accumulation]:
        """Match `x + dot(...)`: the add, the dot and the x. An elementwise x that nothing else reads is inlined."""
        sums: dict[Op, Accumulation] = {}
        here = set(ops)
        for op in ops:
            found = accumulation(op, here, self.users)
            if found is None:
                continue
            sums[op] = found
            x = found.addend.op
            if x is None or x in sums:  # the sum of another dot has a nest of its own
                continue
            if x.kind in ELEMENTWISE and x in here and len(self.users[found.addend]) == 1:
                self.inlined.add(x)
        return sums

    def _open(
        self,
        segment: Segment,
        like: Value,
        dot: Op | None = None,
        addend: Value | None = None,
        total: Value | None = None,
    ) -> Nest:
        nest = Nest(frozenset(self.axes.of(like)), self.lane(like), dot=dot, addend=addend, total=total)
        nest.sums_panels = dot in self.panel_sums
        segment.nests.append(nest)
        if total is not None:
            self.home[total] = nest
        return nest

    def _place_reduce(self, segment: Segment, op: Op) -> None:
        source = op.operands[0]
        folded = self.axes.dims(source)[op.attrs["axis"]]
        partial = self.home.get(source)
        if partial is not None and partial in segment.nests and self._completes(partial, op, folded):
            partial.completed_by[source.op] = op  # type: ignore[index]
            self.home[op.result] = partial
            return
        nest = self._find(segment, op, source, folded) or self._open(segment, source)
        if folded is None:  # a side of 1: nothing to sum, but NaN rules still apply
            nest.made.append(op)
        else:
            nest.folds.append(op)
            nest.fold_axis = folded
        self.home[op.result] = nest

    def _completes(self, nest: Nest, op: Op, folded: Axis | None) -> bool:
        """True if a fold over the rows of a nest completes one along its lanes: together they fold all elements."""
        (source,) = op.operands
        inner = source.op
        if inner not in nest.folds or inner is None or inner.attrs["fold"] != op.attrs["fold"] or op.result.shape:
            return False
        alone = len(self.users[source]) == 1 and nest.dot is None
        return alone and nest.fold_axis is nest.lane and folded is not None and folded in nest.axes

    def _place_store(self, segment: Segment, op: Op) -> None:
        nest = self._find(segment, op, op.operands[0])
        if nest is None or (op.kind == "scatter" and nest.dot is not None):
            nest = self._open(segment, op.operands[0])
        nest.stores.append(op)

    def move(self, segment: Segment, source: Value, target: Value) -> None:
        """Copy a value to the storage of a loop-carried value, at the end of the segment."""
        self._open(segment, target).moves.append((source, target))

    def _find(self, segment: Segment, op: Op, like: Value, folded: Axis | None = None) -> Nest | None:
        """Return the newest nest over the axes of `like` that can take the op."""
        if op in self.isolated:
            return None
        domain, lane = frozenset(self.axes.of(like)), self.lane(like)
        needed = [v for operand in op.operands for v in self.reads(operand)]
        misaligned = self.misaligned(op)
        for nest in reversed(segment.nests):
            made = [v for v in needed if self.home.get(v) is nest]
            fits = nest.axes == domain and nest.lane is lane and not nest.moves and not nest.sums_panels
            fits = fits and (folded is None or nest.fold_axis in (None, folded))
            ends_with_nest = any(v.op in nest.folds or not v.shape for v in made)  # results of folds
            fits = fits and not ends_with_nest
            fits = fits and not any(v in misaligned for v in made)
            fits = fits and not any(o in self.isolated for o in (*nest.made, *nest.stores))
            if nest.dot is not None and folded is not None and folded is nest.lane:
                fits = False  # a dot computes one group of lanes after the other
            if fits:
                return nest
            if made:
                return None
        return None

    # ---- storage -----------------------------------------------------------------------------------------------------

    def nest_reads(self, nest: Nest) -> set[Value]:
        """Return the made values that a nest reads, its own among them."""
        roots = [v for op in (*nest.made, *nest.folds) for v in op.operands if op.result is not nest.total]
        roots += [v for op in nest.stores for v in stored_values(op)] + [source for source, _ in nest.moves]
        if nest.addend is not None:
            roots.append(nest.addend)
        if nest.dot is not None:
            roots += [v for v in nest.dot.operands if unviewed(v).op in self.inlined]
        return {v for root in roots for v in self.reads(root)}

    def _stored(self) -> set[Value]:
        """Return the values that need storage: read by another nest or by a dot, or loop-carried."""
        stored = set(self.operands)
        for items in self.plan.values():
            for item in items:
                if isinstance(item, Segment):
                    for nest in item.nests:
                        stored |= {v for v in self.nest_reads(nest) if self.home.get(v) is not nest}
                        stored |= {f.result for f in nest.folds if f.result.shape and f not in nest.completed_by}
                else:
                    carried = [*item.operands, *(v for b in item.blocks for v in b.terminator.operands)]
                    stored |= {v for c in carried for v in self.reads(c) if v.shape}
        return stored
