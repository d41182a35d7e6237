"""Kernels of the kind that streams.py finds, as Gluon modules: Triton's language of explicit layouts and warps.

A module has four functions. `bounds` computes the bounds of one program's loops, `united` those of all programs of a
group together. `fetch` is run by one warp: it brings the programs' own operands and then block after block to shared
memory, through TMA. `compute` (compute.py) is run by the warps of each program. A ring of blocks has two barriers for
each place: `full` says that a block has arrived, `empty` that every program has done with it. Every program meets every
block that the group fetches, in the same order, and walks past those that are not its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from ...ir import Kernel, Op, Value
from ...passes.grid import Grid
from .compute import Compute, group_of
from .descriptors import Described, Descriptors
from .functions import FUNCTIONS
from .memory import Memory
from .padding import padded
from .render import ORDER, Rendered, Renderer
from .schedule import Schedule
from .streams import Ring, Streams, analyse, key, scalar_slice
from .text import Lines, function_name

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
FAR, NEAR = 2**31 - 1, -(2**31)
VERSIONS = ("3.6.", "3.7.")


@cache
def known() -> bool:
    """Whether this Triton's Gluon is one that the text was written for; it changes from version to version."""
    return metadata.version("triton").startswith(VERSIONS)


def streams_of(kernel: Kernel) -> Streams | str:
    """What of a kernel can be fetched by a warp of its own, or why it cannot."""
    renderer = Renderer(kernel, Schedule(), False, False)
    return analyse(kernel, Descriptors(kernel, renderer.memory, renderer.uses))


def render(kernel: Kernel, schedule: Schedule, streams: Streams, *, wide: bool = False) -> Rendered:
    """The module, and how to call it: descriptors first, then what other kernels take."""
    name = function_name(kernel, repr((schedule, wide, "gluon")))
    writer = Module(kernel, schedule, streams, wide)
    return writer.rendered(name)


class InlineMemory(Memory):
    """Positions are written out where they are used: what they meet decides where they lie."""

    def iota(self, side: int, place: int = 0, rank: int = 1) -> str:
        return f"tl.arange(0, {side})"


class Scalars(Renderer):
    """Writes the arithmetic that some scalars need, for the program `which` of a group."""

    def __init__(self, kernel: Kernel, schedule: Schedule, compute: Compute, which: str) -> None:
        super().__init__(kernel, schedule, False, emulate=False)
        self.memory, self.names, self.which = compute.memory, compute.names, which

    def program_id(self, op: Op) -> None:
        group_of(self, op, self.which)

    def wanted(self, body: list[Op], values: Sequence[Value]) -> list[str]:
        """Writes what is needed and gives the texts of the values."""
        needed = {id(op) for op in scalar_slice(tuple(values)) or ()}
        for op in body:
            if id(op) in needed:
                self.write(op)
        return [self.tensor(v) for v in values]


class Module:
    def __init__(self, kernel: Kernel, schedule: Schedule, streams: Streams, wide: bool) -> None:
        self.kernel, self.schedule, self.streams = kernel, schedule, streams
        self.compute = Compute(kernel, schedule, streams, wide)
        self.memory = self.compute.memory = InlineMemory(kernel, self.compute.names, wide, False)
        self.compute.block(kernel.body)
        self.fetched = [*streams.resident, *(ring.load for ring in streams.rings.values())]
        bounds = [v for loop in streams.loops for v in loop.operands[:2]]
        self.bounds = self._scalars("which", [*bounds, streams.program.results[-1]])
        self.origins = self._scalars("which", [v for op in streams.resident for v in op.operands])
        steady = [v for ring in streams.rings.values() for v in ring.load.operands if not self._is_counter(v)]
        self.steady = self._scalars("0", steady)

    def _scalars(self, which: str, values: list[Value]) -> tuple[list[str], dict[Value, str]]:
        writer = Scalars(self.kernel, self.schedule, self.compute, which)
        texts = writer.wanted(self.kernel.body.ops, [self.streams.program.results[-1], *values])[1:]
        return writer.lines.lines, dict(zip(values, texts, strict=True))

    def _is_counter(self, value: Value) -> bool:
        return any(value is loop.blocks[0].params[0] for loop in self.streams.loops)

    # ---- the module --------------------------------------------------------------------------------------------------

    def rendered(self, name: str) -> Rendered:
        for op in self.fetched:
            self.memory.pointer(op.attrs["tensor"])
        arguments = sorted(self.memory.arguments.values(), key=lambda a: ORDER.index(a.kind))
        own = {op.attrs["tensor"].index for op in self.fetched}
        arguments = [a for a in arguments if a.kind != "pointer" or a.index not in own]
        self.arguments = [a.name for a in arguments]
        fixed = [a.name for a in arguments if a.kind in ("scalar", "dim")]
        parts = [
            self._walk_past(),
            self._bounds(),
            self._united(),
            self._compute(),
            self._fetch(),
            self._kernel(name, fixed),
        ]
        text = "\n\n".join(parts)
        helpers = [source for n, source in FUNCTIONS.items() if f"{n}(" in text]
        title = f'"""{self.kernel.name}, made by monotile for Triton\'s Gluon; {self.schedule}."""'
        body = translated("\n\n".join([*helpers, text]))
        reach = tuple(tuple(r) for r in self.memory.reach if r)
        described = tuple(self._described(op) for op in self.fetched)
        grid = Grid(self.kernel, self.schedule.programs)
        return Rendered(name, f"{title}\n\n{IMPORTS}\n\n{body}", tuple(arguments), reach, grid, described)

    def _described(self, op: Op) -> Described:
        tensor = op.attrs["tensor"]
        first = self.memory.word_at[tensor.index] + 1
        dims = tuple(first + axis for axis in range(tensor.rank))
        strides = tuple(first + tensor.rank + axis for axis in range(tensor.rank - 1))
        return Described(tensor.index, tensor.dtype.bytes, dims, strides, self._sides(op))

    def _sides(self, op: Op) -> tuple[int, ...]:
        return tuple(padded(extent or 1) for extent in op.attrs["extents"])

    def _function(self, name: str, first: Sequence[str], lines: Sequence[str]) -> str:
        arguments = ", ".join([*first, *self.arguments])
        return f"@gluon.jit\ndef {name}({arguments}):\n" + "\n".join(lines) + "\n"

    def _walk_past(self) -> str:
        """Blocks that others of the group need: waited for, so that nobody is a round ahead, and given back."""
        stages, names, lines = self.schedule.num_stages, self._ring_barriers(), []
        for full, empty in zip(names[::2], names[1::2], strict=True):
            lines += [f"        mbarrier.wait({full}.index(turn % {stages}), (turn // {stages}) & 1)"]
            lines += [f"        mbarrier.arrive({empty}.index(turn % {stages}), count=1)"]
        head = f"@gluon.jit\ndef walk_past(first, last, {', '.join(names)}):\n    for turn in range(first, last):\n"
        return head + "\n".join(lines) + "\n"

    def _ring_barriers(self) -> list[str]:
        return [f"{ring.name}_{part}" for ring in self.streams.rings.values() for part in ("full", "empty")]

    def _bounds(self) -> str:
        """An absent program, or a loop without turns, has bounds that a union does not notice."""
        lines, texts = self.bounds
        out, names = list(lines), []
        for n, loop in enumerate(self.streams.loops):
            low, high = (texts[v] for v in loop.operands[:2])
            out += [f"    low_{n} = {low}", f"    high_{n} = {high}", f"    some_{n} = here & (low_{n} < high_{n})"]
            names += [f"tl.where(some_{n}, low_{n}, {FAR})", f"tl.where(some_{n}, high_{n}, {NEAR})"]
        return self._function("bounds", ["which"], [*out, f"    return {', '.join(names)}"])

    def _bound_names(self) -> str:
        return ", ".join(f"low_{n}, high_{n}" for n in range(len(self.streams.loops)))

    def _united(self) -> str:
        given, out, names = ", ".join(self.arguments), Lines(), []
        for which in range(self.schedule.programs):
            own = self._bound_names().replace(",", f"_of_{which},") + f"_of_{which}"
            out.add(f"{own} = bounds({which}, {given})")
        for n, loop in enumerate(self.streams.loops):
            step = loop.attrs["step"]
            for bound, function in (("low", "tl.minimum"), ("high", "tl.maximum")):
                text = f"{bound}_{n}_of_0"
                for which in range(1, self.schedule.programs):
                    text = f"{function}({text}, {bound}_{n}_of_{which})"
                out.add(f"{bound}_{n} = {text}")
            out.add(f"blocks_{n} = tl.where(high_{n} > low_{n}, (high_{n} - low_{n} + {step - 1}) // {step}, 0)")
            names += [f"low_{n}", f"blocks_{n}"]
        out.add(f"return {', '.join(names)}")
        return self._function("united", [], out.lines)

    def _united_names(self) -> str:
        return ", ".join(f"first_{n}, blocks_{n}" for n in range(len(self.streams.loops)))

    def _compute(self) -> str:
        out, given = Lines(), ", ".join(self.arguments)
        for width in sorted(self.streams.widths):
            out.add(f"products_{width}: gl.constexpr = {self._layout(width)}")
        for width in {padded(ring.load.result.shape[1]) for ring in self._to_clean()}:
            across = min(32, width // 8)
            layout = f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [{self.schedule.num_warps}, 1], [1, 0])"
            out.add(f"rows_{width}: gl.constexpr = {layout}")
        out.add(f"{self._united_names()} = united({given})")
        out.add(f"{self._bound_names()} = bounds(WHICH, {given})")
        out.add("done = 0")
        for op in self.streams.resident:
            out.add(f"mbarrier.wait({op.attrs['tensor'].name}_ready.index(WHICH), 0)")
        return self._function("compute", ["WHICH: gl.constexpr", *self._places()], out.lines + self.compute.lines.lines)

    def _layout(self, width: int) -> str:
        warps, across = self.schedule.num_warps, 1
        while warps * 16 > self.streams.rows:
            warps, across = warps // 2, across * 2
        shape = f"[16, {min(256, width // across)}, 16]"
        return f"gl.NVMMADistributedLayout([3, 0], [{warps}, {across}], {shape})"

    def _places(self) -> list[str]:
        names = []
        for op in self.streams.resident:
            names += [f"{op.attrs['tensor'].name}_{part}" for part in ("own", "ready")]
        for ring in self.streams.rings.values():
            names += [f"{ring.name}_{part}" for part in ("blocks", "full", "empty")]
        return names + [f"{ring.name}_clean" for ring in self._to_clean()]

    def _to_clean(self) -> list[Ring]:
        keys = {key(load) for load in self.streams.cleaned.values()}
        return [ring for place, ring in self.streams.rings.items() if place in keys]

    def _fetch(self) -> str:
        given, out = ", ".join(self.arguments), Lines()
        lines, texts = self.origins
        for which in range(self.schedule.programs):
            out.add(f"which = {which}")
            out.lines += lines
            for op in self.streams.resident:
                name = op.attrs["tensor"].name
                places = ", ".join(texts[v] for v in op.operands)
                out.add(f"mbarrier.expect({name}_ready.index({which}), {self._bytes(op)})")
                copied = f"{name}_tiles, [{places}], {name}_ready.index({which}), {name}_own.index({which})"
                out.add(f"tma.async_copy_global_to_shared({copied})")
        out.lines += self.steady[0]
        out.add(f"{self._united_names()} = united({given})")
        out.add("done = 0")
        for n, loop in enumerate(self.streams.loops):
            out.add(f"for turn in range(blocks_{n}):")
            out.add(f"    at = first_{n} + turn * {loop.attrs['step']}")
            out.add(f"    slot = (done + turn) % {self.schedule.num_stages}")
            out.add(f"    phase = (((done + turn) // {self.schedule.num_stages}) & 1) ^ 1")
            for ring in self.streams.rings.values():
                for line in self._fetch_block(ring):
                    out.add(f"    {line}")
            out.add(f"done = done + blocks_{n}")
        first = [f"{op.attrs['tensor'].name}_tiles" for op in self.fetched] + self._places()
        return self._function("fetch", first, out.lines)

    def _fetch_block(self, ring: Ring) -> list[str]:
        places = ", ".join("at" if self._is_counter(v) else self.steady[1][v] for v in ring.load.operands)
        copied = f"{ring.name}_tiles, [{places}], {ring.name}_full.index(slot), {ring.name}_blocks.index(slot)"
        return [
            f"mbarrier.wait({ring.name}_empty.index(slot), phase)",
            f"mbarrier.expect({ring.name}_full.index(slot), {self._bytes(ring.load)})",
            f"tma.async_copy_global_to_shared({copied})",
        ]

    def _bytes(self, op: Op) -> int:
        total = op.result.dtype.bytes
        for side in self._sides(op):
            total *= side
        return total

    def _kernel(self, name: str, fixed: list[str]) -> str:
        out, programs, stages = Lines(), self.schedule.programs, self.schedule.num_stages
        for op in self.fetched:
            tensor = op.attrs["tensor"].name
            resident = op in self.streams.resident
            count, part = (programs, "own") if resident else (stages, "blocks")
            shape = [count, *self._sides(op)]
            buffer = f"gl.allocate_shared_memory({tensor}_tiles.dtype, {shape}, {tensor}_tiles.layout)"
            out.add(f"{tensor}_{part} = {buffer}")
            barriers = (("ready", 1),) if resident else (("full", 1), ("empty", programs))
            for barrier, arrivals in barriers:
                made = f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())"
                out.add(f"{tensor}_{barrier} = {made}")
                out.add(f"for place in gl.static_range({count}):")
                out.add(f"    mbarrier.init({tensor}_{barrier}.index(place), count={arrivals})")
        for ring in self._to_clean():
            rows, width = (padded(side) for side in ring.load.result.shape)
            layout = f"gl.NVMMASharedLayout({min(128, width * ring.load.result.dtype.bytes)}, 16, 2)"
            room = f"gl.allocate_shared_memory({ring.name}_tiles.dtype, [{programs}, {rows}, {width}], {layout})"
            out.add(f"{ring.name}_clean = {room}")
        out.add("fence_async_shared()")
        shared, given = ", ".join(self._places()), ", ".join(self.arguments)
        tiles = ", ".join(f"{op.attrs['tensor'].name}_tiles" for op in self.fetched)
        out.add("gl.warp_specialize(")
        out.add("    [")
        for which in range(programs):
            out.add(f"        (compute, ({which}, {shared}, {given})),")
        out.add(f"        (fetch, ({tiles}, {shared}, {given})),")
        out.add("    ],")
        workers = [self.schedule.num_warps] * (programs - 1)
        out.add(f"    {[*workers, 1]},")
        out.add(f"    {[*[self.schedule.registers] * (programs - 1), FETCH_REGISTERS]},")
        out.add(")")
        head = f"@gluon.jit(do_not_specialize={fixed!r})\ndef {name}(\n    "
        return head + ",\n    ".join([*tiles.split(", "), *self.arguments]) + ",\n):\n" + "\n".join(out.lines) + "\n"


FETCH_REGISTERS = 24


def translated(text: str) -> str:
    """Triton's words as Gluon's."""
    return re.sub(
        r"\btl\.", "gl.", text.replace("@triton.jit", "@gluon.jit").replace("tl.debug_barrier", "gl.thread_barrier")
    )
