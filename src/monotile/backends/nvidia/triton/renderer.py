"""IR to Triton text: a statement per op, named as its author named things."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ....dtypes import bfloat16, bool_, float32
from ....errors import DeviceLimit, InternalError
from ....ir import ELEMENTWISE, Block, Kernel, Op, Value, constant, spreads, starts, uses, view_of, walk
from ....ir.affine import linear
from ....ir.intervals import interval, nonnegative
from ....ir.matchers import accumulation
from ....passes.facts import loop_of, nan_matters
from ..schedule import Schedule
from . import elementwise
from .barriers import barriers
from .descriptors import Descriptors
from .elementwise import Form
from .functions import FUNCTIONS
from .load_levels import load_levels
from .memory import Memory, spread
from .padding import holds_zero, identity, padded, padded_shape
from .spread_loads import doublings
from .text import TRITON, Dialect, Names, SourceLines, Text, literal, meet, shape_text
from .unpacking import HALVES, NOTHING, WHOLE, Unpackings

MAX_ELEMENTS = 2**20  # of a tile, by Triton's own rule


class TritonRenderer:
    """Writes blocks. `table` holds the text of every value that is defined."""

    dialect: Dialect = TRITON

    def __init__(self, kernel: Kernel, schedule: Schedule, *, wide: bool = False, emulate: bool = False) -> None:
        self.schedule, self.emulate, self.tl = schedule, emulate, self.dialect.module
        self.names, self.lines = Names(), SourceLines()
        self.names.taken |= FUNCTIONS.keys()
        self.helpers: set[str] = set()  # functions that the text calls
        self.memory = Memory(kernel, self.names, self.dialect, wide=wide, emulate=emulate)
        self.table: dict[Value, Text] = {}
        self.uses: Mapping[Value, list[Op]] = uses(kernel.body)
        self.loops = loop_of(kernel)
        self.descriptors = Descriptors(kernel, self.memory, self.uses)
        self.barriers = barriers(kernel)
        self.zero_padded: dict[tuple[Value, int], str] = {}  # values with zero in their padding along an axis
        # Triton specialises warps in one loop: of those with dots the shortest, which is the one without masks.
        with_dots = [
            op for op in walk(kernel.body) if op.kind == "for" and any(o.kind == "dot" for o in op.blocks[0].ops)
        ]
        self.specialized = (
            min(with_dots, key=lambda op: len(op.blocks[0].ops), default=None) if schedule.warp_specialize else None
        )
        self.here = kernel.body  # the block that is being written
        self.fused: dict[Value, Op] = {}  # dots that the addition of their result will write
        self.masked_loads: Mapping[Op, Op] = {}  # loads that the select of their rows will write
        self.unpackings: Unpackings = NOTHING  # tiles that assembly makes of packed codes

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self, value: Value) -> Text:
        return self.table[value]

    def tensor(self, value: Value) -> str:
        """Write a value as something that has a type of its own."""
        text = self.table[value]
        return f"{self.tl}.full([], {text}, {self.dialect.type(value.dtype)})" if text.literal else text.text

    def full(self, value: Value, shape: tuple[int, ...] | None = None) -> str:
        """Write a value with all its padded sides, or broadcast to this shape."""
        text, shape = self.table[value], padded_shape(value.shape if shape is None else shape)
        if text.literal:
            return f"{self.tl}.full({shape_text(shape)}, {text}, {self.dialect.type(value.dtype)})"
        if text.shape == shape:
            return self.tensor(value)
        return f"{self.tl}.broadcast_to({self.tensor(value)}, {shape_text(shape)})"

    def define(self, value: Value, text: str, shape: tuple[int, ...] | None = None, stem: str = "") -> None:
        """Assign an expression to a new name."""
        shape = padded_shape(value.shape) if shape is None else shape
        elements = 1
        for side in shape:
            elements *= side
        if elements > MAX_ELEMENTS:
            found = f"a tile of {' x '.join(map(str, value.shape))} is {elements} elements with its padding"
            raise DeviceLimit(f"{found}; Triton has at most {MAX_ELEMENTS}: use smaller blocks")
        name = self.names.fresh(value.hint or stem)
        self.lines.add(f"{name} = {text}")
        self.table[value] = Text(name, shape)
        for axis in range(len(value.shape)):
            if any(op.kind == "dot" and op.operands[1 - axis] is value for op in self.uses.get(value, ())):
                masked = self.masked(value, axis, "0.0")
                if masked != name and shape == padded_shape(value.shape):
                    self.zero_padded[value, axis] = self.names.fresh(f"{name}_zero_padded")
                    self.lines.add(f"{self.zero_padded[value, axis]} = {masked}")

    def write_form(self, form: Form, *operands: str) -> str:
        """Fill in a form, and note the helpers that it calls."""
        self.helpers.update(form.helpers)
        return form.text.format(*operands, tl=self.tl)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        outer, self.here = self.here, block
        for op in block.ops:
            self.write(op)
        self.here = outer

    def write(self, op: Op) -> None:
        if op in self.barriers:
            self.lines.add(self.dialect.barrier)
        if op in self.unpackings.replaced:
            return
        if op in self.unpackings.made:
            self.unpack(op)
        elif op.kind in ELEMENTWISE:
            self.elementwise(op)
        elif op.kind in HANDLERS:
            getattr(self, HANDLERS[op.kind])(op)
        elif op.kind != "yield":
            raise InternalError(f"the nvidia backend does not know {op.kind!r}")

    def const(self, op: Op) -> None:
        value, dtype = op.attrs["value"], op.result.dtype
        plain = literal(value, dtype)
        if plain is None:
            self.define(op.result, self.dialect.number(value, dtype), (), "c")
        else:
            self.table[op.result] = Text(plain, constant=value)

    def dim(self, op: Op) -> None:
        self.table[op.result] = self.memory.dim(op.attrs["tensor"], op.attrs["axis"])

    def param(self, op: Op) -> None:
        name = self.memory.scalar(op.attrs["name"])
        dtype = op.result.dtype
        if dtype is bool_:
            self.define(op.result, f"{name} != 0", stem=name)
        elif dtype.is_float or dtype.bits == 64:
            self.define(op.result, f"{self.tl}.cast({name}, {self.dialect.type(dtype)})", stem=name)
        else:
            self.table[op.result] = Text(name)

    def arange(self, op: Op) -> None:
        side = padded(op.result.shape[0])
        self.table[op.result] = Text(self.memory.iota(side), (side,))

    def program_id(self, op: Op) -> None:
        """Find the place in one flat grid, the last size fastest."""
        self.lines.add(f"pid = {self.tl}.program_id(0)")
        pairs = list(zip(op.operands, op.results, strict=True))
        for n, (size, result) in reversed(list(enumerate(pairs))):
            if n == 0:
                self.define(result, "pid", stem="i")
                continue
            self.define(result, f"pid % {self.value(size)}", stem="i")
            self.lines.add(f"pid = pid // {self.value(size)}")

    def elementwise(self, op: Op) -> None:
        if op.kind == "add" and self._add_dot(op):
            return
        if op.kind == "lookup":
            self.lookup(op)
            return
        if op in self.masked_loads:
            self.masked_load(self.masked_loads[op], op)
            return
        form = self.form(op)
        texts = [self.value(v) for v in op.operands]
        typed = form.typed or all_literal(op, texts)
        atoms = [self.tensor(v) if typed else t.text for v, t in zip(op.operands, texts, strict=True)]
        text, shape = self.write_form(form, *atoms), meet(*(t.shape for t in texts))
        if self.emulate and not shape and op.result.dtype is bool_ and op.operands[-1].dtype.is_float:
            text = f"({text}).to(tl.int32) != 0"  # the interpreter broadcasts a comparison as what was compared
        self.define(op.result, text, shape, op.kind)

    def lookup(self, op: Op) -> None:
        """Choose an entry of a table by the bits of its position, from the lowest up."""
        (index,), dtype = op.operands, op.result.dtype
        at, shape, tl = self.tensor(index), self.value(index).shape, self.tl
        table = op.attrs["table"]
        parts = [self.dialect.number(x, dtype) for x in table]
        bit = 1
        while len(parts) > 1:
            test = self.names.fresh(f"bit_{bit}")
            self.lines.add(f"{test} = ({at} & {bit}) != 0")
            chosen = []
            for low, high in zip(parts[::2], [*parts[1::2], parts[-1]], strict=False):
                chosen.append(self.names.fresh("entry"))
                self.lines.add(f"{chosen[-1]} = {tl}.where({test}, {high}, {low})")
            parts, bit = chosen, 2 * bit
        least, most = interval(index)
        text = parts[0]
        if least < 0 or most >= len(table):
            zero = "0.0" if dtype.is_float else "0"
            text = f"{tl}.where(({at} >= 0) & ({at} < {len(table)}), {text}, {zero})"
        self.define(op.result, text, shape, "entry")

    def form(self, op: Op) -> Form:
        if op.kind == "cast":
            return elementwise.cast(op.operands[0].dtype, op.result.dtype, emulate=self.emulate)
        if op.kind in ("floordiv", "mod"):
            found = self._division(op)
            if found is not None:
                return found
        return elementwise.form(op, emulate=self.emulate)

    def _division(self, op: Op) -> Form | None:
        """Return a cheaper form of a division by a constant."""
        divisor = constant(op.operands[1])
        shift = elementwise.power_of_two(op.kind, divisor)
        if shift is not None:
            return shift
        positive = divisor is not None and divisor > 0 and nonnegative(linear(op.operands[0]), self.loops)
        return elementwise.TRUNCATED[op.kind] if positive else None

    def expand(self, op: Op) -> None:
        text, at = self.value(op.operands[0]), op.attrs["position"]
        if text.shape:
            shape = (*text.shape[:at], 1, *text.shape[at:])
            text = Text(f"{self.tensor(op.operands[0])}{'[None, :]' if at == 0 else '[:, None]'}", shape)
        self.table[op.result] = text

    def broadcast(self, op: Op) -> None:
        """Write nothing: Triton broadcasts where the value is used."""
        self.table[op.result] = self.value(op.operands[0])

    def trans(self, op: Op) -> None:
        text = self.value(op.operands[0])
        if not text.shape:
            self.table[op.result] = text
        else:
            self.define(op.result, f"{self.tl}.trans({text})", text.shape[::-1], "trans")

    # ---- reductions and dots -----------------------------------------------------------------------------------------

    def masked(self, value: Value, axis: int, neutral: str) -> str:
        """Write a value with a neutral element in its padding along an axis."""
        side = value.shape[axis]
        if neutral == "0.0" and (value, axis) in self.zero_padded:
            return self.zero_padded[value, axis]
        if padded(side) == side or (neutral in ("0", "0.0") and holds_zero(value, axis)):
            return self.full(value)
        rank = len(value.shape)
        inside = spread(f"({self.memory.iota(padded(side))} < {side})", axis, rank)
        if value.dtype.is_narrow:
            neutral = f"{self.tl}.full([], {neutral}, {self.dialect.type(value.dtype)})"
        return f"{self.tl}.where({inside}, {self.full(value)}, {neutral})"

    def reduce(self, op: Op) -> None:
        (value,), fold, axis = op.operands, op.attrs["fold"], op.attrs["axis"]
        text = self.masked(value, axis, identity(fold, value.dtype))
        if value.dtype is bool_:
            self.define(op.result, f"{self.tl}.{fold}(({text}).to({self.tl}.int32), {axis}) != 0", stem=fold)
            return
        self.define(op.result, f"{self.tl}.{fold}({text}, {axis})", stem=fold)
        self.replace_nan(op)

    def replace_nan(self, reduction: Op) -> None:
        """A reduction of nothing but NaN is the identity, where that matters: Triton's gives NaN."""
        (value,) = reduction.operands
        if value.dtype.is_float and nan_matters(reduction, self.uses, self.loops):
            name, neutral = self.value(reduction.result), identity(reduction.attrs["fold"], value.dtype)
            self.lines.add(f"{name} = {self.tl}.where({name} == {name}, {name}, {neutral})")

    def scan(self, op: Op) -> None:
        """Write a running sum; padding comes last."""
        self.define(op.result, f"{self.tl}.cumsum({self.full(op.operands[0])}, {op.attrs['axis']})", stem="cumsum")

    def reshape(self, op: Op) -> None:
        """Write a reshape. Where sides are padded, elements are looked up by their position in the padded operand."""
        (value,), tl, target = op.operands, self.tl, padded_shape(op.result.shape)
        text = self.full(value)
        if padded_shape(value.shape) != value.shape or target != op.result.shape:
            at, source = self.names.fresh("at"), padded_shape(value.shape)
            self.lines.add(f"{at} = {tl}.arange(0, {math.prod(target)})")
            flat = at
            if len(target) == 2:
                flat = f"{at} // {target[1]} * {op.result.shape[1]} + {at} % {target[1]}"
            if len(source) == 2:
                self.lines.add(f"{at} = {flat}")
                flat = f"{at} // {value.shape[1]} * {source[1]} + {at} % {value.shape[1]}"
            self.lines.add(f"{at} = {tl}.minimum({flat}, {math.prod(source) - 1})")
            wide = f"({text}).to({tl}.int8)" if value.dtype is bool_ else text
            text = f"{tl}.gather({tl}.reshape({wide}, [{math.prod(source)}]), {at}, 0)"
            text = f"({text} != 0)" if value.dtype is bool_ else text
        self.define(op.result, f"{tl}.reshape({text}, {shape_text(target)})", stem="reshaped")

    def dot(self, op: Op) -> None:
        if self.accumulates(op) and 1 not in (*op.operands[0].shape, *op.operands[1].shape):
            self.fused[op.result] = op
        else:
            self.define(op.result, self._product(op), stem="dot")

    def accumulates(self, dot: Op) -> bool:
        """Return True if a dot can start from what is added to it."""
        readers = self.uses.get(dot.result, [])
        if len(readers) != 1 or readers[0] not in self.here.ops:
            return False
        found = accumulation(readers[0], self.here.ops, self.uses)
        return found is not None and found.dot is dot

    def _add_dot(self, op: Op) -> bool:
        """Write an addition to a dot as the dot's accumulator."""
        found = accumulation(op, self.here.ops, self.uses)
        if found is None or found.dot.result not in self.fused:
            return False
        dot = self.fused.pop(found.dot.result)
        self.define(op.result, self._product(dot, self.full(found.addend, op.result.shape)), stem="acc")
        return True

    def _product(self, op: Op, accumulator: str = "") -> str:
        left, right = op.operands
        (m, k), n, tl = left.shape, right.shape[1], self.tl
        if k == 1:
            return f"{self._wide(self.full(left), left)} * {self._wide(self.full(right), right)}"
        a, b = self.masked(left, 1, "0.0"), self.masked(right, 0, "0.0")
        if m == 1:  # not worth a matrix unit
            return f"{tl}.sum({self._wide(f'{tl}.trans({a})', left)} * {self._wide(b, right)}, 0)[None, :]"
        if n == 1:
            return f"{tl}.sum({self._wide(a, left)} * {self._wide(f'{tl}.trans({b})', right)}, 1)[:, None]"
        emulated = self.emulate and left.dtype is bfloat16
        if emulated:
            a, b = self._wide(a, left), self._wide(b, right)
        extra = f", {accumulator}" if accumulator else ""
        extra += ', input_precision="ieee"' if left.dtype is float32 or emulated else ""
        return f"{tl}.dot({a}, {b}{extra})"

    def _wide(self, text: str, value: Value) -> str:
        return self.write_form(elementwise.cast(value.dtype, float32, emulate=self.emulate), text)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> None:
        if op in self.masked_loads.values():
            return
        name = f"{op.attrs['tensor'].name}_tile"
        if self.schedule.tensor_descriptors:
            tile = self.descriptors.load(op, [self.value(v).text for v in op.operands])
            if tile is not None:
                self.define(op.result, tile, stem=name)
                return
        times = doublings(op)
        address, mask = self._place(op, packed=times is not None)
        text = self.load_text(op, address, mask)
        self.define(op.result, text if times is None else self._doubled(text, name, op, times), stem=name)

    def _doubled(self, text: str, name: str, op: Op, times: int) -> str:
        """Return a tile whose columns are repeated until it is as wide as the result of a load."""
        rows, columns = padded_shape(op.result.shape)
        for n in reversed(range(times)):
            tile = self.names.fresh(name)
            self.lines.add(f"{tile} = {text}")
            text = f"{self.tl}.reshape({self.tl}.join({tile}, {tile}), {shape_text((rows, columns >> n))})"
        return text

    def unpack(self, op: Op) -> None:
        """Write a tile of numbers as assembly on the bytes of its codes."""
        load, assembly, pure = self.unpackings.made[op]
        codes = self.names.fresh(f"{load.attrs['tensor'].name}_tile")
        self.lines.add(f"{codes} = {self.load_text(load, *self._place(load, packed=True, in_bytes=True))}")
        text = assembly.call(codes, pure=pure)
        if assembly.pairs:
            low, high = self.names.fresh("low"), self.names.fresh("high")
            self.lines.add(f"{low}, {high} = {HALVES.format(text)}")
            text = f"{self.tl}.reshape({self.tl}.join({low}, {high}), {shape_text(padded_shape(op.result.shape))})"
            text = WHOLE.format(text, pure)
        self.define(op.result, text, stem="numbers")

    def masked_load(self, op: Op, select: Op) -> None:
        """Write a load of the rows that a select chooses."""
        address, mask = self._place(op)
        rows = self.value(select.operands[0]).text
        text = self.load_text(op, address, f"({mask}) & {rows}" if mask else rows)
        self.define(select.result, text, stem=f"{op.attrs['tensor'].name}_tile")

    def load_text(self, op: Op, address: str, mask: str) -> str:
        guard = f", mask={mask}, other={identity('sum', op.result.dtype)}" if mask else ""
        return f"{self.tl}.load({address}{guard})"

    def store(self, op: Op) -> None:
        address, mask = self._place(op)
        value = op.operands[0]
        text = self.value(value)
        content = text.text if not text.shape else self.full(value)
        self.lines.add(f"{self.tl}.store({address}, {content}{f', mask={mask}' if mask else ''})")

    def _place(self, op: Op, *, packed: bool = False, in_bytes: bool = False) -> tuple[str, str]:
        """Return the addresses and the mask of a load's or store's tile. `packed`: of the elements in memory, which
        a tile may repeat; `in_bytes`: of their bytes."""
        tensor, texts = op.attrs["tensor"], [self.value(v) for v in starts(op)]
        views = {axis: self.value(span[0]) for axis in range(tensor.rank) if (span := view_of(op, axis))}
        origin = self.memory.origin(tensor, texts, views)
        parts = tensor.dtype.bytes if in_bytes else int(packed)
        offsets = self.memory.offsets(tensor, op.attrs["extents"], spreads(op), parts)
        at = origin.pointer
        if origin.terms:
            at = self.names.fresh(f"{tensor.name}_at")
            self.lines.add(f"{at} = {origin}")
        at = f"{at}.to({self.tl}.pointer_type({self.tl}.uint8))" if parts > 1 else at
        mask = self.memory.mask(op, texts, self.value, packed=packed)
        return f"{at} + ({offsets})" if offsets else at, mask

    def gather(self, op: Op) -> None:
        shape, stem = padded_shape(op.result.shape), f"{op.attrs['tensor'].name}_tile"
        address, mask = self._scattered(op, op.result, shape)
        self.define(op.result, self.load_text(op, address, mask), stem=stem)

    def scatter(self, op: Op) -> None:
        value = op.operands[0]
        address, mask = self._scattered(op, value, padded_shape(value.shape))
        self.lines.add(f"{self.tl}.store({address}, {self.full(value)}{f', mask={mask}' if mask else ''})")

    def _scattered(self, op: Op, value: Value, shape: tuple[int, ...]) -> tuple[str, str]:
        """Return the addresses, of this shape, and the mask of a gather or scatter."""
        address, mask = self.memory.gather(op, self.value, value)
        if meet(*(self.value(v).shape for v in starts(op))) != shape:
            address = f"{self.tl}.broadcast_to({address}, {shape_text(shape)})"
        return address, mask

    # ---- control -----------------------------------------------------------------------------------------------------

    def entering(self, loop: Op, init: Value, param: Value, last: Value) -> str:
        """Write the first value of what a loop carries. One that becomes another carried value, with the same first
        value, is folded away by Triton's compiler (3.6) as if it never changed: it must not be known to be the same."""
        if last is param or last not in loop.blocks[0].params[1:]:
            return self.full(init)
        other = "False" if init.dtype is bool_ else "0"
        return f"{self.tl}.where({self.tl}.program_id(2) == 0, {self.full(init)}, {other})"

    def loop(self, op: Op) -> None:
        (body,) = op.blocks
        low, high, *inits = op.operands
        carried = []
        leaving = body.terminator.operands
        for init, param, last, result in zip(inits, body.params[1:], leaving, op.results, strict=True):
            name = self.names.fresh(result.hint or param.hint or last.hint or "carried")
            self.lines.add(f"{name} = {self.entering(op, init, param, last)}")
            self.table[param] = self.table[result] = Text(name, padded_shape(param.shape))
            carried.append(name)
        counter = self.names.fresh(body.params[0].hint or "j")
        iteration = self.names.fresh(f"iteration_{counter}")
        bounds = f"{self._bound(low)}, {self._bound(high)}, {op.attrs['step']}"
        asked = ", warp_specialize=True" if op is self.specialized else self._stages(op)
        self.lines.add(f"for {iteration} in {'tl.range' if asked else 'range'}({bounds}{asked}):")
        self.lines.depth += 1
        self.lines.add(f"{counter} = tl.cast({iteration}, tl.int32)")
        self.table[body.params[0]] = Text(counter)
        self.block(body)
        self._assign(carried, body.terminator.operands)
        self.lines.depth -= 1

    def _bound(self, value: Value) -> str:
        if not self.emulate:
            return self.value(value).text
        self.helpers.add("python_int")
        return f"python_int({self.value(value)})"

    def _stages(self, loop: Op) -> str:
        """Return the stages of a loop that has others than the kernel: Triton divides them among loads that place
        others."""
        masked, levels = loop.attrs.get("edge") and self.schedule.edge_stages, load_levels(loop)
        stages = (self.schedule.edge_stages if masked else self.schedule.num_stages) - 1
        return f", num_stages={stages * levels + 1}" if masked or levels > 1 else ""

    def branch(self, op: Op) -> None:
        names = [self.names.fresh(result.hint or "picked") for result in op.results]
        for head, block in zip((f"if {self.tensor(op.operands[0])}:", "else:"), op.blocks, strict=True):
            if head == "else:" and len(block.ops) == 1 and not names:
                break
            self.lines.add(head)
            self.lines.depth += 1
            before = len(self.lines.lines)
            self.block(block)
            self._assign(names, block.terminator.operands)
            if len(self.lines.lines) == before:
                self.lines.add("pass")
            self.lines.depth -= 1
        for name, result in zip(names, op.results, strict=True):
            self.table[result] = Text(name, padded_shape(result.shape))

    def _assign(self, names: list[str], values: Sequence[Value]) -> None:
        """Assign what a block yields, all at once: values may trade places."""
        pairs = [(n, self.full(v)) for n, v in zip(names, values, strict=True)]
        pairs = [(n, text) for n, text in pairs if n != text]
        if pairs:
            self.lines.add(f"{', '.join(n for n, _ in pairs)} = {', '.join(text for _, text in pairs)}")


def all_literal(op: Op, texts: list[Text]) -> bool:
    """Return True if all that decides the type of a result is bare numbers."""
    return all(t.literal for t in (texts[1:] if op.kind == "where" else texts))


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
    "reshape": "reshape",
    "scan": "scan",
    "dot": "dot",
    "load": "load",
    "store": "store",
    "gather": "gather",
    "scatter": "scatter",
    "for": "loop",
    "if": "branch",
}
