"""How a program's tiles are distributed over simdgroups and lanes: the layout and the orientation of every value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ... import ir
from ...ir import Kernel, Op, Value
from ...ir.matchers import untransposed
from .layout import COLUMN, ROW, FragmentLayout, LaneGridLayout, LaneLayout, TileLayout

SIMDGROUPS = 4  # of a threadgroup, where the registers of four can hold its tiles
MOST_SIMDGROUPS = 32  # 1024 threads, the most of a threadgroup
FEW_ROWS = 8  # a dot of at most this many rows would leave most of an 8x8 matrix idle
MAX_ELEMENTS = 32 * 72  # of a dot's left operand or sums that a simdgroup holds, 72 in the registers of a lane


@dataclass(frozen=True)
class Distribution:
    """How a program's work is distributed. With `stage_early`, operands of dots are staged in threadgroup memory as
    soon as they are known, each in a part of its own: fewer barriers, more memory. With `in_parts`, operands that do
    not fit are staged at each dot, a part of k at a time: right ones, or left ones that a loop does not change. With
    `share_right`, memory that is the right operand of several dots is staged for all of them. With `fetch_ahead`, a
    tile that waits for threadgroup memory is loaded into registers before the dot that uses that memory."""

    engine: str  # "matrix" (8x8 simdgroup matrices) or "lanes"
    row_simdgroups: int = 1
    column_simdgroups: int = 1
    stage_early: bool = True
    in_parts: bool = False
    share_right: bool = True
    fetch_ahead: bool = False


def distributions(kernel: Kernel) -> list[Distribution]:
    """Return the distributions a kernel can use, best first; later ones need less threadgroup memory."""
    dots = [op for op in ir.walk(kernel.body) if op.kind == "dot"]
    if not dots or (_fits_lanes(dots) and LaneLayouts(kernel).possible):
        return [Distribution("lanes")]
    tallest, widest = (max(op.result.shape[n] for op in dots) for n in (0, 1))
    # A simdgroup with two rows of matrices uses every matrix of the right operand twice; twice as many simdgroups use
    # it once, and have the registers for wider rows.
    by_rows = max(1, min(SIMDGROUPS, tallest // 8), tallest // 16)
    if tallest >= 16 * by_rows and tallest * widest > by_rows * MAX_ELEMENTS:
        by_rows *= 2
    by_rows = min(by_rows, MOST_SIMDGROUPS)
    rows = [by_rows, 2 * by_rows] if 16 * SIMDGROUPS <= 16 * by_rows <= tallest else [by_rows]
    rows = [each for each in rows if each <= MOST_SIMDGROUPS]
    found = []
    for each in rows:
        late = Distribution("matrix", each, 1, stage_early=False)
        found += [Distribution("matrix", each, 1), replace(late, fetch_ahead=True), late]
    found += [Distribution("matrix", each, 1, stage_early=False, in_parts=True) for each in rows]
    # Where there are fewer rows, each simdgroup takes all rows and its own columns, and no other simdgroup reads its
    # part of the right operand.
    if 8 < tallest < 16 * SIMDGROUPS or (tallest == 8 and widest >= 32):
        few = tallest * widest <= SIMDGROUPS * MAX_ELEMENTS
        columns = Distribution("matrix", 1, max(1, min(SIMDGROUPS if few else 2 * SIMDGROUPS, widest // 8)))
        alone = replace(columns, share_right=False)
        late = replace(alone, stage_early=False)
        return [columns, alone, late, *(found if few else []), replace(late, in_parts=True)]
    return found


def _fits_lanes(dots: list[Op]) -> bool:
    """True if few rows are multiplied, and one simdgroup can hold them."""
    rows = max(op.result.shape[0] for op in dots)
    width = max(max(op.result.shape[1], op.operands[0].shape[1]) for op in dots)
    return rows <= FEW_ROWS and (rows == 1 or rows * width <= MAX_ELEMENTS)


class DisjointSets:
    """Union-find over values that need the same layout or orientation."""

    def __init__(self) -> None:
        self.parent: dict[Value, Value] = {}

    def find(self, value: Value) -> Value:
        while self.parent.get(value, value) is not value:
            value = self.parent[value]
        return value

    def join(self, a: Value, b: Value) -> None:
        self.parent[self.find(a)] = self.find(b)


class Orientations:
    """The axis along which each vector lies: rows or columns. Vectors that meet in an elementwise op or a loop-carried
    value have the same orientation; reductions and expansions determine which."""

    def __init__(self, kernel: Kernel) -> None:
        self.sets = DisjointSets()
        self.vote: dict[Value, str] = {}
        self.fixed: dict[Value, str] = {}  # the result of a reduction lies as the tile does
        votes: list[tuple[Value, str]] = []
        for op in ir.walk(kernel.body):
            if op.kind == "reduce" and len(op.operands[0].shape) == 2:
                self.fixed[op.result] = ROW if op.attrs["axis"] == 1 else COLUMN
        for op in ir.walk(kernel.body):
            for a, b in same_elements(op):
                if len(a.shape) != 1 or len(b.shape) != 1:
                    continue
                votes += [(other, self.fixed[value]) for value, other in ((a, b), (b, a)) if value in self.fixed]
                if a not in self.fixed and b not in self.fixed:
                    self.sets.join(a, b)
        for op in ir.walk(kernel.body):
            if op.kind == "expand" and len(op.operands[0].shape) == 1:
                votes.append((op.operands[0], ROW if op.attrs["position"] == 1 else COLUMN))
        for value, orientation in votes:
            self.vote.setdefault(self.sets.find(value), orientation)

    def of(self, value: Value) -> str:
        return self.fixed.get(value) or self.vote.get(self.sets.find(value), COLUMN)


class LaneLayouts:
    """Layouts without matrices. A dot over lanes leaves its sums in a `LaneGridLayout`; other tiles have a
    `LaneLayout`. `possible` is False where a value would need two layouts."""

    def __init__(self, kernel: Kernel) -> None:
        self.sets = DisjointSets()
        self.seed: dict[Value, TileLayout] = {}
        self.possible = True
        for op in ir.walk(kernel.body):
            for a, b in same_elements(op):
                if a.shape and len(a.shape) == len(b.shape) and "expand" not in (a.kind, b.kind):
                    self.sets.join(a, b)
            if op.kind == "reduce" and op.result.shape:
                self.sets.join(op.operands[0], op.result)
        for op in ir.walk(kernel.body):
            if op.kind == "dot":
                self._seed_dot(op)
        for op in ir.walk(kernel.body):  # a vector that nothing else determines lies as the tile it is expanded to
            if op.kind == "expand" and len(op.operands[0].shape) == 1:
                layout = self.seed.get(self.sets.find(op.result))
                if layout is not None:
                    self.seed.setdefault(self.sets.find(op.operands[0]), layout)

    def _seed_dot(self, op: Op) -> None:
        a, b = op.operands
        right, transposed = untransposed(b)
        if 1 in b.shape:
            self.possible = False
        if transposed:
            rows = 1 << (op.result.shape[0] - 1).bit_length()
            self._seed(op.result, LaneGridLayout(rows=rows))
            self._seed(a, LaneLayout())
            self._seed(right, LaneLayout())
        else:
            self._seed(op.result, LaneLayout())
            self._seed(b, LaneLayout())

    def _seed(self, value: Value, layout: TileLayout) -> None:
        if self.seed.setdefault(self.sets.find(value), layout) != layout:
            self.possible = False

    def of(self, value: Value) -> TileLayout:
        return self.seed.get(self.sets.find(value), LaneLayout())


class Layouts:
    """The layout of every value under a distribution."""

    def __init__(self, kernel: Kernel, distribution: Distribution) -> None:
        rows, columns = distribution.row_simdgroups, distribution.column_simdgroups
        self.main: TileLayout = FragmentLayout(rows, columns) if distribution.engine == "matrix" else LaneLayout()
        self._lanes = LaneLayouts(kernel) if distribution.engine == "lanes" else None

    def of(self, value: Value) -> TileLayout:
        return self._lanes.of(value) if self._lanes is not None else self.main


def same_elements(op: Op) -> Iterator[tuple[Value, Value]]:
    """Yield the pairs of values that an op relates element by element."""
    if op.kind in ir.ELEMENTWISE or op.kind == "broadcast":
        for operand in op.operands:
            yield operand, op.result
    elif op.kind == "for":
        (block,) = op.blocks
        carried = zip(op.operands[2:], block.params[1:], block.terminator.operands, op.results, strict=True)
        for init, parameter, final, result in carried:  # a reduction may be first or last, but no parameter
            for other in (init, final, result):
                yield other, parameter
    elif op.kind == "if":
        for block in op.blocks:
            yield from zip(block.terminator.operands, op.results, strict=True)
