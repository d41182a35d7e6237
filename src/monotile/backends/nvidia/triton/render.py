"""IR to Triton source: one `@triton.jit` function, a statement per op, named as its author named things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....dtypes import bfloat16, bool_, float32
from ....errors import DeviceLimit, InternalError
from ....ir import ELEMENTWISE, Block, Kernel, Op, Value, constant, uses, walk
from ....ir.affine import linear
from ....ir.intervals import nonnegative
from ....passes.facts import loop_of, nan_matters
from ....passes.grid import Grid
from ..schedule import Schedule
from . import barriers as hazards
from . import elementwise
from .descriptors import Described, Descriptors
from .functions import FUNCTIONS
from .memory import Argument, Memory, spread
from .padding import holds_zero, identity, padded, padded_shape
from .text import Lines, Names, Text, function_name, meet, number, shape_text, triton_type, typed_number

MOST_ELEMENTS = 2**20  # of a tile, by Triton's own rule
TENSORS_ONLY = ("_f32(", "floordiv(", "modulo(", "float_to_int(", ".to(", "tl.sqrt_rn(", "!= {1}, {0}")


@dataclass(frozen=True)
class Rendered:
    """A Triton module and how to call its function."""

    name: str
    source: str
    arguments: tuple[Argument, ...]
    reach: tuple[tuple[tuple[int, int], ...], ...]  # see Memory.reach
    grid: Grid
    described: tuple[Described, ...]  # the tensors that descriptors are made for


def render(kernel: Kernel, schedule: Schedule, *, wide: bool = False, emulate: bool = False) -> Rendered:
    """`kernel` has been through the passes. `wide`: tiles whose strides are not known may span more than 2^31 elements.
    `emulate`: for Triton's interpreter, which does not compute with bfloat16."""
    name = function_name(kernel, repr((schedule, wide, emulate)))
    writer = Renderer(kernel, schedule, wide, emulate)
    writer.block(kernel.body)
    arguments = tuple(sorted(writer.memory.arguments.values(), key=lambda a: ORDER.index(a.kind)))
    aligned = writer.memory.aligned
    fixed = [a.name for a in arguments if a.kind == "scalar" or (a.kind == "dim" and a.name not in aligned)]
    top = Lines()
    early = [f"gdc_{word}()" for word, asked in zip(EARLY, (schedule.follows, schedule.leads), strict=True) if asked]
    for line in early if not emulate else ():
        top.add(line)
    for argument in arguments:
        if argument.name in aligned:
            top.add(f"{argument.name} = tl.cast({argument.name}, tl.int32)  # also where Triton knows it to be 1")
    for side, iota in sorted(writer.memory.iotas.items()):
        top.add(f"{iota} = tl.arange(0, {side})")
    for line in writer.descriptors.lines:
        top.add(line)
    body = top.lines + writer.lines.lines or ["    pass"]
    text = "\n".join(body)
    parameters = ",\n    ".join(a.name for a in arguments)
    head = f"@triton.jit\ndef {name}():"
    if arguments:
        head = f"@triton.jit(do_not_specialize={fixed!r})\ndef {name}(\n    {parameters},\n):"
    helpers = [source for n, source in FUNCTIONS.items() if f"{n}(" in text]
    title = f'"""{kernel.name}, made by monotile for Triton; {schedule}."""'
    imports = "import triton\nimport triton.language as tl\n"
    if "gdc_" in text:
        imports += f"from triton.language.extra.cuda import {', '.join(f'gdc_{word}' for word in EARLY)}\n"
    source = "\n\n".join([f"{title}\n\n{imports}", *helpers, f"{head}\n{text}\n"])
    reach = tuple(tuple(r) for r in writer.memory.reach if r)
    return Rendered(name, source, arguments, reach, Grid(kernel), tuple(writer.descriptors.described.values()))


ORDER = ("pointer", "dim", "stride", "scalar", "laps")
EARLY = ("wait", "launch_dependents")  # for the launch in front, and before the launch behind


class Renderer:
    """Writes blocks. `table` holds the text of every value that is defined."""

    def __init__(self, kernel: Kernel, schedule: Schedule, wide: bool, emulate: bool) -> None:
        self.schedule, self.emulate = schedule, emulate
        self.names, self.lines = Names(), Lines()
        for name in FUNCTIONS:
            self.names.fresh(name)
        self.memory = Memory(kernel, self.names, wide, emulate)
        self.table: dict[Value, Text] = {}
        self.uses: Mapping[Value, list[Op]] = uses(kernel.body)
        self.loops = loop_of(kernel)
        self.descriptors = Descriptors(kernel, self.memory, self.uses)
        self.barriers = hazards.barriers(kernel)
        self.clean: dict[tuple[Value, int], str] = {}  # values with zero in their padding along an axis
        # One loop for which warps are specialised: of those with products the shortest, which is the one without masks.
        products = [
            op for op in walk(kernel.body) if op.kind == "for" and any(o.kind == "dot" for o in op.blocks[0].ops)
        ]
        self.special = (
            min(products, key=lambda op: len(op.blocks[0].ops), default=None) if schedule.warp_specialize else None
        )
        self.here = kernel.body  # the block that is being written
        self.fused: dict[Value, Op] = {}  # products that the addition of their result will write

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self, value: Value) -> Text:
        return self.table[value]

    def tensor(self, value: Value) -> str:
        """The value as something that has a type of its own."""
        text = self.table[value]
        return f"tl.full([], {text}, {triton_type(value.dtype)})" if text.literal else text.text

    def full(self, value: Value, shape: tuple[int, ...] | None = None) -> str:
        """The value with all its padded sides, or broadcast to this shape."""
        text, shape = self.table[value], padded_shape(value.shape if shape is None else shape)
        if text.literal:
            return f"tl.full({shape_text(shape)}, {text}, {triton_type(value.dtype)})"
        if text.shape == shape:
            return self.tensor(value)
        return f"tl.broadcast_to({self.tensor(value)}, {shape_text(shape)})"

    def define(self, value: Value, text: str, shape: tuple[int, ...] | None = None, stem: str = "") -> None:
        shape = padded_shape(value.shape) if shape is None else shape
        elements = 1
        for side in shape:
            elements *= side
        if elements > MOST_ELEMENTS:
            found = f"a tile of {' x '.join(map(str, value.shape))} is {elements} elements with its padding"
            raise DeviceLimit(f"{found}; Triton has at most {MOST_ELEMENTS}: use smaller blocks")
        name = self.names.fresh(value.hint or stem)
        self.lines.add(f"{name} = {text}")
        self.table[value] = Text(name, shape)
        for axis in range(len(value.shape)):
            if any(op.kind == "dot" and op.operands[1 - axis] is value for op in self.uses.get(value, ())):
                masked = self.masked(value, axis, "0.0")
                if masked != name and shape == padded_shape(value.shape):
                    self.lines.add(f"{self.names.fresh(f'{name}_clean')} = {masked}")
                    self.clean[value, axis] = self.lines.lines[-1].split()[0]

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        outer, self.here = self.here, block
        for op in block.ops:
            self.write(op)
        self.here = outer

    def write(self, op: Op) -> None:
        if op in self.barriers:
            self.lines.add("tl.debug_barrier()")
        if op.kind in ELEMENTWISE:
            self.elementwise(op)
        elif op.kind in HANDLERS:
            getattr(self, HANDLERS[op.kind])(op)
        elif op.kind != "yield":
            raise InternalError(f"the nvidia backend does not know {op.kind!r}")

    def const(self, op: Op) -> None:
        plain = number(op.attrs["value"], op.result.dtype)
        if plain is None:
            self.define(op.result, typed_number(op.attrs["value"], op.result.dtype), (), "c")
        else:
            self.table[op.result] = Text(plain, literal=True)

    def dim(self, op: Op) -> None:
        self.table[op.result] = self.memory.dim(op.attrs["tensor"], op.attrs["axis"])

    def param(self, op: Op) -> None:
        name = self.memory.scalar(op.attrs["name"])
        dtype = op.result.dtype
        if dtype is bool_:
            self.define(op.result, f"{name} != 0", stem=name)
        elif dtype.is_float or dtype.bits == 64:
            self.define(op.result, f"tl.cast({name}, {triton_type(dtype)})", stem=name)
        else:
            self.table[op.result] = Text(name)

    def arange(self, op: Op) -> None:
        side = padded(op.result.shape[0])
        self.table[op.result] = Text(self.memory.iota(side), (side,))

    def program_id(self, op: Op) -> None:
        """One flat grid, the last size fastest."""
        self.lines.add("pid = tl.program_id(0)")
        pairs = list(zip(op.operands, op.results, strict=True))
        for n, (size, result) in reversed(list(enumerate(pairs))):
            if n == 0:
                self.define(result, "pid", stem="i")
                continue
            self.define(result, f"pid % {self.value(size)}", stem="i")
            self.lines.add(f"pid = pid // {self.value(size)}")

    def elementwise(self, op: Op) -> None:
        if op.kind == "add" and self._add_product(op):
            return
        form = elementwise.form(op, emulate=self.emulate) if op.kind != "cast" else self._cast(op)
        if op.kind in ("floordiv", "mod"):
            form = self._division(op) or form
        texts = [self.value(v) for v in op.operands]
        picked = texts[1:] if op.kind == "where" else texts
        typed = all(t.literal for t in picked) or any(f in form for f in TENSORS_ONLY)
        atoms = [self.tensor(v) if typed else t.text for v, t in zip(op.operands, texts, strict=True)]
        text, shape = form.format(*atoms), meet(*(t.shape for t in texts))
        if self.emulate and not shape and op.result.dtype is bool_ and op.operands[-1].dtype.is_float:
            text = f"({text}).to(tl.int32) != 0"  # the interpreter spreads a comparison as what was compared
        self.define(op.result, text, shape, op.kind)

    def _cast(self, op: Op) -> str:
        return elementwise.cast(op.operands[0].dtype, op.result.dtype, emulate=self.emulate)

    def _division(self, op: Op) -> str | None:
        """A cheaper form of a division by a constant."""
        divisor = constant(op.operands[1])
        shift = elementwise.power_of_two(op.kind, divisor)
        if shift is not None:
            return shift
        positive = divisor is not None and divisor > 0 and nonnegative(linear(op.operands[0]), self.loops)
        return {"floordiv": "{0} // {1}", "mod": "{0} % {1}"}[op.kind] if positive else None

    def expand(self, op: Op) -> None:
        text, at = self.value(op.operands[0]), op.attrs["position"]
        if text.shape:
            shape = (*text.shape[:at], 1, *text.shape[at:])
            text = Text(f"{self.tensor(op.operands[0])}{'[None, :]' if at == 0 else '[:, None]'}", shape)
        self.table[op.result] = text

    def broadcast(self, op: Op) -> None:
        """Nothing to do: Triton broadcasts where the value is used."""
        self.table[op.result] = self.value(op.operands[0])

    def trans(self, op: Op) -> None:
        text = self.value(op.operands[0])
        if not text.shape:
            self.table[op.result] = text
        else:
            self.define(op.result, f"tl.trans({text})", text.shape[::-1], "trans")

    # ---- folds -------------------------------------------------------------------------------------------------------

    def masked(self, value: Value, axis: int, neutral: str) -> str:
        """The value with what changes nothing in its padding along an axis."""
        side = value.shape[axis]
        if neutral == "0.0" and (value, axis) in self.clean:
            return self.clean[value, axis]
        if padded(side) == side or (neutral in ("0", "0.0") and holds_zero(value, axis)):
            return self.full(value)
        rank = len(value.shape)
        inside = spread(f"({self.memory.iota(padded(side), axis, rank)} < {side})", axis, rank)
        if value.dtype.is_narrow:
            neutral = f"tl.full([], {neutral}, {triton_type(value.dtype)})"
        return f"tl.where({inside}, {self.full(value)}, {neutral})"

    def reduce(self, op: Op) -> None:
        (value,), fold, axis = op.operands, op.attrs["fold"], op.attrs["axis"]
        text = self.masked(value, axis, identity(fold, value.dtype))
        if value.dtype is bool_:
            self.define(op.result, f"tl.{fold}(({text}).to(tl.int32), {axis}) != 0", stem=fold)
            return
        self.define(op.result, f"tl.{fold}({text}, {axis})", stem=fold)
        if value.dtype.is_float and nan_matters(op, self.uses, self.loops):  # of nothing but NaN it is the identity
            name = self.value(op.result)
            self.lines.add(f"{name} = tl.where({name} == {name}, {name}, {identity(fold, value.dtype)})")

    def dot(self, op: Op) -> None:
        readers = self.uses.get(op.result, [])
        alone = len(readers) == 1 and readers[0].kind == "add" and any(other is readers[0] for other in self.here.ops)
        whole = alone and readers[0].result.shape == op.result.shape
        if whole and 1 not in (*op.operands[0].shape, *op.operands[1].shape):
            self.fused[op.result] = op
        else:
            self.define(op.result, self._product(op), stem="dot")

    def _add_product(self, op: Op) -> bool:
        """An addition to a product, as the product's accumulator."""
        for one, other in (op.operands, op.operands[::-1]):
            if one in self.fused:
                if other in self.fused:
                    product = self.fused.pop(other)
                    self.define(other, self._product(product), stem="dot")
                added = self.full(other, op.result.shape)
                self.define(op.result, self._product(self.fused.pop(one), added), stem="acc")
                return True
        return False

    def _product(self, op: Op, accumulator: str = "") -> str:
        left, right = op.operands
        (m, k), n = left.shape, right.shape[1]
        if k == 1:
            return f"{self._wide(self.full(left), left)} * {self._wide(self.full(right), right)}"
        a, b = self.masked(left, 1, "0.0"), self.masked(right, 0, "0.0")
        if m == 1:  # not worth a matrix unit
            return f"tl.sum({self._wide(f'tl.trans({a})', left)} * {self._wide(b, right)}, 0)[None, :]"
        if n == 1:
            return f"tl.sum({self._wide(a, left)} * {self._wide(f'tl.trans({b})', right)}, 1)[:, None]"
        emulated = self.emulate and left.dtype is bfloat16
        if emulated:
            a, b = self._wide(a, left), self._wide(b, right)
        extra = f", {accumulator}" if accumulator else ""
        extra += ', input_precision="ieee"' if left.dtype is float32 or emulated else ""
        return f"tl.dot({a}, {b}{extra})"

    def _wide(self, text: str, value: Value) -> str:
        return elementwise.cast(value.dtype, float32, emulate=self.emulate).format(text)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> None:
        name = f"{op.attrs['tensor'].name}_tile"
        if self.schedule.tensor_descriptors:
            tile = self.descriptors.load(op, [self.value(v).text for v in op.operands])
            if tile is not None:
                self.define(op.result, tile, stem=name)
                return
        address, mask = self._place(op, op.operands)
        other = "0.0" if op.result.dtype.is_float else "0"
        guard = f", mask={mask}, other={other}" if mask else ""
        self.define(op.result, f"tl.load({address}{guard})", stem=name)

    def store(self, op: Op) -> None:
        address, mask = self._place(op, op.operands[1:])
        value = op.operands[0]
        text = self.value(value)
        content = text.text if not text.shape else self.full(value)
        self.lines.add(f"tl.store({address}, {content}{f', mask={mask}' if mask else ''})")

    def _place(self, op: Op, starts: tuple[Value, ...]) -> tuple[str, str]:
        tensor, texts = op.attrs["tensor"], [self.value(v) for v in starts]
        at = self.memory.origin(tensor, texts)
        offsets = self.memory.offsets(tensor, op.attrs["extents"])
        if " + " in at:
            name = self.names.fresh(f"{tensor.name}_at")
            self.lines.add(f"{name} = {at}")
            at = name
        return f"{at} + ({offsets})" if offsets else at, self.memory.mask(op, texts)

    def gather(self, op: Op) -> None:
        address, mask = self.memory.gather(op, self.value)
        shape = padded_shape(op.result.shape)
        if meet(*(self.value(v).shape for v in op.operands)) != shape:
            address = f"tl.broadcast_to({address}, {shape_text(shape)})"
        guard = f", mask={mask}, other={'0.0' if op.result.dtype.is_float else '0'}" if mask else ""
        self.define(op.result, f"tl.load({address}{guard})", stem=f"{op.attrs['tensor'].name}_tile")

    # ---- control -----------------------------------------------------------------------------------------------------

    def loop(self, op: Op) -> None:
        (body,) = op.blocks
        low, high, *inits = op.operands
        carried = []
        leaving = body.terminator.operands
        for init, param, last, result in zip(inits, body.params[1:], leaving, op.results, strict=True):
            name = self.names.fresh(result.hint or param.hint or last.hint or "carried")
            self.lines.add(f"{name} = {self.full(init)}")
            self.table[param] = self.table[result] = Text(name, padded_shape(param.shape))
            carried.append(name)
        counter = self.names.fresh(body.params[0].hint or "j")
        turn = self.names.fresh(f"turn_{counter}")
        form = "whole({})" if self.emulate else "{}"
        bounds = f"{form.format(self.value(low))}, {form.format(self.value(high))}, {op.attrs['step']}"
        asked = ", warp_specialize=True" if op is self.special else self._stages(op)
        self.lines.add(f"for {turn} in {'tl.range' if asked else 'range'}({bounds}{asked}):")
        self.lines.depth += 1
        self.lines.add(f"{counter} = tl.cast({turn}, tl.int32)")
        self.table[body.params[0]] = Text(counter)
        self.block(body)
        self._assign(carried, body)
        self.lines.depth -= 1

    def _stages(self, loop: Op) -> str:
        few = loop.attrs.get("edge") and self.schedule.edge_stages
        return f", num_stages={self.schedule.edge_stages}" if few else ""

    def branch(self, op: Op) -> None:
        names = [self.names.fresh(result.hint or "picked") for result in op.results]
        for head, block in zip((f"if {self.tensor(op.operands[0])}:", "else:"), op.blocks, strict=True):
            if head == "else:" and len(block.ops) == 1 and not names:
                break
            self.lines.add(head)
            self.lines.depth += 1
            before = len(self.lines.lines)
            self.block(block)
            self._assign(names, block)
            if len(self.lines.lines) == before:
                self.lines.add("pass")
            self.lines.depth -= 1
        for name, result in zip(names, op.results, strict=True):
            self.table[result] = Text(name, padded_shape(result.shape))

    def _assign(self, names: list[str], block: Block) -> None:
        """What a block yields, all at once: values may trade places."""
        pairs = [(n, self.full(v)) for n, v in zip(names, block.terminator.operands, strict=True)]
        pairs = [(n, text) for n, text in pairs if n != text]
        if pairs:
            self.lines.add(f"{', '.join(n for n, _ in pairs)} = {', '.join(text for _, text in pairs)}")


HANDLERS = {
    "const": "const",
    "dim": "dim",
    "param": "param",
    "arange": "arange",
    "program_id": "program_id",
    "expand": "expand",
    "broadcast": "broadcast",
    "trans": "trans",
    "reduce": "reduce",
    "dot": "dot",
    "load": "load",
    "store": "store",
    "gather": "gather",
    "for": "loop",
    "if": "branch",
}
