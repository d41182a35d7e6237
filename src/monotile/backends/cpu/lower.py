"""Lower a kernel after its passes to LLVM IR text: programs, scalars, loops, branches, and the order of nests.

The text has two functions: `kernel(args, program, scratch)` runs one program, `programs(args)` counts them. `args` is
an array of 64-bit words: the tensors' addresses, the scalars, then the lengths and strides of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import ELEMENTWISE, Block, Kernel, Op, starts
from . import amx
from .emit import Index, Reg
from .fuse import Segment
from .half_conversions import half_conversions
from .live_panels import count_live, stored_ranges
from .loop_state import LoopState
from .panel_sums import emit_in_panel, panel_nests
from .point import Point
from .program_order import comes_longest_first, emit_longest_first, emit_positions
from .row_skipping import SkippableRows, find_skippable_rows, visible_rows
from .row_tables import scalars_of
from .scalars import Scalars
from .target import Target
from .tiled_dots import TiledDotEmitter
from .vectors import register_type

COUNTABLE = ELEMENTWISE | {"const", "dim", "param"}  # ops that the size of a grid may be computed from

ARGUMENTS = {"%args": "ptr", "%program": "i64", "%scratch": "ptr"}


@dataclass(frozen=True)
class Lowered:
    text: str
    scratch_bytes: int
    longest_first: bool  # programs are to start in the order of their numbers


def lower(kernel: Kernel, target: Target, triple: str) -> Lowered:
    main = Lowering(kernel, target)
    main.run()
    scratch_bytes = main.scratch.finish()
    counter = ProgramCounter(kernel, target)
    counter.run()
    # The system aligns the stack to 16 bytes, and LLVM decides too late that vectors are spilled: without `alignstack`
    # spills cross cache lines in some processes and not in others, which made MLA three times slower (Zen 4, AVX-512).
    alignment = f"alignstack({4 * target.lanes})"
    attributes = f'nounwind {alignment} "min-legal-vector-width"="512" "prefer-vector-width"="{32 * target.lanes}"'
    functions = main.e.share(ARGUMENTS, attributes)
    parts = [
        f'target triple = "{triple}"\n',
        "@zero = private constant [16 x i8] zeroinitializer, align 16\n",
        *(f"{name} = private constant {text}\n" for text, name in main.e.constants.items()),
        *([amx.constants()] if main.layout.tiled else []),
        main.e.function(f"define void @kernel(ptr noalias %args, i64 %program, ptr noalias %scratch) {attributes}"),
        *functions,
        counter.e.function(f"define i64 @programs(ptr %args) {attributes}"),
        *sorted(f"{d}\n" for d in main.e.declarations | counter.e.declarations),
    ]
    text = "\n".join(parts)
    return Lowered(text + half_conversions(target, triple, text), scratch_bytes, main.longest_first)


class ProgramCounter(Scalars):
    """Emit `programs`: the product of the grid's sizes, from the scalars before `program_id`."""

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


class Lowering(LoopState):
    """Emit `kernel`: one program."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.nests = TiledDotEmitter(self.e, target, self.fusion, self.ev)
        self.nests.layout = self.layout
        self._skippable: SkippableRows | None = None  # of the innermost loop
        self._stored = stored_ranges(kernel, self.axes, self.layout.panel_axis)
        # Streamed tiles are read once, in the order of memory, which is the order of the grid.
        self.longest_first = self.layout.panel_axis is not None and comes_longest_first(kernel)

    def run(self) -> None:
        if self.layout.tiled:
            amx.configure(self.e)
        self.block(self.kernel.body)
        if self.layout.tiled:
            amx.release(self.e)
        self.e.do("ret void")

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """Emit the segments and the control flow of a block; the segment before a loop stores its carried values."""
        items = self.fusion.plan[block]
        for n, item in enumerate(items):
            if isinstance(item, Segment):
                following = items[n + 1] if n + 1 < len(items) else None
                if isinstance(following, Op) and following.kind == "for":
                    self.enter_loop(item, following, block)
                if following is None:
                    self.leave_block(item, block)
                self.segment(item)
            elif item.kind == "for":
                self._for(item)
            else:
                self.forward_results(item, block, items[n + 1 :])
                self._if(item)

    # ---- control flow ------------------------------------------------------------------------------------------------

    def _for(self, loop: Op) -> None:
        (body,) = loop.blocks
        e = self.e
        variables = {}
        for init, param in zip(loop.operands[2:], body.params[1:], strict=True):
            if not param.shape:
                reg = self.ev.scalars[init]
                variables[param] = e.var(reg.type, reg.text)
        self.targets[body] = tuple(p if p.shape else None for p in body.params[1:])
        began = self.scratch.clock

        outer = self._skippable
        self._skippable = find_skippable_rows(body, self.axes, self.layout.panel_axis, self.layout.skipped_rows)

        def iteration(counter: Index) -> None:
            text = str(counter) if isinstance(counter, int) else e.op(f"trunc i64 {counter} to i32")
            self.ev.scalars[body.params[0]] = Reg(text, "i32")
            for param, variable in variables.items():
                self.ev.scalars[param] = Reg(e.get(variable), variable.type)
            self.block(body)
            for param, value in zip(body.params[1:], body.terminator.operands, strict=True):
                if param in variables:
                    e.set(variables[param], self.ev.scalars[value].text)

        e.loop(self.index(loop.operands[0]), self.index(loop.operands[1]), loop.attrs["step"], iteration)
        self._skippable = outer
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
                self.ev.buffers.setdefault(result, self.buffer(result))
            else:
                type_ = register_type(result.dtype)
                variables[result] = e.var(type_, e.number(0, type_).text)

        def side(block: Block) -> None:
            self.targets[block] = tuple(r if r.shape else None for r in op.results)
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
        """Emit scalars as soon as they are ready, nests without the panel axis, then all others panel by panel."""
        for nest in segment.nests:
            for value in (*nest.values, *(f.result for f in nest.folds)):
                if value in self.fusion.stored and value.shape and value not in self.ev.buffers:
                    self.ev.buffers[value] = self.buffer(value)
        for nest in segment.nests:
            if nest.total is not None and nest.addend is not None and nest.sums_panels:  # in the copy of its memory
                self.ev.buffers[nest.total] = self.ev.buffers[nest.addend]
        waiting = list(segment.ops)
        waiting = self._emit_ready(waiting)
        panel_axis = self.layout.panel_axis
        in_panels, after = panel_nests(segment, self.fusion, panel_axis)
        for nest in segment.nests:
            if nest not in in_panels and nest not in after:
                self.nests.emit(nest, None)
                waiting = self._emit_ready(waiting)
        if in_panels:
            assert panel_axis is not None
            whole, rest = divmod(panel_axis.extent, self.layout.panel)

            def panel(number: Index, lanes: int = self.layout.panel) -> None:
                def work() -> None:
                    for nest in in_panels:
                        emit_in_panel(self.nests, nest, (number, lanes))

                if self._skippable is None:
                    work()
                    return
                first = self.e.mul(number, self.layout.panel)
                low, high = visible_rows(self.ev, self._skippable, first, lanes, self.layout.skipped_rows)
                self.nests.active_rows = (self._skippable.axis, low, high)
                self.e.when(self.e.compare("slt", low, high), work)
                self.nests.active_rows = None

            for nest in in_panels:
                self.nests.pack(nest)
            began = self.scratch.clock
            live = (
                count_live(self._stored, self.tensors, self.ev, self.layout.panel) if whole + bool(rest) > 1 else None
            )
            self.e.loop(0, whole if live is None else self.e.extreme("smin", live, whole), 1, panel)
            if rest and live is not None:
                self.e.when(self.e.compare("sgt", live, whole), lambda: panel(whole, rest))
            elif rest:
                panel(whole, rest)
            self.scratch.end_loop(began)
        for nest in after:
            self.nests.emit(nest, None)
            waiting = self._emit_ready(waiting)

    def _emit_ready(self, waiting: list[Op]) -> list[Op]:
        """Emit every waiting scalar and tile address whose inputs are known; return the rest."""
        left = []
        for op in waiting:
            if op.kind == "program_id":
                self._program(op)
            elif op.kind in ("load", "store"):
                if not all(v in self.ev.scalars for v in op.operands[op.kind == "store" :]):
                    left.append(op)
                    continue
                self.tensors.define(op, [self.index(v) for v in starts(op)], self.tensors.spans(op, self.index))
                if op.kind == "load" and not op.result.shape:
                    self.ev.scalars[op.result] = self.tensors.read(op, Point({}, edge=True))
                elif op in self.layout.ahead:
                    self._look_ahead(op)
            elif op in self.layout.row_gathers:
                if not all(v in self.ev.scalars for v in scalars_of(op, self.layout.row_gathers[op].ops)):
                    left.append(op)
                    continue
                self.define_rows(op)
                if op in self.layout.ahead:
                    self._look_ahead(op)
            elif op.results and not op.result.shape and op.kind not in ("reduce",):
                if all(v in self.ev.scalars for v in op.operands):
                    self.scalar(op)
                else:
                    left.append(op)
        return left

    def _look_ahead(self, op: Op) -> None:
        """Emit the address that a load, or each row of a gather, has in the next iteration, by the scalars that it
        depends on."""
        place, scalars, tiles = self.layout.ahead[op], self.ev.scalars, self.tensors.tiles
        self.ev.scalars, self.tensors.tiles = dict(scalars), dict(tiles)
        counter = scalars[place.counter]
        self.ev.scalars[place.counter] = self.e.binary("add", counter, Reg(str(place.step), "i32"))
        self._emit_ready(list(place.scalars))
        if op.kind == "gather":
            self.define_rows(op)
        else:
            self.tensors.define(op, [self.index(v) for v in starts(op)], self.tensors.spans(op, self.index))
        self.tensors.next_rows[op] = self.tensors.tiles[op].rows
        self.ev.scalars, self.tensors.tiles = scalars, tiles

    def _program(self, op: Op) -> None:
        """Split the program's number into the positions of the grid."""
        sizes = (self.index(size) for size in reversed(op.operands))
        positions = (emit_longest_first if self.longest_first else emit_positions)(self.e, sizes)
        self.ev.scalars.update(zip(op.results, positions, strict=True))
