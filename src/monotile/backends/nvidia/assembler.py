"""Which of Triton's two ptxas assembles a kernel.

ptxas 12.8, Triton 3.6's for GPUs before sm_100, builds some descriptors of wgmma operands from a wrong register where
two tiles have one address in shared memory, as K and V have in loops that are not pipelined: the instruction then reads
outside shared memory (tests/backends/wgmma_descriptors.py finds such code). 12.9, which Triton brings for sm_100, does
not. It assembles plain modules with wgmma for sm_90; in Gluon modules all tiles have addresses of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...ir import Kernel, walk

WRONG_VERSION = "12.8"
PTX_VERSION = 87  # of 12.8; an option, so that what was assembled by either is not taken for the other's
WGMMA_ROWS = 64


def needs_other(kernel: Kernel, architecture: str) -> bool:
    """Return True if a plain module of a kernel has wgmma."""
    dots = [op.operands[0] for op in walk(kernel.body) if op.kind == "dot"]
    return architecture == "sm_90" and any(left.dtype.bytes < 4 and left.shape[0] >= WGMMA_ROWS for left in dots)


@contextlib.contextmanager
def chosen(*, other: bool) -> Iterator[dict[str, Any]]:
    """Let Triton use the other ptxas, if asked to and if its usual one is the wrong version; yield options to compile
    with."""
    knobs = _knobs() if other else None
    if knobs is None or knobs.ptxas.version != WRONG_VERSION or knobs.ptxas_blackwell.version == WRONG_VERSION:
        yield {}
        return
    with knobs.scope():
        knobs.__dict__["ptxas"] = knobs.ptxas_blackwell.path
        yield {"ptx_version": PTX_VERSION}


def _knobs() -> Any:
    """Return Triton's settings; None where this Triton has one ptxas."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.nvidia if "ptxas_blackwell" in vars(type(knobs.nvidia)) else None
