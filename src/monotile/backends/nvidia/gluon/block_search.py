"""Where a group's blocks are: functions of scalars, which all warps of a module call.

`bounds` computes the bounds of one program's loops, `united` those of all programs of a group together. For a loop with
arms, `taken` says what each program of the group does with a block, from the scalars that its conditions read, and
`seek` finds the next block that some program needs: the others are not fetched."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir import Kernel, Op, Value
from ..schedule import Schedule
from ..triton.memory import Memory
from ..triton.render import Renderer
from ..triton.text import Lines, Text
from .block_cases import Arms
from .consumer import group_of
from .consumer_loops import Loops
from .pipeline import ARM_BITS, Streams, scalar_slice

FAR, NEAR = 2**31 - 1, -(2**31)


class InlineMemory(Memory):
    """Positions are written out where they are used: what they meet decides where they lie."""

    def iota(self, side: int, place: int = 0, rank: int = 1) -> str:
        return f"tl.arange(0, {side})"


class Scalars(Renderer):
    """Writes the arithmetic that some scalars need, for the program `which` of a group."""

    def __init__(self, kernel: Kernel, schedule: Schedule, compute: Loops, which: str) -> None:
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


class Finding:
    """The parts of a module that find things, and what they are made of."""

    arguments: list[str]  # of the module's function, but for descriptors

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

    @property
    def given(self) -> str:
        """What every function is given that is called in a lap."""
        return ", ".join(["lap", *self.arguments] if self.schedule.laps else self.arguments)

    def _function(self, name: str, first: Sequence[str], lines: Sequence[str], arguments: str = "") -> str:
        given = ", ".join([*first, arguments or self.given])
        return f"@gluon.jit\ndef {name}({given}):\n" + "\n".join(lines) + "\n"

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
        given, out, names = self.given, Lines(), []
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
        given, (lines, texts), out = self.given, self.takes[n], Lines()
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
        given, out = self.given, Lines()
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
