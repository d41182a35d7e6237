"""Reduces: registers first, then the lanes that hold the same row or column, then simdgroups."""

from __future__ import annotations

from ...dtypes import DType
from ...ir import Op, Value
from .layout import COLUMN, ROW, Family, Shape, Spread
from .msl import folded, identity
from .points import Coordinate, Point, bare
from .registers import Registers


class Folds(Registers):
    def reduce(self, op: Op) -> None:
        operand, result = op.operands[0], op.result
        name = self.declare(result)
        self.statement(lambda: self._reduce(op, operand, result, name))
        self.elements.names[result] = name

    def _reduce(self, op: Op, operand: Value, result: Value, name: str) -> None:
        elements, family = self.elements, self.elements.families.of(operand)
        shape = elements.shape(operand)
        along = COLUMN if len(operand.shape) == 2 and op.attrs["axis"] == 1 else ROW  # which coordinate goes
        if len(operand.shape) == 1:
            along = self.axis(operand)
        if (shape.columns if along == COLUMN else shape.rows) == 1:
            self.assign(result, name, lambda p: elements.at(operand, p, self.axis(operand)))
            return
        kept = Shape(rows=shape.rows) if along == COLUMN else Shape(columns=shape.columns)
        gone = Shape(columns=shape.columns) if along == COLUMN else Shape(rows=shape.rows)
        if along == COLUMN:
            self._fold_columns(op, name, family, kept, gone)
        else:
            self._fold_rows(op, name, family, kept, gone)
        groups = family.columns_over if along == COLUMN else family.rows_over
        if groups > 1:
            self._across_simdgroups(op, name, family, kept, along, groups)

    def _element(self, op: Op, family: Family, gone: Shape, point: Point) -> str:
        operand, dtype = op.operands[0], op.operands[0].dtype
        text = self.elements.at(operand, point, self.axis(operand))
        tests = self.inside(family, gone, point)
        return f"({' && '.join(tests)} ? {text} : {identity(op.attrs['fold'], dtype)})" if tests else text

    def _fold_columns(self, op: Op, name: str, family: Family, kept: Shape, gone: Shape) -> None:
        """Row by row: the columns this lane holds, then those of its neighbours."""

        def body(row: Point) -> list[str]:
            if isinstance(family, Spread):
                return self._fold(
                    op, self._target(op, name, row), self._halved(op, family, gone, row), [], family.along_row
                )
            text = self._element(op, family, gone, Point(row.row, self.point(family, gone).column))
            return self._fold(
                op, self._target(op, name, row), text, family.column_loops(gone.columns), family.along_row
            )

        self.nest(family, kept, body)

    def _halved(self, op: Op, family: Spread, gone: Shape, row: Point) -> str:
        """The fold of a lane's columns, half with half: then lanes and registers are folded in the same order however
        many rows share the lanes, and a row's sum does not depend on the others."""
        texts = []
        for n in range(family.columns_held(gone.columns)[0]):
            column = Coordinate(family.column((str(n),), gone.columns), family, COLUMN, (str(n),))
            texts.append(self._element(op, family, gone, Point(row.row, column)))
        while len(texts) > 1:
            half = (len(texts) + 1) // 2
            pairs = zip(texts, texts[half:], strict=False)
            folds = [folded(op.attrs["fold"], op.operands[0].dtype, a, b) for a, b in pairs]
            texts = folds + texts[len(folds) : half]
        return texts[0]

    def _fold_rows(self, op: Op, name: str, family: Family, kept: Shape, gone: Shape) -> None:
        def body(column: Point) -> list[str]:
            text = self._element(op, family, gone, Point(self.point(family, gone).row, column.column))
            loops = [("i", family.rows_held(gone.rows))]
            return self._fold(op, self._target(op, name, column), text, loops, family.along_column)

        self.nest(family, kept, body)

    def _fold(self, op: Op, target: str, text: str, loops: list[tuple[str, int]], masks: tuple[int, ...]) -> list[str]:
        fold, dtype = op.attrs["fold"], op.operands[0].dtype
        if not loops:
            lines = [f"{target} = {bare(text)};"]
        else:
            lines = self._looped(fold, dtype, target, text, loops)
        if masks:
            self.elements.helpers.add("shuffled")
        return lines + [f"{target} = {bare(folded(fold, dtype, target, f'shuffled({target}, {m})'))};" for m in masks]

    def _looped(self, fold: str, dtype: DType, target: str, text: str, loops: list[tuple[str, int]]) -> list[str]:
        lines, depth = [f"{target} = {identity(fold, dtype)};"], 0
        for variable, count in loops:
            if count > 1:
                lines.append("  " * depth + f"UNROLL for (int {variable} = 0; {variable} < {count}; ++{variable})")
                depth += 1
        return [*lines, "  " * depth + f"{target} = {bare(folded(fold, dtype, target, text))};"]

    def _target(self, op: Op, name: str, point: Point) -> str:
        return self.elements.reference(op.result, name, point.row.index or (), point.column.index or ())

    def _across_simdgroups(self, op: Op, name: str, family: Family, kept: Shape, along: str, groups: int) -> None:
        """Each simdgroup has folded what it holds; the results meet in threadgroup memory."""
        fold, dtype = op.attrs["fold"], op.operands[0].dtype
        kind, keep, fetch = self.elements.memory_type(dtype), self.elements.kept, self.elements.fetched
        side = kept.rows * kept.columns
        room = self.take(kind, dtype.bytes, groups, side, f"{name}_parts", "a fold over simdgroups")
        self.will_write(room)
        mine = ["fn % 8 == 0"] if along == COLUMN or kept.columns == 1 else []
        mine += ["fm % 8 == 0"] if along == ROW or kept.rows == 1 else []

        def put(point: Point) -> list[str]:
            at = point.row.text if along == COLUMN else point.column.text
            tests = [*self.inside(family, kept, point), *mine]
            place = f"sg * {side} + {at}" if side > 1 else "sg"
            return [f"if ({' && '.join(tests)}) {room.name}[{place}] = {keep(self._target(op, name, point), dtype)};"]

        self.nest(family, kept, put)
        self.last = None
        self.will_read(room)

        def get(point: Point) -> list[str]:
            at = point.row.text if along == COLUMN else point.column.text
            tests = self.inside(family, kept, point)
            target = self._target(op, name, point)
            parts = [fetch(f"{room.name}[{f'{s * side} + {at}' if s else at}]", dtype) for s in range(groups)]
            text = parts[0]
            for part in parts[1:]:
                text = folded(fold, dtype, text, part)
            return [(f"if ({' && '.join(tests)}) " if tests else "") + f"{target} = {bare(text)};"]

        self.nest(family, kept, get)
