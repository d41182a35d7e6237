"""The iterations of a consumer: what it does with one block that the producer fetched, and how iterations overlap.

Iterations run one after the other, with their dots started as early and waited for as late as they can be, or overlap
(overlap.py). Vectors that meet the columns of tiles are loaded an iteration ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ....ir import Block, Op, Value, needed, walk
from ..triton.padding import padded_shape
from ..triton.text import Text
from .consumer import SPREAD, Consumer
from .overlap import LateDot, SplitBody, split
from .pipeline import load_of


class IterationPlace(NamedTuple):
    """Expressions for one iteration: its position in the loop, and its number among the fetched blocks."""

    position: str
    number: str


@dataclass(frozen=True)
class IterationRun:
    """The text of a run of iterations: where each is, and how the next one is found."""

    enter: str  # asks whether there is a first iteration
    first: IterationPlace
    repeat: str  # the head of the loop over the others
    other: IterationPlace
    previous: tuple[str, str]  # the number of the iteration before: inside the loop, and behind it
    seek: str = ""  # finds the next block, while dots run
    end: str = ""  # of an iteration


class Iterations(Consumer):
    """Writes iterations. The loops around them are in consumer_loops.py."""

    counter = 0
    written: set[int]  # ops of the current iteration's middle

    def split_body(self, op: Op) -> SplitBody | None:
        """Split a body. There is one scratch tile, so that one that zeroes rows in it stays whole."""
        zeroes = any(o.results and o.results[0] in self.pipeline.zeroed for o in walk(op.blocks[0]))
        return split(op) if not zeroes else None

    def rings_of(self, dots: Iterable[Op]) -> set[str]:
        """Return the barriers of the rings that dots read."""
        return {self.pipeline.ring(load).barriers for op in dots if (load := self.pipeline.ring_load(op.operands[1]))}

    def _begin(self, op: Op, place: IterationPlace) -> None:
        """Set the loop's counter and the slot of the rings for one iteration."""
        counter = self.names.fresh(op.blocks[0].params[0].hint or "j")
        self.lines.add(f"{counter} = {place.position}")
        self._set_slot(place.number)
        self.table[op.blocks[0].params[0]] = Text(counter)

    def _set_slot(self, number: str) -> None:
        stages = self.schedule.num_stages
        self.counter += 1
        self.slot, self.phase = self.names.fresh(f"slot_{self.counter}"), self.names.fresh(f"phase_{self.counter}")
        self.waited = set()
        self.lines.add(f"{self.slot} = ({number}) % {stages}")
        self.lines.add(f"{self.phase} = (({number}) // {stages}) & 1")

    def _release(self, rings: set[str]) -> None:
        """Give the slots of rings back to the producer."""
        for name in sorted(rings):
            self.lines.add(f"mbarrier.arrive({name}_empty.index({self.slot}), count=1)")

    def _spread_vectors(self, parts: SplitBody | None) -> list[Op]:
        """Return the vectors that an iteration loads for its columns, of which each thread has an element."""
        loads = [op for op in parts.middle if op.kind == "load" and len(op.result.shape) == 1] if parts else []
        return [op for op in loads if self.vector_layout(op.result) == SPREAD]

    def prefetch_vectors(self, op: Op, parts: SplitBody | None, place: IterationPlace, exists: str) -> None:
        """Load the vectors of an iteration before it begins, if it `exists`, so that nothing waits for memory in it."""
        if not (vectors := self._spread_vectors(parts)) or parts is None:
            return
        counter = op.blocks[0].params[0]
        current, self.exists = self.table.get(counter), exists
        self.table[counter] = Text(self.names.fresh("following"))
        self.lines.add(f"{self.table[counter]} = {place.position}")
        for each in needed(parts.middle, [vector.result for vector in vectors]):
            self.write(each)
        self.exists = ""
        for vector in vectors:
            name = self.prefetched.setdefault(vector.result, self.names.fresh("prefetched"))
            self.lines.add(f"{name} = {self.table[vector.result]}")
        if current is not None:
            self.table[counter] = current

    def _take_vectors(self, op: Op, parts: SplitBody, following: IterationPlace) -> None:
        """Take the prefetched vectors of this iteration, and prefetch those of the following one."""
        vectors = self._spread_vectors(parts)
        names = [self.names.fresh(vector.result.hint or "vector") for vector in vectors]
        for name, vector in zip(names, vectors, strict=True):
            self.lines.add(f"{name} = {self.prefetched[vector.result]}")
        self.prefetch_vectors(op, parts, following, f"{following.number} < end_block")
        for name, vector in zip(names, vectors, strict=True):
            self.table[vector.result] = Text(name, padded_shape(vector.result.shape), layout=SPREAD)
            self.written.add(id(vector))

    def iteration(
        self, op: Op, place: IterationPlace, carried: list[str], following: IterationPlace | None = None
    ) -> None:
        """Write an iteration that does not overlap others."""
        self._begin(op, place)
        parts = self.split_body(op)
        if parts is not None:
            self._in_order(op, parts, carried, following)
            return
        self.block(op.blocks[0])
        for name in self.pipeline.ring_groups:
            self.lines.add(f"mbarrier.wait({name}_full.index({self.slot}), {self.phase})")
            self.lines.add(f"mbarrier.arrive({name}_empty.index({self.slot}), count=1)")
        self._assign(carried, op.blocks[0].terminator.operands)

    def _in_order(self, op: Op, parts: SplitBody, carried: list[str], following: IterationPlace | None) -> None:
        """Write one iteration's parts: early dots are waited for where they are first needed, late dots start as soon
        as they can, and what those do not need stands behind their start."""
        outer, self.here = self.here, Block()
        names = self._start_early(parts)
        self.written = set()
        if following is not None:
            self._take_vectors(op, parts, following)
        self._load_ahead(parts)
        running = [item.result for item in parts.early]  # dots in the order in which they started, and end
        lefts: dict[Value, str] = {}
        for late in sorted(parts.late, key=lambda late: len(self._leading(parts, late))):
            self._write_leading(parts, late, names, running)
            name, value = carried[late.carried], late.dot.operands[0]
            left = lefts[value] if value in lefts else self.exchanged_left(late.dot, len(lefts))
            lefts[value] = left
            self.lines.add(f"{name}_sum = {self.start_dot(late.dot, self.full(late.addend), left)}")
            running.append(late.dot.result)
        self._write_leading(parts, None, names, running)
        sums = [late.carried for late in parts.late]
        for n in sums:
            self.lines.add(f"{carried[n]} = warpgroup_mma_wait(0, deps=({carried[n]}_sum,))")
        self._release(self.rings_of(late.dot for late in parts.late))
        values = [(n, v) for n, v in enumerate(op.blocks[0].terminator.operands) if n not in sums]
        self._assign([carried[n] for n, _ in values], [v for _, v in values])
        self.here = outer

    def _leading(self, parts: SplitBody, late: LateDot | None) -> list[Op]:
        """Return the ops between early dots and a late one that it needs, or all of them."""
        ops = [*parts.middle, *parts.scaling]
        return ops if late is None else needed(ops, (*late.dot.operands, late.addend))

    def _write_leading(
        self, parts: SplitBody, late: LateDot | None, names: dict[Value, str], running: list[Value]
    ) -> None:
        """Write those ops that are not written yet, behind the early dots that they read."""
        ops = [op for op in self._leading(parts, late) if id(op) not in self.written]
        ending = [value for value in names if any(value in op.operands for op in ops)]
        for value in ending:
            self._end_dot(value, names.pop(value), len(running) - 1 - running.index(value))
        if ending and not names:
            self._release_early(parts)
        self._write_middle(ops)

    def overlapped(self, op: Op, parts: SplitBody, carried: list[str], run: IterationRun) -> None:
        """Write a run of iterations that overlap (overlap.py)."""
        (body,) = op.blocks
        outer, self.here = self.here, Block()
        lefts = [self.names.fresh("weights") for _ in parts.late]
        self.lines.add(run.enter)
        self.lines.depth += 1
        self._begin(op, run.first)
        names = self._start_early(parts)
        self.written = set()
        self._add_line(run.seek)
        self._load_ahead(parts)
        self._end_early(parts, names, 0)
        self._middle(parts, body, carried, lefts)
        self._add_line(run.end)
        self.lines.add(run.repeat)
        self.lines.depth += 1
        self._begin(op, run.other)
        names = self._start_early(parts)
        current = self.slot, self.phase, self.waited
        self._set_slot(run.previous[0])
        self._start_late(parts, carried, lefts)
        previous_slot = self.slot
        self.slot, self.phase, self.waited = current
        self.written = set()
        self._add_line(run.seek)
        self._load_ahead(parts)
        self._end_early(parts, names, len(parts.late))
        self._middle(parts, body, carried, lefts, previous_slot)
        self._add_line(run.end)
        self.lines.depth -= 1
        self._set_slot(run.previous[1])
        for late, left in zip(parts.late, lefts, strict=True):
            name = carried[late.carried]
            self._reload(late.dot)
            self.lines.add(f"{name}_sum = {self.start_dot(late.dot, name, left)}")
            self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name}_sum,))")
        self._release(self.rings_of(late.dot for late in parts.late))
        self.lines.depth -= 1
        self.here = outer

    def _add_line(self, line: str) -> None:
        if line:
            self.lines.add(line)

    def _reload(self, dot: Op) -> None:
        """Read the right operand of a dot from the current slot."""
        right = dot.operands[1]
        load = load_of(right)
        assert load is not None
        self.load(load)
        if right is not load.result:
            assert right.op is not None
            self.trans(right.op)

    def _start_early(self, parts: SplitBody) -> dict[Value, str]:
        """Start early dots, and return the names of their results."""
        for op in parts.operands:
            self.write(op)
        names: dict[Value, str] = {}
        for item in parts.early:
            start = names.pop(item.addend) if item.addend is not None else ""
            names[item.result] = self.names.fresh(item.result.hint or "dot")
            self.lines.add(f"{names[item.result]} = {self.start_dot(item.dot, start)}")
        return names

    def _start_late(self, parts: SplitBody, carried: list[str], lefts: list[str]) -> None:
        for late, left in zip(parts.late, lefts, strict=True):
            name = carried[late.carried]
            self._reload(late.dot)
            self.lines.add(f"{name}_sum = {self.start_dot(late.dot, name, left)}")

    def _load_ahead(self, parts: SplitBody) -> None:
        """Read private tiles, and vectors from memory, while the early dots run: behind those there are few registers,
        and each read would be waited for."""
        vectors = [op for op in parts.middle if op.kind == "load" and len(op.result.shape) == 1]
        vectors = [op for op in vectors if id(op) not in self.written]
        self._write_middle(needed(parts.middle, [op.result for op in vectors]))
        self._write_middle([op for op in parts.middle if op in self.pipeline.private])

    def _end_early(self, parts: SplitBody, names: dict[Value, str], pending: int) -> None:
        for value, name in names.items():
            self._end_dot(value, name, pending)
        self._release_early(parts)

    def _end_dot(self, value: Value, name: str, pending: int) -> None:
        """Wait for a dot; `pending` dots that started after it may still run."""
        shape = padded_shape(value.shape)
        self.lines.add(f"{name} = warpgroup_mma_wait({pending}, deps=({name},))")
        self.table[value] = Text(name, shape, layout=self.layout(shape))

    def _release_early(self, parts: SplitBody) -> None:
        """Release what only early dots read."""
        late = self.rings_of(item.dot for item in parts.late)
        self._release(self.rings_of(item.dot for item in parts.early) - late)

    def _write_middle(self, ops: list[Op]) -> None:
        """Write what is not written yet."""
        for op in ops:
            if id(op) in self.written:
                continue
            self.written.add(id(op))
            if op.kind == "reduce":  # of the scores: what changes them has been read
                self.release_private()
            self.write(op)

    def _middle(
        self, parts: SplitBody, body: Block, carried: list[str], lefts: list[str], previous_slot: str = ""
    ) -> None:
        """Write everything between the dots. `previous_slot`: of the iteration whose late dots end here."""
        self._write_middle(parts.middle)
        self.release_private()
        if previous_slot:
            for late in parts.late:
                name = carried[late.carried]
                self.lines.add(f"{name} = warpgroup_mma_wait(0, deps=({name}_sum,))")
            current, self.slot = self.slot, previous_slot
            self._release(self.rings_of(late.dot for late in parts.late))
            self.slot = current
        self._write_middle(parts.scaling)
        pairs = [(left, self.left(late.dot)) for left, late in zip(lefts, parts.late, strict=True)]
        sums = {late.carried: late.addend for late in parts.late}
        for n, (name, value) in enumerate(zip(carried, body.terminator.operands, strict=True)):
            pairs.append((name, self.full(sums.get(n, value))))
        pairs = [(name, text) for name, text in pairs if name != text]
        self.lines.add(f"{', '.join(n for n, _ in pairs)} = {', '.join(text for _, text in pairs)}")
