"""Which family each value follows, along what vectors lie, and which values are computed where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import ir
from ...ir import Block, Kernel, Op, Value
from .layout import COLUMN, ROW, Family, Fragments, Lanes, Spread

FREE = frozenset({"const", "dim", "param", "arange"}) | ir.SHAPE_ONLY
MOST_SIMDGROUPS = 4
FEW_ROWS = 8  # products of so few rows leave most of an 8x8 matrix idle


@dataclass(frozen=True)
class Plan:
    """How the work of a program is shared out. `early`: operands of products are staged as soon as they are known, each
    in its own part of threadgroup memory, which takes fewer barriers and more room."""

    engine: str  # "matrix" or "lanes"
    rows_over: int = 1
    columns_over: int = 1
    early: bool = True


def plans(kernel: Kernel) -> list[Plan]:
    """Ways to run a kernel, best first; the later ones need less threadgroup memory."""
    dots = [op for op in ir.walk(kernel.body) if op.kind == "dot"]
    if not dots or (max(op.result.shape[0] for op in dots) <= FEW_ROWS and LaneFamilies(kernel).possible):
        return [Plan("lanes")]
    tallest, widest = (max(op.result.shape[n] for op in dots) for n in (0, 1))
    by_rows = max(1, min(MOST_SIMDGROUPS, tallest // 8))
    shares = [(by_rows, 1)]
    # A simdgroup with two rows of squares uses every square of the right operand twice. Where there are fewer rows,
    # each simdgroup takes all of them and its own columns, and reads the right operand alone.
    if 8 < tallest < 16 * MOST_SIMDGROUPS or (tallest == 8 and widest >= 32):
        shares.insert(0, (1, max(1, min(MOST_SIMDGROUPS, widest // 8))))
    return [Plan("matrix", *share, early) for share in shares for early in (True, False)]


class Joined:
    """Values that have to follow the same family or lie alike."""

    def __init__(self) -> None:
        self.parent: dict[Value, Value] = {}

    def find(self, value: Value) -> Value:
        while self.parent.get(value, value) is not value:
            value = self.parent[value]
        return value

    def join(self, a: Value, b: Value) -> None:
        self.parent[self.find(a)] = self.find(b)


class Orientations(Joined):
    """Whether a value of rank 1 lies along rows or columns. Values that meet elementwise or travel through a loop
    together lie alike; folds and expansions say how."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.vote: dict[Value, str] = {}
        self.fixed: dict[Value, str] = {}  # what a fold leaves lies as the tile does
        votes: list[tuple[Value, str]] = []
        for op in ir.walk(kernel.body):
            if op.kind == "reduce" and len(op.operands[0].shape) == 2:
                self.fixed[op.result] = ROW if op.attrs["axis"] == 1 else COLUMN
        for op in ir.walk(kernel.body):
            for a, b in together(op):
                if len(a.shape) != 1 or len(b.shape) != 1:
                    continue
                votes += [(other, self.fixed[value]) for value, other in ((a, b), (b, a)) if value in self.fixed]
                if a not in self.fixed and b not in self.fixed:
                    self.join(a, b)
        for op in ir.walk(kernel.body):
            if op.kind == "expand" and len(op.operands[0].shape) == 1:
                votes.append((op.operands[0], ROW if op.attrs["position"] == 1 else COLUMN))
        for value, side in votes:
            self.vote.setdefault(self.find(value), side)

    def of(self, value: Value) -> str:
        return self.fixed.get(value) or self.vote.get(self.find(value), COLUMN)


class LaneFamilies(Joined):
    """Families without matrices. A product over lanes leaves its sums `Spread`; other tiles are in `Lanes`."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.seed: dict[Value, Family] = {}
        self.possible = True
        for op in ir.walk(kernel.body):
            for a, b in together(op):
                if a.shape and len(a.shape) == len(b.shape) and "expand" not in (a.kind, b.kind):
                    self.join(a, b)
            if op.kind == "reduce" and op.result.shape:
                self.join(op.operands[0], op.result)
        dots = [op for op in ir.walk(kernel.body) if op.kind == "dot"]
        for op in dots:
            a, b = op.operands
            if 1 in b.shape:
                self.possible = False
            if b.kind == "trans":
                rows = 1 << (op.result.shape[0] - 1).bit_length()
                self._seed(op.result, Spread(rows=rows))
                self._seed(a, Lanes())
                self._seed(b.op.operands[0] if b.op else b, Lanes())
            else:
                self._seed(op.result, Lanes())
                self._seed(b, Lanes())
        for op in ir.walk(kernel.body):  # what nothing says otherwise of lies as the tile it is stretched to
            if op.kind == "expand" and len(op.operands[0].shape) == 1:
                family = self.seed.get(self.find(op.result))
                if family is not None:
                    self.seed.setdefault(self.find(op.operands[0]), family)

    def _seed(self, value: Value, family: Family) -> None:
        if self.seed.setdefault(self.find(value), family) != family:
            self.possible = False

    def of(self, value: Value) -> Family:
        return self.seed.get(self.find(value), Lanes())


class Families:
    """The family of every value under a plan."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.main: Family = Fragments(plan.rows_over, plan.columns_over) if plan.engine == "matrix" else Lanes()
        self._lanes = LaneFamilies(kernel) if plan.engine == "lanes" else None

    def of(self, value: Value) -> Family:
        return self._lanes.of(value) if self._lanes is not None else self.main


def together(op: Op) -> Iterator[tuple[Value, Value]]:
    """Pairs of values that meet element by element."""
    if op.kind in ir.ELEMENTWISE or op.kind == "broadcast":
        for operand in op.operands:
            yield operand, op.result
    elif op.kind == "for":
        (block,) = op.blocks
        for group in zip(op.operands[2:], block.params[1:], block.terminator.operands, op.results, strict=True):
            for other in group[1:]:
                yield group[0], other
    elif op.kind == "if":
        for block in op.blocks:
            yield from zip(block.terminator.operands, op.results, strict=True)


# ---- values without registers ----------------------------------------------------------------------------------------


def is_free_fold(op: Op) -> bool:
    """A fold of one element is that element."""
    return op.kind == "reduce" and len(op.operands[0].shape) == 2 and op.operands[0].shape[op.attrs["axis"]] == 1


def inlined(kernel: Kernel, lanes: bool) -> set[Value]:
    """Values that have no registers of their own: positions, shapes, cheap predicates, and what is used once."""
    users = ir.uses(kernel.body)
    home = homes(kernel.body)
    found: set[Value] = set()
    heavy: set[Value] = set()  # reads memory or computes floats: not to be done twice
    kept = _left_operands(kernel) if lanes else set()
    for op in ir.walk(kernel.body):
        if len(op.results) != 1 or op.blocks or op.kind in ("program_id", "dot"):
            continue
        if op.kind == "reduce" and not is_free_fold(op):
            continue
        value = op.result
        own = op.kind in ("load", "gather") or (value.dtype.is_float and op.kind in ir.ELEMENTWISE)
        if own or any(v in heavy for v in op.operands if v in found):
            heavy.add(value)
        if value not in kept and _inline(op, value, users, home, heavy, kernel.written):
            found.add(value)
    return found


def _left_operands(kernel: Kernel) -> set[Value]:
    """Left operands that are read from memory: every lane asks for all of them, so they are read once."""
    found = {op.operands[0] for op in ir.walk(kernel.body) if op.kind == "dot"}
    return {v for v in found if v.kind in ("load", "gather")}


def _inline(
    op: Op,
    value: Value,
    users: dict[Value, list[Op]],
    home: dict[Op, Block],
    heavy: set[Value],
    written: frozenset[int],
) -> bool:
    if op.kind in FREE or op.kind == "reduce":
        return op.kind != "param"
    if op.kind in ("load", "gather") and op.attrs["tensor"].index in written:
        return False
    readers = _readers(value, users)
    once = len(readers) == 1 and home[readers[0]] is home[op] and readers[0].kind != "yield"
    if not value.shape:
        return once and op.kind in ir.ELEMENTWISE and readers[0].kind in ir.ELEMENTWISE
    if value not in heavy:
        return True
    if len(value.shape) == 1:
        return once and readers[0].kind in ir.ELEMENTWISE | {"store"}
    return once and min(value.shape) > 1


def _readers(value: Value, users: dict[Value, list[Op]]) -> list[Op]:
    """The ops that read a value, also through a change of shape. A tile that is stretched is read many times."""
    found: list[Op] = []
    for op in users.get(value, []):
        if op.kind == "trans" or is_free_fold(op):
            found += _readers(op.result, users)
        elif op.kind in ir.SHAPE_ONLY:
            found += [op, op]
        else:
            found.append(op)
    return found


def homes(block: Block) -> dict[Op, Block]:
    """The block each op stands in."""
    found: dict[Op, Block] = {}
    for op in block.ops:
        found[op] = block
        for inner in op.blocks:
            found |= homes(inner)
    return found


def read_by(op: Op, unheld: set[Value]) -> set[Value]:
    """The values with registers that an op reads, also through values that have none."""
    found: set[Value] = set()
    stack = list(op.operands)
    while stack:
        value = stack.pop()
        if value in unheld and value.op is not None:
            stack += value.op.operands
        else:
            found.add(value)
    for block in op.blocks:
        for inner in block.ops:
            found |= read_by(inner, unheld)
    return found
