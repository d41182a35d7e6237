"""Storage of tiles, and what loops and branches carry: where it is kept, and when it may be updated in place."""

from __future__ import annotations

from ...ir import Block, Kernel, Op, Value, walk
from .fuse import Fusion, Nest, Segment, unviewed
from .layout import Layout
from .scalars import Scalars
from .scratch import Buffer
from .target import Target
from .vectors import register_type


class LoopState(Scalars):
    """Scalars, and storage for what lives longer than a nest."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.layout = Layout(kernel, self.axes, target)
        layout = self.layout
        self.fusion = Fusion(kernel, self.axes, layout.lane, layout.eager, layout.isolated, layout.stream_ops)
        self.local = self._find_local()
        self.targets: dict[Block, tuple[Value | None, ...]] = {}  # where a block's yields are kept

    def forward_results(self, op: Op, block: Block, later: list[Segment | Op]) -> None:
        """What a branch decides and its block only passes on is kept where the block's owner keeps it: no copy."""
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
            ops.append(block.terminator)  # another variable may take the old value
            if not any(target in self.fusion.reads(v) for o in ops for v in o.operands):
                self.ev.buffers[value] = self.ev.buffers[target]

    def enter_loop(self, segment: Segment, loop: Op, block: Block) -> None:
        """Gives what the loop carries its storage, and starts it off. What an earlier loop of the same block has
        carried, and nothing else reads, stays where it is; from outside the block it may be needed once more, by the
        next turn."""
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
        """Writes what a block yields to where its owner keeps it."""
        targets = self.targets.get(block, ())
        yields = block.terminator.operands if block.ops else ()
        pending = []
        for value, target in zip(yields, targets, strict=False):
            if target is None or not target.shape or self.ev.buffers.get(value) is self.ev.buffers[target]:
                continue
            kept = self.ev.buffers[target]
            others = (v for v in yields if v is not value)
            wanted = any(
                self.ev.buffers.get(v) is kept for other in others for v in self.fusion.reads(other)
            )  # as it was
            if not wanted and self._in_place(segment, value, target):
                self.ev.buffers[value] = self.ev.buffers[target]
            else:
                pending.append((value, target))
        # A yielded value may itself be carried storage (two variables that change places): then all are read first.
        carried = {self.ev.buffers.get(t) for t in targets if t is not None}
        if any(self.ev.buffers.get(v) in carried for source, _ in pending for v in self.fusion.reads(source)):
            pending = [(self._copy_apart(segment, value), target) for value, target in pending]
        for value, target in pending:
            self.fusion.move(segment, value, target)

    def _copy_apart(self, segment: Segment, value: Value) -> Value:
        """A copy of a value in storage of its own."""
        copy = Value(value.type, value.owner, value.hint)
        self.axes.alias(copy, value)
        self.ev.buffers[copy] = self.buffer(copy)
        self.fusion.move(segment, value, copy)
        return copy

    def _in_place(self, segment: Segment, value: Value, target: Value) -> bool:
        """Whether the new value may overwrite the old as it is made: nothing later in the turn reads the old one."""
        home = self.fusion.home.get(value)
        if home not in segment.nests or home is None or value not in home.values or value in self.ev.buffers:
            return False
        if not self._same_layout(value, target):
            return False
        # The nest itself may read the old value, but only at the point it is about to write.
        if self._crossed(home) or self.axes.split or self._dot_reads(home, target):
            return False
        later = segment.nests[segment.nests.index(home) + 1 :]
        return not any(self._nest_reads(n, target) or self._dot_reads(n, target) for n in later)

    def _same_layout(self, value: Value, target: Value) -> bool:
        same_lanes = self.layout.lane(value) is self.layout.lane(target)
        return bool(value.shape) and same_lanes and self.axes.dims(value) == self.axes.dims(target)

    def _crossed(self, nest: Nest) -> bool:
        return any(op in self.fusion.isolated for op in nest.made)

    def _nest_reads(self, nest: Nest, value: Value) -> bool:
        return any(self.ev.buffers.get(v) is self.ev.buffers[value] for v in self.fusion.nest_reads(nest))

    def _dot_reads(self, nest: Nest, value: Value) -> bool:
        operands = nest.dot.operands if nest.dot is not None else ()
        read = {v for operand in operands for v in (unviewed(operand), *self.fusion.reads(operand))}
        return any(self.ev.buffers.get(v) is self.ev.buffers[value] for v in read)

    # ---- storage -----------------------------------------------------------------------------------------------------

    def buffer(self, value: Value) -> Buffer:
        """[panel][row][lane] with the panel axis, else [row][lane]; lanes are padded to whole vectors."""
        axes = self.axes.of(value)
        lane = self.layout.lane(value)
        element = {"i1": "i8"}.get(register_type(value.dtype), register_type(value.dtype))
        if lane is None:
            return self.scratch.new(element, {}, None, 1)
        other = next((a for a in axes if a is not lane), None)
        height = other.extent if other is not None else 1
        if lane is self.layout.panel_axis:
            width = self.target.panel
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

    def _find_local(self) -> set[Value]:
        """Values made and read within the nests of one segment: one panel of storage is enough."""
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
                    local -= read - mine
                else:
                    carried = [*item.operands, *(v for b in item.blocks for v in b.terminator.operands)]
                    local -= {v for c in carried for v in self.fusion.reads(c)}
        return local


def _inner(op: Op) -> list[Op]:
    return [inner for block in op.blocks for inner in walk(block)]
