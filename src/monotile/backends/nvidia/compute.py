"""What the computing warps of a group do: one program, as Gluon text.

Tiles with rows lie in the layout of the products' results; vectors in a slice of it. Positions and constants have no
layout until they meet a tile, and are written out where they are used, so that they can meet several. Operands that
were fetched are not values but places in shared memory."""

from __future__ import annotations

from ...errors import InternalError
from ...ir import Block, Kernel, Op, Value, walk
from . import elementwise
from .padding import identity, padded, padded_shape
from .render import TENSORS_ONLY, Renderer
from .schedule import Schedule
from .streams import Streams, loaded
from .text import Text, meet, shape_text, triton_type
from .turns import Turn, split

SHARED = "shared"


class Compute(Renderer):
    """Writes one program. `slot` says which place of the rings the turn at hand reads."""

    def __init__(self, kernel: Kernel, schedule: Schedule, streams: Streams, wide: bool) -> None:
        super().__init__(kernel, schedule, wide, emulate=False)
        self.streams = streams
        self.slot, self.phase = "", ""
        self.waited: set[str] = set()
        self.counter = 0

    # ---- layouts -----------------------------------------------------------------------------------------------------

    def layout(self, shape: tuple[int, ...]) -> str:
        """Where values of this shape lie when something has to be said."""
        scores = f"products_{self.streams.widths[0]}"
        if len(shape) == 1:
            return f"gl.SliceLayout(1, {scores})"
        return f"products_{shape[1]}" if shape[1] > 1 else scores

    def in_layout(self, text: Text, layout: str) -> str:
        if text.layout in ("", layout) or not text.shape:
            return text.text
        if text.vector:
            at = 0 if text.shape[0] == 1 else 1
            return f"gl.convert_layout({text.vector}, gl.SliceLayout({at}, {layout})){('[None, :]', '[:, None]')[at]}"
        return f"gl.convert_layout({text.text}, {layout})"

    def full(self, value: Value, shape: tuple[int, ...] | None = None) -> str:
        text, shape = self.table[value], padded_shape(value.shape if shape is None else shape)
        if not shape:
            return self.tensor(value)
        layout = self.layout(shape)
        if not text.shape:
            return f"tl.full({shape_text(shape)}, {text}, {triton_type(value.dtype)}, {layout})"
        if text.shape == shape and text.layout:
            return self.in_layout(text, layout)
        zero = f"tl.full({shape_text(shape)}, 0, {triton_type(value.dtype)}, {layout})"
        if value.dtype.is_float or value.dtype.kind == "bool":  # picked, not added: -0 and NaN stay what they are
            return f"tl.where({zero} == {zero}, {self.in_layout(text, layout)}, {zero})"
        return f"{self.in_layout(text, layout)} + {zero}"

    def define(self, value: Value, text: str, shape: tuple[int, ...] | None = None, stem: str = "") -> None:
        self.place(value, text, padded_shape(value.shape) if shape is None else shape, stem, "")

    def place(self, value: Value, text: str, shape: tuple[int, ...], stem: str, layout: str) -> None:
        """Names a value; a tile without a layout is written out at every use instead."""
        if shape and not layout:
            self.table[value] = Text(f"({text})", shape)
            return
        name = self.names.fresh(value.hint or stem)
        self.lines.add(f"{name} = {text}")
        self.table[value] = Text(name, shape, layout=layout)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def arange(self, op: Op) -> None:
        side = padded(op.result.shape[0])
        self.table[op.result] = Text(f"tl.arange(0, {side})", (side,))

    def program_id(self, op: Op) -> None:
        group_of(self, op, "WHICH")

    def elementwise(self, op: Op) -> None:
        if op.kind == "add" and self._add_product(op):
            return
        if op.result in self.streams.cleaned:
            self._clean(op)
            return
        form = elementwise.form(op) if op.kind != "cast" else self._cast(op)
        if op.kind in ("floordiv", "mod"):
            form = self._division(op) or form
        texts = [self.value(v) for v in op.operands]
        picked = texts[1:] if op.kind == "where" else texts
        typed = all(t.literal for t in picked) or any(f in form for f in TENSORS_ONLY)
        shape = meet(*(t.shape for t in texts))
        layouts = [t.layout for t in texts if t.layout and t.shape == shape] or [t.layout for t in texts if t.layout]
        layout = layouts[0] if layouts else ""
        atoms = []
        for value, text in zip(op.operands, texts, strict=True):
            atoms.append(self.tensor(value) if typed and text.literal else self.in_layout(text, layout))
        self.place(op.result, form.format(*atoms), shape, op.kind, layout)

    def expand(self, op: Op) -> None:
        text, at = self.value(op.operands[0]), op.attrs["position"]
        if text.shape:
            shape = (*text.shape[:at], 1, *text.shape[at:])
            mark, layout, vector = ("[None, :]", "[:, None]")[at], "", text.text
            if text.layout:
                layout = text.layout.partition(", ")[2].rstrip(")")
                vector = self.in_layout(text, f"gl.SliceLayout({at}, {layout})")
            text = Text(f"{vector}{mark}", shape, layout=layout, vector=vector if layout else "")
        self.table[op.result] = text

    def trans(self, op: Op) -> None:
        text = self.value(op.operands[0])
        if text.layout != SHARED:
            raise InternalError("a tile that is not an operand is transposed")
        self.table[op.result] = Text(f"{text}.permute((1, 0))", text.shape[::-1], layout=SHARED)

    def masked(self, value: Value, axis: int, neutral: str) -> str:
        if padded(value.shape[axis]) == value.shape[axis]:
            return self.full(value)
        raise InternalError("a side that is folded has padding")

    def reduce(self, op: Op) -> None:
        (value,), fold, axis = op.operands, op.attrs["fold"], op.attrs["axis"]
        text = self.masked(value, axis, identity(fold, value.dtype))
        layout = f"gl.SliceLayout({axis}, {self.layout(padded_shape(value.shape))})"
        shape = padded_shape(op.result.shape)
        if value.dtype.kind == "bool":
            self.place(op.result, f"tl.{fold}(({text}).to(tl.int32), {axis}) != 0", shape, fold, layout)
            return
        self.place(op.result, f"tl.{fold}({text}, {axis})", shape, fold, layout)
        if value.dtype.is_float and fold != "sum":  # of nothing but NaN it is the identity
            name = self.value(op.result)
            self.lines.add(f"{name} = tl.where({name} == {name}, {name}, {identity(fold, value.dtype)})")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> None:
        shape = padded_shape(op.result.shape)
        if op.result in self.streams.shared:
            if op in self.streams.resident:
                text = f"{op.attrs['tensor'].name}_own.index(WHICH)"
            else:
                text = f"{self.streams.ring(op).name}_blocks.index({self.slot})"
            self.table[op.result] = Text(f"{text}.reshape({shape_text(shape)})", shape, layout=SHARED)
            return
        address, mask = self._place(op, op.operands)
        guard = f", mask={mask}, other={'0.0' if op.result.dtype.is_float else '0'}" if mask else ""
        if not shape:
            self.place(op.result, f"tl.load({address}{guard})", shape, f"{op.attrs['tensor'].name}_at", "")
            return
        layout = self.layout(shape)
        self.place(op.result, f"gl.set_auto_layout(tl.load({address}{guard}), {layout})", shape, "tile", layout)

    def store(self, op: Op) -> None:
        address, mask = self._place(op, op.operands[1:])
        value = op.operands[0]
        shape = padded_shape(value.shape)
        content = self.full(value)
        if shape:
            layout = self.layout(shape)
            address = f"gl.set_auto_layout({address}, {layout})"
            mask = mask and f"gl.set_auto_layout({self._spread(mask, shape)}, {layout})"
        self.lines.add("if here:")
        self.lines.add(f"    tl.store({address}, {content}{f', mask={mask}' if mask else ''})")

    def _spread(self, mask: str, shape: tuple[int, ...]) -> str:
        whole = f"tl.arange(0, {shape[0]}) >= 0"
        return f"({mask}) & ({whole})" if len(shape) == 1 else f"({mask}) & (({whole})[:, None])"

    # ---- products ----------------------------------------------------------------------------------------------------

    def dot(self, op: Op) -> None:
        readers = self.uses.get(op.result, [])
        if len(readers) == 1 and readers[0].kind == "add" and any(o is readers[0] for o in self.here.ops):
            self.fused[op.result] = op
        else:
            self._finished(op, op.result, "")

    def _add_product(self, op: Op) -> bool:
        for one, other in (op.operands, op.operands[::-1]):
            if one in self.fused:
                if other in self.fused:
                    self._finished(self.fused.pop(other), other, "")
                self._finished(self.fused.pop(one), op.result, self.full(other, op.result.shape))
                return True
        return False

    def _finished(self, op: Op, result: Value, onto: str) -> None:
        shape = padded_shape(op.result.shape)
        name = self.names.fresh(result.hint or "product")
        self.lines.add(f"{name} = {self.started(op, onto)}")
        self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name},))")
        self.table[result] = Text(name, shape, layout=self.layout(shape))

    def _clean(self, op: Op) -> None:
        """A fetched tile with some rows replaced by zero, in memory of the program's own."""
        self.wait_for(op.operands[1])
        shape = padded_shape(op.result.shape)
        name, layout = self.streams.ring(self.streams.cleaned[op.result]).name, f"rows_{shape[1]}"
        seen = self.in_layout(self.value(op.operands[0]), layout)
        tile = f"{self.value(op.operands[1])}.load({layout})"
        self.lines.add(f"{name}_clean.index(WHICH).store(tl.where({seen}, {tile}, 0.0))")
        self.lines.add("fence_async_shared()")
        self.table[op.result] = Text(f"{name}_clean.index(WHICH)", shape, layout=SHARED)

    def started(self, op: Op, onto: str, left: str = "") -> str:
        """A product that is under way."""
        self.wait_for(op.operands[1])
        shape = padded_shape(op.result.shape)
        right = self.value(op.operands[1])
        onto_ = onto or f"tl.full({shape_text(shape)}, 0.0, tl.float32, {self.layout(shape)})"
        extra = "" if onto else ", use_acc=False"
        return f"warpgroup_mma({left or self.left(op)}, {right}, {onto_}{extra}, is_async=True)"

    def left(self, op: Op) -> str:
        """The left operand: a place in shared memory, or registers in the layout the product wants."""
        value = op.operands[0]
        text = self.value(value)
        if text.layout == SHARED:
            return text.text
        layout = f"gl.DotOperandLayout(0, {self.layout(padded_shape(op.result.shape))}, 2)"
        return f"gl.convert_layout({self.full(value)}, {layout})"

    def wait_for(self, right: Value) -> None:
        load = self.streams.fetched(right)
        assert load is not None
        ring = self.streams.ring(load).name
        if ring not in self.waited:
            self.lines.add(f"mbarrier.wait({ring}_full.index({self.slot}), {self.phase})")
            self.waited.add(ring)

    def block(self, block: Block) -> None:
        """What was waited for in a block counts there only: a branch may not be taken."""
        waited = set(self.waited)
        super().block(block)
        self.waited = waited

    # ---- loops -------------------------------------------------------------------------------------------------------

    def loop(self, op: Op) -> None:
        if not any(op is loop for loop in self.streams.loops):
            raise InternalError("a loop without products in a kernel whose tiles are fetched")
        n = next(n for n, loop in enumerate(self.streams.loops) if loop is op)
        (body,) = op.blocks
        carried, leaving = [], body.terminator.operands
        for init, param, last, result in zip(op.operands[2:], body.params[1:], leaving, op.results, strict=True):
            name = self.names.fresh(result.hint or param.hint or last.hint or "carried")
            self.lines.add(f"{name} = {self.full(init)}")
            shape = padded_shape(param.shape)
            self.table[param] = self.table[result] = Text(name, shape, layout=self.layout(shape) if shape else "")
            carried.append(name)
        step = op.attrs["step"]
        self.lines.add(f"own = tl.where(high_{n} > low_{n}, (high_{n} - low_{n} + {step - 1}) // {step}, 0)")
        self.lines.add(f"start = done + tl.where(own > 0, (low_{n} - first_{n}) // {step}, 0)")
        self.lines.add("stop = start + own")
        self._walk("done", "start")
        cleaned = any(o.results and o.results[0] in self.streams.cleaned for o in walk(body))
        turn = split(op) if not cleaned else None
        if turn is None:
            self._plain(op, n, carried)
        else:
            self._rotated(op, n, turn, carried)
        self._walk("stop", f"done + blocks_{n}")
        self.lines.add(f"done = done + blocks_{n}")

    def _walk(self, first: str, last: str) -> None:
        """Past blocks that only other programs of the group need."""
        rings = ", ".join(f"{ring.name}_full, {ring.name}_empty" for ring in self.streams.rings.values())
        self.lines.add(f"walk_past({first}, {last}, {rings})")

    def _begin(self, op: Op, n: int, turn: str) -> None:
        """The counter and the place in the rings of one turn."""
        stages, step = self.schedule.num_stages, op.attrs["step"]
        self.counter += 1
        counter = self.names.fresh(op.blocks[0].params[0].hint or "j")
        self.slot, self.phase = f"slot_{self.counter}", f"phase_{self.counter}"
        self.waited = set()
        self.lines.add(f"{counter} = low_{n} + ({turn} - start) * {step}")
        self.lines.add(f"{self.slot} = ({turn}) % {stages}")
        self.lines.add(f"{self.phase} = (({turn}) // {stages}) & 1")
        self.table[op.blocks[0].params[0]] = Text(counter)

    def _release(self, products: list[Op]) -> None:
        rings = {self.streams.ring(load).name for op in products if (load := self.streams.fetched(op.operands[1]))}
        for name in sorted(rings):
            self.lines.add(f"mbarrier.arrive({name}_empty.index({self.slot}), count=1)")

    def _plain(self, op: Op, n: int, carried: list[str]) -> None:
        self.lines.add("for turn in range(start, stop):")
        self.lines.depth += 1
        self._begin(op, n, "turn")
        self.block(op.blocks[0])
        for ring in self.streams.rings.values():
            self.lines.add(f"mbarrier.wait({ring.name}_full.index({self.slot}), {self.phase})")
            self.lines.add(f"mbarrier.arrive({ring.name}_empty.index({self.slot}), count=1)")
        self._assign(carried, op.blocks[0])
        self.lines.depth -= 1

    def _rotated(self, op: Op, n: int, turn: Turn, carried: list[str]) -> None:
        """See turns.py."""
        (body,) = op.blocks
        outer, self.here = self.here, Block()
        lefts = [self.names.fresh("weights") for _ in turn.late]
        self.lines.add("if start < stop:")
        self.lines.depth += 1
        self._begin(op, n, "start")
        self._early(turn, 0)
        self._middle(turn, body, carried, lefts)
        self.lines.add("for turn in range(start + 1, stop):")
        self.lines.depth += 1
        self._begin(op, n, "turn")
        names = self._start_early(turn)
        here = self.slot, self.phase, self.waited
        self._turn_before("turn")
        for late, left in zip(turn.late, lefts, strict=True):
            self._reload(late.product)
            self.lines.add(f"{carried[late.carried]}_sum = {self.started(late.product, carried[late.carried], left)}")
        before = self.slot
        self.slot, self.phase, self.waited = here
        self._end_early(turn, names, len(turn.late))
        self._middle(turn, body, carried, lefts, before)
        self.lines.depth -= 1
        self._turn_before("stop")
        for late, left in zip(turn.late, lefts, strict=True):
            name = carried[late.carried]
            self._reload(late.product)
            self.lines.add(f"{name}_sum = {self.started(late.product, name, left)}")
            self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name}_sum,))")
        self._release([late.product for late in turn.late])
        self.lines.depth -= 1
        self.here = outer

    def _turn_before(self, turn: str) -> None:
        stages = self.schedule.num_stages
        self.counter += 1
        self.slot, self.phase, self.waited = f"slot_{self.counter}", f"phase_{self.counter}", set()
        self.lines.add(f"{self.slot} = ({turn} - 1) % {stages}")
        self.lines.add(f"{self.phase} = (({turn} - 1) // {stages}) & 1")

    def _reload(self, product: Op) -> None:
        """The right operand of a product, at the place of the turn at hand."""
        right = product.operands[1]
        load = loaded(right)
        assert load is not None
        self.load(load)
        if right is not load.result:
            assert right.op is not None
            self.trans(right.op)

    def _early(self, turn: Turn, pending: int) -> None:
        self._end_early(turn, self._start_early(turn), pending)

    def _start_early(self, turn: Turn) -> list[str]:
        for op in turn.before:
            self.write(op)
        names = []
        for op in turn.early:
            names.append(self.names.fresh(op.result.hint or "product"))
            self.lines.add(f"{names[-1]} = {self.started(op, '')}")
        return names

    def _end_early(self, turn: Turn, names: list[str], pending: int) -> None:
        for op, name in zip(turn.early, names, strict=True):
            shape = padded_shape(op.result.shape)
            self.lines.add(f"{name} = warpgroup_mma_wait({pending}, deps=({name},))")
            self.table[op.result] = Text(name, shape, layout=self.layout(shape))
        self._release(turn.early)

    def _middle(self, turn: Turn, body: Block, carried: list[str], lefts: list[str], before: str = "") -> None:
        """Everything between the products. `before`: the place whose late products end here."""
        for op in turn.middle:
            self.write(op)
        if before:
            for late in turn.late:
                name = carried[late.carried]
                self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name}_sum,))")
            here, self.slot = self.slot, before
            self._release([late.product for late in turn.late])
            self.slot = here
        for op in turn.scaling:
            self.write(op)
        pairs = [(left, self.left(late.product)) for left, late in zip(lefts, turn.late, strict=True)]
        sums = {late.carried: late.scaled for late in turn.late}
        for n, (name, value) in enumerate(zip(carried, body.terminator.operands, strict=True)):
            pairs.append((name, self.full(sums.get(n, value))))
        pairs = [(name, text) for name, text in pairs if name != text]
        self.lines.add(f"{', '.join(n for n, _ in pairs)} = {', '.join(text for _, text in pairs)}")


def group_of(writer: Renderer, op: Op, which: str) -> None:
    """The place in the grid of one program of a group, and whether there is such a program."""
    programs = writer.schedule.programs
    *sizes, last = [writer.value(v).text for v in op.operands]
    writer.lines.add("pid = tl.program_id(0)")
    writer.lines.add(f"groups = ({last} + {programs - 1}) // {programs}")
    writer.define(op.results[-1], f"(pid % groups) * {programs} + {which}", stem="i")
    writer.lines.add(f"here = {writer.value(op.results[-1])} < {last}")
    writer.lines.add("pid = pid // groups")
    for n in range(len(sizes) - 1, -1, -1):
        writer.define(op.results[n], f"pid % {sizes[n]}" if n else "pid", stem="i")
        if n:
            writer.lines.add(f"pid = pid // {sizes[n]}")
