"""Kernels of the kind that streams.py finds, as Gluon modules: Triton's language of explicit layouts and warps.

A module has these functions. `bounds` computes the bounds of one program's loops, `united` those of all programs of a
group together. `fetch` is run by one warp: it brings the programs' own operands and then block after block to shared
memory, through TMA. `compute` (compute.py) is run by the warps of each program. A ring of blocks has two barriers for
each place: `full` says that a block has arrived, `empty` that every program has done with it. Every program meets every
block that the group fetches, in the same order, and walks past those that are not its own.

For a loop with arms, `taken` says what each program of the group does with a block, from the scalars that its
conditions read, and `seek` finds the next block that some program needs: the others are not fetched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from ...ir import Kernel, Op, Value
from ...passes.grid import Grid
from .arms import Arms
from .compute import Compute, group_of
from .descriptors import Described, Descriptors
from .functions import FUNCTIONS
from .loops import GIVEN, Loops
from .memory import Memory
from .padding import padded
from .render import ORDER, Rendered, Renderer
from .schedule import Schedule
from .streams import ARM_BITS, Ring, Streams, analyse, scalar_slice, tile_bytes
from .text import Lines, Text, function_name

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

    def load(self, op: Op) -> None:
        """Of a turn that a program may not have: `inside` says whether it does."""
        address, mask = self._place(op, op.operands)
        guard = f"inside & {mask}" if mask else "inside"
        self.define(op.result, f"tl.load({address}, mask={guard}, other=0)", stem=op.attrs["tensor"].name)

    def wanted(self, body: list[Op], values: Sequence[Value]) -> list[str]:
        """Writes what is needed and gives the texts of the values."""
        needed = {id(op) for op in scalar_slice(tuple(values)) or ()}
        for op in body:
            if id(op) in needed:
                self.write(op)
        return [self.tensor(v) for v in values]

    def conditions(self, body: list[Op], arms: Arms) -> list[str]:
        """Those of a loop's arms, at the position `at`."""
        inside = {id(op) for op in arms.scalars}
        outer = [v for op in arms.scalars for v in op.operands if v.op is not None and id(v.op) not in inside]
        self.wanted(body, outer)
        self.table[arms.loop.blocks[0].params[0]] = Text("at")
        for op in arms.scalars:
            self.write(op)
        return [self.tensor(v) for v in arms.conditions]


class Module:
    def __init__(self, kernel: Kernel, schedule: Schedule, streams: Streams, wide: bool) -> None:
        self.kernel, self.schedule, self.streams = kernel, schedule, streams
        self.compute = Loops(kernel, schedule, streams, wide)
        self.memory = self.compute.memory = InlineMemory(kernel, self.compute.names, wide, False)
        self.compute.block(kernel.body)
        self.fetched = [*streams.resident, *(ring.load for ring in streams.rings.values()), *streams.own[:1]]
        bounds = [v for loop in streams.loops for v in loop.operands[:2]]
        self.bounds = self._scalars("which", [*bounds, streams.program.results[-1]])
        self.origins = self._scalars("which", [v for op in streams.resident for v in op.operands])
        self.own_origins = self._scalars(
            "which", [v for op in streams.own[:1] for v in op.operands if not self._is_counter(v)]
        )
        self.takes = {n: self._conditions(streams.arms[id(loop)]) for n, loop in self._armed()}
        self.pointed = {a.index for a in self.memory.arguments.values() if a.kind == "pointer"}
        steady = [v for ring in streams.rings.values() for v in ring.load.operands if not self._is_counter(v)]
        self.steady = self._scalars("0", steady)

    def _scalars(self, which: str, values: list[Value]) -> tuple[list[str], dict[Value, str]]:
        writer = Scalars(self.kernel, self.schedule, self.compute, which)
        texts = writer.wanted(self.kernel.body.ops, [self.streams.program.results[-1], *values])[1:]
        return writer.lines.lines, dict(zip(values, texts, strict=True))

    def _armed(self) -> list[tuple[int, Op]]:
        return [(n, loop) for n, loop in enumerate(self.streams.loops) if id(loop) in self.streams.arms]

    def _conditions(self, arms: Arms) -> tuple[list[str], list[str]]:
        writer = Scalars(self.kernel, self.schedule, self.compute, "which")
        writer.wanted(self.kernel.body.ops, [self.streams.program.results[-1]])
        texts = writer.conditions(self.kernel.body.ops, arms)
        return writer.lines.lines, texts

    def _is_counter(self, value: Value) -> bool:
        return any(value is loop.blocks[0].params[0] for loop in self.streams.loops)

    # ---- the module --------------------------------------------------------------------------------------------------

    def rendered(self, name: str) -> Rendered:
        for op in self.fetched:
            self.memory.pointer(op.attrs["tensor"])
        arguments = sorted(self.memory.arguments.values(), key=lambda a: ORDER.index(a.kind))
        arguments = [a for a in arguments if a.kind != "pointer" or a.index in self.pointed]
        self.arguments = [a.name for a in arguments]
        fixed = [a.name for a in arguments if a.kind in ("scalar", "dim")]
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

    def _taken(self, n: int, loop: Op) -> str:
        """What each program does with the block of a turn, or of several: the number of its arm, 0 for none."""
        given, (lines, texts), out = ", ".join(self.arguments), self.takes[n], Lines()
        out.add(f"at = first + turn * {loop.attrs['step']}")
        out.add("taken = at * 0")
        for which in range(self.schedule.programs):
            out.add(f"which = {which}")
            out.add(f"{self._bound_names()} = bounds(which, {given})")
            out.add(f"inside = (at >= low_{n}) & (at < high_{n})")
            out.lines += lines
            arm = "0"
            for number, text in reversed(list(enumerate(texts, 1))):
                arm = f"tl.where(inside & {text}, {number}, {arm})"
            out.add(f"taken = taken | ({arm} << {which * ARM_BITS})")
        out.add("return taken")
        return self._function(f"taken_{n}", ["turn", "first"], out.lines)

    def _seek(self, n: int) -> str:
        """The next turn that some program takes. Where the next one is not, 32 are looked at at once."""
        given, out = ", ".join(self.arguments), Lines()
        out.add(f"{self._united_names()} = united({given})")
        out.add(f"taken = taken_{n}(turn, first_{n}, {given})")
        out.add(f"while (taken == 0) & (turn < blocks_{n}):")
        out.add("    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])")
        out.add("    ahead = turn + 1 + gl.arange(0, 32, layout=layout)")
        out.add(f"    some = taken_{n}(ahead, first_{n}, {given}) != 0")
        out.add("    turn = tl.min(tl.where(some, ahead, turn + 33), 0)")
        out.add(f"    taken = taken_{n}(turn, first_{n}, {given})")
        out.add("return turn, taken")
        return self._function(f"seek_{n}", ["turn", "WARPS: gl.constexpr"], out.lines)

    def _united_names(self) -> str:
        return ", ".join(f"first_{n}, blocks_{n}" for n in range(len(self.streams.loops)))

    def _compute(self) -> str:
        out, given = Lines(), ", ".join(self.arguments)
        for width in sorted(self.streams.widths):
            out.add(f"products_{width}: gl.constexpr = {self._layout(width)}")
        for width in {padded(ring.load.result.shape[1]) for ring in self.streams.cleaned_rings}:
            across = min(32, width // 8)
            layout = f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [{self.schedule.num_warps}, 1], [1, 0])"
            out.add(f"rows_{width}: gl.constexpr = {layout}")
        out.add(f"{self._united_names()} = united({given})")
        out.add(f"{self._bound_names()} = bounds(WHICH, {given})")
        out.add("done = tl.full([], 0, tl.int32)")
        out.add("met = tl.full([], 0, tl.int32)")
        for op in self.streams.resident:
            out.add(f"mbarrier.wait({op.attrs['tensor'].name}_ready.index(WHICH), 0)")
        lines = [line.replace(GIVEN, given) for line in self.compute.lines.lines]
        return self._function("compute", ["WHICH: gl.constexpr", *self._places()], out.lines + lines)

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
        for op in self.streams.own[:1]:
            names += [f"{op.attrs['tensor'].name}_{part}" for part in ("blocks", "full", "empty")]
        return names + [f"{ring.name}_clean" for ring in self.streams.cleaned_rings]

    def _fetch(self) -> str:
        given, out = ", ".join(self.arguments), Lines()
        lines, texts = self.origins
        for which in range(self.schedule.programs):
            out.add(f"which = {which}")
            out.lines += lines
            for op in self.streams.resident:
                name = op.attrs["tensor"].name
                places = ", ".join(texts[v] for v in op.operands)
                out.add(f"mbarrier.expect({name}_ready.index({which}), {tile_bytes(op)})")
                copied = f"{name}_tiles, [{places}], {name}_ready.index({which}), {name}_own.index({which})"
                out.add(f"tma.async_copy_global_to_shared({copied})")
        out.lines += self.steady[0]
        out.add(f"{self._united_names()} = united({given})")
        out.add("done = tl.full([], 0, tl.int32)")
        for which in range(self.schedule.programs):
            out.add(f"met_{which} = tl.full([], 0, tl.int32)")
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
        return self._function("fetch", first, out.lines)

    def _fetch_some(self, out: Lines, n: int, loop: Op) -> None:
        """The blocks that some program takes, and the own tiles of those that read one."""
        seek = f"turn, taken = seek_{n}({{}}, 1, {', '.join(self.arguments)})"
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
            barriers = (("ready", 1),) if resident else (("full", 1), ("empty", programs))
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
            self._barriers(out, tensor, programs, (("full", 1), ("empty", 1)))
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
    def _barriers(out: Lines, tensor: str, count: int, barriers: tuple[tuple[str, int], ...]) -> None:
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
