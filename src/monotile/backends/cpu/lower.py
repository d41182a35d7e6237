"""A kernel after its passes, as LLVM IR text: programs, scalars, loops, branches, and the order of nests.

The text has two functions: `kernel(args, program, scratch)` runs one program, `programs(args)` counts them. `args` is
an array of 64-bit words: for each tensor its address, lengths and strides, then the scalars.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import ELEMENTWISE, Block, Kernel, Op, Value, walk
from ...passes.axes import Axes
from ...passes.fuse import Fusion, Nest, Segment, strip
from .cuts import Cut, find_cut, row_range
from .emit import Emitter, Index, Reg
from .evaluate import Evaluator
from .layout import Layout
from .point import Point
from .scratch import Buffer, Scratch
from .streams import StreamEmitter
from .target import Target
from .tiles import Tensors
from .vectors import register_type

COUNTABLE = ELEMENTWISE | {"const", "dim", "param"}  # what the size of a grid may be computed from


@dataclass(frozen=True)
class Lowered:
    text: str
    scratch_bytes: int


def lower(kernel: Kernel, target: Target, triple: str) -> Lowered:
    main = Lowering(kernel, target)
    main.run()
    scratch_bytes = main.scratch.finish()
    counter = Counting(kernel, target)
    counter.run()
    attributes = f'nounwind "min-legal-vector-width"="512" "prefer-vector-width"="{32 * target.lanes}"'
    parts = [
        f'target triple = "{triple}"\n',
        "@zero = private constant [16 x i8] zeroinitializer, align 16\n@ones = private constant i16 -1\n",
        main.e.function(f"define void @kernel(ptr noalias %args, i64 %program, ptr noalias %scratch) {attributes}"),
        counter.e.function(f"define i64 @programs(ptr %args) {attributes}"),
        *sorted(f"{d}\n" for d in main.e.declarations | counter.e.declarations),
    ]
    return Lowered("\n".join(parts), scratch_bytes)


class Scalars:
    """What both functions need: arguments and scalar arithmetic."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.e = Emitter(target.lanes)
        self.axes = Axes(kernel)
        self.scratch = Scratch(self.e)
        self.tensors = Tensors(self.e, self.axes, kernel.tensors)
        self.ev = Evaluator(self.e, self.axes, self.tensors, self.scratch)

    def scalar(self, op: Op) -> None:
        e = self.e
        operands = [self.ev.scalars[v] for v in op.operands]
        if op.kind == "const":
            reg = e.number(op.attrs["value"], register_type(op.result.dtype))
        elif op.kind == "dim":
            length = self.tensors.lengths[op.attrs["tensor"].index][op.attrs["axis"]]
            reg = Reg(str(length), "i32") if isinstance(length, int) else Reg(e.op(f"trunc i64 {length} to i32"), "i32")
        elif op.kind == "param":
            reg = self._parameter(op)
        elif op.kind == "gather":
            reg = self.tensors.read_scattered(op, operands, None)
        else:
            reg = self.ev.elementwise(op, operands)
        self.ev.scalars[op.result] = reg

    def _parameter(self, op: Op) -> Reg:
        names = [name for name, _ in self.kernel.scalars]
        word = self.tensors.argument(self.tensors.scalar_word + names.index(op.attrs["name"]))
        type_ = register_type(op.result.dtype)
        if type_ == "i64":
            return Reg(word, type_)
        if type_ == "float":
            return Reg(self.e.op(f"bitcast i32 {self.e.op(f'trunc i64 {word} to i32')} to float"), type_)
        return Reg(self.e.op(f"trunc i64 {word} to {type_}"), type_)

    def index(self, value: Value) -> Index:
        """A scalar as an i64 index."""
        reg = self.ev.scalars[value]
        if not reg.text.startswith("%"):
            return int(reg.text)
        return reg.text if reg.type == "i64" else self.e.op(f"sext i32 {reg.text} to i64")


class Counting(Scalars):
    """`programs`: the product of the grid's sizes, from the scalars before `program_id`."""

    def run(self) -> None:
        total: Index = 1
        for op in self.kernel.body.ops:
            if op.kind == "program_id":
                for size in op.operands:
                    positive = self.e.call("i64", "llvm.smax.i64", ("i64", str(self.index(size))), ("i64", "0"))
                    total = self.e.mul(total, positive)
                break
            if op.kind in COUNTABLE and not op.result.shape and all(v in self.ev.scalars for v in op.operands):
                self.scalar(op)
        self.e.do(f"ret i64 {total}")


class Lowering(Scalars):
    """`kernel`: one program."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.layout = Layout(kernel, self.axes, target)
        self.fusion = Fusion(kernel, self.axes, self.layout.lane, self.layout.eager, self.layout.apart)
        self.nests = StreamEmitter(self.e, target, self.fusion, self.ev)
        self.nests.layout = self.layout
        self._local = self._find_local()
        self._targets: dict[Block, tuple[Value | None, ...]] = {}  # where a block's yields are kept
        self._cut: Cut | None = None  # what the loop around allows to leave out

    def run(self) -> None:
        self.block(self.kernel.body)
        self.e.do("ret void")

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """The block's segments and control flow; what the control flow carries is put in place by the segment before
        it."""
        items = self.fusion.plan[block]
        for n, item in enumerate(items):
            if isinstance(item, Segment):
                following = items[n + 1] if n + 1 < len(items) else None
                if isinstance(following, Op) and following.kind == "for":
                    self._enter(item, following, block)
                if following is None:
                    self._leave(item, block)
                self.segment(item)
            elif item.kind == "for":
                self._for(item)
            else:
                self._pass_on(item, block, items[n + 1 :])
                self._if(item)

    def _pass_on(self, op: Op, block: Block, later: list[Segment | Op]) -> None:
        """What a branch decides and its block only passes on is kept where the block's owner keeps it: no copy."""
        yields, targets = block.terminator.operands, self._targets.get(block, ())
        for value, target in zip(yields, targets, strict=False):
            if (
                value not in op.results
                or target is None
                or len(self.fusion.users[value]) != 1
                or not self._alike(value, target)
            ):
                continue
            ops = [o for item in later for o in (item.ops if isinstance(item, Segment) else [item, *_inner(item)])]
            ops.append(block.terminator)  # another variable may take the old value
            if not any(target in self.fusion.reads(v) for o in ops for v in o.operands):
                self.ev.buffers[value] = self.ev.buffers[target]

    def _enter(self, segment: Segment, loop: Op, block: Block) -> None:
        """Gives what the loop carries its storage, and starts it off. What an earlier loop of the same block has
        carried, and nothing else reads, stays where it is; from outside the block it may be needed once more, by the
        next turn."""
        (body,) = loop.blocks
        for init, param, result in zip(loop.operands[2:], body.params[1:], loop.results, strict=True):
            if not param.shape:
                continue
            reuse = init.kind == "for" and len(self.fusion.users[init]) == 1 and init in self.ev.buffers
            reuse = reuse and init.op in block.ops and self._alike(init, param)
            buffer = self.ev.buffers[init] if reuse else self._buffer(param)
            self.ev.buffers[param] = self.ev.buffers[result] = buffer
            if not reuse:
                self.fusion.move(segment, init, param)

    def _leave(self, segment: Segment, block: Block) -> None:
        """Writes what a block yields to where its owner keeps it."""
        targets = self._targets.get(block, ())
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
            pending = [(self._park(segment, value), target) for value, target in pending]
        for value, target in pending:
            self.fusion.move(segment, value, target)

    def _park(self, segment: Segment, value: Value) -> Value:
        """A copy of a value in storage of its own."""
        copy = Value(value.type, value.owner, value.hint)
        self.axes.alias(copy, value)
        self.ev.buffers[copy] = self._buffer(copy)
        self.fusion.move(segment, value, copy)
        return copy

    def _in_place(self, segment: Segment, value: Value, target: Value) -> bool:
        """Whether the new value may overwrite the old as it is made: nothing later in the turn reads the old one."""
        home = self.fusion.home.get(value)
        if home not in segment.nests or home is None or value not in home.values or value in self.ev.buffers:
            return False
        if not self._alike(value, target):
            return False
        # The nest itself may read the old value, but only at the point it is about to write.
        if self._crossed(home) or self.axes.split or self._dot_reads(home, target):
            return False
        later = segment.nests[segment.nests.index(home) + 1 :]
        return not any(self._nest_reads(n, target) or self._dot_reads(n, target) for n in later)

    def _alike(self, value: Value, target: Value) -> bool:
        same_lanes = self.layout.lane(value) is self.layout.lane(target)
        return bool(value.shape) and same_lanes and self.axes.dims(value) == self.axes.dims(target)

    def _crossed(self, nest: Nest) -> bool:
        return any(op in self.fusion.apart for op in nest.made)

    def _nest_reads(self, nest: Nest, value: Value) -> bool:
        return any(self.ev.buffers.get(v) is self.ev.buffers[value] for v in self.fusion.nest_reads(nest))

    def _dot_reads(self, nest: Nest, value: Value) -> bool:
        operands = nest.dot.operands if nest.dot is not None else ()
        return any(self.ev.buffers.get(strip(v)) is self.ev.buffers[value] for v in operands)

    # ---- control flow ------------------------------------------------------------------------------------------------

    def _for(self, loop: Op) -> None:
        (body,) = loop.blocks
        e = self.e
        variables = {}
        for init, param in zip(loop.operands[2:], body.params[1:], strict=True):
            if not param.shape:
                reg = self.ev.scalars[init]
                variables[param] = e.var(reg.type, reg.text)
        self._targets[body] = tuple(p if p.shape else None for p in body.params[1:])
        began = self.scratch.clock

        outer, self._cut = self._cut, find_cut(body, self.axes, self.layout.panel_axis, self.target.rows)

        def turn(counter: Index) -> None:
            text = str(counter) if isinstance(counter, int) else e.op(f"trunc i64 {counter} to i32")
            self.ev.scalars[body.params[0]] = Reg(text, "i32")
            for param, variable in variables.items():
                self.ev.scalars[param] = Reg(e.get(variable), variable.type)
            self.block(body)
            for param, value in zip(body.params[1:], body.terminator.operands, strict=True):
                if param in variables:
                    e.set(variables[param], self.ev.scalars[value].text)

        e.loop(self.index(loop.operands[0]), self.index(loop.operands[1]), loop.attrs["step"], turn)
        self._cut = outer
        self.scratch.clock += 1
        for param in body.params[1:]:
            if param.shape:
                self.scratch.touch(self.ev.buffers[param])
        self.scratch.end_loop(began)
        for param, result in zip(body.params[1:], loop.results, strict=True):
            if param in variables:
                self.ev.scalars[result] = Reg(e.get(variables[param]), variables[param].type)

    def _if(self, op: Op) -> None:
        e = self.e
        variables = {}
        for result in op.results:
            if result.shape:
                self.ev.buffers.setdefault(result, self._buffer(result))
            else:
                type_ = register_type(result.dtype)
                variables[result] = e.var(type_, e.number(0, type_).text)

        def side(block: Block) -> None:
            self._targets[block] = tuple(r if r.shape else None for r in op.results)
            self.block(block)
            for result, value in zip(op.results, block.terminator.operands, strict=True):
                if result in variables:
                    e.set(variables[result], self.ev.scalars[value].text)

        e.when(self.ev.scalars[op.operands[0]].text, lambda: side(op.blocks[0]), lambda: side(op.blocks[1]))
        self.scratch.clock += 1
        for result in op.results:
            if result in variables:
                self.ev.scalars[result] = Reg(e.get(variables[result]), variables[result].type)
            else:
                self.scratch.touch(self.ev.buffers[result])

    # ---- segments ----------------------------------------------------------------------------------------------------

    def segment(self, segment: Segment) -> None:
        """Scalars as soon as they can be computed; nests without the panel axis; then all others, panel by panel."""
        for nest in segment.nests:
            for value in (*nest.values, *(f.result for f in nest.folds)):
                if value in self.fusion.stored and value.shape and value not in self.ev.buffers:
                    self.ev.buffers[value] = self._buffer(value)
        waiting = list(segment.ops)
        waiting = self._scalars(waiting)
        panel_axis = self.layout.panel_axis
        inside = [n for n in segment.nests if panel_axis is not None and panel_axis in n.axes]
        for nest in segment.nests:
            if nest not in inside:
                self.nests.emit(nest, None)
                waiting = self._scalars(waiting)
        if inside:
            assert panel_axis is not None
            whole, rest = divmod(panel_axis.extent, self.target.panel)

            def panel(number: Index, lanes: int = self.target.panel) -> None:
                def work() -> None:
                    for nest in inside:
                        self.nests.emit(nest, (number, lanes))

                if self._cut is None:
                    work()
                    return
                low, high = self._cut_rows(self._cut, number, lanes)
                self.nests.cut = (self._cut.axis, low, high)
                self.e.when(self.e.compare("slt", low, high), work)
                self.nests.cut = None

            began = self.scratch.clock
            self.e.loop(0, whole, 1, panel)
            if rest:
                panel(whole, rest)
            self.scratch.end_loop(began)

    def _cut_rows(self, cut: Cut, number: Index, lanes: int) -> tuple[Index, Index]:
        """The rows a panel may see."""
        e = self.e
        rests: list[Index] = []
        for bound in cut.bounds:
            rest: Index = bound.rest.const
            for value, factor in bound.rest.terms.items():
                rest = e.add(rest, e.mul(self.index(value), factor))
            rests.append(rest)
        return row_range(e, cut, rests, e.mul(number, self.target.panel), lanes, self.target.rows)

    def _scalars(self, waiting: list[Op]) -> list[Op]:
        """Emits every waiting scalar and tile address whose inputs are known; returns the rest."""
        left = []
        for op in waiting:
            if op.kind == "program_id":
                self._program(op)
            elif op.kind in ("load", "store"):
                starts = op.operands[op.kind == "store" :]
                if not all(v in self.ev.scalars for v in starts):
                    left.append(op)
                    continue
                self.tensors.define(op, [self.index(v) for v in starts])
                if op.kind == "load" and not op.result.shape:
                    self.ev.scalars[op.result] = self.tensors.read(op, Point({}, edge=True))
            elif op.results and not op.result.shape and op.kind not in ("reduce",):
                if all(v in self.ev.scalars for v in op.operands):
                    self.scalar(op)
                else:
                    left.append(op)
        return left

    def _program(self, op: Op) -> None:
        """The program's number, taken apart; the last size runs fastest."""
        e = self.e
        rest: Index = "%program"
        for size, result in reversed(list(zip(op.operands, op.results, strict=True))):
            n = self.index(size)
            self.ev.scalars[result] = Reg(e.op(f"trunc i64 {e.op(f'urem i64 {rest}, {n}')} to i32"), "i32")
            rest = e.op(f"udiv i64 {rest}, {n}")

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _buffer(self, value: Value) -> Buffer:
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
            panels = 1 if value in self._local else -(-lane.extent // width)
            strides = {lane: 1} | ({other: width} if other is not None else {})
            return self.scratch.new(
                element, strides, lane, panels * height * width, 0 if panels == 1 else height * width
            )
        width = -(-lane.extent // self.target.lanes) * self.target.lanes
        if other is not None and width % 256 == 0:
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
                    read |= {strip(v) for n in item.nests if n.dot is not None for v in n.dot.operands}
                    local -= read - mine
                else:
                    carried = [*item.operands, *(v for b in item.blocks for v in b.terminator.operands)]
                    local -= {v for c in carried for v in self.fusion.reads(c)}
        return local


def _inner(op: Op) -> list[Op]:
    return [inner for block in op.blocks for inner in walk(block)]
