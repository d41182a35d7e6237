"""Kernels of the form that pipeline.py finds, as Gluon modules: Triton's language of explicit layouts and warps.

A module has functions that find blocks (block_search.py) and these. `produce` runs on one warp: it copies the resident
operands of the consumers and then block after block to shared memory, through TMA. `consume` (consumer.py,
consumer_loops.py) runs on the warps of each consumer. A ring has two barriers for each slot: `full` says that a block
has arrived, `empty` that every consumer is done with it. Every consumer passes every block that the producer fetches,
in the same order, and skips those that it does not need. In persistent kernels (persistent.py) resident operands stay
for one tile."""

from __future__ import annotations

from ....ir import Kernel, Op, uses
from ....passes.grid import Grid
from ..schedule import Schedule
from ..triton import functions
from ..triton.descriptors import Descriptors, described, descriptor_name
from ..triton.memory import FunctionArgument, Memory
from ..triton.module import ARGUMENT_ORDER, DEPENDENT_LAUNCH, TritonSource
from ..triton.padding import padded
from ..triton.text import GLUON, TRITON, Names, SourceLines, function_name
from . import persistent, scaled_differences
from .block_search import BlockSearch
from .consumer_loops import ARGUMENTS
from .pipeline import CASE_BITS, Pipeline, Ring, analyse, tile_block, tile_bytes

IMPORTS = """\
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
"""
_, TRIGGER = DEPENDENT_LAUNCH
PRODUCER_REGISTERS = 24
SEARCHING_REGISTERS = 40  # of a producer that looks for the blocks it fetches


def pipeline_of(kernel: Kernel) -> Pipeline | str:
    """Return a kernel's producer/consumer pipeline, or a sentence that says why it has none."""
    memory = Memory(kernel, Names(), TRITON, wide=False, emulate=False)
    return analyse(kernel, Descriptors(kernel, memory, uses(kernel.body), views=True))


def render_gluon(kernel: Kernel, schedule: Schedule, pipeline: Pipeline, *, wide: bool = False) -> TritonSource:
    """Write the module. Its function takes descriptors first, then what a plain module's function takes."""
    name = function_name(kernel, repr((schedule, wide, "gluon")))
    return Module(kernel, schedule, pipeline, wide=wide).source(name)


class Module(BlockSearch):
    """Writes a module."""

    def source(self, name: str) -> TritonSource:
        for op in self.pipeline.fetched:
            self.memory.pointer(op.attrs["tensor"])
        arguments = sorted(self.memory.arguments.values(), key=lambda a: ARGUMENT_ORDER.index(a.kind))
        arguments = [a for a in arguments if a.kind != "pointer" or a.index in self.pointers]
        if self.schedule.persistent:
            arguments.append(FunctionArgument(persistent.ARGUMENT, persistent.ARGUMENT, 0))
        self.arguments = [a.name for a in arguments]
        fixed = [a.name for a in arguments if a.kind in ("scalar", "dim", persistent.ARGUMENT)]
        parts = [
            *functions.sources(self.consumer.helpers, GLUON),
            *(scaled_differences.source(count) for count in sorted(self.consumer.scaled_differences)),
            self._skip_blocks(),
            self._loop_bounds(),
            self._cta_bounds(),
            *(f for n, loop in self._loops_with_cases() for f in (self._cases_of_block(n, loop), self._next_block(n))),
            self._consume(),
            self._produce(),
            self._kernel(name, fixed),
        ]
        title = f'"""{self.kernel.name}, made by monotile for Triton\'s Gluon; {self.schedule}."""'
        imports = IMPORTS
        if self.schedule.triggers_dependents:
            imports += f"from triton.language.extra.cuda import {TRIGGER}\n"
        text = "\n\n".join([f"{title}\n\n{imports}", *parts])
        spans = tuple(tuple(r) for r in self.memory.spans if r)
        tensors = tuple(
            described(op.attrs["tensor"].index, self.memory, tile_block(op), descriptor_name(self.pipeline.name(op)))
            for op in (*self.pipeline.fetched, *self.consumer.staged)
        )
        return TritonSource(name, text, tuple(arguments), spans, Grid(self.kernel, self.schedule.consumers), tensors)

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def _consume(self) -> str:
        out = SourceLines()
        for width in sorted(self.pipeline.widths):
            out.add(f"mma_{width}: gl.constexpr = {self._mma_layout(width)}")
        for width in sorted({padded(op.result.shape[1]) for op in self.pipeline.fetched}):
            if not any(f"blocked_{width}" in line for line in self.consumer.lines.lines):
                continue
            across = min(32, width // 8)
            layout = f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [{self.schedule.num_warps}, 1], [1, 0])"
            out.add(f"blocked_{width}: gl.constexpr = {layout}")
        if any("spread" in line for line in self.consumer.lines.lines):
            out.add(f"spread: gl.constexpr = gl.BlockedLayout([1], [32], [{self.schedule.num_warps}], [0])")
        out.add("blocks_done = gl.full([], 0, gl.int32)")
        out.add("private_done = gl.full([], 0, gl.int32)")
        indent = self._each_tile(out)
        out.add(f"{self._cta_bound_names()} = cta_bounds({self.tile_arguments})")
        out.add(f"{self._bound_names()} = loop_bounds(CONSUMER, {self.tile_arguments})")
        if self.schedule.persistent and self.consumer.staged:
            self._await_stores(out)
        for op in self.pipeline.resident:
            place = self.consumer.resident
            out.add(f"mbarrier.wait({self.pipeline.name(op)}_ready.index({place.index('CONSUMER')}), {place.phase})")
        out.lines += [indent + line.replace(ARGUMENTS, self.tile_arguments) for line in self.consumer.lines.lines]
        if self.consumer.staged:
            out.depth -= self.schedule.persistent
            out.add("tma.store_wait(0)")  # the tiles stay until they are copied
        first = ["CONSUMER: gl.constexpr", *self._staged_names(), *self._shared_names()]
        return self._function("consume", first, out.lines, ", ".join(self.arguments))

    def _await_stores(self, out: SourceLines) -> None:
        """Wait until the results of the tile before have left shared memory, and release what they lay in."""
        out.add("tma.store_wait(0)")
        out.add(GLUON.barrier)  # one thread alone waits for its copies
        operands = [staged.operand for staged in self.consumer.staged.values() if staged.operand]
        if operands:
            out.add("if cta_tile > 0:")
        for name in operands:
            place = self.consumer.resident.index("CONSUMER", "(cta_tile + 1)")
            out.add(f"    mbarrier.arrive({name}_empty.index({place}), count=1)")

    def _each_tile(self, out: SourceLines) -> str:
        """Open the loop over persistent tiles, if there are any, and return the indentation of its body."""
        if not self.schedule.persistent:
            return ""
        out.add(f"for cta_tile in range({persistent.ARGUMENT}):")
        out.depth += 1
        return "    "

    def _mma_layout(self, width: int) -> str:
        warps, across = self.schedule.num_warps, 1
        while warps * 16 > self.pipeline.rows:
            warps, across = warps // 2, across * 2
        shape = f"[16, {min(256, width // across)}, 16]"
        return f"gl.NVMMADistributedLayout([3, 0], [{warps}, {across}], {shape})"

    def _shared_names(self) -> list[str]:
        """Return the names of everything in shared memory, as both kinds of warps are given it."""
        names = []
        for op in self.pipeline.resident:
            parts = ("resident", "ready", "empty") if self.schedule.persistent else ("resident", "ready")
            names += [f"{self.pipeline.name(op)}_{part}" for part in parts]
        for group, rings in self.pipeline.ring_groups.items():
            names += [*(f"{ring.name}_ring" for ring in rings), f"{group}_full", f"{group}_empty"]
        for op in self.pipeline.private[:1]:
            names += [f"{self.pipeline.name(op)}_{part}" for part in ("private", "full", "empty")]
        names += [f"{ring.name}_scratch" for ring in self.pipeline.zeroed_rings]
        names += [staged.allocated for staged in self.consumer.staged.values() if staged.allocated]
        return names + list(self.consumer.exchanges.values())

    # ---- the producer ------------------------------------------------------------------------------------------------

    def _produce(self) -> str:
        out = SourceLines()
        out.add("blocks_done = gl.full([], 0, gl.int32)")
        for consumer in range(self.schedule.consumers):
            out.add(f"private_done_{consumer} = gl.full([], 0, gl.int32)")
        indent = self._each_tile(out)
        self._fetch_resident(out, indent)
        out.add(f"{self._cta_bound_names()} = cta_bounds({self.tile_arguments})")
        indent += self._each_outer_iteration(out, indent)
        out.lines += [indent + line for line in self.ring_origins[0]]
        for n, loop in enumerate(self.pipeline.loops):
            if id(loop) in self.pipeline.cases:
                self._fetch_by_case(out, n, loop)
                continue
            self._fetch_in_order(out, n, loop)
            out.add(f"blocks_done = blocks_done + blocks_{n}")
        first = [*self._descriptor_names(), *self._shared_names()]
        return self._function("produce", first, out.lines, ", ".join(self.arguments))

    def _fetch_in_order(self, out: SourceLines, n: int, loop: Op) -> None:
        """Fetch blocks in the order in which a loop's consumers read them: where iterations overlap, late dots read a
        block after the early dots of the next one. A slot of theirs is also free that much later; a producer that
        waited for it would leave the early dots' slot empty meanwhile."""
        groups, late = self.pipeline.ring_groups, self.consumer.late_rings(loop)
        if not late:
            out.add(f"for block in range(blocks_{n}):")
            self._fetch_rings(out, n, loop, "block", list(groups.values()))
            return
        out.add(f"for block in range(blocks_{n} + 1):")
        out.depth += 1
        out.add(f"if block < blocks_{n}:")
        self._fetch_rings(out, n, loop, "block", [rings for name, rings in groups.items() if name not in late])
        out.add("if block > 0:")
        self._fetch_rings(out, n, loop, "(block - 1)", [rings for name, rings in groups.items() if name in late])
        out.depth -= 1

    def _fetch_rings(self, out: SourceLines, n: int, loop: Op, block: str, groups: list[list[Ring]]) -> None:
        """Fetch one block to the rings of some groups."""
        stages = self.schedule.num_stages
        out.depth += 1
        out.add(f"position = first_{n} + {block} * {loop.attrs['step']}")
        out.add(f"slot = (blocks_done + {block}) % {stages}")
        out.add(f"phase = (((blocks_done + {block}) // {stages}) & 1) ^ 1")
        for rings in groups:
            for line in self._fetch_block(rings):
                out.add(line)
        out.depth -= 1

    def _each_outer_iteration(self, out: SourceLines, indent: str) -> str:
        """Open the loop around the loops over blocks, if there is one, and return the indentation of its body."""
        if self.pipeline.outer is None:
            return ""
        lines, texts = self.outer_bounds
        low, high = (texts[v] for v in self.pipeline.outer.operands[:2])
        out.lines += [indent + line for line in lines]
        out.add(f"for outer_index in range({low}, {high}, {self.pipeline.outer.attrs['step']}):")
        out.depth += 1
        return "    "

    def _fetch_resident(self, out: SourceLines, indent: str) -> None:
        """Fetch resident operands: once for each consumer, or for each of its tiles, when the last one is done."""
        (lines, texts), place = self.resident_origins, self.consumer.resident
        for consumer in range(self.schedule.consumers):
            out.add(f"consumer = {consumer}")
            out.lines += [indent + line for line in lines]
            for op in self.pipeline.resident:
                name = self.pipeline.name(op)
                origin = self._origin(op, texts)
                at = f"index({place.index(consumer)})"
                if self.schedule.persistent:
                    out.add(f"mbarrier.wait({name}_empty.{at}, ({place.phase}) ^ 1)")
                out.add(f"mbarrier.expect({name}_ready.{at}, {tile_bytes(op)})")
                out.add(self._copy(name, origin, f"{name}_ready.{at}", f"{name}_resident.{at}"))

    def _fetch_by_case(self, out: SourceLines, n: int, loop: Op) -> None:
        """Fetch the blocks that some consumer has a case for, and the private tiles of those that read one."""
        seek = f"block, cases = next_block_{n}({{}}, 1, {self.pipeline.outer_index}, {self.tile_arguments})"
        out.add(seek.format("gl.full([], 0, gl.int32)"))
        out.add("while cases != 0:")
        out.depth += 1
        out.add(f"position = first_{n} + block * {loop.attrs['step']}")
        out.add(f"slot = blocks_done % {self.schedule.num_stages}")
        out.add(f"phase = ((blocks_done // {self.schedule.num_stages}) & 1) ^ 1")
        for number, rings in enumerate(self.pipeline.ring_groups.values()):
            for line in self._fetch_block(rings):
                out.add(line)
            if number == 0:  # the private tile is what a consumer needs next, after the first dot
                self._fetch_private(out, loop)
        out.add("blocks_done = blocks_done + 1")
        out.add(seek.format("block + 1"))
        out.depth -= 1

    def _fetch_private(self, out: SourceLines, loop: Op) -> None:
        bodies = enumerate(self.pipeline.cases[id(loop)].bodies, 1)
        reading = [number for number, body in bodies if self.pipeline.takes_private(body)]
        if not reading:
            return
        op, (lines, texts) = self.pipeline.private[0], self.private_origins
        name = self.pipeline.name(op)
        origin = self._origin(op, texts)
        for consumer in range(self.schedule.consumers):
            out.add(f"block_case = (cases >> {consumer * CASE_BITS}) & {2**CASE_BITS - 1}")
            out.add(f"if {' or '.join(f'(block_case == {number})' for number in reading)}:")
            out.depth += 1
            out.add(f"consumer = {consumer}")
            out.lines += ["    " * (out.depth - 1) + line for line in lines]
            out.add(f"mbarrier.wait({name}_empty.index({consumer}), (private_done_{consumer} & 1) ^ 1)")
            out.add(f"mbarrier.expect({name}_full.index({consumer}), {tile_bytes(op)})")
            target = f"{name}_private.index({consumer} * {self.pipeline.scratch_bytes // tile_bytes(op)})"
            out.add(self._copy(name, origin, f"{name}_full.index({consumer})", target))
            out.add(f"private_done_{consumer} = private_done_{consumer} + 1")
            out.depth -= 1

    def _fetch_block(self, rings: list[Ring]) -> list[str]:
        """Write the copies of a block to rings that share barriers."""
        group, texts = rings[0].barriers, self.ring_origins[1]
        lines = [
            f"mbarrier.wait({group}_empty.index(slot), phase)",
            f"mbarrier.expect({group}_full.index(slot), {sum(tile_bytes(ring.load) for ring in rings)})",
        ]
        for ring in rings:
            origin = self._origin(ring.load, texts)
            lines.append(self._copy(ring.name, origin, f"{group}_full.index(slot)", f"{ring.name}_ring.index(slot)"))
        return lines

    def _copy(self, name: str, origin: str, barrier: str, target: str) -> str:
        return f"tma.async_copy_global_to_shared({descriptor_name(name)}, [{origin}], {barrier}, {target})"

    # ---- the kernel --------------------------------------------------------------------------------------------------

    def _kernel(self, name: str, fixed: list[str]) -> str:
        out, consumers = SourceLines(), self.schedule.consumers
        if self.schedule.triggers_dependents:
            out.add(f"{TRIGGER}()")
        self._allocate(out)
        out.add("fence_async_shared()")
        shared, arguments = ", ".join(self._shared_names()), ", ".join(self.arguments)
        out.add("gl.warp_specialize(")
        out.add("    [")
        for consumer in range(consumers):
            out.add(f"        (consume, ({', '.join([str(consumer), *self._staged_names()])}, {shared}, {arguments})),")
        out.add(f"        (produce, ({', '.join(self._descriptor_names())}, {shared}, {arguments})),")
        out.add("    ],")
        out.add(f"    {[*[self.schedule.num_warps] * (consumers - 1), 1]},")
        producer_registers = SEARCHING_REGISTERS if self.pipeline.cases else PRODUCER_REGISTERS
        out.add(f"    {[*[self.schedule.registers] * (consumers - 1), producer_registers]},")
        out.add(")")
        head = f"@gluon.jit(do_not_specialize={fixed!r})\ndef {name}(\n    "
        parameters = ",\n    ".join([*self._descriptor_names(), *self._staged_names(), *self.arguments])
        return f"{head}{parameters},\n):\n" + "\n".join(out.lines) + "\n"

    def _descriptor_names(self) -> list[str]:
        return [descriptor_name(self.pipeline.name(op)) for op in self.pipeline.fetched]

    def _staged_names(self) -> list[str]:
        """Return the descriptors of results, which consumers alone are given."""
        return [descriptor_name(staged.name) for staged in self.consumer.staged.values()]

    def _allocate(self, out: SourceLines) -> None:
        """Allocate shared memory: resident operands, rings, scratch and private tiles, and their barriers."""
        consumers, stages = self.schedule.consumers, self.schedule.num_stages
        for op in [*self.pipeline.resident, *(ring.load for ring in self.pipeline.rings.values())]:
            name = self.pipeline.name(op)
            resident = op in self.pipeline.resident
            count, part = (consumers * self.consumer.resident.slots, "resident") if resident else (stages, "ring")
            out.add(f"{name}_{part} = {self._shared_tiles(name, [count, *tile_block(op)])}")
            barriers = []
            if resident:
                barriers = [("ready", 1), ("empty", 1)] if self.schedule.persistent else [("ready", 1)]
            elif name in self.pipeline.ring_groups:
                barriers = [("full", 1), ("empty", consumers)]
            self._barriers(out, name, count, barriers)
        self._allocate_scratch(out)
        for op, staged in self.consumer.staged.items():
            if staged.allocated:
                out.add(f"{staged.allocated} = {self._shared_tiles(staged.name, [consumers, *tile_block(op)])}")
        for (sides, element, _), name in self.consumer.exchanges.items():
            layout = f"gl.NVMMASharedLayout({min(128, sides[1] * element.bytes)}, 16, 2)"
            tiles = f"gl.allocate_shared_memory({GLUON.type(element)}, {[consumers, *sides]}, {layout})"
            out.add(f"{name} = {tiles}")
        for op in self.pipeline.private[:1]:
            self._barriers(out, self.pipeline.name(op), consumers, [("full", 1), ("empty", 1)])

    def _allocate_scratch(self, out: SourceLines) -> None:
        """Allocate scratch and private tiles. A private tile shares memory with the scratch tile that holds it: that of
        the wider swizzle, which needs the greater alignment, is allocated, and the other reinterprets it."""
        consumers, sharing = self.schedule.consumers, list[tuple[int, str, str]]()
        for ring in self.pipeline.zeroed_rings:
            rows, width = (padded(side) for side in ring.load.result.shape)
            swizzle = min(128, width * ring.load.result.dtype.bytes)
            shape = [consumers * self.pipeline.scratch_tiles(ring), rows, width]
            memory = f"{descriptor_name(ring.name)}.dtype, {shape}, gl.NVMMASharedLayout({swizzle}, 16, 2)"
            if self.pipeline.holds_private(ring):
                sharing.append((swizzle, f"{ring.name}_scratch", memory))
            else:
                out.add(f"{ring.name}_scratch = gl.allocate_shared_memory({memory})")
        for op in self.pipeline.private[:1]:
            name, block = self.pipeline.name(op), tile_block(op)
            shape = [consumers * self.pipeline.scratch_bytes // tile_bytes(op), *block]
            descriptor, swizzle = descriptor_name(name), min(128, block[-1] * op.result.dtype.bytes)
            sharing.append((swizzle, f"{name}_private", f"{descriptor}.dtype, {shape}, {descriptor}.layout"))
        sharing.sort(key=lambda tile: -tile[0])  # stable: of one swizzle, the scratch tile
        for n, (_, name, memory) in enumerate(sharing):
            made = "gl.allocate_shared_memory" if n == 0 else f"{sharing[0][1]}._reinterpret"
            out.add(f"{name} = {made}({memory})")

    def _shared_tiles(self, name: str, shape: list[int]) -> str:
        descriptor = descriptor_name(name)
        return f"gl.allocate_shared_memory({descriptor}.dtype, {shape}, {descriptor}.layout)"

    @staticmethod
    def _barriers(out: SourceLines, name: str, count: int, barriers: list[tuple[str, int]]) -> None:
        """Allocate `count` of each barrier, with the number of arrivals it waits for."""
        for barrier, arrivals in barriers:
            made = f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())"
            out.add(f"{name}_{barrier} = {made}")
            out.add(f"for index in gl.static_range({count}):")
            out.add(f"    mbarrier.init({name}_{barrier}.index(index), count={arrivals})")
