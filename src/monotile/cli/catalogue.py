"""The library's kernels by name, for the command line: with the options of attention, and what a call would choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ..dtypes import DType, bool_, float32, uint8
from ..kernels import attention, decode, examples, mask_blocks, merge
from ..kernels.scores import Options
from ..launch.kernel import Kernel
from ..library import blocks as schedule

HEAD_SIZE, MASK_BLOCK = 128, 64
CAUSAL = {True: "lower_right", False: None}


@dataclass(frozen=True)
class Request:
    """What the command line says of the arguments: constants and scalars, shapes and element types."""

    values: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # by tensor; "" is for all others


@dataclass(frozen=True)
class Habits:
    """How a kernel of the library is called: tensors whose element type does not follow the others', and tensors that
    are left out unless a shape or an element type is given for them."""

    dtypes: Mapping[str, DType]
    optional: tuple[str, ...] = ()


STATE = {"o": float32, "m": float32, "l": float32}
LIBRARY: dict[Kernel, Habits] = {
    attention.attention: Habits(
        {"mask": bool_, "kinds": uint8, "sinks": float32, "lse": float32}, ("mask", "kinds", "sinks")
    ),
    decode.decode: Habits({"mask": bool_, "sinks": float32, "lse": float32, **STATE}, ("mask", "sinks", "out", "lse")),
    merge.merge: Habits({"sinks": float32, "lse": float32, **STATE}, ("sinks",)),
    merge.merge_lse: Habits({"lse": float32, "total": float32}),
    mask_blocks.mask_blocks: Habits({"mask": bool_, "kinds": uint8}),
}


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel that comes with monotile."""
    own = [item for item in vars(examples).values() if isinstance(item, Kernel)]
    return {kernel.name: kernel for kernel in (*LIBRARY, *own)}


def completed(kernel: Kernel, request: Request, backend: str) -> Request:
    """The request with what the library's functions would choose: options, block sizes, tensors that are left out."""
    habits = LIBRARY.get(kernel)
    if habits is None:
        return request
    given = {*request.shapes, *request.dtypes}
    values: dict[str, Any] = {name: None for name in habits.optional if name not in given}
    options = {n: v for n, v in request.values.items() if n in Options._fields}
    values |= {n: v for n, v in request.values.items() if n not in options}
    if "options" in kernel.const_names:
        if type(options.get("causal")) is bool:
            options["causal"] = CAUSAL[options["causal"]]
        values.setdefault("options", Options(**options))
    else:
        values |= options  # unknown to the kernel, which will say so
    element = request.dtypes.get("", float32)
    for name, value in _blocks(kernel, request, element, backend).items():
        values.setdefault(name, value)
    return replace(request, values=values, dtypes={**habits.dtypes, **request.dtypes})


def _blocks(kernel: Kernel, request: Request, element: DType, backend: str) -> dict[str, int | None]:
    """Head sizes and block sizes that are not given."""
    machine = {"nvidia": "gpu", "metal": "metal"}.get(backend, "cpu")
    if kernel is mask_blocks.mask_blocks:
        rows = int(request.values.get("BQ", MASK_BLOCK))
        return {"BQ": rows, "BK": MASK_BLOCK, "STRIP": schedule.mask_strip(rows, machine)}
    sizes: dict[str, int] = {}
    for name in ("D", "Dv"):
        shapes = [request.shapes[p.name][-1] for p in kernel.parameters if _ends_in(p.dims, name, request, p.name)]
        fallback = sizes.get("D", HEAD_SIZE)
        sizes[name] = int(request.values.get(name, shapes[0] if shapes else fallback))
    found: dict[str, int | None] = {name: size for name, size in sizes.items() if name in kernel.const_names}
    size = max(sizes.values())
    if kernel is attention.attention:
        found["BQ"], found["BK"] = schedule.attention_blocks(2**20, size, element.bytes, machine)
    elif kernel is decode.decode:
        found["BR"] = schedule.row_block(schedule.ROW_BLOCKS[-1], size, machine)
        found["BK"] = schedule.decode_block(size, element.bytes, machine)
    else:
        found["BS"], found["SPAN"] = schedule.merge_block(64, machine), schedule.merge_span(machine)
    return found


def _ends_in(dims: tuple[str | int, ...] | None, name: str, request: Request, tensor: str) -> bool:
    return bool(dims) and dims is not None and dims[-1] == name and bool(request.shapes.get(tensor))
