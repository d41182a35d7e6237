"""Dots on 8x8 simdgroup matrices."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import DeviceLimit
from ...ir import Op, Value
from ...ir.matchers import untransposed
from .exchange import Exchange
from .expressions import ZERO, ElementIndex, Expressions
from .layout import Loops, OrientedShape, TileLayout
from .matrix_operands import MatrixOperands
from .registers import Registers
from .staging import Staging, padded_shape
from .threadgroup import THREADGROUP_LIMIT, ThreadgroupMemory, ThreadgroupTile
from .writer import Writer, unrolled

STAGE_LIMIT = THREADGROUP_LIMIT - 1024  # leaves space for exchanges of the same statement
LONG = 256  # contractions of at least this length are summed in two halves, which loses fewer digits


@dataclass(frozen=True)
class Accumulators:
    """The matrices of a dot's sums: m x n elements under a name."""

    layout: TileLayout
    name: str
    m: int
    n: int

    @property
    def rows(self) -> int:
        return self.layout.rows_per_lane(self.m)

    @property
    def columns(self) -> int:
        return self.layout.columns_per_lane(self.n)[0]

    @property
    def loops(self) -> Loops:
        return [(v, count) for v, count in (("i", self.rows), ("j", self.columns)) if count > 1]

    @property
    def declaration(self) -> str:
        return f"simdgroup_float8x8 {self.name}{''.join(f'[{count}]' for _, count in self.loops)};"

    @property
    def matrix(self) -> str:
        """The matrix with loop indices i and j."""
        return self.name + "".join(f"[{v}]" for v, _ in self.loops)

    @property
    def element(self) -> str:
        """This lane's element that loops i, j and e over the result's registers refer to; one column has no loop."""
        return f"{self.matrix}.thread_elements()[{'e' if self.n > 1 else '0'}]"


@dataclass(frozen=True)
class MatrixContraction:
    """Part of a contraction: `count` matrices of k (`bound` at run time) from matrix `first` on. `left` and `right` are
    tiles with that part of an operand; None where the operand is read where it is."""

    count: int
    first: str = ""
    left: ThreadgroupTile | None = None
    right: ThreadgroupTile | None = None
    bound: str = ""


class MatrixDots:
    def __init__(
        self,
        staging: Staging,
        registers: Registers,
        exchange: Exchange,
        expressions: Expressions,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
    ) -> None:
        self.staging, self.registers, self.exchange = staging, registers, exchange
        self.expressions, self.writer, self.threadgroup = expressions, writer, threadgroup
        self.layout = expressions.layouts.main
        self.operands = MatrixOperands(staging.staged, registers, expressions)

    def dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        """Write result = addend + a @ b with float32 sums; `name` may hold the addend already."""
        a, b = (untransposed(operand)[0] for operand in op.operands)
        top, temporary = self.threadgroup.top, []
        for operand in (a, b):
            if operand in self.staging.staged and operand not in self.expressions.tiles:
                if self.staging.left_in_parts(operand) or (operand is b and not self._fits(operand)):
                    continue
                self.staging.fill(operand)
                temporary.append(operand)
        if self.staging.staged.distribution.fetch_ahead:
            self.staging.fetch_ahead(op)
        self.exchange.statement(lambda: self._dot(op, result, addend, name))
        for operand in temporary:
            del self.expressions.tiles[operand]
        if temporary:
            self.threadgroup.top = top

    def _fits(self, value: Value) -> bool:
        rows, columns = padded_shape(value)
        needed = rows * (columns * value.dtype.bytes + 16)
        return self.staging.staged.distribution.stage_early or self.threadgroup.top + needed <= STAGE_LIMIT

    def _dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        writer = self.writer
        writer.write_comment()
        (m, k), n = op.operands[0].shape, op.operands[1].shape[1]
        in_place = self.expressions.in_matrices(result)
        sums = Accumulators(self.layout, name if in_place else writer.name("sums"), m, n)
        if not in_place:
            writer.line(sums.declaration)
        self._initialise(sums, addend, result if in_place else None)
        right, _ = untransposed(op.operands[1])
        both = [sums]
        if k >= LONG and addend is None:
            both.append(Accumulators(self.layout, writer.name(f"{sums.name}_odd"), m, n))
            writer.line(both[1].declaration)
            self._initialise(both[1], None, None)
        if self.staging.left_in_parts(op.operands[0]):
            self._multiply_left_in_parts(op, both)
        elif right in self.staging.staged and right not in self.expressions.tiles:
            self._multiply_right_in_parts(op, sums, right)
        else:
            self._multiply(op, both, MatrixContraction(-(-k // 8)))
        if len(both) > 1:
            halves = f"{both[0].matrix}.thread_elements()[e] += {both[1].matrix}.thread_elements()[e];"
            writer.line(unrolled([*sums.loops, ("e", 2)]) + halves)
        if not in_place:
            self.registers.assign(result, name, lambda index: sums.element)
        writer.last = None

    def _initialise(self, sums: Accumulators, addend: Value | None, result: Value | None) -> None:
        """Start the sums from the addend or from zero. `result` is the value whose registers the sums are."""
        expressions = self.expressions
        if addend is None:
            zero = f"{sums.matrix} = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);"
            self.writer.line(unrolled(sums.loops) + zero)
            return
        if result is not None:
            axis = self.registers.axis(addend)
            self.registers.assign(result, sums.name, lambda index: expressions.at(addend, index, axis))
            return
        index = self.registers.index(self.layout, OrientedShape(max(sums.m, 2), max(sums.n, 2)))
        index = ElementIndex(index.row if sums.m > 1 else ZERO, index.column if sums.n > 1 else ZERO)
        expressions.tiles_read.clear()
        text = expressions.at(addend, index)
        self.registers.wait_for_tiles()
        self.writer.line(f"{unrolled([*sums.loops, ('e', 2)])}{sums.matrix}.thread_elements()[e] = {text};")

    # ---- multiplying -------------------------------------------------------------------------------------------------

    def _multiply(self, op: Op, sums: list[Accumulators], part: MatrixContraction) -> None:
        """Write sums += a @ b over a part of k; with two sums, the even and the odd matrices of k."""
        writer, a, b = self.writer, *op.operands
        self.expressions.tiles_read.clear()
        at = "kk" if not part.first else f"({part.first} + kk)"
        held = self.operands.held_matrices(a)
        by_row = not held and sums[0].rows > sums[0].columns  # the fewer matrices of the two are held
        row, column = ("[i]" if sums[0].rows > 1 else ""), ("[j]" if sums[0].columns > 1 else "")
        targets = ("left", f"right{column}") if by_row else (f"left{row}", "right")
        steps = []
        for n, target in enumerate(sums):
            k_matrix = at if n == 0 else f"({at} + 1)"
            in_part = "kk" if n == 0 else "(kk + 1)"
            left = self.operands.left(targets[0], a, in_part if part.left is not None else k_matrix, part.left)
            right = self.operands.right(targets[1], b, in_part if part.right is not None else k_matrix, part.right)
            steps.append((left, right, target))
        self.registers.wait_for_tiles()
        rolled = not held and self.operands.in_memory(op, part.left, part.right)
        limit = part.bound or str(part.count)
        step = f"kk += {len(sums)}" if len(sums) > 1 else "++kk"
        writer.open(f"{'' if rolled else 'UNROLL '}for (int kk = 0; kk < {limit}; {step})")
        several = [f"[{n}]" if n > 1 else "" for n in (sums[0].columns, sums[0].rows)]
        if not held:
            writer.line(f"simdgroup_{self.expressions.type(a)}8x8 left{'' if by_row else several[1]};")
        writer.line(f"simdgroup_{self.expressions.type(b)}8x8 right{several[0] if by_row else ''};")
        for n, (left, right, target) in enumerate(steps):
            beyond = n > 0 and (part.count % 2 == 1 or bool(part.bound))
            if beyond:
                writer.open(f"if (kk + 1 < {limit})")
            if by_row:
                self._step_by_row(left, right, target)
            else:
                self._step(left, right, target, held=bool(held))
            writer.close(beyond)
        writer.close()

    def _step(self, left: str, right: str, sums: Accumulators, *, held: bool) -> None:
        """Multiply one column of left matrices with one row of right matrices. `left` is the expression of a matrix
        that is held in registers, or else the line that loads one."""
        writer, rows = self.writer, sums.rows
        if not held:
            if rows > 1:
                writer.open_unrolled("i", rows)
            writer.line(left)
            writer.close(rows > 1)
        opened = self._open_columns(sums)
        writer.line(right)
        matrix = left if held else "left[i]" if rows > 1 else "left"
        line = f"simdgroup_multiply_accumulate({sums.matrix}, {matrix}, right, {sums.matrix});"
        writer.line(unrolled([("i", rows)] if rows > 1 else []) + line)
        writer.close(opened)

    def _step_by_row(self, left: str, right: str, sums: Accumulators) -> None:
        """The same for more rows than columns: the right matrices are held, and the left ones loaded one by one."""
        writer = self.writer
        opened = self._open_columns(sums)
        writer.line(right)
        writer.close(opened)
        writer.open_unrolled("i", sums.rows)
        writer.line(left)
        opened = self._open_columns(sums)
        matrix = "right[j]" if sums.columns > 1 else "right"
        writer.line(f"simdgroup_multiply_accumulate({sums.matrix}, left, {matrix}, {sums.matrix});")
        writer.close(opened + 1)

    def _open_columns(self, sums: Accumulators) -> int:
        """Open the loop over the columns of a simdgroup, which may have one less than others; return the braces."""
        if sums.columns > 1:
            self.writer.open_unrolled("j", sums.columns)
        over = self.layout.column_simdgroups
        uneven = sums.n > 1 and over > 1 and -(-sums.n // 8) % over != 0  # all lanes hold a single column
        if uneven:
            self.writer.open(f"if ({self.operands.first_column(sums.n)} < {sums.n})")
        return uneven + (sums.columns > 1)

    def _multiply_left_in_parts(self, op: Op, sums: list[Accumulators]) -> None:
        """Stage parts of the left operand's columns, as few as fit and all alike."""
        threadgroup, left = self.threadgroup, op.operands[0]
        rows, depth = padded_shape(left)
        per_k, fixed = rows * left.dtype.bytes, 16 * rows
        most = self._most_columns(per_k, fixed)
        parts = -(-depth // most)
        step = -(-depth // (16 * parts)) * 16 if most >= 16 else most
        top, sides = threadgroup.top, (rows, step)
        tile = self.staging.allocate(left, *sides)
        rolled = self.operands.in_memory(op, tile, None)
        self._open_part(left, tile, sides, ("", "k0"), rolled=rolled)
        self._multiply(op, sums, MatrixContraction(step // 8, "k0 / 8", left=tile, bound=_matrices(step, depth)))
        self.writer.close()
        threadgroup.top = top

    def _multiply_right_in_parts(self, op: Op, sums: Accumulators, right: Value) -> None:
        """Stage as much of k of the right operand at a time as fits."""
        threadgroup = self.threadgroup
        if not self.staging.staged.distribution.in_parts:
            raise DeviceLimit(f"{threadgroup.kernel} has a right operand that is larger than threadgroup memory")
        _, transposed = untransposed(op.operands[1])
        rows, columns = padded_shape(right)
        depth, width = (columns, rows) if transposed else (rows, columns)
        size = right.dtype.bytes
        per_k, fixed = (width * size, 16 * width) if transposed else (width * size + 16, 0)
        step = self._most_columns(per_k, fixed)
        top = threadgroup.top
        sides = (width, step) if transposed else (step, width)
        tile = self.staging.allocate(right, *sides)
        rolled = self.operands.staged_whole(untransposed(op.operands[0])[0])
        self._open_part(right, tile, sides, ("", "k0") if transposed else ("k0", ""), rolled=rolled)
        self._multiply(op, [sums], MatrixContraction(step // 8, "k0 / 8", right=tile, bound=_matrices(step, depth)))
        self.writer.close()
        threadgroup.top = top

    def _most_columns(self, per_k: int, fixed: int) -> int:
        """Return how much of k fits in threadgroup memory, in whole matrices."""
        threadgroup = self.threadgroup
        step = (STAGE_LIMIT - threadgroup.top - fixed) // (8 * per_k) * 8
        if step < 8:
            needed = threadgroup.top + 8 * per_k + fixed
            raise DeviceLimit(f"{threadgroup.kernel} needs {needed} bytes of threadgroup memory; use smaller blocks")
        return step

    def _open_part(
        self, value: Value, tile: ThreadgroupTile, sides: tuple[int, int], first: tuple[str, str], *, rolled: bool
    ) -> None:
        """Open the loop over parts from column (or row) k0 on, and fill the tile with one."""
        rows, columns = padded_shape(value)
        depth, step = (columns, sides[1]) if first[1] else (rows, sides[0])
        self.writer.open(f"{'' if rolled else 'UNROLL '}for (int k0 = 0; k0 < {depth}; k0 += {step})")
        self.threadgroup.note_read(tile)  # by the iteration before
        self.staging.copy_elements(value, tile, *sides, first)
        self.threadgroup.before_read(tile)


def _matrices(step: int, depth: int) -> str:
    """Return the matrices of k in the part that begins at k0, which may be the last."""
    return f"min({step // 8}, ({depth} - k0) / 8)" if depth % step else ""
