"""Passes and lowering: what a kernel needs that is not in the disk cache. Loaded only then."""

from __future__ import annotations

from ... import ir
from ...passes import pipeline
from .detach import detach
from .host import Host
from .lower import Lowered, lower
from .target import target

# The kernel cuts loops at edges itself, nest by nest, which costs less code than another copy of a loop.
OPTIONS = pipeline.PipelineOptions(peel_bounds=False, keep_marks=True, last=(detach,))


def to_llvm(kernel: ir.Kernel, processor: Host) -> Lowered:
    """Lower a kernel to LLVM IR for a processor."""
    kernel = ir.copy(kernel)
    pipeline.run(kernel, OPTIONS)
    return lower(kernel, target(processor), processor.triple)
