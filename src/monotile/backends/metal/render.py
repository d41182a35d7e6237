"""Rendering: a kernel's ops as Metal statements, in order, and the function around them."""

from __future__ import annotations

from ... import ir
from ...errors import DeviceLimit, InternalError
from ...ir import Block, Kernel, Op, Value
from . import budget
from .analysis import Accumulations, Analysis
from .control import Control
from .dialect import TYPES, MetalDialect
from .distribution import Distribution, Layouts, Orientations, distributions
from .exchange import Exchange
from .expressions import Expressions
from .lane_dots import LaneDots
from .layout import FragmentLayout
from .matrix_dots import MatrixDots
from .names import comment, safe
from .preamble import Preamble
from .reductions import Reductions
from .registers import Registers
from .reuse import RegisterReuse
from .source import MetalSource
from .staging import StagedOperands, Staging
from .threadgroup import ThreadgroupMemory
from .values import Values
from .writer import Writer


def render(kernel: Kernel, bfloat: bool = True) -> MetalSource:
    """Render a kernel with the best distribution that fits threadgroup memory, for Metal with or without `bfloat`.
    Tiles are fetched ahead where a lane has registers for them."""
    *preferred, last = distributions(kernel)
    for distribution in preferred:
        try:
            rendered = Renderer(kernel, distribution, bfloat).render()
        except DeviceLimit:
            continue
        if not distribution.fetch_ahead or rendered.budget.registers <= budget.REGISTERS:
            return rendered
    return Renderer(kernel, last, bfloat).render()


class Renderer:
    """Owns the parts that write a kernel's text, and gives each op to the part that writes it."""

    def __init__(self, kernel: Kernel, distribution: Distribution, bfloat: bool = True) -> None:
        self.kernel = kernel
        layouts = Layouts(kernel, distribution)
        self.layout = layouts.main
        self.dialect = MetalDialect(bfloat)
        self.writer = Writer()
        self.threadgroup = ThreadgroupMemory(self.writer, kernel.name, self.layout.simdgroups)
        self.preamble = Preamble(kernel, self.dialect, self.writer)
        self.analysis = Analysis(kernel, on_lanes=distribution.engine == "lanes")
        self.expressions = Expressions(layouts, Orientations(kernel), self.dialect, self.preamble)
        registers = Registers(self.analysis, self.expressions, self.writer, self.threadgroup)
        exchange = Exchange(registers, self.expressions, self.writer, self.threadgroup, keep=distribution.stage_early)
        self.staged = StagedOperands(self.analysis, distribution)
        self.staging = Staging(self.staged, registers, exchange, self.expressions, self.writer, self.threadgroup)
        self.accumulations = Accumulations(self.analysis, self.staged)
        reuse = RegisterReuse(self.analysis, self.accumulations, self.expressions)
        self.values = Values(self.analysis, reuse, registers, exchange, self.expressions, self.writer, self.threadgroup)
        self.reductions = Reductions(registers, exchange, self.expressions, self.writer, self.threadgroup)
        self.dots: MatrixDots | LaneDots = LaneDots(registers, exchange, self.expressions, self.writer)
        if distribution.engine == "matrix":
            self.dots = MatrixDots(self.staging, registers, exchange, self.expressions, self.writer, self.threadgroup)
        self.control = Control(self.values, registers, exchange, self.writer, self.threadgroup, self._block)
        self.floats = tuple(name for name, dtype in kernel.scalars if dtype.is_float)
        self.integers = tuple(name for name, dtype in kernel.scalars if not dtype.is_float)
        self.location: ir.Loc | None = None  # of the last source line that became a comment

    # ---- the function ------------------------------------------------------------------------------------------------

    def render(self) -> MetalSource:
        kernel, threads = self.kernel, 32 * self.layout.simdgroups
        self._block(kernel.body)
        name = safe(kernel.name)
        parameters = ",\n".join(f"    {text}" for text in self._parameters())
        signature = f"\n[[kernel, max_total_threads_per_threadgroup({threads})]] void {name}(\n{parameters})"
        definitions, meta = self.preamble.definitions()
        dtypes = {tensor.dtype.name for tensor in kernel.tensors}
        dtypes |= {value.dtype.name for op in ir.walk(kernel.body) for value in op.results}
        start = [
            *self.threadgroup.declaration(),
            "const int sg = int(sg_u), lane = int(lane_u);",
            *(_fragment_position(self.layout) if isinstance(self.layout, FragmentLayout) else []),
            *(["const int tid = sg * 32 + lane;"] if self.staging.uses_thread_index else []),
            *definitions,
        ]
        return MetalSource(
            helpers=tuple(self.dialect.helper_sources(dtypes)),
            signature=signature,
            body="\n".join([*(f"  {line}" for line in start), *self.writer.lines]),
            name=name,
            threads=threads,
            meta=meta,
            integers=self.integers,
            floats=self.floats,
            threadgroup_bytes=self.threadgroup.peak_bytes,
        )

    def _parameters(self) -> list[str]:
        """Return the parameters of the function: the tensors, the arrays of numbers, and the thread's position."""
        tensors, count = self.kernel.tensors, len(self.kernel.tensors)
        texts = [
            f"{self.preamble.pointer_type(tensor)}{self.preamble.names[tensor.index]}_p [[buffer({tensor.index})]]"
            for tensor in tensors
        ]
        texts.append(f"constant long *meta [[buffer({count})]]")
        if self.integers:
            texts.append(f"constant long *integers [[buffer({count + 1})]]")
        if self.floats:
            texts.append(f"constant float *floats [[buffer({count + 1 + bool(self.integers)})]]")
        return [
            *texts,
            "uint gid [[threadgroup_position_in_grid]]",
            "uint sg_u [[simdgroup_index_in_threadgroup]]",
            "uint lane_u [[thread_index_in_simdgroup]]",
        ]

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        """Write the ops of a block; staged operands are filled as soon as they can be."""
        top = self.threadgroup.top
        waiting = self.staging.enter(block)
        self.staging.fill_ready()
        for op in block.ops:
            self._op(op)
            self.staging.fill_ready()
        self.staging.waiting = waiting
        tiles = self.expressions.tiles
        self.expressions.tiles = {v: tile for v, tile in tiles.items() if not self.analysis.defined_in(v, block)}
        self.threadgroup.top = top

    def _op(self, op: Op) -> None:
        self._comment(op)
        if op.kind == "load":
            self.staging.bind_slice(op)
        if op.kind in ir.WRITES:
            self.values.store(op)
        elif op.kind == "program_id":
            self.control.program_id(op)
        elif op.kind == "for":
            self.control.loop(op)
        elif op.kind == "if":
            self.control.branch(op)
        elif len(op.results) == 1 and (op.result in self.analysis.inlined or self.staged.computed_in_place(op.result)):
            return
        elif op.kind in ("load", "gather"):
            self.values.fence(op)
            self.values.compute(op.result)
        elif op.kind == "param":
            self._scalar_parameter(op)
        elif op.kind == "reduce":
            self.reductions.reduce(op)
        elif op.kind == "dot":
            if op not in self.accumulations.add_of:
                self._dot(op, op.result, None)
        elif op in self.accumulations.by_add:
            match = self.accumulations.by_add[op]
            self._dot(match.dot, op.result, match.addend)
        elif op.kind in ir.ELEMENTWISE | ir.MOVES:
            self.values.compute(op.result)
        elif op.kind not in ("yield", "visible"):
            raise InternalError(f"the metal backend has no statement for {op.kind!r}")

    def _comment(self, op: Op) -> None:
        """Put the author's line, as a comment, before the first statement written for it."""
        has_statement = any(r.shape for r in op.results) or op.kind in ir.WRITES
        skip = op.blocks or any(r in self.analysis.inlined for r in op.results) or op.kind in ("load", "yield")
        if has_statement and not skip and op.loc is not None and op.loc.text and op.loc != self.location:
            last = self.location
            same_line = last is not None and (last.file, last.line) == (op.loc.file, op.loc.line)
            self.writer.pending_comment = "" if same_line else comment(op.loc.text)
            self.location = op.loc

    def _scalar_parameter(self, op: Op) -> None:
        name, dtype = op.attrs["name"], op.result.dtype
        text = f"floats[{self.floats.index(name)}]" if name in self.floats else ""
        text = text or f"{TYPES[dtype.name]}(integers[{self.integers.index(name)}])"
        self.values.define(op.result, self.writer.name(op.result.hint or "parameter"), text)

    def _dot(self, op: Op, result: Value, addend: Value | None) -> None:
        name = self.values.target(result)
        self.dots.dot(op, result, addend, name)
        self.expressions.names[result] = name


def _fragment_position(layout: FragmentLayout) -> list[str]:
    """Return the definitions of a lane's position in the 8x8 matrices it holds."""
    rows, columns = ("8 * sg + " if n > 1 else "" for n in (layout.row_simdgroups, layout.column_simdgroups))
    return [
        f"const int fm = {rows}(lane / 4 & 4) + lane / 2 % 4;      // this lane's first row",
        f"const int fn = {columns}(lane / 4 & 2) * 2 + lane % 2 * 2;  // and the first of its columns",
    ]
