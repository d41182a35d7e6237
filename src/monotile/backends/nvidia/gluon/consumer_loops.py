"""The loops of a computing program: how it walks over the blocks that are fetched for its group.

A plain loop meets its blocks one after the other and walks past those that only others need. A loop with arms (arms.py)
asks `seek` for the next block that some program of the group needs, and what each does with it. Either way turns can be
cut into parts (turns.py), so that one turn's products run beside another's arithmetic; with arms, a run of turns
through the same arm."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import InternalError
from ....ir import Block, Op, walk
from ..triton.padding import padded_shape
from ..triton.text import Text
from .block_cases import Arms
from .consumer import Compute
from .overlap import Turn, split
from .pipeline import ARM_BITS, loaded

GIVEN = "<given>"  # stands for the module's arguments, which are known when everything is written


@dataclass(frozen=True)
class Walk:
    """The words of a run of turns: where each is, and how the next one is found."""

    enter: str  # a line that asks whether there is a first turn
    first: tuple[str, str]  # the position of the first turn, and its number among the fetched blocks
    again: str  # the head of the loop over the others
    other: tuple[str, str]  # position and number of another turn
    before: tuple[str, str]  # the number of the turn before: inside the loop, and behind it
    ahead: str = ""  # looks for the next turn, while products run
    end: str = ""  # of a turn


class Loops(Compute):
    counter = 0

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
        arms = self.streams.arms.get(id(op))
        if arms is not None:
            self._chosen(arms, n, carried)
        else:
            self._walked(op, n, carried)
        if self.schedule.laps and n == len(self.streams.loops) - 1:  # what stayed for the lap is not read again
            for load in self.streams.resident:
                self.lines.add(f"mbarrier.arrive({load.attrs['tensor'].name}_empty.index(WHICH), count=1)")

    def _walked(self, op: Op, n: int, carried: list[str]) -> None:
        step = op.attrs["step"]
        self.lines.add(f"own = tl.where(high_{n} > low_{n}, (high_{n} - low_{n} + {step - 1}) // {step}, 0)")
        self.lines.add(f"start = done + tl.where(own > 0, (low_{n} - first_{n}) // {step}, 0)")
        self.lines.add("stop = start + own")
        self._walk_past("done", "start")
        place = f"low_{n} + (turn - start) * {step}", "turn"
        again = "for turn in range(start + 1, stop):"
        walk = Walk("if start < stop:", (f"low_{n}", "start"), again, place, ("turn - 1", "stop - 1"))
        turn = self._parts(op)
        if turn is None:
            self.lines.add("for turn in range(start, stop):")
            self.lines.depth += 1
            self._plain(op, place, carried)
            self.lines.depth -= 1
        else:
            self._rotated(op, turn, carried, walk)
        self._walk_past("stop", f"done + blocks_{n}")
        self.lines.add(f"done = done + blocks_{n}")

    def _parts(self, op: Op) -> Turn | None:
        """The parts of a turn. A tile that is cleaned has one place, so that such turns follow each other."""
        cleans = any(o.results and o.results[0] in self.streams.cleaned for o in walk(op.blocks[0]))
        return split(op) if not cleans else None

    def _walk_past(self, first: str, last: str) -> None:
        """Past blocks that only other programs of the group need."""
        rings = ", ".join(f"{ring.name}_full, {ring.name}_empty" for ring in self.streams.rings.values())
        self.lines.add(f"walk_past({first}, {last}, {rings})")

    # ---- arms --------------------------------------------------------------------------------------------------------

    def _chosen(self, arms: Arms, n: int, carried: list[str]) -> None:
        seek = f"turn, taken = seek_{n}({{}}, {self.schedule.num_warps}, {GIVEN})"
        place = f"first_{n} + turn * {arms.loop.attrs['step']}", "done"
        mine = f"(taken >> ({ARM_BITS} * WHICH)) & {2**ARM_BITS - 1}"
        self.lines.add(seek.format("tl.full([], 0, tl.int32)"))
        self.lines.add("while taken != 0:")
        self.lines.depth += 1
        self.lines.add(f"arm = {mine}")
        for number, body in enumerate(arms.bodies, 1):
            owns = any(op in self.streams.own for op in body.blocks[0].ops)
            end = "done, met = done + 1, met + 1" if owns else "done = done + 1"
            enter, ahead = f"{'if' if number == 1 else 'elif'} arm == {number}:", seek.format("turn + 1")
            walk = Walk(enter, place, f"while ({mine}) == {number}:", place, ("done - 1", "done - 1"), ahead, end)
            turn = self._parts(body)
            if turn is not None:
                self._rotated(body, turn, carried, walk)
                continue
            self.lines.add(enter)
            self.lines.depth += 1
            self._plain(body, place, carried)
            self.give_back_own()
            self.lines.add(end)
            self.lines.add(ahead)
            self.lines.depth -= 1
        self.lines.add("else:")
        self.lines.depth += 1
        self._walk_past("done", "done + 1")
        self.lines.add("done = done + 1")
        self.lines.add(seek.format("turn + 1"))
        self.lines.depth -= 2

    # ---- turns -------------------------------------------------------------------------------------------------------

    def _begin(self, op: Op, place: tuple[str, str]) -> None:
        """The counter and the place in the rings of one turn."""
        position, number = place
        counter = self.names.fresh(op.blocks[0].params[0].hint or "j")
        self.lines.add(f"{counter} = {position}")
        self._place_of(number)
        self.table[op.blocks[0].params[0]] = Text(counter)

    def _place_of(self, number: str) -> None:
        stages = self.schedule.num_stages
        self.counter += 1
        self.slot, self.phase, self.waited = f"slot_{self.counter}", f"phase_{self.counter}", set()
        self.lines.add(f"{self.slot} = ({number}) % {stages}")
        self.lines.add(f"{self.phase} = (({number}) // {stages}) & 1")

    def _release(self, products: list[Op]) -> None:
        rings = {self.streams.ring(load).name for op in products if (load := self.streams.fetched(op.operands[1]))}
        for name in sorted(rings):
            self.lines.add(f"mbarrier.arrive({name}_empty.index({self.slot}), count=1)")

    def _plain(self, op: Op, place: tuple[str, str], carried: list[str]) -> None:
        self._begin(op, place)
        self.block(op.blocks[0])
        for ring in self.streams.rings.values():
            self.lines.add(f"mbarrier.wait({ring.name}_full.index({self.slot}), {self.phase})")
            self.lines.add(f"mbarrier.arrive({ring.name}_empty.index({self.slot}), count=1)")
        self._assign(carried, op.blocks[0])

    def _rotated(self, op: Op, turn: Turn, carried: list[str], walk: Walk) -> None:
        """See turns.py."""
        (body,) = op.blocks
        outer, self.here = self.here, Block()
        lefts = [self.names.fresh("weights") for _ in turn.late]
        self.lines.add(walk.enter)
        self.lines.depth += 1
        self._begin(op, walk.first)
        names = self._start_early(turn)
        self._line(walk.ahead)
        self._own_tiles(turn)
        self._end_early(turn, names, 0)
        self._middle(turn, body, carried, lefts)
        self._line(walk.end)
        self.lines.add(walk.again)
        self.lines.depth += 1
        self._begin(op, walk.other)
        names = self._start_early(turn)
        here = self.slot, self.phase, self.waited
        self._place_of(walk.before[0])
        for late, left in zip(turn.late, lefts, strict=True):
            self._reload(late.product)
            self.lines.add(f"{carried[late.carried]}_sum = {self.started(late.product, carried[late.carried], left)}")
        before = self.slot
        self.slot, self.phase, self.waited = here
        self._line(walk.ahead)
        self._own_tiles(turn)
        self._end_early(turn, names, len(turn.late))
        self._middle(turn, body, carried, lefts, before)
        self._line(walk.end)
        self.lines.depth -= 1
        self._place_of(walk.before[1])
        for late, left in zip(turn.late, lefts, strict=True):
            name = carried[late.carried]
            self._reload(late.product)
            self.lines.add(f"{name}_sum = {self.started(late.product, name, left)}")
            self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name}_sum,))")
        self._release([late.product for late in turn.late])
        self.lines.depth -= 1
        self.here = outer

    def _line(self, line: str) -> None:
        if line:
            self.lines.add(line)

    def _reload(self, product: Op) -> None:
        """The right operand of a product, at the place of the turn at hand."""
        right = product.operands[1]
        load = loaded(right)
        assert load is not None
        self.load(load)
        if right is not load.result:
            assert right.op is not None
            self.trans(right.op)

    def _start_early(self, turn: Turn) -> list[str]:
        for op in turn.before:
            self.write(op)
        names = []
        for op in turn.early:
            names.append(self.names.fresh(op.result.hint or "product"))
            self.lines.add(f"{names[-1]} = {self.started(op, '')}")
        return names

    def _own_tiles(self, turn: Turn) -> None:
        """Read while the early products run: behind them there are few registers, and each read would be waited for."""
        for op in turn.middle:
            if op in self.streams.own:
                self.write(op)

    def _end_early(self, turn: Turn, names: list[str], pending: int) -> None:
        for op, name in zip(turn.early, names, strict=True):
            shape = padded_shape(op.result.shape)
            self.lines.add(f"{name} = warpgroup_mma_wait({pending}, deps=({name},))")
            self.table[op.result] = Text(name, shape, layout=self.layout(shape))
        self._release(turn.early)

    def _middle(self, turn: Turn, body: Block, carried: list[str], lefts: list[str], before: str = "") -> None:
        """Everything between the products. `before`: the place whose late products end here."""
        for op in turn.middle:
            if op in self.streams.own:
                continue
            if op.kind == "reduce":  # of the scores: what changes them has been read
                self.give_back_own()
            self.write(op)
        self.give_back_own()
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
