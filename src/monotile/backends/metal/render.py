"""A kernel as Metal text: its arguments, and the statements that compute its values in order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ... import ir
from ...errors import DeviceLimit, InternalError
from ...ir import Block, Kernel, Op, Value
from .assign import Plan, plans, read_by
from .lane_dots import LaneDots
from .layout import COLUMN, Fragments
from .msl import BITS, HELPERS, TYPES, author_name, cast, type_of, without_bfloat
from .points import Coordinate, Point, TensorText, bare

UNROLLING = '_Pragma("clang loop unroll(full)")'
HEADER = f"""#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#define UNROLL {UNROLLING}
"""


@dataclass(frozen=True)
class Rendered:
    """`longs` says what the array `meta` holds: (tensor, "offset" or "dim" or "stride", dimension). `integers` and
    `floats` are the scalar parameters, each kind in an array. The text is in three parts, for callers that write a
    signature of their own."""

    head: str
    signature: str
    body: str
    name: str
    threads: int
    longs: tuple[tuple[int, str, int], ...]
    integers: tuple[str, ...]
    floats: tuple[str, ...]
    threadgroup_bytes: int

    @property
    def source(self) -> str:
        return f"{self.head}\n{self.signature} {{\n{self.body}\n}}\n"


@dataclass(frozen=True)
class Length:
    """A line of the head, # standing for its place in `meta`."""

    name: str
    line: str
    meaning: tuple[int, str, int]


def render(kernel: Kernel, bfloat: bool = True) -> Rendered:
    """By the best plan that fits threadgroup memory. Without `bfloat`, for Metal before 3.1."""
    ways = plans(kernel)
    for plan in ways[:-1]:
        try:
            return Renderer(kernel, plan, bfloat).render()
        except DeviceLimit:
            continue
    return Renderer(kernel, ways[-1], bfloat).render()


class Renderer(LaneDots):
    def __init__(self, kernel: Kernel, plan: Plan, bfloat: bool = True) -> None:
        super().__init__(kernel, plan)
        self.elements.bfloat = bfloat
        self.longs: list[tuple[int, str, int]] = []
        self.fused = _fused_dots(kernel)
        self.carried: dict[Value, list[tuple[Value, str]]] = {}  # what a loop's next turn gets, with what it replaces
        self.fused_at = {dot: add for add, dot in self.fused.items()}

    def render(self) -> Rendered:
        kernel = self.kernel
        lengths = self._tensors()
        floats = tuple(name for name, dtype in kernel.scalars if dtype.is_float)
        integers = tuple(name for name, dtype in kernel.scalars if not dtype.is_float)
        self._params(floats, integers)
        self.block(kernel.body)
        threads = 32 * self.family.simdgroups
        name = author_name(kernel.name)
        bits = not self.elements.bfloat and any(t.dtype.name == "bfloat16" for t in kernel.tensors)
        head = [HEADER, *([BITS] if bits else [])]
        head += [HELPERS[helper] for helper in HELPERS if helper in self.elements.helpers]
        arguments = ",\n".join(f"    {text}" for text in self._arguments(bool(integers), bool(floats)))
        signature = f"\n[[kernel, max_total_threads_per_threadgroup({threads})]] void {name}(\n{arguments})"
        body = [
            *([f"  threadgroup float4 room[{-(-self.room_bytes // 16)}];"] if self.room_bytes else []),
            "  const int sg = int(sg_u), lane = int(lane_u);",
            *(_places(self.family) if isinstance(self.family, Fragments) else []),
            *(["  const int tid = sg * 32 + lane;"] if self.uses_tid else []),
            *self._used(lengths),
            *self.lines,
        ]
        texts = "\n".join(head), signature, "\n".join(body)
        if not self.elements.bfloat:
            texts = (without_bfloat(texts[0]), texts[1], without_bfloat(texts[2]))
        return Rendered(*texts, name, threads, tuple(self.longs), integers, floats, self.room_bytes)

    def _arguments(self, integers: bool, floats: bool) -> list[str]:
        kernel, count = self.kernel, len(self.kernel.tensors)
        texts = []
        for tensor in kernel.tensors:
            constness = "" if tensor.index in kernel.written else "const "
            name = f"{author_name(tensor.name)}_p [[buffer({tensor.index})]]"
            texts.append(f"device {constness}{self.elements.memory_type(tensor.dtype)} *{name}")
        texts.append(f"constant long *meta [[buffer({count})]]")
        texts += [f"constant long *integers [[buffer({count + 1})]]"] if integers else []
        texts += [f"constant float *floats [[buffer({count + 1 + integers})]]"] if floats else []
        return [
            *texts,
            "uint gid [[threadgroup_position_in_grid]]",
            "uint sg_u [[simdgroup_index_in_threadgroup]]",
            "uint lane_u [[thread_index_in_simdgroup]]",
        ]

    def _tensors(self) -> list[Length]:
        """Pointers, lengths and strides, each under a name. A length that several tensors share is read once."""
        found: list[Length] = []
        lengths: dict[str, str] = {}
        self.scopes[0] |= {author_name(tensor.name) for tensor in self.kernel.tensors}
        for tensor in self.kernel.tensors:
            kind, name = self.elements.memory_type(tensor.dtype), author_name(tensor.name)
            constness = "" if tensor.index in self.kernel.written else "const "
            line = f"device {constness}{kind} *{name} = {name}_p + meta[#];"
            found.append(Length(name, line, (tensor.index, "offset", 0)))
            dims, strides = [], []
            for n, length in enumerate(tensor.dims):
                if isinstance(length, int):
                    dims.append(str(length))
                else:
                    if length not in lengths:
                        lengths[length] = self.name(length if length.isidentifier() else f"{name}_n{n}")
                        line = f"const int {lengths[length]} = int(meta[#]);"
                        found.append(Length(lengths[length], line, (tensor.index, "dim", n)))
                    dims.append(lengths[length])
                stride = tensor.strides[n] if tensor.strides else None
                if stride is not None:
                    strides.append(str(stride) if stride == 1 else f"{stride}L")
                else:
                    strides.append(self.name(f"{name}_s{n}"))
                    line = f"const long {strides[-1]} = meta[#];"
                    found.append(Length(strides[-1], line, (tensor.index, "stride", n)))
            self.elements.tensors[tensor.index] = TensorText(name, tuple(dims), tuple(strides))
        return found

    def _used(self, lengths: list[Length]) -> list[str]:
        """The lines for what the text speaks of, numbered; what `meta` holds follows them."""
        words = set(re.findall(r"\w+", "\n".join(self.lines)))
        lines = []
        for each in lengths:
            if each.name in words:
                lines.append("  " + each.line.replace("#", str(len(self.longs))))
                self.longs.append(each.meaning)
        return lines

    def _params(self, floats: tuple[str, ...], integers: tuple[str, ...]) -> None:
        types = dict(self.kernel.scalars)
        self.parameters = {name: f"floats[{n}]" for n, name in enumerate(floats)}
        self.parameters |= {name: f"{TYPES[types[name].name]}(integers[{n}])" for n, name in enumerate(integers)}

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        waiting, top = self.waiting, self.top
        self.waiting = self.expect(block)
        self.fill_ready()
        for op in block.ops:
            self.op(op)
            self.fill_ready()
        self.waiting = waiting
        self.elements.rooms = {v: r for v, r in self.elements.rooms.items() if not self._made_in(v, block)}
        self.top = top

    def _made_in(self, value: Value, block: Block) -> bool:
        return value.op is not None and self.homes.get(value.op) is block

    def op(self, op: Op) -> None:
        self.note(op)
        handler = STATEMENTS.get(op.kind)
        if op.kind == "load":
            self.slice(op)
        if handler is not None:
            handler(self, op)
        elif len(op.results) == 1 and (op.result in self.elements.inlined or op.result in self.staged):
            return
        elif op.kind in ("load", "gather"):
            self._fence(op)
            self.compute(op.result)
        elif op.kind == "param":
            name = self.elements.names[op.result] = self.name(op.result.hint or "parameter")
            self.line(f"const {type_of(op.result)} {name} = {self.parameters[op.attrs['name']]};")
        elif op.kind == "reduce":
            self.reduce(op)
        elif op.kind == "dot":
            if op not in self.fused.values():
                self.dot(op, op.result, None)
        elif op in self.fused:
            dot = self.fused[op]
            self.dot(dot, op.result, op.operands[1] if op.operands[0] is dot.result else op.operands[0])
        elif op.kind in ir.ELEMENTWISE:
            self.compute(op.result)
        elif op.kind not in ("yield", "visible"):
            raise InternalError(f"the metal backend has no statement for {op.kind!r}")

    def dot(self, op: Op, result: Value, addend: Value | None) -> None:
        name = self._in_place(result) or self.declare(result)
        write = self.matrix_dot if self.plan.engine == "matrix" else self.lane_dot
        write(op, result, addend, name)
        self.elements.names[result] = name

    def compute(self, value: Value) -> None:
        """Gives a value registers and computes it into them."""
        elements = self.elements
        if not value.shape:
            text = bare(elements.scalar(value))
            name = elements.names[value] = self.name(self.hint(value))
            self.line(f"const {type_of(value)} {name} = {text};")
            return
        name = self._in_place(value) or self.declare(value)
        self.statement(lambda: self._compute(value, name))
        elements.names[value] = name

    def _compute(self, value: Value, name: str) -> None:
        elements = self.elements
        family, shape, axis = elements.families.of(value), elements.shape(value), self.axis(value)
        run = family.neighbours(shape.columns) if shape.columns > 1 and value.kind == "load" else 1
        point = self.point(family, shape)
        if run == 1 or value.shape[-1] % run or elements.vector(value, point, run) is None:
            self.assign(value, name, lambda p: elements.at(value, p, axis))
            return

        def body(point: Point) -> list[str]:
            text = elements.vector(value, point, run)
            index = (*(point.column.index or ())[:-1], "e")
            target = elements.reference(value, name, point.row.index or (), index)
            kind = f"{type_of(value)}{run}"
            loaded = self.name(f"{name}_run")
            lines = [f"const {kind} {loaded} = {bare(text or '')};"]
            return [*lines, f"UNROLL for (int e = 0; e < {run}; ++e) {target} = {loaded}[e];"]

        self.nest(family, shape, body, run=run, sealed=True)

    def _in_place(self, value: Value) -> str | None:
        """The registers of something that nothing reads after this, where they can take what is made of it: the value
        a loop carries in the same place, or an operand of the same kind."""
        op = value.op
        if op is None:
            return None
        block = self.homes[op]
        for param, name in self.carried.get(value, ()):
            if self._last_read(param, op) and self._pointwise(op, param):
                return name
        if op.kind in ir.ELEMENTWISE and op not in self.fused:
            for operand in self._read_at_point(op):
                same = operand.shape == value.shape and operand.dtype == value.dtype and operand in self.elements.names
                if same and self._last_read(operand, op) and operand.op is not None and not operand.op.blocks:
                    alike = self.axis(operand) == self.axis(value)
                    if (
                        self.homes.get(operand.op) is block
                        and alike
                        and self._family_of(operand) == self._family_of(value)
                    ):
                        return self.elements.names[operand]
        return None

    def _last_read(self, value: Value, op: Op) -> bool:
        """Whether nothing reads a value after an op of the same block."""
        order = {o: n for n, o in enumerate(self.homes[op].ops)}
        return all(order.get(self.fused_at.get(r, r), len(order)) <= order[op] for r in self.readers.get(value, []))

    def _family_of(self, value: Value) -> object:
        return self.elements.families.of(value)

    def _read_at_point(self, op: Op) -> list[Value]:
        """Values an elementwise op reads at the very element it makes, and not elsewhere as well, in program order."""
        found: dict[Value, None] = {}
        elsewhere: set[Value] = set()
        stack = [(v, True) for v in reversed(op.operands)]
        while stack:
            value, here = stack.pop()
            if value not in self.elements.inlined:
                if here:
                    found[value] = None
                else:
                    elsewhere.add(value)
            elif value.op is not None:
                here = here and value.op.kind in ir.ELEMENTWISE
                stack += [(v, here) for v in reversed(value.op.operands)]
        return [value for value in found if value not in elsewhere]

    def _pointwise(self, op: Op, param: Value) -> bool:
        """Whether an op reads a value at the element it makes only."""
        if op in self.fused:
            dot = self.fused[op]
            addend = op.operands[1] if op.operands[0] is dot.result else op.operands[0]
            if param in read_by(dot, self.elements.inlined):
                return False
            return addend is param or (
                addend in self.elements.inlined and param in self._read_at_point(addend.op or op)
            )
        return op.kind in ir.ELEMENTWISE and param in self._read_at_point(op)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def copy(self, target: str, value: Value, result: Value) -> None:
        """Into registers that have a name already."""
        axis = self.axis(result)
        self.statement(lambda: self.assign(result, target, lambda p: self.elements.at(value, p, axis)))

    def _fence(self, op: Op) -> None:
        if op.attrs["tensor"].index in self.mixed:
            self.barrier("mem_device")

    def _store(self, op: Op) -> None:
        value, tensor = op.operands[0], op.attrs["tensor"]
        self._fence(op)
        elements = self.elements
        shape, axis, family = elements.shape(value), self.axis(value), elements.families.of(value)
        dims = [n for n, extent in enumerate(op.attrs["extents"]) if extent is not None]
        run = family.neighbours(shape.columns) if shape.columns > 1 and len(value.shape) == 2 else 1
        if run > 1 and (tensor.unit != dims[-1] or op.attrs["checked"][dims[-1]] or shape.columns % run):
            run = 1
        kind = elements.memory_type(tensor.dtype)
        run = run if kind == TYPES[tensor.dtype.name] else 1

        def body(point: Point) -> list[str]:
            pointer, offset, inside = elements.place(op, op.operands[1:], point, axis)
            tests = [*self.inside(family, shape, point), *self.owner(family, shape), *inside]
            texts = []
            for e in range(run):
                at = point
                if run > 1:
                    index = (*(point.column.index or ())[:-1], str(e))
                    at = Point(point.row, Coordinate(family.column(index, shape.columns), family, COLUMN, index))
                texts.append(bare(cast(elements.at(value, at, axis), value.dtype, tensor.dtype, elements.helpers)))
            line = f"{pointer}[{offset}] = {elements.kept(texts[0], tensor.dtype)};"
            if run > 1:
                line = f"*(device packed_{kind}{run} *)({pointer} + {offset}) = {kind}{run}({', '.join(texts)});"
            return [f"if ({' && '.join(tests)}) {line}" if tests else line]

        self.statement(lambda: self.nest(family, shape, body, run=run))

    # ---- control -----------------------------------------------------------------------------------------------------

    def _program_id(self, op: Op) -> None:
        """The last size varies fastest."""
        names = [self.name(self.hint(result)) for result in op.results]
        rest = "int(gid)"
        for n in reversed(range(len(names))):
            size = self.elements.scalar(op.operands[n])
            if n == 0:
                self.line(f"const int {names[n]} = {rest};")
                break
            self.line(f"const int {names[n]} = {rest} % {size};")
            following = self.name("rest")
            self.line(f"const int {following} = {rest} / {size};")
            rest = following
        self.elements.names.update(zip(op.results, names, strict=True))

    def _for(self, op: Op) -> None:
        low, high, *inits = op.operands
        (block,) = op.blocks
        names = []
        for result, init, param, final in zip(
            op.results, inits, block.params[1:], block.terminator.operands, strict=True
        ):
            own = self.elements.names.get(init)
            carried = init.op is not None and init.op.kind == "for" and self.homes[init.op] is self.homes[op]
            if own is not None and carried and self.readers.get(init) == [op]:
                names.append(own)  # what the loop before has carried is carried on
                continue
            names.append(self.declare(result, param.hint or final.hint))
            self.copy(names[-1], init, result)
        bounds = bare(self.elements.scalar(low)), bare(self.elements.scalar(high))
        if self.writes:  # once before the loop rather than in every turn
            self.barrier()
        self.scopes.append(set())
        index = self.name(self.hint(block.params[0]))
        self.elements.names[block.params[0]] = index
        self.elements.names.update(zip(block.params[1:], names, strict=True))
        self.last = None
        self.open(f"for (int {index} = {bounds[0]}; {index} < {bounds[1]}; {index} += {op.attrs['step']})")
        for param, name, value in zip(block.params[1:], names, block.terminator.operands, strict=True):
            self.carried.setdefault(value, []).append((param, name))
        state, known = self.state(), dict(self.elements.names)
        self._body(op, block, names)
        # Written again, now that it is known what a turn leaves unsettled for the next.
        reads, writes = self.reads, self.writes
        self.restore(state)
        self.elements.names = known
        self.reads, self.writes = [*self.reads, *reads], [*self.writes, *writes]
        entry = list(self.reads), list(self.writes)
        self._body(op, block, names)
        self.reads, self.writes = [*self.reads, *entry[0]], [*self.writes, *entry[1]]
        self.scopes.pop()
        self.last = None
        self.close()
        self.elements.names.update(zip(op.results, names, strict=True))

    def _body(self, op: Op, block: Block, names: list[str]) -> None:
        self.block(block)
        self._assign_all(names, list(op.results), list(block.terminator.operands))

    def _assign_all(self, names: list[str], results: list[Value], values: list[Value]) -> None:
        """The next carried values. One that another still reads is copied aside first."""
        aside: dict[int, str] = {}
        for n, (name, result, value) in enumerate(zip(names, results, values, strict=True)):
            own = self.elements.names.get(value)
            if own != name and (own is None or own in names):
                aside[n] = self.declare(result)
                self.copy(aside[n], value, result)
        for n, (name, result, value) in enumerate(zip(names, results, values, strict=True)):
            if n in aside:
                self.assign(result, name, self._same(result, aside[n]))
            elif self.elements.names.get(value) != name:
                self.copy(name, value, result)

    def _same(self, value: Value, name: str) -> Callable[[Point], str]:
        return lambda p: self.elements.reference(value, name, p.row.index or (), p.column.index or ())

    def _if(self, op: Op) -> None:
        names = [self.declare(result) for result in op.results]
        self.last = None
        self.open(f"if ({bare(self.elements.scalar(op.operands[0]))})")
        entry = list(self.reads), list(self.writes)
        left: tuple[list[tuple[int, int]], list[tuple[int, int]]] = (list(entry[0]), list(entry[1]))
        for n, block in enumerate(op.blocks):
            if n and not (block.ops[:-1] or names):
                break
            if n:
                self.depth -= 1
                self.line("} else {")
                self.depth += 1
            self.reads, self.writes = list(entry[0]), list(entry[1])
            self.scopes.append(set())
            self.last = None
            self.block(block)
            for name, result, value in zip(names, op.results, block.terminator.operands, strict=True):
                self.copy(name, value, result)
            self.scopes.pop()
            left[0].extend(self.reads)
            left[1].extend(self.writes)
        self.reads, self.writes = left
        self.last = None
        self.close()
        self.elements.names.update(zip(op.results, names, strict=True))


STATEMENTS: dict[str, Callable[[Renderer, Op], None]] = {
    "store": Renderer._store,
    "program_id": Renderer._program_id,
    "for": Renderer._for,
    "if": Renderer._if,
}


def _places(family: Fragments) -> list[str]:
    """A lane's place in the 8x8 matrices it holds."""
    rows, columns = ("8 * sg + " if n > 1 else "" for n in (family.rows_over, family.columns_over))
    return [
        f"  const int fm = {rows}(lane / 4 & 4) + lane / 2 % 4;      // this lane's first row",
        f"  const int fn = {columns}(lane / 4 & 2) * 2 + lane % 2 * 2;  // and the first of its columns",
    ]


def _fused_dots(kernel: Kernel) -> dict[Op, Op]:
    """Additions of a product that nothing else reads, with the product: its sums start from the other operand."""
    users = ir.uses(kernel.body)
    found = {}
    for block in _blocks(kernel.body):
        inside = set(block.ops)
        for op in block.ops:
            if op.kind != "add":
                continue
            for operand in op.operands:
                dot = operand.op
                if dot is not None and dot.kind == "dot" and dot in inside and users[operand] == [op]:
                    if operand.shape == op.result.shape:
                        found[op] = dot
                    break
    return found


def _blocks(block: Block) -> list[Block]:
    return [block, *(b for op in block.ops for inner in op.blocks for b in _blocks(inner))]
