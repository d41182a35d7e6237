"""Staging: which operands of dots are copied to threadgroup memory, when, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import ir
from ...ir import Block, Op, Value
from ...ir.matchers import untransposed
from .analysis import STREAMED, Analysis, covers
from .dialect import bare
from .distribution import Distribution
from .exchange import Exchange
from .expressions import Coordinate, ElementIndex, Expressions, Slice
from .layout import OrientedShape, plus
from .registers import Registers
from .threadgroup import ThreadgroupMemory, ThreadgroupTile
from .writer import Writer

# Registers of a lane for tiles. Beyond it, a left operand that a loop does not change is staged instead.
REGISTERS = 100
FETCHED = 16  # registers of a lane for a tile on its way from device to threadgroup memory
LOAD_BYTES = 16  # that a thread copies at a time


class StagedOperands:
    """Chooses the operands that several simdgroups read, with the first dot that reads each."""

    def __init__(self, analysis: Analysis, distribution: Distribution) -> None:
        self.analysis, self.distribution = analysis, distribution
        self.simdgroups = distribution.row_simdgroups * distribution.column_simdgroups
        self.dots: dict[Value, Op] = {}
        if distribution.engine == "matrix" and self.simdgroups > 1:
            dots = [op for op in ir.walk(analysis.kernel.body) if op.kind == "dot"]
            for op in dots:
                self._choose(op, dots)

    def __contains__(self, value: object) -> bool:
        return value in self.dots

    def computed_in_place(self, value: Value) -> bool:
        """True for a staged value without registers: its elements are computed where they are copied."""
        return value in self.dots and not has_statement(value)

    def _choose(self, op: Op, dots: list[Op]) -> None:
        """Stage the right operand if rows are distributed over simdgroups, and the left one if columns are. Stage a
        loop-invariant left operand too where registers are short, and a right one that holds that of another dot."""
        a, b = op.operands
        if self.distribution.row_simdgroups > 1:
            if not self._held_by_another(b):
                self._stage(b, op)
            invariant = a.op is not None and a.kind == "load" and not self.same_block(a, op)
            if invariant and self._registers_with(a) > REGISTERS:
                self._stage(a, op)
        else:
            self._stage(a, op)
            if self.distribution.share_right and any(self._shares(b, dot) for dot in dots if dot is not op):
                self._stage(b, op)

    def _shares(self, right: Value, dot: Op) -> bool:
        """True if another dot of the same block reads memory that a right operand holds."""
        value = untransposed(right)[0]
        loads = self._loads(dot.operands[1])
        return any(covers(value, load) and self.same_block(value, dot) for load in loads)

    def _loads(self, value: Value) -> list[Value]:
        """Return the loads of which a right operand is made, where they have no registers."""
        if value.kind == "load" or value.op is None:
            return [value]
        inlined = value in self.analysis.inlined and value.kind in STREAMED
        return [load for operand in value.op.operands for load in self._loads(operand)] if inlined else []

    def _held_by_another(self, right: Value) -> bool:
        """True if a staged tile holds a right operand as its first columns."""
        value = untransposed(right)[0]
        early = self.distribution.stage_early
        return early and any(other is not value and covers(other, value) for other in self.dots)

    def same_block(self, value: Value, op: Op) -> bool:
        return value.op is not None and self.analysis.block_of[value.op] is self.analysis.block_of[op]

    def _stage(self, operand: Value, op: Op) -> None:
        value, _ = untransposed(operand)
        if min(value.shape) > 1 and not self.analysis.reads_written_tensor(value):
            self.dots.setdefault(value, op)

    def _registers_with(self, left: Value) -> float:
        """Estimate the registers of a lane: the loop-carried state, the largest other dot, the largest tile that is
        loaded into registers, and the left operand."""
        body, lanes = self.analysis.kernel.body, 32 * self.simdgroups
        loops = [op for op in ir.walk(body) if op.kind == "for"]
        carried = max((sum(math.prod(v.shape) for v in op.results) for op in loops), default=0)
        yielded = {v for op in ir.walk(body) for block in op.blocks for v in block.terminator.operands}
        dots = [op.result for op in ir.walk(body) if op.kind == "dot"]
        summed = {result for op in ir.walk(body) if any(v in dots for v in op.operands) for result in op.results}
        accumulated = summed & yielded
        readers = self.analysis.readers
        others = [
            math.prod(dot.shape)
            for dot in dots
            if not any(result in accumulated for reader in readers.get(dot, []) for result in reader.results)
        ]
        inlined = self.analysis.inlined
        loads = [op.result for op in ir.walk(body) if op.kind in ("load", "gather") and op.result is not left]
        loads = [value for value in loads if value not in inlined]
        loaded = max((math.prod(v.shape) * max(v.dtype.bytes, 2) / 4 for v in loads if len(v.shape) == 2), default=0)
        return (carried + max(others, default=0) + loaded) / lanes + math.prod(
            left.shape
        ) / lanes * left.dtype.bytes / 4


class Staging:
    """Fills threadgroup memory with staged operands."""

    def __init__(
        self,
        staged: StagedOperands,
        registers: Registers,
        exchange: Exchange,
        expressions: Expressions,
        writer: Writer,
        threadgroup: ThreadgroupMemory,
    ) -> None:
        self.staged, self.analysis = staged, staged.analysis
        self.registers, self.exchange, self.expressions = registers, exchange, expressions
        self.writer, self.threadgroup = writer, threadgroup
        self.uses_thread_index = False
        self.waiting: list[Value] = []  # staged values of the current block that are not filled yet
        self.fetched: dict[Value, list[str]] = {}  # tiles in registers, on their way to threadgroup memory

    def enter(self, block: Block) -> list[Value]:
        """Wait for the staged values of a block that are filled as soon as their operands are known. Return those of
        the block around it."""
        before, early = self.waiting, self.staged.distribution.stage_early
        defined = [op.result for op in block.ops if len(op.results) == 1 and op.result in self.staged]
        block_of, dots = self.analysis.block_of, self.staged.dots
        self.waiting = [v for v in defined if early or (block_of[dots[v]] is not block and not self.left_in_parts(v))]
        return before

    def left_in_parts(self, value: Value) -> bool:
        """True for a left operand of which each dot stages a part of the columns at a time."""
        distribution = self.staged.distribution
        if not distribution.in_parts or distribution.row_simdgroups > 1 or value not in self.staged:
            return False
        dot = self.staged.dots[value]
        return value.kind == "load" and dot.operands[0] is value and not self.staged.same_block(value, dot)

    def fill_ready(self) -> None:
        """Fill the waiting values whose operands are known."""
        for value in list(self.waiting):
            if self._ready(value, first=True):
                self.waiting.remove(value)
                self.fill(value)

    def _ready(self, value: Value, first: bool = False) -> bool:
        expressions, inlined = self.expressions, self.analysis.inlined
        if value in expressions.names or value in expressions.tiles:
            return True
        if value.op is None or (value not in inlined and not first and value.op.kind not in ("const", "dim")):
            return False
        if has_statement(value) and value not in inlined:
            return False
        return all(self._ready(v) for v in value.op.operands)

    def fill(self, value: Value) -> None:
        """Copy a tile to threadgroup memory, padded with zeros to multiples of 8; rows are 16 bytes longer."""
        rows, columns = padded_shape(value)
        self._bind_slices(value)
        tile = self.allocate(value, rows, columns)
        if value in self.fetched:
            copy, _ = self._copy(value, rows, columns)
            self.threadgroup.before_write(tile)
            self._write_copies(copy, self._stores(value, tile, copy, self.fetched.pop(value)))
        elif self._from_registers(value):
            self.exchange.statement(lambda: self._copy_registers(value, tile, rows, columns))
        else:
            self.exchange.statement(lambda: self.copy_elements(value, tile, rows, columns))
        self.expressions.tiles[value] = tile

    def allocate(self, value: Value, rows: int, columns: int) -> ThreadgroupTile:
        size, hint = value.dtype.bytes, f"{self._tile_hint(value)}_tile"
        element = self.expressions.dialect.tile_type(value.dtype), size
        return self.threadgroup.allocate(element, rows, columns + 16 // size, hint=hint, purpose="an operand of dot")

    def _tile_hint(self, value: Value) -> str:
        op = value.op
        tensor = op.attrs["tensor"].name if op is not None and op.kind == "load" else ""
        return value.hint or tensor or next((v.hint for v in (op.operands if op else ()) if v.hint), "part")

    # ---- slices ------------------------------------------------------------------------------------------------------

    def _bind_slices(self, value: Value) -> None:
        """Bind the slices that a value is loaded from, if they are not bound yet."""
        if value.op is not None and value not in self.expressions.names and value not in self.expressions.tiles:
            for operand in value.op.operands:
                self._bind_slices(operand)
            if value.op.kind == "load":
                self.bind_slice(value.op)

    def bind_slice(self, op: Op) -> None:
        """Bind the pointer to a load's first element, and the test that the tile is in the tensor at all."""
        expressions, preamble, tensor = self.expressions, self.expressions.preamble, op.attrs["tensor"]
        if not op.result.shape or op in expressions.slices:
            return
        offset, tests = expressions.slice_start(op, ir.starts(op))
        name = preamble.pointer(tensor)
        test, pointer = "", name
        if tests:
            test = self.writer.name(f"{name}_valid")
            self.writer.line(f"const bool {test} = {' && '.join(tests)};")
        if offset:
            pointer = self.writer.name(f"{name}_at")
            self.writer.line(f"{preamble.pointer_type(tensor)}{pointer} = {name} + {offset};")
        expressions.slices[op] = Slice(pointer, test)

    # ---- filling -----------------------------------------------------------------------------------------------------

    def _from_registers(self, value: Value) -> bool:
        """True if tiles in registers are part of a value; otherwise any thread can compute any element."""
        expressions = self.expressions
        stack = [value]
        while stack:
            v = stack.pop()
            if v in expressions.names and len(v.shape) == 2 and min(v.shape) > 1:
                return True
            if v not in expressions.names and v not in expressions.tiles and v.op is not None:
                stack += v.op.operands
        return False

    def _copy_registers(self, value: Value, tile: ThreadgroupTile, rows: int, columns: int) -> None:
        """Let each lane write its elements, two adjacent ones at a time."""
        expressions, dialect = self.expressions, self.expressions.dialect
        layout, shape, kind = expressions.layouts.main, OrientedShape(*value.shape), expressions.type(value)

        def body(index: ElementIndex) -> list[str]:
            texts = []
            for each in (index, self.registers.with_offset(index, shape, "1")):
                text = bare(expressions.at(value, each))
                tests = self.registers.padding_tests(layout, shape, each)
                texts.append(f"{' && '.join(tests)} ? {text} : {dialect.zero(value.dtype)}" if tests else text)
            tests = [f"{index.row.text} < {rows}"] if layout.row_padded(rows) else []
            tests += [f"{index.column.text} < {columns}"] if layout.column_padded(columns) else []
            address = f"{tile.name} + ({index.row.text}) * {tile.stride} + {index.column.text}"
            line = f"*(threadgroup {kind}2 *)({address}) = {kind}2({', '.join(texts)});"
            if dialect.as_bits(value.dtype):
                low, high = (dialect.to_memory(text, value.dtype) for text in texts)
                line = f"{{ *({address}) = {low}; *({address} + 1) = {high}; }}"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.threadgroup.before_write(tile)
        self.registers.for_each(layout, shape, body, run=2)
        self.threadgroup.note_write(tile)  # the barrier that reads of other tiles need comes before the write

    def copy_elements(
        self, value: Value, tile: ThreadgroupTile, rows: int, columns: int, first: tuple[str, str] = ("", "")
    ) -> None:
        """Let all threads copy adjacent elements, as vectors, from the `first` row and column of the value on. Where a
        whole tile may still be read, loads are issued before the barrier and wait in registers."""
        copy, texts = self._copy(value, rows, columns, first)
        reads_tiles = bool(self.expressions.tiles_read)
        self.registers.wait_for_tiles()
        whole = not any(first)  # beside parts there are sums in registers
        if whole and copy.registers <= FETCHED and not reads_tiles and self.threadgroup.is_pending(tile):
            texts = self._fetch(value, copy, texts)
        self.threadgroup.before_write(tile)
        self._write_copies(copy, self._stores(value, tile, copy, texts))

    def fetch_ahead(self, op: Op) -> None:
        """Load the operands of the next dot of a block, which wait for the memory that this one uses."""
        ops = self.analysis.block_of[op].ops
        later = [o for o in ops[ops.index(op) + 1 :] if o.kind == "dot"][:1]
        for value in [untransposed(operand)[0] for dot in later for operand in dot.operands]:
            known = value in self.expressions.tiles or value in self.fetched or self.expressions.tile_of(value)
            if known or value not in self.staged or not self.staged.same_block(value, op):
                continue
            if not self._from_registers(value) and self._ready(value, first=True):
                self._fetch_one(value)

    def _fetch_one(self, value: Value) -> None:
        """Load a tile into registers, unless it takes too many, or elements that other lanes hold."""
        expressions, checkpoint = self.expressions, self.exchange.save()
        expressions.missing.clear()
        self._bind_slices(value)
        copy, texts = self._copy(value, *padded_shape(value))
        if expressions.missing or expressions.tiles_read or copy.registers > FETCHED:
            self.exchange.restore(checkpoint)
            expressions.missing.clear()
            return
        self.fetched[value] = self._fetch(value, copy, texts)

    def _copy(
        self, value: Value, rows: int, columns: int, first: tuple[str, str] = ("", "")
    ) -> tuple[TileCopy, list[str]]:
        """Return how the threads copy a tile, and the vectors of one thread's run."""
        expressions, dialect = self.expressions, self.expressions.dialect
        kind, size, side = expressions.type(value), value.dtype.bytes, value.shape[1]
        expressions.tiles_read.clear()

        def element(offset: int) -> ElementIndex:
            column = plus("c", str(offset))
            return ElementIndex(Coordinate(plus("r", first[0] or "0")), Coordinate(plus(column, first[1] or "0")))

        width, _ = self._widest(value, element(0))
        run = next(n for n in (LOAD_BYTES // size, width) if n % width == 0 and side % n == 0 and columns % n == 0)
        run = run if width > 1 else 1
        zero = dialect.zero(value.dtype)
        zero = f"{kind}{width}({zero})" if width > 1 else zero
        texts = []
        for offset in range(0, run, width):
            index = element(offset)
            tests = [f"{index.row.text} < {value.shape[0]}"] if first[0] or value.shape[0] % 8 else []
            tests += [f"{index.column.text} < {side}"] if first[1] or side % 8 else []
            text = bare(self._widest(value, index)[1])
            texts.append(f"{' && '.join(tests)} ? {text} : {zero}" if tests else text)
        threads = 32 * expressions.layouts.main.simdgroups
        return TileCopy(rows, columns, run, width, threads, size), texts

    def _fetch(self, value: Value, copy: TileCopy, texts: list[str]) -> list[str]:
        """Load a thread's part of a tile into registers, and return their texts."""
        name = self.writer.name(f"{self._tile_hint(value)}_fetched")
        kind = self.expressions.type(value) + (str(copy.width) if copy.width > 1 else "")
        self.writer.line(f"{kind} {name}[{copy.trips * len(texts)}];")
        held = [f"{name}[{plus(f'{len(texts)} * u' if len(texts) > 1 else 'u', str(n))}]" for n in range(len(texts))]
        self._write_copies(copy, [f"{target} = {text};" for target, text in zip(held, texts, strict=True)])
        return held

    def _stores(self, value: Value, tile: ThreadgroupTile, copy: TileCopy, texts: list[str]) -> list[str]:
        kind, dialect = self.expressions.type(value), self.expressions.dialect
        lines = []
        for n, text in enumerate(texts):
            place = plus(f"r * {tile.stride} + c", str(n * copy.width))
            target = f"{tile.name}[{place}]"
            if copy.width > 1:
                target = f"*(threadgroup {kind}{copy.width} *)({tile.name} + {place})"
            lines.append(f"{target} = {dialect.to_memory(text, value.dtype)};")
        return lines

    def _write_copies(self, copy: TileCopy, lines: list[str]) -> None:
        """Write statements for each run that a thread copies."""
        self.uses_thread_index = True
        self.writer.open_unrolled("u", copy.trips)
        self.writer.line(copy.position)
        if copy.uneven:
            self.writer.open(f"if (e < {copy.runs})")
        self.writer.write_all(lines)
        self.writer.close(1 + copy.uneven)

    def _widest(self, value: Value, index: ElementIndex) -> tuple[int, str]:
        """Return the widest vector that can be read at an element, and its text."""
        for width in (4, 2):
            text = self.expressions.vector(value, index, width) if value.shape[1] % width == 0 else None
            if text is not None:
                return width, text
        return 1, self.expressions.at(value, index)


@dataclass(frozen=True)
class TileCopy:
    """How the threads of a threadgroup copy a tile: each takes runs of adjacent elements, of vectors of `width`, in a
    number of trips that is known at compile time."""

    rows: int
    columns: int
    run: int
    width: int
    threads: int
    size: int  # bytes of an element

    @property
    def runs(self) -> int:
        return self.rows * self.columns // self.run

    @property
    def trips(self) -> int:
        return -(-self.runs // self.threads)

    @property
    def uneven(self) -> bool:
        return self.runs % self.threads != 0

    @property
    def registers(self) -> int:
        """Registers of a thread for its part of the tile."""
        return -(-self.trips * self.run * self.size // 4)

    @property
    def position(self) -> str:
        """The definitions of a run's row and first column, in trip u."""
        across, scale = self.columns // self.run, f" * {self.run}" if self.run > 1 else ""
        return f"const int e = tid + {self.threads} * u, r = e / {across}, c = e % {across}{scale};"


def has_statement(value: Value) -> bool:
    """True for a value that a statement of its own computes into registers: no expression can be written for it."""
    return value.op is not None and (bool(value.op.blocks) or value.op.kind in ("reduce", "dot", "scan"))


def padded_shape(value: Value) -> tuple[int, int]:
    """Return the sides of a tile, rounded up to whole 8x8 matrices."""
    rows, columns = (-(-n // 8) * 8 for n in value.shape)
    return rows, columns
