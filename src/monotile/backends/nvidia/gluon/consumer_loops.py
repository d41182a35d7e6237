"""The loops of a consumer: how it goes through the blocks that the producer fetches for its CTA.

A plain loop reads its blocks in order and skips those that only other consumers need. A loop with block cases
(block_cases.py) calls `next_block` for the next block that some consumer of the CTA needs, and for the case that each
has for it. Either way iterations can overlap (iterations.py); with block cases, in a run of blocks with one case."""

from __future__ import annotations

from ....errors import InternalError
from ....ir import Op
from ..triton.padding import padded_shape
from ..triton.text import Text
from .block_cases import BlockCases
from .iterations import IterationPlace, IterationRun, Iterations
from .overlap import SplitBody
from .pipeline import CASE_BITS
from .scalars import past_view

ARGUMENTS = "<arguments>"  # stands for the module's arguments, which are known when everything is written


class ConsumerLoops(Iterations):
    def loop(self, op: Op) -> None:
        n = next((n for n, loop in enumerate(self.pipeline.loops) if loop is op), None)
        if n is None and op is not self.pipeline.outer:
            raise InternalError("a loop without dots in a kernel with a producer")
        carried, outside = self._carry(op), self.outside_loops
        self.outside_loops = n is None  # one outside the grid has no iteration of the others
        if n is None:
            self._outer_loop(op, carried)
        elif (cases := self.pipeline.cases.get(id(op))) is not None:
            self._loop_by_case(cases, n, carried)
        else:
            self._plain_loop(op, n, carried)
        self.outside_loops = outside
        if self.schedule.persistent and op is (self.pipeline.outer or self.pipeline.loops[-1]):
            written = {staged.operand for staged in self.staged.values()}
            for name in (self.pipeline.name(load) for load in self.pipeline.resident):
                if name not in written:  # these were the last reads of this tile's operands
                    place = self.resident.index("CONSUMER")
                    self.lines.add(f"mbarrier.arrive({name}_empty.index({place}), count=1)")

    def _carry(self, op: Op) -> list[str]:
        """Assign the first values of what a loop carries, and return the names."""
        (body,) = op.blocks
        carried, leaving = [], body.terminator.operands
        for init, param, last, result in zip(op.operands[2:], body.params[1:], leaving, op.results, strict=True):
            name = self.names.fresh(result.hint or param.hint or last.hint or "carried")
            self.lines.add(f"{name} = {self.entering(op, init, param, last)}")
            shape = padded_shape(param.shape)
            self.table[param] = self.table[result] = Text(name, shape, layout=self.layout(shape) if shape else None)
            self.names.taken.add(f"{name}_sum")  # of overlapped iterations
            carried.append(name)
        return carried

    def _outer_loop(self, op: Op, carried: list[str]) -> None:
        """Write the loop around the loops over blocks, which the producer runs, too."""
        (body,) = op.blocks
        low, high = op.operands[:2]
        counter = self.names.fresh(body.params[0].hint or "i")
        self.lines.add(f"for outer_index in range({self.value(low)}, {self.value(high)}, {op.attrs['step']}):")
        self.lines.depth += 1
        self.lines.add(f"{counter} = gl.cast(outer_index, gl.int32)")
        self.table[body.params[0]] = Text(counter)
        self.block(body)
        self._assign(carried, body.terminator.operands)
        self.lines.depth -= 1

    def _plain_loop(self, op: Op, n: int, carried: list[str]) -> None:
        step = op.attrs["step"]
        self.lines.add(f"num_blocks = gl.where(high_{n} > low_{n}, (high_{n} - low_{n} + {step - 1}) // {step}, 0)")
        self.lines.add(f"start_block = blocks_done + gl.where(num_blocks > 0, (low_{n} - first_{n}) // {step}, 0)")
        self.lines.add("end_block = start_block + num_blocks")
        self._skip_blocks("blocks_done", "start_block")
        place, following = (
            IterationPlace(f"low_{n} + ({number} - start_block) * {step}", number) for number in ("block", "block + 1")
        )
        parts = self._split(op)
        if parts is None:
            first = IterationPlace(f"low_{n}", "start_block")
            self.prefetch_vectors(op, self.split_body(op), first, "start_block < end_block")
            self.lines.add("for block in range(start_block, end_block):")
            self.lines.depth += 1
            self.iteration(op, place, carried, following)
            self.lines.depth -= 1
        else:
            repeat, previous = "for block in range(start_block + 1, end_block):", ("block - 1", "end_block - 1")
            first = IterationPlace(f"low_{n}", "start_block")
            self.overlapped(
                op, parts, carried, IterationRun("if start_block < end_block:", first, repeat, place, previous)
            )
        self._skip_blocks("end_block", f"blocks_done + blocks_{n}")
        self.lines.add(f"blocks_done = blocks_done + blocks_{n}")

    def _split(self, op: Op) -> SplitBody | None:
        """Split a body whose iterations are to overlap, which is not for those that clear rows of fetched tiles. Where
        late dots read the slots of early ones, that takes a slot more than the two that are read, or nothing would be
        copied meanwhile."""
        parts = self.split_body(op)
        clears = any(o.kind == "load" and o.result in self.pipeline.shared and past_view(o) for o in op.blocks[0].ops)
        if parts is None or clears or (op.attrs.get("edge") and self.schedule.edge_stages == 1):
            return None
        early, late = self.rings_of(item.dot for item in parts.early), self.rings_of(item.dot for item in parts.late)
        return parts if self.schedule.num_stages > 2 or not early & late else None

    def late_rings(self, op: Op) -> set[str]:
        """Return the barriers of the rings that a loop reads a block behind the others: those that only late dots of
        overlapped iterations read."""
        parts = self._split(op)
        if parts is None:
            return set()
        return self.rings_of(late.dot for late in parts.late) - self.rings_of(early.dot for early in parts.early)

    def _skip_blocks(self, first: str, last: str) -> None:
        """Skip blocks that only other consumers need."""
        rings = ", ".join(f"{name}_full, {name}_empty" for name in self.pipeline.ring_groups)
        self.lines.add(f"skip_blocks({first}, {last}, {rings})")

    def _loop_by_case(self, cases: BlockCases, n: int, carried: list[str]) -> None:
        seek = (
            f"block, cases = next_block_{n}({{}}, {self.schedule.num_warps}, {self.pipeline.outer_index}, {ARGUMENTS})"
        )
        place = IterationPlace(f"first_{n} + block * {cases.loop.attrs['step']}", "blocks_done")
        mine = f"(cases >> ({CASE_BITS} * CONSUMER)) & {2**CASE_BITS - 1}"
        self.lines.add(seek.format("gl.full([], 0, gl.int32)"))
        self.lines.add("while cases != 0:")
        self.lines.depth += 1
        self.lines.add(f"block_case = {mine}")
        split_bodies = [None if cases.loop.attrs.get("edge") else self._split(body) for body in cases.bodies]
        seek_last = not any(split_bodies)  # one copy of the search; overlapped iterations search while a dot runs
        for number, (body, parts) in enumerate(zip(cases.bodies, split_bodies, strict=True), 1):
            end = "blocks_done = blocks_done + 1"
            if self.pipeline.takes_private(body):
                end = "blocks_done, private_done = blocks_done + 1, private_done + 1"
            enter, following = f"{'if' if number == 1 else 'elif'} block_case == {number}:", seek.format("block + 1")
            if parts is not None:
                repeat, previous = f"while ({mine}) == {number}:", ("blocks_done - 1", "blocks_done - 1")
                self.overlapped(
                    body, parts, carried, IterationRun(enter, place, repeat, place, previous, following, end)
                )
                continue
            self.lines.add(enter)
            self.lines.depth += 1
            self.iteration(body, place, carried)
            self.release_private()
            self.lines.add(end)
            if not seek_last:
                self.lines.add(following)
            self.lines.depth -= 1
        self.lines.add("else:")
        self.lines.depth += 1
        self._skip_blocks("blocks_done", "blocks_done + 1")
        self.lines.add("blocks_done = blocks_done + 1")
        self.lines.depth -= seek_last
        self.lines.add(seek.format("block + 1"))
        self.lines.depth -= 1 if seek_last else 2
