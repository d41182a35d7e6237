"""Emit one value at one point of a nest."""

from __future__ import annotations

from ...dtypes import DType
from ...ir import ELEMENTWISE, Op, Value, constant, starts
from ...ir.fields import Fields, bit_fields
from ...ir.intervals import is_exact
from ...ir.periods import period
from .axes import Axes, Axis, tile_of
from .bool_reductions import any_or_all
from .emit import Emitter, Index, Reg
from .functions import FUNCTIONS
from .integers import divide, divide_positive, divide_unsigned, shift
from .lookup import lookup
from .point import Point
from .rounding import ROUND, is_exact_cast
from .scratch import Buffer, Scratch
from .spread_reads import one_word
from .strided import Positions
from .tiles import Tensors
from .vectors import register_type

FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
INTEGER = {"add": "add", "sub": "sub", "mul": "mul"}
FLOAT_TESTS = {"lt": "olt", "le": "ole", "eq": "oeq", "ne": "une"}
INTEGER_TESTS = {"lt": "slt", "le": "sle", "eq": "eq", "ne": "ne"}
UNSIGNED_TESTS = INTEGER_TESTS | {"lt": "ult", "le": "ule"}
BITWISE = {"bitand": "and", "bitor": "or", "bitxor": "xor"}
EXTREMES = {"max": float("-inf"), "min": float("inf")}


class Evaluator:
    """Compute values on demand: read them from storage if another nest made them, else compute them from operands."""

    def __init__(self, emitter: Emitter, axes: Axes, tensors: Tensors, scratch: Scratch) -> None:
        self.e, self.axes, self.tensors, self.scratch = emitter, axes, tensors, scratch
        self.scalars: dict[Value, Reg] = {}
        self.buffers: dict[Value, Buffer] = {}
        self.making: set[Value] = set()  # values of the current nest, which are never read back
        self._bit_fields: dict[Value, Fields | None] = {}

    def value(self, value: Value, pt: Point) -> Reg:
        if not value.shape:
            return self.scalars[value]
        known = pt.memo.get(value)
        if known is None:
            known = pt.memo[value] = self._compute(value, pt)
        return known

    def index(self, value: Value) -> Index:
        """Return a scalar as an i64 index."""
        reg = self.scalars[value]
        if not reg.text.startswith("%"):
            return int(reg.text)
        return reg.text if reg.type == "i64" else self.e.op(f"sext i32 {reg.text} to i64")

    def operand(self, op: Op, value: Value, pt: Point) -> Reg:
        """Return an operand at the point of its op, whose axes may be others."""
        if not value.shape:
            return self.scalars[value]
        mine = self.axes.dims(tile_of(op))
        if op.kind == "trans":
            mine = mine[::-1]
        elif op.kind == "expand":
            mine = mine[: op.attrs["position"]] + mine[op.attrs["position"] + 1 :]
        return self.value(value, pt.translated(mine, self.axes.dims(value)))

    def positions(self, op: Op, pt: Point) -> Positions:
        """Return the positions of a gather or scatter at a point."""
        regs, values, mask = list[Reg](), list[Value](), None
        for value in starts(op):
            test = self._masked(value)
            if test is None:
                regs.append(self.operand(op, value, pt))
                values.append(value)
                continue
            there = pt.translated(self.axes.dims(tile_of(op)), self.axes.dims(value))
            seen, position, _ = test.operands
            regs.append(self.operand(test, position, there))
            values.append(position)
            reg = self.operand(test, seen, there)
            mask = reg if mask is None else self.e.binary("and", mask, reg)
        return Positions(regs, values, mask)

    def _masked(self, value: Value) -> Op | None:
        """Match `where(test, position, -1)`, computed where it is read."""
        op = value.op
        if op is None or op.kind != "where" or not value.shape or (value in self.buffers and value not in self.making):
            return None
        outside = constant(op.operands[2])
        return op if outside is not None and outside < 0 and len(op.operands[1].shape) == len(value.shape) else None

    def moved(self, source: Value, target: Value, pt: Point) -> Reg:
        """Return a source at a point that is given in the axes of the target."""
        if not source.shape:
            return self.scalars[source]
        return self.value(source, pt.translated(self.axes.dims(target), self.axes.dims(source)))

    def _compute(self, value: Value, pt: Point) -> Reg:
        if value in self.buffers and value not in self.making:
            return self.scratch.read(self.buffers[value], pt)
        op = value.op
        assert op is not None, "a carried value without storage"
        if op.kind == "arange":
            return self.position(self.axes.dims(value)[0], pt)
        if op.kind in ("mod", "mul", "bitand") and self.axes.index_like(value) and pt.lane in self.axes.of(value):
            alike = period(value, self.e.lanes)
            if alike is not None:
                return Reg("<" + ", ".join(f"i32 {n}" for n in alike) + ">", "i32", True)
        if op.kind == "bitand" and (fields := self._fields(value, pt)) is not None:
            return self.tensors.read_fields(fields, pt)
        if op.kind == "load" or op in self.tensors.tiles:
            return self.tensors.read(op, pt)
        if op.kind == "gather":
            spans = self.tensors.spans(op, self.index)
            return self.tensors.read_gather(op, self.positions(op, pt), spans, pt)
        if op.kind == "reduce":  # over a side of 1
            return self.only_element(op, pt)
        load = self._masked_load(op) if op.kind == "where" else None
        if load is not None:
            there = pt.translated(self.axes.dims(value), self.axes.dims(load.result))
            return self.tensors.read(load, there, self.operand(op, op.operands[0], pt))
        operands = [self.operand(op, v, pt) for v in op.operands]
        return self.elementwise(op, operands) if op.kind in ELEMENTWISE else operands[0]

    def _fields(self, value: Value, pt: Point) -> Fields | None:
        """Return the bit fields that a vector of a tile is, if they are read as one word."""
        if pt.lane is None or pt.valid is not None or self.axes.dims(value)[-1] is not pt.lane:
            return None
        if value not in self._bit_fields:
            self._bit_fields[value] = bit_fields(value)
        fields = self._bit_fields[value]
        if fields is None or fields.load.result in self.buffers or not one_word(self.e, fields):
            return None
        return fields if self.axes.dims(fields.load.result) == self.axes.dims(value) else None

    def _masked_load(self, op: Op) -> Op | None:
        """Match `where(test, load, 0)`, which is a masked load."""
        load, other = op.operands[1].op, op.operands[2].op
        zero = other is not None and other.kind == "const" and str(other.attrs["value"]) == "0.0"  # and not -0.0
        lazy = load is not None and load.kind == "load" and bool(load.result.shape) and load.result not in self.buffers
        return load if load is not None and zero and lazy and "spread" not in load.attrs else None

    def only_element(self, op: Op, pt: Point) -> Reg:
        source = op.operands[0]
        mine = list(self.axes.dims(op.result))
        mine.insert(op.attrs["axis"], None)
        x = self.value(source, pt.translated(tuple(mine), self.axes.dims(source)))
        fold = op.attrs["fold"]
        return x if fold == "sum" else self.combine(fold, self.identity(fold, source.dtype), x)

    def position(self, axis: Axis | None, pt: Point) -> Reg:
        e = self.e
        if axis is None:
            return e.number(0, "i32")
        index = pt.at[axis]
        first = Reg(str(index), "i32") if isinstance(index, int) else Reg(e.op(f"trunc i64 {index} to i32"), "i32")
        return e.binary("add", first, e.iota()) if axis is pt.lane else first

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def elementwise(self, op: Op, x: list[Reg]) -> Reg:
        e, kind = self.e, op.kind
        dtype = op.operands[0].dtype
        is_float, unsigned = dtype.is_float, dtype.is_unsigned
        if kind == "where":
            return e.select(*x)
        if kind == "fma":
            return e.fma(*x)
        if kind == "lookup":
            return lookup(e, op, x[0])
        if kind == "cast":
            return self.cast(x[0], op.operands[0].dtype, op.result.dtype, exact=is_exact_cast(op))
        if kind in FLOAT_TESTS:
            tests = UNSIGNED_TESTS if unsigned else INTEGER_TESTS
            test = f"fcmp {FLOAT_TESTS[kind]}" if is_float else f"icmp {tests[kind]}"
            return e.binary(test, x[0], x[1], "i1")
        if kind in ("and", "or"):
            return e.binary(kind, x[0], x[1])
        if kind == "not":
            return e.binary("xor", x[0], e.number(True, "i1"))
        if kind in BITWISE:
            return e.binary(BITWISE[kind], x[0], x[1])
        if kind in ("shl", "shr"):
            return shift(e, op, x[0], x[1])
        if kind in ("floordiv", "mod"):
            known = op.operands[0].shape and is_exact(op)  # of positions: LLVM makes shifts and masks of it
            return (divide_positive if known else divide_unsigned if unsigned else divide)(e, kind, x[0], x[1])
        if kind in ("max", "min"):
            return e.intrinsic(f"{kind}num" if is_float else f"{'u' if unsigned else 's'}{kind}", x[0], x[1])
        if kind == "neg":
            return e.unary("fneg", x[0]) if is_float else e.binary("sub", e.number(0, x[0].type), x[0])
        if kind == "abs" and unsigned:
            return x[0]
        if kind == "abs" and not is_float:
            name, type_ = f"llvm.abs.{e.suffix(x[0])}", e.type_of(x[0])
            return Reg(e.call(type_, name, (type_, x[0].text), ("i1", "false")), x[0].type, x[0].vector)
        if kind in FUNCTIONS:
            return FUNCTIONS[kind](e, x[0])
        return e.binary((FLOAT if is_float else INTEGER)[kind], x[0], x[1])

    def cast(self, x: Reg, source: DType, target: DType, *, exact: bool = False) -> Reg:
        e = self.e
        kind = register_type(target)
        if target.is_float:
            if source.kind == "bool":
                x = e.convert("uitofp", x, "float")
            elif source.is_int:
                x = e.convert("uitofp" if source.is_unsigned and source.bits == 32 else "sitofp", x, "float")
            return x if exact or target.name == source.name else ROUND[target.name](e, x)
        if kind == "i1":
            test = "fcmp une" if source.is_float else "icmp ne"
            return e.binary(test, x, e.number(0, x.type), "i1")
        if source.kind == "bool":
            return e.convert("zext", x, kind)
        if source.is_float:  # toward zero, saturating; NaN gives 0
            narrow = f"i{target.bits}"
            sign = "u" if target.is_unsigned else "s"
            x = e.intrinsic(f"fpto{sign}i.sat", x, result=narrow)
            return e.convert("zext" if sign == "u" else "sext", x, kind) if narrow != kind else x
        if target.bits == 8:
            low = e.convert("trunc", x, "i8")
            return e.convert("zext" if target.name == "uint8" else "sext", low, "i32")
        if x.type == kind:
            return x
        return e.convert("trunc" if kind == "i32" else "zext" if source.is_unsigned else "sext", x, kind)

    # ---- folds -------------------------------------------------------------------------------------------------------

    def identity(self, fold: str, dtype: DType) -> Reg:
        """Return the neutral element of a fold."""
        type_ = register_type(dtype)
        if fold == "sum":
            return self.e.number(0, type_)
        if dtype.is_float:
            return self.e.number(EXTREMES[fold], type_)
        if type_ == "i1":
            return self.e.number(fold == "min", type_)
        bits = 63 if type_ == "i64" else 31
        return self.e.number(-(2**bits) if fold == "max" else 2**bits - 1, type_)

    def combine(self, fold: str, total: Reg, x: Reg) -> Reg:
        """Fold one more element. A NaN loses every comparison, so it never becomes a maximum or minimum."""
        e = self.e
        is_float = total.type == "float"
        if fold == "sum":
            return e.binary("fadd" if is_float else "add", total, x)
        if total.type == "i1":
            return e.binary("or" if fold == "max" else "and", total, x)
        test = (
            ("fcmp ogt" if fold == "max" else "fcmp olt") if is_float else ("icmp sgt" if fold == "max" else "icmp slt")
        )
        return e.select(e.binary(test, x, total, "i1"), x, total)

    def across(self, fold: str, total: Reg) -> Reg:
        """Fold the lanes of a vector by halves: the same tree whatever the length of the tile."""
        e = self.e
        if total.type == "i1" and fold != "sum":
            return any_or_all(e, fold, total)
        width, text, kind = e.lanes, total.text, e.vector_type(total.type)
        while width > 1:
            width //= 2
            picks = [i + width if i < width else 0 for i in range(e.lanes)]
            other = Reg(e.shuffle(text, text, total.type, picks), total.type, True)
            text = self.combine(fold, Reg(text, total.type, True), other).text
        return Reg(e.op(f"extractelement {kind} {text}, i64 0"), total.type)
