"""Whether each rank-1 value lies along rows or along columns, and which values are computed where they are used."""

from __future__ import annotations

from collections.abc import Iterator

from ... import ir
from ...ir import Block, Kernel, Op, Value
from .layout import COLUMN, ROW

FREE = frozenset({"const", "dim", "param", "arange"}) | ir.SHAPE_ONLY


class Orientations:
    """Values that meet elementwise or travel through a loop together lie alike; folds and expansions say how."""

    def __init__(self, kernel: Kernel) -> None:
        self.parent: dict[Value, Value] = {}
        self.vote: dict[Value, str] = {}
        self.fixed: dict[Value, str] = {}  # what a fold leaves lies as the tile does
        votes: list[tuple[Value, str]] = []
        for op in ir.walk(kernel.body):
            if op.kind == "reduce" and len(op.operands[0].shape) == 2:
                self.fixed[op.result] = ROW if op.attrs["axis"] == 1 else COLUMN
        for op in ir.walk(kernel.body):
            for a, b in _together(op):
                if len(a.shape) != 1 or len(b.shape) != 1:
                    continue
                votes += [(other, self.fixed[value]) for value, other in ((a, b), (b, a)) if value in self.fixed]
                if a not in self.fixed and b not in self.fixed:
                    self.parent[self._find(a)] = self._find(b)
        for op in ir.walk(kernel.body):
            if op.kind == "expand" and len(op.operands[0].shape) == 1:
                votes.append((op.operands[0], ROW if op.attrs["position"] == 1 else COLUMN))
        for value, side in votes:
            self.vote.setdefault(self._find(value), side)

    def of(self, value: Value) -> str:
        return self.fixed.get(value) or self.vote.get(self._find(value), COLUMN)

    def _find(self, value: Value) -> Value:
        while self.parent.get(value, value) is not value:
            value = self.parent[value]
        return value


def _together(op: Op) -> Iterator[tuple[Value, Value]]:
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


def inlined(kernel: Kernel) -> set[Value]:
    """Values that have no registers of their own: positions, shapes, cheap predicates, and what is used once."""
    users = ir.uses(kernel.body)
    home: dict[Op, Block] = {}
    _homes(kernel.body, home)
    found: set[Value] = set()
    heavy: set[Value] = set()  # reads memory or computes floats: not to be done twice
    for op in ir.walk(kernel.body):
        if len(op.results) != 1 or op.blocks or op.kind in ("program_id", "reduce", "dot"):
            continue
        value = op.result
        own = op.kind in ("load", "gather") or (value.dtype.is_float and op.kind in ir.ELEMENTWISE)
        if own or any(v in heavy for v in op.operands if v in found):
            heavy.add(value)
        if _inline(op, value, users, home, heavy, kernel.written):
            found.add(value)
    return found


def _inline(
    op: Op,
    value: Value,
    users: dict[Value, list[Op]],
    home: dict[Op, Block],
    heavy: set[Value],
    written: frozenset[int],
) -> bool:
    if op.kind in FREE:
        return True
    if not value.shape or (op.kind in ("load", "gather") and op.attrs["tensor"].index in written):
        return False
    if value not in heavy:
        return True
    readers = _readers(value, users)
    once = len(readers) == 1 and home[readers[0]] is home[op] and readers[0].kind != "yield"
    return once and len(value.shape) == 2 and min(value.shape) > 1


def _readers(value: Value, users: dict[Value, list[Op]]) -> list[Op]:
    """The ops that read a value, also through a change of shape. A tile that is stretched is read many times."""
    found: list[Op] = []
    for op in users.get(value, []):
        if op.kind == "trans":
            found += _readers(op.result, users)
        elif op.kind in ir.SHAPE_ONLY:
            found += [op, op]
        else:
            found.append(op)
    return found


def _homes(block: Block, home: dict[Op, Block]) -> None:
    for op in block.ops:
        home[op] = block
        for inner in op.blocks:
            _homes(inner, home)
