"""Reduces and products: the statements in which lanes work together."""

from __future__ import annotations

from ...ir import Op, Value
from .layout import COLUMN, ROW, Shape
from .points import Point
from .registers import Registers
from .words import folded, identity, type_of

STAGE_LIMIT = 24 << 10  # leaves room for what else a statement exchanges


class Folds(Registers):
    # ---- reduce ------------------------------------------------------------------------------------------------------

    def reduce(self, op: Op) -> None:
        operand, result = op.operands[0], op.result
        name = self.declare(result)
        self.statement(lambda: self._reduce(op, operand, result, name))
        self.elements.names[result] = name

    def _reduce(self, op: Op, operand: Value, result: Value, name: str) -> None:
        shape = self._operand_shape(op, operand, result)
        rank = len(operand.shape)
        along = COLUMN if rank == 2 and op.attrs["axis"] == 1 else ROW  # which coordinate goes
        if rank == 1:
            along = self.axis(operand)
        if (shape.columns if along == COLUMN else shape.rows) == 1:
            self.assign(name, shape, lambda p: self.elements.at(operand, p, self.axis(operand)))
            return
        fold, dtype = op.attrs["fold"], operand.dtype
        kept = Shape(rows=shape.rows) if along == COLUMN else Shape(columns=shape.columns)
        nothing = identity(fold, dtype)
        self.assign(name, kept, lambda p: nothing)
        point, opened = self.loops(shape)
        target = name + ("[i]" if kept.rows > 1 else "") + ("[j]" if kept.columns > 1 else "")
        text = self.elements.at(operand, point, self.axis(operand))
        gone = Shape(columns=shape.columns) if along == COLUMN else Shape(rows=shape.rows)
        tests = self.inside(gone, point)
        if tests:
            text = f"({' && '.join(tests)} ? {text} : {nothing})"
        self.line(f"{target} = {folded(fold, dtype, target, text)};")
        for _ in range(opened):
            self.close()
        self._across_lanes(name, kept, along, fold, op)

    def _operand_shape(self, op: Op, operand: Value, result: Value) -> Shape:
        if len(operand.shape) == 2:
            return Shape(*operand.shape)
        return self.elements.shape(operand)

    def _across_lanes(self, name: str, kept: Shape, along: str, fold: str, op: Op) -> None:
        dtype = op.operands[0].dtype
        masks = self.family.along_row if along == COLUMN else self.family.along_column
        target = name + ("[i]" if kept.rows > 1 else "") + ("[j]" if kept.columns > 1 else "")
        if masks:
            self.elements.helpers.add("shuffled")
            _, opened = self.loops(kept)
            for mask in masks:
                self.line(f"{target} = {folded(fold, dtype, target, f'shuffled({target}, {mask})')};")
            for _ in range(opened):
                self.close()
        if along == ROW and self.family.simdgroups > 1:
            self._across_simdgroups(name, kept, fold, op)

    def _across_simdgroups(self, name: str, kept: Shape, fold: str, op: Op) -> None:
        """Each simdgroup has folded its own rows; the results meet in threadgroup memory."""
        dtype, kind = op.operands[0].dtype, type_of(op.operands[0])
        groups = self.family.simdgroups
        start, end = self.take(groups * kept.columns * dtype.bytes, "a fold over the rows of a tile")
        target = name + ("[j]" if kept.columns > 1 else "")
        self.open("")
        self.line(f"threadgroup {kind} *parts = (threadgroup {kind} *)(room + {start // 16});")
        self.settle(start, end)
        point, opened = self.loops(kept)
        tests = [*self.inside(kept, point), "fm == 0"] + (["fn == 0"] if kept.columns == 1 else [])
        self.line(f"if ({' && '.join(tests)}) parts[sg * {kept.columns} + {point.column}] = {target};")
        for _ in range(opened):
            self.close()
        self.barrier()
        self.unsettled.append((start, end))
        point, opened = self.loops(kept)
        tests = self.inside(kept, point)
        if tests:
            self.open(f"if ({' && '.join(tests)})")
        self.line(f"{target} = parts[{point.column}];")
        self.open(f"for (int s = 1; s < {groups}; ++s)")
        self.line(f"{target} = {folded(fold, dtype, target, f'parts[s * {kept.columns} + {point.column}]')};")
        for _ in range(1 + bool(tests) + opened):
            self.close()
        self.close()

    # ---- dot ---------------------------------------------------------------------------------------------------------

    def dot(self, op: Op, result: Value, addend: Value | None) -> None:
        """result = addend + a b. The sums are 8x8 matrices; a comes from this simdgroup's own rows, b from threadgroup
        memory when several simdgroups read it."""
        name = self.declare(result)
        self.statement(lambda: self._dot(op, result, addend, name))
        self.elements.names[result] = name

    def _dot(self, op: Op, result: Value, addend: Value | None, name: str) -> None:
        a, b = op.operands
        (m, k), n = a.shape, b.shape[1]
        rows, squares = self.family.rows_held(m), -(-n // 8)
        self.open("")
        self.line(f"simdgroup_float8x8 sums[{rows}][{squares}];")
        self.unrolled("i", rows)
        self.unrolled("j", 2 * squares)
        point = self._point(m, n)
        first = "0.0f" if addend is None else self.elements.at(addend, point, self.axis(addend))
        self.line(f"sums[i][j / 2].thread_elements()[j % 2] = {first};")
        self.close()
        self.close()
        if self.family.simdgroups == 1:
            self._multiply(a, b, rows, squares, f"{-(-k // 8)}", "", None)
        else:
            self._staged(a, b, rows, squares)
        shape = self.elements.shape(result)
        i, j = "i" if shape.rows > 1 else "0", "j" if shape.columns > 1 else "0"
        self.assign(name, shape, lambda p: f"sums[{i}][{j} / 2].thread_elements()[{j} % 2]")
        self.close()

    def _point(self, rows: int, columns: int, i: str = "i", j: str = "j") -> Point:
        """The point of registers (i, j); a side of 1 is the same everywhere."""
        row = f"({self.family.row(i)})" if rows > 1 else "0"
        column = f"({self.family.column(j)})" if columns > 1 else "0"
        return Point(row, column, i if rows > 1 else "0", j if columns > 1 else "0")

    def _multiply(
        self, a: Value, b: Value, rows: int, squares: int, count: str, base: str, staged: tuple[str, int, bool] | None
    ) -> None:
        """sums += a b over `count` squares of k, from square `base` on."""
        (m, k), n, kind = a.shape, b.shape[1], type_of(a)
        self.open(f"{'UNROLL ' if count.isdigit() else ''}for (int kk = 0; kk < {count}; ++kk)")
        at = f"({base} + kk)" if base else "kk"
        self.line(f"simdgroup_matrix<{kind}, 8, 8> left[{rows}], right;")
        self.unrolled("i", rows)
        self.unrolled("e", 2)
        # A single k is not spread over lanes: only the first column of the square has it.
        column = f"({at} * 8 + fn + e)"
        point = Point(
            f"({self.family.row('i')})" if m > 1 else "0",
            column if k > 1 else "0",
            "i" if m > 1 else "0",
            f"({at} * 2 + e)" if k > 1 else "0",
        )
        text = self.elements.at(a, point)
        tests = [f"{column} < {k}"] if k % 8 else []
        self.line(f"left[i].thread_elements()[e] = {f'{tests[0]} ? {text} : {kind}(0)' if tests else text};")
        self.close()
        self.close()
        self.unrolled("j", squares)
        if staged is None:
            self.unrolled("e", 2)
            row, column = f"({at} * 8 + fm)", "(j * 8 + fn + e)"
            point = Point(
                row if k > 1 else "0", column if n > 1 else "0", at if k > 1 else "0", "(j * 2 + e)" if n > 1 else "0"
            )
            tests = ([f"{row} < {k}"] if k % 8 else []) + ([f"{column} < {n}"] if n % 8 and n > 1 else [])
            text = self.elements.at(b, point)
            value = f"{' && '.join(tests)} ? {text} : {kind}(0)" if tests else text
            self.line(f"right.thread_elements()[e] = {value};")
            self.close()
        else:
            room, width, turned = staged
            place = f"{room} + j * {8 * width} + kk * 8" if turned else f"{room} + kk * {8 * width} + j * 8"
            self.line(f"simdgroup_load(right, {place}, {width}, ulong2(0), {'true' if turned else 'false'});")
        self.unrolled("i", rows)
        self.line("simdgroup_multiply_accumulate(sums[i][j], left[i], right, sums[i][j]);")
        self.close()
        self.close()
        self.close()

    def _staged(self, a: Value, b: Value, rows: int, squares: int) -> None:
        """Puts b into threadgroup memory, as much of k at a time as fits; rows are padded by 16 bytes."""
        k, n = b.shape
        kind, size = type_of(b), b.dtype.bytes
        turned = b.kind == "trans"
        wide, pad = 8 * squares, 16 // size
        depth = -(-k // 8) * 8
        per = wide * size if turned else (wide + pad) * size
        most = (STAGE_LIMIT - (self.room_used - self.room_base) - (wide * pad * size if turned else 0)) // (8 * per) * 8
        step = max(8, min(depth, most))
        width = step + pad if turned else wide + pad
        start, end = self.take((wide if turned else step) * width * size, "an operand of dot")
        room, threads = "stage", 32 * self.family.simdgroups
        self.line(f"threadgroup {kind} *stage = (threadgroup {kind} *)(room + {start // 16});")
        whole = step >= depth
        if not whole:
            self.open(f"for (int k0 = 0; k0 < {depth}; k0 += {step})")
            self.unsettled.append((start, end))  # by the turn before
        self.settle(start, end)
        self.open(f"for (int e = sg * 32 + lane; e < {wide * step}; e += {threads})")
        first, second = f"e / {step if turned else wide}", f"e % {step if turned else wide}"
        inner = second if turned else first
        self.line(f"const int kx = {inner}{'' if whole else ' + k0'}, nx = {first if turned else second};")
        tests = ([f"kx < {k}"] if k % 8 or (not whole and depth % step) else []) + ([f"nx < {n}"] if n % 8 else [])
        text = self.elements.at(b, Point("kx" if k > 1 else "0", "nx" if n > 1 else "0"))
        if n == 1:
            tests = [t for t in tests if not t.startswith("nx")]
        value = f"{' && '.join(tests)} ? {text} : {kind}(0)" if tests else text
        self.line(f"stage[{first} * {width} + {second}] = {value};")
        self.close()
        self.barrier()
        self.unsettled.append((start, end))
        count = f"{step // 8}" if whole or depth % step == 0 else f"min({step // 8}, ({depth} - k0) / 8)"
        self._multiply(a, b, rows, squares, count, "" if whole else "k0 / 8", (room, width, turned))
        if not whole:
            self.close()
