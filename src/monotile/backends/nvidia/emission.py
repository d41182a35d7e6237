"""A Triton or Gluon module for programs that know nothing of monotile. It is right for every length: offsets are wide,
and a plain module expects no tensor to be aligned. What a Gluon module expects is in its manifest entry."""

from __future__ import annotations

from typing import Any

from ...ir import Kernel
from .. import manifest
from ..base import Emitted
from .gluon import module as gluon
from .gluon import persistent
from .paths import GLUON_ARCHITECTURE, Path
from .triton.descriptors import ALIGNMENT, Described, copied, swizzle_bytes
from .triton.memory import Argument


def emitted(kernel: Kernel, path: Path) -> Emitted:
    """Return the path's module and its manifest entry."""
    rendered = path.render(kernel, wide=True)
    symbols = manifest.Symbols(kernel)
    file = f"{kernel.name}.py"
    descriptors = [_descriptor(kernel, tile) for tile in rendered.described if tile.sides]
    entry = {
        "name": rendered.name,
        "file": file,
        "constants": manifest.constants(kernel),
        "tensors": [manifest.tensor_entry(kernel, tensor, symbols) for tensor in kernel.tensors],
        "arguments": [*descriptors, *({"name": a.name, **_meaning(kernel, a)} for a in rendered.arguments)],
        "grid": [manifest.programs(kernel, symbols, _tiles_per_cta(path)), "1", "1"],
        "options": path.schedule.options,
        "path": path.name,
    }
    entry |= {"requires": REQUIRES} if path.pipeline is not None else {"why": path.why_plain}
    return Emitted({file: rendered.source.encode()}, entry)


REQUIRES = {
    "architecture": GLUON_ARCHITECTURE,
    "triton": [version.rstrip(".") for version in gluon.VERSIONS],
    "descriptors": f"addresses and strides that are multiples of {ALIGNMENT} bytes, a contiguous last dimension, "
    "no empty dimension",
}


def _descriptor(kernel: Kernel, tile: Described) -> manifest.Entry:
    """Say how to make a descriptor that the host passes."""
    tensor = kernel.tensors[tile.index]
    layout = {"swizzle_bytes": swizzle_bytes(tile), "element_bits": 8 * tile.bytes, "rank": len(tile.sides)}
    made = {"dtype": copied(tensor.dtype).name, "block": list(tile.sides), "layout": layout}
    return {"name": f"{tensor.name}_tiles", **manifest.word("descriptor", tensor), **made}


def _tiles_per_cta(path: Path) -> str:
    """Return how many places of the grid's last size a CTA takes, as the grid's expression has it."""
    if path.pipeline is None:
        return ""
    consumers = path.schedule.programs
    return f"({consumers} * {persistent.ARGUMENT})" if path.schedule.laps else str(consumers)


def _meaning(kernel: Kernel, argument: Argument) -> dict[str, Any]:
    """Say what to pass for a parameter of the Triton function."""
    if argument.kind == "pointer":
        return manifest.word("address", kernel.tensors[argument.index])
    if argument.kind == persistent.ARGUMENT:
        return {"meaning": "tiles_per_cta"}
    if argument.kind == "scalar":
        name, dtype = kernel.scalars[argument.index]
        return manifest.scalar(name) | {"dtype": dtype.name}
    first = 0
    for tensor in kernel.tensors:
        at = argument.index - first - 1
        if at < 2 * tensor.rank:
            return manifest.word("length" if at < tensor.rank else "stride", tensor, at % tensor.rank)
        first += 1 + 2 * tensor.rank
    raise AssertionError(argument)
