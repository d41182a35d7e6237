"""Scalar types, numbers and elementwise operations as Metal text."""

from __future__ import annotations

import math

from ... import ir
from ...dtypes import FP8, DType
from ...errors import InternalError
from ...ir import Op, Value
from ...ir.intervals import interval, is_exact, shifts_in_range
from .infinities import infinity_of, is_from_memory
from .msl import BFLOAT_BITS, FP8_NAMES, HELPERS, helper_source

TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat",
    "int64": "long",
    "int32": "int",
    "uint32": "uint",
    "float8_e4m3fn": "uchar",
    "float8_e5m2": "uchar",
    "int8": "char",
    "uint8": "uchar",
    "bool": "bool",
}
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&&", "or": "||", "lt": "<", "le": "<=", "eq": "=="}
SYMBOLS |= {"ne": "!=", "bitand": "&", "bitor": "|", "bitxor": "^"}
UNSIGNED = {"int32": "uint", "int64": "ulong"}
LARGEST = ("-FLT_MAX", "FLT_MAX")  # stand for the infinities (infinities.py)
# The helper that turns the numbers that stand for infinities of these signs, by their sum, back into infinities.
RESTORED = {-1: "with_lowest", 0: "with_infinities", 1: "with_highest"}
INFINITY_BITS = ("0xFF800000u", "0x7F800000u")
POSITIONAL = ir.SHAPE_ONLY | {"const", "dim", "arange", "program_id", "add", "sub", "mul", "floordiv", "mod"}
POSITIONAL |= {"min", "max", "cast"}


class MetalDialect:
    """Metal with its `bfloat` type, or Metal before 3.1, which has none: memory then holds the bits of a bfloat16 as
    `ushort`, and registers hold its value as `float`. So it is with fp8, whose bits are a `uchar`. Records which helper
    functions the text calls."""

    def __init__(self, bfloat: bool = True) -> None:
        self.bfloat = bfloat
        self._helpers: set[str] = set()
        self._tables: dict[str, str] = {}  # names of lookup tables, by type and entries

    def use(self, helper: str) -> str:
        """Return the name of a helper function, whose definition the kernel then needs."""
        self._helpers.add(helper)
        return helper

    def helper_sources(self, dtypes: set[str]) -> list[str]:
        """Return the definitions the text needs; `dtypes` are those of the kernel's tensors and values."""
        bits = [BFLOAT_BITS] if not self.bfloat and "bfloat16" in dtypes else []
        bits += [f"constant {text.replace(' ', f' {name}', 1)}" for text, name in self._tables.items()]
        return bits + [
            helper_source(name, bfloat=self.bfloat and "bfloat16" in dtypes, uint="uint32" in dtypes)
            for name in HELPERS
            if name in self._helpers
        ]

    # ---- types -------------------------------------------------------------------------------------------------------

    def register_type(self, dtype: DType) -> str:
        return "float" if self.as_bits(dtype) else TYPES[dtype.name]

    def memory_type(self, dtype: DType) -> str:
        return "ushort" if dtype.name == "bfloat16" and not self.bfloat else TYPES[dtype.name]

    def tile_type(self, dtype: DType) -> str:
        """Return the type in threadgroup memory, where all tiles share one array: a bool is a byte of 0 or 1."""
        return "uchar" if dtype.name == "bool" else self.memory_type(dtype)

    def from_memory(self, text: str, dtype: DType) -> str:
        """Convert a value from its memory type to its register type."""
        return f"{self._bits('widened', dtype)}({text})" if self.as_bits(dtype) else text

    def to_memory(self, text: str, dtype: DType) -> str:
        """Convert a value from its register type to its memory type."""
        return f"{self._bits('narrowed', dtype)}({text})" if self.as_bits(dtype) else text

    def _bits(self, helper: str, dtype: DType) -> str:
        """Return the name of a function between the bits of a dtype and its value."""
        return self.use(f"{helper}_{FP8_NAMES[dtype.name]}") if dtype in FP8 else helper

    def as_bits(self, dtype: DType) -> bool:
        """True if memory holds the bits of this dtype under another type."""
        return dtype in FP8 or (dtype.name == "bfloat16" and not self.bfloat)

    def converted(self, text: str, dtype: DType) -> str:
        """Convert a number to the value of a dtype."""
        if dtype in FP8:
            return self.from_memory(self.to_memory(f"float({text})", dtype), dtype)
        return f"rounded({text})" if self.as_bits(dtype) else f"{TYPES[dtype.name]}({text})"

    # ---- numbers and operations --------------------------------------------------------------------------------------

    def zero(self, dtype: DType) -> str:
        return "0.0f" if dtype in FP8 else self.converted("0", dtype)

    def number(self, value: bool | int | float, dtype: DType) -> str:
        if dtype.name == "bool":
            return "true" if value else "false"
        if dtype.is_int:
            if dtype.name == "int64":
                return f"{value}L" if value != -(2**63) else "(-9223372036854775807L - 1)"
            if dtype.name == "uint32":
                return f"{value}u"
            return str(value) if value != -(2**31) else "(-2147483647 - 1)"
        value = float(value)
        if math.isnan(value):
            text = "NAN"
        elif math.isinf(value) and dtype.name == "float32":
            text = LARGEST[value > 0]
        elif math.isinf(value):
            text = "INFINITY" if value > 0 else "-INFINITY"
        else:
            text = f"{value!r}f"
        return text if dtype.name == "float32" else self.converted(text, dtype)

    def infinity(self, value: float) -> str:
        """Return a float32 infinity itself."""
        return f"as_type<float>({INFINITY_BITS[value > 0]})"

    def elementwise(self, op: Op, operands: list[str]) -> str:
        """Return one element of an elementwise op."""
        kind, dtype = op.kind, op.operands[-1].dtype
        a, b = (*operands, "", "")[:2]
        if kind == "where":
            return f"({a} ? {b} : {operands[2]})"
        if kind == "fma":
            return f"fma({a}, {b}, {operands[2]})"
        if kind == "lookup":
            return self._lookup(op, a)
        if "restored" in op.attrs:
            return self.restored(a, op.attrs["restored"])
        if kind == "cast":
            return self.cast(a, op.operands[0].dtype, op.result.dtype)
        if kind in ("eq", "ne") and any(infinity_of(v) is not None for v in op.operands):
            return self._is_infinite(op, operands)
        if kind == "not":
            return f"!{a}"
        if kind in ("shl", "shr"):
            return self._shift(op, a, b)
        if kind in ("floordiv", "mod") and dtype.is_unsigned:
            return f"({b} == 0 ? 0u : {a} {'/' if kind == 'floordiv' else '%'} {b})"
        if kind in ("floordiv", "mod"):
            if is_exact(op):
                return f"({a} {'/' if kind == 'floordiv' else '%'} {b})"
            return f"{self.use('floordiv' if kind == 'floordiv' else 'floormod')}({a}, {b})"
        if kind == "abs" and dtype.is_unsigned:
            return a
        may_wrap = dtype.is_int and not dtype.is_unsigned and kind in ("add", "sub", "mul", "neg", "abs")
        if may_wrap and not (is_position(op.result) or is_exact(op)):
            return _wrapping(kind, a, b, dtype)
        if kind in SYMBOLS:
            return f"({a} {SYMBOLS[kind]} {b})"
        if kind == "neg":
            return f"(-{a})"
        if kind == "abs":
            return f"abs({a})" if dtype.is_int else f"fabs({a})"
        if kind == "reciprocal":
            return f"(1.0f / {a})"
        if kind in ("max", "min"):
            return f"{'' if dtype.is_int else 'f'}{kind}({a}, {b})"
        if kind in ("tanh", "sin", "cos"):  # the fast tanh overflows above 45, fast sines are for small angles
            return f"precise::{kind}({a})"
        if kind in ("sigmoid", "erf"):
            return f"{self.use('logistic' if kind == 'sigmoid' else 'error_function')}({a})"
        if kind in ir.UNARY:
            return f"{kind}({a})"
        raise InternalError(f"the metal backend has no text for {kind!r}")

    def _lookup(self, op: Op, index: str) -> str:
        dtype, table = op.result.dtype, op.attrs["table"]
        entries = ", ".join(self.number(x, dtype) for x in table)
        text = f"[{len(table)}] = {{{entries}}};"
        name = self._tables.setdefault(f"{TYPES[dtype.name]} {text}", f"table_{len(self._tables)}")
        low, high = interval(op.operands[0])
        inside = low >= 0 and high < len(table)
        found = f"{name}[{bare(index)}]"
        return found if inside else f"(uint({bare(index)}) < {len(table)}u ? {found} : {self.zero(dtype)})"

    def restored(self, text: str, signs: int) -> str:
        """Turn the numbers that stand for infinities back into infinities, by their bits: of the sign given, or of both
        for 0."""
        return f"as_type<float>({self.use(RESTORED[signs])}(as_type<uint>({bare(text)})))"

    def _shift(self, op: Op, a: str, count: str) -> str:
        """Return a shift. In Metal one to the left of a negative number, and by a count out of range, is undefined."""
        kind, name = op.kind, TYPES[op.result.dtype.name]
        if not shifts_in_range(op):
            return f"{self.use('shifted_left' if kind == 'shl' else 'shifted_right')}({a}, {count})"
        if kind == "shr" or op.result.dtype.is_unsigned:
            return f"({a} {'<<' if kind == 'shl' else '>>'} {count})"
        return f"{name}({UNSIGNED[op.result.dtype.name]}({a}) << {count})"

    def _is_infinite(self, op: Op, operands: list[str]) -> str:
        """Return a comparison with an infinity, or with the number that stands for it, by bits: fast math would take a
        comparison of floats for false. In memory infinities are infinities."""
        signs = [infinity_of(v) for v in op.operands]
        other = 0 if signs[1] is not None else 1
        sign, text = signs[1 - other], bare(operands[other])
        text = text if op.operands[other].dtype.name == "float32" else f"float({text})"
        if is_from_memory(op.operands[other]):
            return f"(as_type<uint>({text}) {SYMBOLS[op.kind]} {INFINITY_BITS[sign == 1]})"
        helper = self.use("is_highest" if sign == 1 else "is_lowest")
        return f"{'' if op.kind == 'eq' else '!'}{helper}(as_type<uint>({text}))"

    def cast(self, text: str, source: DType, target: DType) -> str:
        if source == target:
            return text
        if target.name == "bool":
            return f"({text} != {self.zero(source)})"
        if target.is_int and source.is_float:
            name = TYPES[target.name]
            least, most = target.limits
            limits = f"{name}({self.number(least, target)}), {name}({self.number(most, target)})"
            return f"{self.use('saturated')}<{name}>(float({text}), {float(least)!r}f, {float(most)!r}f, {limits})"
        if target.is_float and "float32" not in (target.name, source.name):
            return self.converted(f"float({text})", target)
        return self.converted(text, target)

    def identity(self, reduction: str, dtype: DType) -> str:
        """Return the identity element of a reduction."""
        if reduction == "sum":
            return self.number(0, dtype)
        if dtype.name == "bool":
            return "false" if reduction == "max" else "true"
        if dtype.is_int:
            least, most = dtype.limits
            return self.number(least if reduction == "max" else most, dtype)
        return self.number(-math.inf if reduction == "max" else math.inf, dtype)

    def combined(self, reduction: str, dtype: DType, a: str, b: str) -> str:
        """Return the reduction of two elements."""
        if dtype.name == "bool":  # & and | evaluate both sides, so lanes do not diverge around a shuffle
            return f"bool({a} | {b})" if reduction == "max" else f"bool({a} & {b})"
        if reduction == "sum":
            return f"({a} + {b})" if dtype.is_float else _wrapping("add", a, b, dtype)
        return f"{'f' if dtype.is_float else ''}{reduction}({a}, {b})"


def is_position(value: Value, depth: int = 12) -> bool:
    """True for an integer made of positions and lengths, which does not overflow."""
    op = value.op
    if op is None:
        return True
    if op.kind not in POSITIONAL or depth == 0 or not value.dtype.is_int:
        return False
    return all(is_position(v, depth - 1) for v in op.operands)


def _wrapping(kind: str, a: str, b: str, dtype: DType) -> str:
    """Return integer arithmetic that wraps around: signed overflow is undefined in Metal."""
    signed, unsigned = TYPES[dtype.name], UNSIGNED[dtype.name]
    if kind in SYMBOLS:
        return f"{signed}({unsigned}({a}) {SYMBOLS[kind]} {unsigned}({b}))"
    negated = f"{signed}(0 - {unsigned}({a}))"
    return negated if kind == "neg" else f"({a} < 0 ? {negated} : {a})"


def bare(text: str) -> str:
    """Return an expression without parentheses around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for n, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and n < len(text) - 1:
            return text
    return text[1:-1]
