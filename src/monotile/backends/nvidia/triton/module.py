"""A kernel as a plain Triton module."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir import Kernel
from ....passes.grid import Grid
from ..schedule import Schedule
from .descriptors import DescribedTensor
from .functions import sources
from .masked_loads import masked_loads
from .memory import FunctionArgument
from .renderer import TritonRenderer
from .text import TRITON, SourceLines, function_name
from .unpacking import FP8_CAPABLE, unpackings

ARGUMENT_ORDER = ("pointer", "dim", "stride", "scalar", "tiles_per_cta")


@dataclass(frozen=True)
class TritonSource:
    """A Triton or Gluon module and how to call its function."""

    name: str
    text: str
    arguments: tuple[FunctionArgument, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]  # see Memory.spans
    grid: Grid
    described: tuple[DescribedTensor, ...]  # the tensors that have descriptors


def render_triton(
    kernel: Kernel, schedule: Schedule, *, wide: bool = False, emulate: bool = False, capability: int = 90
) -> TritonSource:
    """Write a kernel that has been through the passes. `wide`: tiles whose strides are not known may span more than
    2^31 elements. `emulate`: for Triton's interpreter, which does not compute with bfloat16."""
    name = function_name(kernel, repr((schedule, wide, emulate, *([capability] if capability < FP8_CAPABLE else []))))
    writer = TritonRenderer(kernel, schedule, wide=wide, emulate=emulate)
    if not schedule.tensor_descriptors:
        writer.masked_loads = masked_loads(kernel, writer.uses)
    if not emulate:
        writer.unpackings = unpackings(kernel, writer.uses, 32 * schedule.num_warps, capability)
    writer.block(kernel.body)
    arguments = tuple(sorted(writer.memory.arguments.values(), key=lambda a: ARGUMENT_ORDER.index(a.kind)))
    aligned = writer.memory.aligned
    fixed = [a.name for a in arguments if a.kind == "scalar" or (a.kind == "dim" and a.name not in aligned)]
    top = SourceLines()
    dependent = _dependent_launch(schedule) if not emulate else []
    for call in dependent:
        top.add(f"{call}()")
    for argument in arguments:
        if argument.name in aligned:
            top.add(f"{argument.name} = tl.cast({argument.name}, tl.int32)  # also where Triton knows it to be 1")
    for side, iota in sorted(writer.memory.iotas.items()):
        top.add(f"{iota} = tl.arange(0, {side})")
    for line in writer.descriptors.lines:
        top.add(line)
    text = "\n".join(top.lines + writer.lines.lines or ["    pass"])
    parameters = ",\n    ".join(a.name for a in arguments)
    head = f"@triton.jit\ndef {name}():"
    if arguments:
        head = f"@triton.jit(do_not_specialize={fixed!r})\ndef {name}(\n    {parameters},\n):"
    title = f'"""{kernel.name}, made by monotile for Triton; {schedule}."""'
    imports = "import triton\nimport triton.language as tl\n"
    if dependent:
        imports += f"from triton.language.extra.cuda import {', '.join(DEPENDENT_LAUNCH)}\n"
    source = "\n\n".join([f"{title}\n\n{imports}", *sources(writer.helpers, TRITON), f"{head}\n{text}\n"])
    spans = tuple(tuple(r) for r in writer.memory.spans if r)
    return TritonSource(name, source, arguments, spans, Grid(kernel), tuple(writer.descriptors.described.values()))


# Programmatic dependent launch: wait for the launch before, let the launch behind begin.
DEPENDENT_LAUNCH = ("gdc_wait", "gdc_launch_dependents")


def _dependent_launch(schedule: Schedule) -> list[str]:
    asked = (schedule.waits_for_previous, schedule.triggers_dependents)
    return [call for call, wanted in zip(DEPENDENT_LAUNCH, asked, strict=True) if wanted]
