"""A Triton or Gluon module for programs that know nothing of monotile. It is right for every length: offsets are wide,
and tensors need not be aligned, except where descriptors need it: then the manifest entry says so."""

from __future__ import annotations

from typing import Any

from ...ir import Kernel
from .. import manifest
from ..base import Emitted
from . import assembler
from .gluon import persistent, support
from .paths import LaunchPath
from .triton.descriptors import ALIGNMENT, DescribedTensor, copied_dtype, swizzle_bytes
from .triton.memory import FunctionArgument


def emitted(kernel: Kernel, path: LaunchPath) -> Emitted:
    """Return the path's module and its manifest entry."""
    source = path.render(kernel, wide=True)
    symbols = manifest.Symbols(kernel)
    file = f"{kernel.name}.py"
    descriptors = [_descriptor(kernel, tensor) for tensor in source.described if tensor.block]
    entry = {
        "name": source.name,
        "file": file,
        "constants": manifest.constants(kernel),
        "tensors": [manifest.tensor_entry(kernel, tensor, symbols) for tensor in kernel.tensors],
        "arguments": [*descriptors, *({"name": a.name, **_meaning(kernel, a)} for a in source.arguments)],
        "grid": [manifest.programs(kernel, symbols, _tiles_per_cta(path)), "1", "1"],
        "options": path.schedule.options,
        "path": path.name,
    }
    requires = (GLUON_REQUIRES if path.pipeline is not None else TRITON_REQUIRES) if source.described else {}
    if path.pipeline is None and assembler.needs_other(kernel, support.ARCHITECTURE):
        requires = requires | ASSEMBLER_REQUIRES
    if requires:
        entry["requires"] = requires
    entry |= {"why": path.why_plain} if path.pipeline is None else {}
    return Emitted({file: source.text.encode()}, entry)


DESCRIBED = f"addresses and strides that are multiples of {ALIGNMENT} bytes, a contiguous last dimension, none empty"
TRITON_REQUIRES = {"descriptors": DESCRIBED, "allocator": "triton.set_allocator: the kernel makes its descriptors"}
ASSEMBLER_REQUIRES = {"ptxas": f"on {support.ARCHITECTURE} not {assembler.WRONG_VERSION}, which makes wrong code of it"}
GLUON_REQUIRES = {
    "architecture": support.ARCHITECTURE,
    "triton": list(support.VERSIONS),
    "descriptors": DESCRIBED,
}


def _descriptor(kernel: Kernel, described: DescribedTensor) -> manifest.Entry:
    """Say how to make a descriptor that the host passes."""
    tensor, block = kernel.tensors[described.index], described.block
    layout = {"swizzle_bytes": swizzle_bytes(described), "element_bits": 8 * described.bytes, "rank": len(block)}
    made = {"dtype": copied_dtype(tensor.dtype).name, "block": list(block), "layout": layout}
    return {"name": described.parameter, **manifest.word("descriptor", tensor), **made}


def _tiles_per_cta(path: LaunchPath) -> str:
    """Return how many places of the grid's last size a CTA takes, as the grid's expression has it."""
    if path.pipeline is None:
        return ""
    consumers = path.schedule.consumers
    return f"({consumers} * {persistent.ARGUMENT})" if path.schedule.persistent else str(consumers)


def _meaning(kernel: Kernel, argument: FunctionArgument) -> dict[str, Any]:
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
