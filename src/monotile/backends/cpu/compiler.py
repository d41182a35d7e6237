"""Compile a kernel to LLVM IR: passes and lowering. Imported only for a kernel that is not in the disk cache."""

from __future__ import annotations

from ... import ir
from ...passes import pipeline
from ...passes.cse import dce
from ...passes.spread import spread
from .detach import detach, detach_streams
from .llvm import Host
from .lower import Lowered, lower
from .memory_sums import unshare_loads
from .target import target

# Nests check bounds themselves (nests.py), which costs less code than peeling another copy of a loop.
OPTIONS = pipeline.PipelineOptions(
    peel_bounds=False, keep_marks=True, early=(spread,), last=(detach, detach_streams, unshare_loads, dce)
)


def to_llvm(kernel: ir.Kernel, processor: Host) -> Lowered:
    """Lower a kernel to LLVM IR for a processor."""
    kernel = ir.copy(kernel)
    pipeline.run(kernel, OPTIONS)
    return lower(kernel, target(processor), processor.triple)
