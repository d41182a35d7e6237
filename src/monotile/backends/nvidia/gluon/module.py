"""Kernels of the kind that streams.py finds, as Gluon modules: Triton's language of explicit layouts and warps.

A module has functions that find blocks (finding.py) and these. `fetch` is run by one warp: it brings the programs' own
operands and then block after block to shared memory, through TMA. `compute` (compute.py, loops.py) is run by the warps
of each program. A ring of blocks has two barriers for each place: `full` says that a block has arrived, `empty` that
every program has done with it. Every program meets every block that the group fetches, in the same order, and walks
past those that are not its own. Where groups go on (laps.py), operands that stay do so for a lap."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from ....ir import Kernel, Op
from ....passes.grid import Grid
from ..schedule import Schedule
from ..triton.descriptors import Described, Descriptors
from ..triton.functions import FUNCTIONS
from ..triton.memory import Argument
from ..triton.padding import padded
from ..triton.render import ORDER, Rendered, Renderer
from ..triton.text import Lines, function_name
from . import persistent as laps
from . import scaled_differences as differences
from .block_search import Finding
from .consumer_loops import GIVEN
from .pipeline import ARM_BITS, Ring, Streams, analyse, tile_bytes

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
VERSIONS = ("3.6.", "3.7.")


@cache
def version() -> str:
    """Return Triton's version; nothing where it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def known() -> bool:
    """Tell whether this Triton's Gluon is one that the text was written for; it changes from version to version."""
    return version().startswith(VERSIONS)


def streams_of(kernel: Kernel) -> Streams | str:
    """What of a kernel can be fetched by a warp of its own, or why it cannot."""
    renderer = Renderer(kernel, Schedule(), False, False)
    return analyse(kernel, Descriptors(kernel, renderer.memory, renderer.uses))


def render(kernel: Kernel, schedule: Schedule, streams: Streams, *, wide: bool = False) -> Rendered:
    """The module, and how to call it: descriptors first, then what other kernels take."""
    name = function_name(kernel, repr((schedule, wide, "gluon")))
    writer = Module(kernel, schedule, streams, wide)
    return writer.rendered(name)


class Module(Finding):
    """Writes a module."""

    def rendered(self, name: str) -> Rendered:
        for op in self.fetched:
            self.memory.pointer(op.attrs["tensor"])
        arguments = sorted(self.memory.arguments.values(), key=lambda a: ORDER.index(a.kind))
        arguments = [a for a in arguments if a.kind != "pointer" or a.index in self.pointed]
        if self.schedule.laps:
            arguments.append(Argument(laps.ARGUMENT, laps.ARGUMENT, 0))
        self.arguments = [a.name for a in arguments]
        fixed = [a.name for a in arguments if a.kind in ("scalar", "dim", laps.ARGUMENT)]
        parts = [
            self._walk_past(),
            self._bounds(),
            self._united(),
            *(part for n, loop in self._armed() for part in (self._taken(n, loop), self._seek(n))),
            self._compute(),
            self._fetch(),
            self._kernel(name, fixed),
        ]
        text = "\n\n".join(parts)
        helpers = [source for n, source in FUNCTIONS.items() if re.search(rf"\b{n}[()]", text)]
        helpers += differences.helpers(text)
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

    def _compute(self) -> str:
        out = Lines()
        for width in sorted(self.streams.widths):
            out.add(f"products_{width}: gl.constexpr = {self._layout(width)}")
        for width in {padded(ring.load.result.shape[1]) for ring in self.streams.cleaned_rings}:
            across = min(32, width // 8)
            layout = f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [{self.schedule.num_warps}, 1], [1, 0])"
            out.add(f"rows_{width}: gl.constexpr = {layout}")
        out.add("done = tl.full([], 0, tl.int32)")
        out.add("met = tl.full([], 0, tl.int32)")
        indent = self._each_lap(out)
        out.add(f"{self._united_names()} = united({self.given})")
        out.add(f"{self._bound_names()} = bounds(WHICH, {self.given})")
        for op in self.streams.resident:
            phase = "lap & 1" if self.schedule.laps else "0"
            out.add(f"mbarrier.wait({op.attrs['tensor'].name}_ready.index(WHICH), {phase})")
        out.lines += [indent + line.replace(GIVEN, self.given) for line in self.compute.lines.lines]
        return self._function("compute", ["WHICH: gl.constexpr", *self._places()], out.lines, ", ".join(self.arguments))

    def _each_lap(self, out: Lines) -> str:
        """Opens the loop over laps, if there are any, and gives the indentation of what is inside."""
        if not self.schedule.laps:
            return ""
        out.add(f"for lap in range({laps.ARGUMENT}):")
        out.depth += 1
        return "    "

    def _layout(self, width: int) -> str:
        warps, across = self.schedule.num_warps, 1
        while warps * 16 > self.streams.rows:
            warps, across = warps // 2, across * 2
        shape = f"[16, {min(256, width // across)}, 16]"
        return f"gl.NVMMADistributedLayout([3, 0], [{warps}, {across}], {shape})"

    def _places(self) -> list[str]:
        names = []
        for op in self.streams.resident:
            parts = ("own", "ready", "empty") if self.schedule.laps else ("own", "ready")
            names += [f"{op.attrs['tensor'].name}_{part}" for part in parts]
        for ring in self.streams.rings.values():
            names += [f"{ring.name}_{part}" for part in ("blocks", "full", "empty")]
        for op in self.streams.own[:1]:
            names += [f"{op.attrs['tensor'].name}_{part}" for part in ("blocks", "full", "empty")]
        return names + [f"{ring.name}_clean" for ring in self.streams.cleaned_rings]

    def _fetch(self) -> str:
        out = Lines()
        out.add("done = tl.full([], 0, tl.int32)")
        for which in range(self.schedule.programs):
            out.add(f"met_{which} = tl.full([], 0, tl.int32)")
        indent = self._each_lap(out)
        self._fetch_resident(out, indent)
        out.lines += [indent + line for line in self.steady[0]]
        out.add(f"{self._united_names()} = united({self.given})")
        for n, loop in enumerate(self.streams.loops):
            if id(loop) in self.streams.arms:
                self._fetch_some(out, n, loop)
                continue
            out.add(f"for turn in range(blocks_{n}):")
            out.add(f"    at = first_{n} + turn * {loop.attrs['step']}")
            out.add(f"    slot = (done + turn) % {self.schedule.num_stages}")
            out.add(f"    phase = (((done + turn) // {self.schedule.num_stages}) & 1) ^ 1")
            for ring in self.streams.rings.values():
                for line in self._fetch_block(ring):
                    out.add(f"    {line}")
            out.add(f"done = done + blocks_{n}")
        first = [f"{op.attrs['tensor'].name}_tiles" for op in self.fetched] + self._places()
        return self._function("fetch", first, out.lines, ", ".join(self.arguments))

    def _fetch_resident(self, out: Lines, indent: str) -> None:
        """What stays: once for each program, or for each lap, when the lap before is done with it."""
        lines, texts = self.origins
        for which in range(self.schedule.programs):
            out.add(f"which = {which}")
            out.lines += [indent + line for line in lines]
            for op in self.streams.resident:
                name = op.attrs["tensor"].name
                places = ", ".join(texts[v] for v in op.operands)
                if self.schedule.laps:
                    out.add(f"mbarrier.wait({name}_empty.index({which}), (lap & 1) ^ 1)")
                out.add(f"mbarrier.expect({name}_ready.index({which}), {tile_bytes(op)})")
                copied = f"{name}_tiles, [{places}], {name}_ready.index({which}), {name}_own.index({which})"
                out.add(f"tma.async_copy_global_to_shared({copied})")

    def _fetch_some(self, out: Lines, n: int, loop: Op) -> None:
        """The blocks that some program takes, and the own tiles of those that read one."""
        seek = f"turn, taken = seek_{n}({{}}, 1, {self.given})"
        out.add(seek.format("tl.full([], 0, tl.int32)"))
        out.add("while taken != 0:")
        out.depth += 1
        out.add(f"at = first_{n} + turn * {loop.attrs['step']}")
        out.add(f"slot = done % {self.schedule.num_stages}")
        out.add(f"phase = ((done // {self.schedule.num_stages}) & 1) ^ 1")
        for place, ring in enumerate(self.streams.rings.values()):
            for line in self._fetch_block(ring):
                out.add(line)
            if place == 0:  # its own tile is what a program needs next, after the first product
                self._fetch_own(out, loop)
        out.add("done = done + 1")
        out.add(seek.format("turn + 1"))
        out.depth -= 1

    def _fetch_own(self, out: Lines, loop: Op) -> None:
        bodies = enumerate(self.streams.arms[id(loop)].bodies, 1)
        reading = [number for number, body in bodies if any(op in self.streams.own for op in body.blocks[0].ops)]
        if not reading:
            return
        op, (lines, texts) = self.streams.own[0], self.own_origins
        name = op.attrs["tensor"].name
        places = ", ".join("at" if self._is_counter(v) else texts[v] for v in op.operands)
        for which in range(self.schedule.programs):
            out.add(f"arm = (taken >> {which * ARM_BITS}) & {2**ARM_BITS - 1}")
            out.add(f"if {' or '.join(f'(arm == {number})' for number in reading)}:")
            out.depth += 1
            out.add(f"which = {which}")
            out.lines += ["    " * (out.depth - 1) + line for line in lines]
            out.add(f"mbarrier.wait({name}_empty.index({which}), (met_{which} & 1) ^ 1)")
            out.add(f"mbarrier.expect({name}_full.index({which}), {tile_bytes(op)})")
            room = f"{name}_blocks.index({which} * {self.streams.room // tile_bytes(op)})"
            out.add(f"tma.async_copy_global_to_shared({name}_tiles, [{places}], {name}_full.index({which}), {room})")
            out.add(f"met_{which} = met_{which} + 1")
            out.depth -= 1

    def _fetch_block(self, ring: Ring) -> list[str]:
        places = ", ".join("at" if self._is_counter(v) else self.steady[1][v] for v in ring.load.operands)
        copied = f"{ring.name}_tiles, [{places}], {ring.name}_full.index(slot), {ring.name}_blocks.index(slot)"
        return [
            f"mbarrier.wait({ring.name}_empty.index(slot), phase)",
            f"mbarrier.expect({ring.name}_full.index(slot), {tile_bytes(ring.load)})",
            f"tma.async_copy_global_to_shared({copied})",
        ]

    def _kernel(self, name: str, fixed: list[str]) -> str:
        out, programs, stages = Lines(), self.schedule.programs, self.schedule.num_stages
        for op in [*self.streams.resident, *(ring.load for ring in self.streams.rings.values())]:
            tensor = op.attrs["tensor"].name
            resident = op in self.streams.resident
            count, part = (programs, "own") if resident else (stages, "blocks")
            out.add(f"{tensor}_{part} = {self._memory(tensor, [count, *self._sides(op)])}")
            barriers = [("ready", 1)] if resident else [("full", 1), ("empty", programs)]
            if resident and self.schedule.laps:
                barriers.append(("empty", 1))
            self._barriers(out, tensor, count, barriers)
        for ring in self.streams.cleaned_rings:
            rows, width = (padded(side) for side in ring.load.result.shape)
            layout = f"gl.NVMMASharedLayout({min(128, width * ring.load.result.dtype.bytes)}, 16, 2)"
            count = programs * self.streams.room // tile_bytes(ring.load) if self.streams.own else programs
            room = f"gl.allocate_shared_memory({ring.name}_tiles.dtype, [{count}, {rows}, {width}], {layout})"
            out.add(f"{ring.name}_clean = {room}")
        for op in self.streams.own[:1]:
            tensor = op.attrs["tensor"].name
            shape = [programs * self.streams.room // tile_bytes(op), *self._sides(op)]
            room = self._memory(tensor, shape)
            for ring in self.streams.cleaned_rings:
                room = f"{ring.name}_clean._reinterpret({tensor}_tiles.dtype, {shape}, {tensor}_tiles.layout)"
            out.add(f"{tensor}_blocks = {room}")
            self._barriers(out, tensor, programs, [("full", 1), ("empty", 1)])
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
        few = SEEK_REGISTERS if self.streams.arms else FETCH_REGISTERS
        out.add(f"    {[*[self.schedule.registers] * (programs - 1), few]},")
        out.add(")")
        head = f"@gluon.jit(do_not_specialize={fixed!r})\ndef {name}(\n    "
        return head + ",\n    ".join([*tiles.split(", "), *self.arguments]) + ",\n):\n" + "\n".join(out.lines) + "\n"

    def _memory(self, tensor: str, shape: list[int]) -> str:
        return f"gl.allocate_shared_memory({tensor}_tiles.dtype, {shape}, {tensor}_tiles.layout)"

    @staticmethod
    def _barriers(out: Lines, tensor: str, count: int, barriers: list[tuple[str, int]]) -> None:
        """For each of so many places; each barrier with how many arrivals it waits for."""
        for barrier, arrivals in barriers:
            made = f"gl.allocate_shared_memory(gl.int64, [{count}, 1], mbarrier.MBarrierLayout())"
            out.add(f"{tensor}_{barrier} = {made}")
            out.add(f"for place in gl.static_range({count}):")
            out.add(f"    mbarrier.init({tensor}_{barrier}.index(place), count={arrivals})")


FETCH_REGISTERS = 24
SEEK_REGISTERS = 40  # of a warp that looks for the blocks it fetches


def translated(text: str) -> str:
    """Triton's words as Gluon's."""
    return re.sub(
        r"\btl\.", "gl.", text.replace("@triton.jit", "@gluon.jit").replace("tl.debug_barrier", "gl.thread_barrier")
    )
