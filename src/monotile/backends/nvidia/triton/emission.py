"""A Triton module for programs that know nothing of monotile. It is right for every length: offsets are wide, and no
tensor is expected to be aligned."""

from __future__ import annotations

from ....ir import Kernel
from ... import manifest
from ...base import Emitted
from ..schedule import Schedule
from .memory import Argument
from .render import render


def emitted(kernel: Kernel, schedule: Schedule) -> Emitted:
    rendered = render(kernel, schedule, wide=True)
    symbols = manifest.Symbols(kernel)
    file = f"{kernel.name}.py"
    entry = {
        "name": rendered.name,
        "file": file,
        "constants": manifest.constants(kernel),
        "tensors": [manifest.tensor_entry(kernel, tensor, symbols) for tensor in kernel.tensors],
        "arguments": [{"name": a.name, **_meaning(kernel, a)} for a in rendered.arguments],
        "grid": [manifest.programs(kernel, symbols), "1", "1"],
        "options": schedule.options,
    }
    return Emitted({file: rendered.source.encode()}, entry)


def _meaning(kernel: Kernel, argument: Argument) -> manifest.Entry:
    """What to pass for a parameter of the Triton function."""
    if argument.kind == "pointer":
        return manifest.word("address", kernel.tensors[argument.index])
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
