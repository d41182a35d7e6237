"""What the computing warps of a group do: one program, as Gluon text.

Tiles with rows lie in the layout of the products' results; vectors in a slice of it. Positions and constants have no
layout until they meet a tile, and are written out where they are used, so that they can meet several. Operands that
were fetched are not values but places in shared memory."""

from __future__ import annotations

from ....dtypes import bool_
from ....errors import InternalError
from ....ir import Block, Kernel, Op, Value
from ....passes.facts import nan_matters
from ..schedule import Schedule
from ..triton import elementwise
from ..triton.padding import identity, padded, padded_shape
from ..triton.render import TENSORS_ONLY, Renderer
from ..triton.text import Text, meet, shape_text, triton_type
from . import masking as hiding
from . import scaled_differences as differences
from .pipeline import Streams

SHARED = "shared"
# Names that the text uses for itself.
WORDS = {"WHICH", "groups", "lap", "laps", "along", "here", "done", "met", "own"}
WORDS |= {"start", "stop", "turn", "taken", "arm", "at", "which", "inside", "slot", "phase"}
WORDS |= {"gl", "gluon", "tma", "mbarrier"}


class Compute(Renderer):
    """Writes one program. `slot` says which place of the rings the turn at hand reads."""

    def __init__(self, kernel: Kernel, schedule: Schedule, streams: Streams, wide: bool) -> None:
        super().__init__(kernel, schedule, wide, emulate=False)
        self.streams = streams
        self.names.taken |= WORDS
        self.slot, self.phase = "", ""
        self.waited: set[str] = set()
        self.bytes: set[Value] = set()  # bool tiles that are bytes in the text
        self.owed = ""  # whose tile in the program's own room was read in this turn; the room is not given back yet

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
        if hiding.mask_of(op.result) is not None and hiding.only_hides(op.result, self.uses):
            return  # compared where it is used
        if hiding.hides(op) and self._hide(op):
            return
        if self._fusable(op) if op.kind == "sub" else self._scaled_difference(op):
            return  # of a difference: made where it is scaled
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

    def _fusable(self, difference: Op) -> bool:
        """Whether a difference and its product lie as differences.py has it: two rows to a thread, each with a number
        of its own, both in registers."""
        shape = padded_shape(difference.result.shape)
        if differences.product_of(difference, self.uses) is None or self.streams.rows > 16 * self.schedule.num_warps:
            return False
        tile, number = difference.operands
        assert number.op is not None
        held = [self.value(v).layout not in ("", SHARED) for v in (tile, number.op.operands[0])]
        return shape[1] > 1 and all(held)

    def _scaled_difference(self, product: Op) -> bool:
        parts = differences.parts_of(product, self.uses)
        if parts is None or not self._fusable(parts.difference):
            return False
        shape = padded_shape(product.result.shape)
        layout = self.layout(shape)
        x = self.in_layout(self.value(parts.tile), layout)
        y = self.in_layout(self.value(parts.numbers), f"gl.SliceLayout(1, {layout})")
        function = differences.function(shape[0] * shape[1] // (32 * self.schedule.num_warps))
        self.place(product.result, f"{function}({x}, {y}, {self.tensor(parts.factor)})", shape, product.kind, layout)
        return True

    def _hide(self, op: Op) -> bool:
        seen, scores, _ = op.operands
        mask = hiding.mask_of(seen)
        if not hiding.only_hides(seen, self.uses) or (mask is None and seen not in self.bytes):
            return False
        shape, layout = padded_shape(op.result.shape), self.layout(padded_shape(op.result.shape))
        texts = [self.value(v) for v in (scores, seen if mask is None else mask)]
        given = ", ".join(self.in_layout(text, layout) for text in texts)
        self.place(op.result, f"hide_{'bytes' if mask is None else 'numbers'}({given})", shape, "hidden", layout)
        return True

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
            joined = {"max": "either", "min": "both"}[fold]
            self.place(op.result, f"tl.reduce(({text}).to(tl.int8), {axis}, {joined}) != 0", shape, fold, layout)
            return
        self.place(op.result, f"tl.{fold}({text}, {axis})", shape, fold, layout)
        if value.dtype.is_float and nan_matters(op, self.uses, self.loops):  # of nothing but NaN it is the identity
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
        if op in self.streams.own:
            self._own_tile(op, shape)
            return
        address, mask = self._place(op, op.operands)
        guard = f", mask={mask}, other={'0.0' if op.result.dtype.is_float else '0'}" if mask else ""
        if not shape:
            self.place(op.result, f"tl.load({address}{guard})", shape, f"{op.attrs['tensor'].name}_at", "")
            return
        layout = self.layout(shape)
        self.place(op.result, f"gl.set_auto_layout(tl.load({address}{guard}), {layout})", shape, "tile", layout)

    def _own_tile(self, op: Op, shape: tuple[int, ...]) -> None:
        """A tile that was fetched for this program alone, into registers."""
        name, room = op.attrs["tensor"].name, self.streams.own_place("WHICH")
        self.lines.add(f"mbarrier.wait({name}_full.index(WHICH), met & 1)")
        tile = f"{name}_blocks.index({room}).reshape({shape_text(shape)}).load({self.layout(shape)})"
        if hiding.only_hides(op.result, self.uses):
            self.bytes.add(op.result)
        elif op.result.dtype is bool_:
            tile += " != 0"
        self.place(op.result, tile, shape, "tile", self.layout(shape))
        self.owed = name

    def give_back_own(self) -> None:
        """The room of the tile above, once what was read of it has been used: it need not wait in registers behind a
        barrier, and where the room is cleaned into, that has happened too."""
        if self.owed:
            self.lines.add("fence_async_shared()")  # or the next tile could overtake these reads
            self.lines.add(f"mbarrier.arrive({self.owed}_empty.index(WHICH), count=1)")
            self.owed = ""

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
        room = f"{name}_clean.index({self.streams.clean_place('WHICH')})"
        if self.streams.own:  # whose tile was read from the same room
            self.lines.add("tl.debug_barrier()")
        self.lines.add(f"{room}.store(tl.where({seen}, {tile}, 0.0))")
        self.lines.add("fence_async_shared()")
        self.table[op.result] = Text(room, shape, layout=SHARED)

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


def group_of(writer: Renderer, op: Op, which: str) -> None:
    """The place in the grid of one program of a group (in a lap), and whether there is such a program."""
    programs, laps = writer.schedule.programs, writer.schedule.laps
    *sizes, last = [writer.value(v).text for v in op.operands]
    writer.lines.add("pid = tl.program_id(0)")
    each = f"({programs} * laps)" if laps else programs
    writer.lines.add(f"groups = ({last} + {each} - 1) // {each}")
    along = "(pid % groups)"
    if laps:
        along = "along"
        writer.lines.add("along = lap * groups + tl.where(lap % 2 == 0, pid % groups, groups - 1 - pid % groups)")
    writer.define(op.results[-1], f"{along} * {programs} + {which}", stem="i")
    writer.lines.add(f"here = {writer.value(op.results[-1])} < {last}")
    writer.lines.add("pid = pid // groups")
    for n in range(len(sizes) - 1, -1, -1):
        writer.define(op.results[n], f"pid % {sizes[n]}" if n else "pid", stem="i")
        if n:
            writer.lines.add(f"pid = pid // {sizes[n]}")
