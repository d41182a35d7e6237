"""Manifest entries that all targets share: tensors with symbolic lengths, launch words, constants, the grid.

A manifest is read by programs that know nothing of monotile, so everything in it is a number, a name or an expression.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

from ..dtypes import DType
from ..errors import DeviceLimit
from ..ir import Kernel, Op, Tensor, Value, walk
from ..passes.grid import Grid

Entry = dict[str, Any]

MEANINGS = {
    "address": "where the tensor's first element lies in memory",
    "offset": "elements from the start of the buffer to the tensor's first element; 0 unless a stride is negative",
    "length": "of the tensor along the axis",
    "stride": "elements from one position to the next along the axis; may be 0 or negative",
    "descriptor": "a TensorDescriptor of triton.experimental.gluon.nvidia.hopper over the whole tensor, with blocks of "
    "this shape and NVMMASharedLayout(swizzle_bytes, element_bits, rank)",
    "tiles_per_cta": "how many output tiles each consumer of a CTA computes, 1 or more; it divides the grid",
    "scalar": "the kernel's parameter of this name",
    "grid": "how many programs or threadgroups to launch: whole numbers, lengths by symbol and scalars by name, "
    "+ - * // (rounded down) %, min and max; a launch of 0 is to be left out",
    "relations": "must hold between lengths and scalars, in the terms of `grid` and == >= <=; nothing checks them",
    "chains": "launches that make one result, in order; each binds the chain's tensors, which are packed arrays (the "
    "last axis is contiguous), as tensors of the given shape. Shapes, scalars and defaults are in the terms of `grid`, "
    "over the symbols of the chain's inputs and its scalars. A temporary is memory that the launcher provides",
    "codes": "what the numbers in a tensor mean. Of a block map: in a hidden block no key is visible, in a full one "
    "every key is, to every row, and nothing is added, in a partial one something is hidden or added; a covered block "
    "is partial, and every key in it is visible to some row. Partial may stand for covered, which saves work",
    "math_modes": "of Metal's compiler in which the text is right",
    "language_version": "of Metal, the least that has the types of the text",
    "registers_per_thread": "of 32 bits, by a model that reads the text: the variables that are live at once, and 16 "
    "for addresses and expressions. A lane has 128; what Metal's compiler allocates may differ",
    "threadgroups_per_core": "that the model's registers, 208 KiB on a core, and 60 KiB of threadgroup memory let live "
    "at once",
    "strides": "null where any stride will do; a number is compiled in, and the array must have it",
}
BINARY = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
CALLS = {"min": "min", "max": "max"}


class Symbols:
    """Names for the lengths of tensors. A length the author did not name gets a generated name."""

    def __init__(self, kernel: Kernel) -> None:
        self.taken = {d for t in kernel.tensors for d in t.dims if isinstance(d, str) and d.isidentifier()}
        self.taken |= {name for name, _ in kernel.scalars}
        self.generated: dict[str, str] = {}

    def name(self, dim: str | int) -> str | int:
        if isinstance(dim, int) or dim.isidentifier():
            return dim
        if dim not in self.generated:
            name = dim.replace(".", "_dim")
            while name in self.taken:
                name += "_"
            self.taken.add(name)
            self.generated[dim] = name
        return self.generated[dim]

    def shape(self, tensor: Tensor) -> list[str | int]:
        return [self.name(dim) for dim in tensor.dims]


def tensor_entry(kernel: Kernel, tensor: Tensor, symbols: Symbols) -> Entry:
    """Describe a tensor argument: its shape, and the strides it must have."""
    strides: list[int | None] = list(tensor.strides) or [None] * tensor.rank
    if tensor.unit is not None:
        strides[tensor.unit] = 1
    shape, role = symbols.shape(tensor), _role(kernel, tensor)
    return {"name": tensor.name, "role": role, "dtype": tensor.dtype.name, "shape": shape, "strides": strides}


def _role(kernel: Kernel, tensor: Tensor) -> str:
    if tensor.index not in kernel.written:
        return "input"
    read = any(op.kind in ("load", "gather") and op.attrs["tensor"] == tensor for op in walk(kernel.body))
    return "input and output" if read else "output"


def word(meaning: str, tensor: Tensor, axis: int | None = None) -> Entry:
    return {"meaning": meaning, "tensor": tensor.name} | ({} if axis is None else {"axis": axis})


def scalar(name: str) -> Entry:
    return {"meaning": "scalar", "name": name}


def constants(kernel: Kernel) -> Entry:
    return {name: plain(value) for name, value in kernel.consts.items()}


def plain(value: Any) -> Any:
    """Convert a compile-time value to JSON: functions and element types by name, named tuples by field."""
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, float) and math.isinf(value):
        return str(value)  # JSON has no infinity
    if isinstance(value, tuple):
        fields: Iterable[str] | None = getattr(value, "_fields", None)
        return {n: plain(v) for n, v in zip(fields, value, strict=True)} if fields else [plain(v) for v in value]
    return value


def programs(kernel: Kernel, symbols: Symbols, together: str = "") -> str:
    """Return the number of programs of a launch as an expression of lengths and scalars. `together` programs that
    differ in their last position only are launched as one."""
    grid = Grid(kernel)
    texts: dict[Value, str] = {}
    for op in grid.ops:
        texts[op.result] = _expression(op, texts, symbols)
    sizes = [texts[v] if _is_nonnegative(v) else f"max(0, {texts[v]})" for v in grid.sizes]
    if sizes and together:
        sizes[-1] = f"(({sizes[-1]} + {together} - 1) // {together})"
    return " * ".join(sizes) or "1"


def _expression(op: Op, texts: dict[Value, str], symbols: Symbols) -> str:
    operands = [texts[v] for v in op.operands]
    if op.kind == "const" and not op.result.dtype.is_float:
        return str(int(op.attrs["value"]))
    if op.kind == "dim":
        return str(symbols.name(op.attrs["tensor"].dims[op.attrs["axis"]]))
    if op.kind == "param" and not op.result.dtype.is_float:
        return str(op.attrs["name"])
    if op.kind == "cast" and op.result.dtype.is_int and not op.operands[0].dtype.is_float:
        return operands[0]
    if op.kind in BINARY:
        return f"({operands[0]} {BINARY[op.kind]} {operands[1]})"
    if op.kind in CALLS:
        return f"{CALLS[op.kind]}({operands[0]}, {operands[1]})"
    raise DeviceLimit(f"the grid's size needs {op.kind!r}, which a manifest cannot say; compute it before the launch")


def _is_nonnegative(size: Value) -> bool:
    """Return True for a length or a length divided into blocks, which are never negative."""
    op = size.op
    if op is None:
        return False
    if op.kind in ("dim", "const"):
        return op.kind == "dim" or op.attrs["value"] >= 0
    return op.kind in ("add", "mul", "floordiv") and all(_is_nonnegative(v) for v in op.operands)
