"""The code of a consumer: one program of the kernel, as Gluon text.

Tiles with rows have the register layout of the dots' results; vectors have a slice of it. Positions and constants have
no layout until they meet a tile, and are written out where they are used, so that they can meet several. Operands that
the producer fetched are not values but tiles in shared memory."""

from __future__ import annotations

from ....dtypes import DType, bool_
from ....errors import InternalError
from ....ir import Block, Kernel, Op, Value, starts
from ....ir.matchers import accumulation
from ..schedule import Schedule
from ..triton.descriptors import descriptor_name
from ..triton.memory import Memory
from ..triton.padding import identity, padded, padded_shape
from ..triton.renderer import TritonRenderer, all_literal
from ..triton.text import GLUON, RegisterLayout, Text, meet, shape_text
from . import masking, scaled_differences
from .pipeline import Pipeline
from .program_place import write_program_id
from .scalars import depends, past_view
from .stores import StagedStore, resident_place, staged_stores

ExchangeKey = tuple[tuple[int, ...], DType, int]  # shape and element type of a tile, and its number in an iteration

# Names that the text uses for itself. Those of a tensor's buffers and barriers are its name and one of the parts.
WORDS = {"CONSUMER", "ctas", "cta_tile", "tiles_per_cta", "tile_group", "in_grid", "blocks_done", "private_done"}
WORDS |= {"num_blocks", "start_block", "end_block", "block", "cases", "block_case", "position", "consumer", "in_range"}
WORDS |= {"slot", "phase", "outer_index", "gl", "gluon", "tma", "mbarrier"}
BOUNDS = ("low", "high", "first", "blocks", "nonempty")  # of each loop
SPREAD = RegisterLayout("spread")  # of a vector: an element to each thread
PARTS = ("desc", "resident", "ready", "ring", "full", "empty", "private", "scratch", "stored")


class InlineMemory(Memory):
    """Writes positions out where they are used: what they meet decides their layout."""

    def iota(self, side: int) -> str:
        return f"{self.tl}.arange(0, {side})"


class Consumer(TritonRenderer):
    """Writes one program. `slot` and `phase` say which place of the rings the current iteration reads."""

    dialect = GLUON

    def __init__(self, kernel: Kernel, schedule: Schedule, pipeline: Pipeline, *, wide: bool) -> None:
        super().__init__(kernel, schedule, wide=wide)
        self.memory = InlineMemory(kernel, self.names, GLUON, wide=wide, emulate=False)
        self.pipeline = pipeline
        self.staged, self.resident = staged_stores(kernel, schedule, pipeline), resident_place(pipeline, schedule)
        copied = [*(pipeline.name(op) for op in pipeline.fetched), *(staged.name for staged in self.staged.values())]
        self.names.taken |= WORDS | {f"{name}_{part}" for name in copied for part in PARTS}
        self.names.taken |= {f"{word}_{n}" for word in BOUNDS for n in range(len(pipeline.loops))}
        self.scaled_differences: set[int] = set()  # elements per thread of the functions that the text calls
        self.slot, self.phase = "", ""
        self.waited: set[str] = set()
        self.bytes: set[Value] = set()  # bool tiles that are bytes in the text
        self.exchanges: dict[ExchangeKey, str] = {}  # shared tiles in which the warps of a consumer trade operands
        self.outside_loops, self.last = True, pipeline.program_id.results[-1]
        self.exists = ""  # a condition of the loads that are written
        self.prefetched: dict[Value, str] = {}  # names of vectors that are loaded before their iteration
        self.unreleased = ""  # the tensor whose private tile was read in this iteration and is not released yet

    # ---- layouts -----------------------------------------------------------------------------------------------------

    def layout(self, shape: tuple[int, ...]) -> RegisterLayout:
        """Return the layout of values of this shape where one has to be named."""
        scores = RegisterLayout(f"mma_{self.pipeline.widths[0]}")
        if len(shape) == 1:
            return scores.slice(1)
        return RegisterLayout(f"mma_{shape[1]}") if shape[1] > 1 else scores

    def vector_layout(self, vector: Value) -> RegisterLayout:
        """Return the layout of a loaded vector. One that meets the columns of tiles would be copied to every row of
        threads: it is spread over the threads, an element each, until it meets them."""
        positions, stack = set[int](), [vector]
        while stack:
            for op in self.uses.get(stack.pop(), ()):
                positions |= {op.attrs["position"]} if op.kind == "expand" else set()
                stack += [v for v in op.results if len(v.shape) == 1]
        return SPREAD if positions == {0} else self.layout((padded(vector.shape[0]),))

    def in_layout(self, text: Text, layout: RegisterLayout | None) -> str:
        """Write a value in a layout."""
        if text.layout in (None, layout) or not text.shape:
            return text.text
        assert layout is not None
        if text.vector:
            dim = 0 if text.shape[0] == 1 else 1
            return f"gl.convert_layout({text.vector}, {layout.slice(dim)}){('[None, :]', '[:, None]')[dim]}"
        return f"gl.convert_layout({text.text}, {layout})"

    def full(self, value: Value, shape: tuple[int, ...] | None = None) -> str:
        text, shape = self.table[value], padded_shape(value.shape if shape is None else shape)
        if not shape:
            return self.tensor(value)
        layout, dtype = self.layout(shape), self.dialect.type(value.dtype)
        if not text.shape:
            return f"gl.full({shape_text(shape)}, {text}, {dtype}, {layout})"
        if text.shape == shape and text.layout:
            return self.in_layout(text, layout)
        zero = f"gl.full({shape_text(shape)}, 0, {dtype}, {layout})"
        if value.dtype.is_float or value.dtype.kind == "bool":  # selected, not added: -0 and NaN stay what they are
            return f"gl.where({zero} == {zero}, {self.in_layout(text, layout)}, {zero})"
        return f"{self.in_layout(text, layout)} + {zero}"

    def define(self, value: Value, text: str, shape: tuple[int, ...] | None = None, stem: str = "") -> None:
        self.place(value, text, padded_shape(value.shape) if shape is None else shape, stem, None)

    def place(self, value: Value, text: str, shape: tuple[int, ...], stem: str, layout: RegisterLayout | None) -> None:
        """Assign a value to a new name; a tile without a layout is written out at every use instead."""
        if shape and layout is None:
            self.table[value] = Text(f"({text})", shape)
            return
        name = self.names.fresh(value.hint or stem)
        self.lines.add(f"{name} = {text}")
        self.table[value] = Text(name, shape, layout=layout)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def arange(self, op: Op) -> None:
        side = padded(op.result.shape[0])
        self.table[op.result] = Text(f"gl.arange(0, {side})", (side,))

    def program_id(self, op: Op) -> None:
        write_program_id(self, op, "CONSUMER")

    def elementwise(self, op: Op) -> None:
        if op.kind == "add" and self._add_dot(op):
            return
        if op.result in self.pipeline.zeroed:
            self._zero_rows(op)
            return
        if masking.additive_mask(op.result) is not None and masking.only_masks(op.result, self.uses):
            return  # compared where it is used
        if masking.masks_scores(op) and self._mask_scores(op):
            return
        if self._fusable(op) if op.kind == "sub" else self._scaled_difference(op):
            return  # of a difference: computed where it is scaled
        form = self.form(op)
        texts = [self.value(v) for v in op.operands]
        typed = form.typed or all_literal(op, texts)
        shape = meet(*(t.shape for t in texts))
        layouts = [t.layout for t in texts if t.layout and t.shape == shape] or [t.layout for t in texts if t.layout]
        layout = layouts[0] if layouts else None
        atoms = []
        for value, text in zip(op.operands, texts, strict=True):
            atoms.append(self.tensor(value) if typed and text.literal else self.in_layout(text, layout))
        self.place(op.result, self.write_form(form, *atoms), shape, op.kind, layout)

    def _fusable(self, difference: Op) -> bool:
        """Return True if a difference and its product have the layout that scaled_differences.py needs: two rows to a
        thread, each with a number of its own, both in registers."""
        shape = padded_shape(difference.result.shape)
        if scaled_differences.scaling_of(difference, self.uses) is None:
            return False
        if self.pipeline.rows > 16 * self.schedule.num_warps:
            return False
        tile, rows = difference.operands
        assert rows.op is not None
        return shape[1] > 1 and all(self.value(v).layout is not None for v in (tile, rows.op.operands[0]))

    def _scaled_difference(self, product: Op) -> bool:
        parts = scaled_differences.match(product, self.uses)
        if parts is None or not self._fusable(parts.difference):
            return False
        shape = padded_shape(product.result.shape)
        layout = self.layout(shape)
        x = self.in_layout(self.value(parts.tile), layout)
        y = self.in_layout(self.value(parts.rows), layout.slice(1))
        count = shape[0] * shape[1] // (32 * self.schedule.num_warps)
        self.scaled_differences.add(count)
        text = f"{scaled_differences.function(count)}({x}, {y}, {self.tensor(parts.factor)})"
        self.place(product.result, text, shape, product.kind, layout)
        return True

    def _mask_scores(self, op: Op) -> bool:
        seen, scores, _ = op.operands
        mask = masking.additive_mask(seen)
        if not masking.only_masks(seen, self.uses) or (mask is None and seen not in self.bytes):
            return False
        shape, layout = padded_shape(op.result.shape), self.layout(padded_shape(op.result.shape))
        texts = [self.value(v) for v in (scores, seen if mask is None else mask)]
        operands = ", ".join(self.in_layout(text, layout) for text in texts)
        helper = "mask_by_bytes" if mask is None else "mask_by_numbers"
        self.helpers.add(helper)
        self.place(op.result, f"{helper}({operands})", shape, "masked", layout)
        return True

    def expand(self, op: Op) -> None:
        text, dim = self.value(op.operands[0]), op.attrs["position"]
        if text.shape:
            shape = (*text.shape[:dim], 1, *text.shape[dim:])
            mark, vector = ("[None, :]", "[:, None]")[dim], text.text
            if text.layout is None:
                text = Text(f"{vector}{mark}", shape)
            else:
                spread = text.layout == SPREAD
                layout = RegisterLayout(f"mma_{text.shape[0]}") if spread else text.layout.parent
                vector = self.in_layout(text, layout.slice(dim))
                text = Text(f"{vector}{mark}", shape, layout=layout, vector=vector)
        self.table[op.result] = text

    def trans(self, op: Op) -> None:
        text = self.value(op.operands[0])
        if not text.shared:
            raise InternalError("a tile that is not an operand is transposed")
        turned, shape = f"{text}.permute((1, 0))", text.shape[::-1]
        if op.operands[0].op in self.pipeline.private:
            self._read_private(op.result, turned, shape)
        else:
            self.table[op.result] = Text(turned, shape, shared=True)

    def masked(self, value: Value, axis: int, neutral: str) -> str:
        if padded(value.shape[axis]) == value.shape[axis]:
            return self.full(value)
        raise InternalError("a side that is reduced has padding")

    def reduce(self, op: Op) -> None:
        (value,), fold, axis = op.operands, op.attrs["fold"], op.attrs["axis"]
        text = self.masked(value, axis, identity(fold, value.dtype))
        layout = self.layout(padded_shape(value.shape)).slice(axis)
        shape = padded_shape(op.result.shape)
        if value.dtype.kind == "bool":
            helper = {"max": "bool_or", "min": "bool_and"}[fold]
            self.helpers.add(helper)
            self.place(op.result, f"gl.reduce(({text}).to(gl.int8), {axis}, {helper}) != 0", shape, fold, layout)
            return
        self.place(op.result, f"gl.{fold}({text}, {axis})", shape, fold, layout)
        self.replace_nan(op)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> None:
        shape = padded_shape(op.result.shape)
        if op.result in self.pipeline.shared:
            if op in self.pipeline.resident:
                text = f"{self.pipeline.name(op)}_resident.index({self.resident.index('CONSUMER')})"
            else:
                text = f"{self.pipeline.ring(op).name}_ring.index({self.slot})"
            self.table[op.result] = Text(f"{text}.reshape({shape_text(shape)})", shape, shared=True)
            if op in self.pipeline.resident:
                self._clear_past_view(op)
            return
        if op in self.pipeline.private:
            self._load_private(op, shape)
            return
        address, mask = self._place(op)
        if self.outside_loops and any(depends(v, self.last, self.pipeline.program_id) for v in op.operands):
            mask = f"({mask or all_elements(shape)}) & in_grid" if shape else f"({mask or 'in_grid'}) & in_grid"
        if self.exists:
            mask = f"({mask or all_elements(shape)}) & ({self.exists})"
        text = self.load_text(op, address, mask)
        if not shape:
            self.place(op.result, text, shape, f"{op.attrs['tensor'].name}_at", None)
            return
        layout = self.vector_layout(op.result) if len(shape) == 1 else self.layout(shape)
        self.place(op.result, f"gl.set_auto_layout({text}, {layout})", shape, "tile", layout)

    def gather(self, op: Op) -> None:
        """Read elements by index, each thread its own: the layout is that of the tile they make."""
        address, mask = self.memory.gather(op, self.value)
        shape = padded_shape(op.result.shape)
        layout = self.layout(shape)
        text = self.load_text(op, address, mask)
        self.place(op.result, f"gl.set_auto_layout({text}, {layout})", shape, "tile", layout)

    def _load_private(self, op: Op, shape: tuple[int, ...]) -> None:
        """Read the private tile into registers; one that is read transposed, where that is written."""
        name, index = self._take_private(), self.pipeline.private_tile_index("CONSUMER")
        tile = f"{name}_private.index({index}).reshape({shape_text(shape)})"
        if all(reader.kind == "trans" for reader in self.uses[op.result]):
            self.table[op.result] = Text(tile, shape, shared=True)
        else:
            self._read_private(op.result, tile, shape)

    def _take_private(self) -> str:
        """Wait for the private tile of this iteration, and return its name."""
        self.unreleased = self.pipeline.name(self.pipeline.private[0])
        self.lines.add(f"mbarrier.wait({self.unreleased}_full.index(CONSUMER), private_done & 1)")
        return self.unreleased

    def _read_private(self, value: Value, tile: str, shape: tuple[int, ...]) -> None:
        text = f"{tile}.load({self.layout(shape)})"
        if masking.only_masks(value, self.uses):
            self.bytes.add(value)
        elif value.dtype is bool_:
            text += " != 0"
        self.place(value, text, shape, "tile", self.layout(shape))

    def release_private(self) -> None:
        """Release the memory of the private tile, once what was read of it has been used: then nothing waits in
        registers behind the barrier, and the scratch tile in the same memory has been used, too."""
        if self.unreleased:
            self.lines.add("fence_async_shared()")  # or the next copy could overtake these reads
            self.lines.add(f"mbarrier.arrive({self.unreleased}_empty.index(CONSUMER), count=1)")
            self.unreleased = ""

    def store(self, op: Op) -> None:
        if op in self.staged:
            self._store_staged(op, self.staged[op])
            return
        address, mask = self._place(op)
        value = op.operands[0]
        shape = padded_shape(value.shape)
        content = self.full(value)
        if shape:
            layout = self.layout(shape)
            address = f"gl.set_auto_layout({address}, {layout})"
            mask = mask and f"gl.set_auto_layout({self._full_mask(mask, shape)}, {layout})"
        self.lines.add("if in_grid:")
        self.lines.add(f"    gl.store({address}, {content}{f', mask={mask}' if mask else ''})")

    def _store_staged(self, op: Op, staged: StagedStore) -> None:
        """Write a tile to shared memory, and have it copied from there, to what of it lies inside the tensor."""
        value = op.operands[0]
        self.lines.add(self.dialect.barrier)  # every warp is done with what was there
        self.lines.add(f"{staged.tile}.reshape({shape_text(padded_shape(value.shape))}).store({self.full(value)})")
        self.lines.add("fence_async_shared()")
        self.lines.add("if in_grid:")
        origin = ", ".join(self.tensor(v) for v in starts(op))
        self.lines.add(
            f"    tma.async_copy_shared_to_global({descriptor_name(staged.name)}, [{origin}], {staged.tile})"
        )

    def _full_mask(self, mask: str, shape: tuple[int, ...]) -> str:
        """Give a mask all rows of a tile."""
        return f"({mask}) & ({all_elements(shape)})"

    # ---- dots --------------------------------------------------------------------------------------------------------

    def dot(self, op: Op) -> None:
        if self.accumulates(op):
            self.fused[op.result] = op
        elif self._starts_sum(op):
            shape = padded_shape(op.result.shape)
            name = self.names.fresh(op.result.hint or "dot")
            self.lines.add(f"{name} = {self.start_dot(op, '')}")
            self.table[op.result] = Text(name, shape, layout=self.layout(shape))
        else:
            self._finish_dot(op, op.result, "")

    def _starts_sum(self, dot: Op) -> bool:
        """Return True if all that is done with a dot is to add another to it, which need not wait for it."""
        readers = self.uses.get(dot.result, [])
        if len(readers) != 1 or readers[0] not in self.here.ops:
            return False
        found = accumulation(readers[0], self.here.ops, self.uses)
        return found is not None and found.addend is dot.result

    def _add_dot(self, op: Op) -> bool:
        found = accumulation(op, self.here.ops, self.uses)
        if found is None or found.dot.result not in self.fused:
            return False
        self._finish_dot(self.fused.pop(found.dot.result), op.result, self.full(found.addend, op.result.shape))
        return True

    def _finish_dot(self, op: Op, result: Value, accumulator: str) -> None:
        """Write a dot and wait for it."""
        shape = padded_shape(op.result.shape)
        name = self.names.fresh(result.hint or "dot")
        self.lines.add(f"{name} = {self.start_dot(op, accumulator)}")
        self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name},))")
        self.table[result] = Text(name, shape, layout=self.layout(shape))

    def _zero_rows(self, op: Op) -> None:
        """Copy a fetched tile to the consumer's scratch tile with masked rows replaced by zero."""
        self.wait_for(op.operands[1])
        shape = padded_shape(op.result.shape)
        ring, layout = self.pipeline.ring(self.pipeline.zeroed[op.result]), RegisterLayout(f"blocked_{shape[1]}")
        seen = self.in_layout(self.value(op.operands[0]), layout)
        tile = f"{self.value(op.operands[1])}.load({layout})"
        scratch = f"{ring.name}_scratch.index({self.pipeline.scratch_tile_index(ring, 'CONSUMER')})"
        if self.pipeline.holds_private(ring):  # which was read from the same memory, or at least has arrived there
            if not self.unreleased:
                self._take_private()
            self.lines.add(self.dialect.barrier)
        self.lines.add(f"{scratch}.store(gl.where({seen}, {tile}, 0.0))")
        self.lines.add("fence_async_shared()")
        self.table[op.result] = Text(scratch, shape, shared=True)

    def _clear_past_view(self, load: Op) -> None:
        """Replace the rows of a copied tile that are outside its view by zero, where there are any. Consumers that
        share the tile write the same to it."""
        if (found := past_view(load)) is None:
            return
        (start, length, rows), shape = found, padded_shape(load.result.shape)
        first, end = self.tensor(start), self.tensor(length)
        layout = RegisterLayout(f"blocked_{shape[1]}")
        row = f"({first} + gl.arange(0, {rows}, layout={layout.slice(1)}))[:, None]"
        tile = self.table[load.result].text
        self.lines.add(f"if ({first} < 0) | ({first} + {rows} > {end}):")
        self.lines.add(f"    {tile}.store(gl.where(({row} >= 0) & ({row} < {end}), {tile}.load({layout}), 0.0))")
        self.lines.add("    fence_async_shared()")

    def start_dot(self, op: Op, accumulator: str, left: str = "") -> str:
        """Write a dot that runs on."""
        self.wait_for(op.operands[1])
        shape = padded_shape(op.result.shape)
        right = self.value(op.operands[1])
        start = accumulator or f"gl.full({shape_text(shape)}, 0.0, gl.float32, {self.layout(shape)})"
        extra = "" if accumulator else ", use_acc=False"
        return f"warpgroup_mma({left or self.left(op)}, {right}, {start}{extra}, is_async=True)"

    def left(self, op: Op) -> str:
        """Write the left operand: a tile in shared memory, or registers in the layout that the dot wants."""
        value = op.operands[0]
        text = self.value(value)
        if text.shared:
            return text.text
        layout = f"gl.DotOperandLayout(0, {self.layout(padded_shape(op.result.shape))}, 2)"
        return f"gl.convert_layout({self.full(value)}, {layout})"

    def exchanged_left(self, op: Op, number: int) -> str:
        """Store a computed left operand to shared memory, from where the dot reads it, if no warp has whole rows of it.
        Nothing may read the tile any more: there is one for each shape and number of an operand in its iteration."""
        value = op.operands[0]
        if self.value(value).shared or self.pipeline.rows >= 16 * self.schedule.num_warps:
            return self.left(op)
        key = padded_shape(value.shape), value.dtype, number
        if key not in self.exchanges:
            self.exchanges[key] = self.names.fresh("exchange")
        tile = f"{self.exchanges[key]}.index(CONSUMER)"
        self.lines.add(f"{tile}.store({self.full(value)})")
        self.lines.add("fence_async_shared()")
        return tile

    def wait_for(self, right: Value) -> None:
        """Wait until the producer's copy of a right operand has arrived."""
        load = self.pipeline.ring_load(right)
        assert load is not None
        ring = self.pipeline.ring(load)
        if ring.barriers not in self.waited:
            self.lines.add(f"mbarrier.wait({ring.barriers}_full.index({self.slot}), {self.phase})")
            self.waited.add(ring.barriers)
        if f"{ring.name}_ring" not in self.waited:
            self._clear_past_view(load)
            self.waited.add(f"{ring.name}_ring")

    def block(self, block: Block) -> None:
        """Write a block. Its waits do not count after it: a branch may not be taken."""
        waited = set(self.waited)
        super().block(block)
        self.waited = waited


def all_elements(shape: tuple[int, ...]) -> str:
    """Write a mask that is true for every row of a tile."""
    rows = f"gl.arange(0, {shape[0]}) >= 0"
    return rows if len(shape) == 1 else f"({rows})[:, None]"
