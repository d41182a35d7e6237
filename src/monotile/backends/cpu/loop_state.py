"""Storage of tiles and of loop-carried state: where it is stored, and when it is updated in place."""

from __future__ import annotations

from ...ir import Block, Kernel, Op, Value, walk
from .amx import BFLOAT16
from .fuse import Fusion, Nest, Segment, unviewed
from .layout import Layout
from .row_tables import emit_row_table
from .scalars import Scalars
from .scratch import Buffer
from .target import Target
from .tile_rows import TableRows
from .vectors import STORED, register_type


class LoopState(Scalars):
    """Scalars, and storage for values that live longer than a nest."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.layout = Layout(kernel, self.axes, target)
        layout = self.layout
        self.fusion = Fusion(
            kernel, self.axes, layout.lane, layout.eager, layout.isolated, layout.inlined, layout.panel_sums
        )
        self.local = self._find_local()
        self.targets: dict[Block, tuple[Value | None, ...]] = {}  # whose storage takes the yields of a block

    def define_rows(self, op: Op) -> None:
        """Emit the addresses of the rows that a gather reads."""
        table = emit_row_table(self.ev, op, self.layout.row_gathers[op])
        self.tensors.define_rows(op, TableRows(self.scratch, table, STORED[op.attrs["tensor"].dtype.name]))

    def forward_results(self, op: Op, block: Block, later: list[Segment | Op]) -> None:
        """Let a branch write a result that its block only yields straight to the storage of that yield: no copy."""
        yields, targets = block.terminator.operands, self.targets.get(block, ())
        for value, target in zip(yields, targets, strict=False):
            if (
                value not in op.results
                or target is None
                or len(self.fusion.users[value]) != 1
                or not self._same_layout(value, target)
            ):
                continue
            ops = [o for item in later for o in (item.ops if isinstance(item, Segment) else [item, *_inner(item)])]
            ops.append(block.terminator)  # another loop-carried value may take the old one
            if not any(target in self.fusion.reads(v) for o in ops for v in o.operands):
                self.ev.buffers[value] = self.ev.buffers[target]

    def enter_loop(self, segment: Segment, loop: Op, block: Block) -> None:
        """Allocate and initialise the storage of loop-carried values. The result of an earlier loop of the same block
        that nothing else reads is carried on in its storage; one from outside the block may be needed again, by the
        next iteration of an outer loop."""
        (body,) = loop.blocks
        for init, param, result in zip(loop.operands[2:], body.params[1:], loop.results, strict=True):
            if not param.shape:
                continue
            reuse = init.kind == "for" and len(self.fusion.users[init]) == 1 and init in self.ev.buffers
            reuse = reuse and init.op in block.ops and self._same_layout(init, param)
            buffer = self.ev.buffers[init] if reuse else self.buffer(param)
            self.ev.buffers[param] = self.ev.buffers[result] = buffer
            if not reuse:
                self.fusion.move(segment, init, param)

    def leave_block(self, segment: Segment, block: Block) -> None:
        """Write the yields of a block to the storage of the loop or branch that it belongs to."""
        targets = self.targets.get(block, ())
        yields = block.terminator.operands if block.ops else ()
        pending = []
        for value, target in zip(yields, targets, strict=False):
            if target is None or not target.shape or self.ev.buffers.get(value) is self.ev.buffers[target]:
                continue
            storage = self.ev.buffers[target]
            others = (v for v in yields if v is not value)
            old_is_read = any(self.ev.buffers.get(v) is storage for other in others for v in self.fusion.reads(other))
            if not old_is_read and self._in_place(segment, value, target):
                self.ev.buffers[value] = self.ev.buffers[target]
            else:
                pending.append((value, target))
        # A yielded value may itself be in loop-carried storage (two variables swap): then all are copied apart first.
        carried = {self.ev.buffers.get(t) for t in targets if t is not None}
        if any(self.ev.buffers.get(v) in carried for source, _ in pending for v in self.fusion.reads(source)):
            pending = [(self._copy_apart(segment, value), target) for value, target in pending]
        for value, target in pending:
            self.fusion.move(segment, value, target)

    def _copy_apart(self, segment: Segment, value: Value) -> Value:
        """Copy a value to storage of its own."""
        copy = Value(value.type, value.owner, value.hint)
        self.axes.alias(copy, value)
        self.ev.buffers[copy] = self.buffer(copy)
        self.fusion.move(segment, value, copy)
        return copy

    def _in_place(self, segment: Segment, value: Value, target: Value) -> bool:
        """True if the new value may overwrite the old one: nothing later in the iteration reads the old one."""
        home = self.fusion.home.get(value)
        if home not in segment.nests or home is None or value not in home.values or value in self.ev.buffers:
            return False
        if not self._same_layout(value, target):
            return False
        # The nest itself may read the old value, but only at the point it is about to write.
        if self._transposes(home) or self.axes.split or self._dot_reads(home, target):
            return False
        later = segment.nests[segment.nests.index(home) + 1 :]
        return not any(self._nest_reads(n, target) or self._dot_reads(n, target) for n in later)

    def _same_layout(self, value: Value, target: Value) -> bool:
        same_lanes = self.layout.lane(value) is self.layout.lane(target)
        return bool(value.shape) and same_lanes and self.axes.dims(value) == self.axes.dims(target)

    def _transposes(self, nest: Nest) -> bool:
        return any(op in self.fusion.isolated for op in nest.made)

    def _nest_reads(self, nest: Nest, value: Value) -> bool:
        return any(self.ev.buffers.get(v) is self.ev.buffers[value] for v in self.fusion.nest_reads(nest))

    def _dot_reads(self, nest: Nest, value: Value) -> bool:
        operands = nest.dot.operands if nest.dot is not None else ()
        read = {v for operand in operands for v in (unviewed(operand), *self.fusion.reads(operand))}
        return any(self.ev.buffers.get(v) is self.ev.buffers[value] for v in read)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def buffer(self, value: Value) -> Buffer:
        """Allocate [panel][row][lane] for a tile with the panel axis, else [row][lane]; pad lanes to whole vectors."""
        axes = self.axes.of(value)
        lane = self.layout.lane(value)
        element = {"i1": "i8"}.get(register_type(value.dtype), register_type(value.dtype))
        element = "i16" if value.op in self.layout.narrow else element
        if lane is None:
            return self.scratch.new(element, {}, None, 1)
        other = next((a for a in axes if a is not lane), None)
        if other is not None and self._stores_pairs(value):
            panels = 1 if value in self.local else -(-lane.extent // self.layout.panel)
            return self.scratch.new_pairs(lane, other, self.layout.panel, BFLOAT16.steps, panels)
        height = other.extent if other is not None else 1
        if lane is self.layout.panel_axis:
            width = self.layout.panel
            panels = 1 if value in self.local else -(-lane.extent // width)
            strides = {lane: 1} | ({other: width} if other is not None else {})
            return self.scratch.new(
                element, strides, lane, panels * height * width, 0 if panels == 1 else height * width
            )
        width = -(-lane.extent // self.target.lanes) * self.target.lanes
        if other is not None and width % 256 == 0 and value.op not in self.layout.in_place:
            width += self.target.lanes  # rows a power of two apart would share few cache sets
        strides = {lane: 1} | ({other: width} if other is not None else {})
        return self.scratch.new(element, strides, lane, height * width)

    def _stores_pairs(self, value: Value) -> bool:
        """True if a nest writes a tile of panels, an even number of rows in order, that AMX alone reads."""
        home, tiled = self.fusion.home.get(value), self.layout.tiled
        if home is None or value.op not in home.made or self.layout.lane(value) is not self.layout.panel_axis:
            return False
        in_order = home.dot is None or home.dot in tiled
        even = all(a.extent % 2 == 0 for a in self.axes.of(value) if a is not self.layout.panel_axis)
        return in_order and even and self.layout.only_read_by(value, {d for d, p in tiled.items() if p is BFLOAT16})

    def _find_local(self) -> set[Value]:
        """Return the values that only the nests of one segment read: one panel of storage is enough."""
        local: set[Value] = set()
        for items in self.fusion.plan.values():
            for item in items:
                if isinstance(item, Segment):
                    local |= {v for n in item.nests for v in (*n.values, *(f.result for f in n.folds))}
        for items in self.fusion.plan.values():
            for item in items:
                if isinstance(item, Segment):
                    mine = {v for n in item.nests for v in (*n.values, *(f.result for f in n.folds))}
                    read = {v for n in item.nests for v in self.fusion.nest_reads(n)}
                    read |= {unviewed(v) for n in item.nests if n.dot is not None for v in n.dot.operands}
                    across = [n for n in item.nests if n.lane is not self.layout.panel_axis and not n.sums_panels]
                    local -= (read - mine) | {v for n in across for v in self.fusion.nest_reads(n)}
                else:
                    carried = [*item.operands, *(v for b in item.blocks for v in b.terminator.operands)]
                    local -= {v for c in carried for v in self.fusion.reads(c)}
        return local


def _inner(op: Op) -> list[Op]:
    return [inner for block in op.blocks for inner in walk(block)]
