"""Lookup tables: permutations of registers where the processor has them, else loads from a constant in memory."""

from __future__ import annotations

from ...ir import Op
from ...ir.intervals import interval
from .emit import Emitter, Reg, float_literal

PAIR = 32  # entries that VPERMI2PS chooses from


def lookup(e: Emitter, op: Op, index: Reg) -> Reg:
    """Look up the table of an op; positions outside of it give 0."""
    table, kind = op.attrs["table"], "float" if op.result.dtype.is_float else "i32"
    low, high = interval(op.operands[0])
    inside = None
    if low < 0 or high >= len(table):
        inside = e.binary("icmp ult", index, e.number(len(table), "i32"), "i1")
        index = e.select(inside, index, e.number(0, "i32"))
    if index.vector and e.has_scalef and e.lanes == 16:
        found = _permuted(e, table, kind, index)
    else:
        found = _loaded(e, table, kind, index)
    return found if inside is None else e.select(inside, found, e.number(0, kind))


def _permuted(e: Emitter, table: tuple[float, ...], kind: str, index: Reg) -> Reg:
    """Permute pairs of registers, and choose among the pairs by the upper bits of the index."""
    vector, suffix = e.vector_type(kind), "ps" if kind == "float" else "d"
    size = PAIR
    parts = []
    for first in range(0, len(table), PAIR):
        a, b = (_vector(e, table[first + n : first + n + 16], kind) for n in (0, 16))
        name = f"llvm.x86.avx512.vpermi2var.{suffix}.512"
        text = e.call(vector, name, (vector, a), (e.vector_type("i32"), index.text), (vector, b))
        parts.append(Reg(text, kind, True))
    while len(parts) > 1:
        bit = e.binary("and", index, e.number(size, "i32"))
        upper = e.binary("icmp ne", bit, e.number(0, "i32"), "i1")
        pairs = [parts[n : n + 2] for n in range(0, len(parts), 2)]
        parts = [e.select(upper, pair[1], pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        size *= 2
    return parts[0]


def _loaded(e: Emitter, table: tuple[float, ...], kind: str, index: Reg) -> Reg:
    text = ", ".join(f"{kind} {_literal(x, kind)}" for x in table)
    name = e.constant(f"[{len(table)} x {kind}] [{text}]")
    if not index.vector:
        pointer = e.op(f"getelementptr {kind}, ptr {name}, i32 {index.text}")
        return Reg(e.load(pointer, kind, 4), kind)
    whole, result = e.vector_type(kind), "poison"
    for lane in range(e.lanes):
        at = e.op(f"extractelement {e.vector_type('i32')} {index.text}, i64 {lane}")
        element = e.load(e.op(f"getelementptr {kind}, ptr {name}, i32 {at}"), kind, 4)
        result = e.op(f"insertelement {whole} {result}, {kind} {element}, i64 {lane}")
    return Reg(result, kind, True)


def _vector(e: Emitter, entries: tuple[float, ...], kind: str) -> str:
    padded = [*entries, *[0] * (e.lanes - len(entries))]
    return "<" + ", ".join(f"{kind} {_literal(x, kind)}" for x in padded) + ">"


def _literal(value: float, kind: str) -> str:
    return float_literal(value) if kind == "float" else str(value)
