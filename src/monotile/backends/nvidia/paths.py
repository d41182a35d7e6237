"""Which of the two modules a kernel runs as: Gluon with producer and consumer warps, or plain Triton.

A schedule asks for Gluon with `consumers`. The kernel runs so if this Triton's Gluon is one the text was written for,
the GPU has Hopper's matrix instructions, and the kernel has a form that the producer warp can feed
(`gluon.pipeline.analyse`). Otherwise it runs as plain Triton with the rule's schedule, and the path says why. One
reason is known only at a launch: TMA cannot describe every stride and address. Such a call runs as plain Triton, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Kernel
from .gluon import module as gluon
from .gluon.pipeline import Streams
from .schedule import Schedule, choose
from .triton.descriptors import ALIGNMENT
from .triton.render import Rendered
from .triton.render import render as render_triton

GLUON_ARCHITECTURE = "sm_90"
AT_LAUNCH = (
    f"a call runs as plain Triton with the rule's schedule where TMA cannot describe an operand: its address and its "
    f"strides must be multiples of {ALIGNMENT} bytes, its last dimension contiguous and no dimension empty"
)


@dataclass(frozen=True)
class Path:
    """The module that launches run, wherever descriptors can be made."""

    schedule: Schedule  # of this module: the rule's where another was asked for and cannot be had
    pipeline: Streams | None  # None for plain Triton
    why_plain: str = ""  # a sentence

    @property
    def name(self) -> str:
        return "triton" if self.pipeline is None else "gluon"

    def render(self, kernel: Kernel, *, wide: bool = False, emulate: bool = False) -> Rendered:
        if self.pipeline is not None:
            return gluon.render(kernel, self.schedule, self.pipeline, wide=wide)
        return render_triton(kernel, self.schedule, wide=wide, emulate=emulate)


def select(
    kernel: Kernel, schedule: Schedule | None, architecture: str = GLUON_ARCHITECTURE, *, interpreted: bool = False
) -> Path:
    """Return the path of a kernel after the passes. `interpreted`: Triton runs it in Python."""
    if schedule is None or not schedule.programs:
        why = "The schedule does not ask for producer and consumer warps (programs=0)."
        return Path(schedule or choose(kernel), None, why)
    if interpreted:
        return Path(choose(kernel), None, "Triton's interpreter (TRITON_INTERPRET=1) does not run Gluon.")
    why = _why_no_gluon(architecture)
    if why:
        return Path(choose(kernel), None, why)
    found = gluon.streams_of(kernel)
    return Path(choose(kernel), None, found) if isinstance(found, str) else Path(schedule, found)


def _why_no_gluon(architecture: str) -> str:
    """Say why Gluon cannot be used, whatever the kernel; nothing where it can."""
    if not gluon.known():
        versions = " and ".join(version.rstrip(".") for version in gluon.VERSIONS)
        found = f"this is Triton {gluon.version()}" if gluon.version() else "Triton is not installed"
        return f"The Gluon text was written for Triton {versions}, and {found}; Gluon changes from version to version."
    if architecture != GLUON_ARCHITECTURE:
        return (
            f"The Gluon module uses Hopper's wgmma, which {architecture} does not have; it is for {GLUON_ARCHITECTURE}."
        )
    return ""


def explain(kernel: Kernel, schedule: Schedule | None, architecture: str = GLUON_ARCHITECTURE) -> list[str]:
    """Say in a few lines which schedule and which path a launch gets, and why."""
    path = select(kernel, schedule, architecture)
    asked = f"schedule: {schedule.words}" if schedule is not None else f"schedule: {path.schedule.words}, by the rule"
    if path.pipeline is not None:
        warps, consumers = path.schedule.num_warps, path.schedule.programs
        groups = f"{consumers} consumer group{'s' if consumers > 1 else ''} of {warps} warps"
        fallback = f"at launch: {AT_LAUNCH}; that is {choose(kernel).words}"
        return [asked, f"path: Gluon for {architecture}, one producer warp and {groups}", fallback]
    lines = [asked, f"path: plain Triton for {architecture}", f"why: {path.why_plain}"]
    if schedule is not None and schedule != path.schedule:
        lines[1] += f" with the rule's schedule: {path.schedule.words}"
    if schedule is None or not schedule.programs:
        found = _why_no_gluon(architecture) or gluon.streams_of(kernel)
        lines.append(
            f"with consumers: still plain. {found}"
            if isinstance(found, str)
            else "with consumers: the kernel can run as Gluon"
        )
    if path.schedule.tensor_descriptors:
        lines.append("at launch: pointers take the place of descriptors where TMA cannot describe an operand")
    return lines
