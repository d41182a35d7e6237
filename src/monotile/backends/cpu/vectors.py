"""Vectors in memory: element types, masked and scattered access, conversion between memory and registers.

Registers hold every float as float32 and every small integer as int32; loads and stores of a tensor convert.
"""

from __future__ import annotations

from ...dtypes import FP8, DType
from . import fp8
from .emit import Emitter, Index, Reg

# The LLVM type of an element in memory.
STORED = {
    "float32": "float", "float16": "half", "bfloat16": "i16", "int64": "i64", "int32": "i32", "uint32": "i32",
    "int8": "i8", "uint8": "i8", "float8_e4m3fn": "i8", "float8_e5m2": "i8", "bool": "i8",
}  # fmt: skip
BYTES = {"float": 4, "half": 2, "i16": 2, "i64": 8, "i32": 4, "i8": 1}


def register_type(dtype: DType) -> str:
    if dtype.is_float:
        return "float"
    return "i1" if dtype.kind == "bool" else "i64" if dtype.bits == 64 else "i32"


def lane_mask(e: Emitter, valid: int | None) -> str:
    bits = [i < (e.lanes if valid is None else valid) for i in range(e.lanes)]
    return "<" + ", ".join(f"i1 {str(b).lower()}" for b in bits) + ">"


def _pointers(e: Emitter, pointer: str, stride: Index, element: str) -> str:
    lanes = e.vector_type("i64")
    steps = e.op(
        f"mul {lanes} <{', '.join(f'i64 {i}' for i in range(e.lanes))}>, {e.splat(Reg(str(stride), 'i64')).text}"
    )
    return e.op(f"getelementptr {element}, ptr {pointer}, {lanes} {steps}")


def suffix(e: Emitter, element: str) -> str:
    return f"v{e.lanes}{ {'float': 'f32', 'half': 'f16'}.get(element, element) }"


def gather(e: Emitter, pointer: str, stride: Index, element: str, mask: str) -> str:
    return gather_at(e, _pointers(e, pointer, stride, element), element, mask)


def gather_at(e: Emitter, pointers: str, element: str, mask: str) -> str:
    kind, masks, addresses = e.vector_type(element), e.vector_type("i1"), e.vector_type("ptr")
    name = f"llvm.masked.gather.{suffix(e, element)}.v{e.lanes}p0"
    args = ((addresses, pointers), ("i32", str(BYTES[element])), (masks, mask), (kind, "zeroinitializer"))
    return e.call(kind, name, *args)


def scatter(e: Emitter, value: str, pointer: str, stride: Index, element: str, mask: str) -> None:
    scatter_at(e, value, _pointers(e, pointer, stride, element), element, mask)


def scatter_at(e: Emitter, value: str, pointers: str, element: str, mask: str) -> None:
    kind, masks, addresses = e.vector_type(element), e.vector_type("i1"), e.vector_type("ptr")
    name = f"llvm.masked.scatter.{suffix(e, element)}.v{e.lanes}p0"
    e.call("void", name, (kind, value), (addresses, pointers), ("i32", str(BYTES[element])), (masks, mask))


def masked_load(e: Emitter, pointer: str, element: str, mask: str) -> str:
    kind = e.vector_type(element)
    if element == "i64":
        mask = _unknown(e, mask)
    args = (("ptr", pointer), ("i32", str(BYTES[element])), (e.vector_type("i1"), mask), (kind, "zeroinitializer"))
    return e.call(kind, f"llvm.masked.load.{suffix(e, element)}.p0", *args)


def masked_store(e: Emitter, value: str, pointer: str, element: str, mask: str) -> None:
    if element in ("i8", "i16", "i32", "i64"):
        mask = _unknown(e, mask)
    args = (
        (e.vector_type(element), value),
        ("ptr", pointer),
        ("i32", str(BYTES[element])),
        (e.vector_type("i1"), mask),
    )
    e.call("void", f"llvm.masked.store.{suffix(e, element)}.p0", *args)


def _unknown(e: Emitter, mask: str) -> str:
    """Return a mask of which the optimiser knows no lane, be it set or not. If LLVM 22 knows that one lane is set, it
    turns a masked store of truncated integers into a store of the wide integer, which overwrites the bytes behind it.
    If it knows half the lanes of a vector of int64, which it divides, an assertion of its own may end the process."""
    return e.op(f"xor {e.vector_type('i1')} {mask}, {_no_lane(e)}")


def _no_lane(e: Emitter) -> str:
    """Return a mask of no lane that the optimiser does not know: the entry block loads it from memory."""
    lines = [
        "  %zeros = load volatile i16, ptr @zero",
        f"  %few = trunc i16 %zeros to i{e.lanes}",
        f"  %none = bitcast i{e.lanes} {'%zeros' if e.lanes == 16 else '%few'} to {e.vector_type('i1')}",
    ]
    if lines[0] not in e.entry:
        e.entry += [line for line in lines if e.lanes < 16 or "%few =" not in line]
    return "%none"


# ---- conversion between memory and registers -------------------------------------------------------------------------


def decode(e: Emitter, dtype: DType, raw: Reg) -> Reg:
    """Convert a tensor's element to a register value."""
    if dtype.name == "bfloat16":
        wide = e.binary("shl", e.convert("zext", raw, "i32"), e.number(16, "i32"))
        return e.convert("bitcast", wide, "float")
    if dtype.name == "float16":
        return e.convert("fpext", raw, "float")
    if dtype.name == "bool":
        zero = Reg("zeroinitializer" if raw.vector else "0", "i8", raw.vector)
        return e.binary("icmp ne", raw, zero, "i1")
    if dtype in FP8:
        return fp8.decode(e, dtype, raw)
    if dtype.bits == 8:
        return e.convert("zext" if dtype.name == "uint8" else "sext", raw, "i32")
    return raw


def encode(e: Emitter, dtype: DType, value: Reg) -> Reg:
    """Convert a register value to a tensor's element. It is representable: a cast came before the store."""
    if dtype.name == "bfloat16":
        bits = e.convert("bitcast", value, "i32")
        return e.convert("trunc", e.binary("lshr", bits, e.number(16, "i32")), "i16")
    if dtype.name == "float16":
        return e.convert("fptrunc", value, "half")
    if dtype.name == "bool":
        return e.convert("zext", value, "i8")
    if dtype in FP8:
        return e.convert("trunc", fp8.encode(e, dtype, value), "i8")
    return e.convert("trunc", value, "i8") if dtype.bits == 8 else value
