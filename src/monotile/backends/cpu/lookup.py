"""Lookup tables: permutations of registers where the processor has them, else loads from a constant in memory."""

from __future__ import annotations

from ...ir import Op
from ...ir.intervals import interval
from .emit import Emitter, Reg, float_literal

PAIR = 32  # entries that VPERMI2PS chooses from
FEW = 32  # entries up to which permutations of 8 and choices among them beat loads


def lookup(e: Emitter, op: Op, index: Reg) -> Reg:
    """Look up the table of an op; positions outside of it give 0."""
    table, kind = op.attrs["table"], "float" if op.result.dtype.is_float else "i32"
    low, high = interval(op.operands[0])
    inside = None
    if low < 0 or high >= len(table):
        inside = e.binary("icmp ult", index, e.number(len(table), "i32"), "i1")
        index = e.select(inside, index, e.number(0, "i32"))
    if index.vector and e.has_scalef and e.lanes == 16:
        found = _chosen(e, table, kind, index, PAIR)
    elif index.vector and e.lanes == 8 and len(table) <= FEW:  # AVX2
        found = _chosen(e, table, kind, index, e.lanes)
    else:
        found = _loaded(e, table, kind, index)
    return found if inside is None else e.select(inside, found, e.number(0, kind))


def _chosen(e: Emitter, table: tuple[float, ...], kind: str, index: Reg, size: int) -> Reg:
    """Permute parts of the table in registers, and choose among the parts by the upper bits of the index."""
    parts = [_permuted(e, table[n : n + size], kind, index) for n in range(0, len(table), size)]
    while len(parts) > 1:
        bit = e.binary("and", index, e.number(size, "i32"))
        upper = e.binary("icmp ne", bit, e.number(0, "i32"), "i1")
        pairs = [parts[n : n + 2] for n in range(0, len(parts), 2)]
        parts = [e.select(upper, pair[1], pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        size *= 2
    return parts[0]


def _permuted(e: Emitter, entries: tuple[float, ...], kind: str, index: Reg) -> Reg:
    vector, places = e.vector_type(kind), e.vector_type("i32")
    if e.lanes == 8:
        name = f"llvm.x86.avx2.perm{'ps' if kind == 'float' else 'd'}"
        return Reg(e.call(vector, name, (vector, _vector(e, entries, kind)), (places, index.text)), kind, True)
    name = f"llvm.x86.avx512.vpermi2var.{'ps' if kind == 'float' else 'd'}.512"
    low, high = (_vector(e, entries[n : n + 16], kind) for n in (0, 16))
    return Reg(e.call(vector, name, (vector, low), (places, index.text), (vector, high)), kind, True)


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
