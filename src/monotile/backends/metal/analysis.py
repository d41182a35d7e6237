"""Analysis of a kernel's values: which have registers, which are inlined, and which ops read them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from ... import ir
from ...ir import Block, Kernel, Op, Value
from ...ir.matchers import Accumulation, accumulation
from .infinities import Infinities
from .overwrites import overwritten

STREAMED = frozenset({"trans", "where", "cast", "dot"})
FREE = frozenset({"const", "dim", "param", "arange"}) | ir.SHAPE_ONLY


class Analysis:
    """Facts about a kernel that its rendering looks up. `inlined` values have no registers: they are recomputed where
    they are used."""

    def __init__(self, kernel: Kernel, *, on_lanes: bool) -> None:
        self.kernel = kernel
        self.block_of = blocks_of(kernel.body)
        self.holder = {block: op for op in ir.walk(kernel.body) for block in op.blocks}
        self.infinities = Infinities(kernel)
        self.users = ir.uses(kernel.body)
        self.inlined = _Inlining(kernel, self.users, self.block_of, on_lanes).values
        self.readers: dict[Value, list[Op]] = {}  # the ops with registers that read a value with registers
        for op in ir.walk(kernel.body):
            if not any(r in self.inlined for r in op.results):
                for value in self._through_inlined(op.operands):
                    self.readers.setdefault(value, []).append(op)
        read = {op.attrs["tensor"].index for op in ir.walk(kernel.body) if op.kind in ("load", "gather")}
        self.fenced = (read & kernel.written) | overwritten(kernel)  # tensors whose accesses need a fence

    def registers_read(self, op: Op) -> set[Value]:
        """Return the values with registers that an op reads, also through inlined values."""
        found = self._through_inlined(op.operands)
        for block in op.blocks:
            for inner in block.ops:
                found |= self.registers_read(inner)
        return found

    def _through_inlined(self, operands: Iterable[Value]) -> set[Value]:
        found: set[Value] = set()
        stack = list(operands)
        while stack:
            value = stack.pop()
            if value in self.inlined and value.op is not None:
                stack += value.op.operands
            else:
                found.add(value)
        return found

    def reads_written_tensor(self, value: Value) -> bool:
        """True for an access to a tensor that the kernel writes: it must happen where it stands."""
        op = value.op
        return op is not None and op.kind in ir.MEMORY and op.attrs["tensor"].index in self.kernel.written

    def defined_in(self, value: Value, block: Block) -> bool:
        return value.op is not None and self.block_of.get(value.op) is block

    def may_follow(self, op: Op, earlier: Op) -> bool:
        """True unless an op stands before another one, or in the other branch of an `if`."""
        around = dict(self._around(earlier))
        block, at = next((block, at) for block, at in self._around(op) if block in around)
        if at is around[block]:
            return op is not earlier and at.kind != "if"
        return block.ops.index(at) > block.ops.index(around[block])

    def _around(self, op: Op) -> Iterator[tuple[Block, Op]]:
        """Yield the blocks around an op, from the inside, with the op of each that holds it."""
        while True:
            block = self.block_of[op]
            yield block, op
            if block not in self.holder:
                return
            op = self.holder[block]


class Accumulations:
    """Adds of a dot, computed by starting the dot's sums from the addend. An add without registers of its own cannot
    be one: it is inlined, or `staged` in threadgroup memory."""

    def __init__(self, analysis: Analysis, staged: Container[Value]) -> None:
        self.by_add: dict[Op, Accumulation] = {}
        for op, block in analysis.block_of.items():
            match = accumulation(op, block.ops, analysis.users) if op.kind == "add" else None
            if match is not None and op.result not in analysis.inlined and op.result not in staged:
                self.by_add[op] = match
        self.add_of = {match.dot: add for add, match in self.by_add.items()}


class _Inlining:
    """Chooses the values without registers: positions, shapes, cheap predicates, and values that are used once."""

    def __init__(self, kernel: Kernel, users: dict[Value, list[Op]], block_of: dict[Op, Block], on_lanes: bool) -> None:
        self.kernel, self.users, self.block_of = kernel, users, block_of
        self.values: set[Value] = set()
        self._expensive: set[Value] = set()  # reads memory or computes floats: not to be done twice
        kept = _loaded_left_operands(kernel) if on_lanes else set()
        self._streamed = _loaded_right_operands(kernel, users)
        for op in ir.walk(kernel.body):
            if len(op.results) != 1 or op.blocks or op.kind in ir.MOVES | {"program_id", "dot"}:
                continue
            if op.kind == "reduce" and not is_unit_reduction(op):
                continue
            value = op.result
            costly = op.kind in ("load", "gather") or (value.dtype.is_float and op.kind in ir.ELEMENTWISE)
            if costly or any(v in self._expensive for v in op.operands if v in self.values):
                self._expensive.add(value)
            if value not in kept and self._can_inline(op, value):
                self.values.add(value)

    def _can_inline(self, op: Op, value: Value) -> bool:
        if op.kind in FREE or op.kind == "reduce":
            return op.kind != "param"
        if op.kind in ("load", "gather") and op.attrs["tensor"].index in self.kernel.written:
            return False
        if value in self._streamed:
            return True
        readers = self._readers(value)
        if any(reader.kind == "scan" for reader in readers):  # it reads an element many times
            return value not in self._expensive
        once = len(readers) == 1 and self.block_of[readers[0]] is self.block_of[op] and readers[0].kind != "yield"
        if not value.shape:
            return once and op.kind in ir.ELEMENTWISE and readers[0].kind in ir.ELEMENTWISE
        if value not in self._expensive:
            return True
        if len(value.shape) == 1:
            return once and readers[0].kind in ir.ELEMENTWISE | ir.WRITES
        return once and min(value.shape) > 1

    def _readers(self, value: Value) -> list[Op]:
        """Return the ops that read a value, also through a change of shape; a broadcast counts as several readers."""
        found: list[Op] = []
        for op in self.users.get(value, []):
            if op.kind == "trans" or is_unit_reduction(op):
                found += self._readers(op.result)
            elif op.kind in ir.SHAPE_ONLY:
                found += [op, op]
            else:
                found.append(op)
        return found


def is_unit_reduction(op: Op) -> bool:
    """True for a reduction over an axis of length 1, which is its operand."""
    return op.kind == "reduce" and len(op.operands[0].shape) == 2 and op.operands[0].shape[op.attrs["axis"]] == 1


def _loaded_left_operands(kernel: Kernel) -> set[Value]:
    """Return the left operands of dots that are read from memory. On lanes every lane asks for all of them, so they
    are read once and kept."""
    found = {op.operands[0] for op in ir.walk(kernel.body) if op.kind == "dot"}
    return {v for v in found if v.kind in ("load", "gather")}


def _loaded_right_operands(kernel: Kernel, users: dict[Value, list[Op]]) -> set[Value]:
    """Return the tiles in memory that only right operands of dots are made of, element by element. They are as large as
    the dots are deep: each dot reads its own elements, and no register holds them."""

    def streamed(value: Value, block: Block) -> bool:
        for op in users.get(value, []):
            if op not in block.ops or op.kind not in STREAMED:
                return False
            if op.kind == "dot":
                if op.operands[1] is not value:
                    return False
            elif not streamed(op.result, block):
                return False
        return bool(users.get(value))

    block_of = blocks_of(kernel.body)
    loads = [op.result for op in ir.walk(kernel.body) if op.kind == "load" and len(op.result.shape) == 2]
    return {v for v in loads if min(v.shape) > 1 and v.op is not None and streamed(v, block_of[v.op])}


def covers(value: Value, other: Value) -> bool:
    """True if the memory of a loaded tile holds another one, from its first column on."""
    if value.kind != "load" or other.kind != "load" or value.op is None or other.op is None:
        return False
    a, b = value.op, other.op
    same = a.attrs["tensor"] is b.attrs["tensor"] and a.operands == b.operands and value.shape[:1] == other.shape[:1]
    return same and len(value.shape) == len(other.shape) == 2 and value.shape[1] >= other.shape[1] and _alike(a, b)


def _alike(a: Op, b: Op) -> bool:
    """True if two loads have extents along the same axes."""
    return [n is None for n in a.attrs["extents"]] == [n is None for n in b.attrs["extents"]]


def blocks_of(block: Block) -> dict[Op, Block]:
    """Return the block of each op."""
    found: dict[Op, Block] = {}
    for op in block.ops:
        found[op] = block
        for inner in op.blocks:
            found |= blocks_of(inner)
    return found
