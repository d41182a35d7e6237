"""Which blocks a CTA needs: functions of scalars, which producer and consumers call.

`loop_bounds` computes the bounds of one consumer's loops, `cta_bounds` the union over all consumers of the CTA. For a
loop with block cases, `cases_of_block` says which case each consumer has for a block, from the scalars that the
conditions read, and `next_block` finds the next block that some consumer has a case for: the others are not fetched."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir import Kernel, Op, Value, starts, view_of
from ..schedule import Schedule
from ..triton.renderer import TritonRenderer
from ..triton.text import GLUON, SourceLines, Text
from .block_cases import BlockCases
from .consumer_loops import ConsumerLoops
from .pipeline import CASE_BITS, Pipeline
from .program_place import write_program_id
from .scalars import scalar_slice

FAR, NEAR = 2**31 - 1, -(2**31)


class ScalarWriter(TritonRenderer):
    """Writes the arithmetic that some scalars need, for one consumer of a CTA."""

    dialect = GLUON

    def __init__(self, kernel: Kernel, schedule: Schedule, consumer: ConsumerLoops, number: str) -> None:
        super().__init__(kernel, schedule)
        self.memory, self.names, self.helpers = consumer.memory, consumer.names, consumer.helpers
        self.kernel, self.number, self.guard = kernel, number, "in_grid"

    def program_id(self, op: Op) -> None:
        write_program_id(self, op, self.number)

    def load(self, op: Op) -> None:
        """Load for a program or an iteration that the consumer may not have: the guard says whether it does."""
        address, mask = self._place(op)
        guard = f"{self.guard} & {mask}" if mask else self.guard
        self.define(op.result, f"gl.load({address}, mask={guard}, other=0)", stem=op.attrs["tensor"].name)

    def write_needed(self, body: list[Op], values: Sequence[Value]) -> list[str]:
        """Write the ops that values need, and return the texts of the values."""
        needed = {id(op) for op in scalar_slice(self.kernel, tuple(values)) or ()}
        for op in body:
            if id(op) in needed:
                self.write(op)
        return [self.tensor(v) for v in values]

    def conditions(self, body: list[Op], cases: BlockCases) -> list[str]:
        """Write the conditions of a loop's cases for the block at `position`."""
        inside = {id(op) for op in cases.scalars}
        outer = [v for op in cases.scalars for v in op.operands if v.op is not None and id(v.op) not in inside]
        self.write_needed(body, outer)
        self.table[cases.loop.blocks[0].params[0]], self.guard = Text("position"), "in_range"
        for op in cases.scalars:
            self.write(op)
        return [self.tensor(v) for v in cases.conditions]


class BlockSearch:
    """Writes the functions that find blocks."""

    arguments: list[str]  # of the module's function, but for descriptors

    def __init__(self, kernel: Kernel, schedule: Schedule, pipeline: Pipeline, *, wide: bool) -> None:
        self.kernel, self.schedule, self.pipeline = kernel, schedule, pipeline
        self.consumer = ConsumerLoops(kernel, schedule, pipeline, wide=wide)
        self.memory = self.consumer.memory
        self.consumer.block(kernel.body)
        bounds = [v for loop in pipeline.loops for v in loop.operands[:2]]
        self.bounds = self._scalars("consumer", [*bounds, pipeline.program_id.results[-1]])
        self.resident_origins = self._scalars("consumer", [v for op in pipeline.resident for v in op.operands])
        self.private_origins = self._scalars(
            "consumer", [v for op in pipeline.private[:1] for v in op.operands if not self._is_counter(v)]
        )
        self.conditions = {n: self._conditions(pipeline.cases[id(loop)]) for n, loop in self._loops_with_cases()}
        self.pointers = {a.index for a in self.memory.arguments.values() if a.kind == "pointer"}
        origins = [v for ring in pipeline.rings.values() for v in ring.load.operands if not self._is_counter(v)]
        self.ring_origins = self._scalars("0", origins)  # the same for all consumers
        self.outer_bounds = self._scalars("0", list(pipeline.outer.operands[:2] if pipeline.outer else ()))

    def _scalars(self, consumer: str, values: list[Value]) -> tuple[list[str], dict[Value, str]]:
        writer, ops = self._writer(consumer)
        texts = writer.write_needed(ops, [self.pipeline.program_id.results[-1], *values])[1:]
        return writer.lines.lines, dict(zip(values, texts, strict=True))

    def _writer(self, consumer: str) -> tuple[ScalarWriter, list[Op]]:
        """Return a writer of one consumer's scalars, and the ops around the loops over blocks."""
        writer, ops = ScalarWriter(self.kernel, self.schedule, self.consumer, consumer), self.kernel.body.ops
        if self.pipeline.outer is not None:
            (body,) = self.pipeline.outer.blocks
            writer.table[body.params[0]], ops = Text("outer_index"), [*ops, *body.ops]
        return writer, ops

    def _loops_with_cases(self) -> list[tuple[int, Op]]:
        return [(n, loop) for n, loop in enumerate(self.pipeline.loops) if id(loop) in self.pipeline.cases]

    def _conditions(self, cases: BlockCases) -> tuple[list[str], list[str]]:
        writer, ops = self._writer("consumer")
        writer.write_needed(ops, [self.pipeline.program_id.results[-1]])
        return writer.lines.lines, writer.conditions(ops, cases)

    def _origin(self, load: Op, texts: dict[Value, str]) -> str:
        """Write where a copy begins: in the tensor, also where positions count in a view of it."""
        found = []
        for axis, start in enumerate(starts(load)):
            text, span = "position" if self._is_counter(start) else texts[start], view_of(load, axis)
            found.append(text if span is None else f"{text} + {texts[span[0]]}")
        return ", ".join(found)

    def _is_counter(self, value: Value) -> bool:
        return any(value is loop.blocks[0].params[0] for loop in self.pipeline.loops)

    @property
    def tile_arguments(self) -> str:
        """The arguments of functions that are called for each tile of a CTA."""
        return ", ".join(["cta_tile", *self.arguments] if self.schedule.persistent else self.arguments)

    def _function(self, name: str, first: Sequence[str], lines: Sequence[str], arguments: str = "") -> str:
        parameters = ", ".join([*first, arguments or self.tile_arguments])
        return f"@gluon.jit\ndef {name}({parameters}):\n" + "\n".join(lines) + "\n"

    def _skip_blocks(self) -> str:
        """Write `skip_blocks`: wait for blocks that other consumers need, so that nobody is a round of the ring ahead,
        and release them."""
        stages, names, lines = self.schedule.num_stages, self._ring_barriers(), []
        for full, empty in zip(names[::2], names[1::2], strict=True):
            lines += [f"        mbarrier.wait({full}.index(block % {stages}), (block // {stages}) & 1)"]
            lines += [f"        mbarrier.arrive({empty}.index(block % {stages}), count=1)"]
        parameters = ", ".join(["first", "last", *names])
        head = f"@gluon.jit\ndef skip_blocks({parameters}):\n    for block in range(first, last):\n"
        return head + "\n".join(lines) + "\n"

    def _ring_barriers(self) -> list[str]:
        return [f"{name}_{part}" for name in self.pipeline.ring_groups for part in ("full", "empty")]

    def _loop_bounds(self) -> str:
        """Write `loop_bounds`. A consumer outside the grid, or a loop without iterations, gets bounds that a union
        ignores."""
        lines, texts = self.bounds
        out, names = list(lines), []
        for n, loop in enumerate(self.pipeline.loops):
            low, high = (texts[v] for v in loop.operands[:2])
            out += [f"    low_{n} = {low}", f"    high_{n} = {high}"]
            out += [f"    nonempty_{n} = in_grid & (low_{n} < high_{n})"]
            names += [f"gl.where(nonempty_{n}, low_{n}, {FAR})", f"gl.where(nonempty_{n}, high_{n}, {NEAR})"]
        return self._function("loop_bounds", ["consumer"], [*out, f"    return {', '.join(names)}"])

    def _bound_names(self, suffix: str = "") -> str:
        return ", ".join(f"low_{n}{suffix}, high_{n}{suffix}" for n in range(len(self.pipeline.loops)))

    def _cta_bounds(self) -> str:
        """Write `cta_bounds`: of each loop the first position, and the number of blocks."""
        out, names = SourceLines(), []
        for consumer in range(self.schedule.consumers):
            out.add(f"{self._bound_names(f'_of_{consumer}')} = loop_bounds({consumer}, {self.tile_arguments})")
        for n, loop in enumerate(self.pipeline.loops):
            step = loop.attrs["step"]
            for bound, function in (("low", "gl.minimum"), ("high", "gl.maximum")):
                text = f"{bound}_{n}_of_0"
                for consumer in range(1, self.schedule.consumers):
                    text = f"{function}({text}, {bound}_{n}_of_{consumer})"
                out.add(f"{bound}_{n} = {text}")
            out.add(f"blocks_{n} = gl.where(high_{n} > low_{n}, (high_{n} - low_{n} + {step - 1}) // {step}, 0)")
            names += [f"low_{n}", f"blocks_{n}"]
        out.add(f"return {', '.join(names)}")
        return self._function("cta_bounds", [], out.lines)

    def _cases_of_block(self, n: int, loop: Op) -> str:
        """Write `cases_of_block`: the case that each consumer has for a block, or for a vector of them; 0 for none."""
        (lines, texts), out = self.conditions[n], SourceLines()
        out.add(f"position = first + block * {loop.attrs['step']}")
        out.add("cases = position * 0")
        for consumer in range(self.schedule.consumers):
            out.add(f"consumer = {consumer}")
            out.add(f"{self._bound_names()} = loop_bounds(consumer, {self.tile_arguments})")
            out.add(f"in_range = (position >= low_{n}) & (position < high_{n})")
            out.lines += lines
            case = "0"
            for number, text in reversed(list(enumerate(texts, 1))):
                case = f"gl.where(in_range & {text}, {number}, {case})"
            out.add(f"cases = cases | ({case} << {consumer * CASE_BITS})")
        out.add("return cases")
        return self._function(f"cases_of_block_{n}", ["block", "first", "outer_index"], out.lines)

    def _next_block(self, n: int) -> str:
        """Write `next_block`: the next block that some consumer has a case for, and the cases. If the next one has
        none, it looks at 32 at once, of which the least distance with its cases is the nearest; if none has, it goes on
        behind the last of them."""
        arguments, out, bits = self.tile_arguments, SourceLines(), CASE_BITS * self.schedule.consumers
        out.add(f"{self._cta_bound_names()} = cta_bounds({arguments})")
        out.add(f"cases = cases_of_block_{n}(block, first_{n}, outer_index, {arguments})")
        out.add(f"while (cases == 0) & (block < blocks_{n}):")
        out.add("    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])")
        out.add("    distance = gl.arange(0, 32, layout=layout)")
        out.add(f"    found = cases_of_block_{n}(block + 1 + distance, first_{n}, outer_index, {arguments})")
        out.add(f"    nearest = gl.min(gl.where(found != 0, (distance << {bits}) | found, {32 << bits}), 0)")
        out.add(f"    block = block + gl.minimum(1 + (nearest >> {bits}), 32)")
        out.add(f"    cases = nearest & {2**bits - 1}")
        out.add("return block, cases")
        return self._function(f"next_block_{n}", ["block", "WARPS: gl.constexpr", "outer_index"], out.lines)

    def _cta_bound_names(self) -> str:
        return ", ".join(f"first_{n}, blocks_{n}" for n in range(len(self.pipeline.loops)))
