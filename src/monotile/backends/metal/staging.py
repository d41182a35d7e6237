"""Operands of products in threadgroup memory: which of them, and how they get there."""

from __future__ import annotations

from ... import ir
from ...ir import Block, Kernel, Op, Value
from .assign import Plan
from .layout import COLUMN, Shape, plus
from .msl import type_of
from .points import Coordinate, Point, Room, bare
from .reductions import Folds

REGISTERS = 96  # of a lane, for tiles; beyond it an operand that a loop does not change waits in threadgroup memory


def base(operand: Value) -> Value:
    """The tile an operand of a product is, or is the transpose of."""
    return operand.op.operands[0] if operand.kind == "trans" and operand.op is not None else operand


class Staging(Folds):
    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        super().__init__(kernel, plan)
        self.staged: dict[Value, Op] = {}  # values that live in threadgroup memory, with the product that reads them
        self.uses_tid = False
        self.waiting: list[Value] = []  # those of the blocks being written that are not there yet
        if plan.engine == "matrix" and self.family.simdgroups > 1:
            for op in ir.walk(kernel.body):
                if op.kind == "dot":
                    self._choose(op)

    def _choose(self, op: Op) -> None:
        """What several simdgroups read is staged: the right operand when they share out rows, the left one when they
        share out columns. Loop-invariant rows of the left one too, where registers are few."""
        a, b = op.operands
        if self.family.rows_over > 1:
            self._stage(b, op)
            invariant = a.op is not None and a.kind == "load" and self.homes[a.op] is not self.homes[op]
            if invariant and self._registers(a) > REGISTERS:
                self._stage(a, op)
        else:
            self._stage(a, op)

    def _stage(self, operand: Value, op: Op) -> None:
        value = base(operand)
        if min(value.shape) > 1 and not self._written(value):
            self.staged.setdefault(value, op)

    def _written(self, value: Value) -> bool:
        """Whether a value reads a tensor that the kernel writes: then it is read where it stands."""
        op = value.op
        return op is not None and op.kind in ir.MEMORY and op.attrs["tensor"].index in self.kernel.written

    def _registers(self, left: Value) -> float:
        """Registers of a lane, about: what loops carry, the largest product besides, and the left operand."""
        lanes, bodies = 32 * self.family.simdgroups, [op for op in ir.walk(self.kernel.body) if op.kind == "for"]
        carried = max((sum(_elements(v) for v in op.results) for op in bodies), default=0)
        kept = {v for op in bodies for v in op.blocks[0].terminator.operands}
        dots = [op.result for op in ir.walk(self.kernel.body) if op.kind == "dot"]
        fused = {op.result for op in ir.walk(self.kernel.body) for v in op.operands if v in dots and op.result in kept}
        others = [_elements(d) for d in dots if not any(r in fused for o in self.readers.get(d, []) for r in o.results)]
        return (carried + max(others, default=0)) / lanes + _elements(left) / lanes * left.dtype.bytes / 4

    # ---- filling -----------------------------------------------------------------------------------------------------

    def expect(self, block: Block) -> list[Value]:
        """The staged values of a block that are filled as soon as what they are made of is known."""
        made = [op.result for op in block.ops if len(op.results) == 1 and op.result in self.staged]
        return [v for v in made if self.plan.early or self.homes[self.staged[v]] is not block]

    def fill_ready(self) -> None:
        for value in list(self.waiting):
            if self._known(value, first=True):
                self.waiting.remove(value)
                self.fill(value)

    def _known(self, value: Value, first: bool = False) -> bool:
        elements = self.elements
        if value in elements.names or value in elements.rooms:
            return True
        if value.op is None or (value not in elements.inlined and not first and value.op.kind not in ("const", "dim")):
            return False
        if value.op.kind in ("reduce", "dot") and value not in elements.inlined:
            return False
        return all(self._known(v) for v in value.op.operands)

    def fill(self, value: Value) -> None:
        """Puts a tile into threadgroup memory: rows padded by 16 bytes, sides filled up to squares with zeros."""
        rows, columns = squares(value)
        self._slices(value)
        room = self.room_for(value, rows, columns)
        if self._computed(value):
            self.statement(lambda: self._fill_from_registers(value, room, rows, columns))
        else:
            self.statement(lambda: self.fill_from_memory(value, room, rows, columns))
        self.elements.rooms[value] = room

    def room_for(self, value: Value, rows: int, columns: int) -> Room:
        size, op = value.dtype.bytes, value.op
        of_tensor = op.attrs["tensor"].name if op is not None and op.kind == "load" else ""
        hint = value.hint or of_tensor or self._made_of(value)
        return self.take(
            self.elements.memory_type(value.dtype),
            size,
            rows,
            columns + 16 // size,
            f"{hint}_tile",
            "an operand of dot",
        )

    def _slices(self, value: Value) -> None:
        """Pointers to what a value is loaded from, if they are not there yet."""
        if value.op is not None and value not in self.elements.names and value not in self.elements.rooms:
            for operand in value.op.operands:
                self._slices(operand)
            if value.op.kind == "load":
                self.slice(value.op)

    def slice(self, op: Op) -> None:
        """The pointer to a tile's first element, and whether the tile is in the tensor at all."""
        elements, tensor = self.elements, op.attrs["tensor"]
        if not op.result.shape or op in elements.slices:
            return
        offset, tests = elements.start(op, op.operands)
        text = elements.tensors[tensor.index]
        there = ""
        if tests:
            there = self.name(f"{text.name}_there")
            self.line(f"const bool {there} = {' && '.join(tests)};")
        pointer = text.name
        if offset:
            pointer = self.name(f"{text.name}_at")
            constness = "" if tensor.index in self.kernel.written else "const "
            self.line(f"device {constness}{elements.memory_type(tensor.dtype)} *{pointer} = {text.name} + {offset};")
        elements.slices[op] = (pointer, there)

    def _made_of(self, value: Value) -> str:
        return next((v.hint for v in (value.op.operands if value.op else ()) if v.hint), "part")

    def _computed(self, value: Value) -> bool:
        """Whether registers of tiles take part; else any thread can make any element."""
        stack = [value]
        while stack:
            v = stack.pop()
            if v in self.elements.names and len(v.shape) == 2 and min(v.shape) > 1:
                return True
            if v not in self.elements.names and v not in self.elements.rooms and v.op is not None:
                stack += v.op.operands
        return False

    def _fill_from_registers(self, value: Value, room: Room, rows: int, columns: int) -> None:
        """Each lane writes what it holds, two neighbours at a time."""
        family, shape, kind = self.family, Shape(*value.shape), type_of(value)

        def body(point: Point) -> list[str]:
            index = (*(point.column.index or ())[:-1], "1")
            second = Coordinate(family.column(index, shape.columns), family, COLUMN, index)
            texts = []
            for column in (point.column, second):
                text = bare(self.elements.at(value, Point(point.row, column)))
                tests = self.inside(family, shape, Point(point.row, column))
                texts.append(f"{' && '.join(tests)} ? {text} : {kind}(0)" if tests else text)
            tests = [f"{point.row.text} < {rows}"] if family.row_padded(rows) else []
            tests += [f"{point.column.text} < {columns}"] if family.column_padded(columns) else []
            place = f"{room.name} + ({point.row.text}) * {room.width} + {point.column.text}"
            line = f"*(threadgroup {kind}2 *)({place}) = {kind}2({', '.join(texts)});"
            if self.elements.memory_type(value.dtype) != kind:
                low, high = (self.elements.kept(text, value.dtype) for text in texts)
                line = f"{{ *({place}) = {low}; *({place} + 1) = {high}; }}"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.will_write(room)
        self.nest(family, shape, body, run=2)

    def fill_from_memory(
        self, value: Value, room: Room, rows: int, columns: int, row0: str = "", column0: str = ""
    ) -> None:
        """All threads together, several neighbours at a time, from row `row0` and column `column0` of the value on."""
        elements, kind = self.elements, type_of(value)
        elements.touched.clear()
        point = Point(Coordinate(plus("r", row0 or "0")), Coordinate(plus("c", column0 or "0")))
        run, text = 1, None
        for run in (4, 2):
            text = elements.vector(value, point, run) if value.shape[1] % run == 0 else None
            if text is not None:
                break
        if text is None:
            run, text = 1, elements.at(value, point)
        tests = [f"{point.row.text} < {value.shape[0]}"] if row0 or value.shape[0] % 8 else []
        tests += [f"{point.column.text} < {value.shape[1]}"] if column0 or value.shape[1] % 8 else []
        zero = f"{kind}{run}({kind}(0))" if run > 1 else f"{kind}(0)"
        text = f"{' && '.join(tests)} ? {bare(text)} : {zero}" if tests else bare(text)
        self.settle()
        self.will_write(room)
        per = columns // run
        self.uses_tid = True
        self.open(f"for (int e = tid; e < {rows * per}; e += {32 * self.family.simdgroups})")
        self.line(f"const int r = e / {per}, c = e % {per}{f' * {run}' if run > 1 else ''};")
        place = f"{room.name} + r * {room.width} + c"
        target = f"*(threadgroup {kind}{run} *)({place})" if run > 1 else f"{room.name}[r * {room.width} + c]"
        self.line(f"{target} = {elements.kept(text, value.dtype)};")
        self.close()


def squares(value: Value) -> tuple[int, int]:
    """The sides of a tile, filled up to whole 8x8 matrices."""
    rows, columns = (-(-n // 8) * 8 for n in value.shape)
    return rows, columns


def _elements(value: Value) -> int:
    count = 1
    for side in value.shape:
        count *= side
    return count
