"""A kernel as Metal text: its arguments, and the statements that compute its values in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ... import ir
from ...errors import InternalError
from ...ir import Block, Kernel, Op, Value
from .folds import Folds
from .layout import Fragments, Shape
from .points import TensorText
from .words import HELPERS, TYPES, author_name, cast, type_of

HEADER = """#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;
#define UNROLL _Pragma("clang loop unroll(full)")
"""
PLACES = """  const int fm = (lane / 4 & 4) + lane / 2 % 4;        // this lane's row in an 8x8 matrix
  const int fn = (lane / 4 & 2) * 2 + lane % 2 * 2;    // and the first of its two columns"""


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


def render(kernel: Kernel) -> Rendered:
    return Renderer(kernel).render()


class Renderer(Folds):
    def render(self) -> Rendered:
        kernel = self.kernel
        self.fused = _fused_dots(kernel)
        lengths = self._tensors()
        floats = tuple(name for name, dtype in kernel.scalars if dtype.is_float)
        integers = tuple(name for name, dtype in kernel.scalars if not dtype.is_float)
        self._params(floats, integers)
        self.block(kernel.body)
        threads = 32 * self.family.simdgroups
        name = author_name(kernel.name)
        head = [HEADER, *(HELPERS[helper] for helper in HELPERS if helper in self.elements.helpers)]
        arguments = ",\n".join(f"    {text}" for text in self._arguments(bool(integers), bool(floats)))
        signature = f"\n[[kernel, max_total_threads_per_threadgroup({threads})]] void {name}(\n{arguments})"
        body = [
            *([f"  threadgroup float4 room[{-(-self.room_bytes // 16)}];"] if self.room_bytes else []),
            "  const int sg = int(sg_u), lane = int(lane_u);",
            *([PLACES] if isinstance(self.family, Fragments) else []),
            *lengths,
            *self.lines,
        ]
        texts = "\n".join(head), signature, "\n".join(body)
        return Rendered(*texts, name, threads, tuple(self.longs), integers, floats, self.room_bytes)

    def _arguments(self, integers: bool, floats: bool) -> list[str]:
        kernel, count = self.kernel, len(self.kernel.tensors)
        texts = []
        for tensor in kernel.tensors:
            constness = "" if tensor.index in kernel.written else "const "
            name = f"{author_name(tensor.name)}_p [[buffer({tensor.index})]]"
            texts.append(f"device {constness}{TYPES[tensor.dtype.name]} *{name}")
        texts.append(f"constant long *meta [[buffer({count})]]")
        texts += [f"constant long *integers [[buffer({count + 1})]]"] if integers else []
        texts += [f"constant float *floats [[buffer({count + 1 + integers})]]"] if floats else []
        return [
            *texts,
            "uint gid [[threadgroup_position_in_grid]]",
            "uint sg_u [[simdgroup_index_in_threadgroup]]",
            "uint lane_u [[thread_index_in_simdgroup]]",
        ]

    def _tensors(self) -> list[str]:
        """The lines that read lengths and strides, each under a name."""
        lines = []
        for tensor in self.kernel.tensors:
            kind, name = TYPES[tensor.dtype.name], author_name(tensor.name)
            constness = "" if tensor.index in self.kernel.written else "const "
            lines.append(f"  device {constness}{kind} *{name} = {name}_p + meta[{len(self.longs)}];")
            self.longs.append((tensor.index, "offset", 0))
            dims, strides = [], []
            for n, length in enumerate(tensor.dims):
                if isinstance(length, int):
                    dims.append(str(length))
                else:
                    dims.append(f"{name}_n{n}")
                    lines.append(f"  const int {dims[-1]} = int(meta[{len(self.longs)}]);")
                    self.longs.append((tensor.index, "dim", n))
                stride = tensor.strides[n] if tensor.strides else None
                if stride is not None:
                    strides.append(str(stride) if stride == 1 else f"{stride}L")
                else:
                    strides.append(f"{name}_s{n}")
                    lines.append(f"  const long {strides[-1]} = meta[{len(self.longs)}];")
                    self.longs.append((tensor.index, "stride", n))
            self.elements.tensors[tensor.index] = TensorText(name, tuple(dims), tuple(strides))
        return lines

    def _params(self, floats: tuple[str, ...], integers: tuple[str, ...]) -> None:
        types = dict(self.kernel.scalars)
        self.parameters = {name: f"floats[{n}]" for n, name in enumerate(floats)}
        self.parameters |= {name: f"{TYPES[types[name].name]}(integers[{n}])" for n, name in enumerate(integers)}

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.op(op)

    def op(self, op: Op) -> None:
        handler = STATEMENTS.get(op.kind)
        if handler is not None:
            handler(self, op)
        elif len(op.results) == 1 and op.result in self.elements.inlined and op.kind != "param":
            return
        elif op.kind in ("load", "gather"):
            self._fence(op)
            self.compute(op.result)
        elif op.kind == "param":
            name = self.elements.names[op.result] = self.fresh(op.result)
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

    def compute(self, value: Value) -> None:
        """Gives a value registers and computes it into them."""
        if not value.shape:
            text = self.elements.scalar(value)
            name = self.elements.names[value] = self.fresh(value)
            self.line(f"const {type_of(value)} {name} = {text};")
            return
        name, shape = self.declare(value), self.elements.shape(value)
        axis = self.axis(value)
        self.statement(lambda: self.assign(name, shape, lambda point: self.elements.at(value, point, axis)))
        self.elements.names[value] = name

    def copy(self, target: str, value: Value, shape: Shape, axis: str) -> None:
        """Into registers that have a name already."""
        self.statement(lambda: self.assign(target, shape, lambda p: self.elements.at(value, p, axis)))

    def _fence(self, op: Op) -> None:
        if op.attrs["tensor"].index in self.mixed:
            self.barrier("mem_device")

    def _store(self, op: Op) -> None:
        value, tensor = op.operands[0], op.attrs["tensor"]
        self._fence(op)
        shape, axis = self.elements.shape(value), self.axis(value)

        def write() -> None:
            point, opened = self.loops(shape)
            address, inside = self.elements.place(op, op.operands[1:], point, axis)
            tests = [*self.inside(shape, point), *self.owner(shape), *([inside] if inside else [])]
            text = cast(self.elements.at(value, point, axis), value.dtype, tensor.dtype, self.elements.helpers)
            line = f"{self.elements.tensors[tensor.index].name}[{address}] = {text};"
            self.line(f"if ({' && '.join(tests)}) {line}" if tests else line)
            for _ in range(opened):
                self.close()

        self.statement(write)

    def _program_id(self, op: Op) -> None:
        """The last size varies fastest."""
        names = [self.fresh(result) for result in op.results]
        rest = "int(gid)"
        for n in reversed(range(len(names))):
            size = self.elements.scalar(op.operands[n])
            if n == 0:
                self.line(f"const int {names[n]} = {rest};")
                break
            self.line(f"const int {names[n]} = {rest} % {size};")
            following = f"rest_{self.count}_{n}"
            self.line(f"const int {following} = {rest} / {size};")
            rest = following
        self.elements.names.update(zip(op.results, names, strict=True))

    def _for(self, op: Op) -> None:
        low, high, *inits = op.operands
        (block,) = op.blocks
        names = []
        for result, init in zip(op.results, inits, strict=True):
            name = self.declare(result)
            names.append(name)
            self.copy(name, init, self.elements.shape(result), self.axis(result))
        index = self.fresh(block.params[0])
        bounds = self.elements.scalar(low), self.elements.scalar(high)
        self.elements.names[block.params[0]] = index
        self.elements.names.update(zip(block.params[1:], names, strict=True))
        self.open(f"for (int {index} = {bounds[0]}; {index} < {bounds[1]}; {index} += {op.attrs['step']})")
        before, known = list(self.unsettled), dict(self.elements.names)
        start, count, room = len(self.lines), self.count, self.room_used
        self.block(block)
        self._assign_all(names, list(op.results), list(block.terminator.operands))
        # Written again, now that it is known what a turn leaves unsettled for the next.
        del self.lines[start:]
        self.count, self.room_used, self.elements.names = count, room, known
        self.unsettled = [*before, *self.unsettled]
        entry = list(self.unsettled)
        self.block(block)
        self._assign_all(names, list(op.results), list(block.terminator.operands))
        self.unsettled += entry
        self.close()
        self.elements.names.update(zip(op.results, names, strict=True))

    def _assign_all(self, names: list[str], results: list[Value], values: list[Value]) -> None:
        """The next carried values. One that another still reads is copied aside first."""
        source: list[str | None] = []
        for name, result, value in zip(names, results, values, strict=True):
            own = self.elements.names.get(value)
            if own == name:
                source.append(None)
            elif own is None or own in names:
                aside = self.declare(result)
                self.copy(aside, value, self.elements.shape(result), self.axis(result))
                source.append(aside)
            else:
                source.append(own)
        for name, result, value, text in zip(names, results, values, source, strict=True):
            if text is None:
                continue
            if text == self.elements.names.get(value):
                self.copy(name, value, self.elements.shape(result), self.axis(result))
            else:
                shape = self.elements.shape(result)
                index = ("[i]" if shape.rows > 1 else "") + ("[j]" if shape.columns > 1 else "")
                self.assign(name, shape, lambda p, t=text, x=index: t + x)  # type: ignore[misc]

    def _if(self, op: Op) -> None:
        names = [self.declare(result) for result in op.results]
        self.open(f"if ({self.elements.scalar(op.operands[0])})")
        entry, left = list(self.unsettled), list(self.unsettled)
        for n, block in enumerate(op.blocks):
            if n and not (block.ops[:-1] or names):
                break
            if n:
                self.depth -= 1
                self.line("} else {")
                self.depth += 1
            self.unsettled = list(entry)
            self.block(block)
            for name, result, value in zip(names, op.results, block.terminator.operands, strict=True):
                self.copy(name, value, self.elements.shape(result), self.axis(result))
            left += self.unsettled
        self.unsettled = left
        self.close()
        self.elements.names.update(zip(op.results, names, strict=True))


STATEMENTS: dict[str, Callable[[Renderer, Op], None]] = {
    "store": Renderer._store,
    "program_id": Renderer._program_id,
    "for": Renderer._for,
    "if": Renderer._if,
}


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
